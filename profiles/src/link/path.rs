//! Wi-Fi paths: the mean time of a message that is alone on its channels.
//!
//! X is the channel's log-normal delay, c the overhead of a small message's own transmissions (included in X),
//! `sending` the time that the message's transmissions take, r the rate of stalls and D their length:
//!
//! ```text
//! time = sending - c + E max(X, c)                     without stalls and losses
//!      + sum of r E[D^2] / 2 + r E[D] * sending        stalls under way at the start, stalls that begin later
//!      + P(one of the last 3 segments lost) * rto      the retransmission timer
//!      + P(another one lost, none of these) * 2 E X    fast retransmission
//!      + sum over i of max(0, 2 E X - 2^i W / B)       a window W that opens first, on a fresh connection
//! ```
//!
//! The sum over the stalls is of first order: it ignores overlaps. Over two channels, or a channel and a wire, a long
//! message is transmitted on both at the same time, as in a pipeline of two stages.
//!
//! A planner needs a latency and a bandwidth. [`WirelessPath::expected_link`] gives those of a message of one
//! transmission on a connection in use: `t_comm` over Wi-Fi is [`Link::time`] of it. Between two stations of one
//! channel 1 / bandwidth = 1 / up + 1 / down.
//!
//! Not here: contention, which is simulated.

use super::Link;
use super::wifi::{MSS, Tcp, WifiChannel};
use crate::units::{Bytes, BytesPerSecond, Seconds};
use crate::values::Sourced;

/// Segments after a lost one that report the loss. source: RFC 5681, section 3.2
pub const REPORTING_SEGMENTS: u64 = 3;

/// How a device is connected to the access point.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Endpoint<'a> {
    /// A device on Wi-Fi.
    Station { index: usize, channel: &'a WifiChannel, rate: BytesPerSecond },
    /// A device on a cable.
    Wire(&'a Link),
}

/// The path from one device to another, at least one of which is a station.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct WirelessPath<'a> {
    pub sender: Endpoint<'a>,
    pub receiver: Endpoint<'a>,
    pub tcp: &'a Tcp,
}

impl<'a> Endpoint<'a> {
    pub fn rate(&self) -> BytesPerSecond {
        match self {
            Endpoint::Station { rate, .. } => *rate,
            Endpoint::Wire(link) => link.bandwidth.value,
        }
    }

    pub fn overhead(&self) -> Seconds {
        self.channel().map_or(Seconds(0.0), |channel| channel.overhead.value)
    }

    fn channel(&self) -> Option<&'a WifiChannel> {
        match self {
            Endpoint::Station { channel, .. } => Some(channel),
            Endpoint::Wire(_) => None,
        }
    }
}

