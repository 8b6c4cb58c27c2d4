//! What is known of a Wi-Fi channel, and of the TCP connections over it?
//!
//! One transmission at a time is on the air. It takes an overhead and its bytes at the channel's rate, and at most a
//! burst; a longer message is sent in several. A station sends to the access point and the access point to a
//! station, so that a message between two stations is on the air twice. Beside that a message takes a delay that is
//! log-normal (power saving, drivers, the access point's queues), and sometimes a stall in which nothing is sent.
//!
//! Every number has a default that carries its source; only the bandwidth and the stations have none.
//!
//! Not here: what a message takes ([`super::path`]), and who waits for whom (the simulator).

use std::collections::{BTreeMap, BTreeSet};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::document::DocumentError;
use crate::sourced::Sourced;
use crate::units::{Bytes, BytesPerSecond, Fraction, PerSecond, Seconds};

/// The bytes of a message in one segment: an Ethernet frame of 1500 bytes less the headers of IP and TCP with
/// timestamps. source: RFC 9293, RFC 7323
pub const MSS: Bytes = Bytes(1448);

/// The least and the largest rate of a channel. source: IEEE 802.11-2020, whose slowest rate is 1 Mbit/s; the largest
/// is assumed, above everything that is sold
const RATE_RANGE: [f64; 2] = [125e3, 125e9];
/// The longest time on the air that a document may ask for, and the longest delay.
/// source: assumed, far above every network, so that a wrong unit is found
const MAX_TIME: Seconds = Seconds(1.0);
/// The widest spread of delays: one in a thousand is a hundred times the median. source: assumed, as above
const MAX_SIGMA: f64 = 1.5;
/// The longest stall. source: assumed, as above
pub const MAX_STALL: Seconds = Seconds(10.0);
/// Stalls of one kind come at most this often. source: assumed, as above
const MAX_STALL_RATE: f64 = 100.0;
/// The largest share of the time in which a channel may stand still. source: assumed; beyond it a channel hardly
/// ever carries anything
const MAX_STALLED_SHARE: f64 = 0.5;
/// The most channels, and the most kinds of stalls of one. source: assumed
const MAX_CHANNELS: usize = 16;

/// The Wi-Fi of a cluster.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(
    deny_unknown_fields,
    expecting = "channels, as `channels: [{name: 5 GHz, bandwidth: {value: 400 Mbit/s, source: \"measured\"}, stations: [one, other]}]`"
)]
pub struct Wifi {
    /// Each with air time of its own.
    pub channels: Vec<WifiChannel>,
    /// What every connection over them does.
    #[serde(default)]
    pub tcp: Tcp,
}

/// One channel: its stations share its air time.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(
    deny_unknown_fields,
    expecting = "a channel, as `{name: 5 GHz, bandwidth: {value: 400 Mbit/s, source: \"measured\"}, stations: [one, other]}`"
)]
pub struct WifiChannel {
    /// As people call it, `5 GHz`.
    pub name: String,
    /// Bytes per second of a transmission, of what a message has. Between two stations half of it is left.
    pub bandwidth: Sourced<BytesPerSecond>,
    /// Time on the air of a transmission beside its bytes.
    #[serde(default = "usual_overhead")]
    pub overhead: Sourced<Seconds>,
    /// The longest that the bytes of one transmission take.
    #[serde(default = "usual_burst")]
    pub burst: Sourced<Seconds>,
    /// What a small message takes one way when it has the air for itself, its own transmissions included.
    #[serde(default)]
    pub delay: Delay,
    /// When nothing is sent.
    #[serde(default)]
    pub stalls: Stalls,
    /// The devices on it.
    pub stations: Vec<String>,
    /// Stations with a bandwidth of their own, up and down.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub rates: BTreeMap<String, Sourced<BytesPerSecond>>,
}

/// A log-normal delay.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(
    deny_unknown_fields,
    expecting = "a delay, as `{median: {value: 2 ms, source: \"measured\"}, sigma: {value: 0.5, source: \"measured\"}}`"
)]
pub struct Delay {
    /// Half of all delays are longer.
    pub median: Sourced<Seconds>,
    /// Standard deviation of the delay's logarithm.
    pub sigma: Sourced<f64>,
}

/// The times in which nothing leaves a channel.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged, expecting = "`clean`, `awdl`, or a list of stalls with `rate`, `from`, `to` and `source`")]
pub enum Stalls {
    /// Known ones by name.
    Preset(Preset),
    /// Each kind comes by itself.
    Own(Vec<Stall>),
}

