//! The dynamic program that finds the fastest windows for one ring size, one head and one order of the devices.
//!
//! With W layers per round, the time per token of M devices is a sum: T = `sum_m` `g_m(w_m)` with `sum_m` `w_m` = W,
//! where `g_m(w)` is the minimum time of device m with a window of w layers (`WindowTimes`). With the prima.cpp paper's
//! objective it is the time of the best GPU split ([`crate::latency::gpu_split`]). The memory case depends only on the
//! window of the device, so the paper's iteration over the sets M1-M4 is not needed. Let `f_m(j)` be the minimum time
//! of j layers on the first m devices. The dynamic program is exact, and drops a device by w = 0 with `g_m(0)` = 0:
//!
//! ```text
//! f_m(j) = min over w of f_{m-1}(j - w) + g_m(w),      result f_M(W),      O(M W^2)
//! ```
//!
//! **Hops that depend on the next device.** Then the last device of the ring so far is also in the state (k rounds):
//!
//! ```text
//! a_m(j) = min over p before m of f_p(j) + k hop(p, m)        no device between p and m is in the ring
//! f_m(j) = min over w of a_m(j - w) + g_m(w)                  result min over m of f_m(W) + k hop(m, head)
//! ```
//!
//! The hop does not depend on the window of m, so this takes O(M^2 W + M W^2). With whole rounds w = 0 is possible
//! too: m is then a relay, which is in the ring without layers (prima.cpp paper, section 3.3).
//!
//! **Partial last round.** If W does not divide L, the layers of a device in the partial last round depend on those
//! that remain when the round reaches it: `rest_m` = max(0, R - sum_{j before m} `w_j`). The program adds the
//! devices in ring order, and this sum is its state, so with `g_m(w, rest)` instead of `g_m(w)` the result is still
//! exact. The same holds if the time of a window depends on which layers it has. While layers remain, the partial
//! round has a hop to m too, and the device with its last layer sends to the head.

use crate::latency::gpu_split::GpuSplit;
use crate::{Assignment, InfeasibleReason, LatencyModel, RoundWindow};

#[derive(Clone, Copy)]
pub(crate) struct RingSizeProblem<'a, 'i> {
    pub model: &'a LatencyModel<'i>,
    /// The indices of the devices that may be in the ring, in ring order from the head.
    pub ring_order: &'a [usize],
    pub layers_per_round: u32,
    /// The minimum window of each device in layers: 1 for the head and other devices that must be in the ring, else 0.
    pub min_windows: &'a [u32],
}

pub(crate) trait WindowTimes {
    /// Returns the seconds per token of a device whose window has `window` layers and follows `layers_before` layers of
    /// the round, without hops; infinite if this window is not allowed.
    fn window_seconds(&self, device: usize, window: u32, layers_before: usize) -> f64;

    /// Returns the number n of values of `layers_before` with different times, which are 0 to n - 1. Larger values have
    /// the time of n - 1.
    fn offset_count(&self) -> usize;
}

pub(crate) struct Ring {
    pub total_seconds: f64,
    /// (device, layers of its window, layers of the round before its window) in ring order. A relay has 0 layers.
    pub members: Vec<(usize, u32, usize)>,
}

/// The minimum seconds per token of the devices up to each position of the order, at index position * (W + 1) + j.
struct BestTimes {
    /// `a_m(j)`: the minimum seconds before the window of device m if j layers of the round precede this window.
    arrival: Vec<f64>,
    /// `f_m(j)`: the minimum seconds including the window of device m if the window ends after j layers of the round.
    cost: Vec<f64>,
}

struct PaperTimes<'a, 'i>(RingSizeProblem<'a, 'i>);

impl WindowTimes for PaperTimes<'_, '_> {
    fn window_seconds(&self, device: usize, window: u32, layers_before: usize) -> f64 {
        self.0.split(device, window, layers_before).map_or(f64::INFINITY, |split| split.device_seconds)
    }

    fn offset_count(&self) -> usize {
        self.0.remainder() + 1
    }
}

impl RingSizeProblem<'_, '_> {
    /// Returns the assignment with W layers per round that is fastest by the prima.cpp paper's objective.
    pub(crate) fn optimum(&self) -> Result<Assignment, InfeasibleReason> {
        let times = PaperTimes(*self);
        let found = self.fastest_ring(&times).ok_or_else(|| self.infeasible_reason(&times))?;
        Ok(self.ring_to_assignment(&found, |device, window, layers_before| {
            self.split(device, window, layers_before).map_or(0, |split| split.gpu_layers)
        }))
    }

