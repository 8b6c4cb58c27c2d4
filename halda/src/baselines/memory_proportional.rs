//! The strategies `mem` and `mem-total`: layers in proportion to memory, as in prima.cpp without Halda and in exo.
//!
//! prima.cpp paper, section 4.1 and appendix A.10 (`MemSched`). The plan has one round, with windows in proportion to
//! memory by cumulative rounding (`crate::baselines::proportional_shares`). On each device as many layers as fit are on
//! the GPU. The other layers are on the CPU, which may have to read them from disk. `mem` uses the available memory, as
//! the paper does without Halda; `mem-total` uses the total memory, as exo does.
//!
//! If the window of the head rounds to zero, the head gets one layer of the largest window. If the layers of a device
//! with a slow disk do not fit in its memory, the plan is an error.

use crate::baselines::proportional_shares::{cumulative_rounding, ensure_head_layer};
use crate::{Assignment, Device, GpuApi, LatencyModel, Proposal, Strategy, StrategyError};

/// The memory sizes to which the layers of a plan are proportional.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MemoryProportional {
    /// `mem`: the available memory without swap, as in prima.cpp without Halda ("RAM/VRAM ratios" in the paper): the
    /// working set with Metal, RAM plus GPU memory with CUDA, otherwise RAM.
    Available,
    /// `mem-total`: the total memory of each device in any unit, as in exo ([`crate::problem::exo_memory_by_device`]).
    Total(Vec<u64>),
}

impl Strategy for MemoryProportional {
    fn name(&self) -> &'static str {
        if *self == Self::Available { "mem" } else { "mem-total" }
    }

    fn options(&self) -> Vec<String> {
        let sizes = if *self == Self::Available { "available" } else { "total" };
        vec![format!("memory={sizes}")]
    }

    fn propose(&self, model: &LatencyModel) -> Result<Proposal, StrategyError> {
        let devices = &model.instance().devices;
        let sizes: Vec<u64> = match self {
            Self::Available => devices.iter().map(available).collect(),
            Self::Total(sizes) if sizes.len() != devices.len() => {
                return Err(StrategyError::MemorySizeCount { given: sizes.len(), devices: devices.len() });
            }
            Self::Total(sizes) => sizes.clone(),
        };
        let mut window_layers =
            cumulative_rounding(&sizes, model.model_layers()).ok_or(StrategyError::NoMemory)?;
        ensure_head_layer(&mut window_layers);
        let most = |(device, layers): (usize, &u32)| model.max_gpu_layers_in_one_round(device, 0, *layers);
        let gpu_layers = window_layers.iter().enumerate().map(most).collect();
        Ok(Proposal::new(Assignment::new(0, 1, window_layers, gpu_layers)))
    }
}

fn available(device: &Device) -> u64 {
    match device.gpu {
        GpuApi::Metal => device.metal_available,
        GpuApi::Cuda => device.ram_available + device.cuda_available,
        GpuApi::None => device.ram_available,
    }
}
