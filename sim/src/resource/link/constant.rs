//! Constant links: each ordered pair of devices has its own wire, as on a switch.
//!
//! A message waits until earlier messages are sent, takes bytes / bandwidth to send, and arrives after the latency.

use std::collections::BTreeMap;

use hearth_profiles::{Bytes, BytesPerSecond, Seconds};

use super::DeliveryTimes;
use crate::engine::Nanos;

/// Latency and bandwidth of the wire from one device to another.
#[derive(Debug, Clone, Copy)]
pub struct WiredLink {
    pub latency: Seconds,
    pub bandwidth: BytesPerSecond,
}

impl From<&hearth_profiles::Link> for WiredLink {
    fn from(link: &hearth_profiles::Link) -> Self {
        Self { latency: link.latency.value, bandwidth: link.bandwidth.value }
    }
}

#[derive(Debug)]
pub struct WiredLinks {
    default: WiredLink,
    /// The wires that differ from the default, by sender and receiver.
    pub links_by_pair: BTreeMap<(usize, usize), WiredLink>,
    free_at: BTreeMap<(usize, usize), Nanos>,
}

impl WiredLinks {
    pub fn new(default: WiredLink) -> Self {
        Self { default, links_by_pair: BTreeMap::new(), free_at: BTreeMap::new() }
    }

    pub fn send(&mut self, now: Nanos, from: usize, to: usize, bytes: Bytes) -> DeliveryTimes {
        let wire = self.link(from, to);
        let free_at = self.free_at.entry((from, to)).or_insert(0);
        let start = now.max(*free_at);
        // With a very small bandwidth the time may exceed the clock; the sum must not wrap.
        *free_at = start.saturating_add((bytes / wire.bandwidth).to_nanos());
        DeliveryTimes { start, end: *free_at, arrival: free_at.saturating_add(wire.latency.to_nanos()) }
    }

    pub fn link(&self, from: usize, to: usize) -> WiredLink {
        *self.links_by_pair.get(&(from, to)).unwrap_or(&self.default)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::NetworkLinks;
    use super::super::properties::{check_invariants, messages};
    use super::*;

    fn wire() -> WiredLink {
        WiredLink { latency: Seconds(0.002), bandwidth: BytesPerSecond(10e6) }
    }

    #[test]
    fn messages_queue_per_direction() {
        let mut link = WiredLinks::new(wire());
        // 100 kB at 10 MB/s take 10 ms, the latency is 2 ms.
        assert_eq!(link.send(0, 0, 1, Bytes(100_000)).arrival, 12_000_000);
        assert_eq!(link.send(0, 0, 1, Bytes(100_000)).arrival, 22_000_000);
        // The opposite direction is idle.
        assert_eq!(link.send(0, 1, 0, Bytes(0)).arrival, 2_000_000);
    }

    proptest! {
        #[test]
        fn constant_link_keeps_invariants(messages in messages(3)) {
            let slow = WiredLink { latency: Seconds(0.1), bandwidth: BytesPerSecond(1e6) };
            let mut link = NetworkLinks::new(wire(), None, 1);
            link.wired_links.links_by_pair.insert((0, 2), slow);
            check_invariants(&mut link, &messages);
        }
    }
}
