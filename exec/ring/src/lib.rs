//! The ring: several devices run one model, each its own layers.
//!
//! The head ([`Ring`]) gives every [`Worker`] the plan and its place in it, lets tokens enter, and gets
//! activations back after the last window of each round. Every device's [`execution::StageRunner`] interprets
//! `hearth_core::schedule`. Frames travel over a [`Transport`], which a [`Key`] encrypts ([`EncryptedTransport`]).

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
    CancelHandle, FailedRequest, Generated, GenerationRequest, OnFetch, OnReport, OnRunEvent, RecoveryPolicy,
    Request, ResponseEvent, Ring, RingOptions, SequenceRequest, ServeOptions, for_sequences,
};
pub use discovery::{Announcement, AnnouncementError, DiscoveryError, MdnsScope};
pub use emulation::{DelayedTransport, EmulatedPath, EmulatedPaths, EmulatedTransport};
pub use error::RingError;
pub use execution::{ComputeMode, LocalModel, SampleFn, with_draft};
pub use security::{EncryptedTransport, KEY_VARIABLE, Key, KeyError};
pub use wire::{Listener, MemoryTransport, TcpTransport, Transport, bind};
pub use worker::{ModelSource, Worker, WorkerOptions};
