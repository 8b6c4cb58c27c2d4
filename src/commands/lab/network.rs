//! The emulated network of the lab: a host for each device, and links as the scenario has them.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use hearth_core::LinkTable;
use hearth_core::cluster::Connection;
use hearth_lab::network::{Host, HostTransport, PacketEmulator, Route, VirtualNetwork, routes_between};
use hearth_profiles::link::PeerLink;
use hearth_profiles::link::wifi_path::Endpoint;
use hearth_profiles::measure::Samples;
use hearth_profiles::{BytesPerSecond, Seconds, Sourced};
use hearth_ring::probe::{self, ProbeOptions};
use hearth_ring::{EncryptedTransport, Key, create_secret_file};
use hearth_schema::Scenario;
use hearth_schema::scenario::{LinkEmulation, Links, PairLink};

use crate::diagnostics::Failure;

/// Name of the file of the ring's key.
const KEY_FILE: &str = "ring.key";

/// The hosts of the devices of a scenario, and the key of their ring.
pub struct LabNetwork {
    network: VirtualNetwork,
    key_file: PathBuf,
}

impl LabNetwork {
    /// Starts the network of a scenario, and creates a key in `folder`. Returns `None` if the links are not emulated
    /// between namespaces.
    pub fn start(scenario: &Scenario, folder: &Path) -> Result<Option<LabNetwork>, Failure> {
        if scenario.links.emulation != LinkEmulation::Namespaces {
            return Ok(None);
        }
        let table = LinkTable::new(scenario.links.clone());
        let name = |host: usize| scenario.devices[host].name.as_str();
        let count = scenario.devices.len();
        let routes = routes_between(count, |from, to| route_between(&table, name(from), name(to)));
        let channels = scenario.links.wifi.as_ref().map_or(&[][..], |wifi| &wifi.channels);
        let impairments = scenario.links.impairments.clone().unwrap_or_default();
        let emulator = PacketEmulator::new(routes, channels, &impairments, scenario.seed);
        let network = VirtualNetwork::start(count, scenario.links.is_ipv6, emulator)?;
        let key_file = folder.join(KEY_FILE);
        create_secret_file(&key_file)?;
        Ok(Some(LabNetwork { network, key_file }))
    }

    pub fn host(&self, device: usize) -> &Host {
        self.network.host(device)
    }

    pub fn key_file(&self) -> &Path {
        &self.key_file
    }

    /// Returns the address at which a worker on the host of a device listens; port 0 selects a free port.
    pub fn listen_address(&self, device: usize) -> String {
        SocketAddr::new(self.host(device).address, 0).to_string()
    }

    /// Measures the links between the devices at the given places in the scenario. Returns the links of the scenario
    /// as they were measured.
    pub fn measure(&self, scenario: &Scenario, devices: &[usize]) -> Result<Links, Failure> {
        let runtime = tokio::runtime::Runtime::new().map_err(Failure::failed)?;
        let key = Key::read(&self.key_file)?;
        let transport =
            |device| EncryptedTransport::new(HostTransport(self.host(device).namespace.clone()), key.clone());
        let mut links = Vec::new();
        for (place, &from) in devices.iter().enumerate() {
            for &to in &devices[place + 1..] {
                let (near, far) = (transport(from), transport(to));
                let address = self.listen_address(to);
                let measured = probe::measure_link_between(&near, &far, &address, ProbeOptions::quick());
                links.push(([from, to], runtime.block_on(measured)?));
            }
        }
        Ok(as_measured(scenario, &links))
    }
}

/// Returns an error if the lab cannot emulate the links between namespaces. The error text continues a sentence that
/// begins with "the lab".
pub fn check(links: &Links) -> Result<(), String> {
    let mut channels = links.wifi.iter().flat_map(|wifi| &wifi.channels);
    if channels.any(|channel| !channel.stalls.stall_kinds().is_empty()) {
        return Err("cannot emulate stalls of a channel: omit `stalls`".into());
    }
    Ok(())
}

/// Returns the links of a scenario with the measured links of pairs of devices. Wi-Fi channels get the medians of the
/// measurements between their stations; their overheads are in the measured bandwidth.
fn as_measured(scenario: &Scenario, measured: &[([usize; 2], PeerLink)]) -> Links {
    let name = |device: usize| scenario.devices[device].name.clone();
    let default = scenario.links.default_link.clone();
    let mut links = Links { wifi: scenario.links.wifi.clone(), ..Links::uniform(default) };
    for channel in links.wifi.iter_mut().flat_map(|wifi| &mut wifi.channels) {
        let is_station = |device: &usize| channel.stations.contains(&name(*device));
        let between: Vec<&PeerLink> =
            measured.iter().filter(|(pair, _)| pair.iter().all(is_station)).map(|(_, link)| link).collect();
        if between.is_empty() {
            continue;
        }
        let median = |value: fn(&PeerLink) -> f64| {
            Samples::new(between.iter().map(|link| value(link)).collect::<Vec<_>>()).median()
        };
        let source = "measured between the stations";
        channel.delay.median = Sourced::new(Seconds(median(|link| link.latency.value.0)), source);
        channel.transmission_overhead = Sourced::new(Seconds(0.0), "set: it is in the measured bandwidth");
        // Both hops of a message between stations use the channel.
        channel.bandwidth = Sourced::new(BytesPerSecond(median(|link| link.bandwidth.value.0) * 2.0), source);
        channel.station_rates.clear();
    }
    let is_wireless = |pair: &[usize; 2]| {
        let stations = || links.wifi.iter().flat_map(|wifi| &wifi.channels).map(|channel| &channel.stations);
        stations().any(|stations| pair.iter().all(|device| stations.contains(&name(*device))))
    };
    let wired = measured.iter().filter(|(pair, _)| !is_wireless(pair));
    let pair_links = wired.map(|(pair, link)| PairLink {
        devices: pair.map(name),
        link: Some(link.to_link()),
        unreachable_directions: None,
    });
    links.pair_links = pair_links.collect();
    links
}

/// Returns how packets go from one device to another.
fn route_between(table: &LinkTable, from: &str, to: &str) -> Route {
    let hop = |end: &Endpoint| match end {
        Endpoint::Station { index, rate, .. } => Some((*index, *rate)),
        Endpoint::Wire(_) => None,
    };
    match table.connection(from, to) {
        Some(Connection::Link(link)) => Route::Wire(link.clone()),
        Some(Connection::Wireless(path)) => {
            let wire = table.default_link().clone();
            Route::Wireless { up: hop(&path.sender), down: hop(&path.receiver), wire }
        }
        None => Route::Unreachable,
    }
}
