//! The search for the fastest steady state with one ring size, one head and one order of the devices.
//!
//! T = max(sum of own and hops, largest busy), where own and busy depend on one device each. Under a bound B on busy
//! the devices depend on each other only through the sum of their windows. So the dynamic program of `exact`
//! ([`crate::solvers::dynamic_program`]) finds the minimum sum S(B) of the plans in which each busy is at most B.
//! S(B) decreases with B, so the optimum is at the first B with S(B) <= B, or at the one before it. A binary search
//! over the values of `busy` finds it. The time of a window depends on the layers before it in two ways: a partial
//! last round may end before the window, and layers differ in size.
//!
//! For each window all splits between CPU and GPU and all residencies are tried, and the Pareto-optimal choices are
//! stored. If no layer is slower on the GPU than on the CPU, each further GPU layer decreases `own` and `busy`, apart
//! from the copies that the first one needs. Then only the maximum number of GPU layers and zero are tried.

use hearth_schema::residency::{Residency, ResidencyOptions};

use crate::solvers::dynamic_program::{RingSizeProblem, WindowTimes};
use crate::solvers::lower_bound::{base_case_seconds, min_plus_convolution};
use crate::solvers::overlap::residency_choices::candidate_residencies;
use crate::{InfeasibleReason, LatencyModel, Proposal, RoundWindow};

/// A GPU split and a residency policy for the window of a device, with the times of the device.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Choice {
    pub gpu_layers: u32,
    pub residency: ResidencyOptions,
    /// The seconds that the device adds to a token, without hops (`own`).
    pub seconds_without_hops: f64,
    /// The seconds for which a token occupies the disk of the device (`busy`).
    pub disk_busy_seconds: f64,
}

/// The Pareto-optimal choices of a device for each offset (layers of the round before its window) and each window size,
/// in ascending order of disk time.
#[derive(Default)]
struct ChoiceTable {
    choices: Vec<Choice>,
    /// The disk time of each choice, and its time without hops, in seconds. They are contiguous because the search
    /// reads them repeatedly.
    timings: Vec<[f64; 2]>,
    /// The end of the range in `choices` for an offset and a window of w layers, at index `offset * (W + 1) + w`.
    ends: Vec<usize>,
}

/// The choices of all devices for one head device and one ring size in any ring order, under a bound on the disk time
/// of each device.
pub(crate) struct ChoiceTables {
    devices: Vec<ChoiceTable>,
    columns: usize,
    offsets: usize,
    bounds: Vec<f64>,
    bound: f64,
}

impl ChoiceTables {
    pub(crate) fn new(model: &LatencyModel, head: usize, layers_per_round: u32) -> Self {
        let columns = layers_per_round as usize + 1;
        // If all layers are equal, the offset matters only because of a partial last round.
        let uniform = model.sizes.has_uniform_layers;
        let offsets = if uniform { (model.model_layers() % layers_per_round) as usize + 1 } else { columns };
        let table = |device: usize| {
            let mut table = ChoiceTable::default();
            let residencies =
                candidate_residencies(&model.instance().devices[device].runtime.allowed_residencies);
            for layers_before_window in 0..offsets as u32 {
                for layers in 0..=layers_per_round {
                    if layers > 0 && layers_before_window + layers <= layers_per_round {
                        let first = RoundWindow::at_start(device, device == head, layers_per_round, layers);
                        let window = RoundWindow { layers_before_window, ..first };
                        add_choices(model, window, &residencies, &mut table.choices);
                    }
                    table.ends.push(table.choices.len());
                }
            }
            let timing = |choice: &Choice| [choice.disk_busy_seconds, choice.seconds_without_hops];
            table.timings = table.choices.iter().map(timing).collect();
            table
        };
        let devices: Vec<ChoiceTable> = (0..model.device_count()).map(table).collect();
        let mut bounds: Vec<f64> =
            devices.iter().flat_map(|table| &table.choices).map(|choice| choice.disk_busy_seconds).collect();
        bounds.sort_unstable_by(f64::total_cmp);
        bounds.dedup();
        Self { devices, columns, offsets, bounds, bound: 0.0 }
    }