impl<'a> WirelessPath<'a> {
    /// The channel that determines a message's delay: the receiver's channel (the message waits for its power saving)
    /// if the receiver is on Wi-Fi, otherwise the sender's.
    pub fn delay_channel(&self) -> Option<&'a WifiChannel> {
        self.receiver.channel().or(self.sender.channel())
    }

    /// Whether both hops use the same channel.
    pub fn shares_channel(&self) -> bool {
        match (&self.sender, &self.receiver) {
            (Endpoint::Station { index: up, .. }, Endpoint::Station { index: down, .. }) => up == down,
            _ => false,
        }
    }

    /// The overhead of a small message, once for each hop over Wi-Fi.
    pub fn overhead(&self) -> Seconds {
        self.sender.overhead() + self.receiver.overhead()
    }

    /// The latency of wires.
    pub fn wire_latency(&self) -> Seconds {
        let latency = |end: &Endpoint| match end {
            Endpoint::Wire(link) => link.latency.value,
            Endpoint::Station { .. } => Seconds(0.0),
        };
        latency(&self.sender) + latency(&self.receiver)
    }

    /// The least time of any message.
    pub fn floor(&self) -> Seconds {
        self.overhead() + self.wire_latency()
    }

    /// The most bytes of one transmission: no channel takes longer for them than its burst, and they are at least a
    /// segment.
    pub fn burst_bytes(&self) -> Bytes {
        let ends = [&self.sender, &self.receiver];
        let bytes = |end: &&Endpoint| end.channel().map(|channel| end.rate().0 * channel.burst.value.0);
        let least = ends.iter().filter_map(bytes).fold(f64::INFINITY, f64::min);
        Bytes((least as u64).max(MSS.0))
    }

    /// Bytes per second over both hops, one after the other.
    pub fn rate(&self) -> BytesPerSecond {
        BytesPerSecond(1.0 / (1.0 / self.sender.rate().0 + 1.0 / self.receiver.rate().0))
    }

    /// The mean time of a message alone; on a fresh connection the window opens first.
    pub fn mean(&self, bytes: Bytes, fresh: bool) -> Seconds {
        let [up, down] = self.sending_times(bytes);
        let stretch = |end: &Endpoint, time: Seconds| time * end.channel().map_or(0.0, WifiChannel::stalled);
        let stretched = stretch(&self.sender, up) + stretch(&self.receiver, down);
        let segments = bytes.0.div_ceil(MSS.0).max(1);
        let [by_timer, by_report] = losses(self.tcp.loss.value.0, segments);
        let opening = if fresh { self.opening(bytes) } else { Seconds(0.0) };
        self.transmission_time(bytes) - self.overhead()
            + self.delay()
            + self.wire_latency()
            + self.stall_rest()
            + stretched
            + self.tcp.rto.value * by_timer
            + self.round_trip() * by_report
            + opening
    }

    /// A constant link with the mean time of a message of one transmission.
    pub fn expected_link(&self) -> Link {
        let tcp = self.tcp;
        // As for a message of many segments; a shorter one loses a little less.
        let [by_timer, _] = losses(tcp.loss.value.0, REPORTING_SEGMENTS);
        let stretch = |end: &Endpoint| 1.0 + end.channel().map_or(0.0, WifiChannel::stalled);
        let slowness = |end: &Endpoint| stretch(end) / end.rate().0;
        let extra = |end: &Endpoint| end.overhead() * (stretch(end) - 1.0);
        let reported = self.round_trip() * (tcp.loss.value.0 * (1.0 - by_timer));
        let each_byte = slowness(&self.sender) + slowness(&self.receiver) + reported.0 / MSS.as_f64();
        let latency = self.delay() + self.wire_latency() + self.stall_rest() + tcp.rto.value * by_timer
            - reported * REPORTING_SEGMENTS as f64
            + extra(&self.sender)
            + extra(&self.receiver);
        let name = self.delay_channel().map_or("", |channel| channel.name.as_str());
        let source = format!("mean of a message alone on the channel `{name}`");
        Link {
            latency: Sourced::new(latency, source.clone()),
            bandwidth: Sourced::new(BytesPerSecond(1.0 / each_byte), source),
        }
    }

    /// The time of all transmissions of a message on each hop.
    fn sending_times(&self, bytes: Bytes) -> [Seconds; 2] {
        let bursts = bytes.0.div_ceil(self.burst_bytes().0).max(1) as f64;
        [&self.sender, &self.receiver].map(|end| end.overhead() * bursts + bytes / end.rate())
    }

    /// The time from the first transmission to the end of the last.
    fn transmission_time(&self, bytes: Bytes) -> Seconds {
        let [up, down] = self.sending_times(bytes);
        let burst = self.burst_bytes().0;
        let full = bytes.0.saturating_sub(1) / burst;
        if self.shares_channel() || full == 0 {
            return up + down;
        }
        // A pipeline of two stages whose transmissions are equal except for the last. The critical path changes from the first hop
        // to the second after the first, the last but one or the last transmission.
        let of =
            |bytes: u64| [&self.sender, &self.receiver].map(|end| end.overhead() + Bytes(bytes) / end.rate());
        let ([first, second], [last_first, last_second]) = (of(burst), of(bytes.0 - full * burst));
        let paths = [first + down, up - last_first + second + last_second, up + last_second];
        paths.into_iter().fold(Seconds(0.0), |longest, path| if path > longest { path } else { longest })
    }

    /// E max(X, c).
    fn delay(&self) -> Seconds {
        let Some(channel) = self.delay_channel() else { return Seconds(0.0) };
        let (median, sigma, least) =
            (channel.delay.median.value.0, channel.delay.sigma.value, self.overhead().0);
        if sigma <= 0.0 || least <= 0.0 {
            return Seconds((median * (sigma * sigma / 2.0).exp()).max(least));
        }
        let at = (least / median).ln() / sigma;
        Seconds(least * normal(at) + median * (sigma * sigma / 2.0).exp() * normal(sigma - at))
    }

    /// 2 E X.
    fn round_trip(&self) -> Seconds {
        self.delay_channel().map_or(Seconds(0.0), |channel| {
            let sigma = channel.delay.sigma.value;
            channel.delay.median.value * (2.0 * (sigma * sigma / 2.0).exp())
        })
    }

    /// The mean remaining time of a current stall.
    fn stall_rest(&self) -> Seconds {
        let of = |end: &Endpoint| {
            let kinds = end.channel().map_or(Vec::new(), |channel| channel.stalls.kinds());
            Seconds(kinds.iter().map(|kind| kind.rate.0 * kind.mean_square() / 2.0).sum())
        };
        if self.shares_channel() { of(&self.sender) } else { of(&self.sender) + of(&self.receiver) }
    }

    fn opening(&self, bytes: Bytes) -> Seconds {
        if self.tcp.idle_restart {
            opening(self.round_trip(), self.tcp, self.rate(), bytes)
        } else {
            Seconds(0.0)
        }
    }
}

