//! The strategy `halda`: Algorithm 1 of the prima.cpp paper.
//!
//! Section 3.3 of the paper. The search alternates between memory cases and integer programs (`iteration`): one program
//! for each k with fixed cases (`integer_program`), which has the paper's linear costs and bounds (`linear_costs`).
//! Then all devices with one layer except the head are removed, and the problem is solved again, until no such device
//! remains or there is no plan. The fastest of these rings is used.
//!
//! `halda-shipped` uses the objective of the public implementation of prima.cpp ([`CostTerms::PRIMA_CPP`]).
//! Its reported T is that of the latency model, as for every strategy.
//!
//! The paper leaves some steps open; decision 14 lists how they are interpreted here.

mod integer_program;
mod iteration;
mod linear_costs;

pub use linear_costs::CostTerms;

use iteration::{CandidatePlan, Search, SearchRecord, to_assignment};
use linear_costs::LinearCosts;

use crate::solvers::linear_program;
use crate::solvers::search_space::{ring_sizes, search_options};
use crate::{HeadChoice, LatencyModel, OrderChoice, PlanRules, Proposal, Strategy, StrategyError};

/// Algorithm 1 of the prima.cpp paper with its options.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Halda {
    /// Whether devices with one layer per round are removed from the ring.
    pub may_drop_devices: bool,
    pub head: usize,
    /// The number of rounds per token (k); `None` to search every valid number.
    pub rounds: Option<u32>,
    pub terms: CostTerms,
    /// Whether to flip the memory cases of individual devices at the end, as long as this improves the plan. The paper
    /// has no such step.
    pub flip_memory_cases: bool,
    /// Whether to skip integer programs that cannot improve the plan according to a lower bound. The plan is the same.
    pub prune_by_bound: bool,
}

impl Halda {
    /// The algorithm of the prima.cpp paper: device 0 is the head, every device has a layer, and k is free.
    pub const PRIMA_CPP_PAPER: Halda = Halda {
        may_drop_devices: false,
        head: 0,
        rounds: None,
        terms: CostTerms::PRIMA_CPP_PAPER,
        flip_memory_cases: false,
        prune_by_bound: true,
    };

    /// The public implementation of prima.cpp (decision 14): it has different costs and removes devices with one layer.
    pub const PRIMA_CPP: Halda =
        Halda { may_drop_devices: true, terms: CostTerms::PRIMA_CPP, ..Halda::PRIMA_CPP_PAPER };

    /// Returns the devices of a plan that have more than one layer per round, and the head; `None` if these are all
    /// devices, or if no device may be dropped.
    fn without_single_layers(&self, (objective, found): &(LinearCosts, CandidatePlan)) -> Option<Vec<usize>> {
        let windows = objective.devices.iter().zip(&found.windows);
        let stays = windows.filter(|(device, window)| window.layers > 1 || **device == self.head);
        let devices: Vec<usize> = stays.map(|(device, _)| *device).collect();
        (self.may_drop_devices && devices.len() < objective.devices.len()).then_some(devices)
    }
}

impl Default for Halda {
    fn default() -> Self {
        Self::PRIMA_CPP_PAPER
    }
}

impl Strategy for Halda {
    fn name(&self) -> &'static str {
        if self.terms == CostTerms::PRIMA_CPP { "halda-shipped" } else { "halda" }
    }

    fn rules(&self) -> PlanRules {
        PlanRules { may_drop_devices: self.may_drop_devices, may_have_partial_round: false }
    }

    fn options(&self) -> Vec<String> {
        let head = HeadChoice::Fixed(self.head);
        let mut options = search_options(self.rules(), head, OrderChoice::Given, self.rounds);
        options.extend(self.flip_memory_cases.then(|| "flips=true".to_owned()));
        options
    }

    fn propose(&self, model: &LatencyModel) -> Result<Proposal, StrategyError> {
        if !linear_program::IS_SOLVER_AVAILABLE {
            return Err(StrategyError::NoSolver { strategy: self.name() });
        }
        let count = model.device_count();
        HeadChoice::Fixed(self.head).candidates(count)?;
        let layers = model.model_layers();
        let rings = ring_sizes(layers, false, self.rounds)?;
        let rounds: Vec<u32> = rings.iter().map(|layers_per_round| layers / layers_per_round).collect();
        let mut record = SearchRecord::default();
        let mut solve = |devices: Vec<usize>| {
            let objective = LinearCosts::new(model, devices, self.head, self.terms);
            let search =
                Search { objective: &objective, candidate_rounds: &rounds, halda: self, record: &mut record };
            let found = search.run()?;
            Some((objective, found))
        };
        let mut plans: Vec<_> = solve((0..count).collect()).into_iter().collect();
        while let Some(devices) = plans.last().and_then(|plan| self.without_single_layers(plan)) {
            let Some(smaller) = solve(devices) else { break };
            plans.push(smaller);
        }
        // Of equally fast rings, the smallest is used: `min_by` returns the first.
        let seconds = |(_, found): &(LinearCosts, CandidatePlan)| found.objective_seconds;
        let best = plans.iter().rev().min_by(|left, right| seconds(left).total_cmp(&seconds(right)));
        let Some((objective, found)) = best else { return Err(StrategyError::Infeasible(record.steps)) };
        Ok(Proposal { search_steps: record.steps, ..Proposal::new(to_assignment(objective, found)) })
    }
}
