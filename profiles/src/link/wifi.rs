//! Wi-Fi channels of a scenario, and the TCP connections over them.
//!
//! A channel carries one transmission at a time. A transmission takes a fixed overhead and the time of its data,
//! which is at most the burst time; a longer message is sent in several transmissions. Stations send to the access
//! point and receive from it, so that a message between two stations is transmitted twice. A message also has a
//! log-normal delay (power saving, drivers, queues of the access point), and may wait for a stall, in which the
//! channel transmits nothing.
//!
//! All parameters except the bandwidth and the stations have a default with its source.
//!
//! Not here: the mean time of a message ([`super::wifi_path`]), and contention (the simulator).

use std::collections::{BTreeMap, BTreeSet};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::document::DocumentError;
use crate::units::{Bytes, BytesPerSecond, Fraction, PerSecond, Seconds};
use crate::values::Sourced;

/// Maximum payload of a TCP segment: an Ethernet frame of 1500 bytes less the headers of IP and TCP with timestamps.
/// source: RFC 9293, RFC 7323
pub const MSS: Bytes = Bytes(1448);

/// Minimum and maximum rate of a channel in bytes per second. source: IEEE 802.11-2020, whose slowest rate is 1
/// Mbit/s; the maximum is assumed, above all products
const RATE_RANGE: [f64; 2] = [125e3, 125e9];
/// Maximum overhead, burst time and delay. source: assumed, far above those of every network, to detect wrong units
const MAX_TIME: Seconds = Seconds(1.0);
/// Maximum `sigma` of a delay, with which one delay in a thousand is a hundred times the median. source: assumed
const MAX_SIGMA: f64 = 1.5;
/// Maximum duration of a stall. source: assumed, to detect wrong units
pub const MAX_STALL_DURATION: Seconds = Seconds(10.0);
/// Maximum rate of one kind of stall, per second. source: assumed, to detect wrong units
const MAX_STALL_RATE: f64 = 100.0;
/// Maximum fraction of time in stalls. source: assumed; a channel with more stalls hardly ever transmits
const MAX_STALL_FRACTION: f64 = 0.5;
/// Maximum number of channels, and of kinds of stalls of one channel. source: assumed
const MAX_CHANNELS: usize = 16;

/// The Wi-Fi channels of a cluster.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(
    deny_unknown_fields,
    expecting = "channels, such as `channels: [{name: 5 GHz, bandwidth: {value: 400 Mbit/s, source: \"measured\"}, stations: [one, other]}]`"
)]
pub struct Wifi {
    /// Independent channels.
    pub channels: Vec<WifiChannel>,
    /// Parameters of the TCP connections over the channels.
    #[serde(default)]
    pub tcp: TcpParameters,
}

/// A channel, whose stations share the airtime.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(
    deny_unknown_fields,
    expecting = "a channel, such as `{name: 5 GHz, bandwidth: {value: 400 Mbit/s, source: \"measured\"}, stations: [one, other]}`"
)]
pub struct WifiChannel {
    /// Name of the channel, for example `5 GHz`.
    pub name: String,
    /// Bandwidth during a transmission. A message between two stations is transmitted twice, so it has half of this
    /// bandwidth.
    pub bandwidth: Sourced<BytesPerSecond>,
    /// Fixed time of a transmission.
    #[serde(rename = "overhead", default = "default_overhead")]
    pub transmission_overhead: Sourced<Seconds>,
    /// Maximum duration of the data of one transmission.
    #[serde(rename = "burst", default = "default_burst")]
    pub max_burst_duration: Sourced<Seconds>,
    /// One-way time of a small message on an idle channel, including its own transmissions.
    #[serde(default)]
    pub delay: Delay,
    /// Periods in which the channel transmits nothing.
    #[serde(default)]
    pub stalls: Stalls,
    /// Names of the devices on the channel.
    pub stations: Vec<String>,
    /// Bandwidths of stations that differ from `bandwidth`, for both directions.
    #[serde(rename = "rates", default, skip_serializing_if = "BTreeMap::is_empty")]
    pub station_rates: BTreeMap<String, Sourced<BytesPerSecond>>,
}

/// A log-normal delay.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(
    deny_unknown_fields,
    expecting = "a delay, such as `{median: {value: 2 ms, source: \"measured\"}, sigma: {value: 0.5, source: \"measured\"}}`"
)]
pub struct Delay {
    /// Median of the delay.
    pub median: Sourced<Seconds>,
    /// Standard deviation of the delay's logarithm.
    pub sigma: Sourced<f64>,
}

/// Periods in which a channel transmits nothing.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged, expecting = "`clean`, `awdl`, or a list of stalls with `rate`, `from`, `to` and `source`")]
pub enum Stalls {
    /// The name of a preset.
    Preset(StallPreset),
    /// Independent kinds of stalls.
    Custom(Vec<Stall>),
}

