//! The pure decisions and accounts that the simulator and the executor share.
//!
//! The [`schedule`] says what each device does next, [`recovery`] what happens when a device is lost or returns,
//! [`residency`] which weights stay in memory, [`metrics`] what the numbers of a trace are. Nothing here waits, opens a
//! file or reads a clock.

#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr, clippy::exit))]

pub mod cluster;
pub mod compute_cost;
pub mod conversion;
pub mod draft;
pub mod holdings;
pub mod metrics;
pub mod recovery;
pub mod residency;
pub mod room;
pub mod schedule;
pub mod soc;
pub mod tensor;

pub use cluster::{Cluster, LinkTable, Member};
