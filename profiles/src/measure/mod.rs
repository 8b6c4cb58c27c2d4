//! Measurements of this machine.
//!
//! The only module of this crate that touches hardware and reads clocks. Every number is the median of several samples with
//! their spread, and says how it was measured. The caller provides the kernels ([`Kernels`]), so that a rate is that of the
//! kernels which will run. All times are wall time: under a quota or a throttle a process gets less, and that is the number
//! wanted. The workloads are small and bounded in time, memory and disk space ([`Effort`]).

pub mod compute;
pub mod control_group;
pub mod disk;
mod error;
mod file_reading;
mod mapping;
pub mod memory;
pub mod memory_bandwidth;
pub mod processor;
pub mod sampling;
mod scratch;

pub use compute::{ComputeRates, Kernels};
pub use disk::DiskTarget;
pub use error::MeasureError;
pub use mapping::{Buffer, drop_cache};
pub use sampling::{Effort, Samples};
