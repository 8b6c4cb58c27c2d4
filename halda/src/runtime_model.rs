//! The runtime model of a device: residency, page cache and overheads, which the paper's latency model leaves out.
//!
//! It lists the residency policies that a device may use, what its page cache reads again when the weights do not
//! fit, and the time of a token outside the layers. Instances from a paper do not have these values. By default the
//! operating system decides which weights stay in memory, and weights that do not fit are all read again.
//!
//! Not here: the time of a token, which [`crate::latency::steady_state`] computes from these values.

use hearth_schema::residency::ResidencyOptions;
use serde::{Deserialize, Serialize};

/// Properties of a device for which the paper has no symbol.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RuntimeModel {
    /// The residency policies that a planner may choose; the first one if they are equally fast.
    pub residencies: Vec<ResidencyOptions>,
    /// What the page cache reads again for each token if the weights do not fit.
    pub rereads: Rereads,
    /// The number of processors. The kernel keeps some pages free for each processor.
    pub processors: u32,
    /// Seconds per token that the head spends outside the layers.
    pub token_overhead: f64,
    /// Disk read rates by access pattern; if `None`, `s_disk` is used for all of them.
    #[serde(rename = "reads", skip_serializing_if = "Option::is_none")]
    pub read_rates: Option<ReadRates>,
    /// Compute times with all weights in memory; if `None`, they follow from the paper's coefficients.
    #[serde(rename = "work")]
    pub work_times: Option<WorkTimes>,
}

/// Disk read rates by access pattern, in bytes per second.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReadRates {
    /// The rate of page faults during a computation.
    pub fault: f64,
    /// The rate of reading ahead by a helper thread, while the operating system evicts pages.
    #[serde(rename = "ahead")]
    pub read_ahead: f64,
    /// The rate of streaming by a helper thread, which also releases the pages, so that the kernel spends time on
    /// both.
    pub stream: f64,
}

impl ReadRates {
    /// Creates the same rate for every access pattern.
    pub(crate) fn all(rate: f64) -> Self {
        Self { fault: rate, read_ahead: rate, stream: rate }
    }

    /// Returns the lowest of the rates.
    pub(crate) fn slowest(&self) -> f64 {
        self.fault.min(self.read_ahead).min(self.stream)
    }
}

/// Compute times of one token in seconds, with all weights in memory.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WorkTimes {
    /// The time of each layer of the model on the CPU.
    pub cpu_layers: Vec<f64>,
    /// The time of each layer on the GPU; empty without a GPU.
    pub gpu_layers: Vec<f64>,
    /// The time of the output head on the CPU.
    #[serde(rename = "output")]
    pub cpu_output: f64,
    /// The time of the output head on the GPU; `None` without a GPU.
    #[serde(rename = "output_on_gpu", default)]
    pub gpu_output: Option<f64>,
    /// The overhead of a window with layers on the CPU.
    #[serde(rename = "cpu_window")]
    pub cpu_window_overhead: f64,
    /// The overhead of a window with layers on the GPU.
    #[serde(rename = "gpu_window")]
    pub gpu_window_overhead: f64,
}

/// What a page cache reads again for each token if the weights do not fit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Rereads {
    /// All weights: the cache evicts the least recently used pages, which are the next ones to be used.
    #[default]
    Everything,
    /// The excess over memory, as in the paper's latency model (appendix A.3).
    Excess,
}

impl Default for RuntimeModel {
    fn default() -> Self {
        Self {
            residencies: vec![ResidencyOptions::default()],
            rereads: Rereads::default(),
            processors: 1,
            token_overhead: 0.0,
            read_rates: None,
            work_times: None,
        }
    }
}
