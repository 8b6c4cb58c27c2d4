//! The trait of a strategy, what it proposes, and why it may have no plan.
//!
//! A strategy only proposes an assignment. [`crate::solve()`] does the rest the same way for all of them: it checks
//! the named constraints, evaluates the one latency model, and explains. So the law that every strategy
//! obeys (the returned plan satisfies the constraints, its T is the re-evaluated one) holds by construction,
//! and a proposal that breaks a constraint becomes a refusal naming it.
//!
//! Not here: any particular strategy.

use std::mem::discriminant;

use hearth_schema::residency::ResidencyOptions;

use crate::latency::LatencyModel;
use crate::latency::coefficients::MemoryCase;
use crate::latency::constraints::{Rules, Violation};
use crate::problem::assignment::Assignment;

/// What a strategy minimises, and by what its plans are reported.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Objective {
    /// The paper's latency model: computing and reading add up.
    #[default]
    Paper,
    /// The steady state with reading ahead ([`crate::latency::steady_state`]).
    SteadyState,
}

/// A planner: chooses an assignment for an instance.
pub trait Strategy {
    /// The name it is selected by.
    fn name(&self) -> &'static str;

    /// Which optional rules its plans follow.
    fn rules(&self) -> Rules;

    /// The assignment it would use, and what it looked at.
    fn propose(&self, model: &LatencyModel) -> Result<Proposal, StrategyError>;

    /// What it minimises.
    fn objective(&self) -> Objective {
        Objective::Paper
    }

    /// The options it was given, as `name=value`, for the record in a plan.
    fn options(&self) -> Vec<String> {
        Vec::new()
    }

    /// Whether nothing better exists under its rules, so that its gap is zero without another search.
    fn is_optimal(&self) -> bool {
        false
    }
}

/// What a strategy proposes.
#[derive(Debug, Clone, PartialEq)]
pub struct Proposal {
    /// The assignment.
    pub assignment: Assignment,
    /// How each device keeps its weights; empty for the first way that each allows.
    pub residencies: Vec<ResidencyOptions>,
    /// Every ring size that was searched and what it gave; empty if there was only one.
    pub searched: Vec<SearchStep>,
    /// Where the search was limited: a T that no plan can be under, and sentences that say what was left out.
    pub limit: Option<SearchLimit>,
}

/// How far a search was limited because all of it would take too long.
#[derive(Debug, Clone, PartialEq)]
pub struct SearchLimit {
    /// What was left out, and by what rule, in sentences.
    pub notes: Vec<String>,
    /// A T in seconds that no plan can be under; absent if what was left out cannot be faster.
    pub lower_bound: Option<f64>,
}

impl Proposal {
    /// An assignment that was found without a search over ring sizes.
    pub fn of(assignment: Assignment) -> Self {
        Self::searched(assignment, Vec::new())
    }

    /// The best of several ring sizes.
    pub fn searched(assignment: Assignment, searched: Vec<SearchStep>) -> Self {
        Self { assignment, residencies: Vec::new(), searched, limit: None }
    }
}

/// One ring size and the best token time on it.
#[derive(Debug, Clone, PartialEq)]
pub struct SearchStep {
    /// The head during this step.
    pub head: usize,
    /// k.
    pub rounds: u32,
    /// W.
    pub ring_layers: u32,
    /// Best T in seconds, or why there is none.
    pub outcome: Result<f64, Infeasible>,
}

/// Why a search has no assignment of a given ring size.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Infeasible {
    /// W < M and no device may be dropped.
    #[error("a turn of {ring_layers} layers cannot give each of {devices} devices one")]
    MoreDevicesThanLayers {
        /// W.
        ring_layers: u32,
        /// Devices that must have a layer.
        devices: usize,
    },
    /// A device that must have a window cannot hold the smallest one.
    #[error("`{device}` cannot hold one layer of a turn, and its disk may not make up for it")]
    NoLayerFits {
        /// The device.
        device: String,
    },
    /// All disks are slow and memory ends before the model does.
    #[error(
        "a turn of {ring_layers} layers exceeds the {held} that memory holds, and disks may not make up for it"
    )]
    TooLittleMemory {
        /// W.
        ring_layers: u32,
        /// Layers of a round that all devices hold together.
        held: u32,
    },
    /// Enough devices hold enough, but no ring leads through them.
    #[error(
        "no ring in this order connects devices that hold a turn of {ring_layers} layers: links are missing, and \
         another order may do"
    )]
    NoRoute {
        /// W.
        ring_layers: u32,
    },
    /// With the memory cases under trial one device suits no window.
    #[error("`{device}` has no window in memory case M{}", case.set())]
    NoWindowInCase {
        /// The device.
        device: String,
        /// The case that it was to be in.
        case: MemoryCase,
    },
    /// With the memory cases under trial the windows are too small together.
    #[error("a turn of {ring_layers} layers exceeds the {held} that the memory cases under trial allow")]
    CasesAllowTooFewLayers {
        /// W.
        ring_layers: u32,
        /// Layers of a round at most.
        held: i64,
    },
    /// With the memory cases under trial the windows are too large together.
    #[error(
        "a turn of {ring_layers} layers is less than the {least} that the memory cases under trial ask for"
    )]
    CasesRequireMoreLayers {
        /// W.
        ring_layers: u32,
        /// Layers of a round at least.
        least: i64,
    },
    /// It was not searched, because a bound shows that it cannot be the answer.
    #[error("not searched: it takes at least {bound} s by the strategy's objective, and less is known")]
    Pruned {
        /// The bound in seconds.
        bound: f64,
    },
    /// The strategy had tried as much as it tries.
    #[error("not searched: the limit of {limit} integer programs was reached")]
    LimitReached {
        /// The limit.
        limit: usize,
    },
    /// The solver of integer programs gave no answer.
    #[error("HiGHS found no optimum: {reason}")]
    Solver {
        /// What it said.
        reason: String,
    },
    /// Every plan breaks a constraint, and not all the same one.
    #[error("every plan of a turn of {ring_layers} layers breaks a constraint")]
    NothingAllowed {
        /// W.
        ring_layers: u32,
    },
}

