//! The coordinator of a ring on the head: connects to the workers, starts passes, and recovers from lost devices.

mod connections;
#[expect(clippy::module_inception)] // the type that gives the folder its name
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
mod stall;
mod worker_connection;

pub use generation::{FailedRequest, GenerationResult};
pub use options::{OnFetchProgress, OnRunEvent, RecoveryPolicy, RingOptions};
pub use request::{GenerationRequest, SequenceArrival, SequenceRequest, plan_for_sequences};
pub use ring::{CancelHandle, Ring};
pub use scheduler::{DeviceReport, OnDeviceReport, Request, ResponseEvent, ServeOptions};