/// Stalls by name.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Preset {
    /// None.
    #[default]
    Clean,
    /// An Apple device on the channel, which leaves it to look for others nearby (Apple Wireless Direct Link):
    /// 0.15 /s of 60 to 100 ms and 0.03 /s of 100 to 280 ms. source: assumed; what it does is described in Stute,
    /// Kreitschmann, Hollick, "One Billion Apples' Secret Sauce", MobiCom 2018
    Awdl,
}

/// One kind of stall. Its beginnings are a Poisson process and its lengths uniform.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(
    deny_unknown_fields,
    expecting = "a kind of stall, as `{rate: 0.1 /s, from: 60 ms, to: 100 ms, source: \"measured\"}`"
)]
pub struct Stall {
    /// How often.
    pub rate: PerSecond,
    /// The shortest.
    pub from: Seconds,
    /// The longest.
    pub to: Seconds,
    /// Where the numbers come from.
    pub source: String,
}

/// What TCP adds.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default, expecting = "what TCP adds, as `{idle_restart: true}`")]
pub struct Tcp {
    /// Whether a connection that was idle for a retransmission timeout begins again with the initial window (RFC
    /// 5681, section 4.1; `net.ipv4.tcp_slow_start_after_idle`). What is longer than that window then waits for
    /// acknowledgements, a round trip for each doubling.
    pub idle_restart: bool,
    /// What a connection sends before it has heard anything.
    pub initial_window: Sourced<Bytes>,
    /// The share of segments that the channel's own repeating does not bring over. Three later segments of the
    /// same message report a loss at once (RFC 5681, section 3.2), which costs a round trip; without them the timer
    /// has to run out.
    pub loss: Sourced<Fraction>,
    /// The retransmission timeout.
    pub rto: Sourced<Seconds>,
}

/// What of IEEE 802.11-2020 one transmission of best effort takes at 5 GHz: AIFS 43 us, 7.5 slots of back-off 68 us,
/// preamble 40 us, SIFS 16 us, block acknowledgement 32 us.
fn usual_overhead() -> Sourced<Seconds> {
    Sourced::new(
        Seconds(0.2e-3),
        "IEEE 802.11-2020: AIFS, mean back-off, preamble, SIFS, block acknowledgement",
    )
}

fn usual_burst() -> Sourced<Seconds> {
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
        Stalls::Preset(Preset::Clean)
    }
}

impl Default for Tcp {
    fn default() -> Self {
        Self {
            idle_restart: true,
            initial_window: Sourced::new(MSS * 10, "RFC 6928: ten segments"),
            loss: Sourced::new(Fraction(0.001), "assumed: one segment in a thousand"),
            rto: Sourced::new(Seconds(0.2), "TCP_RTO_MIN in include/net/tcp.h; RFC 6298 would have a second"),
        }
    }
}

impl Stalls {
    /// The kinds of stalls.
    pub fn kinds(&self) -> Vec<Stall> {
        let awdl = |rate, from, to| Stall {
            rate: PerSecond(rate),
            from: Seconds(from),
            to: Seconds(to),
            source: "assumed: an Apple device on the channel".into(),
        };
        match self {
            Stalls::Preset(Preset::Clean) => Vec::new(),
            Stalls::Preset(Preset::Awdl) => vec![awdl(0.15, 0.060, 0.100), awdl(0.03, 0.100, 0.280)],
            Stalls::Own(own) => own.clone(),
        }
    }
}

impl Stall {
    /// The mean length.
    pub fn mean(&self) -> Seconds {
        (self.from + self.to) / 2.0
    }

    /// The mean of the squared length, in square seconds.
    pub fn mean_square(&self) -> f64 {
        let (from, to) = (self.from.0, self.to.0);
        (from * from + from * to + to * to) / 3.0
    }
}

impl WifiChannel {
    /// The rate of a station.
    pub fn rate(&self, station: &str) -> BytesPerSecond {
        self.rates.get(station).unwrap_or(&self.bandwidth).value
    }

    /// The share of the time in which it stands still, if no two stalls overlap.
    pub fn stalled(&self) -> f64 {
        self.stalls.kinds().iter().map(|kind| kind.rate.0 * kind.mean().0).sum()
    }

