//! Why does a plan look the way it does, and what would it take to change it?
//!
//! Answers, for a finished plan: the best time at every k that was searched; on each device the constraint
//! that stops it from taking more, and what one more layer there would cost; for each device left out, how
//! much slower the best plan that uses it would be; and how far the plan is from the optimum.
//!
//! Not here: wording. The command line and the reports render these.

use crate::assignment::{Assignment, Share, ring_order};
use crate::constraints::Rules;
use crate::exact::{Exact, HeadChoice, OrderChoice, evaluated};
use crate::gpu_split::Turns;
use crate::latency::{Breakdown, DeviceTerms, LatencyModel};
use crate::programme::SizedProblem;
use crate::strategy::{Infeasible, SearchLimit, SearchStep, Strategy};
use crate::tour::with_all;

/// The reasons behind a plan.
#[derive(Debug, Clone, PartialEq)]
pub struct Explanation {
    /// Best T by ring size (that is, by k), as far as the strategy searched.
    pub searched: Vec<SearchStep>,
    /// One entry a device, in the instance's order.
    pub devices: Vec<DeviceExplanation>,
    /// The fastest T with the same head, devices dropped freely; for `exact` its own T under its own rules.
    pub optimum: Option<f64>,
    /// T / optimum - 1.
    pub gap: Option<f64>,
    /// Present if the strategy did not look at everything that its rules allow.
    pub limit: Option<SearchLimit>,
}

/// The reasons behind one device's share.
#[derive(Debug, Clone, PartialEq)]
pub struct DeviceExplanation {
    /// Its name.
    pub name: String,
    /// What holds it where it is.
    pub binding: Vec<Binding>,
    /// Seconds a token gains if its window grows by one layer (k layers of the model) with the best split,
    /// everything else equal; `None` if that is not allowed. A cost on this device only: somewhere else a
    /// window shrinks.
    pub one_more_layer: Option<f64>,
    /// Present if the device has no layers.
    pub dropped: Option<Dropped>,
    /// Present if it is in the ring all the same, to pass on.
    pub relay: Option<Relayed>,
}

/// Whom a relay stands between.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Relayed {
    /// Who sends to it.
    pub from: String,
    /// Whom it sends to.
    pub to: String,
    /// Whether these two could talk directly, only slower.
    pub reachable: bool,
}

/// What limits a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, serde::Serialize)]
pub enum Binding {
    /// It has one layer because everybody must have one.
    SmallestWindow,
    /// GPU memory holds no further layer, and CPU layers exist.
    GpuMemory,
    /// It fits; one more layer would make it read from disk for every token.
    Memory,
    /// It reads from disk for every token already.
    Overloaded,
    /// One more layer would need a disk that is too slow to be used.
    SlowDisk,
}

/// Why a device has no layers.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Dropped {
    /// The best plan that gives it a layer, at the same k and head, takes this many seconds more than the
    /// plan (less, if negative: then a heuristic dropped it wrongly). If the plan has an order of its own, the
    /// device is tried at its cheapest place in it.
    Slower(f64),
    /// No ring leads through it.
    OutOfReach,
    /// Its disk is slow and not one layer of a turn fits its memory.
    HoldsNothing,
    /// A turn has no layer to spare for it.
    NoLayerLeft,
}

impl Explanation {
    /// Explains a checked plan. `optimum` is given by a strategy that has found it.
    pub(crate) fn new(
        model: &LatencyModel,
        assignment: &Assignment,
        breakdown: &Breakdown,
        rules: Rules,
        searched: Vec<SearchStep>,
        optimum: Option<f64>,
    ) -> Self {
        let optimum = optimum.or_else(|| {
            let rules = Rules { may_drop: true, ..rules };
            let head = HeadChoice::Fixed(assignment.head);
            let order = if assignment.order.is_some() { OrderChoice::Best } else { OrderChoice::Given };
            // A single round is never slower than more.
            let proposal = Exact { rules, head, rounds: Some(1), order }.propose(model).ok()?;
            let limited = proposal.limit.is_some_and(|limit| limit.lower_bound.is_some());
            (!limited).then(|| evaluated(model, &proposal.assignment))
        });
        let gap = optimum.filter(|optimum| *optimum > 0.0).map(|optimum| breakdown.seconds / optimum - 1.0);
        let devices = (0..model.device_count())
            .map(|device| explain_device(model, assignment, breakdown, rules, device))
            .collect();
        Self { searched, devices, optimum, gap, limit: None }
    }
}

