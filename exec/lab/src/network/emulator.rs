//! The packet emulator: carries the packets of the hosts over wires and Wi-Fi channels.
//!
//! A packet on a wire waits in a queue, is transmitted at the rate of the wire, and arrives after the latency. Every
//! ordered pair of hosts has its own wire, as in the simulator (`hearth_sim`).
//!
//! A packet between two Wi-Fi stations is transmitted twice: to the access point and from there to the receiver. The
//! channel carries one transmission at a time: an overhead, and the packets of one queue up to the burst time. When it
//! is free, one of the stations with packets, or the access point, transmits next, with equal probability; the access
//! point serves its stations in turn. A path between a station and a wired host has the channel on one side and the wire
//! on the other.
//!
//! Pure: time is an argument.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

use hearth_profiles::link::impairments::{Impairments, Jitter};
use hearth_profiles::link::wifi::{Delay, WifiChannel};
use hearth_profiles::{Bytes, BytesPerSecond, Link};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::path::PathState;
use super::queue::PacketQueue;
use super::{Nanos, Packet};

/// One direction of a link between two hosts.
#[derive(Debug, Clone)]
pub enum Route {
    Wire(Link),
    /// All packets are lost.
    Unreachable,
    /// Over Wi-Fi channels, as indices in [`PacketEmulator::new`]. `None` is the wire of the access point.
    Wireless {
        up: Option<(usize, BytesPerSecond)>,
        down: Option<(usize, BytesPerSecond)>,
        wire: Link,
    },
}

/// A queue and its transmitter.
#[derive(Debug)]
struct Wire {
    queue: PacketQueue,
    rate: BytesPerSecond,
    current: Option<(Nanos, Packet)>,
}

/// Who transmits on a channel: the station with this host number to the access point, or the access point to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Direction {
    Up(usize),
    Down(usize),
}

#[derive(Debug)]
struct Channel {
    overhead: Nanos,
    max_burst: Nanos,
    queues: BTreeMap<Direction, (PacketQueue, BytesPerSecond)>,
    /// The station that the access point served last.
    last_served: usize,
    current: Option<(Nanos, Direction, Vec<Packet>)>,
    rng: ChaCha8Rng,
}

#[derive(Debug)]
struct PathOfPair {
    route: Route,
    state: PathState,
}

/// A packet that arrives at a host at a time. The number keeps packets with equal times in order.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Arrival(Nanos, u64, usize, Vec<u8>);

#[derive(Debug)]
pub struct PacketEmulator {
    wires: BTreeMap<(usize, usize), Wire>,
    channels: Vec<Channel>,
    paths: BTreeMap<(usize, usize), PathOfPair>,
    arrivals: BinaryHeap<Reverse<Arrival>>,
    arrival_count: u64,
    lost_count: u64,
}

const STEADY: Jitter = Jitter { sigma: 0.0, correlation: 0.0 };

fn transmission_time(bytes: u64, rate: BytesPerSecond) -> Nanos {
    (Bytes(bytes) / rate).to_nanos()
}

impl PacketEmulator {
    /// Creates the network of the hosts in `routes`, which are numbered from 0.
    pub fn new(
        routes: BTreeMap<(usize, usize), Route>,
        channels: &[WifiChannel],
        impairments: &Impairments,
        seed: u64,
    ) -> Self {
        let mut emulator = Self {
            wires: BTreeMap::new(),
            channels: Vec::new(),
            paths: BTreeMap::new(),
            arrivals: BinaryHeap::new(),
            arrival_count: 0,
            lost_count: 0,
        };
        let mut streams = 0..;
        let mut stream = || {
            let mut rng = ChaCha8Rng::seed_from_u64(seed);
            rng.set_stream(streams.next().unwrap_or(0));
            rng
        };
        for channel in channels {
            emulator.channels.push(Channel {
                overhead: channel.transmission_overhead.value.to_nanos(),
                max_burst: channel.max_burst_duration.value.to_nanos(),
                queues: BTreeMap::new(),
                last_served: 0,
                current: None,
                rng: stream(),
            });
        }
        let queue = || PacketQueue::new(&impairments.queue);
        for ((from, to), route) in routes {
            let (wire, hops) = match &route {
                Route::Unreachable => continue,
                Route::Wire(link) => (Some(link), [None, None]),
                Route::Wireless { up, down, wire } => {
                    ((up.is_none() || down.is_none()).then_some(wire), [*up, *down])
                }
            };
            if let Some(link) = wire {
                let wire = Wire { queue: queue(), rate: link.bandwidth.value, current: None };
                emulator.wires.insert((from, to), wire);
            }
            for (hop, direction) in hops.iter().zip([Direction::Up(from), Direction::Down(to)]) {
                if let Some((channel, rate)) = hop {
                    let queues = &mut emulator.channels[*channel].queues;
                    queues.entry(direction).or_insert_with(|| (queue(), *rate));
                }
            }
            // The delay of the receiver's channel, as in the simulator, which includes the overheads.
            let stations = hops.map(|hop| hop.map(|(channel, _)| &channels[channel]));
            let delay = stations[1].or(stations[0]).map(|channel| &channel.delay);
            let overhead =
                stations.iter().flatten().map(|channel| channel.transmission_overhead.value.to_nanos());
            let median = delay.map_or(0, |delay| delay.median.value.to_nanos());
            let channel_latency = overhead.fold(median, Nanos::saturating_sub);
            let latency = channel_latency + wire.map_or(0, |link| link.latency.value.to_nanos());
            let of_channel = |delay: &Delay| Jitter { sigma: delay.sigma.value, correlation: 0.0 };
            let jitter = delay.map(of_channel).or(impairments.jitter).unwrap_or(STEADY);
            let state = PathState::new(latency, jitter, impairments, stream());
            emulator.paths.insert((from, to), PathOfPair { route, state });
        }
        emulator
    }

