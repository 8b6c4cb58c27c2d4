//! The strategy `exact`: the plan that is optimal by the prima.cpp paper's objective.
//!
//! For one ring size, head and order the dynamic program in `crate::solvers::dynamic_program` is exact, including the
//! selection of devices. The ring sizes are L/k for every valid k, or all sizes if the last round may be partial. The
//! order is the instance's, starting at the head, or the best one (`crate::solvers::ring_order`).
//!
//! Two properties save time without losing the optimum. First, if k is not given, only one round is needed: the windows
//! of any plan can be merged into one round of the same devices, which has no more windows and no more hops. The other
//! ring sizes are searched only to report their times, and they are skipped if there are too many. Second, a head
//! whose lower bound (`crate::solvers::lower_bound`) exceeds the best time is not searched.
//!
//! If k is given and has too many ring sizes, the search is limited, and it reports this with a lower bound.
//!
//! Not here: the overlap of disk reads with computation ([`crate::solvers::overlap`]).

use crate::solvers::dynamic_program::RingSizeProblem;
use crate::solvers::lower_bound::bounds_by_head;
use crate::solvers::ring_order::{best_ring, can_try_all_subsets};
use crate::solvers::search_space::{min_windows, ring_sizes, rotated_to_head, search_options};
use crate::solvers::shortest_cycle::{ShortestCycles, candidate_cycle};
use crate::{
    Assignment, HeadChoice, IncompleteSearch, LatencyModel, OrderChoice, PlanRules, Proposal, SearchStep,
    Strategy, StrategyError,
};

/// The maximum number of table entries of the dynamic programs in a search. source: measured, 20 ns each, so 0.3 s
const MAX_TABLE_ENTRIES: f64 = 1.5e7;

/// The maximum number of heads in a heuristic search, which tries those with the lowest bounds. source: assumed
const MAX_HEADS_TRIED: usize = 4;

/// The maximum number of ring orders in a heuristic search. source: assumed; random rings of 20 devices need one or two
const MAX_ORDER_TRIALS: usize = 4;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExactSearch {
    pub rules: PlanRules,
    pub head: HeadChoice,
    /// The number of rounds per token (k); `None` to search every valid number.
    pub rounds: Option<u32>,
    pub order: OrderChoice,
}

impl Default for ExactSearch {
    /// Returns the search of the prima.cpp paper: device 0 is the head, every device has layers, rounds are whole, and
    /// the number of rounds (k) is free.
    fn default() -> Self {
        let (head, order) = (HeadChoice::Fixed(0), OrderChoice::Given);
        Self { rules: PlanRules::default(), head, rounds: None, order }
    }
}

impl Strategy for ExactSearch {
    fn name(&self) -> &'static str {
        "exact"
    }

    fn rules(&self) -> PlanRules {
        self.rules
    }

    fn options(&self) -> Vec<String> {
        search_options(self.rules, self.head, self.order, self.rounds)
    }

    fn is_optimal(&self) -> bool {
        true
    }

    fn propose(&self, model: &LatencyModel) -> Result<Proposal, StrategyError> {
        let rings = ring_sizes(model.model_layers(), self.rules.may_have_partial_round, self.rounds)?;
        self.head.candidates(model.device_count())?;
        let (deciding, bounds, steps, notes) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        let mut search =
            Search { model, exact: *self, deciding, bounds, steps, best: None, notes, bound: None };
        // If the next device does not matter, all orders of whole rounds are equally fast.
        if self.order == OrderChoice::Best && model.hop_times.depends_on_receiver {
            search.best_order(&rings);
        } else {
            search.given_order(&rings);
        }
        search.finish()
    }
}

struct Search<'a, 'i> {
    model: &'a LatencyModel<'i>,
    exact: ExactSearch,
    /// The ring sizes (layers per round) that the optimum can have.
    deciding: Vec<u32>,
    bounds: Vec<f64>,
    steps: Vec<SearchStep>,
    best: Option<(f64, Assignment)>,
    notes: Vec<String>,
    /// A lower bound of the seconds per token (T) of all plans; `None` if the search is complete.
    bound: Option<f64>,
}

