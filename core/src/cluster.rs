//! Cluster: the devices, links and model of a scenario, with a profile in place of each reference.

use std::borrow::Cow;
use std::sync::Arc;

use hearth_profiles::link::wifi::Wifi;
use hearth_profiles::link::wifi_path::{Endpoint, WirelessPath};
use hearth_profiles::model::ModelProfile;
use hearth_profiles::{DeviceProfile, Link};

use crate::expert_routes::RecordedRoutes;
use crate::schedule::Schedule;
use crate::tensor::Collective;
use hearth_schema::plan::Plan;
use hearth_schema::request_trace::Arrival;
use hearth_schema::residency::ResidencyOptions;
use hearth_schema::scenario::{ActivationFormat, KvFormat, Links, UnreachableDirections, Workload};

#[derive(Debug, Clone, PartialEq)]
pub struct Member {
    pub name: String,
    /// The address (`HOST:PORT`) of the device's worker process.
    pub address: Option<String>,
    pub device: DeviceProfile,
    /// The options that decide which weights stay in the device's memory; the planner chooses them if `None`.
    pub residency: Option<ResidencyOptions>,
}

#[derive(Debug, Clone, PartialEq)]
pub struct LinkTable {
    links: Links,
}

#[derive(Debug, Clone, PartialEq)]
pub enum Connection<'a> {
    Link(&'a Link),
    /// A network path over Wi-Fi channels, which other devices share.
    Wireless(WirelessPath<'a>),
}

impl LinkTable {
    pub fn new(links: Links) -> Self {
        Self { links }
    }

    pub fn links(&self) -> &Links {
        &self.links
    }

    /// Returns the link between any two devices for which the scenario has no entry in `links.between`.
    pub fn default_link(&self) -> &Link {
        &self.links.default_link
    }

    pub fn wifi(&self) -> Option<&Wifi> {
        self.links.wifi.as_ref()
    }

    /// Returns the connection from the device `from` to the device `to`; `None` if `from` cannot send to `to`.
    pub fn connection(&self, from: &str, to: &str) -> Option<Connection<'_>> {
        let forward = |pair: &[String; 2]| pair[0] == from && pair[1] == to;
        let joins = |pair: &[String; 2]| forward(pair) || (pair[0] == to && pair[1] == from);
        if let Some(named) = self.links.pair_links.iter().find(|named| joins(&named.devices)) {
            match named.unreachable_directions {
                Some(UnreachableDirections::Both) => return None,
                Some(UnreachableDirections::Forward) if forward(&named.devices) => return None,
                Some(UnreachableDirections::Forward) | None => {}
            }
            if let Some(link) = &named.link {
                return Some(Connection::Link(link));
            }
        }
        let wireless = self.wireless_path(from, to).map(Connection::Wireless);
        wireless.or(Some(Connection::Link(&self.links.default_link)))
    }

    /// Returns the link from the device named `from` to the device named `to`; `None` if `from` cannot send to `to`.
    /// For a Wi-Fi connection, returns a constant link with the same mean message time
    /// ([`WirelessPath::expected_link`]).
    pub fn link_between(&self, from: &str, to: &str) -> Option<Cow<'_, Link>> {
        Some(match self.connection(from, to)? {
            Connection::Link(link) => Cow::Borrowed(link),
            Connection::Wireless(path) => Cow::Owned(path.expected_link()),
        })
    }

    /// Returns the network path over Wi-Fi between two devices if at least one of them is a Wi-Fi station.
    fn wireless_path(&self, from: &str, to: &str) -> Option<WirelessPath<'_>> {
        let wifi = self.links.wifi.as_ref()?;
        let station = |name: &str| {
            let mut channels = wifi.channels.iter().enumerate();
            let (index, channel) = channels.find(|(_, it)| it.stations.iter().any(|it| it == name))?;
            Some(Endpoint::Station { index, channel, rate: channel.station_rate(name) })
        };
        let (sender, receiver) = (station(from), station(to));
        let is_wireless = sender.is_some() || receiver.is_some();
        let [sender, receiver] =
            [sender, receiver].map(|station| station.unwrap_or(Endpoint::Wire(&self.links.default_link)));
        is_wireless.then_some(WirelessPath { sender, receiver, tcp: &wifi.tcp })
    }

    /// Checks that every device of a valid plan can reach all devices that it sends to.
    pub fn check_reachability(&self, plan: &Plan) -> Result<(), UnreachableReceiver> {
        let (shared, devices) = (Arc::new(plan.clone()), plan.devices.len());
        for (index, sender) in plan.devices.iter().enumerate() {
            let receivers = match plan.kind.tensor_plan() {
                None => Schedule::new(shared.clone(), index).receivers(),
                Some(tensor) => Collective { algorithm: tensor.all_reduce, devices }.receivers(index),
            };
            for to in receivers {
                let (sender, receiver) = (&sender.name, &plan.devices[to].name);
                if self.connection(sender, receiver).is_none() {
                    return Err(UnreachableReceiver { sender: sender.clone(), receiver: receiver.clone() });
                }
            }
        }
        Ok(())
    }
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "the plan sends messages from `{sender}` to `{receiver}`, but in the scenario `{receiver}` cannot be reached from \
     `{sender}`; plan again from this scenario"
)]
pub struct UnreachableReceiver {
    pub sender: String,
    pub receiver: String,
}

/// A scenario in which the profiles of devices, links and models replace the references to them.
#[derive(Debug, Clone, PartialEq)]
pub struct Cluster {
    /// The devices, in the order of the scenario.
    pub members: Vec<Member>,
    /// The index in `members` of the head, the device that samples the tokens.
    pub head: usize,
    pub links: LinkTable,
    pub model: ModelProfile,
    /// The draft model, if the workload uses speculative decoding.
    pub draft_model: Option<ModelProfile>,
    /// The recorded routes of the experts of a mixture; drawn at random if there are none.
    pub routes: Option<Arc<RecordedRoutes>>,
    /// The recorded requests of `workload.arrivals.file`, in the order of arrival.
    pub recorded_arrivals: Option<Arc<[Arrival]>>,
    /// Capacity of the KV cache of each sequence, in tokens.
    pub context_length: u32,
    pub kv_cache_format: KvFormat,
    pub activation_format: ActivationFormat,
    pub workload: Workload,
    pub seed: u64,
}

impl Cluster {
    pub fn member(&self, name: &str) -> Option<&Member> {
        self.members.iter().find(|member| member.name == name)
    }
}
