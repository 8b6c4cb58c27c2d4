//! When does a message arrive at another device?
//!
//! A link delivers in order and keeps every byte. [`constant`] is a wire for each pair of devices; [`wifi`] is Wi-Fi,
//! whose stations share a channel's time.
//!
//! The law of the trait, checked by `properties::check_invariants` for every implementation: no message arrives before its
//! latency and its own sending time are over, none overtakes another of its pair, bytes are conserved.
//!
//! Not here: what is known of a link ([`hearth_profiles::link`]).

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

/// What happened to a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Delivery {
    /// When its first byte left, after those before it.
    pub starts: Nanos,
    /// When its last byte left.
    pub left: Nanos,
    /// When its last byte is there.
    pub arrives: Nanos,
}

/// What is known of a message when it is handed over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sent {
    /// Nothing that comes later changes it.
    Known(Delivery),
    /// It has to take its turn; [`Link::settled`] tells of it under this number.
    Pending(u64),
}

/// The way between devices.
pub trait Link {
    /// Sends a message now. Calls come in the order of time.
    fn send(&mut self, now: Nanos, from: usize, to: usize, bytes: Bytes) -> Sent;
    /// When to call [`Link::settled`] next if nothing else is sent.
    fn next_event(&self) -> Option<Nanos>;
    /// Goes on to `now`, and takes one message of which everything is known by then. It may arrive later.
    fn settled(&mut self, now: Nanos) -> Option<(u64, Delivery)>;
    /// The least delay from one device to another.
    fn latency(&self, from: usize, to: usize) -> Seconds;
    /// Bytes carried so far.
    fn carried(&self) -> Bytes;
}

#[cfg(test)]
pub(crate) mod properties;
