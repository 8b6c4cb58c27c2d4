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
    check_and_explain(strategy, model, strategy.propose(model)?, strategy.is_optimal())
}

/// Does what [`solve`] does, but tests memory with the actual layers of each device. The prima.cpp paper's model counts
/// equal layers, although the last layers of many models are larger than the mean.
///
/// If a device has memory for its layers only by the paper's model, the strategy runs again with memory for one layer
/// fewer on this device, until there is no such device. If it finds no such plan, or a slower one, the first plan is
/// the result.
pub fn solve_within_memory(strategy: &dyn Strategy, model: &LatencyModel) -> Result<Solution, StrategyError> {
    let first = strategy.propose(model)?;
    let within = propose_within_memory(strategy, model, &first);
    let is_optimal = strategy.is_optimal() && within.is_none();
    check_and_explain(strategy, model, within.unwrap_or(first), is_optimal)
}

/// Checks, evaluates and explains a proposal of a strategy.
fn check_and_explain(
    strategy: &dyn Strategy,
    model: &LatencyModel,
    proposal: Proposal,
    is_optimal: bool,
) -> Result<Solution, StrategyError> {
    let Proposal { assignment, mut residencies, mut search_steps, incomplete_search, avoided_risk } =
        proposal;
    let assignment = with_relays(model, assignment);
    let (rules, objective) = (strategy.rules(), strategy.objective());
    if residencies.is_empty() {
        residencies = first_allowed_residencies(model);
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
    let is_optimal = is_optimal && !is_limited && avoided_risk.is_none();
    let explained = PlanToExplain {
        model,
        assignment: &assignment,
        breakdown: &breakdown,
        rules,
        objective,
        is_optimal,
        is_limited,
        avoided_risk,
    };
    let explanation = Explanation { incomplete_search, ..Explanation::new(&explained, search_steps) };
    let (strategy, strategy_options) = (strategy.name(), strategy.options());
    Ok(Solution { strategy, strategy_options, assignment, residencies, breakdown, explanation })
}

/// The maximum number of times that a strategy is run again with less memory. source: assumed
const MAX_RETRIES: usize = 32;

/// Returns a proposal without [`devices_with_hidden_rereads`] that is faster in the steady state; `None` if the first
/// proposal has no such devices, or if the strategy finds no such proposal.
fn propose_within_memory(
    strategy: &dyn Strategy,
    model: &LatencyModel,
    first: &Proposal,
) -> Option<Proposal> {
    if strategy.objective() != Objective::Paper {
        return None;
    }
    let (mut reduced, mut found) = (model.clone(), None);
    for _ in 0..MAX_RETRIES {
        let assignment = &found.as_ref().unwrap_or(first).assignment;
        let overloaded = devices_with_hidden_rereads(model, assignment);
        if overloaded.is_empty() {
            let residencies = first_allowed_residencies(model);
            let seconds =
                |proposal: &Proposal| model.steady_state_seconds(&proposal.assignment, &residencies);
            return found.filter(|found| seconds(found) < seconds(first));
        }
        for (device, layers) in overloaded {
            reduced.limit_layers_in_main_memory(device, device == assignment.head, layers - 1);
        }
        let next = strategy.propose(&reduced).ok().filter(|next| next.assignment != *assignment)?;
        found = Some(next);
    }
    None
}

/// Returns the devices that fit in memory by the prima.cpp paper's model, with the number of layers that they keep in
/// main memory, but must read weights again in the steady state.
fn devices_with_hidden_rereads(model: &LatencyModel, assignment: &Assignment) -> Vec<(usize, u32)> {
    if !shape_violations(model, assignment).is_empty() {
        return Vec::new();
    }
    let residencies = first_allowed_residencies(model);
    let shares = assignment.layer_counts(model.model_layers());
    let timings = model.device_timings(assignment, &residencies);
    let rereads = timings.zip(shares).enumerate().filter_map(|(device, (timing, share))| {
        let paper = model.device_latency_terms(device, device == assignment.head, share);
        // A device that must read a slow disk has no timing.
        let exceeds = timing.map_or(true, |timing| timing.terms.exceeds_memory);
        let layers = model.layers_in_main_memory(device, share);
        (exceeds && !paper.exceeds_memory && layers > 0).then_some((device, layers))
    });
    rereads.collect()
}

fn first_allowed_residencies(model: &LatencyModel) -> Vec<ResidencyOptions> {
    model.instance().devices.iter().map(|device| device.runtime.allowed_residencies[0]).collect()
}
