//! Relays: devices without layers that connect two devices of the ring.
//!
//! prima.cpp paper, section 3.3: where removing a device would break the ring, it is kept as a relay without work.
//! For an assignment whose ring has a gap, each gap in turn is bridged by the cheapest path through devices that
//! are not in the ring yet (Dijkstra's algorithm; the hop then costs the sum of its hops). A device is in the ring
//! once, so that an earlier gap may take what a later one needs.
//!
//! Not here: `exact`, which weighs relays with everything else ([`crate::solvers::dynamic_program`]), and rings without
//! a gap, even where a detour would be faster.

use crate::latency::LatencyModel;
use crate::problem::assignment::Assignment;

/// Adds relays where the ring has gaps that devices without layers can bridge. An assignment without gaps, or with
/// gaps that no relay closes, is returned unchanged.
pub(crate) fn with_relays(model: &LatencyModel, assignment: Assignment) -> Assignment {
    let devices = model.device_count();
    let ring = assignment.ring();
    let in_range = ring.iter().all(|device| *device < devices) && assignment.window_layers.len() == devices;
    let gap = |(place, &from): (usize, &usize)| {
        model.hops.seconds(from, ring[(place + 1) % ring.len()]) == f64::INFINITY
    };
    if !in_range || !ring.iter().enumerate().any(gap) {
        return assignment;
    }
    let mut free: Vec<bool> = (0..devices).map(|device| !ring.contains(&device)).collect();
    let mut order = Vec::with_capacity(devices);
    for (place, &from) in ring.iter().enumerate() {
        order.push(from);
        let to = ring[(place + 1) % ring.len()];
        if model.hops.seconds(from, to) < f64::INFINITY {
            continue;
        }
        let Some(path) = cheapest_path(model, from, to, &free) else { return assignment };
        for relay in path {
            free[relay] = false;
            order.push(relay);
        }
    }
    Assignment { order: Some(order), ..assignment }
}

/// Returns the devices between two on the cheapest path through free ones.
fn cheapest_path(model: &LatencyModel, from: usize, to: usize, free: &[bool]) -> Option<Vec<usize>> {
    let devices = free.len();
    let mut seconds: Vec<f64> = (0..devices).map(|device| model.hops.seconds(from, device)).collect();
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
            let through = seconds[nearest] + model.hops.seconds(nearest, device);
            if through < seconds[device] {
                (seconds[device], before[device]) = (through, nearest);
            }
        }
    }
    let mut path = Vec::new();
    let mut device = before[to];
    while device != from {
        path.push(device);
        device = before[device];
    }
    path.reverse();
    Some(path)
}
