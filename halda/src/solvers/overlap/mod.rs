//! The default strategy `overlap`: the plan with the fastest steady state.
//!
//! It minimises the time of the steady state ([`crate::latency::steady_state`]). The paper's objective has no term for
//! reading ahead, and therefore never prefers several rounds. This strategy chooses them if they hide more reading than
//! their additional hops take. It also chooses the residency policies and stream buffers that the scenario does not
//! fix.
//!
//! The memory that a device will have is uncertain, and a plan that just fits in it may be much slower in a little less.
//! So if the fastest plan is slower on average over five quantiles of the memory
//! ([`LatencyModel::with_uncertain_memory`]), the plan with the best mean is chosen, unless [`MemoryRisk::Ignore`] is
//! set. A device may then even read a slow disk if it has less memory than described; the time of this counts.
//!
//! For a given order of the ring the search is exact in windows, GPU layers, rounds and residency policies
//! (`search.rs`). If the order is free, only a few orders are tried.

mod residency_choices;
mod search;

use crate::solvers::dynamic_program::RingSizeProblem;
use crate::solvers::search_space::{min_windows, ring_sizes, rotated_to_head, search_options};
use crate::solvers::shortest_cycle::candidate_cycle;
use crate::{
    AvoidedRisk, ExactSearch, HeadChoice, IncompleteSearch, InfeasibleReason, LatencyModel, MemoryRisk,
    Objective, OrderChoice, PlanRules, Proposal, SearchStep, Strategy, StrategyError,
};

pub use residency_choices::best_residencies;
use search::lower_bound;
pub(crate) use search::{ChoiceTables, best_choice, fastest_plan};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OverlapSearch {
    pub rules: PlanRules,
    pub head: HeadChoice,
    /// The number of rounds per token (k); `None` to search every valid number.
    pub rounds: Option<u32>,
    pub order: OrderChoice,
    pub memory_risk: MemoryRisk,
}

impl Default for OverlapSearch {
    /// Returns a search in which device 0 is the head, devices may be dropped, all rounds are whole, and their number
    /// is free.
    fn default() -> Self {
        let rules = PlanRules { may_drop_devices: true, may_have_partial_round: false };
        let head = HeadChoice::Fixed(0);
        Self { rules, head, rounds: None, order: OrderChoice::Given, memory_risk: MemoryRisk::Average }
    }
}

impl Strategy for OverlapSearch {
    fn name(&self) -> &'static str {
        "overlap"
    }

    fn rules(&self) -> PlanRules {
        self.rules
    }

    fn objective(&self) -> Objective {
        Objective::SteadyState
    }

    fn options(&self) -> Vec<String> {
        let mut options = search_options(self.rules, self.head, self.order, self.rounds);
        options.extend((self.memory_risk == MemoryRisk::Ignore).then(|| "risk=ignore".to_owned()));
        options
    }

    fn is_optimal(&self) -> bool {
        true
    }

    fn propose(&self, model: &LatencyModel) -> Result<Proposal, StrategyError> {
        let fastest = self.search(model)?;
        let uncertain = model.with_uncertain_memory().filter(|_| self.memory_risk == MemoryRisk::Average);
        Ok(match uncertain {
            Some(uncertain) => self.avoid_risk(model, &uncertain, fastest),
            None => fastest,
        })
    }
}

impl OverlapSearch {
    /// Returns the plan with the best mean time over the memory that the devices may have, if the fastest plan in the
    /// memory that they are described with does not have it.
    fn avoid_risk(&self, model: &LatencyModel, uncertain: &LatencyModel, fastest: Proposal) -> Proposal {
        let seconds = |model: &LatencyModel, proposal: &Proposal| {
            model.steady_state_seconds(&proposal.assignment, &proposal.residencies)
        };
        let (fastest_seconds, fastest_mean) = (seconds(model, &fastest), seconds(uncertain, &fastest));
        if fastest_mean <= fastest_seconds {
            return fastest;
        }
        let Ok(careful) = self.search(uncertain) else { return fastest };
        let mean_seconds = seconds(uncertain, &careful);
        if mean_seconds >= fastest_mean * (1.0 - 1e-9) {
            return fastest;
        }
        let avoided = AvoidedRisk { fastest_seconds, fastest_mean_seconds: fastest_mean, mean_seconds };
        let Proposal { search_steps, incomplete_search, .. } = fastest;
        Proposal { search_steps, incomplete_search, avoided_risk: Some(avoided), ..careful }
    }

