//! Wi-Fi channels of a scenario, and the TCP connections over them.
//!
//! A channel carries one transmission at a time. A transmission takes a fixed overhead and the time of its data, which
//! is at most the burst time; a longer message is sent in several transmissions. Stations send to the access point and
//! receive from it, so that a message between two stations is transmitted twice. A message also has a log-normal delay
//! (power saving, drivers, queues of the access point), and may wait until the end of a stall, a period in which the
//! channel transmits nothing.
//!
//! All parameters except the name, the bandwidth and the stations have a default value with a source.
//!
//! Not here: the mean time of a message ([`super::wifi_path`]), and competing messages (the simulator).

use std::collections::{BTreeMap, BTreeSet};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::tcp::TcpParameters;
use crate::document::DocumentError;
use crate::document_values::Sourced;
use crate::units::{BytesPerSecond, PerSecond, Seconds};

/// Minimum and maximum rate of a channel in bytes per second. source: IEEE 802.11-2020, whose slowest rate is 1
/// Mbit/s; the maximum is assumed, above the rates of all products
const RATE_RANGE: [f64; 2] = [125e3, 125e9];
/// Maximum overhead, burst time and median delay of a channel. source: assumed, to detect wrong units
const MAX_TIME: Seconds = Seconds(1.0);
/// Maximum `sigma` of a delay: 1 of 1000 delays is then more than 100 times the median. source: assumed
const MAX_SIGMA: f64 = 1.5;
/// Maximum duration of a stall. source: assumed, to detect wrong units
pub const MAX_STALL_DURATION: Seconds = Seconds(10.0);
/// Maximum number of stalls of one kind per second. source: assumed, to detect wrong units
const MAX_STALL_RATE: f64 = 100.0;
/// Maximum fraction of time that a channel spends in stalls.
/// source: assumed; a channel with more stalls hardly transmits anything
const MAX_STALL_FRACTION: f64 = 0.5;
/// Maximum number of channels in a scenario, and of kinds of stalls of one channel. source: assumed
const MAX_CHANNELS: usize = 16;

/// The Wi-Fi channels of a scenario.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(
    deny_unknown_fields,
    expecting = "channels, such as `channels: [{name: 5 GHz, bandwidth: {value: 400 Mbit/s, source: \"measured\"}, stations: [one, other]}]`"
)]
pub struct Wifi {
    /// Channels, which do not interfere with each other.
    pub channels: Vec<WifiChannel>,
    /// Parameters of the TCP connections over the channels.
    #[serde(default)]
    pub tcp: TcpParameters,
}

/// A Wi-Fi channel, on which one station transmits at a time.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(
    deny_unknown_fields,
    expecting = "a channel, such as `{name: 5 GHz, bandwidth: {value: 400 Mbit/s, source: \"measured\"}, stations: [one, other]}`"
)]
pub struct WifiChannel {
    /// Name of the channel, for example `5 GHz`.
    pub name: String,
    /// Bandwidth during a transmission. A message between two stations is sent twice, so it gets half the bandwidth.
    pub bandwidth: Sourced<BytesPerSecond>,
    /// Fixed time that each transmission takes in addition to its data.
    #[serde(rename = "overhead", default = "default_overhead")]
    pub transmission_overhead: Sourced<Seconds>,
    /// Maximum duration of the data of one transmission.
    #[serde(rename = "burst", default = "default_burst")]
    pub max_burst_duration: Sourced<Seconds>,
    /// One-way time of a small message on an idle channel, including the transmissions of the message.
    #[serde(default)]
    pub delay: Delay,
    /// Periods in which the channel transmits nothing.
    #[serde(default)]
    pub stalls: Stalls,
    /// Names of the devices on the channel.
    pub stations: Vec<String>,
    /// Bandwidths of individual stations, in both directions. The other stations have `bandwidth`.
    #[serde(rename = "rates", default, skip_serializing_if = "BTreeMap::is_empty")]
    pub station_rates: BTreeMap<String, Sourced<BytesPerSecond>>,
}

/// A log-normal distribution of delays.
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
    /// A list of kinds of stalls, which occur independently of each other.
    Custom(Vec<Stall>),
}

/// A preset of the stalls on a channel.
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

/// A kind of stall. The starts of the stalls are a Poisson process, and the durations are uniformly distributed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(
    deny_unknown_fields,
    expecting = "a kind of stall, such as `{rate: 0.1 /s, from: 60 ms, to: 100 ms, source: \"measured\"}`"
)]
pub struct Stall {
    /// Mean number of stalls of this kind per second.
    pub rate: PerSecond,
    /// Minimum duration of a stall.
    #[serde(rename = "from")]
    pub min_duration: Seconds,
    /// Maximum duration of a stall.
    #[serde(rename = "to")]
    pub max_duration: Seconds,
    /// Source of the rate and the durations.
    pub source: String,
}

/// Returns the overhead of a best-effort transmission at 5 GHz according to IEEE 802.11-2020: AIFS 43 us, 7.5 slots of
/// back-off 68 us, preamble 40 us, SIFS 16 us, block acknowledgement 32 us.
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

