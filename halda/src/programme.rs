//! Which windows are the fastest for one ring size, one head and one order of the devices?
//!
//! For a fixed ring size W the objective is separable: T = `sum_m` `g_m(w_m)` with `sum_m` `w_m` = W, where `g_m(w)` is
//! the best time of device m with a window of w over its GPU splits ([`crate::gpu_split`]). The memory case
//! and the slow-disk rule are functions of the device's own window, so they live inside `g_m`, and the circular
//! dependency that makes the paper iterate over sets M1-M4 does not arise. A dynamic programme over devices,
//!
//! ```text
//! f_m(j) = min over w of f_{m-1}(j - w) + g_m(w),      answer f_M(W),      O(M W^2)
//! ```
//!
//! is exact; dropping a device is the choice w = 0 with `g_m(0)` = 0.
//!
//! **Hops that depend on who comes next.** The state is then also the last device of the ring so far:
//!
//! ```text
//! a_m(j) = min over p before m of f_p(j) + k hop(p, m)        nobody between p and m is in the ring
//! f_m(j) = min over w of a_m(j - w) + g_m(w)                  answer min over m of f_m(W) + k hop(m, head)
//! ```
//!
//! The hop does not depend on m's window, so this costs O(M^2 W + M W^2) and not M times as much. In whole turns
//! w = 0 is a choice too: m is then in the ring without layers, a relay (prima.cpp paper, section 3.3).
//!
//! **Remainder windows.** If W does not divide L, the last turn is partial and what a device does in it
//! depends on the layers that are left when the turn reaches it: `rest_m` = max(0, R - sum_{j before m} `w_j`). The
//! programme goes through the devices in ring order, and that sum *is* its state, so `g_m(w)` only becomes
//! `g_m(w, rest)` and the result stays exact. A hop into m is paid for the partial turn too while layers are left,
//! and the device that takes the last of them hands back to the head.
//!
//! Not here: which ring sizes, heads and orders are tried ([`crate::exact`], [`crate::order`]).

use crate::assignment::Assignment;
use crate::exact::evaluated;
use crate::gpu_split::{Split, Turns};
use crate::latency::LatencyModel;
use crate::strategy::Infeasible;

/// The problem for one ring size and one order.
pub(crate) struct SizedProblem<'a, 'i> {
    pub model: &'a LatencyModel<'i>,
    /// Who may be in the ring, the head first.
    pub order: &'a [usize],
    pub ring_layers: u32,
    /// The smallest window of each device: 1 keeps it in the ring, 0 lets it be dropped. The head's is 1.
    pub least_windows: &'a [u32],
}

/// The best times up to each position, for every number of layers placed: `arrive[position * (W + 1) + j]`
/// before the device there has its window, `cost[..]` after.
struct Times {
    arrive: Vec<f64>,
    cost: Vec<f64>,
}

impl SizedProblem<'_, '_> {
    /// The fastest assignment of exactly W layers a turn.
    pub(crate) fn optimum(&self) -> Result<Assignment, Infeasible> {
        let linked = self.model.hops.neighbour_matters;
        let times = if linked { self.linked_times() } else { self.plain_times() };
        let last = if linked { self.best_end(&times) } else { self.plain_end(&times) };
        let Some(last) = last else { return Err(self.reason()) };
        let found = self.traced_back(&times, last, linked);
        // The programme without neighbours charges a ring of one device the hop that it does not make.
        let alone = if !linked && self.model.hops.by_pair() { self.alone() } else { None };
        let seconds = |assignment: &Assignment| evaluated(self.model, assignment);
        Ok(alone.filter(|alone| seconds(alone) < seconds(&found)).unwrap_or(found))
    }

    /// g(w) of a device for w from 0, if turns are whole.
    pub(crate) fn whole_turn_times(&self, device: usize) -> Vec<f64> {
        (0..=self.ring_layers).map(|window| self.window_time(device, window, 0)).collect()
    }

    /// Everything on the head, if nobody else must be in the ring and it is allowed.
    fn alone(&self) -> Option<Assignment> {
        let devices = self.model.device_count();
        let others = self.order.iter().skip(1);
        if others.into_iter().any(|device| self.least_windows[*device] > 0) {
            return None;
        }
        let head = self.head();
        let split = self.split(head, self.ring_layers, self.remainder(), 0.0)?;
        let rounds = self.model.model_layers().div_ceil(self.ring_layers);
        let mut alone = Assignment::new(head, rounds, vec![0; devices], vec![0; devices]);
        alone.window_layers[head] = self.ring_layers;
        alone.gpu_layers[head] = split.gpu_layers;
        Some(alone)
    }

    fn head(&self) -> usize {
        self.order[0]
    }

    fn columns(&self) -> usize {
        self.ring_layers as usize + 1
    }

    /// R.
    fn remainder(&self) -> usize {
        (self.model.model_layers() % self.ring_layers) as usize
    }

