//! The event log of a request: the plan of each epoch, the run events, and the traces of the devices.
//!
//! All times are on the head's clock. A new plan may change the index of a device in the ring, but not the index of the
//! device in the trace. Devices of the first plan have the first indices in the trace.

use std::collections::BTreeMap;
use std::sync::Arc;

use hearth_schema::Plan;
use hearth_schema::pass::Pass;
use hearth_schema::run_events::{RunEvent, RunEventKind};
use hearth_schema::trace::{CounterReading, Header, Outcome, StepRecord, Trace};

use super::options::OnRunEvent;
use crate::execution::TraceLines;
use hearth_runtime::clock::monotonic_nanos;

/// Maximum number of step records, and of counter readings, in a trace. A fast ring records about as many in a day.
const MAX_LINES: usize = 50_000_000;
/// Maximum number of run events in a trace. source: assumed, below the limit of the trace format
const MAX_RUN_EVENTS: usize = 1000;

#[derive(Default)]
pub(super) struct EventLog {
    on_run_event: Option<OnRunEvent>,
    /// The time at which the request began, in nanoseconds on this process's clock.
    started: u64,
    epochs: BTreeMap<u32, Arc<Plan>>,
    /// The name of each device, by index in the trace.
    pub(super) device_names: Vec<String>,
    run_events: Vec<RunEvent>,
    records: Vec<StepRecord>,
    readings: Vec<CounterReading>,
    /// The plans that replaced the first plan, in order.
    pub(super) later_plans: Vec<Plan>,
}

impl EventLog {
    /// Creates the log of a request that begins now with this plan.
    pub(super) fn new(plan: &Plan, on_run_event: Option<OnRunEvent>) -> Self {
        let device_names = plan.devices.iter().map(|device| device.name.clone()).collect();
        Self { on_run_event, started: monotonic_nanos(), device_names, ..Self::default() }
    }

    pub(super) fn begin_epoch(&mut self, epoch: u32, plan: &Arc<Plan>) {
        self.epochs.insert(epoch, plan.clone());
        if self.epochs.len() > MAX_RUN_EVENTS {
            self.epochs.pop_first();
        }
        for device in &plan.devices {
            self.device_index(&device.name);
        }
    }

    /// Records the loss of a device. `since` is the time of its last message, in nanoseconds on this process's clock.
    pub(super) fn record_loss(&mut self, name: &str, since: u64, reason: String) {
        let event = self.run_event(RunEventKind::Silent, Some(name), reason);
        let start = since.saturating_sub(self.started);
        self.add_event(RunEvent { start_ns: start, end_ns: Some(event.start_ns), ..event }, None);
    }

    /// Records that the ring continues with `plan`, because `missing` was lost or for another `cause`. The event lasts
    /// until the next token.
    pub(super) fn record_replanned(
        &mut self,
        missing: Option<&str>,
        plan: &Plan,
        recomputed_tokens: u32,
        cause: Option<&str>,
    ) {
        let windows = plan.devices.iter().map(|device| format!("{} {}", device.name, device.window));
        let windows = windows.collect::<Vec<_>>().join(", ");
        let mut what = format!("{windows}; {recomputed_tokens} tokens computed again");
        if let Some(cause) = cause {
            what = format!("{what}; {cause}");
        }
        let event = self.run_event(RunEventKind::Replanned, missing, what);
        self.end_replanning(event.start_ns);
        self.add_event(RunEvent { plan_digest: Some(plan.digest()), ..event }, Some(plan));
        if self.later_plans.len() < MAX_RUN_EVENTS {
            self.later_plans.push(plan.clone());
        }
    }

    pub(super) fn record_not_replanned(&mut self, missing: Option<&str>, reason: &str) {
        let event = self.run_event(RunEventKind::NotReplanned, missing, reason.into());
        self.end_replanning(event.start_ns);
        self.add_event(event, None);
    }

    pub(super) fn record_token(&mut self) {
        self.end_replanning(self.now());
    }

    /// Adds the valid trace lines of a device, given by epoch. `offset_ns` is added to the times of the device, to
    /// convert them to this process's clock.
    pub(super) fn add_trace_lines(&mut self, name: &str, by_epoch: Vec<(u32, TraceLines)>, offset_ns: i64) {
        let index = self.device_index(name);
        for (epoch, lines) in by_epoch {
            let Some(plan) = self.epochs.get(&epoch).cloned() else { continue };
            let Some(ring_index) = plan.device_index(name) else { continue };
            let started = self.started;
            let shift = |at: u64| at.saturating_add_signed(offset_ns).saturating_sub(started);
            for record in lines.records {
                let peer = match record.peer.map(|peer| plan.devices.get(usize::from(peer))) {
                    None => None,
                    Some(None) => continue,
                    Some(Some(device)) => Some(self.device_index(&device.name)),
                };
                let (start_ns, end_ns) = (shift(record.start_ns), shift(record.end_ns));
                let is_valid = usize::from(record.device_index) == ring_index && start_ns <= end_ns;
                if is_valid && self.records.len() < MAX_LINES {
                    self.records.push(StepRecord { device_index: index, peer, start_ns, end_ns, ..record });
                }
            }
            for mut reading in lines.readings {
                if usize::from(reading.device_index) == ring_index && self.readings.len() < MAX_LINES {
                    (reading.device_index, reading.time_ns) = (index, shift(reading.time_ns));
                    self.readings.push(reading);
                }
            }
        }
    }

    pub(super) fn into_trace(mut self, header: Header, passes: Vec<Pass>, outcome: Outcome) -> Trace {
        self.records.sort_by_key(|record| (record.start_ns, record.device_index, record.end_ns));
        self.run_events.sort_by_key(|run_event| run_event.start_ns);
        let Self { records, readings, run_events, .. } = self;
        Trace {
            header,
            passes,
            admissions: Vec::new(),
            records,
            readings,
            shortages: Vec::new(),
            run_events,
            outcome,
        }
    }

    /// Converts a time on this process's clock to nanoseconds from the start of the request.
    pub(super) fn since_start(&self, at_ns: u64) -> u64 {
        at_ns.saturating_sub(self.started)
    }

    fn now(&self) -> u64 {
        self.since_start(monotonic_nanos())
    }

    fn device_index(&mut self, name: &str) -> u16 {
        let index = self.device_names.iter().position(|device| device == name).unwrap_or_else(|| {
            self.device_names.push(name.into());
            self.device_names.len() - 1
        });
        index as u16
    }

    /// Creates a run event that starts now.
    fn run_event(&self, kind: RunEventKind, device: Option<&str>, what: String) -> RunEvent {
        let (device, start) = (device.map(str::to_owned), self.now());
        RunEvent { kind, device, start_ns: start, end_ns: None, details: what, plan_digest: None }
    }

    fn add_event(&mut self, run_event: RunEvent, new_plan: Option<&Plan>) {
        if let Some(on_run_event) = &self.on_run_event {
            on_run_event(&run_event, new_plan);
        }
        if self.run_events.len() < MAX_RUN_EVENTS {
            self.run_events.push(run_event);
        }
    }

    /// Ends the open replanning event, which lasts until the next token or the next plan.
    fn end_replanning(&mut self, now: u64) {
        for run_event in &mut self.run_events {
            if run_event.kind == RunEventKind::Replanned {
                run_event.end_ns.get_or_insert(now);
            }
        }
    }
}
