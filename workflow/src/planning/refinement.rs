//! The strategy `refine`: improves a plan by simulating its neighbours.
//!
//! The local search of `hearth_halda::refine` and the simulator know nothing of each other. The search starts from the
//! default strategy's plan, or from windows by hand, and simulates each plan that it reaches ([`crate::score`]) until
//! its budget is used up or the caller cancels it; the best plan so far is the result.

#![allow(clippy::disallowed_methods)] // the search is bounded by a time that the user gives

use std::time::{Duration, Instant};

use hearth_core::Cluster;
use hearth_halda::DraftError;
use hearth_halda::registry::StrategyOptions;
use hearth_halda::solvers::refine::{self as search, RefineResult, StopReason};
use hearth_halda::{
    Assignment, Instance, LatencyModel, Refine, RefineOptions, Rules, refine, solve, strategy_by_name,
};
use hearth_profiles::Seconds;
use hearth_schema::Plan;
use hearth_schema::scenario::PlannerOptions;

use super::strategy::{DEFAULT_STRATEGY, refused};
use crate::score::score;
use crate::{Error, LoadedScenario, Progress, Silent};

/// How long a search may take, and who hears of its progress.
#[derive(Clone, Copy)]
pub struct Budget<'p> {
    pub seconds: u64,
    /// The most plans that are simulated, the first included.
    pub evaluations: Option<u64>,
    pub progress: &'p dyn Progress,
}

impl Budget<'static> {
    /// The budget of strategies that do not search.
    pub const NONE: Budget<'static> = Budget { seconds: 0, evaluations: None, progress: &Silent };
}

pub fn plan(
    loaded: &LoadedScenario,
    cluster: &Cluster,
    options: &PlannerOptions,
    budget: Budget,
) -> Result<Plan, Error> {
    let first = if options.windows.is_some() { "manual" } else { DEFAULT_STRATEGY };
    let instance = Instance::from_cluster(cluster, options.slow_disk);
    let model = LatencyModel::new(&instance).map_err(Error::invalid)?;
    // An instance begins with the cluster's head.
    let chosen = StrategyOptions { head: Some(0), ..StrategyOptions::from(options) };
    let strategy = strategy_by_name(first, &chosen).map_err(Error::invalid)?;
    let start = solve(strategy.as_ref(), &model).map_err(refused)?;
    let rules = Rules { may_drop: !options.keep_all, may_leave_remainder: true };
    let search =
        RefineOptions { rules, same_rounds: options.rounds.is_some(), max_evaluations: budget.evaluations };
    let found = search_with(loaded, cluster, &model, &start.assignment, search, budget)?;
    let strategy = Refine { assignment: found.assignment.clone(), start: first.to_owned(), rules };
    let solution = solve(&strategy, &model).map_err(refused)?;
    let mut plan = hearth_halda::plan(&solution, cluster, &loaded.origin).map_err(Error::failed)?;
    plan.explanation.insert(0, sentence(&found, first));
    Ok(plan)
}

fn search_with(
    loaded: &LoadedScenario,
    cluster: &Cluster,
    model: &LatencyModel,
    start: &Assignment,
    search: RefineOptions,
    budget: Budget,
) -> Result<RefineResult, Error> {
    let begin = Instant::now();
    let Budget { seconds, progress, .. } = budget;
    progress.report("simulating the first plan", 0, seconds);
    let mut first_error = None;
    let tpot = |assignment: &Assignment| {
        let draft = hearth_halda::draft(model, assignment, cluster, &loaded.origin).map_err(not_written);
        match draft.and_then(|plan| score(&plan, cluster, &loaded.scenario)) {
            Ok(score) => score.tpot_ms,
            Err(error) => {
                first_error.get_or_insert(error);
                None
            }
        }
    };
    let go_on = |search::Progress { evaluations, best }: search::Progress| {
        let best = best.map_or("none runs yet".to_owned(), |ms| format!("best {}", milliseconds(ms)));
        progress.report(
            &format!("{evaluations} plans simulated, {best}"),
            begin.elapsed().as_secs(),
            seconds,
        );
        // The first plan is simulated in any case: its time is part of the result.
        evaluations == 0 || (begin.elapsed() < Duration::from_secs(seconds) && !progress.is_cancelled())
    };
    let found = refine(model, start, search, tpot, go_on);
    match first_error.filter(|_| found.to.is_none()) {
        // Not one plan could be simulated, so the input is wrong.
        Some(error) => Err(error),
        None => Ok(found),
    }
}

fn not_written(error: DraftError) -> Error {
    Error::failed(error)
}

/// The result of the search in words.
fn sentence(found: &RefineResult, first: &str) -> String {
    let time = |ms: Option<f64>| ms.map_or("out of memory".to_owned(), milliseconds);
    let (from, to, evaluations) = (time(found.from), time(found.to), found.evaluations);
    let plans = if evaluations == 1 { "evaluation" } else { "evaluations" };
    let ended = match found.ended {
        StopReason::NoBetterNeighbour => "no neighbour is better",
        StopReason::Evaluations => "the evaluations were used up",
        StopReason::Stopped => "stopped before every neighbour was tried",
    };
    format!(
        "The simulator: from {from} a token (the plan of `{first}`) to {to} in {evaluations} {plans}; {ended}."
    )
}

fn milliseconds(ms: f64) -> String {
    Seconds(ms / 1e3).to_string()
}
