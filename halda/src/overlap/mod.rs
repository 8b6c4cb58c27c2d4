//! Which plan is the fastest once reading has settled behind computing?
//!
//! The default. It minimises the steady state ([`crate::steady_state`]) instead of the paper's objective, which has
//! no term for reading ahead and hence always prefers one round. Here more rounds are chosen when they pay: when what
//! a device has to read fits its idle intervals better in several parts, or when a window is so large that it is in
//! conflict with the next one, and the time hidden is more than the further hops. Where a scenario leaves open how a
//! device keeps its weights, that is chosen too, down to the size of the stream buffer.
//!
//! The search is exact for the windows, GPU layers, rounds, and the residencies on offer ([`search`]).
//!
//! Not here: what a plan's time is.

mod offers;
mod search;

use crate::constraints::Rules;
use crate::exact::{HeadChoice, ring_sizes};
use crate::latency::LatencyModel;
use crate::strategy::{Objective, Proposal, Refusal, SearchStep, Strategy};

pub use offers::best_residencies;
pub(crate) use search::{SizedSearch, best_choice};

/// The fastest steady state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Overlap {
    /// Which optional rules the plan may use.
    pub rules: Rules,
    /// Which device is the head.
    pub head: HeadChoice,
    /// Only plans with this k; every valid one if absent.
    pub rounds: Option<u32>,
}

impl Default for Overlap {
    /// Device 0 is the head, devices may be dropped, whole turns only, any k.
    fn default() -> Self {
        let rules = Rules { may_drop: true, may_leave_remainder: false };
        Self { rules, head: HeadChoice::Fixed(0), rounds: None }
    }
}

impl Strategy for Overlap {
    fn name(&self) -> &'static str {
        "overlap"
    }

    fn rules(&self) -> Rules {
        self.rules
    }

    fn objective(&self) -> Objective {
        Objective::SteadyState
    }

    fn options(&self) -> Vec<String> {
        let mut options = self.rules.options();
        options.extend(self.head.option());
        options.extend(self.rounds.map(|rounds| format!("rounds={rounds}")));
        options
    }

    fn is_optimal(&self) -> bool {
        true
    }

    fn propose(&self, model: &LatencyModel) -> Result<Proposal, Refusal> {
        let rings = ring_sizes(model.model_layers(), self.rules.may_leave_remainder, self.rounds)?;
        let least = u32::from(!self.rules.may_drop);
        let mut searched = Vec::new();
        let mut best: Option<(f64, Proposal)> = None;
        for head in self.head.candidates(model.device_count())? {
            let mut windows = vec![least; model.device_count()];
            windows[head] = 1;
            for &ring_layers in &rings {
                let search = SizedSearch { model, head, ring_layers, least_windows: &windows };
                let outcome = search.optimum().map(|proposal| {
                    let seconds = steady(model, &proposal);
                    // Fewer rounds come first: more of them must be worth it beyond rounding.
                    if best.as_ref().is_none_or(|(fastest, _)| seconds < fastest * (1.0 - 1e-12)) {
                        best = Some((seconds, proposal));
                    }
                    seconds
                });
                let rounds = model.model_layers().div_ceil(ring_layers);
                searched.push(SearchStep { head, rounds, ring_layers, outcome });
            }
        }
        match best {
            Some((_, proposal)) => Ok(Proposal { searched, ..proposal }),
            None => Err(Refusal::Infeasible(searched)),
        }
    }
}

/// T of a proposal whose shape is known to be right.
pub(crate) fn steady(model: &LatencyModel, proposal: &Proposal) -> f64 {
    let found = model.steady_state(&proposal.assignment, &proposal.residencies);
    found.map_or(f64::INFINITY, |breakdown| breakdown.seconds)
}
