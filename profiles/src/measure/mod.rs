//! Measurements of this machine.
//!
//! The only module of this crate that touches hardware and reads clocks. Every number is the median of several samples
//! with their spread, and says how it was measured. The caller provides the kernels ([`Kernels`]), so that a rate is
//! that of the kernels which will run. All times are wall time: under a quota or a throttle a process gets less, and
//! that is the number wanted. The workloads are small and bounded in time, memory and disk space ([`Effort`]).

pub mod compute;
pub mod control_group;
pub mod disk;
mod file_reading;
mod mapping;
pub mod memory;
pub mod memory_bandwidth;
pub mod processor;
pub mod sampling;
mod scratch;

pub use compute::{ComputeRates, Kernels};
pub use disk::DiskTarget;
pub use mapping::{Buffer, drop_cache};
pub use sampling::{Effort, Samples};

use std::io;
use std::path::{Path, PathBuf};

use crate::units::Bytes;

/// Why a number cannot be measured.
#[derive(Debug, thiserror::Error)]
pub enum MeasureError {
    /// A file operation failed.
    #[error("cannot {verb} `{path}`: {source}", path = .path.display())]
    File { verb: &'static str, path: PathBuf, source: io::Error },
    /// Memory for a measurement could not be allocated.
    #[error("cannot get {bytes} of memory to measure with: {source}; close other programs")]
    Memory { bytes: Bytes, source: io::Error },
    /// A rate was zero or not finite.
    #[error("measuring {what} gave no usable number; measure again on a quieter machine")]
    Unusable { what: String },
}

impl MeasureError {
    /// Returns the closure for `map_err` on file operations.
    pub(super) fn file(verb: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| MeasureError::File { verb, path, source }
    }
}
