//! Wi-Fi link: messages between stations that share the transmission time of a channel.
//!
//! A message goes to the access point and from there to the receiver, in bursts that each hold the channel
//! (`medium`). Between two stations of one channel both hops take the same channel, so that a long message gets
//! 1 / (1/up + 1/down); a device on a wire, or on another channel, takes a medium of its own. After its last burst a
//! message takes the rest of its delay, and what TCP adds (`connection`).
//!
//! The delay in a channel's document is the one-way time of a small message on an idle channel. It includes the overheads
//! of such a message; only the rest comes after the burst.
//!
//! The order on the medium depends on later messages, so a delivery is known only when its last burst ends.
//!
//! Not here: stations out of reach, changing rates, collisions beyond the overhead.

use std::collections::BTreeMap;

use hearth_profiles::link::path::{Endpoint, WirelessPath};
use hearth_profiles::link::wifi::{Tcp, Wifi};
use hearth_profiles::{Bytes, BytesPerSecond, Seconds};

use super::connection::{Connection, Delays};
use super::medium::{Burst, Medium};
use super::stalls::Stalls;
use super::{ConstantLink, Delivery, Link, Sent};
use crate::engine::Nanos;
use crate::random;

/// The purpose of a channel's random stream.
#[derive(Clone, Copy)]
enum Purpose {
    Stalls,
    Delay,
    Tcp,
}

/// The medium that a hop takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Port {
    /// The channel with this index.
    Channel(usize),
    /// The wire from a device.
    From(usize),
    /// The wire to a device.
    To(usize),
}

/// One hop of a route.
#[derive(Debug, Clone, Copy)]
struct Hop {
    port: Port,
    rate: BytesPerSecond,
    overhead: Nanos,
}

/// The route from one device to another over Wi-Fi.
#[derive(Debug, Clone, Copy)]
struct Route {
    up: Hop,
    down: Hop,
    burst: u64,
    /// The rate when both hops take the same channel.
    rate: BytesPerSecond,
    wire_latency: Nanos,
    /// The channel whose delay it has.
    delaying: usize,
}

/// A message being sent.
#[derive(Debug, Clone, Copy)]
struct Sending {
    pair: (usize, usize),
    bytes: u64,
    /// Bytes for which the sender has not requested the medium yet.
    unsent: u64,
    landed: u64,
    starts: Option<Nanos>,
    /// From its last burst to its arrival.
    after: Nanos,
}

/// Wi-Fi channels, and wires for other pairs.
#[derive(Debug, Clone)]
pub struct WifiLink {
    wires: ConstantLink,
    tcp: Tcp,
    names: Vec<String>,
    delays: Vec<Delays>,
    routes: BTreeMap<(usize, usize), Route>,
    tokens: BTreeMap<Port, Medium>,
    connections: BTreeMap<(usize, usize), Connection>,
    sending: BTreeMap<u64, Sending>,
    numbers: u64,
    carried: u64,
}

impl WifiLink {
    /// Wires only, until [`WifiLink::with`] moves pairs to Wi-Fi.
    pub fn new(wires: ConstantLink, air: Option<&Wifi>, seed: u64) -> Self {
        let stream = |channel: usize, purpose: Purpose| {
            random::stream(seed, random::Purpose::Wifi, 0, (channel as u64) << 8 | purpose as u64)
        };
        let channels = || air.into_iter().flat_map(|air| air.channels.iter().enumerate());
        let token = |(index, channel): (usize, &hearth_profiles::link::wifi::WifiChannel)| {
            let stalls = Stalls::new(channel.stalls.kinds(), stream(index, Purpose::Stalls));
            (Port::Channel(index), Medium::new(stalls))
        };
        let delays = channels().map(|(index, channel)| {
            Delays::new(channel, stream(index, Purpose::Delay), stream(index, Purpose::Tcp))
        });
        Self {
            wires,
            tcp: air.map_or_else(Tcp::default, |air| air.tcp.clone()),
            names: channels().map(|(_, channel)| channel.name.clone()).collect(),
            delays: delays.collect(),
            routes: BTreeMap::new(),
            tokens: channels().map(token).collect(),
            connections: BTreeMap::new(),
            sending: BTreeMap::new(),
            numbers: 0,
            carried: 0,
        }
    }

    /// Moves one direction of a pair to Wi-Fi.
    #[must_use]
    pub fn with(mut self, from: usize, to: usize, way: &WirelessPath) -> Self {
        let half = |end: &Endpoint, wire: Port| {
            let port = if let Endpoint::Station { index, .. } = end { Port::Channel(*index) } else { wire };
            Hop { port, rate: end.rate(), overhead: end.overhead().to_nanos() }
        };
        let (up, down) = (half(&way.sender, Port::From(from)), half(&way.receiver, Port::To(to)));
        for port in [up.port, down.port] {
            // Wires never stall, so their stream is never used.
            let quiet =
                || Medium::new(Stalls::new(Vec::new(), random::stream(0, random::Purpose::Wifi, 0, 0)));
            self.tokens.entry(port).or_insert_with(quiet);
        }
        let ((_, Port::Channel(delaying)) | (Port::Channel(delaying), _)) = (up.port, down.port) else {
            return self;
        };
        let (burst, rate) = (way.burst_bytes().0, way.rate());
        let wire_latency = way.wire_latency().to_nanos();
        self.routes.insert((from, to), Route { up, down, burst, rate, wire_latency, delaying });
        self
    }

