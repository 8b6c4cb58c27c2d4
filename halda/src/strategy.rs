//! The `Strategy` trait, its proposals, and the errors of a strategy without a plan.
//!
//! A strategy only proposes an assignment. [`crate::solve()`] checks the named constraints, evaluates the latency
//! model and explains the plan in the same way for all of them, so every returned plan satisfies the constraints and
//! has a re-evaluated T. A proposal that breaks a constraint is an error naming it.

use std::mem::discriminant;

use hearth_schema::residency::ResidencyOptions;

use crate::latency::LatencyModel;
use crate::latency::coefficients::MemoryCase;
use crate::latency::constraints::{Rules, Violation};
use crate::problem::assignment::Assignment;

/// The time that a strategy minimises and reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Objective {
    /// The paper's latency model: computing and reading are added.
    #[default]
    Paper,
    /// The steady state with reading ahead ([`crate::latency::steady_state`]).
    SteadyState,
}

/// A planner: chooses an assignment for an instance.
pub trait Strategy {
    /// Returns the name by which it is selected.
    fn name(&self) -> &'static str;

    /// Returns the optional rules of its plans: by default devices may be dropped and all rounds are whole.
    fn rules(&self) -> Rules {
        Rules { may_drop: true, may_leave_remainder: false }
    }

    /// Chooses an assignment.
    fn propose(&self, model: &LatencyModel) -> Result<Proposal, StrategyError>;

    fn objective(&self) -> Objective {
        Objective::Paper
    }

    /// Returns its options as `name=value`, for the record in a plan.
    fn options(&self) -> Vec<String> {
        Vec::new()
    }

    /// Returns whether its plans are optimal under its rules, so that the gap is zero without another search.
    fn is_optimal(&self) -> bool {
        false
    }
}

#[derive(Debug, Clone, PartialEq)]
pub struct Proposal {
    pub assignment: Assignment,
    /// The residency of each device; if empty, the first one that each device allows.
    pub residencies: Vec<ResidencyOptions>,
    /// Every ring size searched with its outcome; empty if there was only one.
    pub searched: Vec<SearchStep>,
    /// Set if the search was limited.
    pub limit: Option<SearchLimit>,
}

/// The part of the search space that was skipped because it would take too long.
#[derive(Debug, Clone, PartialEq)]
pub struct SearchLimit {
    /// Sentences about what was left out, and by what rule.
    pub notes: Vec<String>,
    /// A lower bound of T in seconds; absent if what was left out cannot be faster.
    pub lower_bound: Option<f64>,
}

impl Proposal {
    /// Returns a proposal that was found without a search over ring sizes.
    pub fn of(assignment: Assignment) -> Self {
        Self::searched(assignment, Vec::new())
    }

    pub fn searched(assignment: Assignment, searched: Vec<SearchStep>) -> Self {
        Self { assignment, residencies: Vec::new(), searched, limit: None }
    }
}

#[derive(Debug, Clone, PartialEq)]
pub struct SearchStep {
    pub head: usize,
    pub rounds: u32,
    pub ring_layers: u32,
    /// The best T in seconds, or why there is none.
    pub outcome: Result<f64, Infeasible>,
}

#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Infeasible {
    #[error("a round of {ring_layers} layers cannot give each of {devices} devices a layer")]
    MoreDevicesThanLayers { ring_layers: u32, devices: usize },
    #[error(
        "the memory of `{device}` does not hold one layer of a round, and its disk is too slow to be read for every token"
    )]
    NoLayerFits { device: String },
    #[error(
        "a round has {ring_layers} layers, memory holds {held}, and the disks are too slow to be read for every token"
    )]
    TooLittleMemory { ring_layers: u32, held: u32 },
    #[error(
        "links are missing: no ring in this order connects devices that hold a round of {ring_layers} layers"
    )]
    NoRoute { ring_layers: u32 },
    #[error("`{device}` has no window in memory case M{}", case.set())]
    NoWindowInCase { device: String, case: MemoryCase },
    #[error("a round has {ring_layers} layers, and the memory cases under trial allow at most {held}")]
    CasesAllowTooFewLayers { ring_layers: u32, held: i64 },
    #[error("a round has {ring_layers} layers, and the memory cases under trial require at least {least}")]
    CasesRequireMoreLayers { ring_layers: u32, least: i64 },
    #[error(
        "not searched: by the strategy's objective it takes at least {bound} s, and a faster plan is known"
    )]
    Pruned { bound: f64 },
    #[error("not searched: the limit of {limit} integer programs was reached")]
    LimitReached { limit: usize },
    #[error("HiGHS found no optimum: {reason}")]
    Solver { reason: String },
    #[error("every plan with rounds of {ring_layers} layers breaks a constraint")]
    NothingAllowed { ring_layers: u32 },
}

impl Infeasible {
    /// Returns whether the ring size was not searched because of another result.
    fn is_skipped(&self) -> bool {
        matches!(self, Self::Pruned { .. } | Self::LimitReached { .. })
    }

