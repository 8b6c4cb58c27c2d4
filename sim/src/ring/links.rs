//! The links of a ring: messages in flight between slots, and their send records.

use hearth_core::Cluster;
use hearth_schema::Plan;
use hearth_schema::trace::{Kind, Record, Resource};

use crate::device::context::{Event, Message};
use crate::engine::{Engine, Nanos, Timer};
use crate::resource::link::{Delivery, Network, cluster_links, link_order};
use crate::trace::start_record;

/// A message on a link: the receiver's slot, the message, and the index of its send record.
type InFlight = (usize, Message, usize);

/// The links between the slots of a ring.
#[derive(Debug, Clone)]
pub struct RingLinks {
    network: Network<InFlight>,
    /// The members of the cluster, in the order in which the links number them.
    order: Vec<usize>,
    timer: Timer,
}

impl RingLinks {
    pub fn new(cluster: &Cluster, plan: &Plan, timer: Timer) -> Self {
        let network = Network::new(cluster_links(cluster, plan));
        Self { network, order: link_order(cluster, plan), timer }
    }

    /// Sends a message that was submitted at the time `submitted`. `members` has the member of the cluster at each
    /// slot.
    pub fn transmit(
        &mut self,
        engine: &mut Engine<Event>,
        records: &mut Vec<Record>,
        members: &[usize],
        (from, to): (usize, usize),
        message: Message,
        submitted: Nanos,
    ) {
        let now = engine.now();
        let record =
            start_record(from, Resource::Tx, Kind::Send, (message.pass.index, message.sent_round), submitted);
        records.push(Record { end: now, bytes: message.bytes.0, peer: Some(to as u16), ..record });
        let item = (to, message, records.len() - 1);
        // The links number all members; devices that join the ring later may have slots in another order.
        let index =
            |slot: usize| self.order.iter().position(|&member| member == members[slot]).unwrap_or(slot);
        let path = [index(from), index(to)];
        if let Some((item, delivery)) = self.network.send(now, path, message.bytes, item) {
            deliver(engine, records, item, delivery);
        }
        self.collect(engine, records);
    }

    /// Schedules the arrivals of messages whose delivery is known by now, and the next event of the links.
    pub fn collect(&mut self, engine: &mut Engine<Event>, records: &mut [Record]) {
        while let Some((item, delivery)) = self.network.next_delivery(engine.now()) {
            deliver(engine, records, item, delivery);
        }
        if let Some(at) = self.network.next_event() {
            engine.set_timer(self.timer, at, Event::Wifi);
        }
    }

    /// Stalls every Wi-Fi channel.
    pub fn stall_all(&mut self, now: Nanos, until: Nanos) {
        self.network.stall_all(now, until);
    }

    /// Drops all messages whose delivery is not known yet.
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
    records[record].end = delivery.end.max(records[record].start);
    let message = Message { arrival: delivery.arrival, ..message };
    engine.schedule_at(delivery.arrival, Event::Deliver(to, message));
}