    fn search(&self, model: &LatencyModel) -> Result<Proposal, StrategyError> {
        let rings = ring_sizes(model.model_layers(), self.rules.may_have_partial_round, self.rounds)?;
        let windows = window_evaluations(model, &rings);
        if windows > MAX_WINDOW_EVALUATIONS {
            return Err(StrategyError::TooManyWindows { windows, limit: MAX_WINDOW_EVALUATIONS });
        }
        let mut cycles = vec![(0..model.device_count()).collect()];
        // The order matters even if all hops are equal, because layers may differ.
        let reorders = self.order == OrderChoice::Best
            && (model.hop_times.depends_on_receiver || !model.sizes.has_uniform_layers);
        if reorders {
            cycles.extend(self.other_cycles(model));
        }
        let bound = reorders.then_some(f64::INFINITY);
        let mut search = Search { model, rules: self.rules, cycles, steps: Vec::new(), best: None, bound };
        for head in self.head.candidates(model.device_count())? {
            for &layers_per_round in &rings {
                search.try_ring(head, layers_per_round);
            }
        }
        let Search { steps, best, bound, .. } = search;
        let notes = vec![ORDERS_TRIED.to_owned()];
        let limit = bound.map(|bound| IncompleteSearch { notes, lower_bound_seconds: Some(bound) });
        match best {
            Some((_, proposal)) => Ok(Proposal { search_steps: steps, incomplete_search: limit, ..proposal }),
            None => Err(StrategyError::Infeasible(steps)),
        }
    }
}

struct Search<'a, 'i> {
    model: &'a LatencyModel<'i>,
    rules: PlanRules,
    /// The ring orders to try, as cycles of all devices.
    cycles: Vec<Vec<usize>>,
    steps: Vec<SearchStep>,
    best: Option<(f64, Proposal)>,
    /// A lower bound of the seconds per token (T) with any ring order; `None` if the order is given.
    bound: Option<f64>,
}

impl Search<'_, '_> {
    fn try_ring(&mut self, head: usize, layers_per_round: u32) {
        let model = self.model;
        let min_windows = min_windows(model, self.rules, head);
        let mut tables = ChoiceTables::new(model, head, layers_per_round);
        let mut step: Option<Result<f64, InfeasibleReason>> = None;
        for cycle in &self.cycles {
            let order = rotated_to_head(cycle, head);
            let problem =
                RingSizeProblem { model, ring_order: &order, layers_per_round, min_windows: &min_windows };
            let outcome = fastest_plan(&problem, &mut tables, 0.0).map(|proposal| {
                let seconds = model.steady_state_seconds(&proposal.assignment, &proposal.residencies);
                // Fewer rounds come first; more rounds must be faster by more than rounding errors.
                if self.best.as_ref().is_none_or(|(least, _)| seconds < least * (1.0 - 1e-12)) {
                    self.best = Some((seconds, proposal));
                }
                seconds
            });
            if let Some(bound) = &mut self.bound {
                *bound = bound.min(lower_bound(&problem, &mut tables));
            }
            step = match (step, outcome) {
                (Some(Ok(before)), Ok(now)) => Some(Ok(before.min(now))),
                (Some(Ok(before)), Err(_)) => Some(Ok(before)),
                (_, outcome) => Some(outcome),
            };
        }
        let rounds = model.model_layers().div_ceil(layers_per_round);
        self.steps.extend(step.map(|outcome| SearchStep { head, rounds, layers_per_round, outcome }));
    }
}

/// The maximum number of windows to evaluate with all residency policies and splits. source: assumed, at most a second
/// for a search, and several seconds if a second search averages over uncertain memory
const MAX_WINDOW_EVALUATIONS: f64 = 3e6;

/// Estimates the number of windows that a search evaluates. A step of the dynamic program counts as a tenth of a
/// window, in proportion to its time.
fn window_evaluations(model: &LatencyModel, rings: &[u32]) -> f64 {
    let for_ring = |ring: &u32| {
        let windows = f64::from(*ring);
        let partial = f64::from(model.model_layers() % ring + 1);
        let offsets = if model.sizes.has_uniform_layers { partial } else { windows / 2.0 };
        windows * (offsets + windows / 10.0)
    };
    rings.iter().map(for_ring).sum::<f64>() * model.device_count() as f64
}

const ORDERS_TRIED: &str = "Not every order of the ring was tried, only the scenario's order, its reverse, the order \
                            of the best plan by the paper's latency model, and a short cycle through all devices.";

impl OverlapSearch {
    fn other_cycles(&self, model: &LatencyModel) -> Vec<Vec<usize>> {
        let Self { rules, head, order, .. } = *self;
        let all: Vec<usize> = (0..model.device_count()).collect();
        let exact = ExactSearch { rules, head, rounds: Some(1), order }.propose(model);
        let of_exact = exact.ok().map(|proposal| proposal.assignment.ring_then_unused_devices());
        let reversed = all.iter().rev().copied().collect();
        of_exact.into_iter().chain([candidate_cycle(model, &all), reversed]).collect()
    }
}
