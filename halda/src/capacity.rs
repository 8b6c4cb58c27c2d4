//! Layer capacity: the number of layers that fit in the memory of a device, for its CPU and for its GPU.
//!
//! ```text
//! CPU capacity = x, GPU capacity = floor(GPU memory / b')      in general ([`crate::latency::coefficients`])
//! CPU capacity + GPU capacity = x                              with Metal, where both share one memory
//! ```
//!
//! Here a layer takes b' bytes with its cache, and x layers fit in main memory. Layers within the capacity are not read
//! from disk. They are first assigned to the processor that computes a layer faster, then to the other one. So the time
//! of a device is convex in its number of layers. A device has no capacity if its buffers, on the head device with the
//! output weights, exceed its memory: it then reads weights from disk for every token anyway.

use crate::{Assignment, LatencyModel, Proposal, StrategyError};

/// The numbers of layers that fit in the GPU memory and in the main memory of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LayerCapacity {
    pub max_gpu_layers: u32,
    pub max_cpu_layers: u32,
    /// Whether layers go to the GPU first: its memory holds a layer, and it is at least as fast as the CPU.
    pub fills_gpu_first: bool,
}

impl LayerCapacity {
    /// Computes the capacity of each device with device 0 as the head; no capacity exceeds the layers of the model.
    pub(crate) fn of_all_devices(model: &LatencyModel) -> Vec<Self> {
        (0..model.device_count()).map(|device| Self::new(model, device, device == 0)).collect()
    }

    fn new(model: &LatencyModel, device: usize, head: bool) -> Self {
        let costs = &model.device_costs[device];
        let most = i64::from(model.model_layers());
        let fit = costs.layers_that_fit(head, &model.sizes);
        let gpu = costs.gpu_layers_that_fit(head, &model.sizes, 1);
        // Without a GPU the GPU capacity is zero.
        let fills_gpu_first = gpu > 0 && costs.gpu_layer_seconds() <= costs.cpu_layer_seconds();
        let (gpu, cpu) = match (costs.uses_metal, fills_gpu_first) {
            _ if fit < 0 => (0, 0),
            (true, true) => (fit.min(gpu), fit - fit.min(gpu)),
            (true, false) => (0, fit),
            (false, _) => (gpu, fit),
        };
        let [max_gpu_layers, max_cpu_layers] = [gpu, cpu].map(|layers| layers.min(most) as u32);
        Self { max_gpu_layers, max_cpu_layers, fills_gpu_first }
    }

    pub(crate) fn max_layers(self) -> u32 {
        self.max_gpu_layers + self.max_cpu_layers
    }

    pub(crate) fn gpu_layers_in_window(self, window: u32) -> u32 {
        if self.fills_gpu_first {
            window.min(self.max_gpu_layers)
        } else {
            window.saturating_sub(self.max_cpu_layers).min(self.max_gpu_layers)
        }
    }
}

/// Returns the layer capacity of each device. Fails if the devices together cannot hold the model, or if device 0,
/// the head, cannot hold a layer.
pub(crate) fn layer_capacities(
    model: &LatencyModel,
    strategy: &'static str,
) -> Result<Vec<LayerCapacity>, StrategyError> {
    let capacities = LayerCapacity::of_all_devices(model);
    let model_layers = model.model_layers();
    let held = capacities.iter().fold(0_u32, |held, capacity| held.saturating_add(capacity.max_layers()));
    if held < model_layers {
        return Err(StrategyError::OutOfMemory { strategy, held, model_layers });
    }
    if capacities[0].max_layers() == 0 {
        return Err(StrategyError::HeadOutOfMemory { strategy, device: model.device_name(0) });
    }
    Ok(capacities)
}

/// Proposes a plan of one round with these windows, each with as many layers as fit on the faster processor.
pub(crate) fn one_round_proposal(window_layers: Vec<u32>, capacities: &[LayerCapacity]) -> Proposal {
    let split = |(capacity, window): (&LayerCapacity, &u32)| capacity.gpu_layers_in_window(*window);
    let gpu_layers = capacities.iter().zip(&window_layers).map(split).collect();
    Proposal::new(Assignment::new(0, 1, window_layers, gpu_layers))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faster_processor_is_filled_first() {
        let fast_gpu = LayerCapacity { max_gpu_layers: 3, max_cpu_layers: 4, fills_gpu_first: true };
        let slow_gpu = LayerCapacity { fills_gpu_first: false, ..fast_gpu };
        let split =
            |capacity: LayerCapacity| [2, 3, 5, 7].map(|window| capacity.gpu_layers_in_window(window));
        assert_eq!(split(fast_gpu), [2, 3, 3, 3]);
        assert_eq!(split(slow_gpu), [0, 0, 1, 3]);
        assert_eq!(slow_gpu.max_layers(), 7);
    }
}
