//! Local search (hill climbing) that improves a plan by a score of the caller, for example its simulated time.
//!
//! The search tries the neighbours of the best plan so far in turn, and moves to the first better one. A neighbour
//! differs by one move:
//!
//! - another number of rounds: the next factor of L or the next integer, with the windows scaled to it;
//! - one layer of a round is moved to another processor. This includes the GPU or CPU of the same device. A device
//!   that loses its only layer is dropped, and a device without layers can get one;
//! - a round has one layer more or fewer, and the last round compensates for it;
//! - the windows of two devices are exchanged;
//! - all layers of a device are moved to another device.
//!
//! After an improvement the same move is tried again first. The search stops when no neighbour is better, after a
//! number of evaluations, or when the caller stops it. Each plan is scored once. Only plans that satisfy the named
//! constraints are scored, with the residencies that are fastest in the steady state; the last round may be partial.
//! The same start, score and number of evaluations give the same plan, unless the caller stops the search by a clock.
//!
//! Not here: the score, and other heads.

use std::collections::BTreeMap;

use crate::latency::LatencyModel;
use crate::latency::constraints::{Rules, ring_violations, shape_violations};
use crate::latency::gpu_split::RoundCounts;
use crate::problem::assignment::{Assignment, valid_rounds};
use crate::problem::instance::Gpu;
use crate::solvers::overlap::best_residencies;
use crate::solvers::relays::with_relays;
use crate::solvers::shortest_cycle::with_missing_devices;
use crate::strategy::{Objective, Proposal, Strategy, StrategyError};

/// The limits of the search.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RefineOptions {
    /// The optional rules of the plans.
    pub rules: Rules,
    /// Whether the number of rounds stays the same.
    pub keep_rounds: bool,
    /// The maximum number of evaluations, including that of the start; unlimited by default.
    pub max_evaluations: Option<u64>,
}

#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Progress {
    pub evaluations: u64,
    /// The best score so far; `None` while no plan has a score.
    pub best: Option<f64>,
}

/// Why a search ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StopReason {
    NoBetterNeighbour,
    EvaluationLimit,
    StoppedByCaller,
}

#[derive(Debug, Clone, PartialEq)]
pub struct RefineResult {
    /// The best plan; the start if no better plan was found.
    pub assignment: Assignment,
    /// The score of the start, if it has one.
    pub start_score: Option<f64>,
    /// The score of the best plan, if any plan has one.
    pub best_score: Option<f64>,
    pub evaluations: u64,
    pub stop_reason: StopReason,
}

/// Searches for a plan with a lower score than `start`. `score` returns `None` for a plan that cannot run.
/// `should_continue` is called before each evaluation.
pub fn refine(
    model: &LatencyModel,
    start: &Assignment,
    search: RefineOptions,
    score: impl FnMut(&Assignment) -> Option<f64>,
    should_continue: impl FnMut(Progress) -> bool,
) -> RefineResult {
    let mut scores =
        ScoreCache { score, should_continue, search, known: BTreeMap::new(), progress: Progress::default() };
    let mut best = start.clone();
    // A start with an invalid shape has no neighbours and no score.
    let is_valid = shape_violations(model, start).is_empty();
    let start_score = if is_valid { scores.get_or_score(start).unwrap_or(None) } else { None };
    let moves = if is_valid { moves(model) } else { Vec::new() };
    let (mut index, mut failed_moves) = (0, 0);
    let mut stop_reason = StopReason::NoBetterNeighbour;
    while failed_moves < moves.len() {
        let neighbour = moves[index].apply(&best, model).filter(|next| {
            let allowed = !search.keep_rounds || next.rounds == best.rounds;
            allowed
                && ring_violations(model, next, search.rules).is_empty()
                && best_residencies(model, next).is_some()
        });
        let before = scores.progress.best;
        let found = match neighbour.as_ref().map(|next| scores.get_or_score(next)) {
            Some(Err(reason)) => {
                stop_reason = reason;
                break;
            }
            Some(Ok(found)) => found,
            None => None,
        };
        match neighbour {
            Some(next) if found.is_some_and(|found| before.is_none_or(|before| found < before)) => {
                best = next;
                failed_moves = 0;
            }
            _ => {
                index = (index + 1) % moves.len();
                failed_moves += 1;
            }
        }
    }
    let Progress { evaluations, best: best_score } = scores.progress;
    RefineResult { assignment: best, start_score, best_score, evaluations, stop_reason }
}

