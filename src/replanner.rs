//! Who plans again when a simulated ring loses a device?
//!
//! The planner that made the first plan, with the options of `hearth plan`, for the devices that are left. Some options
//! cannot be kept: the head stays where the tokens are, and `refine` gives way to the default planner, because a ring that
//! stands still cannot wait for a search. So do windows by hand, which fit one ring only.
//!
//! Not here: when a ring plans again, which is the runner's business.

use hearth_core::Cluster;
use hearth_core::replan::NoPlan;
use hearth_core::replan::Replanner;
use hearth_schema::Plan;
use hearth_schema::scenario::PlannerOptions;

use crate::cli::Planning;
use crate::commands::plan;
use crate::documents::LoadedScenario;
use crate::refinement::{self, Effort};

/// The planner of a scenario, for the middle of a run.
#[derive(Debug)]
pub struct MidRun<'a> {
    loaded: &'a LoadedScenario,
    options: PlannerOptions,
    effort: Effort,
}

impl<'a> MidRun<'a> {
    /// As the command line and the scenario say.
    pub fn new(loaded: &'a LoadedScenario, planning: &Planning) -> Self {
        Self::with(loaded, plan::merged(&loaded.scenario.planner, planning), Effort::of(planning))
    }

    /// With these options.
    pub fn with(loaded: &'a LoadedScenario, mut options: PlannerOptions, effort: Effort) -> Self {
        options.best_head = false;
        if matches!(plan::strategy(&options), refinement::NAME | "manual") {
            (options.strategy, options.rounds) = (None, None);
            (options.windows, options.gpu_layers) = (None, None);
        }
        Self { loaded, options, effort }
    }
}

impl Replanner for MidRun<'_> {
    fn replan(&self, there: &Cluster) -> Result<Plan, NoPlan> {
        plan::make(self.loaded, there, &self.options, self.effort)
            .map_err(|failure| NoPlan { reason: failure.reason() })
    }
}
