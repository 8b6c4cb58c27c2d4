//! Lower bounds of the time per token for each head, from the shortest hop of each sender.
//!
//! With the shortest hop of each sender, the next device does not matter, and the objective is separable. Its optimum
//! is a lower bound for every order of the ring, and exact if hops do not depend on the next device. The bounds for
//! all heads together take little more time than one dynamic program. Let `p_i` and `s_i` be the programs over the
//! devices before and after i; then each device is combined with the others as the head:
//!
//! ```text
//! bound(i) = min over w of g_head,i(w) + (p_i (+) s_i)(W - w),      (f (+) g)(j) = min over a of f(a) + g(j - a)
//! ```
//!
//! Not here: partial last rounds. Their lower bound is that of one round with the same share on each device, which
//! has at most as many windows.

use crate::latency::LatencyModel;
use crate::latency::gpu_split::RoundCounts;
use crate::solvers::dynamic_program::min_plus_update;

/// Returns a lower bound of T in seconds with each device as the head, for whole rounds of W layers; infinite if no
/// plan exists. Rounding errors may increase it by about 1e-12 (relative).
pub(crate) fn bounds_by_head(model: &LatencyModel, ring_layers: u32, may_drop: bool) -> Vec<f64> {
    let devices = model.device_count();
    let window_times = |device: usize, head: bool| window_times(model, ring_layers, device, head);
    let workers: Vec<Vec<f64>> = (0..devices)
        .map(|device| {
            let mut times = window_times(device, false);
            times[0] = if may_drop { 0.0 } else { f64::INFINITY };
            times
        })
        .collect();
    let others = LeaveOneOut::new(&workers, ring_layers as usize);
    let round_counts = RoundCounts::whole(model.model_layers() / ring_layers);
    (0..devices)
        .map(|head| {
            let with_others = others.with_device(head, &window_times(head, true));
            // With hops by pair, a ring of one device has no hop.
            let hop = model.hops.seconds(head, head);
            let alone = model.best_split_with_hop(head, true, ring_layers, round_counts, hop);
            let alone = alone.filter(|_| may_drop || devices == 1);
            with_others.min(alone.map_or(f64::INFINITY, |split| split.seconds))
        })
        .collect()
}

/// Returns g(w) with the shortest hop of the device, for w from 0; infinite for w = 0.
fn window_times(model: &LatencyModel, ring_layers: u32, device: usize, head: bool) -> Vec<f64> {
    let round_counts = RoundCounts::whole(model.model_layers() / ring_layers);
    let hop = if model.hops.depends_on_receiver {
        model.hops.shortest_hop(device)
    } else {
        model.hops.fixed_hop(device)
    };
    let time = |window| {
        model.best_split_with_hop(device, head, window, round_counts, hop).map(|split| split.seconds)
    };
    let windows = (1..=ring_layers).map(|window| time(window).unwrap_or(f64::INFINITY));
    std::iter::once(f64::INFINITY).chain(windows).collect()
}

/// The dynamic programs over all devices but one, for each of these devices.
struct LeaveOneOut {
    /// `p_i`: the program over the devices before i.
    before: Vec<Vec<f64>>,
    /// `s_i`: the program over the devices after i.
    after: Vec<Vec<f64>>,
}

impl LeaveOneOut {
    fn new(tables: &[Vec<f64>], ring_layers: usize) -> Self {
        let mut no_layers = vec![f64::INFINITY; ring_layers + 1];
        no_layers[0] = 0.0;
        let one_by_one = |times: &mut Vec<f64>, table: &Vec<f64>| {
            let reached = times.clone();
            *times = min_plus_convolution(times, table);
            Some(reached)
        };
        let before = tables.iter().scan(no_layers.clone(), one_by_one).collect();
        let mut after: Vec<Vec<f64>> = tables.iter().rev().scan(no_layers, one_by_one).collect();
        after.reverse();
        Self { before, after }
    }

    /// Returns the best time of all devices if `device` has the window times `own`.
    fn with_device(&self, device: usize, own: &[f64]) -> f64 {
        let others = min_plus_convolution(&self.before[device], &self.after[device]);
        own.iter().zip(others.iter().rev()).map(|(own, others)| own + others).fold(f64::INFINITY, f64::min)
    }
}

/// Returns the min-plus convolution (f (+) g)(j) for j from 0 to W.
pub(crate) fn min_plus_convolution(first: &[f64], second: &[f64]) -> Vec<f64> {
    let mut merged = vec![f64::INFINITY; first.len()];
    for (placed, &seconds) in first.iter().enumerate().filter(|(_, seconds)| seconds.is_finite()) {
        min_plus_update(seconds, &second[..second.len() - placed], &mut merged[placed..]);
    }
    merged
}