    fn validate(&self) -> Result<(), String> {
        within("bandwidth", self.bandwidth.value)?;
        for (station, rate) in &self.rates {
            if !self.stations.contains(station) {
                return Err(format!("`rates` names `{station}`, which is not one of its stations"));
            }
            within(&format!("rates.{station}"), rate.value)?;
        }
        short("overhead", self.overhead.value, Seconds(0.0))?;
        // Shorter ones would hold less than a packet.
        short("burst", self.burst.value, Seconds(1e-4))?;
        short("delay.median", self.delay.median.value, Seconds(1e-6))?;
        let sigma = self.delay.sigma.value;
        if !(0.0..=MAX_SIGMA).contains(&sigma) {
            return Err(format!("`delay.sigma` is {sigma}: choose from 0 to {MAX_SIGMA}"));
        }
        let kinds = self.stalls.kinds();
        if kinds.len() > MAX_CHANNELS {
            return Err(format!("`stalls` has {} kinds; at most {MAX_CHANNELS} are taken", kinds.len()));
        }
        for kind in &kinds {
            if !(kind.rate.0 > 0.0 && kind.rate.0 <= MAX_STALL_RATE) {
                return Err(format!(
                    "stalls of {} /s: choose a `rate` up to {MAX_STALL_RATE} /s",
                    kind.rate.0
                ));
            }
            if !(kind.from <= kind.to && kind.to <= MAX_STALL) {
                let (from, to) = (kind.from, kind.to);
                return Err(format!(
                    "stalls from {from} to {to}: give the shorter first, at most {MAX_STALL}"
                ));
            }
        }
        let stalled = self.stalled();
        if stalled > MAX_STALLED_SHARE {
            let most = MAX_STALLED_SHARE * 100.0;
            return Err(format!(
                "`stalls` take {:.0} % of the time; at most {most} % can be",
                stalled * 100.0
            ));
        }
        Ok(())
    }
}

impl Tcp {
    fn validate(&self) -> Result<(), String> {
        let window = self.initial_window.value;
        if window < MSS {
            return Err(format!("`initial_window` is {window}: give at least a segment of {} B", MSS.0));
        }
        // Beyond it a connection hardly gets anything over, and nobody would call it a network.
        if self.loss.value.0 > 0.1 {
            return Err(format!("`loss` is {:.0} %: at most 10 % can be", self.loss.value.0 * 100.0));
        }
        // source: TCP_RTO_MAX in include/net/tcp.h is two minutes
        if !(1e-3..=120.0).contains(&self.rto.value.0) {
            return Err(format!("`rto` is {}: choose from 1 ms to 120 s", self.rto.value));
        }
        Ok(())
    }
}

impl Wifi {
    /// Whether it can be, among these devices. `wire` is what devices on no channel hang on.
    pub fn validate(&self, devices: &BTreeSet<&str>, wire: &super::Link) -> Result<(), DocumentError> {
        let refuse =
            |what: String| Err(DocumentError::invalid_at("links.wifi", format!("links.wifi: {what}")));
        if self.channels.is_empty() || self.channels.len() > MAX_CHANNELS {
            return refuse(format!("{} channels: give 1 to {MAX_CHANNELS}", self.channels.len()));
        }
        let (mut names, mut stations) = (BTreeSet::new(), BTreeSet::new());
        for channel in &self.channels {
            let name = &channel.name;
            if name.is_empty() || !names.insert(name) {
                return refuse(format!("the channel name `{name}` is empty or used twice"));
            }
            if channel.stations.is_empty() {
                return refuse(format!("channel `{name}` has no `stations`"));
            }
            for station in &channel.stations {
                if !devices.contains(station.as_str()) {
                    return refuse(format!("channel `{name}` names `{station}`, which is not a device here"));
                }
                if !stations.insert(station) {
                    return refuse(format!("`{station}` is a station twice; a device is on one channel"));
                }
            }
            channel.validate().or_else(|what| refuse(format!("channel `{name}`: {what}")))?;
        }
        if stations.len() < devices.len() {
            let checked = within("bandwidth", wire.bandwidth.value)
                .and_then(|()| short("latency", wire.latency.value, Seconds(0.0)));
            checked.or_else(|what| {
                refuse(format!("devices on no channel hang on `links.default`, whose {what}"))
            })?;
        }
        self.tcp.validate().or_else(|what| refuse(format!("tcp: {what}")))
    }
}

fn within(key: &str, rate: BytesPerSecond) -> Result<(), String> {
    if (RATE_RANGE[0]..=RATE_RANGE[1]).contains(&rate.0) {
        return Ok(());
    }
    Err(format!("`{key}` is {rate}: choose from 1 Mbit/s to 1000 Gbit/s"))
}

fn short(key: &str, time: Seconds, least: Seconds) -> Result<(), String> {
    if time >= least && time <= MAX_TIME {
        return Ok(());
    }
    Err(format!("`{key}` is {time}: choose from {least} to {MAX_TIME}"))
}
