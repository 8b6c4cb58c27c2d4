//! The reconfiguration of a ring: the recovery reducer ([`hearth_core::recovery`]), the policy that finds another plan,
//! and the deadline for devices to get ready.

use std::sync::Arc;
use std::time::Duration;

use hearth_core::recovery::{Event, Recovery, ReplanError};
use hearth_schema::Plan;
use hearth_schema::plan::PlannedDevice;
use tokio::time::Instant;

use super::options::{RecoveryPolicy, RingOptions};
use crate::execution::LocalModel;

/// The current plan, and the transition from one plan to the next.
pub(super) struct Reconfiguration {
    pub(super) recovery: Recovery,
    policy: RecoveryPolicy,
    pub(super) ready_timeout: Duration,
    /// The time at which a device that is not ready counts as lost.
    pub(super) ready_deadline: Instant,
    /// Index of the first pass after the next reconfiguration.
    pub(super) first_pass: u32,
    /// Number of tokens that are computed again after the next reconfiguration.
    pub(super) recomputed_tokens: u32,
}

impl Reconfiguration {
    pub(super) fn new(plan: Plan, options: &RingOptions) -> Self {
        Self {
            recovery: Recovery::new(Arc::new(plan)),
            policy: options.recovery.clone(),
            ready_timeout: options.ready_timeout,
            ready_deadline: Instant::now(),
            first_pass: 0,
            recomputed_tokens: 0,
        }
    }

    pub(super) fn plan(&self) -> &Arc<Plan> {
        self.recovery.plan()
    }

    pub(super) fn head_name(&self) -> String {
        self.plan().devices[0].name.clone()
    }

    /// Sets the index of the first pass after the next reconfiguration, and the number of tokens to compute again.
    pub(super) fn resume_at(&mut self, first_pass: u32, recomputed_tokens: u32) {
        (self.first_pass, self.recomputed_tokens) = (first_pass, recomputed_tokens);
    }

    /// Returns the device with this name in the current plan, or else in the first plan.
    pub(super) fn planned_device(&self, name: &str) -> Option<PlannedDevice> {
        let plans = [self.recovery.plan(), self.recovery.first_plan()];
        plans.iter().find_map(|plan| Some(plan.devices[plan.device_index(name)?].clone()))
    }

    pub(super) fn extend_ready_deadline(&mut self) {
        self.ready_deadline = Instant::now() + self.ready_timeout;
    }

    /// Returns an event with a plan that fits the remaining devices and `model`, or the reason why there is none.
    pub(super) fn find_plan(&self, model: &LocalModel) -> Event {
        let found = match &self.policy {
            RecoveryPolicy::Fail => Err(ReplanError { reason: "recovery is disabled".into() }),
            RecoveryPolicy::Spread => self.recovery.redistribute_layers(),
            RecoveryPolicy::Replan { cluster, replanner } => self.recovery.replan(&**replanner, cluster),
        };
        match found.map(|plan| (model.check_plan(&plan), plan)) {
            Ok((Ok(()), plan)) => Event::Planned(Box::new(plan)),
            Ok((Err(error), _)) => Event::NoPlan { reason: error.to_string() },
            Err(ReplanError { reason }) => Event::NoPlan { reason },
        }
    }
}
