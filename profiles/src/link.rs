//! Links: latency and bandwidth of messages between devices.
//!
//! `t_comm` of the latency model is [`Link::time`] of one activation vector (4 bytes times the embedding length).
//! [`wifi`] describes Wi-Fi channels, [`path`] the mean time of a message that is alone on one. Contention is
//! simulated.

pub mod path;
pub mod wifi;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::units::{Bytes, BytesPerSecond, Seconds};
use crate::values::Sourced;

/// A link in one direction.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(
    deny_unknown_fields,
    expecting = "a link, such as `{latency: {value: 5 ms, source: \"measured\"}, bandwidth: {value: 400 Mbit/s, source: \"measured\"}}`"
)]
pub struct Link {
    /// One-way delay of a small message.
    pub latency: Sourced<Seconds>,
    /// Rate of a long message.
    pub bandwidth: Sourced<BytesPerSecond>,
}

impl Link {
    /// Time for a message of `bytes` from the first byte sent to the last received.
    pub fn time(&self, bytes: Bytes) -> Seconds {
        self.latency.value + bytes / self.bandwidth.value
    }
}

/// A link measured to a named peer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PeerLink {
    /// The peer's name or address.
    pub peer: String,
    /// One-way delay of a small message.
    pub latency: Sourced<Seconds>,
    /// Rate of a long message.
    pub bandwidth: Sourced<BytesPerSecond>,
}
