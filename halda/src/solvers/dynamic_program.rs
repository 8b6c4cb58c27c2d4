//! The dynamic program that finds the fastest windows for one ring size, one head and one order of the devices.
//!
//! For a fixed ring size W the objective is separable: T = `sum_m` `g_m(w_m)` with `sum_m` `w_m` = W, where `g_m(w)` is
//! what a window of w costs device m at best (`WindowTimes`). In the paper's objective that is the best of its GPU
//! splits ([`crate::latency::gpu_split`]): the memory case and the slow-disk rule are functions of the device's own
//! window, so they live inside `g_m`, and the circular dependency that makes the paper iterate over sets M1-M4 does not
//! arise. A dynamic program over devices,
//!
//! ```text
//! f_m(j) = min over w of f_{m-1}(j - w) + g_m(w),      answer f_M(W),      O(M W^2)
//! ```
//!
//! is exact; dropping a device is the choice w = 0 with `g_m(0)` = 0.
//!
//! **Hops that depend on the next device.** The state is then also the last device of the ring so far:
//!
//! ```text
//! a_m(j) = min over p before m of f_p(j) + k hop(p, m)        no device between p and m is in the ring
//! f_m(j) = min over w of a_m(j - w) + g_m(w)                  answer min over m of f_m(W) + k hop(m, head)
//! ```
//!
//! The hop does not depend on m's window, so this costs O(M^2 W + M W^2) and not M times as much. In whole rounds
//! w = 0 is a choice too: m is then in the ring without layers, a relay (prima.cpp paper, section 3.3).
//!
//! **Remainder windows.** If W does not divide L, the last round is partial and what a device does in it
//! depends on the layers that are left when the round reaches it: `rest_m` = max(0, R - sum_{j before m} `w_j`). The
//! program goes through the devices in ring order, and that sum *is* its state, so `g_m(w)` only becomes
//! `g_m(w, rest)` and the result stays exact; so it does where a window's cost depends on which layers it holds. A hop
//! into m is paid for the partial round too while layers are left, and the device that takes the last of them hands
//! back to the head.
//!
//! Not here: which ring sizes, heads and orders are tried ([`crate::solvers::exact`], [`crate::solvers::ring_order`]).

use crate::latency::LatencyModel;
use crate::latency::gpu_split::{RoundCounts, Split};
use crate::problem::assignment::Assignment;
use crate::strategy::Infeasible;

#[derive(Clone, Copy)]
pub(crate) struct RingSizeProblem<'a, 'i> {
    pub model: &'a LatencyModel<'i>,
    /// The devices that may be in the ring, the head first.
    pub order: &'a [usize],
    pub ring_layers: u32,
    /// The smallest window of each device: 1 keeps it in the ring, 0 allows dropping it. The head's is 1.
    pub least_windows: &'a [u32],
}

/// The times of windows, without hops.
pub(crate) trait WindowTimes {
    /// Returns the seconds of a window that begins after `placed` layers of a round, infinite where it is not
    /// allowed.
    fn seconds(&self, device: usize, window: u32, placed: usize) -> f64;

    /// Returns the number of places with different costs; all places from the last one on have the same.
    fn places(&self) -> usize;
}

/// The optimal windows of a ring.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Ring {
    pub seconds: f64,
    /// (device, window, layers of a round before it), in ring order. The window of a relay is 0.
    pub members: Vec<(usize, u32, usize)>,
}

/// The best times up to each position for every number of layers j: `arrive[position * (W + 1) + j]` before the
/// window of the device there, `cost[..]` after it.
struct Times {
    arrive: Vec<f64>,
    cost: Vec<f64>,
}

struct PaperTimes<'a, 'i>(RingSizeProblem<'a, 'i>);

impl WindowTimes for PaperTimes<'_, '_> {
    fn seconds(&self, device: usize, window: u32, placed: usize) -> f64 {
        self.0.split(device, window, placed).map_or(f64::INFINITY, |split| split.seconds)
    }

    fn places(&self) -> usize {
        self.0.remainder() + 1
    }
}

impl RingSizeProblem<'_, '_> {
    /// Returns the fastest assignment of exactly W layers per round by the paper's objective.
    pub(crate) fn optimum(&self) -> Result<Assignment, Infeasible> {
        let times = PaperTimes(*self);
        let found = self.fastest(&times).ok_or_else(|| self.reason(&times))?;
        Ok(self.assignment(&found, |device, window, placed| {
            self.split(device, window, placed).map_or(0, |split| split.gpu_layers)
        }))
    }

