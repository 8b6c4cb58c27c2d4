//! The strategy `single`: all layers on one device, as with llama.cpp.
//!
//! All layers are in one window. As many layers as fit are on the GPU, and the others on the CPU, like llama.cpp with
//! memory-mapped weights and the maximum `--n-gpu-layers`. By default the device is the one that is fastest alone.
//!
//! Not here: fewer GPU layers than fit, which are faster if the GPU is slower than the CPU.

use crate::{Assignment, HeadChoice, LatencyModel, Proposal, Strategy, StrategyError, violations};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SingleDevice {
    /// The index of the device; `None` for the fastest device with an allowed plan. Ties go to the lower index.
    pub device: Option<usize>,
}

impl Strategy for SingleDevice {
    fn name(&self) -> &'static str {
        "single"
    }

    fn options(&self) -> Vec<String> {
        self.device.map(|device| format!("head={device}")).into_iter().collect()
    }

    fn propose(&self, model: &LatencyModel) -> Result<Proposal, StrategyError> {
        let candidates = self.device.map_or(HeadChoice::Best, HeadChoice::Fixed);
        let candidates = candidates.candidates(model.device_count())?;
        let (mut allowed, mut violated) = (Vec::new(), Vec::new());
        for plan in candidates.map(|device| alone(model, device)) {
            let violations = violations(model, &plan, self.rules());
            if violations.is_empty() {
                allowed.push((model.seconds_per_token(&plan), plan));
            }
            violated.extend(violations);
        }
        let fastest = allowed.into_iter().min_by(|one, other| one.0.total_cmp(&other.0));
        let error = || StrategyError::ConstraintsViolated { strategy: self.name(), violations: violated };
        fastest.map(|(_, plan)| Proposal::new(plan)).ok_or_else(error)
    }
}

fn alone(model: &LatencyModel, device: usize) -> Assignment {
    let layers = model.model_layers();
    let mut window_layers = vec![0; model.device_count()];
    let mut gpu_layers = window_layers.clone();
    window_layers[device] = layers;
    gpu_layers[device] = model.max_gpu_layers_in_one_round(device, device, layers);
    Assignment::new(device, 1, window_layers, gpu_layers)
}
