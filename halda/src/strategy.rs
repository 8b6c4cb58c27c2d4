//! The trait [`Strategy`], which all planners implement, and the proposals and errors that a strategy returns.
//!
//! A strategy only proposes an assignment. [`crate::solve()`] checks whether the proposal satisfies all constraints
//! ([`Violation`]), evaluates the latency model and explains the plan.

use std::mem::discriminant;

use hearth_schema::residency::ResidencyOptions;

use crate::{Assignment, LatencyModel, MemoryCase, PlanRules, Violation};

/// The latency model whose time per token a strategy minimises and reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Objective {
    /// The prima.cpp paper's latency model, which adds the computation time and the disk read time.
    #[default]
    Paper,
    /// The steady-state model, in which devices read weights ahead ([`crate::latency::steady_state`]).
    SteadyState,
}

/// A planner, which assigns the layers of an instance to its devices.
pub trait Strategy {
    /// Returns the name that selects the strategy, such as `exact`.
    fn name(&self) -> &'static str;

    /// Returns the rules of the strategy's plans. By default devices may be dropped, but no round may be partial.
    fn rules(&self) -> PlanRules {
        PlanRules { may_drop_devices: true, may_have_partial_round: false }
    }

    /// Chooses an assignment. Fails if the instance has no plan, or the strategy's options do not suit the instance.
    fn propose(&self, model: &LatencyModel) -> Result<Proposal, StrategyError>;

    fn objective(&self) -> Objective {
        Objective::Paper
    }

    /// Returns the strategy's options as strings of the form `name=value`, which a plan document records.
    fn options(&self) -> Vec<String> {
        Vec::new()
    }

    /// Returns whether the strategy's plans are optimal under its rules, so their optimality gap is zero.
    fn is_optimal(&self) -> bool {
        false
    }
}

/// An assignment that a strategy proposes, and that has not been checked for violations yet.
#[derive(Debug, Clone, PartialEq)]
pub struct Proposal {
    pub assignment: Assignment,
    /// The residency policy of each device; if empty, each device gets the first policy of its runtime model.
    pub residencies: Vec<ResidencyOptions>,
    /// The outcome for each ring size (layers per round) that was searched; empty if the strategy searches none.
    pub search_steps: Vec<SearchStep>,
    /// What the search skipped; `None` if it skipped nothing.
    pub incomplete_search: Option<IncompleteSearch>,
    /// The risk for which the strategy does not propose the fastest plan; `None` if it proposes the fastest one.
    pub avoided_risk: Option<AvoidedRisk>,
}

/// Why a plan is chosen that is not the fastest in the memory that the devices are described with.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AvoidedRisk {
    /// The seconds per token of the fastest plan in the memory that the devices are described with.
    pub fastest_seconds: f64,
    /// The mean seconds per token of that plan over the memory that the devices may have.
    pub fastest_mean_seconds: f64,
    /// The mean seconds per token of the chosen plan over the memory that the devices may have.
    pub mean_seconds: f64,
}

/// The part of the search space that a strategy skipped because searching it would take too long.
#[derive(Debug, Clone, PartialEq)]
pub struct IncompleteSearch {
    /// Sentences that say what was skipped and why.
    pub notes: Vec<String>,
    /// A lower bound of the seconds per token (T) of all plans; `None` if no skipped plan can be faster.
    pub lower_bound_seconds: Option<f64>,
}

impl Proposal {
    /// Creates a proposal of a strategy that searches no ring sizes (layers per round).
    pub fn new(assignment: Assignment) -> Self {
        Self {
            assignment,
            residencies: Vec::new(),
            search_steps: Vec::new(),
            incomplete_search: None,
            avoided_risk: None,
        }
    }
}

/// The outcome of the search for one ring size (layers per round) with one head device.
#[derive(Debug, Clone, PartialEq)]
pub struct SearchStep {
    pub head: usize,
    pub rounds: u32,
    pub layers_per_round: u32,
    /// The minimum time per token in seconds, or why there is no plan.
    pub outcome: Result<f64, InfeasibleReason>,
}

