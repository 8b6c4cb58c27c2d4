//! Impairments of the packets on the links that `hearth lab` emulates between network namespaces.
//!
//! The simulator does not read them: it uses links that were measured through them.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::units::{Bytes, Fraction};

/// Minimum size of a queue: a packet of 1500 bytes. source: IEEE 802.3, the payload of an Ethernet frame
const MIN_QUEUE: Bytes = Bytes(1500);
/// Maximum fraction of lost packets. source: assumed; a connection with more losses hardly transmits anything
const MAX_LOSS: f64 = 0.2;
/// Maximum `sigma` of a jitter: 1 of 1000 delays is then more than 20 times the median. source: assumed
const MAX_SIGMA: f64 = 1.0;
/// Maximum mean number of packets that are lost in a row. source: assumed, to detect wrong units
const MAX_BURST: f64 = 100.0;

/// Impairments of the packets on every emulated link, in both directions.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(
    deny_unknown_fields,
    default,
    expecting = "impairments, such as `{queue: {size: 256 KiB}, loss: {rate: 1 %}}`"
)]
pub struct Impairments {
    /// The queue of packets before each link, and of each station before a Wi-Fi channel.
    pub queue: Queue,
    /// Random variation of the latency of a link. A Wi-Fi channel has its own `delay.sigma`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub jitter: Option<Jitter>,
    /// Random loss of packets.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub loss: Option<PacketLoss>,
    /// Fraction of packets that take half the latency, so that they overtake others.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reordering: Option<Fraction>,
}

/// A queue of packets.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, expecting = "a queue, such as `{size: 256 KiB, discipline: codel}`")]
pub struct Queue {
    /// Bytes of packets that wait at most. Packets that do not fit are lost.
    pub size: Bytes,
    #[serde(default)]
    pub discipline: QueueDiscipline,
}

/// Which packets a queue drops.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum QueueDiscipline {
    /// Packets that do not fit.
    #[default]
    DropTail,
    /// Also packets that have waited too long (Controlled Delay, RFC 8289).
    Codel,
}

/// A log-normal factor of the latency.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, expecting = "a jitter, such as `{sigma: 0.3, correlation: 0.5}`")]
pub struct Jitter {
    /// Standard deviation of the logarithm of the latency.
    pub sigma: f64,
    /// Correlation (0 to 1) of the logarithm with that of the previous packet.
    #[serde(default)]
    pub correlation: f64,
}

/// Random loss of packets.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, expecting = "a loss, such as `{rate: 1 %, burst: 3}`")]
pub struct PacketLoss {
    /// Fraction of packets that are lost.
    pub rate: Fraction,
    /// Mean number of packets that are lost in a row; 1 for independent losses.
    #[serde(default = "one")]
    pub burst: f64,
}

fn one() -> f64 {
    1.0
}

impl Default for Queue {
    /// A queue of a thousand packets, as of Linux interfaces.
    /// source: `DEFAULT_TX_QUEUE_LEN` in include/net/pkt_sched.h
    fn default() -> Self {
        Self { size: MIN_QUEUE * 1000, discipline: QueueDiscipline::DropTail }
    }
}

impl Impairments {
    /// Returns an error that names the value that is out of range.
    pub fn validate(&self) -> Result<(), String> {
        let size = self.queue.size;
        if size < MIN_QUEUE {
            return Err(format!("`queue.size` is {size}: give at least a packet of {MIN_QUEUE}"));
        }
        let jitter = self.jitter.unwrap_or(Jitter { sigma: 0.0, correlation: 0.0 });
        let loss = self.loss.unwrap_or(PacketLoss { rate: Fraction(0.0), burst: 1.0 });
        let reordering = self.reordering.unwrap_or(Fraction(0.0)).0;
        for (key, value, [min, max]) in [
            ("jitter.sigma", jitter.sigma, [0.0, MAX_SIGMA]),
            ("jitter.correlation", jitter.correlation, [0.0, 0.999]),
            ("loss.rate", loss.rate.0, [0.0, MAX_LOSS]),
            ("loss.burst", loss.burst, [1.0, MAX_BURST]),
            ("reordering", reordering, [0.0, 1.0]),
        ] {
            if !(min..=max).contains(&value) {
                return Err(format!("`{key}` is {value}: choose from {min} to {max}"));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_out_of_range_are_named() {
        let parsed = |yaml: &str| serde_yaml::from_str::<Impairments>(yaml).expect("impairments");
        assert_eq!(parsed("{}").validate(), Ok(()));
        assert_eq!(parsed("{jitter: {sigma: 0.3}, loss: {rate: 2 %, burst: 4}}").validate(), Ok(()));
        for (yaml, key) in [
            ("{queue: {size: 100 B}}", "queue.size"),
            ("{jitter: {sigma: 5}}", "jitter.sigma"),
            ("{jitter: {sigma: 0.1, correlation: 1}}", "jitter.correlation"),
            ("{loss: {rate: 50 %}}", "loss.rate"),
            ("{loss: {rate: 1 %, burst: 0}}", "loss.burst"),
            ("{loss: {rate: 1 %, burst: .nan}}", "loss.burst"),
        ] {
            let rejected = parsed(yaml).validate().expect_err(yaml);
            assert!(rejected.contains(key), "{yaml}: {rejected}");
        }
    }
}
