//! What is the fastest steady state for one ring size and one head?
//!
//! T = max(sum of own, largest busy), and both are made of terms that concern one device each. For a bound B on busy
//! the devices are independent but for the sum of their windows, so that a dynamic programme over the devices in ring
//! order, as in [`crate::exact`], finds the least sum S(B) among the plans in which no device is busier than B. S
//! falls and B grows, so the optimum is at the first B with S(B) <= B, or at the one before it: a binary search
//! over the values that `busy` takes. What a window costs depends on the layers placed before it in two ways: a partial
//! last turn may end before it, and layers differ in bytes. The programme's state is that number.
//!
//! For a window every split between CPU and GPU and every residency on offer is tried, with one exception: where a
//! layer takes no longer on the GPU than on the CPU, more layers there lower `own` and `busy`, so that only the
//! fullest split is tried. Of the rest those are kept that no other one beats in both.
//!
//! Not here: which ring sizes and heads are searched.

use hearth_schema::residency::ResidencyOptions;

use crate::assignment::{Assignment, ring_order};
use crate::gpu_split::Turns;
use crate::latency::LatencyModel;
use crate::overlap::offers::offers;
use crate::steady_state::Place;
use crate::strategy::{Infeasible, Proposal};

/// The problem for one ring size and one head.
pub(crate) struct SizedSearch<'a, 'i> {
    pub model: &'a LatencyModel<'i>,
    pub head: usize,
    pub ring_layers: u32,
    /// The smallest window of each device: 1 keeps it in the ring, 0 lets it be dropped.
    pub least_windows: &'a [u32],
}

/// One way to run a window.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Choice {
    pub gpu_layers: u32,
    pub residency: ResidencyOptions,
    pub own: f64,
    pub busy: f64,
}

/// The choices of a device for every place and window: for each, those that no other beats, the busiest last.
struct Menu {
    choices: Vec<Choice>,
    /// Where the choices of `class * (W + 1) + window` end; see [`SizedSearch::class`].
    ends: Vec<usize>,
}

impl Menu {
    fn of(&self, index: usize) -> &[Choice] {
        let start = if index == 0 { 0 } else { self.ends[index - 1] };
        &self.choices[start..self.ends[index]]
    }

    /// The least `own` without being busier than the bound.
    fn within(&self, index: usize, bound: f64) -> Option<&Choice> {
        let all = self.of(index);
        all[..all.partition_point(|choice| choice.busy <= bound)].last()
    }
}

impl SizedSearch<'_, '_> {
    /// The fastest plan of exactly W layers a turn.
    pub(crate) fn optimum(&self) -> Result<Proposal, Infeasible> {
        let order: Vec<usize> = ring_order(self.head, self.model.device_count()).collect();
        let menus: Vec<Menu> = order.iter().map(|&device| self.menu(device)).collect();
        let mut bounds: Vec<f64> =
            menus.iter().flat_map(|menu| menu.choices.iter().map(|choice| choice.busy)).collect();
        bounds.sort_unstable_by(f64::total_cmp);
        bounds.dedup();
        let sum = |bound: f64| self.programme(&menus, bound, None);
        // The first bound that the sum stays within.
        let (mut low, mut high) = (0, bounds.len());
        while low < high {
            let middle = usize::midpoint(low, high);
            if sum(bounds[middle]) <= bounds[middle] { high = middle } else { low = middle + 1 }
        }
        let candidates =
            [low.checked_sub(1), Some(low)].into_iter().flatten().filter_map(|at| bounds.get(at));
        let time = |bound: f64| sum(bound).max(bound);
        let best = candidates.copied().min_by(|a, b| time(*a).total_cmp(&time(*b)));
        match best.filter(|bound| time(*bound).is_finite()) {
            Some(bound) => Ok(self.traced_back(&order, &menus, bound)),
            None => Err(self.reason(&order, &menus)),
        }
    }

    /// How many kinds of places there are that a window's cost depends on.
    fn classes(&self) -> usize {
        let remainder = self.model.model_layers() % self.ring_layers;
        if self.model.model.even_layers { remainder as usize + 1 } else { self.ring_layers as usize + 1 }
    }

    /// The kind of place after so many layers of a turn: with layers all alike, those past the remainder are one.
    fn class(&self, placed: usize) -> usize {
        placed.min(self.classes() - 1)
    }

    fn menu(&self, device: usize) -> Menu {
        let mut menu = Menu { choices: Vec::new(), ends: Vec::new() };
        let ring_layers = self.ring_layers;
        for placed in 0..self.classes() as u32 {
            // The last class of layers all alike stands for earlier places too.
            let before = if self.model.model.even_layers { 0 } else { placed };
            for window in 0..=ring_layers {
                let whole = placed + window <= ring_layers || before == 0;
                if window >= self.least_windows[device] && whole {
                    let place = Place { ring_layers, placed };
                    add_choices(self.model, device, device == self.head, place, window, &mut menu.choices);
                }
                menu.ends.push(menu.choices.len());
            }
        }
        menu
    }

