//! Measurements of this machine: speed of the CPU kernels, memory, and disk.
//!
//! This is the only module of the crate that accesses hardware and reads clocks. Every result is the median of
//! several samples, with the spread of the samples and a description of the measurement as its source. The caller
//! provides the kernels ([`Kernels`]), so that the rates are those of the kernels that will run. All times are wall
//! times, so the rates include the effect of a quota or a throttle. The workloads are small and bounded in time,
//! memory and disk space ([`MeasurementOptions`]).

pub mod cgroup;
pub mod compute;
pub mod direct;
pub mod disk;
mod file_reading;
pub mod mapping;
pub mod memory;
pub mod memory_bandwidth;
pub mod processor;
pub mod sampling;
mod scratch;
pub mod topology;

pub use compute::{ComputeRates, Kernels};
pub use disk::DiskTarget;
pub use mapping::WeightBuffer;
pub use sampling::{MeasurementOptions, Samples};
pub use scratch::free_space;

use std::io;
use std::path::{Path, PathBuf};

use crate::units::Bytes;

/// The reason why a measurement failed.
#[derive(Debug, thiserror::Error)]
pub enum MeasurementError {
    #[error("cannot {verb} `{path}`: {source}", path = .path.display())]
    File { verb: &'static str, path: PathBuf, source: io::Error },
    #[error("cannot allocate {bytes} of memory for a measurement: {source}; close other programs")]
    Memory { bytes: Bytes, source: io::Error },
    #[error("the measured rate of {what} is zero or not finite; measure again when the machine is idle")]
    Unusable { what: String },
}

impl MeasurementError {
    /// Returns a closure for `map_err` that converts the error of a file operation; `verb` names it, such as `open`.
    pub(super) fn for_file(verb: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| MeasurementError::File { verb, path, source }
    }
}
