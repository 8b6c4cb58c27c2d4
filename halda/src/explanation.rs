//! The reasons behind a plan: binding constraints, dropped devices, and the gap to the optimum.
//!
//! For a finished plan: the best time at every k that was searched; the constraints that keep each device from taking
//! more layers, and the cost of one more; for each dropped device, how much slower the best plan with it is; and how
//! far the plan is from the optimum. The wording is in `plan_document::reasons`.

use crate::latency::constraints::Rules;
use crate::latency::gpu_split::RoundCounts;
use crate::latency::steady_state::Place;
use crate::latency::{Breakdown, LatencyModel};
use crate::problem::assignment::{Assignment, Share, ring_order};
use crate::solvers::dynamic_program::RingSizeProblem;
use crate::solvers::exact::Exact;
use crate::solvers::overlap::{ChoiceTables, Overlap, best_choice, fastest};
use crate::solvers::search_space::{HeadChoice, OrderChoice};
use crate::solvers::shortest_cycle::with_missing_devices;
use crate::strategy::{Infeasible, Objective, Proposal, SearchLimit, SearchStep, Strategy};

#[derive(Debug, Clone, PartialEq)]
pub struct Explanation {
    /// The best T by ring size, that is by k, for the sizes that the strategy searched.
    pub searched: Vec<SearchStep>,
    /// One entry per device, in the instance's order.
    pub devices: Vec<DeviceExplanation>,
    /// The optimal T by the same objective with the same head and any devices dropped; for a strategy that is
    /// optimal, its own T under its own rules.
    pub optimum: Option<f64>,
    /// T / optimum - 1.
    pub gap: Option<f64>,
    /// Set if the strategy did not search everything that its rules allow.
    pub limit: Option<SearchLimit>,
}

#[derive(Debug, Clone, PartialEq)]
pub struct DeviceExplanation {
    pub name: String,
    /// The constraints that keep the device from taking more layers.
    pub binding: Vec<BindingConstraint>,
    /// The increase of T in seconds if the window grows by one layer (k layers of the model) with the best split,
    /// everything else equal; `None` if that is not allowed. The saving on the device whose window shrinks is not
    /// included.
    pub one_more_layer: Option<f64>,
    /// Set if the device has no layers.
    pub dropped: Option<DropReason>,
    /// Set if the device has no layers and forwards activations in the ring.
    pub relay: Option<RelayPlacement>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RelayPlacement {
    pub from: String,
    pub to: String,
    /// Whether `from` has a (slower) link to `to`.
    pub reachable: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, serde::Serialize)]
pub enum BindingConstraint {
    SmallestWindow,
    /// GPU memory is full and the device has CPU layers.
    GpuMemory,
    /// With one more layer the device would read from disk for every token.
    Memory,
    Overloaded,
    SlowDisk,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub enum DropReason {
    /// The best plan that uses the device, at the same k and head, takes this many seconds more than the plan.
    /// Negative if a heuristic dropped the device wrongly. If the plan has an order, the device is tried at its
    /// cheapest place in it.
    Slower(f64),
    Unreachable,
    /// Its disk is slow and its memory holds no layer of a round.
    NoLayerFits,
    /// No plan that uses the device is faster. With more than `MAX_DEVICES_COMPARED` devices the difference is not
    /// computed.
    NotFaster,
    /// The ring has fewer layers than devices.
    NoLayerLeft,
}

/// The largest number of devices for which the cost of using each dropped device is computed. source: measured, 64
/// devices and 128 layers take 2 s
const MAX_DEVICES_COMPARED: usize = 24;

/// The checked plan to explain.
pub(crate) struct PlanToExplain<'a> {
    pub assignment: &'a Assignment,
    pub breakdown: &'a Breakdown,
    pub rules: Rules,
    pub objective: Objective,
    /// Whether no plan with this head and these rounds is faster.
    pub is_optimal: bool,
}

impl Explanation {
    pub(crate) fn new(
        model: &LatencyModel,
        plan: &PlanToExplain,
        searched: Vec<SearchStep>,
        optimum: Option<f64>,
    ) -> Self {
        let optimum = optimum.or_else(|| best_with_the_same_head(model, plan));
        let gap =
            optimum.filter(|optimum| *optimum > 0.0).map(|optimum| plan.breakdown.seconds / optimum - 1.0);
        let mut tables = None;
        let devices = (0..model.device_count())
            .map(|device| explain_device(model, plan, device, &mut tables))
            .collect();
        Self { searched, devices, optimum, gap, limit: None }
    }
}