    /// Returns g(w), the seconds per token of a device in whole rounds, for windows of w = 0 to W layers, with hops as
    /// in [`Self::window_time`].
    pub(crate) fn whole_round_times(&self, device: usize) -> Vec<f64> {
        let times = PaperTimes(*self);
        (0..=self.layers_per_round).map(|window| self.window_time(&times, device, window, 0)).collect()
    }

    /// Returns the ring with the minimum sum of window times and hops; `None` if no ring is allowed.
    pub(crate) fn fastest_ring(&self, times: &impl WindowTimes) -> Option<Ring> {
        let linked = self.model.hop_times.depends_on_receiver;
        let found = self.run(times, linked);
        let (seconds, last) = self.end(&found, linked)?;
        let ring = Ring { total_seconds: seconds, members: self.reconstruct(times, &found, last, linked) };
        // The program without linked hops counts a hop for a ring of one device, which has none.
        let head_only =
            if !linked && self.model.hop_times.has_pair_times() { self.head_only(times) } else { None };
        Some(head_only.filter(|head_only| head_only.total_seconds < ring.total_seconds).unwrap_or(ring))
    }

    /// Converts a ring to an assignment. `gpu_layers` maps an element of [`Ring::members`] to its GPU layers.
    pub fn ring_to_assignment(
        &self,
        ring: &Ring,
        gpu_layers: impl Fn(usize, u32, usize) -> u32,
    ) -> Assignment {
        let devices = self.model.device_count();
        let rounds = self.model.model_layers().div_ceil(self.layers_per_round);
        let mut assignment = Assignment::new(self.head_device(), rounds, vec![0; devices], vec![0; devices]);
        for &(device, window, layers_before) in ring.members.iter().filter(|(_, window, _)| *window > 0) {
            assignment.window_layers[device] = window;
            assignment.gpu_layers[device] = gpu_layers(device, window, layers_before);
        }
        let order: Vec<usize> = ring.members.iter().map(|(device, _, _)| *device).collect();
        if order != assignment.ring() {
            assignment.ring_order = Some(order);
        }
        assignment
    }

    fn head_only(&self, times: &impl WindowTimes) -> Option<Ring> {
        if self.ring_order[1..].iter().any(|device| self.min_windows[*device] > 0) {
            return None;
        }
        let seconds = times.window_seconds(self.head_device(), self.layers_per_round, 0);
        let members = vec![(self.head_device(), self.layers_per_round, 0)];
        (seconds < f64::INFINITY).then_some(Ring { total_seconds: seconds, members })
    }

    pub(crate) fn head_device(&self) -> usize {
        self.ring_order[0]
    }

    /// Returns W + 1, the number of window sizes from 0 to W layers.
    fn columns(&self) -> usize {
        self.layers_per_round as usize + 1
    }

    /// Returns R = L mod W, the number of layers of a partial last round.
    pub(crate) fn remainder(&self) -> usize {
        (self.model.model_layers() % self.layers_per_round) as usize
    }

    fn whole_rounds(&self) -> u32 {
        self.model.model_layers() / self.layers_per_round
    }

    fn run(&self, times: &impl WindowTimes, linked: bool) -> BestTimes {
        let columns = self.columns();
        let unreached = vec![f64::INFINITY; self.ring_order.len() * columns];
        let mut found = BestTimes { arrival: unreached.clone(), cost: unreached };
        let mut table = Vec::new();
        found.arrival[0] = 0.0;
        for (position, &device) in self.ring_order.iter().enumerate() {
            if linked {
                self.compute_arrival(position, &mut found);
            } else if position > 0 {
                let before = (position - 1) * columns..position * columns;
                found.arrival[position * columns..][..columns].copy_from_slice(&found.cost[before]);
            }
            self.fill_window_times(times, device, &mut table);
            self.add_windows(position, linked, &table, &mut found);
        }
        found
    }

    fn compute_arrival(&self, position: usize, found: &mut BestTimes) {
        let columns = self.columns();
        for before in self.predecessors(position) {
            let hop = self.model.hop_times.seconds(self.ring_order[before], self.ring_order[position]);
            if hop == f64::INFINITY {
                continue;
            }
            for layers_before in 0..columns {
                let hops = self.hops_into(layers_before) * hop;
                let arrived = &mut found.arrival[position * columns + layers_before];
                *arrived = arrived.min(found.cost[before * columns + layers_before] + hops);
            }
        }
    }

