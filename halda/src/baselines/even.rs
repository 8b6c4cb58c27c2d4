//! The strategy `even`: windows of the same size on every device.
//!
//! It is the control in experiments. For a given k, a round of W = L/k layers is divided into M windows. The
//! first W mod M windows have one layer more than the others. Each window gets its best GPU split.
//!
//! Not here: dropped devices and partial last rounds.

use crate::latency::LatencyModel;
use crate::latency::constraints::Rules;
use crate::latency::gpu_split::RoundCounts;
use crate::problem::assignment::{Assignment, valid_rounds};
use crate::strategy::{InfeasibleReason, Proposal, SearchStep, Strategy, StrategyError};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Even {
    /// The number of rounds: k, a factor of L.
    pub rounds: u32,
}

impl Strategy for Even {
    fn name(&self) -> &'static str {
        "even"
    }

    fn rules(&self) -> Rules {
        Rules::default()
    }

    fn options(&self) -> Vec<String> {
        vec![format!("rounds={}", self.rounds)]
    }

    fn propose(&self, model: &LatencyModel) -> Result<Proposal, StrategyError> {
        let model_layers = model.model_layers();
        let rounds = self.rounds;
        // k = L gives rounds of one layer. Searches skip it, but a single device may use it.
        if rounds == 0 || !model_layers.is_multiple_of(rounds) {
            let valid = valid_rounds(model_layers);
            return Err(StrategyError::Rounds { rounds, model_layers, valid });
        }
        let devices = model.device_count();
        let ring_layers = model_layers / rounds;
        if (ring_layers as usize) < devices {
            let outcome = Err(InfeasibleReason::MoreDevicesThanLayers { ring_layers, devices });
            return Err(StrategyError::Infeasible(vec![SearchStep {
                head: 0,
                rounds,
                ring_layers,
                outcome,
            }]));
        }
        let (each, larger) = (ring_layers as usize / devices, ring_layers as usize % devices);
        let window_layers: Vec<u32> =
            (0..devices).map(|device| (each + usize::from(device < larger)) as u32).collect();
        let round_counts = RoundCounts::whole(rounds);
        let split = |(device, &window): (usize, &u32)| match model.best_split(
            device,
            device == 0,
            window,
            round_counts,
        ) {
            Some(split) => split.gpu_layers,
            // No split is allowed. With the maximum of GPU layers, the check of the plan names the violated
            // constraint.
            None => model.max_gpu_layers(device, device == 0, window, round_counts),
        };
        let gpu_layers = window_layers.iter().enumerate().map(split).collect();
        Ok(Proposal::new(Assignment::new(0, rounds, window_layers, gpu_layers)))
    }
}
