//! The cost of synchronising GPU and NPU.
//!
//! HeteroLLM paper, sections 3.1 and 4.2. Slow synchronisation copies a buffer through the GPU framework and submits
//! a kernel to the GPU's queue, which has run empty. Fast synchronisation shares the buffers: a thread sleeps for the
//! predicted time of the kernel, in steps of the shortest sleep, and then polls a flag. So a sync event costs only
//! the reading of the flag and the submission of the next work. The fitted cost of a fast event applies to prefill,
//! where the NPU is slower, and to decoding, where the GPU is.

use hearth_profiles::Seconds;
use hearth_profiles::device::soc::{PartitionPolicy, Synchronisation};
use hearth_profiles::device::{Soc, SocOptions};

/// Number of sync events of a split matmul, or of a matmul group on the NPU: one before and one after it.
pub const EVENTS_PER_INTERVAL: u32 = 2;

/// The cost of a sync event: the value that the solver assumes, and the value at run time.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SyncCost {
    /// The cost with which partitions are chosen, in seconds.
    pub planned_cost: f64,
    /// The cost at run time, in seconds.
    pub actual_cost: f64,
}

impl SyncCost {
    pub fn new(soc: &Soc, options: SocOptions) -> Self {
        let actual_cost = soc.synchronisation.event_cost(options.synchronisation).0;
        let planned_cost = match options.partitions {
            PartitionPolicy::Solved => actual_cost,
            PartitionPolicy::Fixed => soc.synchronisation.event_cost(Synchronisation::Fast).0,
        };
        Self { planned_cost, actual_cost }
    }

    /// Returns the cost of a pair of sync events at run time, in seconds.
    pub fn pair_cost(&self) -> f64 {
        f64::from(EVENTS_PER_INTERVAL) * self.actual_cost
    }

    /// Returns the cost of a pair of sync events with which partitions are chosen, in seconds.
    pub fn planned_pair_cost(&self) -> f64 {
        f64::from(EVENTS_PER_INTERVAL) * self.planned_cost
    }
}

/// How a CPU thread waits for a kernel: first asleep, then polling.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct KernelWait {
    /// Time asleep, a multiple of the shortest sleep.
    pub sleep_time: Seconds,
    /// Time polling the flag.
    pub poll_time: Seconds,
}

impl KernelWait {
    /// Splits the predicted time of a kernel into sleeps of length `step` and polling. A sleep that would end after
    /// the kernel is not started.
    pub fn for_kernel(kernel: Seconds, step: Seconds) -> Self {
        let steps = if step.0 > 0.0 { (kernel.0 / step.0).floor() } else { 0.0 };
        let sleep = (steps * step.0).min(kernel.0);
        Self { sleep_time: Seconds(sleep), poll_time: Seconds(kernel.0 - sleep) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernel_time_is_split_into_sleeps_and_polling() {
        let step = Seconds(90e-6);
        let short = KernelWait::for_kernel(Seconds(60e-6), step);
        assert_eq!((short.sleep_time.0, short.poll_time.0), (0.0, 60e-6));
        // 1000 us are eleven sleeps of 90 us and 10 us of polling.
        let long = KernelWait::for_kernel(Seconds(1e-3), step);
        assert!((long.sleep_time.0 - 990e-6).abs() < 1e-12 && (long.poll_time.0 - 10e-6).abs() < 1e-12);
        assert_eq!(KernelWait::for_kernel(Seconds(1e-3), Seconds(0.0)).poll_time, Seconds(1e-3));
    }
}
