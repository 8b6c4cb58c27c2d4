//! Mean time of a message over Wi-Fi on otherwise idle channels.
//!
//! X is the log-normal delay of the channel, c the overhead of the transmissions of a small message (included in X),
//! `sending` the duration of the message's transmissions, r the rate of stalls and D their duration, rto the
//! retransmission timeout, W the initial congestion window, and B the rate of the network path:
//!
//! ```text
//! time = sending - c + E max(X, c)                     without stalls and losses
//!      + sum of r E[D^2] / 2 + r E[D] * sending        a stall at the start, stalls that begin later
//!      + P(the only segment lost) * rto                retransmission timeout
//!      + P(the last of several lost) * 4 E X           tail loss probe
//!      + P(only other segments lost) * 2 E X           fast retransmission
//!      + sum over i >= 0 of max(0, 2 E X - 2^i W / B)  slow start from the window W, on a fresh connection
//! ```
//!
//! The sum over the stalls is a first-order approximation that ignores overlaps. Over two channels, or over a channel
//! and a wire, the parts of a long message are transmitted on both hops at the same time, as in a pipeline of two
//! stages.
//!
//! A planner needs a latency and a bandwidth. [`WirelessPath::expected_link`] returns both for a message of one
//! transmission on a connection that was not idle: `t_comm` over Wi-Fi is [`Link::message_time`] of the returned link.
//! Between two stations of one channel without stalls and losses, 1 / bandwidth = 1 / up + 1 / down.
//!
//! Not here: messages that compete for a channel, which `hearth_sim` simulates.

use super::Link;
use super::tcp::{CongestionWindow, MSS, TcpParameters};
use super::wifi::WifiChannel;
use crate::document_values::Sourced;
use crate::units::{Bytes, BytesPerSecond, Seconds};

/// The connection between a device and the access point.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Endpoint<'a> {
    /// A Wi-Fi station: the index of its channel in the scenario, the channel, and the bandwidth of the station.
    Station { index: usize, channel: &'a WifiChannel, rate: BytesPerSecond },
    /// A device that is connected by cable, and the link over the cable.
    Wire(&'a Link),
}

/// The network path from one device to another, at least one of which is a Wi-Fi station.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct WirelessPath<'a> {
    pub sender: Endpoint<'a>,
    pub receiver: Endpoint<'a>,
    pub tcp: &'a TcpParameters,
}

impl<'a> Endpoint<'a> {
    pub fn rate(&self) -> BytesPerSecond {
        match self {
            Endpoint::Station { rate, .. } => *rate,
            Endpoint::Wire(link) => link.bandwidth.value,
        }
    }

    /// Returns the fixed time of each transmission; zero for a cable.
    pub fn transmission_overhead(&self) -> Seconds {
        self.channel().map_or(Seconds(0.0), |channel| channel.transmission_overhead.value)
    }

    fn channel(&self) -> Option<&'a WifiChannel> {
        match self {
            Endpoint::Station { channel, .. } => Some(channel),
            Endpoint::Wire(_) => None,
        }
    }
}