/// Returns the optimal T over plans of whole rounds with any devices dropped; `None` if the search was limited, or if
/// `plan`, with a partial last round, is faster.
fn best_with_the_same_head(model: &LatencyModel, plan: &PlanToExplain) -> Option<f64> {
    let rules = Rules { may_drop: true, may_leave_remainder: false };
    let head = HeadChoice::Fixed(plan.assignment.head);
    let order = if plan.assignment.order.is_some() { OrderChoice::Best } else { OrderChoice::Given };
    let (proposal, seconds): (_, fn(&LatencyModel, &Proposal) -> f64) = match plan.objective {
        Objective::Paper => {
            // A single round is never slower than more.
            let exact = Exact { rules, head, rounds: Some(1), order };
            (exact.propose(model), |model, proposal| model.seconds(&proposal.assignment))
        }
        Objective::SteadyState => {
            (Overlap { rules, head, rounds: None, order }.propose(model), |model, proposal| {
                model.steady_seconds(&proposal.assignment, &proposal.residencies)
            })
        }
    };
    let proposal = proposal.ok()?;
    let limited = proposal.limit.as_ref().is_some_and(|limit| limit.lower_bound.is_some());
    let optimum = (!limited).then(|| seconds(model, &proposal));
    optimum.filter(|optimum| *optimum <= plan.breakdown.seconds * (1.0 + 1e-9))
}

/// `tables` are computed on first use and shared by all devices.
fn explain_device(
    model: &LatencyModel,
    plan: &PlanToExplain,
    device: usize,
    tables: &mut Option<ChoiceTables>,
) -> DeviceExplanation {
    let terms = &plan.breakdown.devices[device];
    let window = plan.assignment.window_layers[device];
    let round_counts = round_counts_of(model, plan.assignment, device);
    let wider_window = wider_window(model, plan, device, round_counts);
    // Its hops are an estimate where they depend on the next device, the same before and after.
    let hops = f64::from(terms.share.windows) * model.devices[device].hop;
    let (slowest, waits) = plan.breakdown.waits.unwrap_or((device, 0.0));
    let own = terms.compute + terms.memory + terms.disk + hops - if slowest == device { waits } else { 0.0 };
    let binding =
        if window == 0 { Vec::new() } else { bindings(model, plan, device, round_counts, wider_window) };
    DeviceExplanation {
        name: model.instance().devices[device].name.clone(),
        binding,
        one_more_layer: wider_window.map(|wider_window| match plan.objective {
            Objective::Paper => wider_window.seconds - own,
            // No other device waits less, and a token is no faster than its slowest disk.
            Objective::SteadyState => {
                let all = plan.breakdown.seconds;
                let others = all - waits - own;
                let floor = if waits > 0.0 { all } else { 0.0 };
                (others + wider_window.seconds).max(wider_window.busy).max(floor) - all
            }
        }),
        dropped: (window == 0).then(|| why_dropped(model, plan, device, tables)),
        relay: plan.assignment.is_relay(device).then(|| relayed(model, plan.assignment, device)),
    }
}

#[derive(Clone, Copy)]
struct WiderWindow {
    seconds: f64,
    busy: f64,
    over: bool,
}

/// Evaluates a window one layer wider with its best split, `None` if that is not allowed.
fn wider_window(
    model: &LatencyModel,
    plan: &PlanToExplain,
    device: usize,
    round_counts: RoundCounts,
) -> Option<WiderWindow> {
    let head = device == plan.assignment.head;
    let window = plan.assignment.window_layers[device] + 1;
    match plan.objective {
        Objective::Paper => model.best_split(device, head, window, round_counts).map(|split| {
            let share = Share::new(window, split.gpu_layers, round_counts.rounds, round_counts.rest);
            WiderWindow { seconds: split.seconds, busy: 0.0, over: model.terms(device, head, share).over }
        }),
        // There is no wider window than all layers.
        Objective::SteadyState if window > model.model_layers() => None,
        Objective::SteadyState => {
            let place = model.place(plan.assignment, device);
            let choice = best_choice(model, device, head, place, window)?;
            let portion = model.portion(device, place, window, choice.gpu_layers);
            let timing = model.timing(device, head, &portion, &choice.residency)?;
            let hops = f64::from(portion.share.windows) * model.devices[device].hop;
            Some(WiderWindow { seconds: choice.own + hops, busy: choice.busy, over: timing.terms.over })
        }
    }
}