impl Search<'_, '_> {
    fn best_head(&self, default: usize) -> usize {
        self.best.as_ref().map_or(default, |(_, best)| best.head)
    }

    fn best_seconds(&self) -> f64 {
        self.best.as_ref().map_or(f64::INFINITY, |(seconds, _)| *seconds)
    }

    fn given_order(&mut self, rings: &[u32]) {
        let cycle: Vec<usize> = (0..self.model.device_count()).collect();
        let (mut heads, deciding) = self.heads_and_deciding_sizes(rings);
        let deciding = self.affordable(&deciding, &mut heads, 1);
        for &head in &heads {
            if !self.cannot_improve(head) {
                for &layers_per_round in &deciding {
                    self.try_ring(head, &cycle, layers_per_round);
                }
            }
        }
        let head = self.best_head(heads[0]);
        for layers_per_round in self.sizes_to_report(rings, &deciding) {
            self.try_ring(head, &cycle, layers_per_round);
        }
    }

    fn best_order(&mut self, rings: &[u32]) {
        let (mut heads, deciding) = self.heads_and_deciding_sizes(rings);
        let first_head = heads[0];
        let (whole, partial): (Vec<u32>, Vec<u32>) = deciding.iter().partition(|ring| self.is_whole(**ring));
        if whole.is_empty() || !can_try_all_subsets(self.model, self.exact.rules, heads.len(), &whole) {
            self.given_order(rings);
            heads.truncate(MAX_HEADS_TRIED);
            self.try_some_orders(heads, &deciding);
        } else {
            self.try_all_orders(&heads, rings, &whole);
            if !partial.is_empty() {
                self.record_limit(
                    "Partial last rounds were searched in one order only, the best one for whole rounds.",
                );
            }
            let head = self.best_head(heads[0]);
            heads = vec![head];
            for layers_per_round in self.affordable(&partial, &mut heads, 1) {
                self.try_ring(head, &self.best_cycle(), layers_per_round);
            }
        }
        // The other ring sizes are reported in the order of the best plan.
        let cycle = self.best_cycle();
        let head = self.best_head(first_head);
        for layers_per_round in self.sizes_to_report(rings, &deciding) {
            if !self.steps.iter().any(|step| step.head == head && step.layers_per_round == layers_per_round) {
                self.try_ring(head, &cycle, layers_per_round);
            }
        }
    }

    /// Tries all ring orders of all sets of devices for the ring sizes in `whole`, and then, only with the best head,
    /// for the other ring sizes in `rings` that divide L.
    fn try_all_orders(&mut self, heads: &[usize], rings: &[u32], whole: &[u32]) {
        let (model, rules) = (self.model, self.exact.rules);
        let cycles = ShortestCycles::new(model);
        let given: Vec<usize> = (0..model.device_count()).collect();
        let try_best = |search: &mut Self, head, layers_per_round| {
            match best_ring(model, &cycles, rules, head, layers_per_round) {
                Some(ring) => search.try_order(head, &ring, layers_per_round),
                // There is no plan; the dynamic program gives the reason.
                None => search.try_ring(head, &given, layers_per_round),
            }
        };
        for &head in heads {
            if !self.cannot_improve(head) {
                for &layers_per_round in whole {
                    try_best(self, head, layers_per_round);
                }
            }
        }
        let Some((_, Assignment { head, .. })) = self.best else { return };
        let others = rings.iter().copied().filter(|ring| self.is_whole(*ring) && !whole.contains(ring));
        let others: Vec<u32> = others.collect();
        if self.exact.rounds.is_none() && can_try_all_subsets(model, rules, 1, &others) {
            for layers_per_round in others {
                try_best(self, head, layers_per_round);
            }
        }
    }

