//! The event log of a request: which ring ran in which epoch, what happened to its devices, and the trace of each.
//!
//! All times are on one clock, and each device has one index: its place changes with the plan, its index in the trace
//! does not. Devices that join later come after those of the first plan.
//!
//! Not here: what a device records itself ([`crate::execution::Recorder`]).

use std::collections::BTreeMap;
use std::sync::Arc;

use hearth_schema::Plan;
use hearth_schema::run_events::RunEvent;
use hearth_schema::run_events::RunEventKind;
use hearth_schema::trace::Header;
use hearth_schema::trace::Outcome;
use hearth_schema::trace::Reading;
use hearth_schema::trace::Record;
use hearth_schema::trace::Trace;

use super::options::OnRunEvent;
use crate::execution::TraceLines;
use hearth_runtime::clock::wall_nanos;

/// The most lines of one worker's trace: a day of a fast ring.
const MAX_LINES: usize = 50_000_000;
/// More run events say nothing new, and a trace has a limit.
/// source: assumed, below the most that a trace may hold
const MAX_RUN_EVENTS: usize = 1000;

/// A request's trace while it is written.
#[derive(Default)]
pub(super) struct EventLog {
    /// Hears of each run event.
    on_run_event: Option<OnRunEvent>,
    /// The time at which the request began, on this process's clock.
    started: u64,
    /// The plan of each epoch.
    epochs: BTreeMap<u32, Arc<Plan>>,
    /// Devices by their index in the trace.
    devices: Vec<String>,
    run_events: Vec<RunEvent>,
    records: Vec<Record>,
    readings: Vec<Reading>,
    /// Plans that followed the first.
    pub(super) plans: Vec<Plan>,
}

impl EventLog {
    /// Creates the log of a request that begins now on this ring.
    pub(super) fn new(plan: &Plan, on_run_event: Option<OnRunEvent>) -> Self {
        let devices = plan.devices.iter().map(|device| device.name.clone()).collect();
        Self { on_run_event, started: wall_nanos(), devices, ..Self::default() }
    }

    /// An epoch begins.
    pub(super) fn begin_epoch(&mut self, epoch: u32, plan: &Arc<Plan>) {
        self.epochs.insert(epoch, plan.clone());
        for device in &plan.devices {
            self.device_index(&device.name);
        }
    }

    /// A device has not sent a message since a moment of this process's clock, and is missed now.
    pub(super) fn device_lost(&mut self, name: &str, since: u64, what: String) {
        let start = since.saturating_sub(self.started);
        let end = Some(self.now());
        self.add_event(RunEvent { start, end, ..run_event(RunEventKind::Silent, Some(name), what) }, None);
    }

    /// Another ring takes over, until the next token is complete.
    pub(super) fn replanned(&mut self, missing: Option<&str>, plan: &Plan, recomputed_tokens: u32) {
        let windows = plan.devices.iter().map(|device| format!("{} {}", device.name, device.window));
        let what =
            format!("{}; {recomputed_tokens} tokens computed again", windows.collect::<Vec<_>>().join(", "));
        let (start, digest) = (self.now(), Some(plan.digest()));
        self.close_open(start);
        let event = RunEvent { start, plan: digest, ..run_event(RunEventKind::Replanned, missing, what) };
        self.add_event(event, Some(plan));
        self.plans.push(plan.clone());
    }

    /// The ring should have planned again and did not.
    pub(super) fn not_replanned(&mut self, missing: Option<&str>, reason: &str) {
        let start = self.now();
        self.close_open(start);
        self.add_event(
            RunEvent { start, ..run_event(RunEventKind::NotReplanned, missing, reason.into()) },
            None,
        );
    }

    /// A token is complete.
    pub(super) fn token_output(&mut self) {
        let now = self.now();
        self.close_open(now);
    }

    /// Takes a device's lines, epoch by epoch; `to_head` shifts them to this process's clock. Lines that cannot be the
    /// device's are left out.
    pub(super) fn add_lines(&mut self, name: &str, all: Vec<(u32, TraceLines)>, to_head: i64) {
        let index = self.device_index(name);
        for (epoch, lines) in all {
            let Some(plan) = self.epochs.get(&epoch).cloned() else { continue };
            let Some(place) = plan.position(name) else { continue };
            let started = self.started;
            let shift = |at: u64| at.saturating_add_signed(to_head).saturating_sub(started);
            for mut record in lines.records {
                let peer = match record.peer {
                    None => None,
                    Some(peer) => match plan.devices.get(usize::from(peer)) {
                        None => continue,
                        Some(device) => Some(self.device_index(&device.name)),
                    },
                };
                let (start, end) = (shift(record.start), shift(record.end));
                if usize::from(record.device) == place && start <= end && self.records.len() < MAX_LINES {
                    (record.device, record.peer, record.start, record.end) = (index, peer, start, end);
                    self.records.push(record);
                }
            }
            for mut reading in lines.readings {
                if usize::from(reading.device) == place && self.readings.len() < MAX_LINES {
                    (reading.device, reading.at) = (index, shift(reading.at));
                    self.readings.push(reading);
                }
            }
        }
    }

    /// The devices of the trace, by index.
    pub(super) fn devices(&self) -> &[String] {
        &self.devices
    }

    /// The whole.
    pub(super) fn into_trace(
        mut self,
        header: Header,
        passes: Vec<hearth_schema::pass::Pass>,
        outcome: Outcome,
    ) -> Trace {
        self.records.sort_by_key(|record| (record.start, record.device, record.end));
        self.run_events.sort_by_key(|run_event| run_event.start);
        Trace {
            header,
            passes,
            records: self.records,
            readings: self.readings,
            shortages: Vec::new(),
            run_events: self.run_events,
            outcome,
        }
    }

    fn now(&self) -> u64 {
        wall_nanos().saturating_sub(self.started)
    }

    fn device_index(&mut self, name: &str) -> u16 {
        let index = self.devices.iter().position(|device| device == name).unwrap_or_else(|| {
            self.devices.push(name.into());
            self.devices.len() - 1
        });
        index as u16
    }

    fn add_event(&mut self, run_event: RunEvent, new_plan: Option<&Plan>) {
        if let Some(on_run_event) = &self.on_run_event {
            on_run_event(&run_event, new_plan);
        }
        if self.run_events.len() < MAX_RUN_EVENTS {
            self.run_events.push(run_event);
        }
    }

    /// A ring that has planned again is over that with its next token, or with the next ring.
    fn close_open(&mut self, now: u64) {
        for run_event in &mut self.run_events {
            if run_event.kind == RunEventKind::Replanned {
                run_event.end.get_or_insert(now);
            }
        }
    }
}

fn run_event(kind: RunEventKind, device: Option<&str>, what: String) -> RunEvent {
    RunEvent { kind, device: device.map(str::to_owned), start: 0, end: None, what, plan: None }
}