    /// The least sum of `own` with every device at most this busy. `windows[position (W + 1) + j]` becomes the window
    /// of the device at that position when j layers are placed.
    fn programme(&self, menus: &[Menu], bound: f64, mut windows: Option<&mut Vec<u16>>) -> f64 {
        let columns = self.ring_layers as usize + 1;
        let mut least = vec![f64::INFINITY; columns];
        least[0] = 0.0;
        if let Some(windows) = &mut windows {
            windows.clear();
            windows.resize(menus.len() * columns, 0);
        }
        let mut costs = vec![f64::INFINITY; self.classes() * columns];
        for (position, menu) in menus.iter().enumerate() {
            for (index, cost) in costs.iter_mut().enumerate() {
                *cost = menu.within(index, bound).map_or(f64::INFINITY, |choice| choice.own);
            }
            let mut next = vec![f64::INFINITY; columns];
            for (placed, before) in least.iter().enumerate().filter(|(_, before)| before.is_finite()) {
                let class = self.class(placed);
                let row = &costs[class * columns..(class + 1) * columns - placed];
                for (window, own) in row.iter().enumerate() {
                    let total = before + own;
                    if total < next[placed + window] {
                        next[placed + window] = total;
                        if let Some(windows) = &mut windows {
                            windows[position * columns + placed + window] = window as u16;
                        }
                    }
                }
            }
            least = next;
        }
        least[columns - 1]
    }

    fn traced_back(&self, order: &[usize], menus: &[Menu], bound: f64) -> Proposal {
        let mut windows = Vec::new();
        self.programme(menus, bound, Some(&mut windows));
        let columns = self.ring_layers as usize + 1;
        let devices = self.model.device_count();
        let rounds = self.model.model_layers().div_ceil(self.ring_layers);
        let mut assignment = Assignment::new(self.head, rounds, vec![0; devices], vec![0; devices]);
        let instance = self.model.instance();
        let mut residencies: Vec<_> = instance.devices.iter().map(|it| it.practice.residencies[0]).collect();
        let mut placed = columns - 1;
        for (position, &device) in order.iter().enumerate().rev() {
            let window = windows[position * columns + placed] as usize;
            placed -= window;
            assignment.window_layers[device] = window as u32;
            if let Some(choice) =
                menus[position].within(self.class(placed) * columns + window, bound).filter(|_| window > 0)
            {
                assignment.gpu_layers[device] = choice.gpu_layers;
                residencies[device] = choice.residency;
            }
        }
        Proposal { assignment, residencies, searched: Vec::new() }
    }

    /// Names what makes this ring size impossible.
    fn reason(&self, order: &[usize], menus: &[Menu]) -> Infeasible {
        let ring_layers = self.ring_layers;
        let kept = self.least_windows.iter().filter(|least| **least > 0).count();
        if kept > ring_layers as usize {
            return Infeasible::MoreDevicesThanLayers { ring_layers, devices: kept };
        }
        let mut held = 0;
        for (&device, menu) in order.iter().zip(menus) {
            match (0..=ring_layers).rev().find(|&window| !menu.of(window as usize).is_empty()) {
                None => {
                    let device = self.model.instance().devices[device].name.clone();
                    return Infeasible::HoldsNothing { device };
                }
                Some(window) => held += window,
            }
        }
        if held < ring_layers {
            Infeasible::HoldsTooLittle { ring_layers, held }
        } else {
            Infeasible::NothingAllowed { ring_layers }
        }
    }
}

/// The best way to run a window of a device if no other device mattered; `None` if there is none.
pub(crate) fn best_choice(
    model: &LatencyModel,
    device: usize,
    head: bool,
    place: Place,
    window: u32,
) -> Option<Choice> {
    let mut found = Vec::new();
    add_choices(model, device, head, place, window, &mut found);
    found.into_iter().min_by(|a, b| a.own.max(a.busy).total_cmp(&b.own.max(b.busy)))
}

/// Adds the choices of one window that no other beats, the busiest last.
fn add_choices(
    model: &LatencyModel,
    device: usize,
    head: bool,
    place: Place,
    window: u32,
    all: &mut Vec<Choice>,
) {
    let start = all.len();
    let costs = &model.devices[device];
    let offers = offers(&model.instance().devices[device].practice.residencies);
    let rest = (model.model_layers() % place.ring_layers).saturating_sub(place.placed);
    let turns = Turns { rounds: model.model_layers() / place.ring_layers, rest };
    let mut most = model.most_gpu_layers(device, head, window, turns);
    while most > 0 && !model.fits_gpu(device, head, &model.portion(place, window, most)) {
        most -= 1;
    }
    let gpu_is_faster = costs.gpu_compute + costs.gpu_memory <= costs.cpu_compute + costs.cpu_memory;
    let least = if gpu_is_faster && !costs.metal { most } else { 0 };
    for gpu_layers in least..=most {
        let portion = model.portion(place, window, gpu_layers);
        for residency in &offers {
            let Some(pace) = model.pace(device, head, &portion, residency) else { continue };
            let (own, busy) = (pace.terms.seconds(), pace.busy);
            all.push(Choice { gpu_layers, residency: *residency, own, busy });
            if !pace.terms.over {
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
