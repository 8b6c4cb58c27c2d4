//! Explanations of plans: binding constraints, dropped devices, and the gap to the optimum.
//!
//! An explanation has the best time for each k that was searched; for each device, the constraints that limit its
//! layers and the cost of one more layer; for each dropped device, how much slower the best plan with it is; and the
//! gap between the plan and the optimum. `plan_document::reasons` turns it into sentences.

use crate::latency::constraints::Rules;
use crate::latency::gpu_split::RoundCounts;
use crate::latency::steady_state::RoundOffset;
use crate::latency::{Breakdown, LatencyModel};
use crate::problem::assignment::{Assignment, Share, ring_order};
use crate::solvers::dynamic_program::RingSizeProblem;
use crate::solvers::exact::Exact;
use crate::solvers::overlap::{ChoiceTables, Overlap, best_choice, fastest_plan};
use crate::solvers::search_space::{HeadChoice, OrderChoice};
use crate::solvers::shortest_cycle::with_missing_devices;
use crate::strategy::{InfeasibleReason, Objective, Proposal, SearchLimit, SearchStep, Strategy};

#[derive(Debug, Clone, PartialEq)]
pub struct Explanation {
    /// The best T for each ring size, and so for each k, that the strategy searched.
    pub search_steps: Vec<SearchStep>,
    /// The explanation of each device, in the instance's order.
    pub devices: Vec<DeviceExplanation>,
    /// The optimal T in seconds by the same objective, with the same head, where any devices may be dropped. For an
    /// optimal strategy it is the T of the plan itself, under the strategy's rules.
    pub optimum: Option<f64>,
    /// The relative distance from the optimum: T / optimum - 1.
    pub gap: Option<f64>,
    /// What the search skipped; `None` if it covered everything that the rules allow.
    pub limit: Option<SearchLimit>,
}

#[derive(Debug, Clone, PartialEq)]
pub struct DeviceExplanation {
    pub name: String,
    /// The constraints that keep the device from having more layers.
    pub binding_constraints: Vec<BindingConstraint>,
    /// The increase of T in seconds if the window grows by one layer (k layers of the model), with the best split and
    /// everything else equal. It excludes the time that another device saves with a smaller window. `None` if a wider
    /// window is not allowed.
    pub extra_layer_seconds: Option<f64>,
    /// Why the device has no layers; `None` if it has some.
    pub drop_reason: Option<DropReason>,
    /// Set if the device has no layers and only forwards activations in the ring.
    pub relay: Option<RelayPlacement>,
}

/// The neighbours of a relay in the ring.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RelayPlacement {
    pub from: String,
    pub to: String,
    /// Whether `from` also has a direct, slower link to `to`.
    pub has_direct_link: bool,
}

/// A constraint that keeps a device from having more or fewer layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, serde::Serialize)]
pub enum BindingConstraint {
    /// The window has one layer and must not become empty.
    SmallestWindow,
    /// GPU memory is full, so further layers run on the CPU.
    GpuMemory,
    /// With one more layer the device would read weights from disk for every token.
    Memory,
    /// The device already reads weights from disk for every token.
    Overloaded,
    /// Memory is full, and the disk is too slow to read weights for every token.
    SlowDisk,
}

/// Why a device has no layers.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum DropReason {
    /// The additional seconds per token of the best plan that uses the device, with the same k and head. Negative if
    /// a heuristic dropped the device wrongly. If the plan has its own order, the device is inserted where the detour
    /// is shortest.
    Slower(f64),
    /// No ring can include the device, because links are missing.
    Unreachable,
    /// The memory of the device holds no layer of a round, and its disk is too slow to read weights for every token.
    NoLayerFits,
    /// No plan that uses the device is faster. The difference is not computed for more than `MAX_DEVICES_COMPARED`
    /// devices.
    NotFaster,
    /// The ring has fewer layers than devices.
    NoLayerLeft,
}