    /// Accepts a packet that a host sends at `now`. Packets to unknown hosts are lost.
    pub fn send(&mut self, now: Nanos, from: usize, to: usize, bytes: Vec<u8>) {
        let Some(path) = self.paths.get(&(from, to)) else { return };
        let packet = Packet { from, to, bytes };
        match path.route {
            Route::Wireless { up: Some((channel, _)), .. } => {
                self.channels[channel].request(now, Direction::Up(from), packet);
            }
            _ => self.request_wire(now, packet),
        }
    }

    fn request_wire(&mut self, now: Nanos, packet: Packet) {
        if let Some(wire) = self.wires.get_mut(&(packet.from, packet.to)) {
            wire.queue.push(now, packet);
            wire.start(now);
        }
    }

    /// Returns the time at which to call [`Self::pop_arrival`] next, if no packet is sent before.
    pub fn next_event_time(&self) -> Option<Nanos> {
        let arrival = self.arrivals.peek().map(|Reverse(Arrival(at, ..))| *at);
        arrival.into_iter().chain(self.next_transmission_end()).min()
    }

    fn next_transmission_end(&self) -> Option<Nanos> {
        let wires = self.wires.values().filter_map(|wire| wire.current.as_ref().map(|(end, _)| *end));
        let channels =
            self.channels.iter().filter_map(|channel| channel.current.as_ref().map(|(end, ..)| *end));
        wires.chain(channels).min()
    }

    /// Returns the next packet that has arrived by `now`, and its host.
    pub fn pop_arrival(&mut self, now: Nanos) -> Option<(usize, Vec<u8>)> {
        while let Some(end) = self.next_transmission_end().filter(|end| *end <= now) {
            self.finish_transmissions(end);
        }
        self.arrivals.peek().filter(|Reverse(Arrival(at, ..))| *at <= now)?;
        let Reverse(Arrival(_, _, to, bytes)) = self.arrivals.pop()?;
        Some((to, bytes))
    }

    /// Returns the number of packets that were lost at random, and the number that did not fit into a queue or waited
    /// too long.
    pub fn loss_counts(&self) -> (u64, u64) {
        let wires = self.wires.values().map(|wire| wire.queue.dropped_count);
        let channels = self.channels.iter().flat_map(|channel| channel.queues.values());
        (self.lost_count, wires.chain(channels.map(|(queue, _)| queue.dropped_count)).sum())
    }

    /// Ends all transmissions that end at `at`.
    fn finish_transmissions(&mut self, at: Nanos) {
        let mut sent = Vec::new();
        for wire in self.wires.values_mut() {
            if let Some((_, packet)) = wire.current.take_if(|(end, _)| *end <= at) {
                wire.start(at);
                sent.push(packet);
            }
        }
        for packet in sent {
            match self.downlink(&packet) {
                Some(channel) => self.channels[channel].request(at, Direction::Down(packet.to), packet),
                None => self.deliver(at, vec![packet], false),
            }
        }
        for index in 0..self.channels.len() {
            match self.channels[index].current.take_if(|(end, ..)| *end <= at) {
                Some((_, Direction::Down(_), packets)) => self.deliver(at, packets, true),
                Some((_, Direction::Up(_), packets)) => {
                    for packet in packets {
                        match self.downlink(&packet) {
                            Some(next) => self.channels[next].add(at, Direction::Down(packet.to), packet),
                            None => self.request_wire(at, packet),
                        }
                    }
                }
                None => {}
            }
        }
        // The access point now contends with the packets of the ended transmissions.
        self.channels.iter_mut().for_each(|channel| channel.start(at));
    }

