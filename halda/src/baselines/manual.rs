//! The strategy `manual`: explicit windows, GPU layers, rounds and head.
//!
//! Devices may have no layers, and the last round may be partial. A plan that violates a constraint is an error.

use hearth_schema::residency::ResidencyOptions;

use crate::{Assignment, LatencyModel, Objective, PlanRules, Proposal, Strategy, StrategyError};

/// An explicit plan. Each vector has an entry for each device, in the instance's order.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ManualPlan {
    pub head: usize,
    /// The number of rounds (k), including a partial last one; if `None`, as many as the windows need.
    pub rounds: Option<u32>,
    pub window_layers: Vec<u32>,
    /// The number of GPU layers in each device's window (n); if empty, no device has GPU layers.
    pub gpu_layers: Vec<u32>,
    /// The residency policy of each device; if empty, each device gets the first policy of its runtime model.
    pub residencies: Vec<ResidencyOptions>,
}

impl Strategy for ManualPlan {
    fn name(&self) -> &'static str {
        "manual"
    }

    fn objective(&self) -> Objective {
        // The steady state is closest to a real run of the plan.
        Objective::SteadyState
    }

    fn rules(&self) -> PlanRules {
        PlanRules { may_drop_devices: true, may_have_partial_round: true }
    }

    fn propose(&self, model: &LatencyModel) -> Result<Proposal, StrategyError> {
        let window_layers = self.window_layers.clone();
        let gpu_layers =
            if self.gpu_layers.is_empty() { vec![0; window_layers.len()] } else { self.gpu_layers.clone() };
        let mut assignment = Assignment::new(self.head, 0, window_layers, gpu_layers);
        let layers_per_round = assignment.layers_per_round().max(1);
        let needed = u64::from(model.model_layers()).div_ceil(layers_per_round) as u32;
        assignment.rounds = self.rounds.unwrap_or(needed);
        Ok(Proposal { residencies: self.residencies.clone(), ..Proposal::new(assignment) })
    }
}
