//! The coordinator: the head's side of a ring. It connects the workers, sends passes into the ring, and continues after
//! the loss of a device.

mod connections;
#[expect(clippy::module_inception)] // the object that gives the room its name
mod coordinator;
mod event_log;
mod generation;
mod layer_server;
mod listener;
mod options;
mod pipeline;
mod reconfiguration;
mod request;
mod ring;
mod scheduler;
mod worker_connection;

pub use generation::{FailedRequest, Generated};
pub use options::{OnFetch, OnRunEvent, RecoveryPolicy, RingOptions};
pub use request::{GenerationRequest, SequenceRequest, for_sequences};
pub use ring::{CancelHandle, Ring};
pub use scheduler::{OnReport, Request, ResponseEvent, ServeOptions};
