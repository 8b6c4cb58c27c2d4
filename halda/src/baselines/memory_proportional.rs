//! The strategies `mem` and `mem-total`: layers in proportion to memory, as prima.cpp without Halda and as exo.
//!
//! prima.cpp paper, section 4.1 and appendix A.10 (`MemSched`). One round of the ring, with windows proportional to
//! memory by cumulative rounding (`crate::baselines::proportional`). On each device as many layers as fit go to the
//! GPU; the rest go to its CPU, which may then have to read from disk. `mem` counts available memory, as the paper
//! does without Halda; `mem-total` counts total memory, as exo does.
//!
//! If the head's share rounds to nothing, it gets one layer of the largest window.
//!
//! Not here: speed. A device with a slow disk whose share does not fit is an error, because that rule belongs to the
//! problem and not to this heuristic.

use crate::baselines::proportional::{cumulative_rounding, keep_head};
use crate::latency::LatencyModel;
use crate::latency::gpu_split::RoundCounts;
use crate::problem::assignment::Assignment;
use crate::problem::instance::{Device, Gpu};
use crate::strategy::{Proposal, Strategy, StrategyError};

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum MemorySizes {
    /// Available memory: Metal's working set on Metal, otherwise RAM, plus GPU memory on CUDA (the paper's "RAM/VRAM
    /// ratios"), without swap. The paper's w/o-halda variant.
    #[default]
    Available,
    /// Total memory, one number per device in any unit: exo's variant. An instance does not contain totals; the
    /// caller passes those of [`crate::problem::total_memory`].
    Total(Vec<u64>),
}

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
        keep_head(&mut window_layers);
        let gpu_layers = window_layers
            .iter()
            .enumerate()
            .map(|(device, window)| model.max_gpu_layers(device, device == 0, *window, RoundCounts::whole(1)))
            .collect();
        Ok(Proposal::of(Assignment::new(0, 1, window_layers, gpu_layers)))
    }
}

fn available(device: &Device) -> u64 {
    match device.gpu {
        Gpu::Metal => device.metal_available,
        Gpu::Cuda => device.ram_available + device.cuda_available,
        Gpu::None => device.ram_available,
    }
}