    /// Tries a few short cycles through the devices as ring orders, each with the exact dynamic program.
    fn try_some_orders(&mut self, mut heads: Vec<usize>, deciding: &[u32]) {
        let all: Vec<usize> = (0..self.model.device_count()).collect();
        let deciding = self.affordable(deciding, &mut heads, MAX_ORDER_TRIALS);
        if let Some((_, best)) = self.best.as_ref().filter(|(_, best)| !heads.contains(&best.head)) {
            heads.push(best.head);
        }
        self.record_limit(
            "Not every order of the ring was tried, because there are too many: only short cycles through all devices \
             and through those of the best plan.",
        );
        let mut cycles = vec![candidate_cycle(self.model, &all)];
        cycles.extend(self.best.as_ref().map(|(_, best)| candidate_cycle(self.model, &best.ring())));
        for _ in 0..MAX_ORDER_TRIALS {
            let Some(cycle) = cycles.pop() else { break };
            let before = self.best_seconds();
            for &head in &heads {
                for &layers_per_round in &deciding {
                    self.try_ring(head, &cycle, layers_per_round);
                }
            }
            if self.best_seconds() < before {
                cycles.extend(self.best.as_ref().map(|(_, best)| candidate_cycle(self.model, &best.ring())));
            }
        }
    }

    fn best_cycle(&self) -> Vec<usize> {
        let given = || (0..self.model.device_count()).collect();
        self.best.as_ref().map_or_else(given, |(_, best)| best.ring_then_unused_devices())
    }

    fn is_whole(&self, layers_per_round: u32) -> bool {
        self.model.model_layers().is_multiple_of(layers_per_round)
    }

    /// Returns the heads to try, in ascending order of their bounds, and the ring sizes that the optimum can have.
    fn heads_and_deciding_sizes(&mut self, rings: &[u32]) -> (Vec<usize>, Vec<u32>) {
        let deciding = match (self.exact.rounds, self.exact.head) {
            (None, HeadChoice::Best) => vec![self.model.model_layers()],
            (None, HeadChoice::Fixed(_)) => rings.iter().take(1).copied().collect(),
            (Some(_), _) => rings.to_vec(),
        };
        self.deciding.clone_from(&deciding);
        let heads = match self.exact.head {
            HeadChoice::Fixed(head) => vec![head],
            HeadChoice::Best => {
                self.bound_by_head(&deciding);
                let mut heads: Vec<usize> = (0..self.bounds.len()).collect();
                heads.sort_by(|one, other| self.bounds[*one].total_cmp(&self.bounds[*other]));
                heads
            }
        };
        (heads, deciding)
    }

    /// Computes a lower bound of the time per token for each head. A plan with a partial last round is never faster
    /// than one round with the same layers on each device.
    fn bound_by_head(&mut self, deciding: &[u32]) {
        let layers_per_round = match deciding {
            [ring] if self.is_whole(*ring) => *ring,
            _ => self.model.model_layers(),
        };
        self.bounds = bounds_by_head(self.model, layers_per_round, self.exact.rules);
    }

    /// Returns whether no plan with this head can be faster than the best plan so far, allowing for rounding errors.
    fn cannot_improve(&self, head: usize) -> bool {
        self.bounds.get(head).is_some_and(|bound| bound * (1.0 - 1e-9) > self.best_seconds())
    }

    /// Returns the ring sizes that can be searched `times` times with each of the heads within [`MAX_TABLE_ENTRIES`].
    /// If not all can be searched, keeps only the head with the lowest bound, and returns evenly spaced ring sizes.
    fn affordable(&mut self, rings: &[u32], heads: &mut Vec<usize>, times: usize) -> Vec<u32> {
        let once: f64 = rings.iter().map(|ring| entries(self.model, *ring)).sum();
        let entries = once * times as f64;
        if entries * heads.len() as f64 <= MAX_TABLE_ENTRIES || rings.len() < 2 {
            return rings.to_vec();
        }
        heads.truncate(1);
        let steps = (entries / MAX_TABLE_ENTRIES).ceil().max(1.0) as usize;
        let kept: Vec<u32> = rings.iter().step_by(steps).copied().collect();
        self.record_limit(&format!(
            "Only {} of {} ring sizes (layers per round) were searched, and only with the most promising head, because \
             a full search would take too long.",
            kept.len(),
            rings.len()
        ));
        kept
    }

