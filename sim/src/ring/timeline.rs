//! Event timeline: the events of a scenario as timed actions, and the log of run events.
//!
//! An event has an action for its beginning, for each step of its ramp (if its effect increases gradually), and for its
//! end. Other actions, such as heartbeat checks, are added during the run.
//!
//! Not here: the effect of an action on the ring ([`crate::ring::reconfiguration`]) and on a device
//! ([`crate::device::background_load`]).

use std::collections::BTreeMap;

use hearth_profiles::{Bytes, Fraction, Seconds};
use hearth_schema::events::{Change, Event};
use hearth_schema::run_events::{RunEvent, RunEventKind};

use crate::device::background_load::BackgroundLoad;
use crate::engine::Nanos;

/// Number of equal steps in which an event with a ramp time reaches its full effect.
/// source: assumed, so that the effect of each step is small
const RAMP_STEPS: u32 = 64;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TimelineAction {
    Begin(usize),
    /// The event with this index reaches the ramp step with this number.
    Ramp(usize, u32),
    End(usize),
    /// The head device checks whether the member with this index has been unreachable since this time.
    CheckHeartbeat(usize, Nanos),
    /// By this time all devices have confirmed a new plan, if no newer plan has replaced it.
    Ready,
}

#[derive(Debug)]
pub struct EventTimeline {
    events: Vec<(Event, Change)>,
    /// The pending actions, by time and then by order of insertion.
    queue: BTreeMap<(Nanos, u32), TimelineAction>,
    next_sequence: u32,
    /// Indices of the events that begin with a token, by the number of this token.
    by_token: BTreeMap<u32, Vec<usize>>,
    /// The completed fraction of the ramp of each active event, by the index of the event.
    progress: BTreeMap<usize, f64>,
    /// For each event that has begun, by its index, the index of its entry in `run_events`.
    logged: BTreeMap<usize, usize>,
    pub run_events: Vec<RunEvent>,
}

impl EventTimeline {
    /// Creates the timeline of a scenario's events, which must be valid.
    pub fn new(events: &[Event]) -> Self {
        let mut timeline = Self {
            events: events.iter().filter_map(|event| Some((event.clone(), event.change()?))).collect(),
            queue: BTreeMap::new(),
            next_sequence: 0,
            by_token: BTreeMap::new(),
            progress: BTreeMap::new(),
            logged: BTreeMap::new(),
            run_events: Vec::new(),
        };
        for index in 0..timeline.events.len() {
            let event = &timeline.events[index].0;
            if let Some(token) = event.after_tokens {
                timeline.by_token.entry(token).or_default().push(index);
            } else {
                let at = event.start_time.unwrap_or(Seconds(0.0)).to_nanos();
                timeline.schedule(at, TimelineAction::Begin(index));
            }
        }
        timeline
    }

    pub fn schedule(&mut self, at: Nanos, action: TimelineAction) {
        self.queue.insert((at, self.next_sequence), action);
        self.next_sequence += 1;
    }

    pub fn next_due_time(&self) -> Option<Nanos> {
        self.queue.keys().next().map(|&(at, _)| at)
    }

    /// Removes and returns the earliest action that is due by `now`.
    pub fn pop_due_action(&mut self, now: Nanos) -> Option<TimelineAction> {
        let next = self.queue.first_entry()?;
        if next.key().0 > now { None } else { Some(next.remove()) }
    }

    /// Schedules the events that begin with the token of this number.
    pub fn on_token(&mut self, now: Nanos, token: u32) {
        for index in self.by_token.remove(&token).unwrap_or_default() {
            self.schedule(now, TimelineAction::Begin(index));
        }
    }

    /// Returns the indices of the events that have not begun.
    pub fn unreached_events(&self) -> Vec<usize> {
        let waits = |action: &TimelineAction| {
            if let TimelineAction::Begin(index) = action { Some(*index) } else { None }
        };
        let mut waiting: Vec<usize> = self.queue.values().filter_map(waits).collect();
        waiting.extend(self.by_token.values().flatten());
        waiting.sort_unstable();
        waiting
    }

    pub fn change_and_device(&self, index: usize) -> (Change, Option<&str>) {
        let (event, change) = &self.events[index];
        (*change, event.device.as_deref())
    }

    /// Returns the duration of an event; `None` if it lasts until the end of the run.
    pub fn event_duration(&self, index: usize) -> Option<Seconds> {
        self.events[index].0.duration
    }

    /// Logs a run event that has not ended yet, and returns the entry.
    pub fn log_run_event(
        &mut self,
        kind: RunEventKind,
        device: Option<String>,
        start_ns: Nanos,
        details: String,
    ) -> &mut RunEvent {
        let at = self.run_events.len();
        self.run_events.push(RunEvent { kind, device, start_ns, end_ns: None, details, plan_digest: None });
        &mut self.run_events[at]
    }

    /// Begins an event. Its effect increases during `ramp_time` and then lasts until the event ends.
    pub fn begin_event(&mut self, now: Nanos, index: usize, ramp_time: Seconds) {
        let (event, change) = &self.events[index];
        let (device, duration, (kind, what)) = (event.device.clone(), event.duration, describe(change));
        self.logged.insert(index, self.run_events.len());
        self.log_run_event(kind, device, now, what);
        let ramp = ramp_time.to_nanos();
        self.progress.insert(index, if ramp == 0 { 1.0 } else { 0.0 });
        if ramp > 0 {
            let step = |step| now + (u128::from(ramp) * u128::from(step) / u128::from(RAMP_STEPS)) as Nanos;
            (1..=RAMP_STEPS).for_each(|count| self.schedule(step(count), TimelineAction::Ramp(index, count)));
        }
        if let Some(duration) = duration {
            self.schedule(now.saturating_add(duration.to_nanos()), TimelineAction::End(index));
        }
    }

