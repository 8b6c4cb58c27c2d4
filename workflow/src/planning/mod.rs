//! Makes the plan of a scenario with the strategy that its planner options name.
//!
//! A model that one device runs alone needs no scenario ([`single_device_plan`]).
//!
//! Not here: the strategies (`hearth_halda`), except `refine`, which needs the simulator (`refinement`).

mod refinement;
mod single_device;

use std::borrow::Borrow;
use std::fmt::Debug;
use std::path::Path;

use hearth_core::Cluster;
use hearth_core::recovery::{ReplanError, Replanner};
use hearth_halda::registry::{STRATEGY_NAMES, StrategyLookupError, StrategyOptions};
use hearth_halda::systems::{self, SystemPlanOptions};
use hearth_halda::{
    Instance, LatencyModel, ManualPlan, StrategyError, exo_memory_by_device, solve, solve_within_memory,
    strategy_by_name,
};
use hearth_profiles::Seconds;
use hearth_profiles::device::soc::SocStrategy;
use hearth_schema::Plan;
use hearth_schema::scenario::PlannerOptions;

pub use self::refinement::SearchBudget;
pub use self::single_device::{DEFAULT_CONTEXT_LENGTH, DEVICE_NAME, SingleDeviceOptions, single_device_plan};
use crate::documents::read_plan;
use crate::{Error, LoadedScenario};

/// The name of the strategy that is used if the planner options name none.
pub const DEFAULT_STRATEGY: &str = "overlap";

/// The name of the strategy that improves a plan by simulating similar plans.
pub const REFINE_STRATEGY: &str = "refine";

/// Returns the name of the strategy in the options. Options without a name mean `manual` if they have windows,
/// otherwise [`DEFAULT_STRATEGY`].
pub fn strategy_name(options: &PlannerOptions) -> &str {
    let unnamed = if options.windows.is_some() { "manual" } else { DEFAULT_STRATEGY };
    options.strategy.as_deref().unwrap_or(unnamed)
}

/// Reads the plan in the file `path`, or makes a plan with the planner options of the scenario.
pub fn read_or_make_plan(
    path: Option<&Path>,
    loaded: &LoadedScenario,
    cluster: &Cluster,
    budget: SearchBudget,
) -> Result<Plan, Error> {
    match path {
        Some(path) => read_plan(path),
        None => make_plan(loaded, cluster, &loaded.scenario.planner, budget),
    }
}

/// Makes a plan with these options. Only the strategy `refine`, which searches with the simulator, uses the budget.
pub fn make_plan(
    loaded: &LoadedScenario,
    cluster: &Cluster,
    options: &PlannerOptions,
    budget: SearchBudget,
) -> Result<Plan, Error> {
    if options.choose_best_head && cluster.draft_model.is_some() {
        let what =
            "the scenario has a draft model, which runs on the head, so the planner cannot choose the head";
        let hint = "remove `--best-head`, and write `head: true` at a device in the scenario";
        return Err(Error::invalid(what).with_hint(hint));
    }
    let name = strategy_name(options);
    if name == REFINE_STRATEGY {
        return refinement::make_refined_plan(loaded, cluster, options, budget);
    }
    if systems::SYSTEM_NAMES.contains(&name) {
        let PlannerOptions { weight_format, all_reduce_time, .. } = *options;
        let system = SystemPlanOptions { weight_format, all_reduce_time };
        return systems::plan(name, cluster, &loaded.record, system).map_err(|error| match error.hint() {
            Some(hint) => Error::invalid(error).with_hint(hint),
            None => Error::invalid(error),
        });
    }
    let instance = Instance::from_cluster(cluster, options.slow_disk_threshold);
    let model = LatencyModel::new(&instance).map_err(Error::invalid)?;
    let chosen = StrategyOptions {
        // The head of the cluster is the first device of an instance.
        head: Some(0),
        total_bytes_by_device: Some(exo_memory_by_device(cluster)),
        ..StrategyOptions::from(options)
    };
    let chosen = strategy_by_name(name, &chosen).map_err(|error| match error {
        // The message must also list `refine`, which halda does not know.
        StrategyLookupError::UnknownStrategy { name } => unknown_strategy(&name),
        error @ StrategyLookupError::MissingOption { .. } => Error::invalid(error),
    })?;
    let solution = solve_within_memory(chosen.as_ref(), &model).map_err(no_plan)?;
    hearth_halda::plan_from_solution(&solution, cluster, &loaded.record).map_err(Error::failed)
}

fn unknown_strategy(name: &str) -> Error {
    let error = Error::invalid(format!("there is no strategy `{name}`"));
    if SocStrategy::ALL_EXCEPT_BEST.iter().any(|strategy| strategy.name() == name) {
        return error.with_hint(format!(
            "`{name}` is a strategy for the GPU and NPU of a phone: write `soc: {{strategy: {name}}}` at the device in the \
             scenario"
        ));
    }
    let (own, others) = (STRATEGY_NAMES.join(", "), systems::SYSTEM_NAMES.join(", "));
    error.with_hint(format!("use one of {own}, {REFINE_STRATEGY}, {others}"))
}

fn no_plan(error: StrategyError) -> Error {
    let hint = error.hint();
    Error::invalid(error).with_hint(hint)
}

/// Makes a new plan during a run, after a ring has lost a device or its devices have become slower.
///
/// The new plan is for the available devices, with the planner options of the scenario except in three cases. The head
/// device does not change, because it has the tokens. The default strategy replaces `refine`, because the ring waits
/// for the plan, and `manual`, because its windows fit only the first ring.
#[derive(Debug)]
pub struct ScenarioReplanner<L> {
    loaded: L,
    options: PlannerOptions,
}

impl<L: Borrow<LoadedScenario>> ScenarioReplanner<L> {
    pub fn new(loaded: L) -> Self {
        let mut options = loaded.borrow().scenario.planner.clone();
        options.choose_best_head = false;
        if matches!(strategy_name(&options), REFINE_STRATEGY | "manual") {
            (options.strategy, options.rounds) = (None, None);
            (options.windows, options.gpu_layers) = (None, None);
        }
        Self { loaded, options }
    }
}

impl<L: Borrow<LoadedScenario> + Debug + Send + Sync> Replanner for ScenarioReplanner<L> {
    fn replan(&self, remaining: &Cluster) -> Result<Plan, ReplanError> {
        make_plan(self.loaded.borrow(), remaining, &self.options, SearchBudget::NONE)
            .map_err(|error| ReplanError { reason: error.one_line_message() })
    }

    fn predict(&self, plan: &Plan, cluster: &Cluster) -> Option<Seconds> {
        let ring = plan.devices.iter().map(|device| cluster.member(&device.name).cloned());
        let members = ring.collect::<Option<Vec<_>>>()?;
        let ring = Cluster { members, head: 0, ..cluster.clone() };
        let instance = Instance::from_cluster(&ring, self.options.slow_disk_threshold);
        let model = LatencyModel::new(&instance).ok()?;
        let solution = solve(&ManualPlan::of_plan(plan, &instance)?, &model).ok()?;
        Some(Seconds(solution.seconds_per_token()))
    }
}
