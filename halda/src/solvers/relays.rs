//! Relays: devices without layers that connect two devices of the ring.
//!
//! prima.cpp paper, section 3.3: a device whose removal would break the ring stays in it as a relay without layers. A
//! gap is a pair of successive devices without a link. The gaps of an assignment are closed one after the other, each
//! by the fastest path through devices that are not in the ring yet (Dijkstra's algorithm). A device can be in the
//! ring only once, so an earlier gap may use a device that a later gap needs.
//!
//! Not here: relays that are only faster than an existing link ([`crate::solvers::dynamic_program`]).

use crate::{Assignment, LatencyModel};

/// Adds relays that close the gaps in the ring of an assignment. If a gap cannot be closed, returns it unchanged.
pub(crate) fn with_relays(model: &LatencyModel, assignment: Assignment) -> Assignment {
    let devices = model.device_count();
    let ring = assignment.ring();
    let in_range = ring.iter().all(|device| *device < devices) && assignment.window_layers.len() == devices;
    let is_gap = |(position, &from): (usize, &usize)| {
        model.hop_times.seconds(from, ring[(position + 1) % ring.len()]) == f64::INFINITY
    };
    if !in_range || !ring.iter().enumerate().any(is_gap) {
        return assignment;
    }
    let mut free: Vec<bool> = (0..devices).map(|device| !ring.contains(&device)).collect();
    let mut order = Vec::with_capacity(devices);
    for (position, &from) in ring.iter().enumerate() {
        order.push(from);
        let to = ring[(position + 1) % ring.len()];
        if model.hop_times.seconds(from, to) < f64::INFINITY {
            continue;
        }
        let Some(path) = fastest_path(model, from, to, &free) else { return assignment };
        for relay in path {
            free[relay] = false;
            order.push(relay);
        }
    }
    Assignment { ring_order: Some(order), ..assignment }
}

/// Returns the devices between `from` and `to` on the fastest path through free devices; `None` if no path exists.
fn fastest_path(model: &LatencyModel, from: usize, to: usize, free: &[bool]) -> Option<Vec<usize>> {
    let devices = free.len();
    let mut seconds: Vec<f64> = (0..devices).map(|device| model.hop_times.seconds(from, device)).collect();
    let mut before = vec![from; devices];
    let mut open: Vec<bool> = free.to_vec();
    open[to] = true;
    loop {
        let candidates = (0..devices).filter(|device| open[*device] && seconds[*device] < f64::INFINITY);
        let nearest = candidates.min_by(|left, right| seconds[*left].total_cmp(&seconds[*right]))?;
        if nearest == to {
            break;
        }
        open[nearest] = false;
        for device in (0..devices).filter(|device| open[*device]) {
            let through = seconds[nearest] + model.hop_times.seconds(nearest, device);
            if through < seconds[device] {
                (seconds[device], before[device]) = (through, nearest);
            }
        }
    }
    let previous = |device: &usize| Some(before[*device]);
    let mut path: Vec<usize> =
        std::iter::successors(previous(&to), previous).take_while(|device| *device != from).collect();
    path.reverse();
    Some(path)
}
