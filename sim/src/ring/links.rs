//! The links of a ring: messages in flight between slots, and the records of their sending.

use hearth_core::Cluster;
use hearth_schema::Plan;
use hearth_schema::trace::{Kind, Record, Resource};

use crate::device::context::{Event, Message};
use crate::engine::{Engine, Nanos, Timer};
use crate::resource::link::{Delivery, Network, cluster_links, link_order};
use crate::trace::start_record;

/// A message on a link: its receiver's slot, and the index of the record of its sending.
type InFlight = (usize, Message, usize);

#[derive(Debug, Clone)]
pub struct RingLinks {
    network: Network<InFlight>,
    /// The members of the cluster in the order of the links.
    order: Vec<usize>,
    timer: Timer,
}

impl RingLinks {
    pub fn new(cluster: &Cluster, plan: &Plan, timer: Timer) -> Self {
        let network = Network::new(cluster_links(cluster, plan));
        Self { network, order: link_order(cluster, plan), timer }
    }

    /// Sends a message that was handed over at an earlier time. `members` are the members of the cluster at the slots.
    pub fn transmit(
        &mut self,
        engine: &mut Engine<Event>,
        records: &mut Vec<Record>,
        members: &[usize],
        (from, to): (usize, usize),
        message: Message,
        handed: Nanos,
    ) {
        let now = engine.now();
        let line =
            start_record(from, Resource::Tx, Kind::Send, (message.pass.index, message.sent_in), handed);
        records.push(Record { end: now, bytes: message.bytes.0, peer: Some(to as u16), ..line });
        let item = (to, message, records.len() - 1);
        // Every member has links, and devices that join the ring later may do so in any order.
        let index =
            |slot: usize| self.order.iter().position(|&member| member == members[slot]).unwrap_or(slot);
        let path = [index(from), index(to)];
        if let Some((item, delivery)) = self.network.send(now, path, message.bytes, item) {
            deliver(engine, records, item, delivery);
        }
        self.collect(engine, records);
    }

    /// Schedules the deliveries that are known by now, and the next event of the links.
    pub fn collect(&mut self, engine: &mut Engine<Event>, records: &mut [Record]) {
        while let Some((item, delivery)) = self.network.next_delivery(engine.now()) {
            deliver(engine, records, item, delivery);
        }
        if let Some(at) = self.network.next_event() {
            engine.set(self.timer, at, Event::Wifi);
        }
    }

    /// Stalls every Wi-Fi channel.
    pub fn stall_all(&mut self, now: Nanos, until: Nanos) {
        self.network.stall_all(now, until);
    }

    /// Drops all messages that have not left.
    pub fn drop_pending(&mut self) {
        self.network.drop_pending();
    }
}

fn deliver(
    engine: &mut Engine<Event>,
    records: &mut [Record],
    (to, message, record): InFlight,
    delivery: Delivery,
) {
    records[record].end = delivery.left.max(records[record].start);
    let message = Message { at: delivery.arrives, ..message };
    engine.at(delivery.arrives, Event::Deliver(to, message));
}
