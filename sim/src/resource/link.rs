//! When does a message arrive at another device?
//!
//! A link delivers in order and keeps every byte. The constant link here is the one that models are validated
//! with: a message waits until those before it are sent, takes bytes / bandwidth to send, and arrives a
//! latency later. Each ordered pair of devices has its own, as on a switch.
//!
//! The law of the trait, checked by `tests::obeys_the_law` for every implementation: no message arrives
//! before its latency and its own sending time are over, none overtakes another of its pair, bytes are
//! conserved.
//!
//! Not here: air time shared between stations, jitter, stalls.

use std::collections::BTreeMap;

use hearth_profiles::{Bytes, BytesPerSecond, Seconds};

use crate::engine::Nanos;

/// What happened to a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Delivery {
    /// When its first byte left, after those before it.
    pub starts: Nanos,
    /// When its last byte is there.
    pub arrives: Nanos,
}

/// The way between devices.
pub trait Link {
    /// Sends a message now. Calls come in the order of time.
    fn send(&mut self, now: Nanos, from: usize, to: usize, bytes: Bytes) -> Delivery;
    /// The least delay from one device to another.
    fn latency(&self, from: usize, to: usize) -> Seconds;
    /// Bytes carried so far.
    fn carried(&self) -> Bytes;
}

/// Latency and bandwidth of one direction of one pair of devices.
#[derive(Debug, Clone, Copy)]
pub struct Wire {
    /// The delay of an empty message.
    pub latency: Seconds,
    /// How fast a message leaves.
    pub bandwidth: BytesPerSecond,
}

/// Every ordered pair with a wire of its own.
#[derive(Debug, Clone)]
pub struct ConstantLink {
    usual: Wire,
    special: BTreeMap<(usize, usize), Wire>,
    free_at: BTreeMap<(usize, usize), Nanos>,
    carried: u64,
}

impl ConstantLink {
    /// The same wire between any two devices.
    pub fn new(usual: Wire) -> Self {
        Self { usual, special: BTreeMap::new(), free_at: BTreeMap::new(), carried: 0 }
    }

    /// Another wire for one direction of one pair.
    #[must_use]
    pub fn with(mut self, from: usize, to: usize, wire: Wire) -> Self {
        self.special.insert((from, to), wire);
        self
    }

    fn wire(&self, from: usize, to: usize) -> Wire {
        *self.special.get(&(from, to)).unwrap_or(&self.usual)
    }
}

impl Link for ConstantLink {
    fn send(&mut self, now: Nanos, from: usize, to: usize, bytes: Bytes) -> Delivery {
        let wire = self.wire(from, to);
        let free_at = self.free_at.entry((from, to)).or_insert(0);
        let starts = now.max(*free_at);
        *free_at = starts + (bytes / wire.bandwidth).to_nanos();
        self.carried += bytes.0;
        Delivery { starts, arrives: *free_at + wire.latency.to_nanos() }
    }

    fn latency(&self, from: usize, to: usize) -> Seconds {
        self.wire(from, to).latency
    }

    fn carried(&self) -> Bytes {
        Bytes(self.carried)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The law every link obeys, whatever is sent over it.
    pub(crate) fn obeys_the_law(link: &mut dyn Link, messages: &[(Nanos, usize, usize, u64)]) {
        let mut last = BTreeMap::new();
        let (mut now, before) = (0, link.carried().0);
        for &(wait, from, to, bytes) in messages {
            now += wait;
            let delivery = link.send(now, from, to, Bytes(bytes));
            assert!(delivery.starts >= now, "sent before it was given");
            let least = delivery.starts + link.latency(from, to).to_nanos();
            assert!(delivery.arrives >= least, "arrived before its latency was over");
            let earlier = last.insert((from, to), delivery.arrives).unwrap_or(0);
            assert!(delivery.arrives >= earlier, "overtook another message");
        }
        let sent: u64 = messages.iter().map(|message| message.3).sum();
        assert_eq!(link.carried().0 - before, sent, "bytes were lost or doubled");
    }

    fn wire() -> Wire {
        Wire { latency: Seconds(0.002), bandwidth: BytesPerSecond(10e6) }
    }

    #[test]
    fn a_message_waits_for_the_one_before_it() {
        let mut link = ConstantLink::new(wire());
        // 100 kB at 10 MB/s take 10 ms, the latency is 2 ms.
        assert_eq!(link.send(0, 0, 1, Bytes(100_000)).arrives, 12_000_000);
        assert_eq!(link.send(0, 0, 1, Bytes(100_000)).arrives, 22_000_000);
        // The way back is free.
        assert_eq!(link.send(0, 1, 0, Bytes(0)).arrives, 2_000_000);
    }

    proptest! {
        #[test]
        fn the_constant_link_obeys_the_law(
            messages in prop::collection::vec((0u64..20_000_000, 0usize..3, 0usize..3, 0u64..1_000_000), 0..40)
        ) {
            let slow = Wire { latency: Seconds(0.1), bandwidth: BytesPerSecond(1e6) };
            obeys_the_law(&mut ConstantLink::new(wire()).with(0, 2, slow), &messages);
        }
    }
}
