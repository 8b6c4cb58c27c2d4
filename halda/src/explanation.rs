//! Explanations of plans: binding constraints, dropped devices, and the gap to the optimum.
//!
//! Not here: the sentences that a plan document has for an explanation (`plan_document::reasons`).

use crate::latency::steady_state::may_run_out_of_memory;
use crate::problem::assignment::{RoundWindow, ring_order};
use crate::solvers::dynamic_program::RingSizeProblem;
use crate::solvers::overlap::{ChoiceTables, best_choice, fastest_plan};
use crate::solvers::shortest_cycle::with_missing_devices;
use crate::{
    Assignment, AvoidedRisk, DeviceTiming, ExactSearch, HeadChoice, IncompleteSearch, InfeasibleReason,
    LatencyBreakdown, LatencyModel, MemoryRisk, Objective, OrderChoice, OverlapSearch, PlanRules, Proposal,
    SearchStep, Strategy,
};

#[derive(Debug, Clone, Default, PartialEq)]
pub struct Explanation {
    /// The outcome of the search for each ring size (layers per round) and each head that was searched.
    pub search_steps: Vec<SearchStep>,
    /// One explanation for each device, in the instance's order.
    pub devices: Vec<DeviceExplanation>,
    /// The seconds per token (T) of the optimal plan with the same objective and head; `None` if unknown.
    pub optimal_seconds_per_token: Option<f64>,
    /// The relative excess of the plan's time per token (T) over the optimum: T / optimum - 1; `None` if unknown.
    pub optimality_gap: Option<f64>,
    /// What the search skipped; `None` if it covered every allowed plan.
    pub incomplete_search: Option<IncompleteSearch>,
    /// The risk for which the plan was preferred to a faster one; `None` if there is no such risk.
    pub avoided_risk: Option<AvoidedRisk>,
}

#[derive(Debug, Clone, Default, PartialEq)]
pub struct DeviceExplanation {
    pub name: String,
    pub binding_constraints: Vec<BindingConstraint>,
    /// The increase in seconds per token if the device's window grows by one layer (one in each round), with the best
    /// GPU split and the same windows on other devices. `None` if a wider window is not allowed.
    pub extra_layer_seconds: Option<f64>,
    pub drop_reason: Option<DropReason>,
    /// The neighbours of the device in the ring if it is a relay, which has no layers and only forwards activations.
    pub relay: Option<RelayPlacement>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RelayPlacement {
    pub previous_device: String,
    pub next_device: String,
    /// Whether the previous device also has a direct link to the next device, which is slower than the relay.
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
    /// The additional seconds per token of the best plan that uses the device, with the same rounds and head; may be
    /// negative. They are means over the uncertain memory of the devices if the plan avoids a risk.
    Slower(f64),
    /// The best plan that uses the device may run out of memory, because the memory of the devices is uncertain.
    MayRunOutOfMemory,
    /// No ring can include the device, because links are missing.
    Unreachable,
    /// No layer of a round fits in memory, and the disk is too slow to read weights for every token.
    NoLayerFits,
    /// No plan that uses the device is faster. The difference was not computed.
    NotFaster,
    /// A round has too few layers to give the device one.
    NoLayerLeft,
}

/// The maximum number of devices up to which [`DropReason::Slower`] is computed for an optimal plan. It takes one more
/// search for each dropped device. source: measured, 2 s for 64 devices and 128 layers
const MAX_DEVICES_COMPARED: usize = 24;

pub(crate) struct PlanToExplain<'a, 'i> {
    pub model: &'a LatencyModel<'i>,
    pub assignment: &'a Assignment,
    pub breakdown: &'a LatencyBreakdown,
    pub rules: PlanRules,
    pub objective: Objective,
    pub is_optimal: bool,
    /// Whether a limit of the search left out plans that may be faster.
    pub is_limited: bool,
    pub avoided_risk: Option<AvoidedRisk>,
}

impl Explanation {
    pub(crate) fn new(plan: &PlanToExplain, search_steps: Vec<SearchStep>) -> Self {
        let seconds = plan.breakdown.seconds_per_token;
        let optimal_seconds_per_token = match plan.avoided_risk {
            Some(avoided) => Some(avoided.fastest_seconds).filter(|_| !plan.is_limited),
            None if plan.is_optimal => Some(seconds),
            None => plan.best_with_the_same_head(),
        };
        let optimum = optimal_seconds_per_token.filter(|optimum| *optimum > 0.0);
        let optimality_gap = optimum.map(|optimum| seconds / optimum - 1.0);
        let mut tables = None;
        let devices = 0..plan.model.device_count();
        let devices = devices.map(|device| plan.explain_device(device, &mut tables)).collect();
        Self {
            search_steps,
            devices,
            optimal_seconds_per_token,
            optimality_gap,
            incomplete_search: None,
            avoided_risk: plan.avoided_risk,
        }
    }
}

impl PlanToExplain<'_, '_> {
    /// Returns the minimum seconds per token of plans with the head of this plan and whole rounds, in which devices may
    /// be dropped. Returns `None` if the search was limited, or if this plan is faster due to a partial last round.
    fn best_with_the_same_head(&self) -> Option<f64> {
        let model = self.model;
        let rules = PlanRules { may_drop_devices: true, may_have_partial_round: false };
        let head = HeadChoice::Fixed(self.assignment.head);
        let order = if self.assignment.ring_order.is_some() { OrderChoice::Best } else { OrderChoice::Given };
        let proposal = match self.objective {
            // By this objective one round is never slower than several.
            Objective::Paper => ExactSearch { rules, head, rounds: Some(1), order }.propose(model),
            Objective::SteadyState => {
                OverlapSearch { rules, head, rounds: None, order, memory_risk: MemoryRisk::Ignore }
                    .propose(model)
            }
        };
        let Proposal { assignment, residencies, incomplete_search: limit, .. } = proposal.ok()?;
        let limited = limit.is_some_and(|limit| limit.lower_bound_seconds.is_some());
        let optimum = (!limited).then(|| match self.objective {
            Objective::Paper => model.seconds_per_token(&assignment),
            Objective::SteadyState => model.steady_state_seconds(&assignment, &residencies),
        });
        optimum.filter(|optimum| *optimum <= self.breakdown.seconds_per_token * (1.0 + 1e-9))
    }

