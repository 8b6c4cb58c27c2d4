//! Decisions and cost accounting shared by the simulator and the executor, as pure functions and state machines.
//!
//! [`schedule`] lists the steps of each device. [`recovery`] decides what happens when a device is lost or returns,
//! and [`adaptation`] when a ring changes its plan because devices have become slower. [`residency`] decides which
//! weights stay in memory, and [`expert_cache`] replays caches of experts. [`memory`] computes the memory that a plan
//! needs. [`metrics`] computes the metrics of a trace. Nothing here waits, opens a file or reads a clock.

#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr, clippy::exit))]

pub mod adaptation;
pub mod cluster;
pub mod compute_cost;
pub mod expert_cache;
pub mod expert_routes;
#[cfg(any(test, fuzzing))]
pub mod fuzzing;
pub mod memory;
pub mod metrics;
pub mod recovery;
pub mod residency;
pub mod schedule;
pub mod soc;
pub mod tensor;
pub mod weight_conversion;

pub use cluster::{Cluster, LinkTable, Member};
