//! The runtime model of a device: residency, page cache and overheads, which prima.cpp's latency model leaves out.
//!
//! By default the operating system decides which weights stay in memory; weights that do not all fit are read again
//! from disk for every token.

use hearth_schema::residency::ResidencyOptions;
use serde::{Deserialize, Serialize};

/// The residencies, page cache, disk rates and overheads of a device, which the prima.cpp paper's model leaves out.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RuntimeModel {
    /// The residency policies that a planner may choose for the device. Of equally fast ones it chooses the first.
    #[serde(rename = "residencies")]
    pub allowed_residencies: Vec<ResidencyOptions>,
    /// Which weights the page cache reads again for each token if they do not all fit in memory.
    #[serde(rename = "rereads")]
    pub reread_scope: RereadScope,
    /// The uncertainty of the available memory, as the standard deviation of its logarithm.
    #[serde(skip_serializing_if = "is_zero")]
    pub memory_uncertainty: f64,
    /// The number of CPU cores. The kernel keeps some pages free for each core.
    #[serde(rename = "processors")]
    pub cpu_count: u32,
    /// The seconds per token that the device spends outside the layers if it is the head.
    #[serde(rename = "token_overhead")]
    pub token_overhead_seconds: f64,
    /// The experts of a mixture; `None` if every token uses all weights.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub experts: Option<ExpertReads>,
    /// Disk read rates by access pattern; if `None`, the instance's single rate (`s_disk`) is used.
    #[serde(rename = "reads", skip_serializing_if = "Option::is_none")]
    pub read_rates: Option<ReadRates>,
    /// Compute times with all weights in memory; if `None`, they follow from the prima.cpp paper's model.
    #[serde(rename = "work")]
    pub compute_times: Option<ComputeTimes>,
}

/// What a token of a mixture reads of the layers.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExpertReads {
    /// The share of the bytes of the layers that belongs to experts.
    pub weight_share: f64,
    /// The share of the experts that a token uses.
    pub used_share: f64,
    /// Memory of managed residency for the experts that are in use, in bytes.
    pub in_use_bytes: u64,
    /// Number of experts of a layer that a token uses, and the bytes of all its experts.
    pub used: u32,
    pub layer_bytes: u64,
    /// The seconds that reading the missing experts of a layer takes in addition to the time at the rate of the disk.
    pub latency_seconds: f64,
    /// The bytes that page faults read for each byte of an expert: the system's read-ahead window is larger than the
    /// matrices of an expert.
    pub read_around: f64,
}

/// Disk read rates by access pattern, in bytes per second.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReadRates {
    /// The rate of reading by page faults during a computation, in bytes per second.
    #[serde(rename = "fault")]
    pub fault_read_rate: f64,
    /// The rate of a thread that reads ahead while the operating system evicts pages, in bytes per second.
    #[serde(rename = "ahead")]
    pub read_ahead_rate: f64,
    /// The rate of a thread that streams weights and releases their pages itself, in bytes per second.
    #[serde(rename = "stream")]
    pub stream_read_rate: f64,
}

/// Compute times of one token in seconds, with all weights in memory.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ComputeTimes {
    /// The seconds per token of each layer of the model on the CPU.
    #[serde(rename = "cpu_layers")]
    pub cpu_layer_seconds: Vec<f64>,
    /// The seconds per token of each layer of the model on the GPU; empty without a GPU.
    #[serde(rename = "gpu_layers")]
    pub gpu_layer_seconds: Vec<f64>,
    /// The seconds per token of the output head on the CPU.
    #[serde(rename = "output")]
    pub cpu_output_seconds: f64,
    /// The seconds per token of the output head on the GPU; `None` without a GPU.
    #[serde(rename = "output_on_gpu", default)]
    pub gpu_output_seconds: Option<f64>,
    /// The fixed overhead in seconds of each window that has layers on the CPU.
    #[serde(rename = "cpu_window")]
    pub cpu_window_overhead_seconds: f64,
    /// The fixed overhead in seconds of each window that has layers on the GPU.
    #[serde(rename = "gpu_window")]
    pub gpu_window_overhead_seconds: f64,
}

/// Which weights a page cache reads again for each token if the weights do not all fit in memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RereadScope {
    /// All weights: the cache evicts the least recently used pages, which are the next ones to be used.
    #[default]
    Everything,
    /// Only the weights that do not fit, as in the latency model of the prima.cpp paper (appendix A.3).
    Excess,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_zero(value: &f64) -> bool {
    *value == 0.0
}

impl Default for RuntimeModel {
    fn default() -> Self {
        Self {
            allowed_residencies: vec![ResidencyOptions::default()],
            reread_scope: RereadScope::default(),
            memory_uncertainty: 0.0,
            cpu_count: 1,
            token_overhead_seconds: 0.0,
            experts: None,
            read_rates: None,
            compute_times: None,
        }
    }
}
