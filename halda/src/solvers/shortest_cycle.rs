//! Shortest closed cycles through devices, exact for few devices and improved step by step for many.
//!
//! A token's hops in a whole round are a closed tour through the devices in the ring, in one direction, with hops
//! that need not be the same both ways. Few devices: Held and Karp's dynamic program over all subsets,
//!
//! ```text
//! d(S, j) = min over i in S \ {j} of d(S \ {j}, i) + hop(i, j)       tour(S) = min over j of d(S, j) + hop(j, s)
//! ```
//!
//! with s the first of S (M. Held, R. M. Karp, "A dynamic programming approach to sequencing problems", 1962).
//! Many: the nearest neighbour as a start, then reversing and moving stretches while that helps.
//!
//! Not here: layers, and which devices the tour should visit ([`crate::solvers::ring_order`]).

use crate::latency::LatencyModel;

pub(crate) struct ShortestCycles {
    devices: usize,
    /// hops[from * M + to]
    hops: Vec<f64>,
    /// paths[S * M + j]: the shortest path from the first of S through all of S to j.
    paths: Vec<f64>,
}

impl ShortestCycles {
    /// Computes all of them: O(2^M M^2).
    pub(crate) fn new(model: &LatencyModel) -> Self {
        let devices = model.device_count();
        let pairs = (0..devices).flat_map(|from| (0..devices).map(move |to| (from, to)));
        let hops: Vec<f64> = pairs.map(|(from, to)| model.hops.seconds(from, to)).collect();
        let mut paths = vec![f64::INFINITY; devices << devices];
        for set in 1_usize..1 << devices {
            let first = set.trailing_zeros() as usize;
            if set == 1 << first {
                paths[set * devices + first] = 0.0;
                continue;
            }
            for last in (first + 1..devices).filter(|last| set >> last & 1 == 1) {
                let others = set & !(1 << last);
                let shortest = (0..devices)
                    .filter(|before| others >> before & 1 == 1)
                    .map(|before| paths[others * devices + before] + hops[before * devices + last]);
                paths[set * devices + last] = shortest.fold(f64::INFINITY, f64::min);
            }
        }
        Self { devices, hops, paths }
    }

    /// Returns the length of the tour through a set in seconds, infinite if there is none, 0 for one device.
    pub(crate) fn seconds(&self, set: usize) -> f64 {
        self.last(set).map_or(f64::INFINITY, |last| self.closed(set, last))
    }

    /// Returns the tour through a set, from its first device.
    pub(crate) fn order(&self, set: usize) -> Vec<usize> {
        let mut order = Vec::new();
        let mut left = set;
        let mut next = self.last(set);
        while let Some(last) = next {
            order.push(last);
            let goal = self.paths[left * self.devices + last];
            left &= !(1 << last);
            next = (0..self.devices).filter(|before| left >> before & 1 == 1).find(|before| {
                self.paths[left * self.devices + before] + self.hops[before * self.devices + last] == goal
            });
        }
        order.reverse();
        order
    }

    fn closed(&self, set: usize, last: usize) -> f64 {
        let first = set.trailing_zeros() as usize;
        let home = if last == first { 0.0 } else { self.hops[last * self.devices + first] };
        self.paths[set * self.devices + last] + home
    }

    /// Returns the last device of the shortest tour.
    fn last(&self, set: usize) -> Option<usize> {
        let members = (0..self.devices).filter(|device| set >> device & 1 == 1);
        members.min_by(|left, right| self.closed(set, *left).total_cmp(&self.closed(set, *right)))
    }
}

/// Returns a short closed tour through these devices by local search; avoiding missing links comes first.
pub(crate) fn short_cycle(model: &LatencyModel, members: &[usize]) -> Vec<usize> {
    let mut cycle: Vec<usize> = members.iter().take(1).copied().collect();
    let mut left: Vec<usize> = members.iter().skip(1).copied().collect();
    while let Some(&last) = cycle.last() {
        let hop = |device: &usize| model.hops.seconds(last, *device);
        let nearest = (0..left.len()).min_by(|one, other| hop(&left[*one]).total_cmp(&hop(&left[*other])));
        let Some(nearest) = nearest else { break };
        cycle.push(left.remove(nearest));
    }
    let mut length = cycle_length(model, &cycle);
    // Every step shortens the tour, so that this ends; the cap bounds the time on wild hops.
    for _ in 0..members.len() * 4 {
        let Some((shorter, seconds)) = improved(model, &cycle, length) else { break };
        (cycle, length) = (shorter, seconds);
    }
    cycle
}

/// Inserts all devices missing from a cycle, each where it adds the shortest detour.
pub(crate) fn with_missing_devices(model: &LatencyModel, mut cycle: Vec<usize>) -> Vec<usize> {
    let others: Vec<usize> = (0..model.device_count()).filter(|device| !cycle.contains(device)).collect();
    for device in others {
        let added = |place: usize| {
            let (before, after) = (cycle[place], cycle[(place + 1) % cycle.len()]);
            let missing = [(before, device), (device, after)].map(|(from, to)| model.hops.seconds(from, to));
            missing.iter().sum::<f64>()
        };
        let best = (0..cycle.len()).min_by(|one, other| added(*one).total_cmp(&added(*other)));
        cycle.insert(best.map_or(cycle.len(), |place| place + 1), device);
    }
    cycle
}

type Length = (usize, f64);

fn cycle_length(model: &LatencyModel, cycle: &[usize]) -> Length {
    let hops = cycle.iter().enumerate().map(|(place, &from)| {
        let to = cycle[(place + 1) % cycle.len()];
        if from == to { 0.0 } else { model.hops.seconds(from, to) }
    });
    hops.fold(
        (0, 0.0),
        |(missing, seconds), hop| {
            if hop.is_finite() { (missing, seconds + hop) } else { (missing + 1, seconds) }
        },
    )
}

fn shorter(one: Length, other: Length) -> bool {
    one.0 < other.0 || one.0 == other.0 && one.1 < other.1 * (1.0 - 1e-12)
}

/// Returns the best tour by reversing or moving one segment, if it is shorter.
fn improved(model: &LatencyModel, cycle: &[usize], length: Length) -> Option<(Vec<usize>, Length)> {
    let mut best: Option<(Vec<usize>, Length)> = None;
    let mut offer = |candidate: Vec<usize>| {
        let seconds = cycle_length(model, &candidate);
        if shorter(seconds, best.as_ref().map_or(length, |(_, seconds)| *seconds)) {
            best = Some((candidate, seconds));
        }
    };
    for from in 0..cycle.len() {
        for to in from + 2..=cycle.len() {
            let mut reversed = cycle.to_vec();
            reversed[from..to].reverse();
            offer(reversed);
        }
        for stretch in 1..=3.min(cycle.len() - from) {
            let mut without = cycle.to_vec();
            let moved: Vec<usize> = without.drain(from..from + stretch).collect();
            for place in 0..=without.len() {
                let mut candidate = without.clone();
                candidate.splice(place..place, moved.iter().copied());
                offer(candidate);
            }
        }
    }
    best
}