    pub fn set_ramp_step(&mut self, index: usize, step: u32) {
        if let Some(progress) = self.progress.get_mut(&index) {
            *progress = f64::from(step) / f64::from(RAMP_STEPS);
        }
    }

    pub fn end_event(&mut self, now: Nanos, index: usize) {
        self.progress.remove(&index);
        if let Some(&at) = self.logged.get(&index) {
            self.run_events[at].end_ns = Some(now);
        }
    }

    pub fn end_absence(&mut self, now: Nanos, device: &str) {
        let open = (RunEventKind::Away, Some(device), None);
        let is_open = |it: &&mut RunEvent| (it.kind, it.device.as_deref(), it.end_ns) == open;
        if let Some(away) = self.run_events.iter_mut().rev().find(is_open) {
            away.end_ns = Some(now);
        }
    }

    /// Sets the end of a logged replanning, because the ring has generated its first token with the new plan.
    pub fn end_replanning(&mut self, now: Nanos) {
        for run_event in &mut self.run_events {
            if run_event.kind == RunEventKind::Replanned && run_event.end_ns.is_none() {
                run_event.end_ns = Some(now);
            }
        }
    }

    /// Returns a device's background load. Before its swap event, if any, other programs occupy `withheld` bytes.
    pub fn background_load(&self, device: &str, withheld: Bytes) -> BackgroundLoad {
        let own = |index: usize| self.events[index].0.device.as_deref() == Some(device);
        let quiet = BackgroundLoad::initial(if self.has_swap_event(device) { withheld } else { Bytes::ZERO });
        let active = self.progress.iter().filter(|(index, _)| own(**index));
        active.fold(quiet, |background_load, (&index, &progress)| {
            background_load.with_event(&self.events[index].1, progress)
        })
    }

    pub fn has_swap_event(&self, device: &str) -> bool {
        self.events.iter().any(|(event, change)| {
            matches!(change, Change::Swap(_)) && event.device.as_deref() == Some(device)
        })
    }
}

/// Returns the kind of the run event that a change causes, and its details for users.
fn describe(change: &Change) -> (RunEventKind, String) {
    match change {
        Change::Load(load) => {
            let remains = |left| format!(", {} of the GPU remains", percent(left));
            let gpu = load.available_gpu_fraction.map_or(String::new(), remains);
            (RunEventKind::Load, format!("{} threads{gpu}", load.threads))
        }
        Change::Memory(memory) => {
            let ramp = memory.ramp_time.map_or(String::new(), |time| format!(" over {time}"));
            (RunEventKind::Memory, format!("{}{ramp}", memory.size))
        }
        Change::Swap(swap) => (
            RunEventKind::Swap,
            format!("{}, compressed by a factor of {}", swap.swap_out_rate, swap.compression_ratio),
        ),
        Change::Slow(left) => (RunEventKind::Slow, format!("{} of the clock rate remains", percent(*left))),
        Change::DiskLoad(share) => {
            (RunEventKind::DiskLoad, format!("{} of the disk bandwidth", percent(*share)))
        }
        Change::Leaves | Change::Returns(_) => (RunEventKind::Away, String::new()),
        Change::Stalls => (RunEventKind::Stalls, String::new()),
    }
}

fn percent(share: Fraction) -> String {
    format!("{:.0} %", share.0 * 100.0)
}

#[cfg(test)]
mod tests {
    use hearth_schema::events::MemoryLoad;

    use super::*;

    #[test]
    fn ramp_steps_and_ends() {
        let mut timeline = EventTimeline::new(&[Event {
            start_time: Some(Seconds(1.0)),
            duration: Some(Seconds(10.0)),
            device: Some("a".into()),
            memory: Some(MemoryLoad { size: Bytes::from_mib(64), ramp_time: Some(Seconds(8.0)) }),
            ..Event::default()
        }]);
        assert_eq!(timeline.next_due_time(), Some(1_000_000_000));
        assert_eq!(timeline.pop_due_action(0), None);
        assert_eq!(timeline.pop_due_action(1_000_000_000), Some(TimelineAction::Begin(0)));
        timeline.begin_event(1_000_000_000, 0, Seconds(8.0));
        let taken = |timeline: &EventTimeline| timeline.background_load("a", Bytes::ZERO).allocated_bytes;
        assert_eq!(taken(&timeline), 0.0);
        // Half of the memory is taken after half of the time: the 32nd step.
        while let Some(TimelineAction::Ramp(index, step)) = timeline.pop_due_action(5_000_000_000) {
            timeline.set_ramp_step(index, step);
        }
        assert_eq!(taken(&timeline), Bytes::from_mib(32).as_f64());
        assert_eq!(timeline.background_load("b", Bytes::ZERO).allocated_bytes, 0.0);
        while let Some(TimelineAction::Ramp(index, step)) = timeline.pop_due_action(9_000_000_000) {
            timeline.set_ramp_step(index, step);
        }
        assert_eq!(taken(&timeline), Bytes::from_mib(64).as_f64());
        assert_eq!(timeline.next_due_time(), Some(11_000_000_000));
        assert_eq!(timeline.pop_due_action(11_000_000_000), Some(TimelineAction::End(0)));
        timeline.end_event(11_000_000_000, 0);
        assert_eq!(taken(&timeline), 0.0);
        assert_eq!(timeline.run_events[0].end_ns, Some(11_000_000_000));
    }
}