/// The maximum number of devices for which the cost of using each dropped device is computed. source: measured, 64
/// devices and 128 layers take 2 s
const MAX_DEVICES_COMPARED: usize = 24;

/// A checked plan, with its times and the rules under which it was made.
pub(crate) struct PlanToExplain<'a> {
    pub assignment: &'a Assignment,
    pub breakdown: &'a Breakdown,
    pub rules: Rules,
    pub objective: Objective,
    /// Whether the plan is optimal for its head and its number of rounds.
    pub is_optimal: bool,
}

impl Explanation {
    pub(crate) fn new(
        model: &LatencyModel,
        plan: &PlanToExplain,
        search_steps: Vec<SearchStep>,
        optimum: Option<f64>,
    ) -> Self {
        let optimum = optimum.or_else(|| best_with_the_same_head(model, plan));
        let gap =
            optimum.filter(|optimum| *optimum > 0.0).map(|optimum| plan.breakdown.seconds / optimum - 1.0);
        let mut tables = None;
        let devices = (0..model.device_count())
            .map(|device| explain_device(model, plan, device, &mut tables))
            .collect();
        Self { search_steps, devices, optimum, gap, limit: None }
    }
}

/// Returns the optimal T of plans with the same head and whole rounds, where any devices may be dropped. Returns
/// `None` if the search was limited, or if `plan` has a partial last round and is faster.
fn best_with_the_same_head(model: &LatencyModel, plan: &PlanToExplain) -> Option<f64> {
    let rules = Rules { may_drop: true, may_leave_remainder: false };
    let head = HeadChoice::Fixed(plan.assignment.head);
    let order = if plan.assignment.order.is_some() { OrderChoice::Best } else { OrderChoice::Given };
    let (proposal, seconds): (_, fn(&LatencyModel, &Proposal) -> f64) = match plan.objective {
        Objective::Paper => {
            // By this objective one round is never slower than several.
            let exact = Exact { rules, head, rounds: Some(1), order };
            (exact.propose(model), |model, proposal| model.seconds(&proposal.assignment))
        }
        Objective::SteadyState => {
            (Overlap { rules, head, rounds: None, order }.propose(model), |model, proposal| {
                model.steady_state_seconds(&proposal.assignment, &proposal.residencies)
            })
        }
    };
    let proposal = proposal.ok()?;
    let limited = proposal.limit.as_ref().is_some_and(|limit| limit.lower_bound.is_some());
    let optimum = (!limited).then(|| seconds(model, &proposal));
    optimum.filter(|optimum| *optimum <= plan.breakdown.seconds * (1.0 + 1e-9))
}

/// Explains one device. `tables` are computed on first use and shared by all devices.
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
    // If hops depend on the next device, this is an estimate; it is the same before and after.
    let hops = f64::from(terms.share.windows) * model.devices[device].hop;
    let (slowest, wait) = plan.breakdown.disk_wait.unwrap_or((device, 0.0));
    let own = terms.compute + terms.memory + terms.disk + hops - if slowest == device { wait } else { 0.0 };
    let binding_constraints = if window == 0 {
        Vec::new()
    } else {
        binding_constraints(model, plan, device, round_counts, wider_window)
    };
    DeviceExplanation {
        name: model.instance().devices[device].name.clone(),
        binding_constraints,
        extra_layer_seconds: wider_window.map(|wider_window| match plan.objective {
            Objective::Paper => wider_window.seconds - own,
            // The wait for the slowest disk remains, and a token takes at least as long as the slowest disk is busy.
            Objective::SteadyState => {
                let all = plan.breakdown.seconds;
                let others = all - wait - own;
                let floor = if wait > 0.0 { all } else { 0.0 };
                (others + wider_window.seconds).max(wider_window.busy).max(floor) - all
            }
        }),
        drop_reason: (window == 0).then(|| drop_reason(model, plan, device, tables)),
        relay: plan.assignment.is_relay(device).then(|| relay_placement(model, plan.assignment, device)),
    }
}

