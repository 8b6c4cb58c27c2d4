//! Wires: each ordered pair of devices has its own wire, as on a switch.
//!
//! A message waits until earlier messages are sent, takes bytes / bandwidth to send, and arrives after the latency. If
//! the link has jitter, the latency is random; if it has parameters of TCP, the message also waits for
//! acknowledgements and retransmissions ([`super::connection`]).

use std::collections::BTreeMap;

use hearth_profiles::link::tcp::{MSS, TcpParameters, segment_count};
use hearth_profiles::{Bytes, BytesPerSecond, Seconds};

use super::DeliveryTimes;
use super::connection::{DelaySampler, TcpConnection};
use crate::engine::Nanos;
use crate::random::{StreamPurpose, stream};

/// A wire from one device to another.
#[derive(Debug, Clone)]
pub struct WiredLink {
    /// The latency; the median if it is random.
    pub latency: Seconds,
    pub bandwidth: BytesPerSecond,
    /// Standard deviation of the logarithm of the latency.
    pub sigma: f64,
    pub tcp: Option<TcpParameters>,
}

impl From<&hearth_profiles::Link> for WiredLink {
    fn from(link: &hearth_profiles::Link) -> Self {
        let sigma = link.jitter.as_ref().map_or(0.0, |jitter| jitter.value);
        let (latency, bandwidth) = (link.latency.value, link.bandwidth.value);
        Self { latency, bandwidth, sigma, tcp: link.tcp.clone() }
    }
}

impl WiredLink {
    /// Returns the minimum latency; a random latency can be close to zero.
    pub fn min_latency(&self) -> Seconds {
        if self.sigma > 0.0 { Seconds(0.0) } else { self.latency }
    }
}

#[derive(Debug)]
pub struct WiredLinks {
    default: WiredLink,
    /// The wires that differ from the default, by sender and receiver.
    pub links_by_pair: BTreeMap<(usize, usize), WiredLink>,
    seed: u64,
    free_at: BTreeMap<(usize, usize), Nanos>,
    /// The connections over wires with jitter or TCP.
    connections: BTreeMap<(usize, usize), (TcpConnection, DelaySampler)>,
}

impl WiredLinks {
    pub fn new(default: WiredLink, seed: u64) -> Self {
        let (links_by_pair, free_at, connections) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        Self { default, links_by_pair, seed, free_at, connections }
    }

    pub fn send(&mut self, now: Nanos, from: usize, to: usize, bytes: Bytes) -> DeliveryTimes {
        let wire = self.links_by_pair.get(&(from, to)).unwrap_or(&self.default);
        let free_at = self.free_at.entry((from, to)).or_insert(0);
        let start = now.max(*free_at);
        // With a very small bandwidth the time may exceed the clock; the sum must not wrap.
        if wire.sigma == 0.0 && wire.tcp.is_none() {
            let sent = start.saturating_add((bytes / wire.bandwidth).to_nanos());
            *free_at = sent;
            return DeliveryTimes { start, end: sent, arrival: sent.saturating_add(wire.latency.to_nanos()) };
        }
        let (connection, delays) = self.connections.entry((from, to)).or_insert_with(|| {
            let of = |kind| {
                stream(self.seed, StreamPurpose::Wire, 0, (from as u64) << 20 | (to as u64) << 4 | kind)
            };
            (TcpConnection::default(), DelaySampler::new(wire.latency, wire.sigma, of(0), of(1)))
        });
        let latency = delays.sample_last_arrival(segment_count(bytes), MSS / wire.bandwidth);
        let (sending, repeated) = wire.tcp.as_ref().map_or((bytes / wire.bandwidth, Seconds(0.0)), |tcp| {
            let (round_trip, repeated) = delays.sample_retransmission(tcp, bytes);
            let sending = bytes / wire.bandwidth
                + connection.window_wait(start, tcp, round_trip, wire.bandwidth, bytes);
            if repeated > Seconds(0.0) {
                connection.on_loss();
            }
            // A long message has several losses.
            let limited = tcp.sending_time(round_trip, wire.bandwidth, bytes);
            (if limited > sending { limited } else { sending }, repeated)
        });
        let end = start.saturating_add(sending.to_nanos());
        let arrival = end.saturating_add((latency + repeated).to_nanos()).max(connection.last_arrival_time);
        *free_at = end;
        (connection.last_send_time, connection.last_arrival_time) = (Some(end), arrival);
        DeliveryTimes { start, end, arrival }
    }

    pub fn link(&self, from: usize, to: usize) -> &WiredLink {
        self.links_by_pair.get(&(from, to)).unwrap_or(&self.default)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::NetworkLinks;
    use super::super::properties::{check_invariants, messages};
    use super::*;

    fn wire() -> WiredLink {
        WiredLink { latency: Seconds(0.002), bandwidth: BytesPerSecond(10e6), sigma: 0.0, tcp: None }
    }

    #[test]
    fn messages_queue_per_direction() {
        let mut link = WiredLinks::new(wire(), 1);
        // 100 kB at 10 MB/s take 10 ms, the latency is 2 ms.
        assert_eq!(link.send(0, 0, 1, Bytes(100_000)).arrival, 12_000_000);
        assert_eq!(link.send(0, 0, 1, Bytes(100_000)).arrival, 22_000_000);
        // The opposite direction is idle.
        assert_eq!(link.send(0, 1, 0, Bytes(0)).arrival, 2_000_000);
    }

    fn tcp_wire() -> WiredLink {
        WiredLink { sigma: 0.3, tcp: Some(TcpParameters::default()), ..wire() }
    }

    #[test]
    fn first_long_message_waits_for_acknowledgements() {
        let mut link = WiredLinks::new(WiredLink { sigma: 0.0, ..tcp_wire() }, 1);
        // 14.48 kB take 1.4 ms of the round trip of 4 ms, and 28.96 kB take 2.9 ms.
        let [first, second] = [0, 20_000_000].map(|at| link.send(at, 0, 1, Bytes(80_000)).end - at);
        assert!((first as f64 / 1e6 - (8.0 + 2.552 + 1.104)).abs() < 0.01, "{first}");
        assert_eq!(second, 8_000_000, "the window has grown");
        // After many timeouts the window is the initial one.
        assert_eq!(link.send(100_000_000_000, 0, 1, Bytes(80_000)).end - 100_000_000_000, first);
    }

    proptest! {
        #[test]
        fn wire_with_tcp_keeps_invariants(messages in messages(3)) {
            check_invariants(&mut NetworkLinks::new(tcp_wire(), None, 1), &messages);
        }

        #[test]
        fn constant_link_keeps_invariants(messages in messages(3)) {
            let slow = WiredLink { latency: Seconds(0.1), bandwidth: BytesPerSecond(1e6), ..wire() };
            let mut link = NetworkLinks::new(wire(), None, 1);
            link.wired_links.links_by_pair.insert((0, 2), slow);
            check_invariants(&mut link, &messages);
        }
    }
}
