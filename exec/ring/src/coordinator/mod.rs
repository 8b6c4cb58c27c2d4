//! The coordinator: the head's side of a ring. It connects the workers, lets passes enter, and goes on when a device is lost.

mod control;
mod event_log;
mod generation;
mod layer_server;
mod listen_address;
mod listener;
mod options;
mod progress;
mod reconfiguration;
mod request;
mod ring;
mod scheduler;

pub use generation::{Generated, Unfinished};
pub use options::{OnFetch, OnRunEvent, Renewal, RingOptions};
pub use request::{Asked, Request, for_sequences};
pub use ring::{Ring, Stopper};
pub use scheduler::{Guest, OnWork, Said, Service};