    /// floor(L/W).
    fn whole_turns(&self) -> f64 {
        f64::from(self.model.model_layers() / self.ring_layers)
    }

    fn turns(&self, rest: usize) -> Turns {
        Turns { rounds: self.model.model_layers() / self.ring_layers, rest: rest as u32 }
    }

    /// The programme where nobody asks who comes next.
    fn plain_times(&self) -> Times {
        let columns = self.columns();
        let mut times = self.times();
        let mut table = Vec::new();
        times.arrive[0] = 0.0;
        for (position, &device) in self.order.iter().enumerate() {
            if position > 0 {
                let before = (position - 1) * columns..position * columns;
                times.arrive[position * columns..][..columns].copy_from_slice(&times.cost[before]);
            }
            self.fill(device, &mut table);
            self.place(position, &table, 0, 0.0, &mut times);
        }
        times
    }

    /// The programme with the last device of the ring as its state.
    fn linked_times(&self) -> Times {
        let columns = self.columns();
        let mut times = self.times();
        let mut table = Vec::new();
        times.arrive[0] = 0.0;
        for (position, &device) in self.order.iter().enumerate() {
            for before in self.predecessors(position) {
                let hop = self.model.hops.seconds(self.order[before], device);
                if hop == f64::INFINITY {
                    continue;
                }
                for placed in 0..columns {
                    let total = times.cost[before * columns + placed] + self.hops_into(placed) * hop;
                    let arrived = &mut times.arrive[position * columns + placed];
                    *arrived = arrived.min(total);
                }
            }
            self.fill(device, &mut table);
            let home = self.model.hops.seconds(device, self.head());
            self.place(position, &table, self.smallest(position), home, &mut times);
        }
        times
    }

    fn times(&self) -> Times {
        let entries = self.order.len() * self.columns();
        Times { arrive: vec![f64::INFINITY; entries], cost: vec![f64::INFINITY; entries] }
    }

    /// Times a hop into a device is made when so many layers are placed before it.
    fn hops_into(&self, placed: usize) -> f64 {
        self.whole_turns() + if placed < self.remainder() { 1.0 } else { 0.0 }
    }

    /// The smallest window of a device that is in the ring: 0 is a relay.
    fn smallest(&self, position: usize) -> usize {
        usize::from(self.remainder() > 0 || self.least_windows[self.order[position]] > 0)
    }

    /// Who may come right before a position: nobody is skipped who must be in the ring.
    fn predecessors(&self, position: usize) -> std::ops::Range<usize> {
        let kept = (0..position).rev().find(|before| self.least_windows[self.order[*before]] > 0);
        kept.unwrap_or(0)..position
    }

    /// cost[position][j + w] = min over j, w of arrive[position][j] + g(w, rest(j)), from windows of `smallest` on.
    /// Who takes the last layer of a partial turn pays `home`.
    fn place(&self, position: usize, table: &[f64], smallest: usize, home: f64, times: &mut Times) {
        let (columns, remainder) = (self.columns(), self.remainder());
        let row = position * columns..(position + 1) * columns;
        let (arrive, cost) = (&times.arrive[row.clone()], &mut times.cost[row]);
        for (placed, &before) in arrive.iter().enumerate().filter(|(_, before)| before.is_finite()) {
            let rest = remainder.saturating_sub(placed);
            let own = &table[rest * columns..(rest + 1) * columns - placed];
            let cost = &mut cost[placed..];
            let split = if rest > 0 { rest.min(own.len()) } else { own.len() };
            relax(before, &own[smallest.min(split)..split], &mut cost[smallest.min(split)..split]);
            relax(before + home, &own[split..], &mut cost[split..]);
        }
    }

    /// The time of a window at a position, by the same arithmetic as [`Self::place`].
    fn placed_time(&self, arrived: f64, device: usize, placed: usize, window: usize, home: f64) -> f64 {
        let remainder = self.remainder();
        let rest = remainder.saturating_sub(placed);
        let closes = rest > 0 && window >= rest;
        (if closes { arrived + home } else { arrived }) + self.window_time(device, window as u32, rest)
    }

    /// g(w, rest), infinite where not allowed.
    fn window_time(&self, device: usize, window: u32, rest: usize) -> f64 {
        if window < self.least_windows[device] {
            return f64::INFINITY;
        }
        let split = self.split(device, window, rest, self.model.hops.own(device));
        split.map_or(f64::INFINITY, |split| split.seconds)
    }

    fn split(&self, device: usize, window: u32, rest: usize, hop: f64) -> Option<Split> {
        let head = device == self.head();
        self.model.best_split_with_hop(device, head, window, self.turns(rest), hop)
    }