    /// Returns g(w) of a device for w from 0 in whole rounds, with its hops where they do not depend on the next
    /// device.
    pub(crate) fn whole_round_times(&self, device: usize) -> Vec<f64> {
        let times = PaperTimes(*self);
        (0..=self.ring_layers).map(|window| self.window_time(&times, device, window, 0)).collect()
    }

    /// Returns the ring with the least sum of times, `None` if there is none.
    pub(crate) fn fastest(&self, times: &impl WindowTimes) -> Option<Ring> {
        let linked = self.model.hops.neighbour_matters;
        let found = self.run(times, linked);
        let last = if linked { self.best_end(&found) } else { self.plain_end(&found) };
        let (seconds, last) = last?;
        let ring = Ring { seconds, members: self.reconstruct(times, &found, last, linked) };
        // The program without neighbours charges a ring of one device the hop that it does not make.
        let alone = if !linked && self.model.hops.by_pair() { self.alone(times) } else { None };
        Some(alone.filter(|alone| alone.seconds < ring.seconds).unwrap_or(ring))
    }

    /// Converts a ring to an assignment; `gpu_layers` maps (device, window, layers before it) to n.
    pub(crate) fn assignment(
        &self,
        ring: &Ring,
        gpu_layers: impl Fn(usize, u32, usize) -> u32,
    ) -> Assignment {
        let devices = self.model.device_count();
        let rounds = self.model.model_layers().div_ceil(self.ring_layers);
        let mut assignment = Assignment::new(self.head(), rounds, vec![0; devices], vec![0; devices]);
        for &(device, window, placed) in &ring.members {
            assignment.window_layers[device] = window;
            assignment.gpu_layers[device] = if window == 0 { 0 } else { gpu_layers(device, window, placed) };
        }
        let order: Vec<usize> = ring.members.iter().map(|(device, _, _)| *device).collect();
        if order != assignment.ring() {
            assignment.order = Some(order);
        }
        assignment
    }

    /// Returns the ring of the head alone, if that is allowed.
    fn alone(&self, times: &impl WindowTimes) -> Option<Ring> {
        let mut others = self.order.iter().skip(1);
        if others.any(|device| self.least_windows[*device] > 0) {
            return None;
        }
        let seconds = times.seconds(self.head(), self.ring_layers, 0);
        let members = vec![(self.head(), self.ring_layers, 0)];
        (seconds < f64::INFINITY).then_some(Ring { seconds, members })
    }

    pub(crate) fn head(&self) -> usize {
        self.order[0]
    }

    fn columns(&self) -> usize {
        self.ring_layers as usize + 1
    }

    pub(crate) fn remainder(&self) -> usize {
        (self.model.model_layers() % self.ring_layers) as usize
    }

    fn whole_rounds(&self) -> u32 {
        self.model.model_layers() / self.ring_layers
    }

    /// Runs the program; with `linked` the last device of the ring is part of its state.
    fn run(&self, times: &impl WindowTimes, linked: bool) -> Times {
        let columns = self.columns();
        let mut found = self.times();
        let mut table = Vec::new();
        found.arrive[0] = 0.0;
        for (position, &device) in self.order.iter().enumerate() {
            if linked {
                self.arrive(position, &mut found);
            } else if position > 0 {
                let before = (position - 1) * columns..position * columns;
                found.arrive[position * columns..][..columns].copy_from_slice(&found.cost[before]);
            }
            self.fill(times, device, &mut table);
            let (smallest, home) = self.smallest_and_home(position, linked);
            self.place(position, &table, smallest, home, &mut found);
        }
        found
    }

    /// Computes the arrival times at a position over the hops from every predecessor.
    fn arrive(&self, position: usize, found: &mut Times) {
        let columns = self.columns();
        for before in self.predecessors(position) {
            let hop = self.model.hops.seconds(self.order[before], self.order[position]);
            if hop == f64::INFINITY {
                continue;
            }
            for placed in 0..columns {
                let total = found.cost[before * columns + placed] + self.hops_into(placed) * hop;
                let arrived = &mut found.arrive[position * columns + placed];
                *arrived = arrived.min(total);
            }
        }
    }

