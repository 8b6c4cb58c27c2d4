//! Layer capacity: how many layers a device holds without reading weights for every token, and on which processor.
//!
//! ```text
//! CPU capacity = x, GPU capacity = floor(GPU memory / b')      in general ([`crate::latency::coefficients`])
//! CPU capacity + GPU capacity = x                              with Metal, where both share one memory
//! ```
//!
//! A device fills the processor that computes a layer faster, then the other. The time of a share is therefore convex
//! in its size, and a GPU that is slower than the CPU beside it is a reserve. A device whose buffers (and, on the head,
//! whose output weights) alone exceed its memory reads for every token in any case; its capacity is zero.
//!
//! Not here: what reading costs ([`crate::latency`]), or a split that weighs it against a slow GPU
//! ([`crate::latency::gpu_split`]).

use crate::latency::LatencyModel;
use crate::strategy::StrategyError;

/// The layers of the model that a device takes without reading.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LayerCapacity {
    /// Layers on the GPU.
    pub gpu: u32,
    /// Layers on the CPU.
    pub cpu: u32,
    /// Whether the GPU exists and is at least as fast as the CPU.
    pub gpu_first: bool,
}

impl LayerCapacity {
    /// The capacity of a device; at most L on either processor.
    pub(crate) fn new(model: &LatencyModel, device: usize, head: bool) -> Self {
        let costs = &model.devices[device];
        let most = i64::from(model.model_layers());
        let fit = costs.layers_that_fit(head, &model.model);
        let gpu = costs.gpu_layers_that_fit(head, &model.model, 1);
        // Without a GPU there is no memory for it either.
        let gpu_first = gpu > 0 && costs.gpu_layer() <= costs.cpu_layer();
        let (gpu, cpu) = match (costs.metal, gpu_first) {
            _ if fit < 0 => (0, 0),
            (true, true) => (fit.min(gpu), fit - fit.min(gpu)),
            (true, false) => (0, fit),
            (false, _) => (gpu, fit),
        };
        Self { gpu: gpu.min(most) as u32, cpu: cpu.min(most) as u32, gpu_first }
    }

    /// The total number of layers that fit.
    pub(crate) fn layers(self) -> u32 {
        self.gpu + self.cpu
    }

    /// n: the number of layers of a window on the GPU.
    pub(crate) fn gpu_layers(self, window: u32) -> u32 {
        if self.gpu_first { window.min(self.gpu) } else { window.saturating_sub(self.cpu).min(self.gpu) }
    }
}

/// The capacities of all devices, device 0 the head, for a strategy that lets no device read.
///
/// # Errors
/// If they do not hold the model, or the head holds no layer.
pub(crate) fn capacities(
    model: &LatencyModel,
    strategy: &'static str,
) -> Result<Vec<LayerCapacity>, StrategyError> {
    let capacities: Vec<LayerCapacity> =
        (0..model.device_count()).map(|device| LayerCapacity::new(model, device, device == 0)).collect();
    let model_layers = model.model_layers();
    let held = capacities.iter().fold(0_u32, |held, capacity| held.saturating_add(capacity.layers()));
    if held < model_layers {
        return Err(StrategyError::OutOfMemory { strategy, held, model_layers });
    }
    if capacities[0].layers() == 0 {
        let device = model.instance().devices[0].name.clone();
        return Err(StrategyError::HeadOutOfMemory { strategy, device });
    }
    Ok(capacities)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_faster_side_is_filled_first() {
        let fast_gpu = LayerCapacity { gpu: 3, cpu: 4, gpu_first: true };
        let slow_gpu = LayerCapacity { gpu_first: false, ..fast_gpu };
        let split = |capacity: LayerCapacity| [2, 3, 5, 7].map(|window| capacity.gpu_layers(window));
        assert_eq!(split(fast_gpu), [2, 3, 3, 3]);
        assert_eq!(split(slow_gpu), [0, 0, 1, 3]);
        assert_eq!(slow_gpu.layers(), 7);
    }
}