impl<'a> WirelessPath<'a> {
    /// Returns the channel that determines the delay of a message: the receiver's channel if the receiver is on Wi-Fi
    /// (the message waits until the receiver wakes up from power saving), otherwise the sender's channel.
    pub fn delay_channel(&self) -> Option<&'a WifiChannel> {
        self.receiver.channel().or(self.sender.channel())
    }

    /// Returns whether both hops of the network path use the same channel.
    pub fn shares_channel(&self) -> bool {
        match (&self.sender, &self.receiver) {
            (Endpoint::Station { index: up, .. }, Endpoint::Station { index: down, .. }) => up == down,
            _ => false,
        }
    }

    /// Returns the overhead of a small message: one transmission for each hop over Wi-Fi.
    pub fn message_overhead(&self) -> Seconds {
        self.sender.transmission_overhead() + self.receiver.transmission_overhead()
    }

    pub fn wire_latency(&self) -> Seconds {
        let latency = |end: &Endpoint| match end {
            Endpoint::Wire(link) => link.latency.value,
            Endpoint::Station { .. } => Seconds(0.0),
        };
        latency(&self.sender) + latency(&self.receiver)
    }

    pub fn min_message_time(&self) -> Seconds {
        self.message_overhead() + self.wire_latency()
    }

    /// Returns the maximum size of a transmission: no channel sends it for longer than the channel's burst time, but it
    /// has at least one TCP segment.
    pub fn burst_bytes(&self) -> Bytes {
        let ends = [&self.sender, &self.receiver];
        let bytes =
            |end: &&Endpoint| end.channel().map(|channel| end.rate().0 * channel.max_burst_duration.value.0);
        let min = ends.iter().filter_map(bytes).fold(f64::INFINITY, f64::min);
        Bytes((min as u64).max(MSS.0))
    }

    /// Returns the rate of the network path if its two hops transmit one after the other.
    pub fn rate(&self) -> BytesPerSecond {
        BytesPerSecond(1.0 / (1.0 / self.sender.rate().0 + 1.0 / self.receiver.rate().0))
    }

    /// Returns the mean time of a message on otherwise idle channels. If `fresh`, the connection begins in slow start.
    pub fn mean_message_time(&self, bytes: Bytes, fresh: bool) -> Seconds {
        let [up, down] = self.sending_times(bytes);
        let stretch =
            |end: &Endpoint, time: Seconds| time * end.channel().map_or(0.0, WifiChannel::stall_fraction);
        let stretched = stretch(&self.sender, up) + stretch(&self.receiver, down);
        let slow_start = if fresh { self.slow_start_wait(bytes) } else { Seconds(0.0) };
        self.transmission_time(bytes) - self.message_overhead()
            + self.delay()
            + self.wire_latency()
            + self.residual_stall()
            + stretched
            + self.tcp.mean_retransmission_time(self.round_trip(), bytes)
            + slow_start
    }

    /// Returns the link whose latency and bandwidth give the mean time of messages that fit in one transmission.
    pub fn expected_link(&self) -> Link {
        let stretch = |end: &Endpoint| 1.0 + end.channel().map_or(0.0, WifiChannel::stall_fraction);
        let slowness = |end: &Endpoint| stretch(end) / end.rate().0;
        let extra = |end: &Endpoint| end.transmission_overhead() * (stretch(end) - 1.0);
        // For messages of several segments: two round trips for the last segment, one for each of the others.
        let reported = self.round_trip() * self.tcp.loss_rate.value.0;
        let each_byte = slowness(&self.sender) + slowness(&self.receiver) + reported.0 / MSS.as_f64();
        let latency = self.delay()
            + self.wire_latency()
            + self.residual_stall()
            + reported
            + extra(&self.sender)
            + extra(&self.receiver);
        let name = self.delay_channel().map_or("", |channel| channel.name.as_str());
        let source = format!("mean for a message that is alone on the channel `{name}`");
        Link::constant(
            Sourced::new(latency, source.clone()),
            Sourced::new(BytesPerSecond(1.0 / each_byte), source),
        )
    }

    /// Returns the total time of a message's transmissions on each of the two hops.
    fn sending_times(&self, bytes: Bytes) -> [Seconds; 2] {
        let bursts = bytes.0.div_ceil(self.burst_bytes().0).max(1) as f64;
        [&self.sender, &self.receiver].map(|end| end.transmission_overhead() * bursts + bytes / end.rate())
    }

    /// Returns the time from the start of a message's first transmission to the end of its last transmission.
    fn transmission_time(&self, bytes: Bytes) -> Seconds {
        let [up, down] = self.sending_times(bytes);
        let burst = self.burst_bytes().0;
        let full = bytes.0.saturating_sub(1) / burst;
        if self.shares_channel() || full == 0 {
            return up + down;
        }
        // A pipeline of two stages whose transmissions are equal except for the last. The critical path changes from
        // the first hop to the second after the first, the second to last, or the last transmission.
        let of = |bytes: u64| {
            [&self.sender, &self.receiver].map(|end| end.transmission_overhead() + Bytes(bytes) / end.rate())
        };
        let ([first, second], [last_first, last_second]) = (of(burst), of(bytes.0 - full * burst));
        let paths = [first + down, up - last_first + second + last_second, up + last_second];
        paths.into_iter().fold(Seconds(0.0), |longest, path| if path > longest { path } else { longest })
    }

    /// Returns the mean of max(X, c), where X is the log-normal delay and c is the overhead of a small message.
    fn delay(&self) -> Seconds {
        let Some(channel) = self.delay_channel() else { return Seconds(0.0) };
        let (median, sigma) = (channel.delay.median.value.0, channel.delay.sigma.value);
        let min = self.message_overhead().0;
        if sigma <= 0.0 || min <= 0.0 {
            return Seconds((median * (sigma * sigma / 2.0).exp()).max(min));
        }
        let at = (min / median).ln() / sigma;
        Seconds(min * normal_cdf(at) + median * (sigma * sigma / 2.0).exp() * normal_cdf(sigma - at))
    }

    /// Returns the mean round-trip time: twice the mean of the log-normal delay (2 E X).
    fn round_trip(&self) -> Seconds {
        self.delay_channel().map_or(Seconds(0.0), |channel| {
            let sigma = channel.delay.sigma.value;
            channel.delay.median.value * (2.0 * (sigma * sigma / 2.0).exp())
        })
    }

    /// Returns the mean time that a message waits at its start because a stall is in progress.
    fn residual_stall(&self) -> Seconds {
        let of = |end: &Endpoint| {
            let kinds = end.channel().map_or(Vec::new(), |channel| channel.stalls.stall_kinds());
            Seconds(kinds.iter().map(|kind| kind.rate.0 * kind.mean_square_duration() / 2.0).sum())
        };
        if self.shares_channel() { of(&self.sender) } else { of(&self.sender) + of(&self.receiver) }
    }

    fn slow_start_wait(&self, bytes: Bytes) -> Seconds {
        if !self.tcp.slow_start_after_idle {
            return Seconds(0.0);
        }
        CongestionWindow::initial(self.tcp).wait(self.round_trip(), self.rate(), bytes)
    }
}