    /// Returns the smallest window at a position, and its hop back to the head, which the program without neighbours
    /// does not count.
    fn smallest_and_home(&self, position: usize, linked: bool) -> (usize, f64) {
        if !linked {
            return (0, 0.0);
        }
        (self.smallest(position), self.model.hops.seconds(self.order[position], self.head()))
    }

    fn times(&self) -> Times {
        let entries = self.order.len() * self.columns();
        Times { arrive: vec![f64::INFINITY; entries], cost: vec![f64::INFINITY; entries] }
    }

    /// Returns how often a token makes a hop into a device that begins after `placed` layers.
    fn hops_into(&self, placed: usize) -> f64 {
        f64::from(self.whole_rounds()) + if placed < self.remainder() { 1.0 } else { 0.0 }
    }

    /// Returns the smallest window of a device in the ring: 0 is a relay.
    fn smallest(&self, position: usize) -> usize {
        usize::from(self.remainder() > 0 || self.least_windows[self.order[position]] > 0)
    }

    /// Returns the possible predecessors of a position; devices that must be in the ring are not skipped.
    fn predecessors(&self, position: usize) -> std::ops::Range<usize> {
        let kept = (0..position).rev().find(|before| self.least_windows[self.order[*before]] > 0);
        kept.unwrap_or(0)..position
    }

    /// Computes cost[position][j + w] = min over j, w of arrive[position][j] + g(w, j), with windows from `smallest`
    /// on. The device with the last layer of a partial round also pays the hop `home`. For j beyond the table its
    /// last row is used.
    fn place(&self, position: usize, table: &[f64], smallest: usize, home: f64, found: &mut Times) {
        let (columns, remainder) = (self.columns(), self.remainder());
        let last_row = table.len() / columns - 1;
        let row = position * columns..(position + 1) * columns;
        let (arrive, cost) = (&found.arrive[row.clone()], &mut found.cost[row]);
        for (placed, &before) in arrive.iter().enumerate().filter(|(_, before)| before.is_finite()) {
            let rest = remainder.saturating_sub(placed);
            let place = placed.min(last_row);
            let own = &table[place * columns..(place + 1) * columns - placed];
            let cost = &mut cost[placed..];
            let split = if rest > 0 { rest.min(own.len()) } else { own.len() };
            min_plus_update(before, &own[smallest.min(split)..split], &mut cost[smallest.min(split)..split]);
            min_plus_update(before + home, &own[split..], &mut cost[split..]);
        }
    }

    /// Returns the time of a window at a position, by the same arithmetic as [`Self::place`].
    fn placed_time(&self, arrived: f64, own: f64, placed: usize, window: usize, home: f64) -> f64 {
        let rest = self.remainder().saturating_sub(placed);
        let closes = rest > 0 && window >= rest;
        (if closes { arrived + home } else { arrived }) + own
    }

    /// Returns g(w) after `placed` layers of a round, with the device's hops where they do not depend on the next
    /// device; infinite where not allowed.
    fn window_time(&self, times: &impl WindowTimes, device: usize, window: u32, placed: usize) -> f64 {
        if window < self.least_windows[device] {
            return f64::INFINITY;
        }
        if window == 0 {
            return 0.0;
        }
        let in_partial_round = placed < self.remainder();
        // A head that takes all of a partial round has no device to send to.
        let all_of_it = placed == 0 && window as usize >= self.remainder() && self.model.hops.by_pair();
        let hops = self.whole_rounds() + u32::from(in_partial_round && !(all_of_it && device == self.head()));
        times.seconds(device, window, placed) + f64::from(hops) * self.model.hops.own(device)
    }

    fn split(&self, device: usize, window: u32, placed: usize) -> Option<Split> {
        let rest = self.remainder().saturating_sub(placed) as u32;
        let round_counts = RoundCounts { rounds: self.whole_rounds(), rest };
        self.model.best_split_with_hop(device, device == self.head(), window, round_counts, 0.0)
    }

    /// Sets table[j * (W + 1) + w] = g(w) after j layers; the last row holds for all places from there on.
    fn fill(&self, times: &impl WindowTimes, device: usize, table: &mut Vec<f64>) {
        table.clear();
        for placed in 0..times.places() {
            for window in 0..=self.ring_layers {
                let possible = window as usize + placed <= self.ring_layers as usize;
                let seconds = || self.window_time(times, device, window, placed);
                table.push(if possible { seconds() } else { f64::INFINITY });
            }
        }
    }

