//! Runs a strategy, then checks, evaluates and explains its proposal.

use hearth_schema::residency::ResidencyOptions;

use crate::explanation::PlanToExplain;
use crate::latency::constraints::{ring_violations, shape_violations};
use crate::solvers::relays::with_relays;
use crate::{
    Assignment, Explanation, LatencyBreakdown, LatencyModel, Objective, Proposal, SearchStep, Strategy,
    StrategyError, violations,
};

/// A plan with its time and its explanation.
#[derive(Debug, Clone, PartialEq)]
pub struct Solution {
    pub strategy: &'static str,
    pub strategy_options: Vec<String>,
    pub assignment: Assignment,
    pub residencies: Vec<ResidencyOptions>,
    /// The time per token and its terms, by the strategy's objective.
    pub breakdown: LatencyBreakdown,
    pub explanation: Explanation,
}

impl Solution {
    pub fn seconds_per_token(&self) -> f64 {
        self.breakdown.seconds_per_token
    }
}

/// Runs a strategy, checks and evaluates its proposal, and explains the plan.
///
/// # Errors
/// If the strategy finds no plan, or its plan violates a constraint.
pub fn solve(strategy: &dyn Strategy, model: &LatencyModel) -> Result<Solution, StrategyError> {
    let Proposal { assignment, mut residencies, mut search_steps, incomplete_search: limit } =
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
                broken.extend(model.memory_violations(&assignment, &residencies));
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
        search_steps.push(SearchStep {
            head: assignment.head,
            rounds: assignment.rounds,
            layers_per_round: assignment.layers_per_round() as u32,
            outcome: Ok(breakdown.seconds_per_token),
        });
    }
    let is_limited = limit.as_ref().is_some_and(|limit| limit.lower_bound_seconds.is_some());
    let is_optimal = strategy.is_optimal() && !is_limited;
    let (planned, times) = (&assignment, &breakdown);
    let explained =
        PlanToExplain { model, assignment: planned, breakdown: times, rules, objective, is_optimal };
    let explanation = Explanation { incomplete_search: limit, ..Explanation::new(&explained, search_steps) };
    let (strategy, options) = (strategy.name(), strategy.options());
    Ok(Solution { strategy, strategy_options: options, assignment, residencies, breakdown, explanation })
}
