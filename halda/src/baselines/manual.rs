//! The strategy `manual`: explicit windows, GPU layers, rounds and head.
//!
//! Devices may have no layers, and the last round may be partial. A plan that violates a constraint is an error.

use hearth_schema::Plan;
use hearth_schema::residency::ResidencyOptions;

use crate::{Assignment, Instance, LatencyModel, Objective, PlanRules, Proposal, Strategy, StrategyError};

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

impl ManualPlan {
    /// Returns the strategy that makes the given plan again. Returns `None` if the ring has another order or head than
    /// the devices of the instance.
    pub fn of_plan(plan: &Plan, instance: &Instance) -> Option<Self> {
        let planned = |name: &str| plan.devices.iter().find(|device| device.name == name);
        let order = instance.devices.iter().filter(|device| planned(&device.name).is_some());
        if !order.map(|device| &device.name).eq(plan.devices.iter().map(|device| &device.name)) {
            return None;
        }
        let devices = || instance.devices.iter().map(|device| planned(&device.name));
        Some(Self {
            head: 0,
            rounds: Some(plan.rounds),
            window_layers: devices().map(|device| device.map_or(0, |device| device.window)).collect(),
            gpu_layers: devices().map(|device| device.map_or(0, |device| device.gpu_layers)).collect(),
            residencies: devices()
                .map(|device| device.map(|device| device.residency).unwrap_or_default())
                .collect(),
        })
    }
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