    /// table[rest * (W + 1) + w] = g(w, rest).
    fn fill(&self, device: usize, table: &mut Vec<f64>) {
        table.clear();
        for rest in 0..=self.remainder() {
            // With a rest of r, R - r layers are placed already: wider windows cannot come up.
            let placed = if rest == 0 { 0 } else { (self.remainder() - rest) as u32 };
            for window in 0..=self.ring_layers {
                let possible = window <= self.ring_layers - placed;
                table.push(if possible { self.window_time(device, window, rest) } else { f64::INFINITY });
            }
        }
    }

    fn plain_end(&self, times: &Times) -> Option<usize> {
        times.cost.last().is_some_and(|seconds| seconds.is_finite()).then_some(self.order.len() - 1)
    }

    /// The position of the last device of the best ring; of equals the first.
    fn best_end(&self, times: &Times) -> Option<usize> {
        let mut best = None;
        let mut fastest = f64::INFINITY;
        for position in self.predecessors(self.order.len()) {
            let home = self.model.hops.seconds(self.order[position], self.head());
            let all = times.cost[(position + 1) * self.columns() - 1] + self.whole_turns() * home;
            if all < fastest {
                (best, fastest) = (Some(position), all);
            }
        }
        best
    }

    /// Finds the choices that made the best time, last device first, and splits each window.
    fn traced_back(&self, times: &Times, last: usize, linked: bool) -> Assignment {
        let columns = self.columns();
        let devices = self.model.device_count();
        let rounds = self.model.model_layers().div_ceil(self.ring_layers);
        let mut assignment = Assignment::new(self.head(), rounds, vec![0; devices], vec![0; devices]);
        let mut ring = Vec::new();
        let (mut position, mut after) = (last, self.ring_layers as usize);
        loop {
            let device = self.order[position];
            let home = if linked { self.model.hops.seconds(device, self.head()) } else { 0.0 };
            let smallest = if linked { self.smallest(position) } else { 0 };
            let goal = times.cost[position * columns + after];
            let before = (0..=after.saturating_sub(smallest)).find(|&placed| {
                let arrived = times.arrive[position * columns + placed];
                arrived.is_finite() && self.placed_time(arrived, device, placed, after - placed, home) == goal
            });
            // The goal was made of one of these; without it the proposal's check will say what is wrong.
            let placed = before.unwrap_or(0);
            let window = (after - placed) as u32;
            let rest = self.remainder().saturating_sub(placed);
            let split = self.split(device, window, rest, self.model.hops.own(device));
            assignment.window_layers[device] = window;
            assignment.gpu_layers[device] = split.map_or(0, |split| split.gpu_layers);
            if linked || window > 0 {
                ring.push(device);
            }
            if position == 0 {
                break;
            }
            position = if linked { self.predecessor(times, position, placed) } else { position - 1 };
            after = placed;
        }
        ring.reverse();
        let as_given = Assignment::new(self.head(), rounds, assignment.window_layers.clone(), Vec::new());
        if ring != as_given.ring() {
            assignment.order = Some(ring);
        }
        assignment
    }

    /// Who came before a position that was reached with so many layers placed; of equals the first.
    fn predecessor(&self, times: &Times, position: usize, placed: usize) -> usize {
        let columns = self.columns();
        let device = self.order[position];
        let goal = times.arrive[position * columns + placed];
        let came_from = |before: &usize| {
            let hop = self.model.hops.seconds(self.order[*before], device);
            times.cost[before * columns + placed] + self.hops_into(placed) * hop == goal
        };
        self.predecessors(position).find(came_from).unwrap_or(0)
    }

    /// Names what makes this ring size impossible.
    fn reason(&self) -> Infeasible {
        let ring_layers = self.ring_layers;
        let kept = self.order.iter().filter(|device| self.least_windows[**device] > 0).count();
        if kept > ring_layers as usize {
            return Infeasible::MoreDevicesThanLayers { ring_layers, devices: kept };
        }
        let mut held = 0;
        for &device in self.order {
            let allowed = |window: &u32| self.window_time(device, *window, 0).is_finite();
            match (0..=ring_layers).rev().find(allowed) {
                None => {
                    let device = self.model.instance().devices[device].name.clone();
                    return Infeasible::HoldsNothing { device };
                }
                Some(window) => held += window,
            }
        }
        if held < ring_layers {
            return Infeasible::HoldsTooLittle { ring_layers, held };
        }
        // Without regard to links, is there a way?
        if self.model.hops.neighbour_matters && self.plain_end(&self.plain_times()).is_some() {
            return Infeasible::NoRing { ring_layers };
        }
        // Enough for a whole turn, and too little for what a partial last one adds.
        Infeasible::NothingAllowed { ring_layers }
    }
}

/// into[w] = min(into[w], base + own[w]).
pub(crate) fn relax(base: f64, own: &[f64], into: &mut [f64]) {
    for (best, seconds) in into.iter_mut().zip(own) {
        let total = base + seconds;
        *best = if total < *best { total } else { *best };
    }
}
