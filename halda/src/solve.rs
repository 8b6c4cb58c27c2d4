//! Runs a strategy, then checks, evaluates and explains its proposal.

use hearth_schema::residency::ResidencyOptions;

use crate::explanation::{Explanation, PlanToExplain};
use crate::latency::constraints::{ring_violations, shape_violations, violations};
use crate::latency::{Breakdown, LatencyModel};
use crate::problem::assignment::Assignment;
use crate::solvers::relays::with_relays;
use crate::strategy::{Objective, Proposal, SearchStep, Strategy, StrategyError};

/// A plan with its time and its explanation.
#[derive(Debug, Clone, PartialEq)]
pub struct Solution {
    pub strategy: &'static str,
    pub options: Vec<String>,
    pub assignment: Assignment,
    pub residencies: Vec<ResidencyOptions>,
    /// The time per token and its terms, by the strategy's objective.
    pub breakdown: Breakdown,
    pub explanation: Explanation,
}

impl Solution {
    /// Returns the seconds per token.
    pub fn seconds(&self) -> f64 {
        self.breakdown.seconds
    }
}

/// Runs a strategy, checks and evaluates its proposal, and explains the plan.
///
/// # Errors
/// If the strategy finds no plan, or its plan violates a constraint.
pub fn solve(strategy: &dyn Strategy, model: &LatencyModel) -> Result<Solution, StrategyError> {
    let Proposal { assignment, mut residencies, mut search_steps, limit } = strategy.propose(model)?;
    let assignment = with_relays(model, assignment);
    let (rules, objective) = (strategy.rules(), strategy.objective());
    if residencies.is_empty() {
        residencies = model.instance().devices.iter().map(|device| device.runtime.residencies[0]).collect();
    }
    let broken = match objective {
        Objective::Paper => violations(model, &assignment, rules),
        Objective::SteadyState => {
            let mut broken = ring_violations(model, &assignment, rules);
            if shape_violations(model, &assignment).is_empty() {
                broken.extend(model.memory_violations(&assignment, &residencies));
            }
            broken
        }
    };
    let breaks = |violations| StrategyError::ConstraintsViolated { strategy: strategy.name(), violations };
    if !broken.is_empty() {
        return Err(breaks(broken));
    }
    let breakdown = match objective {
        Objective::Paper => model.evaluate(&assignment),
        Objective::SteadyState => model.steady_state(&assignment, &residencies),
    }
    .map_err(|violation| breaks(vec![violation]))?;
    if search_steps.is_empty() {
        search_steps.push(SearchStep {
            head: assignment.head,
            rounds: assignment.rounds,
            ring_layers: assignment.ring_layers() as u32,
            outcome: Ok(breakdown.seconds),
        });
    }
    let limit_costs = limit.as_ref().is_some_and(|limit| limit.lower_bound.is_some());
    let is_optimal = strategy.is_optimal() && !limit_costs;
    let optimum = is_optimal.then_some(breakdown.seconds);
    let explained =
        PlanToExplain { assignment: &assignment, breakdown: &breakdown, rules, objective, is_optimal };
    let explanation = Explanation { limit, ..Explanation::new(model, &explained, search_steps, optimum) };
    let (strategy, options) = (strategy.name(), strategy.options());
    Ok(Solution { strategy, options, assignment, residencies, breakdown, explanation })
}