/// Why a ring size (layers per round) has no plan, or was not searched.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum InfeasibleReason {
    #[error("a round of {layers_per_round} layers cannot give each of {devices} devices a layer")]
    MoreDevicesThanLayers { layers_per_round: u32, devices: usize },
    #[error(
        "`{device}` has too little memory for one layer per round, and its disk is too slow to read weights for \
         every token"
    )]
    NoLayerFits { device: String },
    #[error(
        "a round has {layers_per_round} layers, but only {held} fit in memory, and the disks are too slow to \
         read weights for every token"
    )]
    TooLittleMemory { layers_per_round: u32, held: u32 },
    #[error(
        "links are missing: no ring in this order connects enough devices to hold a round of {layers_per_round} layers"
    )]
    MissingLinks { layers_per_round: u32 },
    #[error(
        "no number of layers per round satisfies the constraints of `{device}` in memory case M{} of the prima.cpp paper",
        case.number()
    )]
    NoWindowInCase { device: String, case: MemoryCase },
    #[error(
        "a round has {layers_per_round} layers, but the memory cases that the search assumes allow \
         at most {held}"
    )]
    CasesAllowTooFewLayers { layers_per_round: u32, held: i64 },
    #[error(
        "a round has {layers_per_round} layers, but the memory cases that the search assumes require \
         at least {least}"
    )]
    CasesRequireMoreLayers { layers_per_round: u32, least: i64 },
    #[error(
        "not searched: by the strategy's objective a token takes at least {bound_seconds} s, and a faster plan is known"
    )]
    Pruned { bound_seconds: f64 },
    #[error("not searched: the limit of {limit} integer programs was reached")]
    LimitReached { limit: usize },
    #[error("the solver HiGHS found no optimum: {reason}")]
    SolverFailed { reason: String },
    #[error("every plan with rounds of {layers_per_round} layers violates a constraint")]
    NoAllowedPlan { layers_per_round: u32 },
}

impl InfeasibleReason {
    /// Returns what to change in the scenario or on the command line.
    pub fn hint(&self) -> &'static str {
        match self {
            Self::MoreDevicesThanLayers { .. } => "remove `planner.keep_all`, or use fewer rounds or devices",
            Self::NoLayerFits { .. } => {
                "give the device more memory, reduce `context`, lower `planner.slow_disk` so that its disk \
                 may be read, or remove `planner.keep_all` so that the device may have no layers"
            }
            Self::TooLittleMemory { .. } => {
                "add devices or memory, reduce `context`, or lower `planner.slow_disk` so that disks may be read"
            }
            Self::MissingLinks { .. } => {
                "let the planner choose the order (`--order best`), or add the missing links to `links.between`"
            }
            Self::NoWindowInCase { .. }
            | Self::CasesAllowTooFewLayers { .. }
            | Self::CasesRequireMoreLayers { .. }
            | Self::SolverFailed { .. } => "use `--strategy exact`, which needs no memory cases",
            Self::Pruned { .. } | Self::LimitReached { .. } => {
                "use `--strategy exact`, which searches all plans"
            }
            Self::NoAllowedPlan { .. } => "add devices or memory, reduce `context`, or use fewer rounds",
        }
    }
}