    /// Returns the Wi-Fi channel of a packet's second hop.
    fn downlink(&self, packet: &Packet) -> Option<usize> {
        match self.paths.get(&(packet.from, packet.to))?.route {
            Route::Wireless { down: Some((channel, _)), .. } => Some(channel),
            _ => None,
        }
    }

    /// Delivers transmitted packets. Packets of one Wi-Fi transmission have the same delay.
    fn deliver(&mut self, at: Nanos, packets: Vec<Packet>, is_burst: bool) {
        let mut shared = None;
        for Packet { from, to, bytes } in packets {
            let Some(path) = self.paths.get_mut(&(from, to)) else { continue };
            let arrival = if is_burst {
                let delay = *shared.get_or_insert_with(|| path.state.delay());
                path.state.arrival_after(at, delay)
            } else {
                path.state.arrival(at)
            };
            let Some(arrival) = arrival else {
                self.lost_count += 1;
                continue;
            };
            self.arrival_count += 1;
            self.arrivals.push(Reverse(Arrival(arrival, self.arrival_count, to, bytes)));
        }
    }
}

impl Wire {
    /// Starts the transmission of the next packet if there is none.
    fn start(&mut self, now: Nanos) {
        if self.current.is_none() {
            self.current = self
                .queue
                .pop(now)
                .map(|packet| (now + transmission_time(packet.bytes.len() as u64, self.rate), packet));
        }
    }
}

impl Channel {
    fn add(&mut self, now: Nanos, direction: Direction, packet: Packet) {
        if let Some((queue, _)) = self.queues.get_mut(&direction) {
            queue.push(now, packet);
        }
    }

    fn request(&mut self, now: Nanos, direction: Direction, packet: Packet) {
        self.add(now, direction, packet);
        self.start(now);
    }

    /// Starts the next transmission if the channel is free.
    fn start(&mut self, now: Nanos) {
        if self.current.is_some() {
            return;
        }
        while let Some(direction) = self.next_transmitter() {
            let Some((queue, rate)) = self.queues.get_mut(&direction) else { return };
            let max_bytes = (rate.0 * self.max_burst as f64 * 1e-9) as u64;
            let (mut packets, mut bytes) = (Vec::new(), 0);
            while packets.is_empty() || queue.next_bytes().is_some_and(|next| bytes + next <= max_bytes) {
                let Some(packet) = queue.pop(now) else { break };
                bytes += packet.bytes.len() as u64;
                packets.push(packet);
            }
            if !packets.is_empty() {
                let end = now + self.overhead + transmission_time(bytes, *rate);
                self.current = Some((end, direction, packets));
                return;
            }
        }
    }

    /// Chooses among the stations with packets and the access point.
    fn next_transmitter(&mut self) -> Option<Direction> {
        let waiting =
            self.queues.iter().filter(|(_, (queue, _))| !queue.is_empty()).map(|(&direction, _)| direction);
        let (ups, downs): (Vec<_>, Vec<_>) =
            waiting.partition(|direction| matches!(direction, Direction::Up(_)));
        let contenders = ups.len() + usize::from(!downs.is_empty());
        if contenders == 0 {
            return None;
        }
        if let Some(&up) = ups.get(self.rng.random_range(0..contenders)) {
            return Some(up);
        }
        let after_last =
            |direction: &&Direction| matches!(direction, Direction::Down(to) if *to > self.last_served);
        let next = *downs.iter().find(after_last).or(downs.first())?;
        if let Direction::Down(to) = next {
            self.last_served = to;
        }
        Some(next)
    }
}

#[cfg(test)]
mod tests {
    use hearth_profiles::link::impairments::{Queue, QueueDiscipline};
    use hearth_profiles::{Seconds, Sourced};
    use proptest::prelude::*;

    use super::*;

    const HOSTS: usize = 4;

    fn link(latency: f64, rate: f64) -> Link {
        Link::constant(Sourced::new(Seconds(latency), "test"), Sourced::new(BytesPerSecond(rate), "test"))
    }

    /// Hosts 0 and 1 are on a channel; 2 and 3 are wired.
    fn home(impairments: &Impairments) -> PacketEmulator {
        let channel: WifiChannel = serde_yaml::from_str(
            "{name: c, bandwidth: {value: 80 Mbit/s, source: t}, stations: [a, b], delay: {median: {value: 2 ms, source: t}, \
             sigma: {value: 0.3, source: t}}}",
        )
        .expect("a channel");
        let rate = channel.bandwidth.value;
        let station = |host: usize| (host < 2).then_some((0, rate));
        let route = |from, to| {
            let wire = link(0.001, 12.5e6);
            match (station(from), station(to)) {
                (None, None) => Route::Wire(wire),
                (up, down) => Route::Wireless { up, down, wire },
            }
        };
        let routes = super::super::routes_between(HOSTS, route);
        PacketEmulator::new(routes, &[channel], impairments, 7)
    }

