//! Network: the links of a cluster, with a caller-defined item for each message in flight.

use std::collections::BTreeMap;

use hearth_core::Cluster;
use hearth_core::cluster::Connection;
use hearth_profiles::Bytes;
use hearth_schema::Plan;
use hearth_schema::plan::PlannedDevice;

use super::{ConstantLink, Delivery, Link, SendOutcome, WifiLink, Wire};
use crate::engine::Nanos;

/// Links, and the items of the messages on them.
#[derive(Debug, Clone)]
pub struct Network<T> {
    links: WifiLink,
    in_flight: BTreeMap<u64, T>,
}

impl<T> Network<T> {
    pub fn new(links: WifiLink) -> Self {
        Self { links, in_flight: BTreeMap::new() }
    }

    /// Sends a message. Returns its delivery if later messages cannot change it; otherwise [`Network::next_delivery`]
    /// returns it later.
    pub fn send(
        &mut self,
        now: Nanos,
        [from, to]: [usize; 2],
        bytes: Bytes,
        item: T,
    ) -> Option<(T, Delivery)> {
        match self.links.send(now, from, to, bytes) {
            SendOutcome::Known(delivery) => Some((item, delivery)),
            SendOutcome::Pending(number) => {
                self.in_flight.insert(number, item);
                None
            }
        }
    }

    /// Removes one message whose delivery is known by `now`, and returns its item and delivery.
    pub fn next_delivery(&mut self, now: Nanos) -> Option<(T, Delivery)> {
        loop {
            let (number, delivery) = self.links.next_delivery(now)?;
            // Dropped messages have no item.
            if let Some(item) = self.in_flight.remove(&number) {
                return Some((item, delivery));
            }
        }
    }

    /// Drops all messages whose delivery is not known yet. Their bytes still occupy the channel.
    pub fn drop_pending(&mut self) {
        self.in_flight.clear();
    }

    /// Returns the time at which to call [`Network::next_delivery`] next.
    pub fn next_event(&self) -> Option<Nanos> {
        self.links.next_event()
    }

    /// Stalls every channel.
    pub fn stall_all(&mut self, now: Nanos, until: Nanos) {
        self.links.stall_all(now, until);
    }
}

/// Returns the members of the cluster in the order in which the links number them: the plan's devices in ring order,
/// then the other members, which a later plan may use.
pub fn link_order(cluster: &Cluster, plan: &Plan) -> Vec<usize> {
    let members = &cluster.members;
    let planned = |device: &PlannedDevice| members.iter().position(|member| member.name == device.name);
    let mut order: Vec<usize> = plan.devices.iter().filter_map(planned).collect();
    order.extend((0..members.len()).filter(|&it| plan.device_index(&members[it].name).is_none()));
    order
}

/// Returns the links between the members of a cluster, which are numbered as in [`link_order`].
pub fn cluster_links(cluster: &Cluster, plan: &Plan) -> WifiLink {
    let (table, members) = (&cluster.links, &cluster.members);
    let names: Vec<&str> =
        link_order(cluster, plan).into_iter().map(|it| members[it].name.as_str()).collect();
    let (mut wires, mut paths) = (ConstantLink::new(Wire::from(table.default_link())), Vec::new());
    for (from, sender) in names.iter().enumerate() {
        for (to, receiver) in names.iter().enumerate().filter(|&(to, _)| to != from) {
            match table.connection(sender, receiver) {
                Some(Connection::Link(link)) => wires = wires.with_wire(from, to, Wire::from(link)),
                Some(Connection::Wireless(path)) => paths.push((from, to, path)),
                // Unreachable pairs have no wire of their own: `check` has verified that none is used.
                None => {}
            }
        }
    }
    let links = WifiLink::new(wires, table.wifi(), cluster.seed);
    paths.iter().fold(links, |links, (from, to, path)| links.with_path(*from, *to, path))
}
