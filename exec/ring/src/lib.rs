//! The ring: several devices run one model together, and each computes some of the layers.
//!
//! The head ([`Ring`]) sends every [`Worker`] the plan, which divides the layers among the devices. Then the head
//! starts passes of tokens through the layers, and receives the activations that return to the head after each round of
//! the ring. Each device executes the steps of `hearth_core::schedule` with a [`execution::StageRunner`]. Frames are
//! sent over a [`Transport`]; an [`EncryptedTransport`] encrypts them with a [`Key`].

#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr, clippy::exit))]

mod coordinator;
pub mod discovery;
mod emulation;
mod error;
pub mod execution;
#[cfg(any(test, fuzzing))]
pub mod fuzzing;
pub mod probe;
mod security;
pub mod wire;
mod worker;

pub use coordinator::{
    CancelHandle, DeviceReport, FailedRequest, GenerationRequest, GenerationResult, OnDeviceReport,
    OnFetchProgress, OnRunEvent, RecoveryPolicy, Request, ResponseEvent, Ring, RingOptions, SequenceArrival,
    SequenceRequest, ServeOptions, plan_for_sequences,
};
pub use discovery::{Announcement, AnnouncementError, DiscoveryError, MdnsScope};
pub use emulation::{DelayedTransport, EmulatedPath, EmulatedTransport, PathLookup};
pub use error::{Result, RingError};
pub use execution::{
    ComputeMode, LocalModel, OnVerificationProgress, SampleFn, SequenceOutput, Verification,
    plan_with_draft_model,
};
pub use security::{EncryptedTransport, KEY_VARIABLE, Key, KeyError, create_secret_file, read_secret_file};
pub use wire::{Listener, MemoryTransport, TcpTransport, Transport, bind};
pub use worker::{ModelSource, Worker, WorkerOptions};