    /// Returns what to change in the scenario or on the command line.
    pub fn hint(&self) -> &'static str {
        match self {
            Self::MoreDevicesThanLayers { .. } => "leave `keep_all` out, use fewer rounds, or fewer devices",
            Self::NoLayerFits { .. } => {
                "give it more memory, shorten `context`, lower `planner.slow_disk` so that its disk may be read, or leave \
                 `keep_all` out, if it is given, so that the device may stay idle"
            }
            Self::TooLittleMemory { .. } => {
                "add devices or memory, shorten `context`, or lower `planner.slow_disk` so that disks may be read"
            }
            Self::NoRoute { .. } => {
                "let the planner choose the order, `--order best`, or complete `links.between`"
            }
            Self::NoWindowInCase { .. }
            | Self::CasesAllowTooFewLayers { .. }
            | Self::CasesRequireMoreLayers { .. }
            | Self::Solver { .. } => "use `--strategy exact`, which needs no memory cases",
            Self::Pruned { .. } | Self::LimitReached { .. } => {
                "use `--strategy exact`, which searches all plans"
            }
            Self::NothingAllowed { .. } => "add devices or memory, shorten `context`, or use fewer rounds",
        }
    }
}

#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum StrategyError {
    #[error("no plan exists: {}", reasons(.0))]
    Infeasible(Vec<SearchStep>),
    #[error("the plan of `{strategy}` is not allowed: {}", listed(.violations, ToString::to_string))]
    ConstraintsViolated { strategy: &'static str, violations: Vec<Violation> },
    #[error("{model_layers} layers cannot be divided into {rounds} rounds; valid numbers are {valid:?}")]
    Rounds { rounds: u32, model_layers: u32, valid: Vec<u32> },
    #[error("there is no device {device}: there are {devices} devices, counted from 0")]
    NoSuchDevice { device: usize, devices: usize },
    #[error("{given} memory sizes were given for {devices} devices")]
    MemoryCount { given: usize, devices: usize },
    #[error("no device has any memory, so layers cannot be distributed in proportion to it")]
    NoMemory,
    #[error("`{strategy}` reads no weights from disk, and memory holds {held} of the {model_layers} layers")]
    OutOfMemory { strategy: &'static str, held: u32, model_layers: u32 },
    #[error(
        "`{strategy}` reads no weights from disk, and the memory of the head, `{device}`, holds no layer"
    )]
    HeadOutOfMemory { strategy: &'static str, device: String },
    #[error("strategy `{strategy}` needs the HiGHS solver, and this build is without the feature `highs`")]
    NoSolver { strategy: &'static str },
    #[error("the linear program of `{strategy}` was not solved: {reason}")]
    Unsolved { strategy: &'static str, reason: String },
    #[error("{cells:.1e} windows at different places are too many to evaluate: the limit is {limit:.0e}")]
    TooManyWindows { cells: f64, limit: f64 },
    #[error("{plans:.3e} plans are too many to enumerate: the limit is {limit:.0e}")]
    TooManyPlans { plans: f64, limit: f64 },
}

impl StrategyError {
    /// Returns what to change in the scenario or on the command line.
    pub fn hint(&self) -> &'static str {
        match self {
            Self::Infeasible(steps) => {
                let reasons = || steps.iter().filter_map(|step| step.outcome.as_ref().err());
                // What was not searched because of something else is not the reason.
                let named = reasons().find(|reason| !reason.is_skipped()).or_else(|| reasons().next());
                named.map_or("try another strategy, such as `overlap`", Infeasible::hint)
            }
            Self::ConstraintsViolated { violations, .. } => {
                violations.first().map_or("try another strategy, such as `overlap`", Violation::hint)
            }
            Self::Rounds { .. } => {
                "give one of these to `--rounds`, or leave it out and let the planner choose"
            }
            Self::NoSuchDevice { .. } => "name one of the scenario's devices, counted from 0",
            Self::MemoryCount { .. } => "give one memory size for each device",
            Self::NoMemory => "check `memory.available` of the devices: none of them has any",
            Self::OutOfMemory { .. } => {
                "use a strategy that reads from disk, such as `overlap`, a smaller model, or more devices"
            }
            Self::HeadOutOfMemory { .. } => {
                "write `head: true` at a device with more memory, or use a strategy that reads from disk, such as `overlap`"
            }
            Self::NoSolver { .. } => {
                "build with `--features highs`, or use another strategy, such as `overlap`"
            }
            Self::Unsolved { .. } => "try another strategy, such as `overlap`",
            Self::TooManyWindows { .. } => {
                "use fewer devices, or `--strategy exact`, which does not try every window"
            }
            Self::TooManyPlans { .. } => "use `--strategy overlap` or `exact`, which do not try every plan",
        }
    }
}

fn listed<T>(items: &[T], describe: impl Fn(&T) -> String) -> String {
    items.iter().map(describe).collect::<Vec<_>>().join("; ")
}

/// Formats why no step has a plan: each kind of reason once, with its first step, and the k of the others.
fn reasons(steps: &[SearchStep]) -> String {
    let mut kinds: Vec<(&Infeasible, Vec<u32>)> = Vec::new();
    for step in steps {
        let Err(reason) = &step.outcome else { continue };
        match kinds.iter_mut().find(|(known, _)| discriminant(*known) == discriminant(reason)) {
            Some((_, rounds)) if rounds.contains(&step.rounds) => {}
            Some((_, rounds)) => rounds.push(step.rounds),
            None => kinds.push((reason, vec![step.rounds])),
        }
    }
    listed(&kinds, |(reason, rounds)| match rounds.as_slice() {
        [first, more @ ..] if !more.is_empty() => {
            let more: Vec<String> = more.iter().map(u32::to_string).collect();
            format!("k = {first}: {reason} (also for k = {})", more.join(", "))
        }
        rounds => format!("k = {}: {reason}", rounds.first().copied().unwrap_or_default()),
    })
}