    /// Returns the ring sizes besides `decided` whose times are reported: all, or if these are too many, only those
    /// that divide the number of layers of the model.
    fn sizes_to_report(&mut self, rings: &[u32], decided: &[u32]) -> Vec<u32> {
        if self.exact.rounds.is_some() {
            return Vec::new();
        }
        let left: Vec<u32> = rings.iter().copied().filter(|ring| !decided.contains(ring)).collect();
        if left.iter().map(|ring| entries(self.model, *ring)).sum::<f64>() <= MAX_TABLE_ENTRIES {
            return left;
        }
        self.note(
            "Partial last rounds are not listed, because there are too many: by this latency model one round with the \
             same layers on each device is never slower.",
        );
        left.into_iter().filter(|ring| self.is_whole(*ring)).collect()
    }

    fn record_limit(&mut self, note: &str) {
        self.note(note);
        if self.bounds.is_empty() {
            self.bound_by_head(&self.deciding.clone());
        }
        let least = match self.exact.head {
            HeadChoice::Fixed(head) => self.bounds[head],
            HeadChoice::Best => self.bounds.iter().copied().fold(f64::INFINITY, f64::min),
        };
        self.bound = Some(least).filter(|least| least.is_finite());
    }

    fn note(&mut self, note: &str) {
        if !self.notes.iter().any(|known| known == note) {
            self.notes.push(note.to_owned());
        }
    }

    /// Searches for the best windows with the ring order `cycle`, a cycle of all devices, starting at the head.
    fn try_ring(&mut self, head: usize, cycle: &[usize], layers_per_round: u32) {
        self.try_order(head, &rotated_to_head(cycle, head), layers_per_round);
    }

    fn try_order(&mut self, head: usize, ring_order: &[usize], layers_per_round: u32) {
        let min_windows = min_windows(self.model, self.exact.rules, head);
        let problem =
            RingSizeProblem { model: self.model, ring_order, layers_per_round, min_windows: &min_windows };
        let outcome = problem.optimum().map(|assignment| {
            let seconds = self.model.seconds_per_token(&assignment);
            let better = self.best.as_ref().is_none_or(|(fastest, best)| {
                seconds < *fastest || seconds == *fastest && assignment.head < best.head
            });
            if better {
                self.best = Some((seconds, assignment));
            }
            seconds
        });
        let rounds = self.model.model_layers().div_ceil(layers_per_round);
        self.steps.push(SearchStep { head, rounds, layers_per_round, outcome });
    }

    fn finish(self) -> Result<Proposal, StrategyError> {
        let Self { mut steps, best, notes, bound, .. } = self;
        steps.sort_by_key(|step| (step.head, std::cmp::Reverse(step.layers_per_round)));
        let limit = (!notes.is_empty()).then_some(IncompleteSearch { notes, lower_bound_seconds: bound });
        match best {
            Some((_, assignment)) => {
                Ok(Proposal { search_steps: steps, incomplete_search: limit, ..Proposal::new(assignment) })
            }
            None => Err(StrategyError::Infeasible(steps)),
        }
    }
}

/// Estimates the time of the dynamic program for a ring size, in table entries of 20 ns each. An addition or a hop
/// counts as a fraction of an entry, because it takes half a nanosecond. source: measured
fn entries(model: &LatencyModel, layers_per_round: u32) -> f64 {
    let devices = model.device_count() as f64;
    let ring = f64::from(layers_per_round);
    let rests = f64::from(model.model_layers() % layers_per_round) + 1.0;
    devices * (rests * ring + ring * ring / 80.0 + devices * ring / 40.0)
}
