//! Makes a new plan during a run, after a ring has lost a device.
//!
//! The planner of the first plan makes a plan for the remaining devices with the same options, with three exceptions.
//! The head does not change, because it has the tokens. The default strategy replaces `refine`, because the ring
//! waits for the plan, and `manual`, because its windows fit only the first ring.

use std::borrow::Borrow;
use std::fmt::Debug;

use hearth_core::Cluster;
use hearth_core::recovery::{NoPlan, Replanner};
use hearth_schema::Plan;
use hearth_schema::scenario::PlannerOptions;

use crate::LoadedScenario;
use crate::planning::{self, Budget};

/// The planner of a scenario during a run.
#[derive(Debug)]
pub struct MidRunPlanner<L> {
    loaded: L,
    options: PlannerOptions,
}

impl<L: Borrow<LoadedScenario>> MidRunPlanner<L> {
    pub fn new(loaded: L) -> Self {
        let mut options = loaded.borrow().scenario.planner.clone();
        options.best_head = false;
        if matches!(planning::strategy_name(&options), planning::REFINE | "manual") {
            (options.strategy, options.rounds) = (None, None);
            (options.windows, options.gpu_layers) = (None, None);
        }
        Self { loaded, options }
    }
}

impl<L: Borrow<LoadedScenario> + Debug> Replanner for MidRunPlanner<L> {
    fn replan(&self, remaining: &Cluster) -> Result<Plan, NoPlan> {
        planning::make(self.loaded.borrow(), remaining, &self.options, Budget::NONE)
            .map_err(|error| NoPlan { reason: error.what() })
    }
}
