//! The strategy `even`: windows of the same size on every device.
//!
//! The control of the experiments. A ring of W = L/k layers, for a given k, is cut into M windows that differ by at
//! most one layer, the first W mod M of them larger; each window gets its best GPU split.
//!
//! Not here: dropping devices, and rounds that leave a remainder.

use crate::latency::LatencyModel;
use crate::latency::constraints::Rules;
use crate::latency::gpu_split::RoundCounts;
use crate::problem::assignment::{Assignment, valid_rounds};
use crate::strategy::{Infeasible, Proposal, SearchStep, Strategy, StrategyError};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Even {
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
        // k = L is a ring of one layer: useless for a search, allowed when asked for by a lone device.
        if rounds == 0 || !model_layers.is_multiple_of(rounds) {
            let valid = valid_rounds(model_layers);
            return Err(StrategyError::Rounds { rounds, model_layers, valid });
        }
        let devices = model.device_count();
        let ring_layers = model_layers / rounds;
        if (ring_layers as usize) < devices {
            let outcome = Err(Infeasible::MoreDevicesThanLayers { ring_layers, devices });
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
            // Nothing is allowed: the fullest GPU comes closest, and the check names what is broken.
            None => model.max_gpu_layers(device, device == 0, window, round_counts),
        };
        let gpu_layers = window_layers.iter().enumerate().map(split).collect();
        Ok(Proposal::of(Assignment::new(0, rounds, window_layers, gpu_layers)))
    }
}
