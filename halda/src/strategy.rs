//! How does a planner turn an instance into a plan that can be trusted?
//!
//! A strategy only proposes an assignment. [`solve`] does the rest the same way for all of them: it checks
//! the named constraints, evaluates the one latency model, and explains. So the law that every strategy
//! obeys (the returned plan satisfies the constraints, its T is the re-evaluated one) holds by construction,
//! and a proposal that breaks a constraint becomes a refusal naming it.
//!
//! Not here: any particular strategy.

use crate::assignment::Assignment;
use crate::coefficients::MemoryCase;
use crate::constraints::{Rules, Violation, violations};
use crate::explanation::Explanation;
use crate::latency::{Breakdown, LatencyModel};

/// A way to choose an assignment.
pub trait Strategy {
    /// The name it is selected by.
    fn name(&self) -> &'static str;

    /// Which optional rules its plans follow.
    fn rules(&self) -> Rules;

    /// The assignment it would use, and what it looked at.
    fn propose(&self, model: &LatencyModel) -> Result<Proposal, Refusal>;

    /// What it was told, as `name=value`, for the record in a plan.
    fn options(&self) -> Vec<String> {
        Vec::new()
    }

    /// Whether nothing better exists under its rules, so that its gap is zero without another search.
    fn is_optimal(&self) -> bool {
        false
    }
}

/// What a strategy comes up with.
#[derive(Debug, Clone, PartialEq)]
pub struct Proposal {
    /// The assignment.
    pub assignment: Assignment,
    /// Every ring size that was searched and what it gave; empty if there was only one.
    pub searched: Vec<SearchStep>,
}

impl Proposal {
    /// An assignment that was found without a search over ring sizes.
    pub fn of(assignment: Assignment) -> Self {
        Self { assignment, searched: Vec::new() }
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
    /// W < M and nobody may be dropped.
    #[error("a turn of {ring_layers} layers cannot give each of {devices} devices one")]
    MoreDevicesThanLayers {
        /// W.
        ring_layers: u32,
        /// Devices that must have a layer.
        devices: usize,
    },
    /// A device that must have a window cannot hold the smallest one.
    #[error("`{device}` has a slow disk and cannot hold one layer of a turn")]
    HoldsNothing {
        /// The device.
        device: String,
    },
    /// All disks are slow and memory ends before the model does.
    #[error("all disks are slow and a turn of {ring_layers} layers exceeds the {held} that memory holds")]
    HoldsTooLittle {
        /// W.
        ring_layers: u32,
        /// Layers of a turn that all devices hold together.
        held: u32,
    },
    /// With the memory cases under trial one device suits no window.
    #[error("`{device}` has no window in memory case M{}", case.set())]
    CaseHoldsNothing {
        /// The device.
        device: String,
        /// The case that it was to be in.
        case: MemoryCase,
    },
    /// With the memory cases under trial the windows are too small together.
    #[error("a turn of {ring_layers} layers exceeds the {held} that the memory cases under trial allow")]
    CasesHoldTooLittle {
        /// W.
        ring_layers: u32,
        /// Layers of a turn at most.
        held: i64,
    },
    /// With the memory cases under trial the windows are too large together.
    #[error(
        "a turn of {ring_layers} layers is less than the {least} that the memory cases under trial ask for"
    )]
    CasesNeedMore {
        /// W.
        ring_layers: u32,
        /// Layers of a turn at least.
        least: i64,
    },
    /// It was not searched, because a bound shows that it cannot be the answer.
    #[error("not searched: it takes at least {bound} s by the strategy's objective, and less is known")]
    NoBetter {
        /// The bound in seconds.
        bound: f64,
    },
    /// The strategy had tried as much as it tries.
    #[error("not searched: the limit of {limit} integer programmes was reached")]
    NotReached {
        /// The limit.
        limit: usize,
    },
    /// The solver of integer programmes gave no answer.
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

/// Why a strategy returns no plan.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Refusal {
    /// Nothing searched is feasible.
    #[error("no plan exists: {}", listed(.0, describe))]
    Infeasible(Vec<SearchStep>),
    /// The strategy's only answer is not allowed.
    #[error("the plan of `{strategy}` is not allowed: {}", listed(.violations, ToString::to_string))]
    Breaks {
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
    /// Trying every plan would take too long.
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

fn describe(step: &SearchStep) -> String {
    match &step.outcome {
        Ok(seconds) => format!("k = {}: {seconds} s", step.rounds),
        Err(reason) => format!("k = {}: {reason}", step.rounds),
    }
}

/// A plan with its time and its reasons.
#[derive(Debug, Clone, PartialEq)]
pub struct Solution {
    /// The strategy that chose it.
    pub strategy: &'static str,
    /// What that strategy was told.
    pub options: Vec<String>,
    /// The plan.
    pub assignment: Assignment,
    /// Its time, by the latency model.
    pub breakdown: Breakdown,
    /// Why it looks as it does.
    pub explanation: Explanation,
}

impl Solution {
    /// T.
    pub fn seconds(&self) -> f64 {
        self.breakdown.seconds
    }
}

/// Lets a strategy choose, checks and evaluates what it chose, and explains it.
pub fn solve(strategy: &dyn Strategy, model: &LatencyModel) -> Result<Solution, Refusal> {
    let Proposal { assignment, mut searched } = strategy.propose(model)?;
    let rules = strategy.rules();
    let mut broken = violations(model, &assignment, rules);
    if broken.is_empty() {
        match model.evaluate(&assignment) {
            Ok(breakdown) => {
                if searched.is_empty() {
                    searched.push(SearchStep {
                        head: assignment.head,
                        rounds: assignment.rounds,
                        ring_layers: assignment.ring_layers() as u32,
                        outcome: Ok(breakdown.seconds),
                    });
                }
                let optimum = strategy.is_optimal().then_some(breakdown.seconds);
                let explanation = Explanation::new(model, &assignment, &breakdown, rules, searched, optimum);
                return Ok(Solution {
                    strategy: strategy.name(),
                    options: strategy.options(),
                    assignment,
                    breakdown,
                    explanation,
                });
            }
            Err(violation) => broken.push(violation),
        }
    }
    Err(Refusal::Breaks { strategy: strategy.name(), violations: broken })
}