fn explain_device(
    model: &LatencyModel,
    assignment: &Assignment,
    breakdown: &Breakdown,
    rules: Rules,
    device: usize,
) -> DeviceExplanation {
    let terms = &breakdown.devices[device];
    let head = device == assignment.head;
    let window = assignment.window_layers[device];
    let turns = turns_of(model, assignment, device);
    let grown = model.best_split(device, head, window + 1, turns);
    let binding =
        if window == 0 { Vec::new() } else { bindings(model, assignment, terms, rules, device, turns) };
    DeviceExplanation {
        name: model.instance().devices[device].name.clone(),
        binding,
        // Hops are left out where they are not the device's own.
        one_more_layer: grown.map(|split| split.seconds - model.terms(device, head, terms.share).seconds()),
        dropped: (window == 0).then(|| why_dropped(model, assignment, breakdown.seconds, device)),
        relay: assignment.is_relay(device).then(|| relayed(model, assignment, device)),
    }
}

fn relayed(model: &LatencyModel, assignment: &Assignment, device: usize) -> Relayed {
    let ring = assignment.ring();
    let place = ring.iter().position(|other| *other == device).unwrap_or(0);
    let (before, after) = (ring[(place + ring.len() - 1) % ring.len()], ring[(place + 1) % ring.len()]);
    let name = |device: usize| model.instance().devices[device].name.clone();
    let reachable = model.hops.seconds(before, after) < f64::INFINITY;
    Relayed { from: name(before), to: name(after), reachable }
}

/// The turns as they reach a device, for what-if questions about its window.
fn turns_of(model: &LatencyModel, assignment: &Assignment, device: usize) -> Turns {
    let ring_layers = assignment.ring_layers() as u32;
    let order = match &assignment.order {
        Some(order) => order.clone(),
        None => ring_order(assignment.head, model.device_count()).collect(),
    };
    let placed: u32 =
        order.into_iter().take_while(|other| *other != device).map(|d| assignment.window_layers[d]).sum();
    let rest = (model.model_layers() % ring_layers).saturating_sub(placed);
    Turns { rounds: model.model_layers() / ring_layers, rest }
}

fn bindings(
    model: &LatencyModel,
    assignment: &Assignment,
    terms: &DeviceTerms,
    rules: Rules,
    device: usize,
    turns: Turns,
) -> Vec<Binding> {
    let head = device == assignment.head;
    let window = assignment.window_layers[device];
    let gpu = assignment.gpu_layers[device];
    let grown = model.best_split(device, head, window + 1, turns);
    let mut found = Vec::new();
    if window == 1 && (head || !rules.may_drop) {
        found.push(Binding::SmallestWindow);
    }
    let most = model.most_gpu_layers(device, head, window + 1, turns);
    if most > 0 && gpu == most && gpu <= window {
        found.push(Binding::GpuMemory);
    }
    match grown {
        None => found.push(Binding::SlowDisk),
        Some(_) if terms.over => found.push(Binding::Overloaded),
        Some(split) => {
            let share = Share::new(window + 1, split.gpu_layers, turns.rounds, turns.rest);
            if model.terms(device, head, share).over {
                found.push(Binding::Memory);
            }
        }
    }
    found
}

fn why_dropped(model: &LatencyModel, assignment: &Assignment, seconds: f64, device: usize) -> Dropped {
    let mut least_windows = vec![0; model.device_count()];
    least_windows[assignment.head] = 1;
    least_windows[device] = 1;
    let ring_layers = assignment.ring_layers() as u32;
    if ring_layers < 2 {
        return Dropped::NoLayerLeft;
    }
    let order: Vec<usize> = match &assignment.order {
        Some(order) => with_all(model, order.clone()),
        None => ring_order(assignment.head, model.device_count()).collect(),
    };
    let problem = SizedProblem { model, order: &order, ring_layers, least_windows: &least_windows };
    match problem.optimum() {
        Ok(with_it) => Dropped::Slower(evaluated(model, &with_it) - seconds),
        Err(Infeasible::NoRing { .. }) => Dropped::OutOfReach,
        Err(_) => Dropped::HoldsNothing,
    }
}
