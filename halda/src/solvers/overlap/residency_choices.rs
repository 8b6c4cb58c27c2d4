//! The residency policies that a planner may choose for a device.
//!
//! These are the policies of the device's [`crate::runtime_model::RuntimeModel`]. `managed` without a stream buffer is
//! expanded to stream buffers of several sizes. A larger buffer hides more reading in the idle time before a window,
//! but leaves less memory for kept weights, so the best size depends on the plan.

use hearth_profiles::Bytes;
use hearth_schema::residency::{Residency, ResidencyOptions};

use crate::latency::constraints::shape_violations;
use crate::{Assignment, LatencyModel};

/// The exponents n of the sizes of stream buffers to try, 2^n bytes. source: assumed, from the default size to more
/// than a round needs
const BUFFER_EXPONENTS: std::ops::RangeInclusive<u32> = 23..=33;

/// Returns the residency policies of a runtime model, with `managed` expanded to stream buffers of several sizes.
pub fn candidate_residencies(residencies: &[ResidencyOptions]) -> Vec<ResidencyOptions> {
    let expanded = |&residency: &ResidencyOptions| {
        if residency.policy != Residency::Managed || residency.stream_buffer.is_some() {
            return vec![residency];
        }
        let sized =
            |exponent: u32| ResidencyOptions { stream_buffer: Some(Bytes(1 << exponent)), ..residency };
        BUFFER_EXPONENTS.map(sized).collect()
    };
    residencies.iter().flat_map(expanded).collect()
}

/// Returns the residency policy of each device with which the steady state of an assignment is fastest; `None` if a
/// constraint of shape or memory is violated.
pub fn best_residencies(model: &LatencyModel, assignment: &Assignment) -> Option<Vec<ResidencyOptions>> {
    if !shape_violations(model, assignment).is_empty() {
        return None;
    }
    let works = model.work_by_device(assignment);
    let hops: f64 =
        model.communication_seconds(assignment, &assignment.layer_counts(model.model_layers())).iter().sum();
    let (mut bounds, mut timings) = (vec![0.0], Vec::new());
    for work in &works {
        let all = candidate_residencies(&model.instance().devices[work.device].runtime.allowed_residencies);
        let timing = |residency| {
            let timing = model.device_timing(work, &residency)?;
            Some((residency, timing.seconds_without_hops(), timing.disk_busy_seconds))
        };
        let allowed: Vec<_> = all.into_iter().filter_map(timing).collect();
        bounds.extend(allowed.iter().map(|(_, _, busy)| *busy));
        timings.push(allowed);
    }
    bounds.sort_unstable_by(f64::total_cmp);
    bounds.dedup();
    let within = |bound: f64| {
        let chosen = timings.iter().map(|allowed| {
            let in_time = allowed.iter().filter(|(_, _, busy)| *busy <= bound);
            in_time.min_by(|one, other| one.1.total_cmp(&other.1))
        });
        let chosen = chosen.collect::<Option<Vec<_>>>()?;
        Some(((hops + chosen.iter().map(|(_, own, _)| own).sum::<f64>()).max(bound), chosen))
    };
    let plans = bounds.into_iter().filter_map(within);
    let (_, fastest) = plans.min_by(|one, other| one.0.total_cmp(&other.0))?;
    Some(fastest.into_iter().map(|(residency, _, _)| *residency).collect())
}