/// The time that a connection that begins with the initial window waits for acknowledgements. Each round trip doubles
/// the window W; while it opens, the connection is busy for W / B of every round trip.
pub fn opening(round_trip: Seconds, tcp: &Tcp, rate: BytesPerSecond, bytes: Bytes) -> Seconds {
    let (mut window, mut sent, mut waited) = (tcp.initial_window.value.0, 0u64, Seconds(0.0));
    loop {
        sent = sent.saturating_add(window);
        let idle = round_trip - Bytes(window) / rate;
        if sent >= bytes.0 || idle.0 <= 0.0 {
            return waited;
        }
        waited += idle;
        window = window.saturating_mul(2);
    }
}

/// The probabilities that a message of `segments` segments needs the retransmission timer, and that it needs only a
/// fast retransmission.
pub fn losses(loss: f64, segments: u64) -> [f64; 2] {
    let tail = segments.min(REPORTING_SEGMENTS);
    let none_of = |count: u64| (1.0 - loss).powi(i32::try_from(count).unwrap_or(i32::MAX));
    let by_timer = 1.0 - none_of(tail);
    [by_timer, (1.0 - by_timer) * (1.0 - none_of(segments - tail))]
}

/// The normal distribution function, within 8e-8. source: Abramowitz and Stegun, formula 26.2.17
fn normal(x: f64) -> f64 {
    let t = 1.0 / (1.0 + 0.231_641_9 * x.abs());
    let powers = [0.319_381_530, -0.356_563_782, 1.781_477_937, -1.821_255_978, 1.330_274_429];
    let sum = powers.iter().rev().fold(0.0, |sum, factor| (sum + factor) * t);
    let above = (-x * x / 2.0).exp() / (2.0 * std::f64::consts::PI).sqrt() * sum;
    if x >= 0.0 { 1.0 - above } else { above }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::link::wifi::{Delay, Preset, Stalls};
    use crate::units::Fraction;

    fn channel(stalls: Preset) -> WifiChannel {
        serde_yaml::from_str::<WifiChannel>(
            "{name: t, bandwidth: {value: 800 Mbit/s, source: t}, stations: [a, b]}",
        )
        .map(|channel| WifiChannel { stalls: Stalls::Preset(stalls), ..channel })
        .unwrap()
    }

    fn path<'a>(channel: &'a WifiChannel, tcp: &'a Tcp) -> WirelessPath<'a> {
        let end = Endpoint::Station { index: 0, channel, rate: channel.bandwidth.value };
        WirelessPath { sender: end, receiver: end, tcp }
    }

    fn still() -> Tcp {
        let loss = Sourced::new(Fraction(0.0), "test");
        Tcp { loss, idle_restart: false, ..Tcp::default() }
    }

    fn close(found: Seconds, expected: f64) {
        assert!((found.0 / expected - 1.0).abs() < 1e-6, "{} and not {expected}", found.0);
    }

    #[test]
    fn normal_distribution_values() {
        for (x, value) in [(0.0, 0.5), (1.0, 0.841_344_746), (-1.959_963_985, 0.025), (6.0, 1.0)] {
            assert!((normal(x) - value).abs() < 1e-7, "{x}: {}", normal(x));
        }
    }

    #[test]
    fn activation_takes_delay_and_two_transmissions() {
        let (channel, tcp) = (channel(Preset::Clean), still());
        let path = path(&channel, &tcp);
        // 1.9 ms e^(1/8) = 2.153 ms; 32 KiB at 100 MB/s up and down are 0.655 ms. The delay is shorter than the overhead of
        // 0.4 ms once in a thousand, for 0.0378 us on average.
        let (delay, bytes) = (1.9e-3 * 0.125_f64.exp(), 2.0 * 32768.0 / 100e6);
        let floor = delay + bytes;
        let found = path.mean(Bytes(32768), false);
        assert!(found.0 > floor && found.0 < floor + 1e-7, "{} and {floor}", found.0);
        close(path.expected_link().time(Bytes(32768)), found.0);
        close(Seconds(path.rate().0), 50e6);
        // Without any spread it is the sum by hand.
        let sharp = WifiChannel {
            delay: Delay { sigma: Sourced::new(0.0, "t"), ..Delay::default() },
            ..channel.clone()
        };
        close(self::path(&sharp, &tcp).mean(Bytes(32768), false), 1.9e-3 + bytes);
    }

    #[test]
    fn long_message_pays_overhead_per_burst() {
        let (channel, tcp) = (channel(Preset::Clean), still());
        let path = path(&channel, &tcp);
        // 540 kB a burst; 2.7 MB are five, four more than the delay has.
        let (one, five) = (path.mean(Bytes(540_000), false).0, path.mean(Bytes(2_700_000), false).0);
        close(Seconds(five - one), 2.0 * (2_160_000.0 / 100e6 + 4.0 * 0.2e-3));
    }

    #[test]
    fn two_channels_form_a_pipeline() {
        let (channel, tcp) = (channel(Preset::Clean), still());
        let sharp =
            WifiChannel { delay: Delay { sigma: Sourced::new(0.0, "t"), ..Delay::default() }, ..channel };
        let rate = sharp.bandwidth.value;
        let end = |index, rate| Endpoint::Station { index, channel: &sharp, rate };
        let path = WirelessPath { sender: end(0, rate), receiver: end(1, rate * 0.5), tcp: &tcp };
        // Bursts of 270 kB: 2.9 ms up and 5.6 ms down; of five the first goes up alone.
        close(path.mean(Bytes(1_350_000), false), 1.9e-3 - 0.4e-3 + 2.9e-3 + 5.0 * 5.6e-3);
        let turned = WirelessPath { sender: path.receiver, receiver: path.sender, tcp: &tcp };
        close(turned.mean(Bytes(1_350_000), false), 1.9e-3 - 0.4e-3 + 5.0 * 5.6e-3 + 2.9e-3);
    }

    #[test]
    fn stalls_losses_and_slow_start_match_hand_computation() {
        let (clean, awdl) = (channel(Preset::Clean), channel(Preset::Awdl));
        let (quiet, bytes) = (still(), Bytes(32768));
        let plain = path(&clean, &quiet).mean(bytes, false).0;
        // 0.15 E[D^2]/2 = 0.49 ms, 0.03 E[D^2]/2 = 0.582 ms, and 1.77 % of 1.055 ms of sending.
        let found = path(&awdl, &quiet).mean(bytes, false).0 - plain;
        close(Seconds(found), 0.49e-3 + 0.582e-3 + 0.0177 * (0.4e-3 + 2.0 * 32768.0 / 100e6));
        // 23 segments: 0.2997 % of 200 ms, and 1.982 % of the rest a round trip.
        let lossy = Tcp { idle_restart: false, ..Tcp::default() };
        let round_trip = 2.0 * 1.9e-3 * 0.125_f64.exp();
        let timer = 1.0 - 0.999_f64.powi(3);
        let expected = timer * 0.2 + (1.0 - timer) * (1.0 - 0.999_f64.powi(20)) * round_trip;
        close(Seconds(path(&clean, &lossy).mean(bytes, false).0 - plain), expected);
        // A window of 14480 bytes opens to 28960 before 32 KiB are out: one round trip, less 0.29 ms of sending.
        let closing = Tcp { idle_restart: true, ..still() };
        let fresh = path(&clean, &closing);
        close(Seconds(fresh.mean(bytes, true).0 - plain), round_trip - 14480.0 / 50e6);
        close(fresh.mean(bytes, false), plain);
        // A message that fits the window waits for nothing.
        close(fresh.mean(Bytes(14480), true), fresh.mean(Bytes(14480), false).0);
    }
}
