//! Runs a strategy, then checks, evaluates and explains its proposal.

use hearth_schema::residency::ResidencyOptions;

use crate::explanation::PlanToExplain;
use crate::latency::constraints::{ring_violations, shape_violations};
use crate::solvers::relays::with_relays;
use crate::{
    Assignment, Explanation, LatencyBreakdown, LatencyModel, Objective, Proposal, SearchStep, Strategy,
    StrategyError, violations,
};

/// A plan with its time per token and its explanation.
#[derive(Debug, Clone, PartialEq)]
pub struct Solution {
    pub strategy: &'static str,
    pub strategy_options: Vec<String>,
    pub assignment: Assignment,
    pub residencies: Vec<ResidencyOptions>,
    /// The time per token and its terms, computed with the strategy's objective.
    pub breakdown: LatencyBreakdown,
    pub explanation: Explanation,
}

impl Solution {
    pub fn seconds_per_token(&self) -> f64 {
        self.breakdown.seconds_per_token
    }
}

/// Runs a strategy, checks and evaluates its proposal, and explains the plan. Fails if the strategy finds no plan, or
/// the plan violates a constraint.
pub fn solve(strategy: &dyn Strategy, model: &LatencyModel) -> Result<Solution, StrategyError> {
    let Proposal { assignment, mut residencies, mut search_steps, incomplete_search } =
        strategy.propose(model)?;
    let assignment = with_relays(model, assignment);
    let (rules, objective) = (strategy.rules(), strategy.objective());
    if residencies.is_empty() {
        residencies =
            model.instance().devices.iter().map(|device| device.runtime.allowed_residencies[0]).collect();
    }
    let (broken, breakdown) = match objective {
        Objective::Paper => (violations(model, &assignment, rules), model.evaluate(&assignment)),
        Objective::SteadyState => {
            let mut broken = ring_violations(model, &assignment, rules);
            if shape_violations(model, &assignment).is_empty() {
                broken.extend(model.device_timings(&assignment, &residencies).filter_map(Result::err));
            }
            (broken, model.evaluate_steady_state(&assignment, &residencies))
        }
    };
    let breaks = |violations| StrategyError::ConstraintsViolated { strategy: strategy.name(), violations };
    if !broken.is_empty() {
        return Err(breaks(broken));
    }
    let breakdown = breakdown.map_err(|violation| breaks(vec![violation]))?;
    if search_steps.is_empty() {
        let Assignment { head, rounds, .. } = assignment;
        let layers_per_round = assignment.layers_per_round() as u32;
        let outcome = Ok(breakdown.seconds_per_token);
        search_steps.push(SearchStep { head, rounds, layers_per_round, outcome });
    }
    let is_limited = incomplete_search.as_ref().is_some_and(|limit| limit.lower_bound_seconds.is_some());
    let is_optimal = strategy.is_optimal() && !is_limited;
    let explained =
        PlanToExplain { model, assignment: &assignment, breakdown: &breakdown, rules, objective, is_optimal };
    let explanation = Explanation { incomplete_search, ..Explanation::new(&explained, search_steps) };
    let (strategy, strategy_options) = (strategy.name(), strategy.options());
    Ok(Solution { strategy, strategy_options, assignment, residencies, breakdown, explanation })
}
