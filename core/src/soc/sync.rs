//! The cost of synchronising GPU and NPU.
//!
//! HeteroLLM paper, sections 3.1 and 4.2. Slow synchronisation copies a buffer through the GPU framework and submits
//! a kernel to the GPU's queue, which has run empty. Fast synchronisation shares the buffers: a thread sleeps for the
//! predicted time of the kernel and then polls a flag. A sync event then costs only the reading of the flag and the
//! submission of the next work, in prefill and in decoding.

use hearth_profiles::Seconds;
use hearth_profiles::device::soc::{PartitionPolicy, Synchronisation};
use hearth_profiles::device::{Soc, SocOptions};

/// Number of sync events of a split matmul, or of a matmul group on the NPU: one event before and one after the work.
pub const EVENTS_PER_INTERVAL: u32 = 2;

/// The cost of a pair of sync events between GPU and NPU: the value that the solver assumes, and the value at run time.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SyncCost {
    /// The cost of a pair of sync events that the solver assumes when it chooses partitions, in seconds.
    pub planned_event_pair_seconds: f64,
    /// The cost of a pair of sync events at run time, in seconds.
    pub event_pair_seconds: f64,
}

impl SyncCost {
    pub fn new(soc: &Soc, options: SocOptions) -> Self {
        let pair = |kind| f64::from(EVENTS_PER_INTERVAL) * soc.sync_costs.synchronisation_time(kind).0;
        let planned = match options.partition_policy {
            PartitionPolicy::Solved => options.synchronisation,
            PartitionPolicy::Fixed => Synchronisation::Fast,
        };
        Self { planned_event_pair_seconds: pair(planned), event_pair_seconds: pair(options.synchronisation) }
    }
}

/// Returns the time for which a CPU thread polls the completion flag of a kernel with the predicted time `kernel_time`.
/// Before that, the thread sleeps repeatedly for `sleep_time`, as long as a sleep ends within the predicted time.
pub fn poll_time(kernel_time: Seconds, sleep_time: Seconds) -> Seconds {
    let sleeps = if sleep_time.0 > 0.0 { (kernel_time.0 / sleep_time.0).floor() } else { 0.0 };
    Seconds(kernel_time.0 - (sleeps * sleep_time.0).min(kernel_time.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernel_time_is_split_into_sleeps_and_polling() {
        let step = Seconds(90e-6);
        assert_eq!(poll_time(Seconds(60e-6), step), Seconds(60e-6));
        // 1000 us are eleven sleeps of 90 us and 10 us of polling.
        assert!((poll_time(Seconds(1e-3), step).0 - 10e-6).abs() < 1e-12);
        assert_eq!(poll_time(Seconds(1e-3), Seconds(0.0)), Seconds(1e-3));
    }
}