    /// Returns the minimum number of layers of the device at a position (0 if it may be a relay, else 1), and the
    /// seconds of its hop to the head. If the window times include hops (not `linked`), both are 0.
    fn smallest_and_return_hop(&self, position: usize, linked: bool) -> (usize, f64) {
        if !linked {
            return (0, 0.0);
        }
        let device = self.ring_order[position];
        let smallest = usize::from(self.remainder() > 0 || self.min_windows[device] > 0);
        (smallest, self.model.hop_times.seconds(device, self.head_device()))
    }

    /// Returns the number of hops per token to a device whose window follows `layers_before` layers of the round.
    fn hops_into(&self, layers_before: usize) -> f64 {
        f64::from(self.whole_rounds() + u32::from(layers_before < self.remainder()))
    }

    /// Returns the possible positions of the previous device in the ring: back to the nearest one that must be in the
    /// ring.
    fn predecessors(&self, position: usize) -> std::ops::Range<usize> {
        let kept = (0..position).rev().find(|before| self.min_windows[self.ring_order[*before]] > 0);
        kept.unwrap_or(0)..position
    }

    /// Computes `cost[position][j + w]` = min over j, w of `arrival[position][j]` + g(w, j), for w from the minimum of
    /// the device. The device with the last layer of a partial round also gets the time of its hop to the head.
    fn add_windows(&self, position: usize, linked: bool, table: &[f64], found: &mut BestTimes) {
        let (smallest, return_hop) = self.smallest_and_return_hop(position, linked);
        let (columns, remainder) = (self.columns(), self.remainder());
        let last_row = table.len() / columns - 1;
        let row = position * columns..(position + 1) * columns;
        let (arrival, cost) = (&found.arrival[row.clone()], &mut found.cost[row]);
        for (layers_before, &before) in arrival.iter().enumerate().filter(|(_, before)| before.is_finite()) {
            let rest = remainder.saturating_sub(layers_before);
            let offset = layers_before.min(last_row);
            let own = &table[offset * columns..(offset + 1) * columns - layers_before];
            let cost = &mut cost[layers_before..];
            let split = if rest > 0 { rest.min(own.len()) } else { own.len() };
            min_plus_update(before, &own[smallest.min(split)..split], &mut cost[smallest.min(split)..split]);
            min_plus_update(before + return_hop, &own[split..], &mut cost[split..]);
        }
    }

    /// Returns g(w), the seconds per token of a device with this window, including its hops if they do not depend on
    /// the next device; infinite if the window is not allowed.
    fn window_time(&self, times: &impl WindowTimes, device: usize, window: u32, layers_before: usize) -> f64 {
        if window < self.min_windows[device] {
            return f64::INFINITY;
        }
        if window == 0 {
            return 0.0;
        }
        let in_partial_round = layers_before < self.remainder();
        // If the head computes the whole partial round, it has no hop in it.
        let covers_round = layers_before == 0 && window as usize >= self.remainder();
        let is_alone = covers_round && device == self.head_device() && self.model.hop_times.has_pair_times();
        let hops = self.whole_rounds() + u32::from(in_partial_round && !is_alone);
        times.window_seconds(device, window, layers_before)
            + f64::from(hops) * self.model.hop_times.fixed_hop_seconds(device)
    }

    fn split(&self, device: usize, window: u32, layers_before: usize) -> Option<GpuSplit> {
        let first =
            RoundWindow::at_start(device, device == self.head_device(), self.layers_per_round, window);
        let window = RoundWindow { layers_before_window: layers_before as u32, ..first };
        self.model.best_split_with_hop(window, 0.0)
    }

    /// Fills a table with the times of windows of w layers that follow j layers of the round, at index j * (W + 1) + w.
    fn fill_window_times(&self, times: &impl WindowTimes, device: usize, table: &mut Vec<f64>) {
        table.clear();
        for layers_before in 0..times.offset_count() {
            for window in 0..=self.layers_per_round {
                let possible = window as usize + layers_before <= self.layers_per_round as usize;
                let seconds = || self.window_time(times, device, window, layers_before);
                table.push(if possible { seconds() } else { f64::INFINITY });
            }
        }
    }

