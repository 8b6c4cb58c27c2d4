//! Wi-Fi link: messages between stations that share the airtime of a channel.
//!
//! A message is sent to the access point and from there to the receiver, in bursts that each occupy the channel
//! (`medium`). Between two stations of one channel both hops use the same channel. With the rates `up` and `down` of
//! the two hops, the rate of a long message is 1 / (1/up + 1/down). The hop of a device on a wire, or on another
//! channel, uses another medium. A message arrives after its last burst, the rest of its delay, and the delay that TCP
//! adds (`connection`).
//!
//! The delay in the document of a channel is the one-way time of a small message on an idle channel. It includes the
//! overheads of such a message; only the rest of the delay is added after the last burst.
//!
//! Later messages may occupy the medium between bursts, so the delivery times are known only when the last burst ends.
//!
//! Not here: stations out of range, changing rates, collisions beyond the overhead.

use std::collections::BTreeMap;

use hearth_profiles::link::tcp::TcpParameters;
use hearth_profiles::link::wifi::{Wifi, WifiChannel};
use hearth_profiles::link::wifi_path::{Endpoint, WirelessPath};
use hearth_profiles::{Bytes, BytesPerSecond, Seconds};

use super::connection::{DelaySampler, TcpConnection};
use super::medium::{Burst, Medium};
use super::stalls::Stalls;
use super::{DeliveryTimes, SendOutcome, WiredLink, WiredLinks};
use crate::engine::Nanos;
use crate::random;

/// The quantity that a random stream of a channel determines.
#[derive(Clone, Copy)]
enum Purpose {
    Stalls,
    Delay,
    Tcp,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Port {
    Channel(usize),
    From(usize),
    To(usize),
}

#[derive(Debug, Clone, Copy)]
struct Hop {
    port: Port,
    rate: BytesPerSecond,
    overhead: Nanos,
}

#[derive(Debug, Clone, Copy)]
struct Route {
    up: Hop,
    down: Hop,
    burst: u64,
    /// The rate at which a long message crosses both hops.
    rate: BytesPerSecond,
    wire_latency: Nanos,
    /// Index of the channel whose delay distribution applies to the messages of this route.
    delay_channel: usize,
}

#[derive(Debug, Clone, Copy)]
struct Sending {
    pair: (usize, usize),
    bytes: u64,
    /// Number of bytes for which the sender has not yet requested the medium.
    unsent: u64,
    received: u64,
    start: Option<Nanos>,
    /// Nanoseconds from the end of the message's last burst to the message's arrival.
    rest_delay: Nanos,
}

/// The links between all devices: Wi-Fi channels, and wires for the pairs of devices that do not use Wi-Fi.
#[derive(Debug)]
pub struct NetworkLinks {
    pub wired_links: WiredLinks,
    tcp: TcpParameters,
    delays: Vec<DelaySampler>,
    routes: BTreeMap<(usize, usize), Route>,
    media: BTreeMap<Port, Medium>,
    connections: BTreeMap<(usize, usize), TcpConnection>,
    sending: BTreeMap<u64, Sending>,
    last_number: u64,
}

impl NetworkLinks {
    /// Creates links that are equal wires, until [`NetworkLinks::add_wireless_path`] moves pairs of devices to Wi-Fi.
    pub fn new(wire: WiredLink, wifi: Option<&Wifi>, seed: u64) -> Self {
        let stream = |channel: usize, purpose: Purpose| {
            random::stream(seed, random::StreamPurpose::Wifi, 0, (channel as u64) << 8 | purpose as u64)
        };
        let channels = || wifi.into_iter().flat_map(|wifi| wifi.channels.iter().enumerate());
        let medium = |(index, channel): (usize, &WifiChannel)| {
            let stalls = Stalls::new(channel.stalls.stall_kinds(), stream(index, Purpose::Stalls));
            (Port::Channel(index), Medium::new(stalls))
        };
        let delays = channels().map(|(index, channel)| {
            let delay = &channel.delay;
            let [delays, tcp] = [Purpose::Delay, Purpose::Tcp].map(|purpose| stream(index, purpose));
            DelaySampler::new(delay.median.value, delay.sigma.value, delays, tcp)
        });
        Self {
            wired_links: WiredLinks::new(wire, seed),
            tcp: wifi.map_or_else(TcpParameters::default, |wifi| wifi.tcp.clone()),
            delays: delays.collect(),
            routes: BTreeMap::new(),
            media: channels().map(medium).collect(),
            connections: BTreeMap::new(),
            sending: BTreeMap::new(),
            last_number: 0,
        }
    }

    /// Sends all later messages from one device to another over Wi-Fi instead of their wire.
    pub fn add_wireless_path(&mut self, from: usize, to: usize, path: &WirelessPath) {
        let hop = |end: &Endpoint, wire: Port| {
            let port = if let Endpoint::Station { index, .. } = end { Port::Channel(*index) } else { wire };
            Hop { port, rate: end.rate(), overhead: end.transmission_overhead().to_nanos() }
        };
        let (up, down) = (hop(&path.sender, Port::From(from)), hop(&path.receiver, Port::To(to)));
        for port in [up.port, down.port] {
            // Wires never stall, so their stream is never used.
            let quiet =
                || Medium::new(Stalls::new(Vec::new(), random::stream(0, random::StreamPurpose::Wifi, 0, 0)));
            self.media.entry(port).or_insert_with(quiet);
        }
        let ((_, Port::Channel(delay_channel)) | (Port::Channel(delay_channel), _)) = (up.port, down.port)
        else {
            return;
        };
        let (burst, rate) = (path.burst_bytes().0, path.rate());
        let wire_latency = path.wire_latency().to_nanos();
        self.routes.insert((from, to), Route { up, down, burst, rate, wire_latency, delay_channel });
    }

