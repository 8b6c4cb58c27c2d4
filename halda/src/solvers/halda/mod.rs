//! The strategy `halda`: Algorithm 1 of the prima.cpp paper.
//!
//! Halda, Algorithm 1 of the paper (section 3.3): memory cases in turn with integer programs (`iteration`), a
//! program for each k and fixed cases (`integer_programme`) with the paper's linear costs and bounds
//! (`objective`), begun in proportion to memory (`start`). Then device selection as in its last paragraph:
//! a device other than the head that is left with one layer is removed, and the rest is solved again, until
//! no device has one layer. As written, the smaller ring is taken even if it turns out slower; only if it has no
//! plan does the larger one stay.
//!
//! `halda-shipped` is the same with the objective that the public implementation of prima.cpp is described to
//! use ([`Terms::SHIPPED`]). It chooses by that objective; its T is the latency model's, as for every strategy.
//!
//! The paper leaves some steps open. Decision 14 lists how they are read here.
//!
//! Not here: the optimum. Algorithm 1 misses it whenever its cases do, see [`crate::solvers::exact`].

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
    /// Remove devices that are left with one layer.
    pub may_drop: bool,
    /// Index of the head.
    pub head: usize,
    /// Only plans with this k; every valid one if absent.
    pub rounds: Option<u32>,
    /// Which terms the objective has.
    pub terms: Terms,
    /// After the paper's algorithm, flip single devices' memory cases as long as that gains. Not in the paper.
    pub flips: bool,
    /// Skip programs that a bound shows to be of no use; the plan is the same without.
    pub skips: bool,
}

impl Halda {
    /// As in the paper: device 0 is the head, every device keeps a layer, any k.
    pub const PAPER: Halda =
        Halda { may_drop: false, head: 0, rounds: None, terms: Terms::PAPER, flips: false, skips: true };

    /// As the public implementation is described: other costs, and devices with one layer are removed.
    pub const SHIPPED: Halda = Halda { may_drop: true, terms: Terms::SHIPPED, ..Halda::PAPER };

    /// The plan for these devices of the instance.
    fn solved<'a, 'i>(
        &self,
        model: &'a LatencyModel<'i>,
        devices: Vec<usize>,
        rounds: &[u32],
        record: &mut SearchRecord,
    ) -> Option<(LinearCosts<'a, 'i>, CandidatePlan)> {
        let objective = LinearCosts::new(model, devices, self.head, self.terms);
        let search = Search { rounds, skips: self.skips, flips: self.flips };
        let found = search.run(&objective, record)?;
        Some((objective, found))
    }

    /// The devices that stay when those with one layer go; `None` if none goes.
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
        options.extend(self.flips.then(|| "flips=true".to_owned()));
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
