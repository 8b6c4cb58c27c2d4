//! The strategy `single`: all layers on one device, as llama.cpp runs them.
//!
//! All L layers in one window on one device, as many on its GPU as GPU memory holds, the rest on its CPU
//! (`--n-gpu-layers` as large as possible, memory-mapped weights). Unless a device is fixed it is the one
//! that is fastest alone, and it is the head.
//!
//! Not here: whether fewer GPU layers would be faster (a GPU may be slower than the CPU beside it); llama.cpp
//! does not ask either, and `exact` does.

use crate::latency::LatencyModel;
use crate::latency::constraints::{Rules, violations};
use crate::latency::gpu_split::RoundCounts;
use crate::problem::assignment::Assignment;
use crate::strategy::{Proposal, Strategy, StrategyError};

/// One device, most layers on its GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Single {
    /// The device; the fastest one that is allowed if absent, ties to the lower index.
    pub device: Option<usize>,
}

impl Strategy for Single {
    fn name(&self) -> &'static str {
        "single"
    }

    fn rules(&self) -> Rules {
        Rules { may_drop: true, may_leave_remainder: false }
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