    fn plain_end(&self, found: &Times) -> Option<(f64, usize)> {
        let last = found.cost.last().copied().filter(|seconds| seconds.is_finite())?;
        Some((last, self.order.len() - 1))
    }

    /// Returns the time and the last position of the best ring, the first one on a tie.
    fn best_end(&self, found: &Times) -> Option<(f64, usize)> {
        let mut best = None;
        let mut fastest = f64::INFINITY;
        for position in self.predecessors(self.order.len()) {
            let home = self.model.hops.seconds(self.order[position], self.head());
            let all = found.cost[(position + 1) * self.columns() - 1] + f64::from(self.whole_rounds()) * home;
            if all < fastest {
                (best, fastest) = (Some((all, position)), all);
            }
        }
        best
    }

    /// Reconstructs the choices of the best time, last device first.
    fn reconstruct(
        &self,
        times: &impl WindowTimes,
        found: &Times,
        last: usize,
        linked: bool,
    ) -> Vec<(usize, u32, usize)> {
        let columns = self.columns();
        let mut members = Vec::new();
        let (mut position, mut after) = (last, self.ring_layers as usize);
        loop {
            let device = self.order[position];
            let (smallest, home) = self.smallest_and_home(position, linked);
            let goal = found.cost[position * columns + after];
            let before = (0..=after.saturating_sub(smallest)).find(|&placed| {
                let arrived = found.arrive[position * columns + placed];
                let window = after - placed;
                let place = placed.min(times.places() - 1);
                let own = || self.window_time(times, device, window as u32, place);
                arrived.is_finite() && self.placed_time(arrived, own(), placed, window, home) == goal
            });
            // The goal was made of one of these; without it the proposal's check will say what is wrong.
            let placed = before.unwrap_or(0);
            let window = (after - placed) as u32;
            if linked || window > 0 {
                members.push((device, window, placed));
            }
            if position == 0 {
                break;
            }
            position = if linked { self.predecessor(found, position, placed) } else { position - 1 };
            after = placed;
        }
        members.reverse();
        members
    }

    /// Returns the predecessor of a position at `placed` layers, the first one on a tie.
    fn predecessor(&self, found: &Times, position: usize, placed: usize) -> usize {
        let columns = self.columns();
        let device = self.order[position];
        let goal = found.arrive[position * columns + placed];
        let came_from = |before: &usize| {
            let hop = self.model.hops.seconds(self.order[*before], device);
            found.cost[before * columns + placed] + self.hops_into(placed) * hop == goal
        };
        self.predecessors(position).find(came_from).unwrap_or(0)
    }

    /// Returns why this ring size has no plan.
    pub(crate) fn reason(&self, times: &impl WindowTimes) -> Infeasible {
        let ring_layers = self.ring_layers;
        let kept = self.order.iter().filter(|device| self.least_windows[**device] > 0).count();
        if kept > ring_layers as usize {
            return Infeasible::MoreDevicesThanLayers { ring_layers, devices: kept };
        }
        let mut held = 0;
        for &device in self.order {
            let allowed = |window: &u32| {
                let mut places = [0, times.places() - 1].into_iter();
                places.any(|place| self.window_time(times, device, *window, place).is_finite())
            };
            match (0..=ring_layers).rev().find(allowed) {
                None => {
                    let device = self.model.instance().devices[device].name.clone();
                    return Infeasible::NoLayerFits { device };
                }
                Some(window) => held += window,
            }
        }
        if held < ring_layers {
            return Infeasible::TooLittleMemory { ring_layers, held };
        }
        // Without regard to links, is there a way?
        if self.model.hops.neighbour_matters && self.plain_end(&self.run(times, false)).is_some() {
            return Infeasible::NoRoute { ring_layers };
        }
        // Enough for a whole round, and too little for what a partial last one adds.
        Infeasible::NothingAllowed { ring_layers }
    }
}

/// Sets into[w] = min(into[w], base + own[w]).
pub(crate) fn min_plus_update(base: f64, own: &[f64], into: &mut [f64]) {
    for (best, seconds) in into.iter_mut().zip(own) {
        let total = base + seconds;
        *best = if total < *best { total } else { *best };
    }
}
