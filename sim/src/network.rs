//! Network: the links of a cluster, and for each message in flight the event of its arrival.

use std::collections::BTreeMap;

use hearth_core::Cluster;
use hearth_core::cluster::Connection;
use hearth_profiles::Bytes;
use hearth_schema::Plan;
use hearth_schema::plan::PlannedDevice;
use hearth_schema::trace::StepRecord;

use crate::engine::{Engine, Timer};
use crate::resource::link::{DeliveryTimes, NetworkLinks, SendOutcome, WiredLink};

/// The links of a run and the messages in flight; `E` is the type of the simulation's events.
#[derive(Debug)]
pub struct NetworkSim<E> {
    pub links: NetworkLinks,
    /// The arrival event and the index of the send record of each message without a known delivery, by message number.
    in_flight: BTreeMap<u64, (E, usize)>,
    timer: Timer,
}

impl<E> NetworkSim<E> {
    pub fn new(cluster: &Cluster, plan: &Plan, engine: &mut Engine<E>) -> Self {
        let timer = engine.new_timer();
        Self { links: cluster_links(cluster, plan), in_flight: BTreeMap::new(), timer }
    }

    /// Sends a message, whose send record is the last of `records`; `event` occurs when the message arrives. Returns
    /// whether the delivery time is known already; if not, call [`NetworkSim::schedule_arrivals`].
    pub fn send(
        &mut self,
        engine: &mut Engine<E>,
        records: &mut [StepRecord],
        [from, to]: [usize; 2],
        bytes: Bytes,
        event: E,
    ) -> bool {
        let record = records.len() - 1;
        match self.links.send(engine.now(), from, to, bytes) {
            SendOutcome::Known(delivery) => {
                schedule_arrival(engine, &mut records[record], event, delivery);
                true
            }
            SendOutcome::Pending(number) => {
                self.in_flight.insert(number, (event, record));
                false
            }
        }
    }

    /// Schedules the arrivals of messages with known delivery, and `wifi_event` at the links' next event time.
    pub fn schedule_arrivals(&mut self, engine: &mut Engine<E>, records: &mut [StepRecord], wifi_event: E) {
        while let Some((number, delivery)) = self.links.pop_delivery(engine.now()) {
            // Dropped messages have no event.
            if let Some((event, record)) = self.in_flight.remove(&number) {
                schedule_arrival(engine, &mut records[record], event, delivery);
            }
        }
        if let Some(at) = self.links.next_event_time() {
            engine.set_timer(self.timer, at, wifi_event);
        }
    }

    /// Drops all messages whose delivery time is not known yet. The bytes of these messages still occupy the channel.
    pub fn drop_pending_messages(&mut self) {
        self.in_flight.clear();
    }
}

fn schedule_arrival<E>(engine: &mut Engine<E>, record: &mut StepRecord, event: E, delivery: DeliveryTimes) {
    record.end_ns = delivery.end.max(record.start_ns);
    engine.schedule_at(delivery.arrival, event);
}

/// Returns the indices of the cluster's members in the order in which the links number the members: the plan's devices
/// in ring order, then the other members, which a later plan may use.
pub fn member_order(cluster: &Cluster, plan: &Plan) -> Vec<usize> {
    let members = &cluster.members;
    let planned = |device: &PlannedDevice| members.iter().position(|member| member.name == device.name);
    let mut order: Vec<usize> = plan.devices.iter().filter_map(planned).collect();
    order.extend((0..members.len()).filter(|&it| plan.device_index(&members[it].name).is_none()));
    order
}

fn cluster_links(cluster: &Cluster, plan: &Plan) -> NetworkLinks {
    let (table, members) = (&cluster.links, &cluster.members);
    let names: Vec<&str> =
        member_order(cluster, plan).into_iter().map(|it| members[it].name.as_str()).collect();
    let mut links = NetworkLinks::new(WiredLink::from(table.default_link()), table.wifi(), cluster.seed);
    for (from, sender) in names.iter().enumerate() {
        for (to, receiver) in names.iter().enumerate().filter(|&(to, _)| to != from) {
            match table.connection(sender, receiver) {
                Some(Connection::Link(link)) => {
                    links.wired_links.links_by_pair.insert((from, to), WiredLink::from(link));
                }
                Some(Connection::Wireless(path)) => links.add_wireless_path(from, to, &path),
                // Unreachable pairs have no wire of their own: `check` has verified that none is used.
                None => {}
            }
        }
    }
    links
}
