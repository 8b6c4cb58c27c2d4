//! Layer capacity: the number of layers that a device holds in memory, on its CPU and on its GPU.
//!
//! ```text
//! CPU capacity = x, GPU capacity = floor(GPU memory / b')      in general ([`crate::latency::coefficients`])
//! CPU capacity + GPU capacity = x                              with Metal, where both share one memory
//! ```
//!
//! These layers need no reading from disk. A device fills the processor that computes a layer faster, then the other
//! one. The time of a share is therefore convex in its size, and a GPU that is slower than the CPU of its device is
//! filled last. If the buffers of a device (and, on the head, the output weights) alone exceed its memory, it reads
//! for every token in any case, and its capacity is zero.
//!
//! Not here: the time of reading ([`crate::latency`]), and splits that use a slow GPU to avoid reading
//! ([`crate::latency::gpu_split`]).

use crate::latency::LatencyModel;
use crate::strategy::StrategyError;

/// The number of layers that a device holds in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LayerCapacity {
    pub gpu: u32,
    pub cpu: u32,
    /// Whether the device has a GPU that is at least as fast as its CPU.
    pub gpu_first: bool,
}

impl LayerCapacity {
    /// Computes the capacity of a device, at most L on each processor.
    pub(crate) fn new(model: &LatencyModel, device: usize, head: bool) -> Self {
        let costs = &model.devices[device];
        let most = i64::from(model.model_layers());
        let fit = costs.layers_that_fit(head, &model.model);
        let gpu = costs.gpu_layers_that_fit(head, &model.model, 1);
        // Without a GPU the GPU capacity is zero.
        let gpu_first = gpu > 0 && costs.gpu_layer() <= costs.cpu_layer();
        let (gpu, cpu) = match (costs.metal, gpu_first) {
            _ if fit < 0 => (0, 0),
            (true, true) => (fit.min(gpu), fit - fit.min(gpu)),
            (true, false) => (0, fit),
            (false, _) => (gpu, fit),
        };
        Self { gpu: gpu.min(most) as u32, cpu: cpu.min(most) as u32, gpu_first }
    }

    /// Returns the total number of layers that fit.
    pub(crate) fn layers(self) -> u32 {
        self.gpu + self.cpu
    }

    /// Returns n, the number of layers of a window that are on the GPU.
    pub(crate) fn gpu_layers(self, window: u32) -> u32 {
        if self.gpu_first { window.min(self.gpu) } else { window.saturating_sub(self.cpu).min(self.gpu) }
    }
}

/// Returns the capacities of all devices for a strategy that reads no weights from disk; device 0 is the head.
///
/// # Errors
/// If the devices cannot hold the model in memory, or the head cannot hold a layer.
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
    fn faster_processor_is_filled_first() {
        let fast_gpu = LayerCapacity { gpu: 3, cpu: 4, gpu_first: true };
        let slow_gpu = LayerCapacity { gpu_first: false, ..fast_gpu };
        let split = |capacity: LayerCapacity| [2, 3, 5, 7].map(|window| capacity.gpu_layers(window));
        assert_eq!(split(fast_gpu), [2, 3, 3, 3]);
        assert_eq!(split(slow_gpu), [0, 0, 1, 3]);
        assert_eq!(slow_gpu.layers(), 7);
    }
}
