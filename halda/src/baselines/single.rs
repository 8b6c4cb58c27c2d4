//! The strategy `single`: all layers on one device, as llama.cpp runs them.
//!
//! All L layers in one window, as many on the GPU as its memory holds and the rest on the CPU (`--n-gpu-layers` as
//! large as possible, memory-mapped weights). The device is the head; by default it is the one that is fastest alone.
//!
//! Not here: whether fewer GPU layers would be faster, because a GPU may be slower than its CPU. llama.cpp does not
//! check that either; `exact` does.

use crate::latency::LatencyModel;
use crate::latency::constraints::violations;
use crate::latency::gpu_split::RoundCounts;
use crate::problem::assignment::Assignment;
use crate::strategy::{Proposal, Strategy, StrategyError};

/// All layers on one device, as many as possible on its GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Single {
    /// The device; by default the fastest one with an allowed plan, the lower index on a tie.
    pub device: Option<usize>,
}

impl Strategy for Single {
    fn name(&self) -> &'static str {
        "single"
    }

    fn options(&self) -> Vec<String> {
        self.device.map(|device| format!("head={device}")).into_iter().collect()
    }

    fn propose(&self, model: &LatencyModel) -> Result<Proposal, StrategyError> {
        let devices = model.device_count();
        let candidates = match self.device {
            Some(device) if device >= devices => return Err(StrategyError::NoSuchDevice { device, devices }),
            Some(device) => device..device + 1,
            None => 0..devices,
        };
        let mut best: Option<(f64, Assignment)> = None;
        let mut broken = Vec::new();
        for device in candidates {
            let plan = alone(model, device);
            let violations = violations(model, &plan, self.rules());
            if !violations.is_empty() {
                broken.extend(violations);
                continue;
            }
            let seconds = model.seconds(&plan);
            if best.as_ref().is_none_or(|(fastest, _)| seconds < *fastest) {
                best = Some((seconds, plan));
            }
        }
        match best {
            Some((_, assignment)) => Ok(Proposal::of(assignment)),
            None => Err(StrategyError::ConstraintsViolated { strategy: self.name(), violations: broken }),
        }
    }
}

fn alone(model: &LatencyModel, device: usize) -> Assignment {
    let layers = model.model_layers();
    let mut window_layers = vec![0; model.device_count()];
    let mut gpu_layers = window_layers.clone();
    window_layers[device] = layers;
    gpu_layers[device] = model.max_gpu_layers(device, true, layers, RoundCounts::whole(1));
    Assignment::new(device, 1, window_layers, gpu_layers)
}
