//! Links between devices: wires ([`WiredLinks`]), and Wi-Fi channels that stations share ([`NetworkLinks`]).
//!
//! No message arrives before its latency and its own transmission time have passed, the messages from one device to
//! another arrive in the order of sending, and no message is lost. `properties::check_invariants` checks this.

mod connection;
mod constant;
mod medium;
mod stalls;
mod wifi;

use crate::engine::Nanos;

pub use constant::{WiredLink, WiredLinks};
pub use wifi::NetworkLinks;

/// When a message is transmitted, and when it arrives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeliveryTimes {
    /// The time at which the message's transmission starts, after the transmissions of earlier messages.
    pub start: Nanos,
    /// The time at which the message's transmission ends.
    pub end: Nanos,
    /// The time at which the message's last byte arrives.
    pub arrival: Nanos,
}

/// The delivery times of a sent message, if they are known already.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SendOutcome {
    /// The delivery times, which later messages do not change.
    Known(DeliveryTimes),
    /// The number of the message. [`NetworkLinks::pop_delivery`] returns its delivery times later.
    Pending(u64),
}

#[cfg(test)]
pub(crate) mod properties;