/// A preset of stalls.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum StallPreset {
    /// No stalls.
    #[default]
    Clean,
    /// An Apple device that periodically leaves the channel to search for nearby devices (Apple Wireless Direct
    /// Link): on average 0.15 stalls per second of 60 to 100 ms each, and 0.03 stalls per second of 100 to 280 ms
    /// each. source: assumed; the protocol is described in Stute, Kreitschmann, Hollick, "One Billion Apples' Secret
    /// Sauce", MobiCom 2018
    Awdl,
}

/// A kind of stall. Stalls begin as a Poisson process and have uniformly distributed durations.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(
    deny_unknown_fields,
    expecting = "a kind of stall, such as `{rate: 0.1 /s, from: 60 ms, to: 100 ms, source: \"measured\"}`"
)]
pub struct Stall {
    /// Mean number of stalls per second.
    pub rate: PerSecond,
    /// Minimum duration of a stall.
    #[serde(rename = "from")]
    pub min_duration: Seconds,
    /// Maximum duration of a stall.
    #[serde(rename = "to")]
    pub max_duration: Seconds,
    /// Source of the values.
    pub source: String,
}

/// Parameters of TCP connections.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default, expecting = "the parameters of TCP, such as `{idle_restart: true}`")]
pub struct TcpParameters {
    /// Whether a connection restarts with the initial window after it was idle for a retransmission timeout (RFC
    /// 5681, section 4.1; `net.ipv4.tcp_slow_start_after_idle`). A message longer than the window then waits for
    /// acknowledgements, one round trip for each doubling of the window.
    #[serde(rename = "idle_restart")]
    pub slow_start_after_idle: bool,
    /// Initial congestion window: bytes sent before the first acknowledgement.
    pub initial_window: Sourced<Bytes>,
    /// Fraction of segments that are lost in spite of the retransmissions of the channel. A loss costs a round trip
    /// if three later segments of the same message follow (RFC 5681, section 3.2), otherwise the timeout.
    #[serde(rename = "loss")]
    pub loss_rate: Sourced<Fraction>,
    /// Retransmission timeout.
    pub rto: Sourced<Seconds>,
}

/// Returns the overhead of a best-effort transmission at 5 GHz by IEEE 802.11-2020: AIFS 43 us, 7.5 slots of back-off
/// 68 us, preamble 40 us, SIFS 16 us, block acknowledgement 32 us.
fn default_overhead() -> Sourced<Seconds> {
    let source = "IEEE 802.11-2020: AIFS, mean back-off, preamble, SIFS, block acknowledgement";
    Sourced::new(Seconds(0.2e-3), source)
}

fn default_burst() -> Sourced<Seconds> {
    Sourced::new(Seconds(5.4e-3), "IEEE 802.11-2020: a transmission lasts at most 5.484 ms")
}

impl Default for Delay {
    fn default() -> Self {
        let source = "assumed: a quiet home network, where a round trip takes about 4 ms";
        Self { median: Sourced::new(Seconds(1.9e-3), source), sigma: Sourced::new(0.5, source) }
    }
}

impl Default for Stalls {
    fn default() -> Self {
        Stalls::Preset(StallPreset::Clean)
    }
}

impl Default for TcpParameters {
    fn default() -> Self {
        Self {
            slow_start_after_idle: true,
            initial_window: Sourced::new(MSS * 10, "RFC 6928: ten segments"),
            loss_rate: Sourced::new(Fraction(0.001), "assumed: one segment in a thousand"),
            rto: Sourced::new(Seconds(0.2), "TCP_RTO_MIN in include/net/tcp.h; RFC 6298 would have a second"),
        }
    }
}

impl Stalls {
    /// Returns the kinds of stalls, including those of a preset.
    pub fn stall_kinds(&self) -> Vec<Stall> {
        let awdl = |rate, min, max| Stall {
            rate: PerSecond(rate),
            min_duration: Seconds(min),
            max_duration: Seconds(max),
            source: "assumed: an Apple device on the channel".into(),
        };
        match self {
            Stalls::Preset(StallPreset::Clean) => Vec::new(),
            Stalls::Preset(StallPreset::Awdl) => vec![awdl(0.15, 0.060, 0.100), awdl(0.03, 0.100, 0.280)],
            Stalls::Custom(kinds) => kinds.clone(),
        }
    }
}

impl Stall {
    pub fn mean_duration(&self) -> Seconds {
        (self.min_duration + self.max_duration) / 2.0
    }

    /// Returns the mean of the squared duration of a stall, in s².
    pub fn mean_square_duration(&self) -> f64 {
        let (min, max) = (self.min_duration.0, self.max_duration.0);
        (min * min + min * max + max * max) / 3.0
    }
}

impl WifiChannel {
    pub fn station_rate(&self, station: &str) -> BytesPerSecond {
        self.station_rates.get(station).unwrap_or(&self.bandwidth).value
    }

    /// Returns the mean fraction of time in stalls, from 0 to 1, if stalls do not overlap.
    pub fn stall_fraction(&self) -> f64 {
        self.stalls.stall_kinds().iter().map(|kind| kind.rate.0 * kind.mean_duration().0).sum()
    }

