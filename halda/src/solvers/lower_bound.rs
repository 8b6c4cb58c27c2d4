//! Lower bounds of the time per token for each head, from the shortest hop of each sender.
//!
//! With the shortest hop of each sender, the next device does not matter, and the objective is separable. Its optimum
//! is a lower bound for every order of the ring, and exact if hops do not depend on the next device. The bounds for
//! all heads together take little more time than one dynamic program ([`crate::solvers::dynamic_program`], with the
//! same symbols). Let `p_i(j)` and `s_i(j)` be the minimum times of j layers on the devices before and after device i:
//!
//! ```text
//! bound(i) = min over w of g_head,i(w) + (p_i (+) s_i)(W - w),      (f (+) g)(j) = min over a of f(a) + g(j - a)
//! ```
//!
//! Not here: partial last rounds. Their lower bound is that of one round with the same layers on each device, which
//! has at most as many windows.

use crate::solvers::dynamic_program::min_plus_update;
use crate::{LatencyModel, PlanRules, RoundWindow};

/// Returns a lower bound of the seconds per token (T) with each device as the head, for whole rounds of W layers;
/// infinite if no plan exists. Rounding errors may increase a bound by a relative 1e-12.
pub(crate) fn bounds_by_head(model: &LatencyModel, layers_per_round: u32, rules: PlanRules) -> Vec<f64> {
    let devices = model.device_count();
    let worker_times = |device: usize| {
        let mut times = window_times(model, layers_per_round, device, false);
        times[0] = if rules.may_drop_devices { 0.0 } else { f64::INFINITY };
        times
    };
    let workers: Vec<Vec<f64>> = (0..devices).map(worker_times).collect();
    let others = programs_without_one(&workers, layers_per_round);
    let bound = |head: usize| {
        let own = window_times(model, layers_per_round, head, true);
        let with_others = own.iter().zip(others[head].iter().rev()).map(|(own, others)| own + others);
        // With hops by pair, a ring of one device has no hop.
        let hop = model.hop_times.seconds(head, head);
        let all = RoundWindow::at_start(head, true, layers_per_round, layers_per_round);
        let alone = model.best_split_with_hop(all, hop).filter(|_| rules.may_drop_devices || devices == 1);
        let alone = alone.map_or(f64::INFINITY, |split| split.device_seconds);
        with_others.fold(f64::INFINITY, f64::min).min(alone)
    };
    (0..devices).map(bound).collect()
}

/// Returns g(w), the seconds per token of a device with its shortest hop and w = 0 to W layers; infinite for w = 0.
fn window_times(model: &LatencyModel, layers_per_round: u32, device: usize, head: bool) -> Vec<f64> {
    let hops = &model.hop_times;
    let [shortest, fixed] = [hops.shortest_hop_seconds(device), hops.fixed_hop_seconds(device)];
    let hop = if hops.depends_on_receiver { shortest } else { fixed };
    let time = |layers| {
        let window = RoundWindow::at_start(device, head, layers_per_round, layers);
        model.best_split_with_hop(window, hop).map_or(f64::INFINITY, |split| split.device_seconds)
    };
    let windows = (1..=layers_per_round).map(time);
    std::iter::once(f64::INFINITY).chain(windows).collect()
}

/// Returns for each device i the minimum seconds of j = 0 to W layers on all other devices, `p_i` (+) `s_i`.
fn programs_without_one(tables: &[Vec<f64>], layers_per_round: u32) -> Vec<Vec<f64>> {
    let base_case_seconds = base_case_seconds(layers_per_round);
    let one_by_one = |times: &mut Vec<f64>, table: &Vec<f64>| {
        let reached = times.clone();
        *times = min_plus_convolution(times, table);
        Some(reached)
    };
    let before = tables.iter().scan(base_case_seconds.clone(), one_by_one);
    let after: Vec<Vec<f64>> = tables.iter().rev().scan(base_case_seconds, one_by_one).collect();
    before.zip(after.iter().rev()).map(|(before, after)| min_plus_convolution(&before, after)).collect()
}

/// Returns the seconds of j = 0 to W layers on no device: 0 for j = 0, else infinity.
pub(crate) fn base_case_seconds(layers_per_round: u32) -> Vec<f64> {
    let mut times = vec![f64::INFINITY; layers_per_round as usize + 1];
    times[0] = 0.0;
    times
}

/// Returns the min-plus convolution (f (+) g)(j) for j from 0 to W.
pub(crate) fn min_plus_convolution(first: &[f64], second: &[f64]) -> Vec<f64> {
    let mut merged = vec![f64::INFINITY; first.len()];
    for (placed, &seconds) in first.iter().enumerate().filter(|(_, seconds)| seconds.is_finite()) {
        min_plus_update(seconds, &second[..second.len() - placed], &mut merged[placed..]);
    }
    merged
}
