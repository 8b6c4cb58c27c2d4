//! Compares the plans of all strategies for one scenario by simulating each for a few tokens.
//!
//! Two strategies are omitted: `exhaustive`, which takes too long for most problems, and `manual` without windows.

use hearth_core::Cluster;
use hearth_halda::registry::STRATEGY_NAMES;
use hearth_schema::Plan;
use hearth_schema::scenario::PlannerOptions;

use crate::planning::{self, REFINE_STRATEGY};
use crate::score::{PlanScore, score_plan};
use crate::{Error, LoadedScenario, SearchBudget};

/// The plan of one strategy, and the score of the plan in a short simulation.
#[derive(Debug)]
pub struct StrategyResult {
    pub strategy: &'static str,
    pub plan: Option<Plan>,
    pub score: Option<PlanScore>,
    /// Whether no plan of another strategy is faster in the simulation.
    pub is_best: bool,
    /// Reason why the strategy has no plan or the plan has no score; `None` if there is a score.
    pub failure_reason: Option<String>,
}

/// Makes a plan of the scenario with each strategy, and scores each plan in a short simulation.
pub fn compare_strategies(
    loaded: &LoadedScenario,
    cluster: &Cluster,
    budget: SearchBudget,
) -> Vec<StrategyResult> {
    let has_windows = loaded.scenario.planner.windows.is_some();
    let strategies = STRATEGY_NAMES.into_iter().chain([REFINE_STRATEGY]);
    let compared = |name: &&str| *name != "exhaustive" && (*name != "manual" || has_windows);
    let result = |strategy: &'static str| {
        budget.progress.report(&format!("planning with `{strategy}`"), 0, 0);
        let options = PlannerOptions { strategy: Some(strategy.into()), ..loaded.scenario.planner.clone() };
        let plan = planning::make_plan(loaded, cluster, &options, budget);
        let scored =
            plan.as_ref().map_err(Error::clone).and_then(|plan| score_plan(plan, cluster, &loaded.scenario));
        let failure_reason = scored.as_ref().err().map(Error::one_line_message);
        StrategyResult { strategy, plan: plan.ok(), score: scored.ok(), is_best: false, failure_reason }
    };
    let mut results: Vec<StrategyResult> = strategies.filter(compared).map(result).collect();
    let time = |result: &StrategyResult| result.score.and_then(|score| score.tpot_ms);
    let best = results.iter().filter_map(time).min_by(f64::total_cmp);
    for result in &mut results {
        result.is_best = best.is_some() && time(result) == best;
    }
    results
}
