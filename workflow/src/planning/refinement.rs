//! The strategy `refine`: improves a plan by simulating similar plans (its neighbours).
//!
//! This module connects the local search of `hearth_halda::refine` with the simulator; neither depends on the other.
//! The search starts from the plan of the default strategy, or from the windows in the planner options, and simulates
//! each plan that it considers ([`crate::score`]) until the budget is used up or the caller cancels the search. The
//! result is the best plan found.

#![allow(clippy::disallowed_methods)] // the search is bounded by a time that the user gives

use std::time::{Duration, Instant};

use hearth_core::Cluster;
use hearth_halda::registry::StrategyOptions;
use hearth_halda::solvers::local_search::{self as search, RefineResult, StopReason};
use hearth_halda::{
    Assignment, Instance, LatencyModel, PlanRules, RefineOptions, RefinedPlan, refine, solve,
    solve_within_memory, strategy_by_name,
};
use hearth_profiles::Seconds;
use hearth_schema::Plan;
use hearth_schema::scenario::PlannerOptions;

use super::{DEFAULT_STRATEGY, no_plan};
use crate::score::score_plan;
use crate::{Error, LoadedScenario, NoProgress, Progress};

/// The limits of a plan search that uses the simulator, and the receiver of progress reports.
#[derive(Clone, Copy)]
pub struct SearchBudget<'p> {
    /// Maximum duration of the search in seconds.
    pub max_seconds: u64,
    /// Maximum number of simulated plans, including the start plan; `None` for no limit.
    pub max_evaluations: Option<u64>,
    pub progress: &'p dyn Progress,
}

impl SearchBudget<'static> {
    /// The budget for strategies that do not search with the simulator.
    pub const NONE: SearchBudget<'static> =
        SearchBudget { max_seconds: 0, max_evaluations: None, progress: &NoProgress };
}

pub fn make_refined_plan(
    loaded: &LoadedScenario,
    cluster: &Cluster,
    options: &PlannerOptions,
    budget: SearchBudget,
) -> Result<Plan, Error> {
    let first = if options.windows.is_some() { "manual" } else { DEFAULT_STRATEGY };
    let instance = Instance::from_cluster(cluster, options.slow_disk_threshold);
    let model = LatencyModel::new(&instance).map_err(Error::invalid)?;
    // The head of the cluster is the first device of an instance.
    let chosen = StrategyOptions { head: Some(0), ..StrategyOptions::from(options) };
    let strategy = strategy_by_name(first, &chosen).map_err(Error::invalid)?;
    let start = solve_within_memory(strategy.as_ref(), &model).map_err(no_plan)?;
    let rules = PlanRules { may_drop_devices: !options.keep_all_devices, may_have_partial_round: true };
    let (keep_rounds, max_evaluations) = (options.rounds.is_some(), budget.max_evaluations);
    let search = RefineOptions { rules, keep_rounds, max_evaluations };
    let found = search_with(loaded, cluster, &model, &start.assignment, search, budget)?;
    let strategy =
        RefinedPlan { assignment: found.assignment.clone(), start_strategy: first.to_owned(), rules };
    let solution = solve(&strategy, &model).map_err(no_plan)?;
    let mut plan =
        hearth_halda::plan_from_solution(&solution, cluster, &loaded.record).map_err(Error::failed)?;
    plan.explanation.insert(0, sentence(&found, first));
    Ok(plan)
}

fn search_with(
    loaded: &LoadedScenario,
    cluster: &Cluster,
    model: &LatencyModel,
    start: &Assignment,
    search: RefineOptions,
    budget: SearchBudget,
) -> Result<RefineResult, Error> {
    let begin = Instant::now();
    let SearchBudget { max_seconds: seconds, progress, .. } = budget;
    progress.report("simulating the first plan", 0, seconds);
    let mut first_error = None;
    let tpot = |assignment: &Assignment| {
        let draft = hearth_halda::plan_from_assignment(model, assignment, cluster, &loaded.record)
            .map_err(Error::failed);
        match draft.and_then(|plan| score_plan(&plan, cluster, &loaded.scenario)) {
            Ok(score) => score.tpot_ms,
            Err(error) => {
                first_error.get_or_insert(error);
                None
            }
        }
    };
    let may_continue = |search::RefineProgress { evaluations, best_score: best }: search::RefineProgress| {
        let best = best.map_or("no plan fits yet".to_owned(), |ms| format!("best {}", milliseconds(ms)));
        let what = format!("{evaluations} plans simulated, {best}");
        progress.report(&what, begin.elapsed().as_secs(), seconds);
        // The first plan is always simulated, because its time is part of the result.
        evaluations == 0 || (begin.elapsed() < Duration::from_secs(seconds) && !progress.is_cancelled())
    };
    let found = refine(model, start, search, tpot, may_continue);
    match first_error.filter(|_| found.best_score.is_none()) {
        // If no plan could be simulated, the input is wrong.
        Some(error) => Err(error),
        None => Ok(found),
    }
}

fn sentence(found: &RefineResult, first: &str) -> String {
    let time = |ms: Option<f64>| ms.map_or("out of memory".to_owned(), milliseconds);
    let (from, to, evaluations) = (time(found.start_score), time(found.best_score), found.evaluations);
    let plans = if evaluations == 1 { "evaluation" } else { "evaluations" };
    let ended = match found.stop_reason {
        StopReason::NoBetterNeighbour => "no neighbour is better",
        StopReason::EvaluationLimit => "the evaluations were used up",
        StopReason::StoppedByCaller => "stopped before every neighbour was tried",
    };
    format!(
        "Refinement by simulation: the plan of `{first}` takes {from} per token, the best plan found takes {to} \
         ({evaluations} {plans}; {ended})."
    )
}

fn milliseconds(ms: f64) -> String {
    Seconds(ms / 1e3).to_string()
}
