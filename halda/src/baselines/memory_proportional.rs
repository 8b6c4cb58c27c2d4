//! The strategies `mem` and `mem-total`: layers in proportion to memory, as in prima.cpp without Halda and in exo.
//!
//! prima.cpp paper, section 4.1 and appendix A.10 (`MemSched`). The plan has one round, with windows in proportion to
//! memory by cumulative rounding (`crate::baselines::proportional_shares`). On each device as many layers as fit are
//! on the GPU. The others are on its CPU, which may have to read them from disk. `mem` uses the available memory, as
//! the paper does without Halda; `mem-total` uses the total memory, as exo does.
//!
//! If the window of the head rounds to zero, it gets one layer of the largest window.
//!
//! Not here: speed. If the share of a device with a slow disk does not fit, the plan is an error, because the
//! heuristic does not know the constraint on slow disks.

use crate::baselines::proportional_shares::{cumulative_rounding, ensure_head_layer};
use crate::latency::LatencyModel;
use crate::latency::gpu_split::RoundCounts;
use crate::problem::assignment::Assignment;
use crate::problem::instance::{Device, Gpu};
use crate::strategy::{Proposal, Strategy, StrategyError};

/// The memory to which windows are proportional.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum MemorySizes {
    /// The available memory, as in the paper's variant without Halda: the working set with Metal; otherwise RAM, with
    /// CUDA plus GPU memory (the paper's "RAM/VRAM ratios"). Swap is excluded.
    #[default]
    Available,
    /// The total memory of each device in any unit, as in exo. An instance does not contain it, so the caller passes
    /// the result of [`crate::problem::total_memory`].
    Total(Vec<u64>),
}

/// The strategy `mem`, or `mem-total` with [`MemorySizes::Total`].
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct MemoryProportional {
    pub sizes: MemorySizes,
}

impl Strategy for MemoryProportional {
    fn name(&self) -> &'static str {
        match self.sizes {
            MemorySizes::Available => "mem",
            MemorySizes::Total(_) => "mem-total",
        }
    }

    fn options(&self) -> Vec<String> {
        match self.sizes {
            MemorySizes::Available => vec!["memory=available".to_owned()],
            MemorySizes::Total(_) => vec!["memory=total".to_owned()],
        }
    }

    fn propose(&self, model: &LatencyModel) -> Result<Proposal, StrategyError> {
        let devices = &model.instance().devices;
        let sizes: Vec<u64> = match &self.sizes {
            MemorySizes::Available => devices.iter().map(available).collect(),
            MemorySizes::Total(sizes) if sizes.len() != devices.len() => {
                return Err(StrategyError::MemoryCount { given: sizes.len(), devices: devices.len() });
            }
            MemorySizes::Total(sizes) => sizes.clone(),
        };
        let mut window_layers =
            cumulative_rounding(&sizes, model.model_layers()).ok_or(StrategyError::NoMemory)?;
        ensure_head_layer(&mut window_layers);
        let gpu_layers = window_layers
            .iter()
            .enumerate()
            .map(|(device, window)| model.max_gpu_layers(device, device == 0, *window, RoundCounts::whole(1)))
            .collect();
        Ok(Proposal::new(Assignment::new(0, 1, window_layers, gpu_layers)))
    }
}

/// Returns the available memory of a device in bytes.
fn available(device: &Device) -> u64 {
    match device.gpu {
        Gpu::Metal => device.metal_available,
        Gpu::Cuda => device.ram_available + device.cuda_available,
        Gpu::None => device.ram_available,
    }
}