    /// Explains one device. `tables` are computed for the first device that needs them, and shared by all devices.
    fn explain_device(&self, device: usize, tables: &mut Option<ChoiceTables>) -> DeviceExplanation {
        let model = self.model;
        let terms = &self.breakdown.devices[device];
        let window = self.assignment.window_layers[device];
        let wider = RoundWindow { window_layers: window + 1, ..model.round_window(self.assignment, device) };
        let timing = self.wider_window_timing(wider);
        // If hops depend on the next device, this is an estimate; it is the same before and after.
        let hops = f64::from(terms.layer_counts.windows) * model.device_costs[device].hop_seconds;
        let (slowest, wait) = self.breakdown.slowest_disk_and_wait_seconds.unwrap_or((device, 0.0));
        let own = terms.compute_seconds + terms.memory_seconds + terms.disk_seconds + hops
            - if slowest == device { wait } else { 0.0 };
        DeviceExplanation {
            name: model.device_name(device),
            binding_constraints: self.binding_constraints(wider, timing.as_ref()),
            extra_layer_seconds: timing.map(|wider| match self.objective {
                Objective::Paper => wider.terms.seconds() - own,
                // The wait for the slowest disk remains, and no token is faster than the slowest disk.
                Objective::SteadyState => {
                    let all = self.breakdown.seconds_per_token;
                    let others = all - wait - own;
                    let floor = if wait > 0.0 { all } else { 0.0 };
                    (others + wider.terms.seconds()).max(wider.disk_busy_seconds).max(floor) - all
                }
            }),
            drop_reason: (window == 0).then(|| self.drop_reason(device, tables)),
            relay: self.assignment.is_relay(device).then(|| self.relay_placement(device)),
        }
    }

    /// Evaluates a window that is one layer wider than that of the plan, with the best GPU split and an estimate of the
    /// hops. Returns `None` if the wider window is not allowed.
    fn wider_window_timing(&self, window: RoundWindow) -> Option<DeviceTiming> {
        let (model, RoundWindow { device, is_head: head, .. }) = (self.model, window);
        match self.objective {
            Objective::Paper => {
                let share = window.layer_counts(model.model_layers(), model.best_split(window)?.gpu_layers);
                let terms = model.device_latency_terms(device, head, share);
                Some(DeviceTiming { terms, disk_busy_seconds: 0.0 })
            }
            // A window cannot have more layers than the model.
            Objective::SteadyState if window.window_layers > model.model_layers() => None,
            Objective::SteadyState => {
                let choice = best_choice(model, window)?;
                let work = model.device_work(window, choice.gpu_layers);
                let mut timing = model.device_timing(&work, &choice.residency)?;
                timing.terms.communication_seconds =
                    f64::from(work.layer_counts.windows) * model.device_costs[device].hop_seconds;
                Some(timing)
            }
        }
    }

