//! Sync interval: GPU kernels and NPU graphs of a layer that run in parallel.
//!
//! The time of an interval is the time of the slower processor plus the time of the events that synchronise both. An
//! interval with GPU kernels alone needs no events: the GPU continues with the next interval without a gap.

use hearth_profiles::Seconds;

use super::sync::{EVENTS_PER_INTERVAL, SyncCost};

/// One sync interval of a layer, with the times of its GPU kernels and NPU graphs.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct SyncInterval {
    /// Time of each GPU kernel in seconds. The kernels run one after another.
    pub kernel_seconds: Vec<f64>,
    /// Time of each NPU graph in seconds. The graphs run one after another.
    pub graph_seconds: Vec<f64>,
    /// The number of events at which GPU and NPU wait for each other.
    pub event_count: u32,
    /// The total time of the events, in seconds.
    pub event_seconds: f64,
}

impl SyncInterval {
    /// Creates an interval of GPU kernels without sync events.
    pub fn without_events(kernel_seconds: Vec<f64>) -> Self {
        Self { kernel_seconds, ..Self::default() }
    }

    /// Creates an interval of GPU kernels and NPU graphs with a pair of sync events.
    pub fn with_events(kernel_seconds: Vec<f64>, graph_seconds: Vec<f64>, cost: SyncCost) -> Self {
        Self {
            kernel_seconds,
            graph_seconds,
            event_count: EVENTS_PER_INTERVAL,
            event_seconds: cost.event_pair_seconds,
        }
    }

    pub fn time(&self) -> Seconds {
        Seconds(self.gpu_seconds().max(self.npu_seconds()) + self.event_seconds)
    }

    /// Returns the total time of the GPU kernels, in seconds.
    pub fn gpu_seconds(&self) -> f64 {
        self.kernel_seconds.iter().sum()
    }

    /// Returns the total time of the NPU graphs, in seconds.
    pub fn npu_seconds(&self) -> f64 {
        self.graph_seconds.iter().sum()
    }
}

/// Returns the total time of sync intervals that run one after another.
pub fn total_time(intervals: &[SyncInterval]) -> Seconds {
    intervals.iter().map(SyncInterval::time).sum()
}