    /// Returns the index of the fastest choice for a window whose disk time is within the bound; `None` if none is.
    fn index(&self, device: usize, window: u32, layers_before: usize) -> Option<usize> {
        let table = &self.devices[device];
        let index = layers_before.min(self.offsets - 1) * self.columns + window as usize;
        let start = if index == 0 { 0 } else { table.ends[index - 1] };
        let all = &table.timings[start..table.ends[index]];
        let within = all.iter().take_while(|[busy, _]| *busy <= self.bound).count();
        (start + within).checked_sub(1).filter(|_| within > 0)
    }

    fn choice(&self, device: usize, window: u32, layers_before: usize) -> Option<&Choice> {
        self.index(device, window, layers_before).map(|index| &self.devices[device].choices[index])
    }
}

impl WindowTimes for ChoiceTables {
    fn window_seconds(&self, device: usize, window: u32, layers_before: usize) -> f64 {
        let index = self.index(device, window, layers_before);
        index.map_or(f64::INFINITY, |index| self.devices[device].timings[index][1])
    }

    fn offset_count(&self) -> usize {
        self.offsets
    }
}

/// Returns the fastest plan with W layers per round. `lower_bound_seconds` is a bound of its time per token.
pub(crate) fn fastest_plan(
    problem: &RingSizeProblem,
    tables: &mut ChoiceTables,
    lower_bound_seconds: f64,
) -> Result<Proposal, InfeasibleReason> {
    let count = tables.bounds.len();
    let sum = |tables: &mut ChoiceTables, bound: f64| {
        tables.bound = bound;
        problem.fastest_ring(tables).map_or(f64::INFINITY, |ring| ring.total_seconds)
    };
    // Find the first bound B with S(B) <= B. All bounds below the sum without a bound are too small; from there the
    // step doubles until a bound is large enough, and a binary search follows.
    let at_least = lower_bound_seconds.max(sum(tables, f64::INFINITY));
    let mut low = tables.bounds.partition_point(|bound| *bound < at_least * (1.0 - 1e-9));
    let (mut high, mut step) = (low, 1);
    while high < count && sum(tables, tables.bounds[high]) > tables.bounds[high] {
        low = high + 1;
        high = (high + step).min(count);
        step *= 2;
    }
    while low < high {
        let middle = usize::midpoint(low, high);
        if sum(tables, tables.bounds[middle]) <= tables.bounds[middle] {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    let bounds = [low.checked_sub(1), Some(low)].into_iter().flatten().filter(|index| *index < count);
    let times = bounds.map(|index| {
        let bound = tables.bounds[index];
        (sum(tables, bound).max(bound), bound)
    });
    let best = times.min_by(|one, other| one.0.total_cmp(&other.0));
    tables.bound = best.map_or(f64::INFINITY, |(_, bound)| bound);
    let Some(ring) = problem.fastest_ring(tables) else {
        tables.bound = f64::INFINITY;
        return Err(problem.infeasible_reason(tables));
    };
    let assignment = problem.ring_to_assignment(&ring, |device, window, layers_before| {
        tables.choice(device, window, layers_before).map_or(0, |choice| choice.gpu_layers)
    });
    let devices = &problem.model.instance().devices;
    let mut residencies: Vec<_> =
        devices.iter().map(|device| device.runtime.allowed_residencies[0]).collect();
    for &(device, window, layers_before) in ring.members.iter().filter(|(_, window, _)| *window > 0) {
        if let Some(choice) = tables.choice(device, window, layers_before) {
            residencies[device] = choice.residency;
        }
    }
    Ok(Proposal { residencies, ..Proposal::new(assignment) })
}

/// Returns a lower bound of the seconds per token for W layers per round in any ring order; infinite if no plan exists.
/// It counts the shortest hop of each device and the best offset of each window, and no waiting for disks.
pub(crate) fn lower_bound(problem: &RingSizeProblem, tables: &mut ChoiceTables) -> f64 {
    tables.bound = f64::INFINITY;
    let whole_rounds = f64::from(problem.model.model_layers() / problem.layers_per_round);
    let best = |device: usize, window: u32| {
        let offsets =
            (0..tables.offsets).map(|layers_before| tables.window_seconds(device, window, layers_before));
        offsets.fold(f64::INFINITY, f64::min)
    };
    let mut least = base_case_seconds(problem.layers_per_round);
    for &device in problem.ring_order {
        let hops = whole_rounds * problem.model.hop_times.shortest_hop_seconds(device);
        let own = (0..=problem.layers_per_round).map(|window| match window {
            0 if problem.min_windows[device] == 0 => 0.0,
            0 => f64::INFINITY,
            window => best(device, window) + hops,
        });
        least = min_plus_convolution(&least, &own.collect::<Vec<f64>>());
    }
    // A ring of one device has no hop.
    least[tables.columns - 1].min(best(problem.head_device(), problem.layers_per_round))
}

pub(crate) fn best_choice(model: &LatencyModel, window: RoundWindow) -> Option<Choice> {
    let residencies =
        candidate_residencies(&model.instance().devices[window.device].runtime.allowed_residencies);
    let mut found = Vec::new();
    add_choices(model, window, &residencies, &mut found);
    let seconds = |choice: &Choice| choice.seconds_without_hops.max(choice.disk_busy_seconds);
    found.into_iter().min_by(|one, other| seconds(one).total_cmp(&seconds(other)))
}

/// Appends the Pareto-optimal choices for one window to `all`, in ascending order of disk time.
fn add_choices(
    model: &LatencyModel,
    window: RoundWindow,
    residencies: &[ResidencyOptions],
    all: &mut Vec<Choice>,
) {
    let start = all.len();
    let costs = &model.device_costs[window.device];
    let fits = |gpu_layers: u32| model.fits_gpu_memory(&model.device_work(window, gpu_layers));
    let has_gpu = costs.gpu_memory_bytes_by_role[usize::from(window.is_head)] > 0;
    let most = if has_gpu { largest_that_fits(window.window_layers, fits) } else { 0 };
    // If GPU layers are never slower, only the maximum and zero are tried; zero saves the copies to the GPU.
    let least = if costs.is_gpu_never_slower && !costs.uses_metal { most } else { 0 };
    for gpu_layers in std::iter::once(0).filter(|_| least > 0).chain(least..=most) {
        let work = model.device_work(window, gpu_layers);
        let Some(resident_timing) = model.resident_timing(&work) else { continue };
        // If a stream buffer hides all reading, a larger one only increases the reading.
        let mut sufficient: Option<&ResidencyOptions> = None;
        for residency in residencies {
            let is_larger = |sufficient: &ResidencyOptions| {
                residency.policy == Residency::Managed
                    && residency.kept_set_limit == sufficient.kept_set_limit
                    && residency.stream_buffer_bytes() >= sufficient.stream_buffer_bytes()
            };
            if sufficient.is_some_and(is_larger) {
                continue;
            }
            let Some(timing) = model.add_reread_time(&resident_timing, residency) else { continue };
            if residency.policy == Residency::Managed && timing.terms.disk_seconds == 0.0 {
                sufficient = Some(residency);
            }
            let seconds_without_hops = timing.seconds_without_hops();
            let (residency, disk_busy_seconds) = (*residency, timing.disk_busy_seconds);
            all.push(Choice { gpu_layers, residency, seconds_without_hops, disk_busy_seconds });
            if disk_busy_seconds == 0.0 && timing.terms.disk_seconds == 0.0 {
                break;
            }
        }
    }
    all[start..].sort_by(|a, b| {
        a.disk_busy_seconds
            .total_cmp(&b.disk_busy_seconds)
            .then(a.seconds_without_hops.total_cmp(&b.seconds_without_hops))
    });
    let mut kept = start;
    for index in start..all.len() {
        if kept == start || all[index].seconds_without_hops < all[kept - 1].seconds_without_hops {
            all[kept] = all[index];
            kept += 1;
        }
    }
    all.truncate(kept);
}

/// Returns the largest number up to `window` for which `fits` is true. `fits` must be true for all smaller numbers too.
fn largest_that_fits(window: u32, fits: impl Fn(u32) -> bool) -> u32 {
    let (mut low, mut high) = (0, window);
    while low < high {
        let middle = (low + high).div_ceil(2);
        if fits(middle) { low = middle } else { high = middle - 1 }
    }
    low
}
