//! Makes the plan of a scenario with the strategy in its options.
//!
//! Not here: the strategies (`hearth_halda`), except `refine`, which needs the simulator (`refinement`).

mod refinement;
mod strategy;

use std::path::Path;

use hearth_core::Cluster;
use hearth_halda::registry::{LookupError, StrategyOptions};
use hearth_halda::systems::{self, SystemOptions};
use hearth_halda::{Instance, LatencyModel, solve, strategy_by_name, total_memory};
use hearth_schema::Plan;
use hearth_schema::scenario::PlannerOptions;

pub use self::refinement::Budget;
pub use self::strategy::{DEFAULT_STRATEGY, REFINE, strategy_name};
use self::strategy::{no_plan, unknown};
use crate::documents::read_plan;
use crate::{Error, LoadedScenario};

/// Reads the plan in a file, or makes one with the options of the scenario.
pub fn read_or_make(
    path: Option<&Path>,
    loaded: &LoadedScenario,
    cluster: &Cluster,
    budget: Budget,
) -> Result<Plan, Error> {
    match path {
        Some(path) => read_plan(path),
        None => make(loaded, cluster, &loaded.scenario.planner, budget),
    }
}

/// Makes a plan. Only `refine`, the strategy that searches with the simulator, uses the budget.
pub fn make(
    loaded: &LoadedScenario,
    cluster: &Cluster,
    options: &PlannerOptions,
    budget: Budget,
) -> Result<Plan, Error> {
    if options.best_head && cluster.draft.is_some() {
        return Err(Error::invalid(
            "the scenario has a draft model, which runs on the head, so that the planner cannot choose the head",
        )
        .hint("remove `--best-head`, and write `head: true` at a device in the scenario"));
    }
    let name = strategy_name(options);
    if name == REFINE {
        return refinement::plan(loaded, cluster, options, budget);
    }
    if systems::SYSTEM_NAMES.contains(&name) {
        let system = SystemOptions { weights_as: options.weights_as, air_time: options.air_time };
        return systems::plan(name, cluster, &loaded.origin, system).map_err(|error| match error.hint() {
            Some(hint) => Error::invalid(error).hint(hint),
            None => Error::invalid(error),
        });
    }
    let instance = Instance::from_cluster(cluster, options.slow_disk);
    let model = LatencyModel::new(&instance).map_err(Error::invalid)?;
    let chosen = StrategyOptions {
        // The head of the cluster is the first device of an instance.
        head: Some(0),
        total_memory: Some(total_memory(cluster)),
        ..StrategyOptions::from(options)
    };
    let chosen = strategy_by_name(name, &chosen).map_err(|error| match error {
        // The message must also list `refine`, which halda does not know.
        LookupError::UnknownStrategy { name } => unknown(&name),
        error @ LookupError::MissingOption { .. } => Error::invalid(error),
    })?;
    let solution = solve(chosen.as_ref(), &model).map_err(no_plan)?;
    hearth_halda::plan_from_solution(&solution, cluster, &loaded.origin).map_err(Error::failed)
}
