//! The runtime model of a device: residency, page cache and overheads, which the paper's latency model leaves out.
//!
//! The ways in which it may keep its weights, what its page cache reads again when memory is short, and what a token
//! costs beside its layers. An instance from a paper says nothing of these; then the system decides what stays, and
//! everything is read again.
//!
//! Not here: a token's time, which [`crate::latency::steady_state`] computes from them.

use hearth_schema::residency::ResidencyOptions;
use serde::{Deserialize, Serialize};

/// Properties of a device that the paper has no symbol for.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RuntimeModel {
    /// Residency policies to choose from; the first is taken where it makes no difference.
    pub residencies: Vec<ResidencyOptions>,
    /// How much a page cache reads again for each token if the weights do not fit.
    pub rereads: Rereads,
    /// Processors; the kernel keeps a reserve of free pages for each.
    pub processors: u32,
    /// Seconds per token on the head, without its layers.
    pub token_overhead: f64,
    /// Read rates, where more is known than the paper's single one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reads: Option<ReadRates>,
    /// Compute times with all weights in memory, where they are known better than from the paper's coefficients.
    pub work: Option<WorkTimes>,
}

/// Read rates of weights from disk by the kind of read, in bytes per second.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReadRates {
    /// Page faults of a computation.
    pub fault: f64,
    /// Read-ahead by a helper thread, with eviction by the system.
    pub ahead: f64,
    /// Streaming by a helper thread, which also releases what it read; the kernel works for both.
    pub stream: f64,
}

impl ReadRates {
    /// The same rate for every access pattern.
    pub(crate) fn all(rate: f64) -> Self {
        Self { fault: rate, ahead: rate, stream: rate }
    }

    pub(crate) fn slowest(&self) -> f64 {
        self.fault.min(self.ahead).min(self.stream)
    }
}

/// Compute seconds of one token, by layer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WorkTimes {
    /// Each layer of the model on the CPU.
    pub cpu_layers: Vec<f64>,
    /// Each layer on the GPU; empty without one.
    pub gpu_layers: Vec<f64>,
    /// The output head on the CPU.
    pub output: f64,
    /// The same on the GPU, where there is one.
    #[serde(default)]
    pub output_on_gpu: Option<f64>,
    /// Overhead of a window with layers on the CPU.
    pub cpu_window: f64,
    /// Overhead of a window with layers on the GPU.
    pub gpu_window: f64,
}

/// The bytes that a page cache reads again for each token if a share does not fit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Rereads {
    /// All of it: the pages used longest ago go first, and those are the next to be used.
    #[default]
    Everything,
    /// What exceeds memory, as the paper's latency model has it (appendix A.3).
    Excess,
}

impl Default for RuntimeModel {
    fn default() -> Self {
        Self {
            residencies: vec![ResidencyOptions::default()],
            rereads: Rereads::default(),
            processors: 1,
            token_overhead: 0.0,
            reads: None,
            work: None,
        }
    }
}