    fn validate(&self) -> Result<(), String> {
        check_rate("bandwidth", self.bandwidth.value)?;
        for (station, rate) in &self.station_rates {
            if !self.stations.contains(station) {
                return Err(format!("`rates` names `{station}`, which is not one of its stations"));
            }
            check_rate(&format!("rates.{station}"), rate.value)?;
        }
        check_time("overhead", self.transmission_overhead.value, Seconds(0.0))?;
        // A shorter burst would be too short for a packet.
        check_time("burst", self.max_burst_duration.value, Seconds(1e-4))?;
        check_time("delay.median", self.delay.median.value, Seconds(1e-6))?;
        let sigma = self.delay.sigma.value;
        if !(0.0..=MAX_SIGMA).contains(&sigma) {
            return Err(format!("`delay.sigma` is {sigma}: choose from 0 to {MAX_SIGMA}"));
        }
        let kinds = self.stalls.stall_kinds();
        if kinds.len() > MAX_CHANNELS {
            return Err(format!("`stalls` has {} kinds; the maximum is {MAX_CHANNELS}", kinds.len()));
        }
        for kind in &kinds {
            if !(kind.rate.0 > 0.0 && kind.rate.0 <= MAX_STALL_RATE) {
                let rate = kind.rate.0;
                return Err(format!(
                    "stalls at {rate} /s: choose a `rate` above 0 and up to {MAX_STALL_RATE} /s"
                ));
            }
            let (from, to) = (kind.min_duration, kind.max_duration);
            if from.0.is_nan() || from > to {
                return Err(format!("stalls from {from} to {to}: give the shorter duration first"));
            }
            if to.0.is_nan() || to > MAX_STALL_DURATION {
                return Err(format!("stalls of up to {to}: choose at most {MAX_STALL_DURATION}"));
            }
        }
        let (percent, max) = (self.stall_fraction() * 100.0, MAX_STALL_FRACTION * 100.0);
        if self.stall_fraction() > MAX_STALL_FRACTION {
            return Err(format!("`stalls` take {percent:.0} % of the time; the maximum is {max} %"));
        }
        Ok(())
    }
}

impl TcpParameters {
    fn validate(&self) -> Result<(), String> {
        let window = self.initial_window.value;
        if window < MSS {
            return Err(format!("`initial_window` is {window}: give at least a segment of {} B", MSS.0));
        }
        // With more losses a connection hardly transmits anything.
        if self.loss_rate.value.0 > 0.1 {
            return Err(format!("`loss` is {:.0} %: the maximum is 10 %", self.loss_rate.value.0 * 100.0));
        }
        // source: TCP_RTO_MAX in include/net/tcp.h is two minutes
        if !(1e-3..=120.0).contains(&self.rto.value.0) {
            return Err(format!("`rto` is {}: choose from 1 ms to 120 s", self.rto.value));
        }
        Ok(())
    }
}

impl Wifi {
    /// Checks the channels and that their stations are among `devices`. `wire` is the link of all other devices.
    pub fn validate(&self, devices: &BTreeSet<&str>, wire: &super::Link) -> Result<(), DocumentError> {
        let refuse =
            |what: String| Err(DocumentError::invalid_value("links.wifi", format!("links.wifi: {what}")));
        if self.channels.is_empty() || self.channels.len() > MAX_CHANNELS {
            return refuse(format!("{} channels: give 1 to {MAX_CHANNELS}", self.channels.len()));
        }
        let (mut names, mut stations) = (BTreeSet::new(), BTreeSet::new());
        for channel in &self.channels {
            let name = &channel.name;
            if name.is_empty() {
                return refuse("a channel has an empty `name`".to_owned());
            }
            if !names.insert(name) {
                return refuse(format!("two channels are called `{name}`"));
            }
            if channel.stations.is_empty() {
                return refuse(format!("channel `{name}` has no `stations`"));
            }
            for station in &channel.stations {
                if !devices.contains(station.as_str()) {
                    return refuse(format!(
                        "channel `{name}` names `{station}`, which is not a device of this scenario"
                    ));
                }
                if !stations.insert(station) {
                    return refuse(format!(
                        "`{station}` is listed as a station twice; a device can be on only one channel"
                    ));
                }
            }
            channel.validate().or_else(|what| refuse(format!("channel `{name}`: {what}")))?;
        }
        if stations.len() < devices.len() {
            check_rate("bandwidth", wire.bandwidth.value)
                .and_then(|()| check_time("latency", wire.latency.value, Seconds(0.0)))
                .or_else(|what| refuse(format!("devices on no channel use `links.default`, whose {what}")))?;
        }
        self.tcp.validate().or_else(|what| refuse(format!("tcp: {what}")))
    }
}

fn check_rate(key: &str, rate: BytesPerSecond) -> Result<(), String> {
    if (RATE_RANGE[0]..=RATE_RANGE[1]).contains(&rate.0) {
        return Ok(());
    }
    Err(format!("`{key}` is {rate}: choose from 1 Mbit/s to 1000 Gbit/s"))
}

fn check_time(key: &str, time: Seconds, min: Seconds) -> Result<(), String> {
    if time >= min && time <= MAX_TIME {
        return Ok(());
    }
    Err(format!("`{key}` is {time}: choose from {min} to {MAX_TIME}"))
}