/// Why a strategy returns no plan.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum StrategyError {
    #[error("no plan exists: {}", reasons(.0))]
    Infeasible(Vec<SearchStep>),
    #[error("the plan of `{strategy}` is not allowed: {}", listed(.violations, ToString::to_string))]
    ConstraintsViolated { strategy: &'static str, violations: Vec<Violation> },
    #[error(
        "{model_layers} layers cannot be divided into {rounds} rounds; valid numbers of rounds are {}",
        numbers(.valid)
    )]
    InvalidRounds { rounds: u32, model_layers: u32, valid: Vec<u32> },
    #[error("there is no device with the index {device}: there are {devices} devices, counted from 0")]
    NoSuchDevice { device: usize, devices: usize },
    #[error("{given} memory sizes were given for {devices} devices")]
    MemorySizeCount { given: usize, devices: usize },
    #[error("no device has any memory, so layers cannot be distributed in proportion to memory")]
    NoMemory,
    #[error(
        "`{strategy}` reads no weights from disk, and only {held} of the {model_layers} layers fit in memory"
    )]
    OutOfMemory { strategy: &'static str, held: u32, model_layers: u32 },
    #[error(
        "`{strategy}` reads no weights from disk, and the head device `{device}` has too little memory for a layer"
    )]
    HeadOutOfMemory { strategy: &'static str, device: String },
    #[error("strategy `{strategy}` needs the HiGHS solver, but this build lacks the feature `highs`")]
    NoSolver { strategy: &'static str },
    #[error("the linear program of `{strategy}` was not solved: {reason}")]
    LinearProgramFailed { strategy: &'static str, reason: String },
    #[error("the search would evaluate {windows:.1e} windows, which exceeds the limit of {limit:.0e}")]
    TooManyWindows { windows: f64, limit: f64 },
    #[error("the search would evaluate {plans:.3e} plans, which exceeds the limit of {limit:.0e}")]
    TooManyPlans { plans: f64, limit: f64 },
}

impl StrategyError {
    /// Returns the error of a strategy that tried a single ring size, with device 0 as the head.
    pub(crate) fn no_plan(rounds: u32, layers_per_round: u32, reason: InfeasibleReason) -> Self {
        Self::Infeasible(vec![SearchStep { head: 0, rounds, layers_per_round, outcome: Err(reason) }])
    }

    /// Returns what to change in the scenario or on the command line.
    pub fn hint(&self) -> &'static str {
        let other_strategy = "try another strategy, such as `overlap`";
        match self {
            Self::Infeasible(steps) => {
                let reasons = || steps.iter().filter_map(|step| step.outcome.as_ref().err());
                // A skipped ring size says nothing about why there is no plan.
                let is_skipped = |reason: &&InfeasibleReason| {
                    matches!(reason, InfeasibleReason::Pruned { .. } | InfeasibleReason::LimitReached { .. })
                };
                let named = reasons().find(|reason| !is_skipped(reason)).or_else(|| reasons().next());
                named.map_or(other_strategy, InfeasibleReason::hint)
            }
            Self::ConstraintsViolated { violations, .. } => {
                violations.first().map_or(other_strategy, Violation::hint)
            }
            Self::InvalidRounds { .. } => "set `--rounds` to a valid number, or omit it",
            Self::NoSuchDevice { .. } => "give the index of a device in the scenario, counted from 0",
            Self::MemorySizeCount { .. } => "give one memory size for each device",
            Self::NoMemory => "set `memory.available` in the device profiles: it is zero in all of them",
            Self::OutOfMemory { .. } => {
                "use a strategy that reads from disk, such as `overlap`, a smaller model, or more devices"
            }
            Self::HeadOutOfMemory { .. } => {
                "set `head: true` on a device with more memory, or use a strategy that reads from disk, such as \
                 `overlap`"
            }
            Self::NoSolver { .. } => {
                "build with `--features highs`, or use another strategy, such as `overlap`"
            }
            Self::LinearProgramFailed { .. } => other_strategy,
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

fn numbers(all: &[u32]) -> String {
    all.iter().map(u32::to_string).collect::<Vec<_>>().join(", ")
}

/// Formats why no search step has a plan: each kind of reason once, with the numbers of rounds (k) that it applies to.
fn reasons(steps: &[SearchStep]) -> String {
    let mut kinds: Vec<(&InfeasibleReason, Vec<u32>)> = Vec::new();
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
            format!("k = {first}: {reason} (also for k = {})", numbers(more))
        }
        rounds => format!("k = {}: {reason}", rounds.first().copied().unwrap_or_default()),
    })
}
