//! What does a device do in practice that the paper's latency model leaves out?
//!
//! How it may keep its weights, what its page cache reads again when memory is short, and what a token costs
//! beside its layers. An instance from a paper says nothing of this; then the system decides what stays, and
//! everything is read again.
//!
//! Not here: what follows from it for a token's time. That is [`crate::latency::steady_state`].

use hearth_schema::residency::ResidencyOptions;
use serde::{Deserialize, Serialize};

/// What the paper's symbols do not say of a device.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Practice {
    /// From these ways of keeping weights a planner chooses, the first where it makes no difference.
    pub residencies: Vec<ResidencyOptions>,
    /// What a page cache reads again for each token if the weights do not fit.
    pub rereads: Rereads,
    /// Processors, each of which keeps a stock of memory below a limit.
    pub processors: u32,
    /// Seconds of each token on the head that no layer explains.
    pub token_overhead: f64,
    /// How fast it reads, where more is known than the paper's one rate.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reads: Option<ReadRates>,
    /// What work takes with all weights at hand, where that is known better than by the paper's coefficients.
    pub work: Option<WorkTimes>,
}

/// How fast weights come from disk, by the way in which they are read, in bytes a second.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReadRates {
    /// A computation faults in what it touches.
    pub fault: f64,
    /// A helper reads ahead of its turn, and the system decides what goes.
    pub ahead: f64,
    /// A helper streams: what it brings in it gives up again, which takes the kernel's work for both.
    pub stream: f64,
}

impl ReadRates {
    /// One rate for everything.
    pub(crate) fn all(rate: f64) -> Self {
        Self { fault: rate, ahead: rate, stream: rate }
    }

    pub(crate) fn slowest(&self) -> f64 {
        self.fault.min(self.ahead).min(self.stream)
    }
}

/// Seconds of one token's work, layer by layer.
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
    /// What a window costs beside its layers on the CPU, where it has some there.
    pub cpu_window: f64,
    /// The same on the GPU.
    pub gpu_window: f64,
}

/// What a page cache reads again if a share does not fit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Rereads {
    /// All of it: the pages used longest ago go first, and those are the next to be used.
    #[default]
    Everything,
    /// What exceeds memory, as the paper's latency model has it (appendix A.3).
    Excess,
}

impl Default for Practice {
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