    /// Sends packets of (time, from, to, bytes). Returns the arrivals: time, receiver and packet.
    fn run(
        network: &mut PacketEmulator,
        sends: &[(Nanos, usize, usize, usize)],
    ) -> Vec<(Nanos, usize, Vec<u8>)> {
        let mut arrivals = Vec::new();
        let mut sends = sends.iter().enumerate().peekable();
        loop {
            let send = sends.peek().map(|(_, send)| send.0);
            let Some(now) = send.into_iter().chain(network.next_event_time()).min() else { return arrivals };
            while let Some((number, &(_, from, to, bytes))) = sends.next_if(|(_, send)| send.0 <= now) {
                let mut packet = vec![0; bytes.max(8)];
                packet[..8].copy_from_slice(&(number as u64).to_le_bytes());
                network.send(now, from, to, packet);
            }
            while let Some((to, packet)) = network.pop_arrival(now) {
                arrivals.push((now, to, packet));
            }
        }
    }

    #[test]
    fn a_wire_takes_its_rate_and_latency() {
        let sends: Vec<_> = (0..10).map(|_| (0, 2, 3, 1250)).collect();
        let times: Vec<Nanos> =
            run(&mut home(&Impairments::default()), &sends).iter().map(|one| one.0).collect();
        // 0.1 ms each, and a millisecond.
        assert_eq!(times, (1..=10).map(|number| 1_000_000 + number * 100_000).collect::<Vec<_>>());
    }

    #[test]
    fn stations_share_the_channel() {
        let seconds = |sends: &[_]| {
            let arrivals = run(&mut home(&Impairments::default()), sends);
            assert_eq!(arrivals.len(), sends.len());
            arrivals.last().map_or(0.0, |last| last.0 as f64 * 1e-9)
        };
        let stream = |from, to| (0..1000).map(move |_| (0, from, to, 1500));
        let one: Vec<_> = stream(0, 1).collect();
        let both: Vec<_> = stream(0, 1).chain(stream(1, 0)).collect();
        // 1.5 MB take 150 ms for each of two hops, and the overheads of 28 bursts at least.
        let alone = seconds(&one);
        assert!((0.3..0.36).contains(&alone), "{alone}");
        assert!((seconds(&both) / alone / 2.0 - 1.0).abs() < 0.1);
    }

    fn any_impairments() -> impl Strategy<Value = Impairments> {
        let loss = prop::option::of((0.001..0.2, 1.0..5.0_f64));
        (2000..200_000_u64, any::<bool>(), 0.0..0.5_f64, loss).prop_map(|(size, is_codel, sigma, loss)| {
            let discipline = if is_codel { QueueDiscipline::Codel } else { QueueDiscipline::DropTail };
            Impairments {
                queue: Queue { size: Bytes(size), discipline },
                jitter: Some(Jitter { sigma, correlation: 0.5 }),
                loss: loss.map(|(rate, burst)| hearth_profiles::link::impairments::PacketLoss {
                    rate: hearth_profiles::Fraction(rate),
                    burst,
                }),
                reordering: None,
            }
        })
    }

    proptest! {
        /// Every packet arrives at its receiver or is counted as lost, not before its transmission and, between two
        /// hosts, in the order of sending.
        #[test]
        fn packets_are_conserved_and_ordered(
            mut sends in prop::collection::vec((0..100_000_000_u64, 0..HOSTS, 0..HOSTS, 40..1500_usize), 1..300),
            impairments in any_impairments(),
        ) {
            sends.retain(|(_, from, to, _)| from != to);
            sends.sort_unstable_by_key(|send| send.0);
            let mut network = home(&impairments);
            let arrivals = run(&mut network, &sends);
            let (lost, dropped) = network.loss_counts();
            prop_assert_eq!(arrivals.len() as u64 + lost + dropped, sends.len() as u64);
            let mut last = BTreeMap::new();
            for (at, to, packet) in arrivals {
                let number = u64::from_le_bytes(packet[..8].try_into().expect("8 bytes")) as usize;
                let (sent, from, receiver, bytes) = sends[number];
                prop_assert_eq!((receiver, bytes.max(8)), (to, packet.len()));
                prop_assert!(at >= sent + transmission_time(bytes as u64, BytesPerSecond(12.5e6)));
                let earlier = last.insert((from, to), number);
                prop_assert!(earlier.is_none_or(|earlier| earlier < number), "overtaken");
            }
        }
    }
}
