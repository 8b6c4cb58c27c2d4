//! The residencies that a planner may choose for a device.
//!
//! They are those of the device's [`crate::runtime_model::RuntimeModel`]. `managed` without a stream buffer is
//! expanded to stream buffers of several sizes. A larger buffer hides more reading in the idle time before a window,
//! but leaves less memory for kept weights, so the best size depends on the plan.
//!
//! Not here: the time with each residency ([`crate::latency::steady_state`]).

use hearth_profiles::Bytes;
use hearth_schema::residency::{Residency, ResidencyOptions};

use crate::latency::LatencyModel;
use crate::latency::constraints::shape_violations;
use crate::problem::assignment::Assignment;

/// The sizes of stream buffers to try, as exponents of two: from the default to more than a round needs on any home
/// device. source: assumed
const BUFFER_EXPONENTS: std::ops::RangeInclusive<u32> = 23..=33;

/// Returns all residencies that a planner may choose for a device, given those of its runtime model.
pub fn residency_options(residencies: &[ResidencyOptions]) -> Vec<ResidencyOptions> {
    let mut all = Vec::new();
    for &residency in residencies {
        if residency.policy == Residency::Managed && residency.stream_buffer.is_none() {
            let sized =
                |exponent: u32| ResidencyOptions { stream_buffer: Some(Bytes(1 << exponent)), ..residency };
            all.extend(BUFFER_EXPONENTS.map(sized));
        } else {
            all.push(residency);
        }
    }
    all
}

/// Returns the residencies of the devices with which an assignment is fastest in the steady state. Returns `None` if
/// the assignment violates a constraint of shape or memory.
pub fn best_residencies(model: &LatencyModel, assignment: &Assignment) -> Option<Vec<ResidencyOptions>> {
    if !shape_violations(model, assignment).is_empty() {
        return None;
    }
    let works = model.work_by_device(assignment);
    let shares: Vec<_> = works.iter().map(|device_work| device_work.share).collect();
    let hops: f64 = model.communication(assignment, &shares).iter().sum();
    let mut bounds = vec![0.0];
    let mut timings = Vec::new();
    for (device, device_work) in works.iter().enumerate() {
        let all = residency_options(&model.instance().devices[device].runtime.residencies);
        let timing = |residency| {
            let timing = model.timing(device, device == assignment.head, device_work, &residency)?;
            Some((residency, timing.own_seconds(), timing.busy_seconds))
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
