//! Links between devices: wires ([`constant`]) and Wi-Fi, whose stations share a channel ([`wifi`]).
//!
//! The law of [`Link`], checked by `properties::check_invariants` for every implementation: no message arrives before
//! its latency and its own sending time are over, none overtakes another of its pair, bytes are conserved.

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
    /// The time at which its first byte left, after the messages before it.
    pub starts: Nanos,
    /// The time at which its last byte left.
    pub left: Nanos,
    /// The time at which its last byte arrives.
    pub arrives: Nanos,
}

/// The result of sending a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sent {
    /// Later messages do not change its delivery.
    Known(Delivery),
    /// The message waits for the medium; [`Link::next_delivery`] returns it under this number.
    Pending(u64),
}

/// The links between devices.
pub trait Link {
    /// Sends a message now. Calls must be in order of time.
    fn send(&mut self, now: Nanos, from: usize, to: usize, bytes: Bytes) -> Sent;
    /// When to call [`Link::next_delivery`] next if nothing else is sent.
    fn next_event(&self) -> Option<Nanos>;
    /// Advances to `now`, and takes one message whose delivery is known by then. It may arrive later.
    fn next_delivery(&mut self, now: Nanos) -> Option<(u64, Delivery)>;
    /// The least delay from one device to another.
    fn latency(&self, from: usize, to: usize) -> Seconds;
    fn carried(&self) -> Bytes;
}

#[cfg(test)]
pub(crate) mod properties;
