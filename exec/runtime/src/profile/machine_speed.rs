//! Quick measurement of the current speed of the machine.
//!
//! The speed of a shared machine, above all of a virtual one, changes from minute to minute. [`measure_matvec_speed`]
//! measures the rate of the main work of decoding: matrix-vector products on all threads, with weights streamed from
//! memory. Other measurements are valid only if the rate is the same before and after them.

use std::sync::Arc;

use hearth_profiles::measure::{MeasurementOptions, WeightBuffer, compute};
use hearth_profiles::{Bytes, FlopsPerSecond, Format, Seconds};

use super::{CpuKernels, ProfileError};
use crate::{Cpu, ExecError, ThreadPool, ThreadPoolOptions};

/// The weight format of the measured matrix-vector products: the format that most home users run.
const FORMAT: Format = Format::Q4K;

/// The options of a measurement of half a second: a shorter one could fall into a single time slice of another virtual
/// machine, and a longer one would take a noticeable part of the run.
const QUICK: MeasurementOptions = MeasurementOptions {
    sample_count: 15,
    sampling_rounds: 1,
    sample_time: Seconds(0.03),
    disk_sample_time: Seconds(0.0),
    time_limit: Seconds(2.0),
    // Several times the last-level cache of a desktop, or of the part of a server's cache for a virtual machine.
    buffer_size: Bytes::from_mib(256),
    max_file_size: Bytes::ZERO,
};

/// Measures the current rate of matrix-vector products on all threads: the median over half a second.
pub fn measure_matvec_speed() -> Result<FlopsPerSecond, ProfileError> {
    let pool =
        ThreadPool::new(ThreadPoolOptions::default()).map_err(|source| ExecError::Threads { source })?;
    let mut kernels = CpuKernels::new(Cpu::new(Arc::new(pool)));
    let buffer = WeightBuffer::new(QUICK.buffer_size)?;
    Ok(FlopsPerSecond(compute::measure_streamed_rate(&mut kernels, FORMAT, &buffer, &QUICK, 1).median()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn speed_is_finite_and_positive() {
        let speed = measure_matvec_speed().expect("this machine computes").0;
        assert!(speed.is_finite() && speed > 1e6, "{speed}");
    }
}