    /// Stalls every channel from `now` until `until`. Call [`NetworkLinks::next_event_time`] again afterwards.
    pub fn stall_all_channels(&mut self, now: Nanos, until: Nanos) {
        for (port, medium) in &mut self.media {
            if matches!(port, Port::Channel(_)) {
                medium.stall(now, until);
            }
        }
    }

    /// Returns the total time of all transmissions on a channel that have ended, without stalls.
    pub fn busy_time(&self, channel: usize) -> Nanos {
        self.media.get(&Port::Channel(channel)).map_or(0, |medium| medium.busy_time)
    }

    /// Sends a message at the time `now`, which must not be earlier than in the previous call.
    pub fn send(&mut self, now: Nanos, from: usize, to: usize, bytes: Bytes) -> SendOutcome {
        let pair = (from, to);
        let Some(&route) = self.routes.get(&pair) else {
            return SendOutcome::Known(self.wired_links.send(now, from, to, bytes));
        };
        let connection = self.connections.entry(pair).or_default();
        let delays = &mut self.delays[route.delay_channel];
        let overhead = route.up.overhead + route.down.overhead;
        let rest = delays.sample_one_way_delay().to_nanos().saturating_sub(overhead);
        let (round_trip, repeated) = delays.sample_retransmission(&self.tcp, bytes);
        let wait = connection.window_wait(now, &self.tcp, round_trip, route.rate, bytes);
        let rest_delay = route.wire_latency + rest + (wait + repeated).to_nanos();
        self.last_number += 1;
        let number = self.last_number;
        let message = Sending { pair, bytes: bytes.0, unsent: bytes.0, received: 0, start: None, rest_delay };
        self.sending.insert(number, message);
        connection.last_send_time = Some(now);
        connection.send_queue.push_back(number);
        if connection.send_queue.len() == 1 {
            self.request(now, number);
        }
        SendOutcome::Pending(number)
    }

    /// Returns the time at which to call [`NetworkLinks::pop_delivery`] next, if no message is sent before.
    pub fn next_event_time(&self) -> Option<Nanos> {
        self.media.values().filter_map(Medium::next_completion_time).min()
    }

    /// Advances to `now`, and removes one message whose delivery times are known by then, even if it arrives later.
    /// Returns the number of the message and its delivery times.
    pub fn pop_delivery(&mut self, now: Nanos) -> Option<(u64, DeliveryTimes)> {
        loop {
            let ends =
                self.media.iter().filter_map(|(&port, medium)| Some((medium.next_completion_time()?, port)));
            let (at, port) = ends.min().filter(|&(at, _)| at <= now)?;
            if let Some(delivery) = self.on_burst_end(at, port) {
                return Some(delivery);
            }
        }
    }

    /// Returns the minimum delay from one device to another.
    pub fn latency(&self, from: usize, to: usize) -> Seconds {
        let over_wifi =
            |route: &Route| Seconds::from_nanos(route.up.overhead + route.down.overhead + route.wire_latency);
        self.routes.get(&(from, to)).map_or_else(|| self.wired_links.link(from, to).min_latency(), over_wifi)
    }

    /// Requests the sender's medium for the next burst of a message.
    fn request(&mut self, at: Nanos, number: u64) {
        let Some(message) = self.sending.get_mut(&number) else { return };
        let Some(route) = self.routes.get(&message.pair) else { return };
        let bytes = message.unsent.min(route.burst);
        message.unsent -= bytes;
        let transmission_time = route.up.transmission_time(bytes);
        let burst = Burst { message_number: number, is_downlink: false, bytes, transmission_time };
        if let Some(medium) = self.media.get_mut(&route.up.port) {
            medium.request(at, burst);
        }
    }

    /// Handles the end of a burst. If it was the last of a message, returns the message number and its delivery times.
    fn on_burst_end(&mut self, at: Nanos, port: Port) -> Option<(u64, DeliveryTimes)> {
        let grant = self.media.get_mut(&port)?.pop_completed(at)?;
        let Burst { message_number: number, is_downlink, bytes, .. } = grant.burst;
        let message = self.sending.get_mut(&number)?;
        let route = *self.routes.get(&message.pair)?;
        let connection = self.connections.entry(message.pair).or_default();
        if !is_downlink {
            message.start.get_or_insert(grant.start);
            connection.last_send_time = Some(at);
            // The access point requests first, then the sender for its next burst or its next message.
            let next = if message.unsent > 0 {
                Some(number)
            } else {
                connection.send_queue.pop_front();
                connection.send_queue.front().copied()
            };
            let transmission_time = route.down.transmission_time(bytes);
            let downlink = Burst { is_downlink: true, transmission_time, ..grant.burst };
            self.media.get_mut(&route.down.port)?.request(at, downlink);
            if let Some(next) = next {
                self.request(at, next);
            }
            return None;
        }
        message.received += bytes;
        if message.received < message.bytes {
            return None;
        }
        let arrival = at.saturating_add(message.rest_delay).max(connection.last_arrival_time);
        connection.last_arrival_time = arrival;
        let start = message.start.unwrap_or(at);
        self.sending.remove(&number);
        Some((number, DeliveryTimes { start, end: at, arrival }))
    }
}

impl Hop {
    fn transmission_time(&self, bytes: u64) -> Nanos {
        self.overhead.saturating_add((Bytes(bytes) / self.rate).to_nanos())
    }
}

#[cfg(test)]
mod tests;
