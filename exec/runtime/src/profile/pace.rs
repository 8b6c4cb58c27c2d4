//! The machine's pace: a quick measurement of its present speed.
//!
//! A machine that others use too, a virtual one above all, computes faster and slower from minute to minute. The pace
//! is what decoding does mostly, a product of weights that stream from memory with one vector, on all threads and for a
//! moment: two of them say whether what was measured in between, or before, still holds.

use std::sync::Arc;

use hearth_profiles::measure::{Buffer, Effort, compute};
use hearth_profiles::{Bytes, FlopsPerSecond, Format, Seconds};

use super::{CpuKernels, ProfileError};
use crate::cpu::Cpu;
use crate::error::ExecError;
use crate::pool::{Pool, PoolOptions};

/// The format of most weights that are run at home.
const FORMAT: Format = Format::Q4K;

/// Half a second: less is one slice of a neighbour's, and more is a part of the run.
const EFFORT: Effort = Effort {
    samples: 15,
    rounds: 1,
    sample: Seconds(0.03),
    disk_sample: Seconds(0.0),
    limit: Seconds(2.0),
    // Several times the last cache of a desktop or of a virtual machine's share of a server.
    buffer: Bytes::mib(256),
    file: Bytes::ZERO,
};

/// Measures the current multiplication rate of the machine with all its threads; the median over half a second.
pub fn pace() -> Result<FlopsPerSecond, ProfileError> {
    let pool = Pool::new(PoolOptions::default()).map_err(|source| ExecError::Threads { source })?;
    let mut kernels = CpuKernels::new(Cpu::new(Arc::new(pool)));
    let buffer = Buffer::new(EFFORT.buffer)?;
    Ok(FlopsPerSecond(compute::streamed_matvec(&mut kernels, FORMAT, &buffer, &EFFORT).median()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pace_is_a_rate() {
        let pace = pace().expect("this machine computes").0;
        assert!(pace.is_finite() && pace > 1e6, "{pace}");
    }
}