/// The scores of all plans so far, with the limits of the search.
struct ScoreCache<S, G> {
    score: S,
    should_continue: G,
    search: RefineOptions,
    known: BTreeMap<Assignment, Option<f64>>,
    progress: Progress,
}

impl<S: FnMut(&Assignment) -> Option<f64>, G: FnMut(Progress) -> bool> ScoreCache<S, G> {
    /// Returns the score of a plan, from the cache or from the caller.
    ///
    /// # Errors
    /// If the plan must not be scored, because the evaluations are used up or the caller stops the search.
    fn get_or_score(&mut self, assignment: &Assignment) -> Result<Option<f64>, StopReason> {
        if let Some(known) = self.known.get(assignment) {
            return Ok(*known);
        }
        if self.search.max_evaluations.is_some_and(|most| self.progress.evaluations >= most) {
            return Err(StopReason::EvaluationLimit);
        }
        if !(self.should_continue)(self.progress) {
            return Err(StopReason::StoppedByCaller);
        }
        // NaN cannot be compared, and an infinite score is never better.
        let score = (self.score)(assignment).filter(|score| score.is_finite());
        self.progress.evaluations += 1;
        self.progress.best = [self.progress.best, score].into_iter().flatten().min_by(f64::total_cmp);
        self.known.insert(assignment.clone(), score);
        Ok(score)
    }
}

/// The CPU or the GPU of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Processor {
    device: usize,
    gpu: bool,
}

/// A change that turns a plan into a neighbour.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Move {
    /// Increases or decreases k to the next factor of L, or by one.
    Rounds { more: bool, factors: bool },
    /// Moves one layer of a round. If `from` or `to` is `None`, the round gets one layer more or fewer.
    Layer { from: Option<Processor>, to: Option<Processor> },
    /// Exchanges the windows of two devices.
    Swap { one: usize, other: usize },
    /// Moves all layers of a device to another one.
    Drop { device: usize, to: usize },
}

/// Returns all moves in the order in which they are tried.
fn moves(model: &LatencyModel) -> Vec<Move> {
    let mut all = Vec::new();
    for factors in [true, false] {
        all.extend([true, false].map(|more| Move::Rounds { more, factors }));
    }
    let devices = 0..model.device_count();
    let processors: Vec<Processor> = devices
        .clone()
        .flat_map(|device| {
            let has_gpu = model.instance().devices[device].gpu != Gpu::None;
            let cpu = Processor { device, gpu: false };
            [Some(cpu), has_gpu.then_some(Processor { device, gpu: true })].into_iter().flatten()
        })
        .collect();
    let ends = || processors.iter().copied().map(Some).chain([None]);
    for from in ends() {
        all.extend(ends().filter(|to| *to != from).map(|to| Move::Layer { from, to }));
    }
    for one in devices.clone() {
        all.extend((one + 1..devices.end).map(|other| Move::Swap { one, other }));
    }
    for device in devices.clone() {
        all.extend(devices.clone().filter(|&to| to != device).map(|to| Move::Drop { device, to }));
    }
    all
}

impl Move {
    /// Returns the plan after the move; `None` if the move is impossible or changes nothing. The plan may violate
    /// constraints.
    fn apply(self, at: &Assignment, model: &LatencyModel) -> Option<Assignment> {
        let mut next = at.clone();
        match self {
            Move::Rounds { more, factors } => {
                return rescaled(at, model, next_rounds(at, model, more, factors)?);
            }
            Move::Layer { from, to } => {
                if let Some(Processor { device, gpu }) = from {
                    let on_gpu = at.gpu_layers[device];
                    if (if gpu { on_gpu } else { at.window_layers[device].checked_sub(on_gpu)? }) == 0 {
                        return None;
                    }
                    next.window_layers[device] -= 1;
                    next.gpu_layers[device] -= u32::from(gpu);
                }
                if let Some(Processor { device, gpu }) = to {
                    next.window_layers[device] += 1;
                    next.gpu_layers[device] += u32::from(gpu);
                }
                let ring_layers = u32::try_from(next.ring_layers()).ok().filter(|layers| *layers > 0)?;
                next.rounds = model.model_layers().div_ceil(ring_layers);
            }
            Move::Swap { one, other } => {
                next.window_layers.swap(one, other);
                split(&mut next, model, one);
                split(&mut next, model, other);
            }
            Move::Drop { device, to } => {
                next.window_layers[to] += std::mem::take(&mut next.window_layers[device]);
                next.gpu_layers[device] = 0;
                split(&mut next, model, to);
            }
        }
        if let Some(order) = &at.order {
            // A device without layers is removed from the ring. A new device is inserted where the detour is
            // shortest.
            let mut order = with_missing_devices(model, order.clone());
            order.retain(|device| next.window_layers[*device] > 0);
            next.order = Some(order).filter(|order| order.first() == Some(&next.head));
            next = with_relays(model, next);
        }
        (next != *at).then_some(next)
    }
}

