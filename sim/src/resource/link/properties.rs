//! Test driver for links, and the check of the invariants of links.

use std::collections::BTreeMap;

use hearth_profiles::Bytes;
use proptest::prelude::*;

use super::{DeliveryTimes, NetworkLinks, SendOutcome};
use crate::engine::Nanos;

/// A message of a test: nanoseconds since the previous message, index of the sender, index of the receiver, bytes.
pub(crate) type TestMessage = (Nanos, usize, usize, u64);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct DeliveredMessage {
    pub sender_and_receiver: (usize, usize),
    pub send_time: Nanos,
    pub times: DeliveryTimes,
}

/// Generates random messages between `device_count` devices, none from a device to itself.
pub(crate) fn messages(device_count: usize) -> impl Strategy<Value = Vec<TestMessage>> {
    let bytes = prop_oneof![0u64..2000, 0u64..100_000, 0u64..3_000_000];
    let message = (0u64..20_000_000, 0..device_count, 1..device_count, bytes);
    let between_devices =
        message.prop_map(move |(wait, from, step, bytes)| (wait, from, (from + step) % device_count, bytes));
    prop::collection::vec(between_devices, 0..40)
}

/// Sends messages at their times and simulates until all have arrived. Returns them in the order of sending.
pub(crate) fn send_all(link: &mut NetworkLinks, messages: &[TestMessage]) -> Vec<DeliveredMessage> {
    let (mut now, mut pending, mut delivered) = (0, BTreeMap::new(), Vec::new());
    for (index, &(wait, from, to, bytes)) in messages.iter().enumerate() {
        now += wait;
        drive(link, Some(now), &mut pending, &mut delivered);
        let message =
            |times| (index, DeliveredMessage { sender_and_receiver: (from, to), send_time: now, times });
        match link.send(now, from, to, Bytes(bytes)) {
            SendOutcome::Known(delivery) => delivered.push(message(delivery)),
            SendOutcome::Pending(number) => {
                let unknown = DeliveryTimes { start: 0, end: 0, arrival: 0 };
                assert!(pending.insert(number, message(unknown)).is_none(), "a message number is used twice");
            }
        }
    }
    drive(link, None, &mut pending, &mut delivered);
    assert!(pending.is_empty(), "messages that never arrive: {pending:?}");
    delivered.sort_by_key(|&(index, _)| index);
    delivered.into_iter().map(|(_, delivered)| delivered).collect()
}

fn drive(
    link: &mut NetworkLinks,
    until: Option<Nanos>,
    pending: &mut BTreeMap<u64, (usize, DeliveredMessage)>,
    delivered: &mut Vec<(usize, DeliveredMessage)>,
) {
    while let Some(at) = link.next_event_time().filter(|&at| until.is_none_or(|until| at <= until)) {
        while let Some((number, times)) = link.pop_delivery(at) {
            assert!(times.arrival >= at, "reported after its arrival");
            let (index, message) = pending.remove(&number).expect("a message in flight");
            delivered.push((index, DeliveredMessage { times, ..message }));
        }
    }
}

pub(crate) fn check_invariants(link: &mut NetworkLinks, messages: &[TestMessage]) -> Vec<DeliveredMessage> {
    let delivered = send_all(link, messages);
    assert_eq!(delivered.len(), messages.len(), "a message was lost or duplicated");
    let mut last = BTreeMap::new();
    for DeliveredMessage { sender_and_receiver: pair, send_time: sent, times: delivery } in &delivered {
        assert!(delivery.start >= *sent, "transmitted before it was sent");
        assert!(delivery.end >= delivery.start, "its transmission ends before it starts");
        let earliest = delivery.start + link.latency(pair.0, pair.1).to_nanos();
        assert!(delivery.arrival >= earliest.max(delivery.end), "arrived before its latency had passed");
        let earlier = last.insert(*pair, *delivery).unwrap_or(*delivery);
        assert!(delivery.arrival >= earlier.arrival, "overtook another message");
        assert!(delivery.end >= earlier.end, "was transmitted before an earlier message");
    }
    delivered
}
