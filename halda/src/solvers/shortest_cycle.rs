//! Shortest cycles through devices: exact for few devices, by local search for many devices.
//!
//! Hops may differ by direction. For few devices, Held and Karp's dynamic program over all subsets S is used. d(S, j)
//! is the length of the shortest path from the first device s of S through all of S to device j:
//!
//! ```text
//! d(S, j) = min over i in S \ {j} of d(S \ {j}, i) + hop(i, j)      cycle(S) = min over j of d(S, j) + hop(j, s)
//! ```
//!
//! (M. Held, R. M. Karp, "A dynamic programming approach to sequencing problems", 1962.) For many devices, a
//! nearest-neighbour cycle is improved by reversing and moving segments.

use crate::latency::LatencyModel;

/// The shortest cycles through all sets of devices. A set is a bit mask of devices.
pub(crate) struct ShortestCycles {
    devices: usize,
    /// The seconds of the hop from one device to another, at index from * M + to for M devices.
    hops: Vec<f64>,
    /// d(S, j) at index S * M + j: the seconds of the shortest path from the first device of S through all of S to j.
    paths: Vec<f64>,
}

impl ShortestCycles {
    /// Computes the shortest cycles through all sets of M devices in O(2^M M^2).
    pub(crate) fn new(model: &LatencyModel) -> Self {
        let devices = model.device_count();
        let pairs = (0..devices).flat_map(|from| (0..devices).map(move |to| (from, to)));
        let hops: Vec<f64> = pairs.map(|(from, to)| model.hop_times.seconds(from, to)).collect();
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

    /// Returns the seconds of the shortest cycle through a set of devices; infinite if links are missing.
    pub(crate) fn cycle_seconds(&self, set: usize) -> f64 {
        self.last(set).map_or(f64::INFINITY, |last| self.closed(set, last))
    }

    /// Returns the shortest cycle through a set of devices, starting at the first one.
    pub(crate) fn cycle_order(&self, set: usize) -> Vec<usize> {
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

    /// Returns the seconds of the shortest cycle through a set of devices that ends with the device `last`.
    fn closed(&self, set: usize, last: usize) -> f64 {
        let first = set.trailing_zeros() as usize;
        let return_hop = if last == first { 0.0 } else { self.hops[last * self.devices + first] };
        self.paths[set * self.devices + last] + return_hop
    }

    fn last(&self, set: usize) -> Option<usize> {
        let members = (0..self.devices).filter(|device| set >> device & 1 == 1);
        members.min_by(|left, right| self.closed(set, *left).total_cmp(&self.closed(set, *right)))
    }
}

/// Returns an order of all devices: a short cycle through `members`, found by local search, into which the other
/// devices are inserted. A cycle with fewer missing links is preferred to a shorter one.
pub(crate) fn candidate_cycle(model: &LatencyModel, members: &[usize]) -> Vec<usize> {
    let (first, others) = members.split_at(members.len().min(1));
    let (mut cycle, mut left) = (first.to_vec(), others.to_vec());
    while let Some(&last) = cycle.last() {
        let hop = |device: &usize| model.hop_times.seconds(last, *device);
        let nearest = (0..left.len()).min_by(|one, other| hop(&left[*one]).total_cmp(&hop(&left[*other])));
        let Some(nearest) = nearest else { break };
        cycle.push(left.remove(nearest));
    }
    let mut length = cycle_length(model, &cycle);
    // Each step shortens the cycle, so the search ends. The limit bounds its time for extreme hops.
    for _ in 0..members.len() * 4 {
        let Some((shorter, seconds)) = improved(model, &cycle, length) else { break };
        (cycle, length) = (shorter, seconds);
    }
    with_missing_devices(model, cycle)
}

/// Inserts all devices that are missing from a cycle, each at the place where its two new hops are shortest.
pub(crate) fn with_missing_devices(model: &LatencyModel, mut cycle: Vec<usize>) -> Vec<usize> {
    let others: Vec<usize> = (0..model.device_count()).filter(|device| !cycle.contains(device)).collect();
    for device in others {
        let added = |position: usize| {
            let (before, after) = (cycle[position], cycle[(position + 1) % cycle.len()]);
            let new_hops =
                [(before, device), (device, after)].map(|(from, to)| model.hop_times.seconds(from, to));
            new_hops.iter().sum::<f64>()
        };
        let best = (0..cycle.len()).min_by(|one, other| added(*one).total_cmp(&added(*other)));
        cycle.insert(best.map_or(cycle.len(), |position| position + 1), device);
    }
    cycle
}

/// The length of a cycle: the number of missing links, and the seconds of the hops over the existing links.
type Length = (usize, f64);

fn cycle_length(model: &LatencyModel, cycle: &[usize]) -> Length {
    let hops = cycle.iter().enumerate().map(|(position, &from)| {
        let to = cycle[(position + 1) % cycle.len()];
        if from == to { 0.0 } else { model.hop_times.seconds(from, to) }
    });
    let add = |(missing, seconds): Length, hop: f64| {
        if hop.is_finite() { (missing, seconds + hop) } else { (missing + 1, seconds) }
    };
    hops.fold((0, 0.0), add)
}

/// Returns whether the length of a cycle is less than that of another one by more than rounding errors.
fn is_shorter(one: Length, other: Length) -> bool {
    one.0 < other.0 || one.0 == other.0 && one.1 < other.1 * (1.0 - 1e-12)
}

/// Returns the shortest cycle after reversing or moving one segment, and its length; `None` if none is shorter than
/// `cycle`.
fn improved(model: &LatencyModel, cycle: &[usize], length: Length) -> Option<(Vec<usize>, Length)> {
    let mut best: Option<(Vec<usize>, Length)> = None;
    let mut offer = |candidate: Vec<usize>| {
        let seconds = cycle_length(model, &candidate);
        if is_shorter(seconds, best.as_ref().map_or(length, |(_, seconds)| *seconds)) {
            best = Some((candidate, seconds));
        }
    };
    for from in 0..cycle.len() {
        for to in from + 2..=cycle.len() {
            let mut reversed = cycle.to_vec();
            reversed[from..to].reverse();
            offer(reversed);
        }
        for segment in 1..=3.min(cycle.len() - from) {
            let mut without = cycle.to_vec();
            let moved: Vec<usize> = without.drain(from..from + segment).collect();
            for position in 0..=without.len() {
                let mut candidate = without.clone();
                candidate.splice(position..position, moved.iter().copied());
                offer(candidate);
            }
        }
    }
    best
}