/// The reason why a strategy returns no plan.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum StrategyError {
    /// Nothing searched is feasible.
    #[error("no plan exists: {}", reasons(.0))]
    Infeasible(Vec<SearchStep>),
    /// The strategy's only answer is not allowed.
    #[error("the plan of `{strategy}` is not allowed: {}", listed(.violations, ToString::to_string))]
    ConstraintsViolated {
        /// The strategy.
        strategy: &'static str,
        /// What its plan breaks.
        violations: Vec<Violation>,
    },
    /// The rounds asked for are not among those that can be used.
    #[error("{model_layers} layers cannot be spread over {rounds} rounds here: use one of {valid:?}")]
    Rounds {
        /// k asked for.
        rounds: u32,
        /// L.
        model_layers: u32,
        /// The k that can be used.
        valid: Vec<u32>,
    },
    /// A device was named that does not exist.
    #[error("device {device} was named and there are {devices} devices, counted from 0")]
    NoSuchDevice {
        /// The index.
        device: usize,
        /// M.
        devices: usize,
    },
    /// One number a device was expected.
    #[error("{given} memory sizes were given for {devices} devices")]
    MemoryCount {
        /// How many were given.
        given: usize,
        /// M.
        devices: usize,
    },
    /// There is nothing to be proportional to.
    #[error("no device has memory to be proportional to")]
    NoMemory,
    /// The strategy keeps all weights in memory, and memory ends before the model does.
    #[error("`{strategy}` reads no weights from disk, and memory holds {held} of the {model_layers} layers")]
    OutOfMemory {
        /// The strategy.
        strategy: &'static str,
        /// Layers that find room.
        held: u32,
        /// L.
        model_layers: u32,
    },
    /// The strategy keeps all weights in memory, and the head's holds no layer.
    #[error(
        "`{strategy}` reads no weights from disk, and the memory of the head, `{device}`, holds no layer"
    )]
    HeadOutOfMemory {
        /// The strategy.
        strategy: &'static str,
        /// The head.
        device: String,
    },
    /// The strategy needs a solver that was left out of this build.
    #[error("strategy `{strategy}` needs the HiGHS solver, and this build is without the feature `highs`")]
    NoSolver {
        /// The strategy.
        strategy: &'static str,
    },
    /// A solver gave up.
    #[error("the linear program of `{strategy}` was not solved: {reason}")]
    Unsolved {
        /// The strategy.
        strategy: &'static str,
        /// What the solver says.
        reason: String,
    },
    /// A search that looks at every window would take too long.
    #[error(
        "{cells:.1e} windows at different places are too many to look at: the limit is {limit:.0e}; use fewer devices, \
         or strategy `exact`"
    )]
    TooManyWindows {
        /// How many there are.
        cells: f64,
        /// How many are looked at most.
        limit: f64,
    },
    /// Trying every plan takes too long.
    #[error("{plans:.3e} plans are too many to try one by one: the limit is {limit:.0e}")]
    TooManyPlans {
        /// How many there are.
        plans: f64,
        /// How many are tried at most.
        limit: f64,
    },
}

fn listed<T>(items: &[T], describe: impl Fn(&T) -> String) -> String {
    items.iter().map(describe).collect::<Vec<_>>().join("; ")
}

/// Why no step has a plan: each sort of reason once, as it is of the first step, and of which others it is.
fn reasons(steps: &[SearchStep]) -> String {
    let mut said: Vec<(&Infeasible, Vec<u32>)> = Vec::new();
    for step in steps {
        let Err(reason) = &step.outcome else { continue };
        match said.iter_mut().find(|(known, _)| discriminant(*known) == discriminant(reason)) {
            Some((_, rounds)) if rounds.contains(&step.rounds) => {}
            Some((_, rounds)) => rounds.push(step.rounds),
            None => said.push((reason, vec![step.rounds])),
        }
    }
    listed(&said, |(reason, rounds)| match rounds.as_slice() {
        [first, more @ ..] if !more.is_empty() => {
            let more: Vec<String> = more.iter().map(u32::to_string).collect();
            format!("k = {first}: {reason} (the like for k = {})", more.join(", "))
        }
        rounds => format!("k = {}: {reason}", rounds.first().copied().unwrap_or_default()),
    })
}