/// Returns the next larger or smaller k; `None` if there is none.
fn next_rounds(at: &Assignment, model: &LatencyModel, more: bool, factors: bool) -> Option<u32> {
    if !factors {
        return if more { at.rounds.checked_add(1) } else { at.rounds.checked_sub(1) };
    }
    let valid = valid_rounds(model.model_layers());
    if more {
        valid.into_iter().find(|&rounds| rounds > at.rounds)
    } else {
        valid.into_iter().rfind(|&rounds| rounds < at.rounds)
    }
}

/// Scales a plan to another number of rounds. Windows keep their ratios (largest remainder method), none becomes
/// empty, and devices with GPU layers get a new split. Returns `None` if no ring size has this number of rounds, or
/// if it has fewer layers than devices.
fn rescaled(at: &Assignment, model: &LatencyModel, rounds: u32) -> Option<Assignment> {
    let layers = model.model_layers();
    if rounds == 0 {
        return None;
    }
    let ring_layers = layers.div_ceil(rounds);
    let used = at.window_layers.iter().filter(|window| **window > 0).count();
    // Not every k has a W: 10 layers take 4 rounds of 3 or 5 rounds of 2, but no W gives 6 rounds.
    if layers.div_ceil(ring_layers) != rounds || (ring_layers as usize) < used {
        return None;
    }
    let (new, old) = (u64::from(ring_layers), at.ring_layers().max(1));
    let mut next = at.clone();
    next.rounds = rounds;
    for window in &mut next.window_layers {
        *window = (u64::from(*window) * new / old).max(u64::from(*window > 0)) as u32;
    }
    // How much smaller than its exact share a window is, in units of 1 / old layers.
    let deficit = |next: &Assignment, device: usize| {
        (u64::from(at.window_layers[device]) * new) as i64
            - (u64::from(next.window_layers[device]) * old) as i64
    };
    while next.ring_layers() != new {
        let used = (0..next.window_layers.len()).filter(|&device| next.window_layers[device] > 0);
        if next.ring_layers() < new {
            let device = used.rev().max_by_key(|&device| deficit(&next, device))?;
            next.window_layers[device] += 1;
        } else {
            let wide = used.filter(|&device| next.window_layers[device] > 1);
            let device = wide.min_by_key(|&device| deficit(&next, device))?;
            next.window_layers[device] -= 1;
        }
    }
    for device in 0..next.window_layers.len() {
        if next.gpu_layers[device] > 0 {
            split(&mut next, model, device);
        }
    }
    Some(next)
}

/// Sets the GPU layers of a window to the fastest split by the latency model; to 0 if no split is allowed.
fn split(next: &mut Assignment, model: &LatencyModel, device: usize) {
    let (layers, ring_layers) = (model.model_layers(), next.ring_layers().max(1) as u32);
    let round_counts = RoundCounts { rounds: (layers / ring_layers).max(1), rest: layers % ring_layers };
    let best = model.best_split(device, device == next.head, next.window_layers[device], round_counts);
    next.gpu_layers[device] = best.map_or(0, |split| split.gpu_layers);
}

/// The strategy `refine`, which proposes the result of a search so that it is checked, evaluated and explained.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refine {
    /// The best plan of the search.
    pub assignment: Assignment,
    /// The name of the strategy whose plan was the start of the search.
    pub start_strategy: String,
    /// The rules of the search.
    pub rules: Rules,
}

impl Strategy for Refine {
    fn name(&self) -> &'static str {
        "refine"
    }

    fn rules(&self) -> Rules {
        self.rules
    }

    fn options(&self) -> Vec<String> {
        let mut options = vec![format!("start={}", self.start_strategy)];
        options.extend(self.rules.options());
        options
    }

    fn objective(&self) -> Objective {
        Objective::SteadyState
    }

    fn propose(&self, model: &LatencyModel) -> Result<Proposal, StrategyError> {
        let residencies = best_residencies(model, &self.assignment).unwrap_or_default();
        Ok(Proposal { residencies, ..Proposal::new(self.assignment.clone()) })
    }
}
