//! Sync interval: GPU kernels and NPU graphs of a layer that run in parallel.
//!
//! The time of an interval is the time of the slower processor plus the time of the events that synchronise both. An
//! interval with GPU kernels alone needs no events: the GPU continues with the next interval without a gap.

use hearth_profiles::Seconds;

use super::sync::{EVENTS_PER_INTERVAL, SyncCost};

/// One sync interval of a layer, with the times of its GPU kernels and NPU graphs.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct SyncInterval {
    /// Times of the GPU kernels, which run one after another, in seconds.
    pub gpu_times: Vec<f64>,
    /// Times of the NPU graphs, which run one after another, in seconds.
    pub npu_times: Vec<f64>,
    /// The number of events at which GPU and NPU wait for each other.
    pub event_count: u32,
    /// The total time that the interval's events take, in seconds.
    pub event_time: f64,
}

impl SyncInterval {
    /// Creates an interval of GPU kernels without sync events.
    pub fn without_events(gpu_times: Vec<f64>) -> Self {
        Self { gpu_times, ..Self::default() }
    }

    /// Creates an interval of GPU kernels and NPU graphs with a pair of sync events.
    pub fn with_events(gpu_times: Vec<f64>, npu_times: Vec<f64>, cost: SyncCost) -> Self {
        Self { gpu_times, npu_times, event_count: EVENTS_PER_INTERVAL, event_time: cost.event_pair_seconds }
    }

    pub fn time(&self) -> Seconds {
        Seconds(self.gpu_time().max(self.npu_time()) + self.event_time)
    }

    /// Returns the total time of the GPU kernels, in seconds.
    pub fn gpu_time(&self) -> f64 {
        self.gpu_times.iter().sum()
    }

    /// Returns the total time of the NPU graphs, in seconds.
    pub fn npu_time(&self) -> f64 {
        self.npu_times.iter().sum()
    }
}

/// Returns the total time of sync intervals that run one after another.
pub fn total_time(intervals: &[SyncInterval]) -> Seconds {
    intervals.iter().map(SyncInterval::time).sum()
}