    fn relay_placement(&self, device: usize) -> RelayPlacement {
        let (model, ring) = (self.model, self.assignment.ring());
        let position = ring.iter().position(|other| *other == device).unwrap_or(0);
        let (from, to) = (ring[(position + ring.len() - 1) % ring.len()], ring[(position + 1) % ring.len()]);
        let has_direct_link = model.hop_times.seconds(from, to) < f64::INFINITY;
        let (previous_device, next_device) = (model.device_name(from), model.device_name(to));
        RelayPlacement { previous_device, next_device, has_direct_link }
    }

    fn binding_constraints(
        &self,
        wider: RoundWindow,
        timing: Option<&DeviceTiming>,
    ) -> Vec<BindingConstraint> {
        let RoundWindow { device, is_head: head, .. } = wider;
        let (window, gpu) = (self.assignment.window_layers[device], self.assignment.gpu_layers[device]);
        let mut found = Vec::new();
        if window == 0 {
            return found;
        }
        if window == 1 && (head || !self.rules.may_drop_devices) {
            found.push(BindingConstraint::SmallestWindow);
        }
        let most = self.model.max_gpu_layers(wider);
        if most > 0 && gpu == most && gpu <= window {
            found.push(BindingConstraint::GpuMemory);
        }
        match timing {
            None if window < self.model.model_layers() => found.push(BindingConstraint::SlowDisk),
            Some(_) if self.breakdown.devices[device].exceeds_memory => {
                found.push(BindingConstraint::Overloaded);
            }
            Some(timing) if timing.terms.exceeds_memory => found.push(BindingConstraint::Memory),
            None | Some(_) => {}
        }
        found
    }

    fn drop_reason(&self, device: usize, tables: &mut Option<ChoiceTables>) -> DropReason {
        // A plan that avoids a risk is optimal over the memory that the devices may have.
        let uncertain = self
            .avoided_risk
            .and_then(|avoided| Some((self.model.with_uncertain_memory()?, avoided.mean_seconds)));
        let (model, seconds, is_optimal) = match &uncertain {
            Some((model, mean_seconds)) => (model, *mean_seconds, true),
            None => (self.model, self.breakdown.seconds_per_token, self.is_optimal),
        };
        let head = self.assignment.head;
        let mut windows = vec![0; model.device_count()];
        (windows[head], windows[device]) = (1, 1);
        let (layers_per_round, min_windows) = (self.assignment.layers_per_round() as u32, windows.as_slice());
        if layers_per_round < 2 {
            return DropReason::NoLayerLeft;
        }
        if is_optimal && model.device_count() > MAX_DEVICES_COMPARED {
            return DropReason::NotFaster;
        }
        let order: Vec<usize> = match &self.assignment.ring_order {
            Some(order) => with_missing_devices(model, order.clone()),
            None => ring_order(head, model.device_count()).collect(),
        };
        let problem = RingSizeProblem { model, ring_order: &order, layers_per_round, min_windows };
        let with_device = match self.objective {
            Objective::Paper => problem.optimum().map(|assignment| model.seconds_per_token(&assignment)),
            Objective::SteadyState => {
                let tables = tables.get_or_insert_with(|| ChoiceTables::new(model, head, layers_per_round));
                // The optimal plan is a lower bound for plans that use this device.
                let at_least = if is_optimal { seconds } else { 0.0 };
                fastest_plan(&problem, tables, at_least)
                    .map(|proposal| model.steady_state_seconds(&proposal.assignment, &proposal.residencies))
            }
        };
        match with_device {
            Ok(with_device) if may_run_out_of_memory(with_device) => DropReason::MayRunOutOfMemory,
            Ok(with_device) => DropReason::Slower(with_device - seconds),
            Err(InfeasibleReason::MissingLinks { .. }) => DropReason::Unreachable,
            Err(_) => DropReason::NoLayerFits,
        }
    }
}
