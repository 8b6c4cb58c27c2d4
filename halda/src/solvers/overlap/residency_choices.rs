//! The residencies that a planner may choose for a device.
//!
//! Those of the device's [`crate::runtime_model::RuntimeModel`]. Where `managed` is offered without a stream buffer,
//! buffers of several sizes are: a larger one hides more in the idle time before a window and takes as much from what
//! is kept, so that the best depends on the plan.
//!
//! Not here: what a choice costs ([`crate::latency::steady_state`]).

use hearth_profiles::Bytes;
use hearth_schema::residency::{Residency, ResidencyOptions};

use crate::latency::LatencyModel;
use crate::latency::constraints::shape_violations;
use crate::problem::assignment::Assignment;

/// The stream buffers to try, as powers of two: from the default to more than a round needs on any device at home.
/// source: assumed
const BUFFERS: std::ops::RangeInclusive<u32> = 23..=33;

/// Returns every residency that a planner may choose for a device.
pub fn residency_options(residencies: &[ResidencyOptions]) -> Vec<ResidencyOptions> {
    let mut all = Vec::new();
    for &residency in residencies {
        if residency.policy == Residency::Managed && residency.stream_buffer.is_none() {
            let sized = |power: u32| ResidencyOptions { stream_buffer: Some(Bytes(1 << power)), ..residency };
            all.extend(BUFFERS.map(sized));
        } else {
            all.push(residency);
        }
    }
    all
}

/// Returns the residency of each device with which an assignment is fastest; `None` if memory cannot hold it.
pub fn best_residencies(model: &LatencyModel, assignment: &Assignment) -> Option<Vec<ResidencyOptions>> {
    if !shape_violations(model, assignment).is_empty() {
        return None;
    }
    let portions = model.portions(assignment);
    let shares: Vec<_> = portions.iter().map(|portion| portion.share).collect();
    let hops: f64 = model.communication(assignment, &shares).iter().sum();
    let mut bounds = vec![0.0];
    let mut timings = Vec::new();
    for (device, portion) in portions.iter().enumerate() {
        let all = residency_options(&model.instance().devices[device].runtime.residencies);
        let timing = |residency| {
            let timing = model.timing(device, device == assignment.head, portion, &residency)?;
            Some((residency, timing.own(), timing.busy))
        };
        let allowed: Vec<_> = all.into_iter().filter_map(timing).collect();
        bounds.extend(allowed.iter().map(|(_, _, busy)| *busy));
        timings.push(allowed);
    }
    bounds.sort_unstable_by(f64::total_cmp);
    bounds.dedup();
    let mut best: Option<(f64, Vec<ResidencyOptions>)> = None;
    for bound in bounds {
        let within = timings.iter().map(|allowed| {
            let in_time = allowed.iter().filter(|(_, _, busy)| *busy <= bound);
            in_time.min_by(|one, other| one.1.total_cmp(&other.1))
        });
        let Some(chosen) = within.collect::<Option<Vec<_>>>() else { continue };
        let seconds = (hops + chosen.iter().map(|(_, own, _)| own).sum::<f64>()).max(bound);
        if best.as_ref().is_none_or(|(fastest, _)| seconds < *fastest) {
            best = Some((seconds, chosen.into_iter().map(|(residency, _, _)| *residency).collect()));
        }
    }
    best.map(|(_, residencies)| residencies)
}
