//! The runtime model of a device: residency, page cache and overheads, which prima.cpp's latency model leaves out.
//!
//! By default the operating system decides which weights stay in memory, and all are read again if they do not fit.

use hearth_schema::residency::ResidencyOptions;
use serde::{Deserialize, Serialize};

/// The residencies, page cache, disk rates and overheads of a device, which the prima.cpp paper's model leaves out.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RuntimeModel {
    /// The residencies that a planner may choose. If several are equally fast, it chooses the first of them.
    #[serde(rename = "residencies")]
    pub allowed_residencies: Vec<ResidencyOptions>,
    /// What the page cache reads again for each token if the weights do not fit.
    #[serde(rename = "rereads")]
    pub reread_scope: RereadScope,
    /// The number of processors. The kernel keeps some pages free for each processor.
    #[serde(rename = "processors")]
    pub cpu_count: u32,
    /// Seconds per token that the head spends outside the layers.
    #[serde(rename = "token_overhead")]
    pub token_overhead_seconds: f64,
    /// Disk read rates by access pattern; if `None`, the instance's single rate (`s_disk`) is used.
    #[serde(rename = "reads", skip_serializing_if = "Option::is_none")]
    pub read_rates: Option<ReadRates>,
    /// Compute times with all weights in memory; if `None`, they follow from the prima.cpp paper's model.
    #[serde(rename = "work")]
    pub compute_times: Option<ComputeTimes>,
}

/// Disk read rates by access pattern, in bytes per second.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReadRates {
    /// The rate of reading by page faults during a computation, in bytes per second.
    #[serde(rename = "fault")]
    pub fault_read_rate: f64,
    /// The rate of reading ahead by a thread, while the operating system evicts pages, in bytes per second.
    #[serde(rename = "ahead")]
    pub read_ahead_rate: f64,
    /// The rate of streaming by a thread, which also releases the pages, in bytes per second.
    #[serde(rename = "stream")]
    pub stream_read_rate: f64,
}

/// Compute times of one token in seconds, with all weights in memory.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ComputeTimes {
    /// The seconds of each layer of the model on the CPU.
    #[serde(rename = "cpu_layers")]
    pub cpu_layer_seconds: Vec<f64>,
    /// The seconds of each layer of the model on the GPU; empty without a GPU.
    #[serde(rename = "gpu_layers")]
    pub gpu_layer_seconds: Vec<f64>,
    /// The seconds of the output head on the CPU.
    #[serde(rename = "output")]
    pub cpu_output_seconds: f64,
    /// The seconds of the output head on the GPU; `None` without a GPU.
    #[serde(rename = "output_on_gpu", default)]
    pub gpu_output_seconds: Option<f64>,
    /// The overhead of a window with layers on the CPU, in seconds.
    #[serde(rename = "cpu_window")]
    pub cpu_window_overhead_seconds: f64,
    /// The overhead of a window with layers on the GPU, in seconds.
    #[serde(rename = "gpu_window")]
    pub gpu_window_overhead_seconds: f64,
}

/// What a page cache reads again for each token if the weights do not fit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RereadScope {
    /// All weights: the cache evicts the least recently used pages, which are the next ones to be used.
    #[default]
    Everything,
    /// Only the weights that do not fit, as in the latency model of the prima.cpp paper (appendix A.3).
    Excess,
}

impl Default for RuntimeModel {
    fn default() -> Self {
        Self {
            allowed_residencies: vec![ResidencyOptions::default()],
            reread_scope: RereadScope::default(),
            cpu_count: 1,
            token_overhead_seconds: 0.0,
            read_rates: None,
            compute_times: None,
        }
    }
}
