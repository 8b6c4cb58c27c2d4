//! The strategy `halda`: Algorithm 1 of the prima.cpp paper.
//!
//! Section 3.3 of the paper: memory cases alternate with integer programs (`iteration`), one program for each k with
//! fixed cases (`integer_program`), with the paper's linear costs and bounds (`linear_costs`), from a start in
//! proportion to memory (`start`). Then device selection as in its last paragraph: a device other than the head that
//! has one layer is removed, and the rest is solved again, until no device has one layer. As written, the smaller
//! ring is taken even if it is slower; only if it has no plan does the larger one stay.
//!
//! `halda-shipped` is the same with the objective of the public implementation of prima.cpp as described
//! ([`Terms::SHIPPED`]). Its T is the latency model's, as for every strategy.
//!
//! The paper leaves some steps open; decision 14 lists how they are read here.
//!
//! Not here: the optimum, which Algorithm 1 misses if its cases do ([`crate::solvers::exact`]).

mod integer_program;
mod iteration;
mod linear_costs;
mod start;

pub use linear_costs::Terms;

use iteration::{CandidatePlan, Search, SearchRecord, expanded};
use linear_costs::LinearCosts;

use crate::latency::LatencyModel;
use crate::latency::constraints::Rules;
use crate::solvers::linear_program;
use crate::solvers::search_space::ring_sizes;
use crate::strategy::{Proposal, Strategy, StrategyError};

/// Algorithm 1 of the prima.cpp paper.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Halda {
    pub may_drop: bool,
    pub head: usize,
    /// Restricts the search to this k.
    pub rounds: Option<u32>,
    /// Which terms the objective has.
    pub terms: Terms,
    /// Whether to flip single devices' memory cases afterwards while that improves the plan. Not in the paper.
    pub flip_memory_cases: bool,
    /// Whether to skip programs that a lower bound rules out; the plan is the same.
    pub skip_bounded: bool,
}

impl Halda {
    /// The paper's variant: device 0 is the head, every device keeps a layer, any k.
    pub const PAPER: Halda = Halda {
        may_drop: false,
        head: 0,
        rounds: None,
        terms: Terms::PAPER,
        flip_memory_cases: false,
        skip_bounded: true,
    };

    /// The public implementation as described: other costs, and devices with one layer are removed.
    pub const SHIPPED: Halda = Halda { may_drop: true, terms: Terms::SHIPPED, ..Halda::PAPER };

    /// Solves the problem for a subset of the devices.
    fn solved<'a, 'i>(
        &self,
        model: &'a LatencyModel<'i>,
        devices: Vec<usize>,
        rounds: &[u32],
        record: &mut SearchRecord,
    ) -> Option<(LinearCosts<'a, 'i>, CandidatePlan)> {
        let objective = LinearCosts::new(model, devices, self.head, self.terms);
        let search = Search {
            objective: &objective,
            rounds,
            skip_bounded: self.skip_bounded,
            flip_memory_cases: self.flip_memory_cases,
        };
        let found = search.run(record)?;
        Some((objective, found))
    }

    /// Returns the devices without those that have one layer; `None` if there is none to remove.
    fn without_single_layers(&self, (objective, found): &(LinearCosts, CandidatePlan)) -> Option<Vec<usize>> {
        let windows = objective.devices.iter().zip(&found.windows);
        let stays = windows.filter(|(device, window)| **window > 1 || **device == self.head);
        let devices: Vec<usize> = stays.map(|(device, _)| *device).collect();
        (self.may_drop && devices.len() < objective.devices.len()).then_some(devices)
    }
}

impl Default for Halda {
    fn default() -> Self {
        Self::PAPER
    }
}

impl Strategy for Halda {
    fn name(&self) -> &'static str {
        if self.terms == Terms::SHIPPED { "halda-shipped" } else { "halda" }
    }

    fn rules(&self) -> Rules {
        Rules { may_drop: self.may_drop, may_leave_remainder: false }
    }

    fn options(&self) -> Vec<String> {
        let mut options = self.rules().options();
        options.extend((self.head != 0).then(|| format!("head={}", self.head)));
        options.extend(self.rounds.map(|rounds| format!("rounds={rounds}")));
        options.extend(self.flip_memory_cases.then(|| "flips=true".to_owned()));
        options
    }

    fn propose(&self, model: &LatencyModel) -> Result<Proposal, StrategyError> {
        if !linear_program::AVAILABLE {
            return Err(StrategyError::NoSolver { strategy: self.name() });
        }
        let count = model.device_count();
        if self.head >= count {
            return Err(StrategyError::NoSuchDevice { device: self.head, devices: count });
        }
        let layers = model.model_layers();
        let rings = ring_sizes(layers, false, self.rounds)?;
        let rounds: Vec<u32> = rings.iter().map(|ring_layers| layers / ring_layers).collect();
        let mut record = SearchRecord::default();
        let Some(mut plan) = self.solved(model, (0..count).collect(), &rounds, &mut record) else {
            return Err(StrategyError::Infeasible(record.steps));
        };
        while let Some(devices) = self.without_single_layers(&plan) {
            let Some(smaller) = self.solved(model, devices, &rounds, &mut record) else { break };
            plan = smaller;
        }
        let (objective, found) = &plan;
        Ok(Proposal::searched(expanded(objective, found), record.steps))
    }
}
