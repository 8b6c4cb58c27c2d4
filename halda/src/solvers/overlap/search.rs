//! The fastest steady state for one ring size, one head and one order of the devices.
//!
//! T = max(sum of own and hops, largest busy), and own and busy concern one device each. For a bound B on busy the
//! devices are independent but for the sum of their windows, so that the program that serves `exact`, too
//! ([`crate::solvers::dynamic_program`]), finds the least sum S(B) among the plans in which no device is busier than B.
//! S falls and B grows, so the optimum is at the first B with S(B) <= B, or at the one before it: a binary search over
//! the values that `busy` takes. What a window costs depends on the layers placed before it in two ways: a partial last
//! round may end before it, and layers differ in bytes.
//!
//! For a window every split between CPU and GPU and every residency is tried, with one exception: where no layer takes
//! longer on the GPU than on the CPU, more layers there lower `own` and `busy` except for the copies of the first, so
//! only the fullest split and none are tried. The Pareto-optimal choices are kept.
//!
//! Not here: which ring sizes, heads and orders are searched.

use hearth_schema::residency::{Residency, ResidencyOptions};

use crate::latency::LatencyModel;
use crate::latency::steady_state::Place;
use crate::solvers::dynamic_program::{RingSizeProblem, WindowTimes};
use crate::solvers::lower_bound::min_plus_convolution;
use crate::solvers::overlap::residency_choices::residency_options;
use crate::strategy::{Infeasible, Proposal};

/// One way to run a window, without its hops.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Choice {
    pub gpu_layers: u32,
    pub residency: ResidencyOptions,
    pub own: f64,
    pub busy: f64,
}

/// The Pareto-optimal choices of a device for every place and window, the busiest last.
#[derive(Default)]
struct ChoiceTable {
    choices: Vec<Choice>,
    /// `busy` and `own` of each choice, contiguous because the search reads them repeatedly.
    timings: Vec<[f64; 2]>,
    /// The end of the choices of `place * (W + 1) + window`.
    ends: Vec<usize>,
}

/// The choices of all devices for one head, one ring size and any order, with a bound on `busy`.
pub(crate) struct ChoiceTables {
    of: Vec<ChoiceTable>,
    columns: usize,
    places: usize,
    /// Every value of `busy`, ascending.
    bounds: Vec<f64>,
    bound: f64,
}

impl ChoiceTables {
    pub(crate) fn new(model: &LatencyModel, head: usize, ring_layers: u32) -> Self {
        let columns = ring_layers as usize + 1;
        // Layers all alike differ in place only as a partial last round does.
        let even = model.model.uniform_layers;
        let places = if even { (model.model_layers() % ring_layers) as usize + 1 } else { columns };
        let table = |device: usize| {
            let mut table = ChoiceTable::default();
            let residencies = residency_options(&model.instance().devices[device].runtime.residencies);
            for placed in 0..places as u32 {
                for window in 0..=ring_layers {
                    if window > 0 && placed + window <= ring_layers {
                        let place = Place { ring_layers, placed };
                        add_choices(
                            model,
                            device,
                            device == head,
                            place,
                            window,
                            &residencies,
                            &mut table.choices,
                        );
                    }
                    table.ends.push(table.choices.len());
                }
            }
            table.timings = table.choices.iter().map(|choice| [choice.busy, choice.own]).collect();
            table
        };
        let of: Vec<ChoiceTable> = (0..model.device_count()).map(table).collect();
        let mut bounds: Vec<f64> =
            of.iter().flat_map(|table| &table.choices).map(|choice| choice.busy).collect();
        bounds.sort_unstable_by(f64::total_cmp);
        bounds.dedup();
        Self { of, columns, places, bounds, bound: 0.0 }
    }

    /// Returns the index of the device's choice with the least `own` whose `busy` is within the bound.
    fn place(&self, device: usize, window: u32, placed: usize) -> Option<usize> {
        let table = &self.of[device];
        let index = placed.min(self.places - 1) * self.columns + window as usize;
        let start = if index == 0 { 0 } else { table.ends[index - 1] };
        let all = &table.timings[start..table.ends[index]];
        let within = all.iter().take_while(|[busy, _]| *busy <= self.bound).count();
        (start + within).checked_sub(1).filter(|_| within > 0)
    }

    fn choice(&self, device: usize, window: u32, placed: usize) -> Option<&Choice> {
        self.place(device, window, placed).map(|place| &self.of[device].choices[place])
    }
}

impl WindowTimes for ChoiceTables {
    fn seconds(&self, device: usize, window: u32, placed: usize) -> f64 {
        self.place(device, window, placed).map_or(f64::INFINITY, |place| self.of[device].timings[place][1])
    }

    fn places(&self) -> usize {
        self.places
    }
}

