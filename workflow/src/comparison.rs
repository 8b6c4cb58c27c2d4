//! Compares the plans of all strategies for one scenario by simulating each for a few tokens.
//!
//! Two strategies are omitted: `exhaustive`, which takes too long for all but tiny problems, and `manual` without
//! windows.

use hearth_core::Cluster;
use hearth_halda::registry::STRATEGY_NAMES;
use hearth_schema::Plan;
use hearth_schema::scenario::PlannerOptions;

use crate::planning::{self, REFINE};
use crate::score::{PlanScore, score};
use crate::{Budget, LoadedScenario};

/// The plan of one strategy and its score.
#[derive(Debug)]
pub struct StrategyResult {
    pub strategy: &'static str,
    pub plan: Option<Plan>,
    pub score: Option<PlanScore>,
    /// Whether no other plan is faster in the simulation.
    pub is_best: bool,
    /// Reason why there is no plan or no score.
    pub refusal_reason: Option<String>,
}

/// Plans with every strategy and simulates each plan.
pub fn compare(loaded: &LoadedScenario, cluster: &Cluster, budget: Budget) -> Vec<StrategyResult> {
    let options = &loaded.scenario.planner;
    let mut results = Vec::new();
    for strategy in STRATEGY_NAMES.into_iter().chain([REFINE]) {
        if strategy == "exhaustive" || strategy == "manual" && options.windows.is_none() {
            continue;
        }
        budget.progress.report(&format!("planning with `{strategy}`"), 0, 0);
        results.push(result(strategy, loaded, cluster, budget));
    }
    mark_best(&mut results);
    results
}

fn result(
    strategy: &'static str,
    loaded: &LoadedScenario,
    cluster: &Cluster,
    budget: Budget,
) -> StrategyResult {
    let options = PlannerOptions { strategy: Some(strategy.into()), ..loaded.scenario.planner.clone() };
    let mut result =
        StrategyResult { strategy, plan: None, score: None, is_best: false, refusal_reason: None };
    match planning::make(loaded, cluster, &options, budget) {
        Ok(plan) => {
            match score(&plan, cluster, &loaded.scenario) {
                Ok(score) => result.score = Some(score),
                Err(error) => result.refusal_reason = Some(error.what()),
            }
            result.plan = Some(plan);
        }
        Err(error) => result.refusal_reason = Some(error.what()),
    }
    result
}

/// Sets `best` of the fastest results.
fn mark_best(results: &mut [StrategyResult]) {
    let time = |result: &StrategyResult| result.score.and_then(|score| score.tpot_ms);
    let best = results.iter().filter_map(time).min_by(f64::total_cmp);
    for result in results {
        result.is_best = best.is_some() && time(result) == best;
    }
}
