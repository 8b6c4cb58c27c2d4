//! Links between devices: latency, bandwidth, and the time of a message.
//!
//! `t_comm` of the latency model is [`Link::message_time`] of one activation vector (4 bytes times the embedding
//! length). [`wifi`] describes Wi-Fi channels, and [`wifi_path`] computes the mean time of a message on an otherwise
//! idle channel. The crate `hearth_sim` simulates several messages that compete for a channel.

pub mod wifi;
pub mod wifi_path;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::document_values::Sourced;
use crate::units::{Bytes, BytesPerSecond, Seconds};

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
}

impl Link {
    /// Returns the time of a message of size `bytes`, from the first byte sent to the last byte received.
    pub fn message_time(&self, bytes: Bytes) -> Seconds {
        self.latency.value + bytes / self.bandwidth.value
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
}
