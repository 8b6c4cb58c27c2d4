//! What if layers simply follow memory, as in exo and in prima.cpp without Halda?
//!
//! prima.cpp paper, section 4.1 and appendix A.10 (`MemSched`). One turn of the ring; device m gets the layers
//! between two cumulative shares, each rounded to the nearest layer (half up):
//!
//! ```text
//! w_m = round(L (d_1 + ... + d_m)/D) - round(L (d_1 + ... + d_{m-1})/D),     D = sum d
//! ```
//!
//! so memories 8, 8, 11 and 32 layers give 9.48 -> 9, 18.96 -> 19, 32: windows 9, 10, 13, exo's plan for
//! Llama-3-8B in the paper. On each device as many layers as fit go to the GPU and the rest overflow to its
//! CPU, which may then have to read from disk.
//!
//! A share may round to nothing; the head alone is given one layer in that case, taken from the largest window.
//!
//! Not here: speed, in any form. A device with a slow disk that overflows is a refusal, because the rule is
//! part of the problem and not of this heuristic.

use crate::assignment::Assignment;
use crate::constraints::Rules;
use crate::gpu_split::Turns;
use crate::instance::{Device, Gpu};
use crate::latency::LatencyModel;
use crate::strategy::{Proposal, Refusal, Strategy};

/// Which memory the layers are proportional to.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum MemorySizes {
    /// What the instance calls available: Metal's working set on Metal, otherwise RAM, plus GPU memory on
    /// CUDA (the paper's "RAM/VRAM ratios"). Swap does not count. This is the paper's w/o-halda variant.
    #[default]
    Available,
    /// One number a device, in any unit: exo's variant, which takes total memory. An instance does not know
    /// totals, so the caller brings them.
    Given(Vec<u64>),
}

/// Layers proportional to memory, device 0 the head.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct MemoryProportional {
    /// Which memory.
    pub sizes: MemorySizes,
}

impl Strategy for MemoryProportional {
    fn name(&self) -> &'static str {
        "mem"
    }

    fn rules(&self) -> Rules {
        Rules { may_drop: true, may_leave_remainder: false }
    }

    fn options(&self) -> Vec<String> {
        match self.sizes {
            MemorySizes::Available => vec!["memory=available".to_owned()],
            MemorySizes::Given(_) => vec!["memory=given".to_owned()],
        }
    }

    fn propose(&self, model: &LatencyModel) -> Result<Proposal, Refusal> {
        let devices = &model.instance().devices;
        let sizes: Vec<u64> = match &self.sizes {
            MemorySizes::Available => devices.iter().map(available).collect(),
            MemorySizes::Given(sizes) if sizes.len() != devices.len() => {
                return Err(Refusal::MemoryCount { given: sizes.len(), devices: devices.len() });
            }
            MemorySizes::Given(sizes) => sizes.clone(),
        };
        let mut window_layers = cumulative_rounding(&sizes, model.model_layers()).ok_or(Refusal::NoMemory)?;
        if window_layers[0] == 0 {
            let largest = (0..window_layers.len()).rev().max_by_key(|device| window_layers[*device]);
            window_layers[largest.unwrap_or(0)] -= 1;
            window_layers[0] = 1;
        }
        let gpu_layers = window_layers
            .iter()
            .enumerate()
            .map(|(device, window)| model.most_gpu_layers(device, device == 0, *window, Turns::whole(1)))
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

/// The windows of the formula above, `None` if all sizes are zero.
fn cumulative_rounding(sizes: &[u64], layers: u32) -> Option<Vec<u32>> {
    let total: u128 = sizes.iter().map(|size| u128::from(*size)).sum();
    let mut before = 0;
    let mut sum = 0;
    sizes
        .iter()
        .map(|size| {
            sum += u128::from(*size);
            let after = (2 * u128::from(layers) * sum + total).checked_div(2 * total)? as u32;
            let window = after - before;
            before = after;
            Some(window)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_papers_example() {
        assert_eq!(cumulative_rounding(&[8, 8, 11], 32), Some(vec![9, 10, 13]));
    }

    #[test]
    fn windows_always_cover_the_model() {
        for sizes in [&[1, 1, 1][..], &[u64::MAX, 1], &[0, 5, 0], &[3, 7, 11, 13]] {
            let windows = cumulative_rounding(sizes, 80).unwrap();
            assert_eq!(windows.iter().sum::<u32>(), 80, "{sizes:?}");
        }
        assert_eq!(cumulative_rounding(&[0, 0], 80), None);
    }
}