    /// Stalls a channel from `now` until `until`; returns false if no channel has that name. Call [`Link::next_event`] again
    /// afterwards.
    pub fn stall(&mut self, channel: &str, now: Nanos, until: Nanos) -> bool {
        let index = self.names.iter().position(|name| name == channel);
        let token = index.and_then(|index| self.tokens.get_mut(&Port::Channel(index)));
        token.is_some_and(|token| {
            token.stall(now, until);
            true
        })
    }

    /// Stalls every channel.
    pub fn stall_all(&mut self, now: Nanos, until: Nanos) {
        for (port, token) in &mut self.tokens {
            if matches!(port, Port::Channel(_)) {
                token.stall(now, until);
            }
        }
    }

    /// Total time of all transmissions on a channel that have ended.
    pub fn air_time(&self, channel: usize) -> Nanos {
        self.tokens.get(&Port::Channel(channel)).map_or(0, Medium::held)
    }

    /// Requests the sender's medium for the message's next burst.
    fn ask(&mut self, at: Nanos, number: u64) {
        let Some(message) = self.sending.get_mut(&number) else { return };
        let Some(route) = self.routes.get(&message.pair) else { return };
        let bytes = message.unsent.min(route.burst);
        message.unsent -= bytes;
        let burst = Burst { message: number, down: false, bytes, air: route.up.hold(bytes) };
        if let Some(token) = self.tokens.get_mut(&route.up.port) {
            token.ask(at, burst);
        }
    }

    /// Ends a burst on a port; returns its message if it was the last.
    fn ended(&mut self, at: Nanos, port: Port) -> Option<(u64, Delivery)> {
        let hold = self.tokens.get_mut(&port)?.ended(at)?;
        let Burst { message: number, down, bytes, .. } = hold.burst;
        let message = self.sending.get_mut(&number)?;
        let route = *self.routes.get(&message.pair)?;
        let connection = self.connections.entry(message.pair).or_default();
        if !down {
            message.starts.get_or_insert(hold.since);
            connection.last_sent = Some(at);
            // The access point requests first, then the sender for its next burst or its next message.
            let next = if message.unsent > 0 {
                Some(number)
            } else {
                connection.waiting.pop_front();
                connection.waiting.front().copied()
            };
            let air = route.down.hold(bytes);
            self.tokens.get_mut(&route.down.port)?.ask(at, Burst { down: true, air, ..hold.burst });
            if let Some(next) = next {
                self.ask(at, next);
            }
            return None;
        }
        message.landed += bytes;
        if message.landed < message.bytes {
            return None;
        }
        let arrives = at.saturating_add(message.after).max(connection.last_arrival);
        connection.last_arrival = arrives;
        let starts = message.starts.unwrap_or(at);
        self.sending.remove(&number);
        Some((number, Delivery { starts, left: at, arrives }))
    }
}

impl Hop {
    fn hold(&self, bytes: u64) -> Nanos {
        self.overhead.saturating_add((Bytes(bytes) / self.rate).to_nanos())
    }
}

impl Link for WifiLink {
    fn send(&mut self, now: Nanos, from: usize, to: usize, bytes: Bytes) -> Sent {
        let pair = (from, to);
        let Some(&route) = self.routes.get(&pair) else { return self.wires.send(now, from, to, bytes) };
        let connection = self.connections.entry(pair).or_default();
        let fresh = connection.is_fresh(now, &self.tcp);
        let delays = &mut self.delays[route.delaying];
        let overhead = route.up.overhead + route.down.overhead;
        let rest = delays.one_way().to_nanos().saturating_sub(overhead);
        let surcharge = delays.surcharge(&self.tcp, route.rate, bytes, fresh).to_nanos();
        let after = route.wire_latency + rest + surcharge;
        self.numbers += 1;
        let number = self.numbers;
        let message = Sending { pair, bytes: bytes.0, unsent: bytes.0, landed: 0, starts: None, after };
        self.sending.insert(number, message);
        self.carried += bytes.0;
        connection.last_sent = Some(now);
        connection.waiting.push_back(number);
        if connection.waiting.len() == 1 {
            self.ask(now, number);
        }
        Sent::Pending(number)
    }

    fn next_event(&self) -> Option<Nanos> {
        self.tokens.values().filter_map(Medium::next_end).min()
    }

    fn settled(&mut self, now: Nanos) -> Option<(u64, Delivery)> {
        loop {
            let ends = self.tokens.iter().filter_map(|(&port, token)| Some((token.next_end()?, port)));
            let (at, port) = ends.min().filter(|&(at, _)| at <= now)?;
            if let Some(delivery) = self.ended(at, port) {
                return Some(delivery);
            }
        }
    }

    fn latency(&self, from: usize, to: usize) -> Seconds {
        let over_air =
            |route: &Route| Seconds::from_nanos(route.up.overhead + route.down.overhead + route.wire_latency);
        self.routes.get(&(from, to)).map_or_else(|| self.wires.latency(from, to), over_air)
    }

    fn carried(&self) -> Bytes {
        Bytes(self.carried) + self.wires.carried()
    }
}

#[cfg(test)]
mod tests;
