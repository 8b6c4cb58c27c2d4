//! The documents that crates and programs exchange: scenario, plan, trace and their parts.
//!
//! A [`scenario`] names devices, links, a model and a workload; a planner turns it into an immutable [`plan`]; the
//! simulator and the executor run the plan and write a [`trace`].
//!
//! Not here: computations on a document (`hearth_core`), and opening files (the command line).

#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr, clippy::exit))]

pub mod address;
pub mod digest;
pub mod editor;
pub mod events;
pub mod hub_model;
pub mod model;
pub mod pass;
pub mod plan;
pub mod request_trace;
pub mod residency;
pub mod route_trace;
pub mod run_events;
pub mod scenario;
mod shorthand;
pub mod trace;
pub mod workload;

pub use pass::{MAX_PASS_TOKENS, Pass};
pub use plan::{Plan, Processor};
pub use scenario::Scenario;
pub use trace::Trace;