/// Returns the fastest plan of exactly W layers per round. `at_least` is a known lower bound of its seconds, or 0.
pub(crate) fn fastest(
    problem: &RingSizeProblem,
    tables: &mut ChoiceTables,
    at_least: f64,
) -> Result<Proposal, Infeasible> {
    let count = tables.bounds.len();
    let sum = |tables: &mut ChoiceTables, bound: f64| {
        tables.bound = bound;
        problem.fastest(tables).map_or(f64::INFINITY, |ring| ring.seconds)
    };
    // The first bound that the sum stays within: from one that is known to be too small, as all below the sum without any
    // bound are, in steps that double from there.
    let at_least = at_least.max(sum(tables, f64::INFINITY));
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
    let mut best: Option<(f64, f64)> = None;
    for at in [low.checked_sub(1), Some(low)].into_iter().flatten().filter(|at| *at < count) {
        let bound = tables.bounds[at];
        let seconds = sum(tables, bound).max(bound);
        if best.is_none_or(|(least, _)| seconds < least) {
            best = Some((seconds, bound));
        }
    }
    tables.bound = best.map_or(f64::INFINITY, |(_, bound)| bound);
    let Some(ring) = problem.fastest(tables) else {
        tables.bound = f64::INFINITY;
        return Err(problem.reason(tables));
    };
    let chosen = |device, window, placed| tables.choice(device, window, placed);
    let assignment = problem.assignment(&ring, |device, window, placed| {
        chosen(device, window, placed).map_or(0, |choice| choice.gpu_layers)
    });
    let instance = problem.model.instance();
    let mut residencies: Vec<_> = instance.devices.iter().map(|it| it.runtime.residencies[0]).collect();
    for &(device, window, placed) in ring.members.iter().filter(|(_, window, _)| *window > 0) {
        if let Some(choice) = chosen(device, window, placed) {
            residencies[device] = choice.residency;
        }
    }
    Ok(Proposal { residencies, ..Proposal::of(assignment) })
}

/// Returns a lower bound of T for W layers per round in any order: with the shortest hop of each sender, the cheapest
/// place of each window, and no limit on `busy`. Infinite if there is no plan.
pub(crate) fn lower_bound(problem: &RingSizeProblem, tables: &mut ChoiceTables) -> f64 {
    tables.bound = f64::INFINITY;
    let whole_rounds = f64::from(problem.model.model_layers() / problem.ring_layers);
    let best = |device: usize, window: u32| {
        let places = (0..tables.places).map(|placed| tables.seconds(device, window, placed));
        places.fold(f64::INFINITY, f64::min)
    };
    let mut least = vec![f64::INFINITY; tables.columns];
    least[0] = 0.0;
    for &device in problem.order {
        let hops = whole_rounds * problem.model.hops.shortest(device);
        let own = (0..=problem.ring_layers).map(|window| match window {
            0 if problem.least_windows[device] == 0 => 0.0,
            0 => f64::INFINITY,
            window => best(device, window) + hops,
        });
        least = min_plus_convolution(&least, &own.collect::<Vec<f64>>());
    }
    // A ring of one device has no hop at all.
    least[tables.columns - 1].min(best(problem.head(), problem.ring_layers))
}

/// Returns the best choice for one window on its own, `None` if there is none.
pub(crate) fn best_choice(
    model: &LatencyModel,
    device: usize,
    head: bool,
    place: Place,
    window: u32,
) -> Option<Choice> {
    let residencies = residency_options(&model.instance().devices[device].runtime.residencies);
    let mut found = Vec::new();
    add_choices(model, device, head, place, window, &residencies, &mut found);
    found.into_iter().min_by(|a, b| a.own.max(a.busy).total_cmp(&b.own.max(b.busy)))
}

/// Appends the Pareto-optimal choices of one window, the busiest last.
fn add_choices(
    model: &LatencyModel,
    device: usize,
    head: bool,
    place: Place,
    window: u32,
    residencies: &[ResidencyOptions],
    all: &mut Vec<Choice>,
) {
    let start = all.len();
    let costs = &model.devices[device];
    let fits = |gpu: u32| model.fits_gpu(device, head, &model.portion(device, place, window, gpu));
    let has_gpu = costs.gpu_bytes[usize::from(head)] > 0;
    let most = if has_gpu { largest_that_fits(window, fits) } else { 0 };
    // Where copies to the GPU are not worth their time, none is better than the fullest.
    let least = if costs.gpu_never_slower && !costs.metal { most } else { 0 };
    for gpu_layers in std::iter::once(0).filter(|_| least > 0).chain(least..=most) {
        let portion = model.portion(device, place, window, gpu_layers);
        let Some(resident_timing) = model.resident_timing(device, head, &portion) else { continue };
        // A buffer that hides all reading leaves nothing to a larger one but reading more.
        let mut enough: Option<&ResidencyOptions> = None;
        for residency in residencies {
            let larger = |enough: &ResidencyOptions| {
                residency.policy == Residency::Managed
                    && residency.kept == enough.kept
                    && residency.buffer() >= enough.buffer()
            };
            if enough.is_some_and(larger) {
                continue;
            }
            let Some(timing) = model.reading(device, &resident_timing, residency) else { continue };
            if residency.policy == Residency::Managed && timing.terms.disk == 0.0 {
                enough = Some(residency);
            }
            let (own, busy) = (timing.own(), timing.busy);
            all.push(Choice { gpu_layers, residency: *residency, own, busy });
            if timing.busy == 0.0 && timing.terms.disk == 0.0 {
                break;
            }
        }
    }
    all[start..].sort_by(|a, b| a.busy.total_cmp(&b.busy).then(a.own.total_cmp(&b.own)));
    let mut kept = start;
    for index in start..all.len() {
        if kept == start || all[index].own < all[kept - 1].own {
            all[kept] = all[index];
            kept += 1;
        }
    }
    all.truncate(kept);
}

/// Returns the largest number up to `window` that fits; `fits` must be monotone.
fn largest_that_fits(window: u32, fits: impl Fn(u32) -> bool) -> u32 {
    let (mut low, mut high) = (0, window);
    while low < high {
        let middle = (low + high).div_ceil(2);
        if fits(middle) { low = middle } else { high = middle - 1 }
    }
    low
}
