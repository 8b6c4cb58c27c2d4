//! The ring: several devices run one model, each its own layers.
//!
//! The head ([`Ring`]) gives every [`Worker`] the plan and its place in it, lets tokens enter, and gets
//! activations back after the last window of each round. Every device's [`execution::Node`] interprets
//! `hearth_core::schedule`. Frames travel over a [`Network`], which a [`Key`] seals ([`Sealed`]).

#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr, clippy::exit))]

mod coordinator;
pub mod discovery;
mod emulation;
mod error;
pub mod execution;
pub mod probe;
mod security;
pub mod wire;
mod worker;

pub use coordinator::{
    Asked, Generated, Guest, OnFetch, OnRunEvent, OnWork, Renewal, Request, Ring, RingOptions, Said, Service,
    Stopper, Unfinished, for_sequences,
};
pub use discovery::{Announcement, AnnouncementError, DiscoveryError, Medium};
pub use emulation::{Delayed, Emulated, Way, Ways};
pub use error::RingError;
pub use execution::{Computing, LocalModel, Sample, with_draft};
pub use security::{Key, KeyError, Sealed, VARIABLE};
pub use wire::{Listener, Memory, Network, Tcp, bind};
pub use worker::{Source, Worker, WorkerOptions};
