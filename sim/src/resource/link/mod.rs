//! Links between devices: wires ([`constant`]) and Wi-Fi, whose stations share a channel ([`wifi`]).
//!
//! The contract of [`Link`], which `properties::check_invariants` checks for every implementation: no message arrives
//! before its latency and its own sending time have passed, the messages of a pair arrive in the order of sending,
//! and no bytes are lost.

mod connection;
pub mod constant;
mod medium;
pub mod network;
mod stalls;
pub mod wifi;

use hearth_profiles::{Bytes, Seconds};

use crate::engine::Nanos;

pub use constant::{ConstantLink, Wire};
pub use network::{Network, cluster_links, link_order};
pub use wifi::WifiLink;

/// The times of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Delivery {
    /// The time at which its transmission starts, after the messages before it.
    pub start: Nanos,
    /// The time at which its transmission ends.
    pub end: Nanos,
    /// The time at which its last byte arrives.
    pub arrival: Nanos,
}

/// The delivery of a sent message, if it is known already.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SendOutcome {
    /// Later messages do not change its delivery.
    Known(Delivery),
    /// The message waits for the medium; [`Link::next_delivery`] returns its delivery with this number.
    Pending(u64),
}

/// The links between devices.
pub trait Link {
    /// Sends a message at `now`, which must not be earlier than in any previous call.
    fn send(&mut self, now: Nanos, from: usize, to: usize, bytes: Bytes) -> SendOutcome;
    /// Returns the time at which to call [`Link::next_delivery`] next, if nothing else is sent.
    fn next_event(&self) -> Option<Nanos>;
    /// Advances to `now`, and removes one message whose delivery is known by then; the message may arrive later than
    /// `now`. Returns its number and its delivery.
    fn next_delivery(&mut self, now: Nanos) -> Option<(u64, Delivery)>;
    /// Returns the minimum delay from one device to another.
    fn latency(&self, from: usize, to: usize) -> Seconds;
    /// Returns the total bytes of all messages sent.
    fn bytes_sent(&self) -> Bytes;
}

#[cfg(test)]
pub(crate) mod properties;