/// The times of a device with one more layer in its window.
#[derive(Clone, Copy)]
struct WiderWindow {
    /// The seconds that the device adds to a token.
    seconds: f64,
    /// The seconds for which a token occupies the disk.
    busy: f64,
    /// Whether the weights exceed memory.
    over: bool,
}

/// Evaluates a window that is one layer wider, with its best split. Returns `None` if it is not allowed.
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
            WiderWindow {
                seconds: split.seconds,
                busy: 0.0,
                over: model.terms(device, head, share).exceeds_memory,
            }
        }),
        // A window cannot have more layers than the model.
        Objective::SteadyState if window > model.model_layers() => None,
        Objective::SteadyState => {
            let offset = model.round_offset(plan.assignment, device);
            let choice = best_choice(model, device, head, offset, window)?;
            let device_work = model.device_work(device, offset, window, choice.gpu_layers);
            let timing = model.timing(device, head, &device_work, &choice.residency)?;
            let hops = f64::from(device_work.share.windows) * model.devices[device].hop;
            Some(WiderWindow {
                seconds: choice.own_seconds + hops,
                busy: choice.busy_seconds,
                over: timing.terms.exceeds_memory,
            })
        }
    }
}

fn relay_placement(model: &LatencyModel, assignment: &Assignment, device: usize) -> RelayPlacement {
    let ring = assignment.ring();
    let place = ring.iter().position(|other| *other == device).unwrap_or(0);
    let (before, after) = (ring[(place + ring.len() - 1) % ring.len()], ring[(place + 1) % ring.len()]);
    let name = |device: usize| model.instance().devices[device].name.clone();
    let has_direct_link = model.hops.seconds(before, after) < f64::INFINITY;
    RelayPlacement { from: name(before), to: name(after), has_direct_link }
}

/// Returns the number of whole rounds, and the layers that remain in the partial last round at the device.
fn round_counts_of(model: &LatencyModel, assignment: &Assignment, device: usize) -> RoundCounts {
    let RoundOffset { ring_layers, layers_before } = model.round_offset(assignment, device);
    let rest = (model.model_layers() % ring_layers).saturating_sub(layers_before);
    RoundCounts { rounds: model.model_layers() / ring_layers, rest }
}

fn binding_constraints(
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
        Some(_) if plan.breakdown.devices[device].exceeds_memory => found.push(BindingConstraint::Overloaded),
        Some(wider_window) if wider_window.over => found.push(BindingConstraint::Memory),
        None | Some(_) => {}
    }
    found
}

fn drop_reason(
    model: &LatencyModel,
    plan: &PlanToExplain,
    device: usize,
    tables: &mut Option<ChoiceTables>,
) -> DropReason {
    let head = plan.assignment.head;
    let mut windows = vec![0; model.device_count()];
    (windows[head], windows[device]) = (1, 1);
    let (ring_layers, min_windows) = (plan.assignment.ring_layers() as u32, windows.as_slice());
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
    let problem = RingSizeProblem { model, order: &order, ring_layers, min_windows };
    let with_device = match plan.objective {
        Objective::Paper => problem.optimum().map(|assignment| model.seconds(&assignment)),
        Objective::SteadyState => {
            let tables = tables.get_or_insert_with(|| ChoiceTables::new(model, head, ring_layers));
            // The optimal plan is a lower bound for plans that use this device.
            let at_least = if plan.is_optimal { plan.breakdown.seconds } else { 0.0 };
            fastest_plan(&problem, tables, at_least)
                .map(|proposal| model.steady_state_seconds(&proposal.assignment, &proposal.residencies))
        }
    };
    match with_device {
        Ok(seconds) => DropReason::Slower(seconds - plan.breakdown.seconds),
        Err(InfeasibleReason::NoRoute { .. }) => DropReason::Unreachable,
        Err(_) => DropReason::NoLayerFits,
    }
}
