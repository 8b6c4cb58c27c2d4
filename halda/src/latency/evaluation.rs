//! The times of whole assignments, by the paper's objective and in the steady state.

use hearth_schema::residency::ResidencyOptions;

use super::constraints::{Violation, shape_violations};
use super::{Breakdown, DeviceTerms, LatencyModel};
use crate::problem::assignment::Assignment;

impl LatencyModel<'_> {
    /// The time of a token and all its terms. Only the shape of the assignment must be right; a plan that
    /// breaks a memory rule still has a time.
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
        Ok(Breakdown { seconds: devices.iter().map(DeviceTerms::seconds).sum(), devices, waits: None })
    }

    /// T of an assignment by the paper's objective, infinite where its shape is wrong.
    pub fn seconds(&self, assignment: &Assignment) -> f64 {
        self.evaluate(assignment).map_or(f64::INFINITY, |breakdown| breakdown.seconds)
    }

    /// T of an assignment in the steady state, infinite where it has none.
    pub fn steady_seconds(&self, assignment: &Assignment, residencies: &[ResidencyOptions]) -> f64 {
        self.steady_state(assignment, residencies).map_or(f64::INFINITY, |breakdown| breakdown.seconds)
    }
}
