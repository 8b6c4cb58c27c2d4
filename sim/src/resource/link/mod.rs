//! Links between devices: wires ([`WiredLinks`]), and Wi-Fi channels that stations share ([`NetworkLinks`]).
//!
//! The invariants, which `properties::check_invariants` checks: no message arrives before its latency and its own
//! sending time have passed, the messages of a pair arrive in the order of sending, and no message is lost.

mod connection;
mod constant;
mod medium;
mod stalls;
mod wifi;

use crate::engine::Nanos;

pub use constant::{WiredLink, WiredLinks};
pub use wifi::NetworkLinks;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Delivery {
    /// The time at which the message's transmission starts, after those of earlier messages.
    pub start: Nanos,
    /// The time at which the message's transmission ends.
    pub end: Nanos,
    /// The time at which the message's last byte arrives.
    pub arrival: Nanos,
}

/// The delivery of a sent message, if it is known already.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SendOutcome {
    /// The delivery of the message, which later messages do not change.
    Known(Delivery),
    /// The number of the message, whose delivery [`NetworkLinks::pop_delivery`] returns later.
    Pending(u64),
}

#[cfg(test)]
pub(crate) mod properties;
