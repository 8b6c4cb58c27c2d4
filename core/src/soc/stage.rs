//! A stage: the work of GPU and NPU between two synchronisations.
//!
//! Kernels on the GPU and graphs on the NPU run side by side, and the stage has the events that this costs. A stage
//! without events continues the GPU's queue: the next one follows without a gap.

use hearth_profiles::Seconds;

/// One stage of a layer, with the times of its GPU kernels and NPU graphs.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Stage {
    /// Kernels on the GPU, one after another, in seconds.
    pub gpu: Vec<f64>,
    /// Graphs on the NPU, one after another, in seconds.
    pub npu: Vec<f64>,
    /// Events at which one waits for the other.
    pub events: u32,
    /// The total cost of these events, in seconds.
    pub waiting: f64,
}

impl Stage {
    /// Kernels without a wait.
    pub fn queued(gpu: Vec<f64>) -> Self {
        Self { gpu, ..Self::default() }
    }

    /// The duration of the stage.
    pub fn time(&self) -> Seconds {
        Seconds(self.gpu_time().max(self.npu_time()) + self.waiting)
    }

    /// The GPU's part, in seconds.
    pub fn gpu_time(&self) -> f64 {
        self.gpu.iter().sum()
    }

    /// The NPU's part, in seconds.
    pub fn npu_time(&self) -> f64 {
        self.npu.iter().sum()
    }
}

/// The total time of stages that run one after another.
pub fn total(stages: &[Stage]) -> Seconds {
    stages.iter().map(Stage::time).sum()
}
