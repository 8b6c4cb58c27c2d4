//! The best ring: the devices in it and their order.
//!
//! With k whole rounds of W layers, the time per token on a set S of devices is the time of the layers plus k times the
//! shortest cycle through S. The time F(S) of the layers does not depend on the order. So the best plan has the minimum
//! over S of
//!
//! ```text
//! F(S) + k cycle(S),      F(S) = min of sum over S of g_m(w_m),  sum w = W,  w >= 1 on the head, w >= 0 on others
//! ```
//!
//! with g as in [`crate::solvers::dynamic_program`] and cycles from [`crate::solvers::shortest_cycle`]. A device of S
//! without layers is a relay. F is extended by one device at a time along a tree of subsets, which takes O(2^M W^2) for
//! M devices. For more than `MAX_DEVICES` devices, `exact` tries short cycles as orders, and reports the bound of
//! [`crate::solvers::lower_bound`].
//!
//! Not here: orders for partial last rounds, which are searched only in the best order for whole rounds.

use crate::problem::assignment::ring_order;
use crate::solvers::dynamic_program::RingSizeProblem;
use crate::solvers::lower_bound::{base_case_seconds, min_plus_convolution};
use crate::solvers::search_space::{min_windows, rotated_to_head};
use crate::solvers::shortest_cycle::ShortestCycles;
use crate::{LatencyModel, PlanRules};

/// The maximum number of devices for which all subsets are tried. source: assumed; measured to take at most a second
const MAX_DEVICES: usize = 12;

/// The maximum number of additions in the search over subsets. source: measured, half a nanosecond each
const MAX_ADDITIONS: f64 = 1.2e9;

/// Returns whether all subsets of devices can be tried within the limits, for `head_count` heads and these ring sizes.
pub(crate) fn can_try_all_subsets(
    model: &LatencyModel,
    rules: PlanRules,
    head_count: usize,
    ring_sizes: &[u32],
) -> bool {
    let devices = model.device_count();
    if devices > MAX_DEVICES {
        return false;
    }
    let sets = if rules.may_drop_devices { f64::from(1_u32 << devices) / 4.0 } else { devices as f64 };
    let squares: f64 = ring_sizes.iter().map(|size| f64::from(*size).powi(2) / 2.0).sum();
    head_count as f64 * sets * squares <= MAX_ADDITIONS
}

/// Returns the devices of the fastest ring of W layers with this head, in ring order; `None` if no plan exists.
pub(crate) fn best_ring(
    model: &LatencyModel,
    cycles: &ShortestCycles,
    rules: PlanRules,
    head: usize,
    layers_per_round: u32,
) -> Option<Vec<usize>> {
    let devices = model.device_count();
    let min_windows = min_windows(model, rules, head);
    let order: Vec<usize> = ring_order(head, devices).collect();
    let problem = RingSizeProblem { model, ring_order: &order, layers_per_round, min_windows: &min_windows };
    let tables = (0..devices).map(|device| problem.whole_round_times(device)).collect();
    let rounds = f64::from(model.model_layers() / layers_per_round);
    let mut subsets = Subsets { tables, cycles, rounds, min_windows: &min_windows, best: (f64::INFINITY, 0) };
    subsets.descend(0, &base_case_seconds(layers_per_round), 0);
    let (seconds, set) = subsets.best;
    if seconds == f64::INFINITY {
        return None;
    }
    Some(rotated_to_head(&cycles.cycle_order(set), head))
}

/// The search over the tree of subsets, in which each level decides whether one device is in the ring.
struct Subsets<'a> {
    /// g(w) of each device: the seconds per token with a window of w = 0 to W layers.
    tables: Vec<Vec<f64>>,
    cycles: &'a ShortestCycles,
    rounds: f64,
    min_windows: &'a [u32],
    /// The minimum seconds per token so far, and the set of devices with this time as a bit mask.
    best: (f64, usize),
}

impl Subsets<'_> {
    /// Tries all sets that consist of `set` and of devices from index `device` on. `times` is F(`set`) in seconds by
    /// number of layers.
    fn descend(&mut self, device: usize, times: &[f64], set: usize) {
        let with = set | 1 << device;
        let may_stay_out = self.min_windows[device] == 0;
        if device + 1 == self.tables.len() {
            // At the last device only the total for all W layers is needed.
            let all = times.iter().zip(self.tables[device].iter().rev()).map(|(placed, own)| placed + own);
            let all = all.fold(f64::INFINITY, f64::min);
            if may_stay_out {
                self.keep_best(times[times.len() - 1], set);
            }
            self.keep_best(all, with);
            return;
        }
        if may_stay_out {
            self.descend(device + 1, times, set);
        }
        let grown = min_plus_convolution(times, &self.tables[device]);
        self.descend(device + 1, &grown, with);
    }

    /// Replaces the best set of devices if `set` is faster, or equally fast with fewer devices.
    fn keep_best(&mut self, layers_time: f64, set: usize) {
        if layers_time == f64::INFINITY || set == 0 {
            return;
        }
        let seconds = layers_time + self.rounds * self.cycles.cycle_seconds(set);
        let (fastest, smallest) = self.best;
        if seconds < fastest || seconds == fastest && set.count_ones() < smallest.count_ones() {
            self.best = (seconds, set);
        }
    }
}