/// Returns an error with a formatted message from the current function if the condition is false.
macro_rules! ensure {
    ($condition:expr, $($message:tt)+) => {
        let holds: bool = $condition;
        if !holds {
            return Err(format!($($message)+));
        }
    };
}

impl Stalls {
    /// Returns the kinds of stalls on the channel. For a preset, these are the kinds in the preset.
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

    /// Returns the mean fraction of time (0 to 1) that the channel spends in stalls, if stalls do not overlap.
    pub fn stall_fraction(&self) -> f64 {
        let fraction = |kind: Stall| kind.rate.0 * ((kind.min_duration + kind.max_duration) / 2.0).0;
        self.stalls.stall_kinds().into_iter().map(fraction).sum()
    }

    fn validate(&self) -> Result<(), String> {
        check_rate("bandwidth", self.bandwidth.value)?;
        for (station, rate) in &self.station_rates {
            let is_station = self.stations.contains(station);
            ensure!(is_station, "`rates` names `{station}`, which is not in `stations`");
            check_rate(&format!("rates.{station}"), rate.value)?;
        }
        check_time("overhead", self.transmission_overhead.value, Seconds(0.0))?;
        // A shorter burst would be too short for a packet.
        check_time("burst", self.max_burst_duration.value, Seconds(1e-4))?;
        check_time("delay.median", self.delay.median.value, Seconds(1e-6))?;
        let sigma = self.delay.sigma.value;
        ensure!((0.0..=MAX_SIGMA).contains(&sigma), "`delay.sigma` is {sigma}: choose from 0 to {MAX_SIGMA}");
        let kinds = self.stalls.stall_kinds();
        let count = kinds.len();
        ensure!(count <= MAX_CHANNELS, "`stalls` has {count} kinds: list at most {MAX_CHANNELS}");
        for kind in &kinds {
            let (rate, from, to) = (kind.rate.0, kind.min_duration, kind.max_duration);
            let is_valid = rate > 0.0 && rate <= MAX_STALL_RATE;
            ensure!(is_valid, "`rate` of a stall is {rate} /s: choose above 0, up to {MAX_STALL_RATE} /s");
            ensure!(from <= to, "a stall lasts from {from} to {to}: give the shorter duration first");
            ensure!(to <= MAX_STALL_DURATION, "`to` of a stall is {to}: choose at most {MAX_STALL_DURATION}");
        }
        let (percent, max) = (self.stall_fraction() * 100.0, MAX_STALL_FRACTION * 100.0);
        ensure!(percent <= max, "`stalls` take {percent:.0} % of the time: choose at most {max} %");
        Ok(())
    }
}

impl Wifi {
    /// Checks the channels, whose stations must be in `devices`. `wire` is the link of devices on no channel.
    pub fn validate(&self, devices: &BTreeSet<&str>, wire: &super::Link) -> Result<(), DocumentError> {
        self.check(devices, wire)
            .map_err(|what| DocumentError::invalid_value("links.wifi", format!("links.wifi: {what}")))
    }

    fn check(&self, devices: &BTreeSet<&str>, wire: &super::Link) -> Result<(), String> {
        let count = self.channels.len();
        ensure!((1..=MAX_CHANNELS).contains(&count), "there are {count} channels: give 1 to {MAX_CHANNELS}");
        let (mut names, mut stations) = (BTreeSet::new(), BTreeSet::new());
        for channel in &self.channels {
            let name = &channel.name;
            ensure!(!name.is_empty(), "a channel has an empty `name`: give every channel a name");
            ensure!(names.insert(name), "two channels are called `{name}`: give them different names");
            ensure!(!channel.stations.is_empty(), "channel `{name}` has no `stations`: list its devices");
            for station in &channel.stations {
                let known = devices.contains(station.as_str());
                ensure!(known, "channel `{name}` lists `{station}`, which is not a device of this scenario");
                let is_new = stations.insert(station);
                ensure!(is_new, "`{station}` is listed as a station twice: list a device on one channel");
            }
            channel.validate().map_err(|what| format!("channel `{name}`: {what}"))?;
        }
        if stations.len() < devices.len() {
            check_rate("bandwidth", wire.bandwidth.value)
                .and_then(|()| check_time("latency", wire.latency.value, Seconds(0.0)))
                .map_err(|what| format!("devices on no channel use `links.default`, whose {what}"))?;
        }
        self.tcp.validate().map_err(|what| format!("tcp: {what}"))
    }
}

fn check_rate(key: &str, rate: BytesPerSecond) -> Result<(), String> {
    let is_valid = (RATE_RANGE[0]..=RATE_RANGE[1]).contains(&rate.0);
    ensure!(is_valid, "`{key}` is {rate}: choose from 1 Mbit/s to 1000 Gbit/s");
    Ok(())
}

fn check_time(key: &str, time: Seconds, min: Seconds) -> Result<(), String> {
    ensure!((min..=MAX_TIME).contains(&time), "`{key}` is {time}: choose from {min} to {MAX_TIME}");
    Ok(())
}
