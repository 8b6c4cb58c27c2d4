//! The strategy `even`: windows of the same size on every device.
//!
//! The strategy is the control in experiments. With L layers and k rounds, each round of W = L/k layers is divided into
//! M windows. The first W mod M windows have one layer more than the others. Each window gets its fastest GPU split.

use crate::{
    Assignment, InfeasibleReason, LatencyModel, PlanRules, Proposal, RoundWindow, Strategy, StrategyError,
    valid_rounds,
};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EvenWindows {
    /// The number of rounds (k), a factor of the number of layers (L).
    pub rounds: u32,
}

impl Strategy for EvenWindows {
    fn name(&self) -> &'static str {
        "even"
    }

    fn rules(&self) -> PlanRules {
        PlanRules::default()
    }

    fn options(&self) -> Vec<String> {
        vec![format!("rounds={}", self.rounds)]
    }

    fn propose(&self, model: &LatencyModel) -> Result<Proposal, StrategyError> {
        let (model_layers, rounds) = (model.model_layers(), self.rounds);
        // k = L gives rounds of one layer. Searches skip it, but a single device may use it.
        if rounds == 0 || !model_layers.is_multiple_of(rounds) {
            let valid = valid_rounds(model_layers);
            return Err(StrategyError::InvalidRounds { rounds, model_layers, valid });
        }
        let devices = model.device_count();
        let layers_per_round = model_layers / rounds;
        if (layers_per_round as usize) < devices {
            let reason = InfeasibleReason::MoreDevicesThanLayers { layers_per_round, devices };
            return Err(StrategyError::no_plan(rounds, layers_per_round, reason));
        }
        let (each, larger) = (layers_per_round as usize / devices, layers_per_round as usize % devices);
        let window_layers: Vec<u32> =
            (0..devices).map(|device| (each + usize::from(device < larger)) as u32).collect();
        // If no split is allowed, the maximum of GPU layers lets the check of the plan name the violated constraint.
        let split = |(device, &layers): (usize, &u32)| {
            let window = RoundWindow::at_start(device, device == 0, layers_per_round, layers);
            model.best_split(window).map_or_else(|| model.max_gpu_layers(window), |split| split.gpu_layers)
        };
        let gpu_layers = window_layers.iter().enumerate().map(split).collect();
        Ok(Proposal::new(Assignment::new(0, rounds, window_layers, gpu_layers)))
    }
}
