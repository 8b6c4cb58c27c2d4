//! The reconfiguration of a ring: the recovery reducer ([`hearth_core::recovery`]), the policy that finds another plan,
//! the adaptation of the plan to measurements ([`hearth_core::adaptation`]), and the deadline for devices to get ready.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use hearth_core::Cluster;
use hearth_core::adaptation::{self, Adaptation};
use hearth_core::recovery::{Event, Recovery, ReplanError};
use hearth_schema::Plan;
use hearth_schema::pass::Batch;
use hearth_schema::plan::PlannedDevice;
use tokio::time::Instant;

use super::options::{RecoveryPolicy, RingOptions};
use crate::execution::{LocalModel, TraceLines};

/// The time after which the last measurement of a device no longer counts, for example because the plan does not use it.
/// source: assumed, longer than most loads of a home computer
const MEASUREMENT_LIFETIME: Duration = Duration::from_mins(10);

/// The minimum interval between measurements of a device, because each can lead to a search for a plan. source: assumed,
/// half of the interval at which devices report
const MIN_MEASUREMENT_INTERVAL: Duration = Duration::from_secs(1);

/// The current plan, and the transition from one plan to the next.
pub(super) struct Reconfiguration {
    pub(super) recovery: Recovery,
    policy: RecoveryPolicy,
    adaptation: Option<Adaptation>,
    /// The time of the last measurement of each device.
    measured_at: BTreeMap<String, Instant>,
    /// The cause of the next plan, if it is not the loss or the return of a device.
    cause: Option<String>,
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
        let adaptation = match &options.recovery {
            RecoveryPolicy::Replan { cluster, adapts: true, .. } => Some(Adaptation::new(cluster.clone())),
            _ => None,
        };
        Self {
            recovery: Recovery::new(Arc::new(plan)),
            policy: options.recovery.clone(),
            adaptation,
            measured_at: BTreeMap::new(),
            cause: None,
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
        let checked = |found: Result<Plan, ReplanError>| {
            let plan = found?;
            model.check_plan(&plan).map_err(|error| ReplanError { reason: error.to_string() })?;
            Ok(plan)
        };
        let found = match &self.policy {
            RecoveryPolicy::Fail => Err(ReplanError { reason: "recovery is disabled".into() }),
            RecoveryPolicy::Spread => checked(self.recovery.redistribute_layers()),
            RecoveryPolicy::Replan { cluster, replanner, .. } => {
                let replan = |cluster: &Cluster| checked(self.recovery.replan(&**replanner, cluster));
                let adapted = self.adaptation.as_ref().map(|adaptation| replan(&adaptation.cluster()));
                // A slow ring is better than none.
                adapted.and_then(Result::ok).map_or_else(|| replan(cluster), Ok)
            }
        };
        match found {
            Ok(plan) => Event::Planned(Box::new(plan)),
            Err(ReplanError { reason }) => Event::NoPlan { reason },
        }
    }

    /// Measures a device by its trace lines, and looks for a better plan if the device has changed. Returns how many
    /// times as long as its profile says the device computes; `None` without adaptation.
    pub(super) fn measure(
        &mut self,
        model: &LocalModel,
        device: &str,
        batches: &BTreeMap<u32, Batch>,
        lines: &TraceLines,
    ) -> Option<f64> {
        let adaptation = self.adaptation.as_mut()?;
        let now = Instant::now();
        let is_early = |at: &Instant| now.duration_since(*at) < MIN_MEASUREMENT_INTERVAL;
        if self.measured_at.get(device).is_some_and(is_early) {
            return Some(adaptation.slowdown(device));
        }
        let outdated = |_: &String, at: &mut Instant| now.duration_since(*at) >= MEASUREMENT_LIFETIME;
        let outdated: Vec<_> = self.measured_at.extract_if(.., outdated).collect();
        let mut steps: Vec<_> = outdated
            .into_iter()
            .flat_map(|(device, _)| adaptation.react(adaptation::Event::Outdated { device }))
            .collect();
        self.measured_at.insert(device.to_owned(), now);
        let lines = (&lines.records[..], &lines.readings[..]);
        let measurement = adaptation.measure(device, batches, lines);
        steps.extend(adaptation.react(adaptation::Event::Measured { device: device.into(), measurement }));
        let slowdown = adaptation.slowdown(device);
        if steps.contains(&adaptation::Step::Evaluate)
            && let RecoveryPolicy::Replan { replanner, .. } = &self.policy
        {
            let has_addresses =
                |plan: &Plan| plan.devices.iter().skip(1).all(|device| device.address.is_some());
            let is_accepted = |plan: &Plan| has_addresses(plan) && model.check_plan(plan).is_ok();
            let evaluation = adaptation.evaluate(&self.recovery, &**replanner, is_accepted);
            adaptation.react(adaptation::Event::Evaluated(evaluation));
        }
        Some(slowdown)
    }

    /// Passes an event to the adaptation. Returns whether the ring should change its plan now.
    pub(super) fn should_change_plan(&mut self, event: adaptation::Event) -> bool {
        let Some(adaptation) = &mut self.adaptation else { return false };
        let changes = adaptation.react(event).contains(&adaptation::Step::Replan);
        if changes {
            self.cause = adaptation.summary();
        }
        changes
    }

    /// Returns the cause of the plan that the ring has just adopted, if it is not the loss or the return of a device.
    pub(super) fn take_cause(&mut self) -> Option<String> {
        if let Some(adaptation) = &mut self.adaptation {
            adaptation.react(adaptation::Event::Replanned);
        }
        self.cause.take()
    }
}
