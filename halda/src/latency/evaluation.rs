//! The time of an assignment, by the paper's objective and in the steady state.

use hearth_schema::residency::ResidencyOptions;

use super::constraints::{Violation, shape_violations};
use super::{Breakdown, DeviceTerms, LatencyModel};
use crate::problem::assignment::Assignment;

impl LatencyModel<'_> {
    /// Evaluates the time per token and its terms by the paper's objective. A plan that violates a memory constraint
    /// has a time too.
    ///
    /// # Errors
    /// If the shape of the assignment is invalid, or a link is missing.
    pub fn evaluate(&self, assignment: &Assignment) -> Result<Breakdown, Violation> {
        if let Some(violation) = shape_violations(self, assignment).into_iter().next() {
            return Err(violation);
        }
        let shares = assignment.shares(self.model.layers);
        let hops = self.communication(assignment, &shares);
        let devices: Vec<DeviceTerms> = shares
            .into_iter()
            .zip(hops)
            .enumerate()
            .map(|(device, (share, communication))| DeviceTerms {
                communication,
                ..self.terms(device, device == assignment.head, share)
            })
            .collect();
        Ok(Breakdown { seconds: devices.iter().map(DeviceTerms::seconds).sum(), devices, disk_wait: None })
    }

    /// Returns T in seconds by the paper's objective; infinite if [`Self::evaluate`] fails.
    pub fn seconds(&self, assignment: &Assignment) -> f64 {
        self.evaluate(assignment).map_or(f64::INFINITY, |breakdown| breakdown.seconds)
    }

    /// Returns T in seconds in the steady state; infinite if [`Self::steady_state`] fails.
    pub fn steady_state_seconds(&self, assignment: &Assignment, residencies: &[ResidencyOptions]) -> f64 {
        self.steady_state(assignment, residencies).map_or(f64::INFINITY, |breakdown| breakdown.seconds)
    }
}
