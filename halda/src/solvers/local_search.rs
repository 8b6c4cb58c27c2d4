//! Local search (hill climbing) for a plan with a lower score, which the caller computes, such as the simulated time.
//!
//! The search tries the neighbours of the best plan in turn (`Move`), and continues from the first better one. After an
//! improvement the same move is tried again first. The search stops when no neighbour is better, after a number of
//! evaluations, or when the caller stops it. Each plan is scored once. Only plans that satisfy all constraints are
//! scored, with the residency policies that are fastest in the steady state; the last round may be partial.

use std::collections::BTreeMap;

use crate::latency::constraints::{ring_violations, shape_violations};
use crate::solvers::overlap::best_residencies;
use crate::solvers::relays::with_relays;
use crate::solvers::shortest_cycle::with_missing_devices;
use crate::{
    Assignment, GpuApi, LatencyModel, Objective, PlanRules, Proposal, RoundWindow, Strategy, StrategyError,
    valid_rounds,
};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RefineOptions {
    pub rules: PlanRules,
    /// Whether every plan in the search has the number of rounds of the start plan.
    pub keep_rounds: bool,
    /// The maximum number of plans to score, including the start plan; unlimited by default.
    pub max_evaluations: Option<u64>,
}

#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct RefineProgress {
    pub evaluations: u64,
    /// The lowest score so far; `None` while no plan has a score.
    pub best_score: Option<f64>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StopReason {
    NoBetterNeighbour,
    EvaluationLimit,
    StoppedByCaller,
}

#[derive(Debug, Clone, PartialEq)]
pub struct RefineResult {
    /// The best plan; the start plan if no better plan was found.
    pub assignment: Assignment,
    pub start_score: Option<f64>,
    pub best_score: Option<f64>,
    pub evaluations: u64,
    pub stop_reason: StopReason,
}

/// Searches for a plan with a lower score than `start`. `score` returns `None` for a plan that cannot run.
/// `should_continue` is called before each call of `score`, and ends the search by returning false.
pub fn refine(
    model: &LatencyModel,
    start: &Assignment,
    options: RefineOptions,
    score: impl FnMut(&Assignment) -> Option<f64>,
    should_continue: impl FnMut(RefineProgress) -> bool,
) -> RefineResult {
    let (known, progress) = (BTreeMap::new(), RefineProgress::default());
    let mut scores = ScoreCache { score, should_continue, options, known, progress };
    let mut best = start.clone();
    // A start with an invalid shape has no neighbours and no score.
    let is_valid = shape_violations(model, start).is_empty();
    let start_score = if is_valid { scores.get_or_score(start).unwrap_or(None) } else { None };
    let moves = if is_valid { moves(model) } else { Vec::new() };
    let (mut index, mut failed_moves) = (0, 0);
    let mut stop_reason = StopReason::NoBetterNeighbour;
    while failed_moves < moves.len() {
        let neighbour = moves[index].apply(&best, model).filter(|next| {
            (!options.keep_rounds || next.rounds == best.rounds)
                && ring_violations(model, next, options.rules).is_empty()
                && best_residencies(model, next).is_some()
        });
        let before = scores.progress.best_score;
        let found = neighbour.as_ref().map_or(Ok(None), |next| scores.get_or_score(next));
        match (neighbour, found) {
            (_, Err(reason)) => {
                stop_reason = reason;
                break;
            }
            (Some(next), Ok(Some(found))) if before.is_none_or(|before| found < before) => {
                best = next;
                failed_moves = 0;
            }
            _ => {
                index = (index + 1) % moves.len();
                failed_moves += 1;
            }
        }
    }
    let RefineProgress { evaluations, best_score } = scores.progress;
    RefineResult { assignment: best, start_score, best_score, evaluations, stop_reason }
}

struct ScoreCache<S, G> {
    score: S,
    should_continue: G,
    options: RefineOptions,
    known: BTreeMap<Assignment, Option<f64>>,
    progress: RefineProgress,
}

