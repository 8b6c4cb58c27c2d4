//! Links between devices: latency, bandwidth, and the time of a message.
//!
//! `t_comm` of the latency model is [`Link::message_time`] of one activation vector (4 bytes times the embedding
//! length). [`tcp`] has the times that TCP adds, [`impairments`] what the lab does to packets, [`wifi`] describes Wi-Fi channels, and [`wifi_path`] computes the mean time of a message on an otherwise
//! idle channel. The crate `hearth_sim` simulates several messages that compete for a channel.

pub mod impairments;
pub mod tcp;
pub mod wifi;
pub mod wifi_path;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use self::tcp::TcpParameters;
use crate::document_values::Sourced;
use crate::units::{Bytes, BytesPerSecond, Fraction, Seconds};

/// Maximum standard deviation of the logarithm of a latency. source: assumed, to detect wrong units
const MAX_SIGMA: f64 = 1.5;

/// Latency and bandwidth of a link in one direction.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(
    deny_unknown_fields,
    expecting = "a link, such as `{latency: {value: 5 ms, source: \"measured\"}, bandwidth: {value: 400 Mbit/s, source: \"measured\"}}`"
)]
pub struct Link {
    /// One-way delay of a small message.
    pub latency: Sourced<Seconds>,
    /// Transfer rate of a long message.
    pub bandwidth: Sourced<BytesPerSecond>,
    /// Standard deviation of the logarithm of the latency, whose median is `latency`; absent for a constant latency.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub jitter: Option<Sourced<f64>>,
    /// Parameters of the TCP connections over the link; absent if TCP adds no time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tcp: Option<TcpParameters>,
}

impl Link {
    /// Creates a link with a constant latency, on which TCP adds no time.
    pub fn constant(latency: Sourced<Seconds>, bandwidth: Sourced<BytesPerSecond>) -> Self {
        Self { latency, bandwidth, jitter: None, tcp: None }
    }

    /// Returns the mean latency.
    pub fn mean_latency(&self) -> Seconds {
        let sigma = self.jitter.as_ref().map_or(0.0, |jitter| jitter.value);
        self.latency.value * (sigma * sigma / 2.0).exp()
    }

    /// Returns the mean time of a message of size `bytes`, from the first byte sent to the last byte received, on a
    /// connection that was not idle.
    pub fn message_time(&self, bytes: Bytes) -> Seconds {
        let latency = self.mean_latency();
        let bandwidth = self.bandwidth.value;
        latency
            + self.tcp.as_ref().map_or(bytes / bandwidth, |tcp| {
                tcp.sending_time(latency * 2.0, bandwidth, bytes)
                    + tcp.mean_retransmission_time(latency * 2.0, bytes)
            })
    }

    /// Returns an error that names the value that is out of range.
    pub fn validate(&self) -> Result<(), String> {
        let sigma = self.jitter.as_ref().map_or(0.0, |jitter| jitter.value);
        if !(0.0..=MAX_SIGMA).contains(&sigma) {
            return Err(format!("`jitter` is {sigma}: choose from 0 to {MAX_SIGMA}"));
        }
        self.tcp.as_ref().map_or(Ok(()), |tcp| tcp.validate().map_err(|what| format!("tcp: {what}")))
    }
}

/// A measured link to another device.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PeerLink {
    /// The name or the address of the other device.
    pub peer: String,
    /// One-way delay of a small message.
    pub latency: Sourced<Seconds>,
    /// Transfer rate of a long message.
    pub bandwidth: Sourced<BytesPerSecond>,
    /// Standard deviation of the logarithm of the latency.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub jitter: Option<Sourced<f64>>,
    /// Fraction of TCP segments that were sent again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loss: Option<Sourced<Fraction>>,
}

impl PeerLink {
    /// Returns the link as a simulation uses it: with the measured jitter and losses, and otherwise TCP with its defaults.
    pub fn to_link(&self) -> Link {
        let defaults = TcpParameters::default();
        // Linux adds its minimum of 200 ms to the round trip.
        let rto =
            Sourced::new(defaults.rto.value + self.latency.value * 2.0, "tcp_rto_min and the round trip");
        let tcp = self.loss.clone().map(|loss_rate| TcpParameters { loss_rate, rto, ..defaults });
        Link {
            latency: self.latency.clone(),
            bandwidth: self.bandwidth.clone(),
            jitter: self.jitter.clone(),
            tcp,
        }
    }
}
