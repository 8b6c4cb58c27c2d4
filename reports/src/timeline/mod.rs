//! What a trace says over time: the activities of each device, its messages, its tokens and its events.
//!
//! Not here: how long the parts of a token took ([`hearth_core::metrics`]).

pub mod activities;
pub mod events;
pub mod messages;
pub mod tokens;