    /// Returns the seconds per token of the best ring and the position of its last device; ties go to the lowest one.
    fn end(&self, found: &BestTimes, linked: bool) -> Option<(f64, usize)> {
        let count = self.ring_order.len();
        let positions = if linked { self.predecessors(count) } else { count - 1..count };
        let rings = positions.map(|position| {
            let all = found.cost[(position + 1) * self.columns() - 1];
            let return_hop = || self.model.hop_times.seconds(self.ring_order[position], self.head_device());
            let hops = if linked { f64::from(self.whole_rounds()) * return_hop() } else { 0.0 };
            (all + hops, position)
        });
        rings.filter(|(seconds, _)| seconds.is_finite()).min_by(|one, other| one.0.total_cmp(&other.0))
    }

    /// Returns the [`Ring::members`] of the best ring, whose last device is at position `last`.
    fn reconstruct(
        &self,
        times: &impl WindowTimes,
        found: &BestTimes,
        last: usize,
        linked: bool,
    ) -> Vec<(usize, u32, usize)> {
        let columns = self.columns();
        let mut members = Vec::new();
        let (mut position, mut after) = (last, self.layers_per_round as usize);
        loop {
            let device = self.ring_order[position];
            let (smallest, return_hop) = self.smallest_and_return_hop(position, linked);
            let goal = found.cost[position * columns + after];
            let before = (0..=after.saturating_sub(smallest)).find(|&layers_before| {
                let arrived = found.arrival[position * columns + layers_before];
                let window = after - layers_before;
                let rest = self.remainder().saturating_sub(layers_before);
                let hop = if rest > 0 && window >= rest { return_hop } else { 0.0 };
                let offset = layers_before.min(times.offset_count() - 1);
                let own = || self.window_time(times, device, window as u32, offset);
                arrived.is_finite() && arrived + hop + own() == goal
            });
            // One of these gave the goal. If none is found, the check of the proposal reports the violation.
            let layers_before = before.unwrap_or(0);
            let window = (after - layers_before) as u32;
            if linked || window > 0 {
                members.push((device, window, layers_before));
            }
            if position == 0 {
                break;
            }
            position = if linked { self.predecessor(found, position, layers_before) } else { position - 1 };
            after = layers_before;
        }
        members.reverse();
        members
    }

    /// Returns the position of the device before `position` in the best ring; ties go to the lowest position.
    fn predecessor(&self, found: &BestTimes, position: usize, layers_before: usize) -> usize {
        let columns = self.columns();
        let device = self.ring_order[position];
        let goal = found.arrival[position * columns + layers_before];
        let came_from = |before: &usize| {
            let hop = self.model.hop_times.seconds(self.ring_order[*before], device);
            found.cost[before * columns + layers_before] + self.hops_into(layers_before) * hop == goal
        };
        self.predecessors(position).find(came_from).unwrap_or(0)
    }

    pub(crate) fn infeasible_reason(&self, times: &impl WindowTimes) -> InfeasibleReason {
        let layers_per_round = self.layers_per_round;
        let kept = self.ring_order.iter().filter(|device| self.min_windows[**device] > 0).count();
        if kept > layers_per_round as usize {
            return InfeasibleReason::MoreDevicesThanLayers { layers_per_round, devices: kept };
        }
        let mut held = 0;
        for &device in self.ring_order {
            let allowed = |window: &u32| {
                let mut offsets = [0, times.offset_count() - 1].into_iter();
                offsets.any(|offset| self.window_time(times, device, *window, offset).is_finite())
            };
            let Some(window) = (0..=layers_per_round).rev().find(allowed) else {
                return InfeasibleReason::NoLayerFits { device: self.model.device_name(device) };
            };
            held += window;
        }
        if held < layers_per_round {
            return InfeasibleReason::TooLittleMemory { layers_per_round, held };
        }
        // If there is a plan without regard to links, links are missing.
        if self.model.hop_times.depends_on_receiver && self.end(&self.run(times, false), false).is_some() {
            return InfeasibleReason::MissingLinks { layers_per_round };
        }
        // Memory suffices for whole rounds, but not for the additional layers of a partial last round.
        InfeasibleReason::NoAllowedPlan { layers_per_round }
    }
}

/// Sets `minima[w]` to `min(minima[w], base + addends[w])` for every w.
pub(crate) fn min_plus_update(base: f64, addends: &[f64], minima: &mut [f64]) {
    for (best, addend) in minima.iter_mut().zip(addends) {
        let total = base + addend;
        *best = if total < *best { total } else { *best };
    }
}