impl<S: FnMut(&Assignment) -> Option<f64>, G: FnMut(RefineProgress) -> bool> ScoreCache<S, G> {
    /// Returns the score of a plan, which is computed only once. Returns an error if the search must stop before that.
    fn get_or_score(&mut self, assignment: &Assignment) -> Result<Option<f64>, StopReason> {
        if let Some(known) = self.known.get(assignment) {
            return Ok(*known);
        }
        if self.options.max_evaluations.is_some_and(|most| self.progress.evaluations >= most) {
            return Err(StopReason::EvaluationLimit);
        }
        if !(self.should_continue)(self.progress) {
            return Err(StopReason::StoppedByCaller);
        }
        // NaN cannot be compared, and an infinite score is never better.
        let score = (self.score)(assignment).filter(|score| score.is_finite());
        self.progress.evaluations += 1;
        self.progress.best_score =
            [self.progress.best_score, score].into_iter().flatten().min_by(f64::total_cmp);
        self.known.insert(assignment.clone(), score);
        Ok(score)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Processor {
    device: usize,
    gpu: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Move {
    /// Increases or decreases the number of rounds, either to the next factor of the number of layers of the model or
    /// by one, and scales the windows accordingly.
    Rounds { more: bool, factors: bool },
    /// Moves one layer of a round to another processor, which may be on the same device. This can drop a device, or add
    /// one. Without `from`, the round gets one layer more; without `to`, one layer fewer.
    Layer { from: Option<Processor>, to: Option<Processor> },
    /// Exchanges the window sizes of two devices.
    Swap { one: usize, other: usize },
    /// Moves all layers of `device` to the device `to`.
    Drop { device: usize, to: usize },
}

fn moves(model: &LatencyModel) -> Vec<Move> {
    let rounds = [(true, true), (false, true), (true, false), (false, false)];
    let mut all: Vec<Move> = rounds.map(|(more, factors)| Move::Rounds { more, factors }).into();
    let devices = 0..model.device_count();
    let processors_of = |device: usize| {
        let has_gpu = model.instance().devices[device].gpu != GpuApi::None;
        [false, true].into_iter().filter(move |gpu| has_gpu || !gpu).map(move |gpu| Processor { device, gpu })
    };
    let processors: Vec<Processor> = devices.clone().flat_map(processors_of).collect();
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
    /// Returns the plan after the move, which may violate constraints; `None` if the move is impossible or without
    /// effect.
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
                let layers_per_round =
                    u32::try_from(next.layers_per_round()).ok().filter(|layers| *layers > 0)?;
                next.rounds = model.model_layers().div_ceil(layers_per_round);
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
        if let Some(order) = &at.ring_order {
            // A device without layers leaves the ring. A new one is inserted where the detour is shortest.
            let mut order = with_missing_devices(model, order.clone());
            order.retain(|device| next.window_layers[*device] > 0);
            next.ring_order = Some(order).filter(|order| order.first() == Some(&next.head));
            next = with_relays(model, next);
        }
        (next != *at).then_some(next)
    }
}

fn next_rounds(at: &Assignment, model: &LatencyModel, more: bool, factors: bool) -> Option<u32> {
    if !factors {
        return if more { at.rounds.checked_add(1) } else { at.rounds.checked_sub(1) };
    }
    let mut valid = valid_rounds(model.model_layers()).into_iter();
    if more { valid.find(|rounds| *rounds > at.rounds) } else { valid.rfind(|rounds| *rounds < at.rounds) }
}

/// Returns the plan with `rounds` rounds; `None` if no windows give this number. Windows keep their ratios (largest
/// remainder method), no window becomes empty, and devices with GPU layers get a new split.
fn rescaled(at: &Assignment, model: &LatencyModel, rounds: u32) -> Option<Assignment> {
    let layers = model.model_layers();
    if rounds == 0 {
        return None;
    }
    let layers_per_round = layers.div_ceil(rounds);
    let used = at.window_layers.iter().filter(|window| **window > 0).count();
    // Not every k has a W: 10 layers take 4 rounds of 3 or 5 rounds of 2, but no W gives 6 rounds.
    if layers.div_ceil(layers_per_round) != rounds || (layers_per_round as usize) < used {
        return None;
    }
    let (new, old) = (u64::from(layers_per_round), at.layers_per_round().max(1));
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
    while next.layers_per_round() != new {
        let used = (0..next.window_layers.len()).filter(|&device| next.window_layers[device] > 0);
        if next.layers_per_round() < new {
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

/// Sets the GPU layers of a device to the fastest split of its window by the latency model, or to 0 if none is allowed.
fn split(next: &mut Assignment, model: &LatencyModel, device: usize) {
    let layers_per_round = next.layers_per_round().clamp(1, u64::from(model.model_layers())) as u32;
    let window =
        RoundWindow::at_start(device, device == next.head, layers_per_round, next.window_layers[device]);
    next.gpu_layers[device] = model.best_split(window).map_or(0, |split| split.gpu_layers);
}

/// The strategy `refine`, which proposes the plan of a local search, so that [`crate::solve()`] explains it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RefinedPlan {
    pub assignment: Assignment,
    /// The name of the strategy whose plan was the start of the local search.
    pub start_strategy: String,
    pub rules: PlanRules,
}

impl Strategy for RefinedPlan {
    fn name(&self) -> &'static str {
        "refine"
    }

    fn rules(&self) -> PlanRules {
        self.rules
    }

    fn options(&self) -> Vec<String> {
        [vec![format!("start={}", self.start_strategy)], self.rules.to_option_strings()].concat()
    }

    fn objective(&self) -> Objective {
        Objective::SteadyState
    }

    fn propose(&self, model: &LatencyModel) -> Result<Proposal, StrategyError> {
        let residencies = best_residencies(model, &self.assignment).unwrap_or_default();
        Ok(Proposal { residencies, ..Proposal::new(self.assignment.clone()) })
    }
}