/// Returns the cumulative distribution function of the standard normal distribution, with an error of at most 8e-8.
/// source: Abramowitz and Stegun, formula 26.2.17
fn normal_cdf(x: f64) -> f64 {
    let t = 1.0 / (1.0 + 0.231_641_9 * x.abs());
    let powers = [0.319_381_530, -0.356_563_782, 1.781_477_937, -1.821_255_978, 1.330_274_429];
    let sum = powers.iter().rev().fold(0.0, |sum, factor| (sum + factor) * t);
    let above = (-x * x / 2.0).exp() / (2.0 * std::f64::consts::PI).sqrt() * sum;
    if x >= 0.0 { 1.0 - above } else { above }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::link::wifi::{Delay, StallPreset, Stalls};
    use crate::units::Fraction;

    fn channel(stalls: StallPreset) -> WifiChannel {
        let text = "{name: t, bandwidth: {value: 800 Mbit/s, source: t}, stations: [a, b]}";
        let channel: WifiChannel = serde_yaml::from_str(text).unwrap();
        WifiChannel { stalls: Stalls::Preset(stalls), ..channel }
    }

    /// Returns the channel with a constant delay (sigma 0).
    fn without_spread(channel: WifiChannel) -> WifiChannel {
        WifiChannel { delay: Delay { sigma: Sourced::new(0.0, "t"), ..Delay::default() }, ..channel }
    }

    fn path<'a>(channel: &'a WifiChannel, tcp: &'a TcpParameters) -> WirelessPath<'a> {
        let end = Endpoint::Station { index: 0, channel, rate: channel.bandwidth.value };
        WirelessPath { sender: end, receiver: end, tcp }
    }

    fn lossless() -> TcpParameters {
        let loss = Sourced::new(Fraction(0.0), "test");
        TcpParameters { loss_rate: loss, slow_start_after_idle: false, ..TcpParameters::default() }
    }

    fn close(found: Seconds, expected: f64) {
        assert!((found.0 / expected - 1.0).abs() < 1e-6, "{} and not {expected}", found.0);
    }

    #[test]
    fn normal_distribution_values() {
        for (x, value) in [(0.0, 0.5), (1.0, 0.841_344_746), (-1.959_963_985, 0.025), (6.0, 1.0)] {
            assert!((normal_cdf(x) - value).abs() < 1e-7, "{x}: {}", normal_cdf(x));
        }
    }

    #[test]
    fn activation_takes_delay_and_two_transmissions() {
        let (channel, tcp) = (channel(StallPreset::Clean), lossless());
        let path = path(&channel, &tcp);
        // 1.9 ms e^(1/8) = 2.153 ms; 32 KiB at 100 MB/s up and down are 0.655 ms. The delay is shorter than the
        // overhead of 0.4 ms once in a thousand, for 0.0378 us on average.
        let (delay, bytes) = (1.9e-3 * 0.125_f64.exp(), 2.0 * 32768.0 / 100e6);
        let floor = delay + bytes;
        let found = path.mean_message_time(Bytes(32768), false);
        assert!(found.0 > floor && found.0 < floor + 1e-7, "{} and {floor}", found.0);
        close(path.expected_link().message_time(Bytes(32768)), found.0);
        close(Seconds(path.rate().0), 50e6);
        // Without spread, the time is the sum of the median delay and the transmissions.
        let sharp = without_spread(channel.clone());
        close(self::path(&sharp, &tcp).mean_message_time(Bytes(32768), false), 1.9e-3 + bytes);
    }

    #[test]
    fn long_message_pays_overhead_per_burst() {
        let (channel, tcp) = (channel(StallPreset::Clean), lossless());
        let path = path(&channel, &tcp);
        // A burst has 540 kB, so 2.7 MB are five bursts; the delay includes the overhead of one.
        let time = |bytes| path.mean_message_time(Bytes(bytes), false).0;
        close(Seconds(time(2_700_000) - time(540_000)), 2.0 * (2_160_000.0 / 100e6 + 4.0 * 0.2e-3));
    }

    #[test]
    fn two_channels_form_a_pipeline() {
        let (sharp, tcp) = (without_spread(channel(StallPreset::Clean)), lossless());
        let rate = sharp.bandwidth.value;
        let end = |index, rate| Endpoint::Station { index, channel: &sharp, rate };
        let path = WirelessPath { sender: end(0, rate), receiver: end(1, rate * 0.5), tcp: &tcp };
        // Five bursts of 270 kB take 2.9 ms up and 5.6 ms down each; while the first one is sent up, nothing is sent
        // down.
        close(path.mean_message_time(Bytes(1_350_000), false), 1.9e-3 - 0.4e-3 + 2.9e-3 + 5.0 * 5.6e-3);
        let reversed = WirelessPath { sender: path.receiver, receiver: path.sender, tcp: &tcp };
        close(reversed.mean_message_time(Bytes(1_350_000), false), 1.9e-3 - 0.4e-3 + 5.0 * 5.6e-3 + 2.9e-3);
    }

    #[test]
    fn stalls_losses_and_slow_start_add_their_terms() {
        let (clean, awdl) = (channel(StallPreset::Clean), channel(StallPreset::Awdl));
        let (quiet, bytes) = (lossless(), Bytes(32768));
        let plain = path(&clean, &quiet).mean_message_time(bytes, false).0;
        // 0.15 E[D^2]/2 = 0.49 ms, 0.03 E[D^2]/2 = 0.582 ms, and 1.77 % of 1.055 ms of sending.
        let found = path(&awdl, &quiet).mean_message_time(bytes, false).0 - plain;
        close(Seconds(found), 0.49e-3 + 0.582e-3 + 0.0177 * (0.4e-3 + 2.0 * 32768.0 / 100e6));
        // 23 segments: two round trips with probability 0.1 %, else a round trip with probability 2.175 %.
        let lossy = TcpParameters { slow_start_after_idle: false, ..TcpParameters::default() };
        let round_trip = 2.0 * 1.9e-3 * 0.125_f64.exp();
        let expected = (0.001 * 2.0 + 0.999 * (1.0 - 0.999_f64.powi(22))) * round_trip;
        close(Seconds(path(&clean, &lossy).mean_message_time(bytes, false).0 - plain), expected);
        // The window of 14480 bytes grows to 28960 before 32 KiB are sent: one round trip, less 0.29 ms of sending.
        let restarting = TcpParameters { slow_start_after_idle: true, ..lossless() };
        let fresh = path(&clean, &restarting);
        close(Seconds(fresh.mean_message_time(bytes, true).0 - plain), round_trip - 14480.0 / 50e6);
        close(fresh.mean_message_time(bytes, false), plain);
        // A message that fits the window does not wait.
        close(fresh.mean_message_time(Bytes(14480), true), fresh.mean_message_time(Bytes(14480), false).0);
    }
}
