//! Plans again during a run, when a ring has lost a device.
//!
//! The planner of the first plan plans for the devices that are left, with the same options. Some options cannot be
//! kept: the head stays where the tokens are; `refine` becomes the default strategy, because a ring that stands still
//! cannot wait for a search; and windows by hand fit one ring only.

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
        if matches!(planning::strategy(&options), planning::REFINE | "manual") {
            (options.strategy, options.rounds) = (None, None);
            (options.windows, options.gpu_layers) = (None, None);
        }
        Self { loaded, options }
    }
}

impl<L: Borrow<LoadedScenario> + Debug> Replanner for MidRunPlanner<L> {
    fn replan(&self, there: &Cluster) -> Result<Plan, NoPlan> {
        planning::make(self.loaded.borrow(), there, &self.options, Budget::NONE)
            .map_err(|error| NoPlan { reason: error.what() })
    }
}
