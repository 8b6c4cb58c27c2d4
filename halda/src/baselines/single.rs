//! The strategy `single`: all layers on one device, as with llama.cpp.
//!
//! All L layers are in one window. As many as fit are on the GPU, the others on the CPU (memory-mapped weights,
//! maximum `--n-gpu-layers`). By default the device is the one that is fastest alone.
//!
//! Not here: fewer GPU layers than fit, which are faster if the GPU is slower than the CPU. llama.cpp does not check
//! that either; `exact` does.

use crate::latency::LatencyModel;
use crate::latency::constraints::violations;
use crate::latency::gpu_split::RoundCounts;
use crate::problem::assignment::Assignment;
use crate::strategy::{Proposal, Strategy, StrategyError};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Single {
    /// The index of the device. If `None`, the fastest one with an allowed plan; ties go to the lower index.
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
        let mut violated = Vec::new();
        for device in candidates {
            let plan = alone(model, device);
            let violations = violations(model, &plan, self.rules());
            if !violations.is_empty() {
                violated.extend(violations);
                continue;
            }
            let seconds = model.seconds(&plan);
            if best.as_ref().is_none_or(|(fastest, _)| seconds < *fastest) {
                best = Some((seconds, plan));
            }
        }
        match best {
            Some((_, assignment)) => Ok(Proposal::new(assignment)),
            None => Err(StrategyError::ConstraintsViolated { strategy: self.name(), violations: violated }),
        }
    }
}

/// Returns the plan with all layers on one device.
fn alone(model: &LatencyModel, device: usize) -> Assignment {
    let layers = model.model_layers();
    let mut window_layers = vec![0; model.device_count()];
    let mut gpu_layers = window_layers.clone();
    window_layers[device] = layers;
    gpu_layers[device] = model.max_gpu_layers(device, true, layers, RoundCounts::whole(1));
    Assignment::new(device, 1, window_layers, gpu_layers)
}