fn relayed(model: &LatencyModel, assignment: &Assignment, device: usize) -> RelayPlacement {
    let ring = assignment.ring();
    let place = ring.iter().position(|other| *other == device).unwrap_or(0);
    let (before, after) = (ring[(place + ring.len() - 1) % ring.len()], ring[(place + 1) % ring.len()]);
    let name = |device: usize| model.instance().devices[device].name.clone();
    let reachable = model.hops.seconds(before, after) < f64::INFINITY;
    RelayPlacement { from: name(before), to: name(after), reachable }
}

/// Returns the whole rounds, and the layers that the partial last round has left when it reaches the device.
fn round_counts_of(model: &LatencyModel, assignment: &Assignment, device: usize) -> RoundCounts {
    let Place { ring_layers, placed } = model.place(assignment, device);
    let rest = (model.model_layers() % ring_layers).saturating_sub(placed);
    RoundCounts { rounds: model.model_layers() / ring_layers, rest }
}

fn bindings(
    model: &LatencyModel,
    plan: &PlanToExplain,
    device: usize,
    round_counts: RoundCounts,
    wider_window: Option<WiderWindow>,
) -> Vec<BindingConstraint> {
    let head = device == plan.assignment.head;
    let window = plan.assignment.window_layers[device];
    let gpu = plan.assignment.gpu_layers[device];
    let mut found = Vec::new();
    if window == 1 && (head || !plan.rules.may_drop) {
        found.push(BindingConstraint::SmallestWindow);
    }
    let most = model.max_gpu_layers(device, head, window + 1, round_counts);
    if most > 0 && gpu == most && gpu <= window {
        found.push(BindingConstraint::GpuMemory);
    }
    match wider_window {
        None if window < model.model_layers() => found.push(BindingConstraint::SlowDisk),
        Some(_) if plan.breakdown.devices[device].over => found.push(BindingConstraint::Overloaded),
        Some(wider_window) if wider_window.over => found.push(BindingConstraint::Memory),
        None | Some(_) => {}
    }
    found
}

fn why_dropped(
    model: &LatencyModel,
    plan: &PlanToExplain,
    device: usize,
    tables: &mut Option<ChoiceTables>,
) -> DropReason {
    let head = plan.assignment.head;
    let mut windows = vec![0; model.device_count()];
    (windows[head], windows[device]) = (1, 1);
    let (ring_layers, least_windows) = (plan.assignment.ring_layers() as u32, windows.as_slice());
    if ring_layers < 2 {
        return DropReason::NoLayerLeft;
    }
    if plan.is_optimal && model.device_count() > MAX_DEVICES_COMPARED {
        return DropReason::NotFaster;
    }
    let order: Vec<usize> = match &plan.assignment.order {
        Some(order) => with_missing_devices(model, order.clone()),
        None => ring_order(head, model.device_count()).collect(),
    };
    let problem = RingSizeProblem { model, order: &order, ring_layers, least_windows };
    let with_it = match plan.objective {
        Objective::Paper => problem.optimum().map(|assignment| model.seconds(&assignment)),
        Objective::SteadyState => {
            let tables = tables.get_or_insert_with(|| ChoiceTables::new(model, head, ring_layers));
            // The best plan of all is not slower than the one with this device.
            let at_least = if plan.is_optimal { plan.breakdown.seconds } else { 0.0 };
            fastest(&problem, tables, at_least)
                .map(|proposal| model.steady_seconds(&proposal.assignment, &proposal.residencies))
        }
    };
    match with_it {
        Ok(with_it) => DropReason::Slower(with_it - plan.breakdown.seconds),
        Err(Infeasible::NoRoute { .. }) => DropReason::Unreachable,
        Err(_) => DropReason::NoLayerFits,
    }
}
