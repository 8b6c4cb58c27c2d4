//! Applies the events of a scenario to the processes of a lab.
//!
//! The head reports when its prompt enters the ring and when each token is generated. For the duration of an event, a
//! background process computes or allocates memory on the CPUs and within the limits of the device. A device that
//! leaves is stopped (SIGSTOP), not killed: like a device out of range, it sends nothing while its connections remain
//! open.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::mpsc;
use std::time::Duration;

use hearth_lab::{CpuHog, DeviceProcess, FreezeHandle, LabError, MemoryHog, Placement};
use hearth_schema::events::{Change, Event};

/// Duration of an event for which the scenario sets no end: longer than any run.
const ENDLESS: Duration = Duration::from_hours(24);
/// Maximum time between two checks whether an event is due.
const POLL_INTERVAL: Duration = Duration::from_millis(200);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HeadProgress {
    /// The prompt enters the ring.
    Prompt,
    /// A token was generated.
    Token,
}

pub struct EventTarget<'a> {
    pub placement: Placement<'a>,
    /// Handle that stops the worker process when the device leaves; `None` for the head.
    pub worker_freeze_handle: Option<FreezeHandle>,
}

#[derive(Debug, Default, PartialEq)]
struct Timeline {
    /// For each event, the time from the start of the prompt to the start of the event, if known, and whether the event
    /// has started.
    starts: Vec<(Option<Duration>, bool)>,
    tokens: u32,
}

impl Timeline {
    fn new(events: &[Event]) -> Self {
        let at = |event: &Event| (event.start_time.map(|at| Duration::from_secs_f64(at.0.max(0.0))), false);
        Self { starts: events.iter().map(at).collect(), tokens: 0 }
    }

    fn record_token(&mut self, events: &[Event], now: Duration) {
        self.tokens += 1;
        for (event, (start, _)) in events.iter().zip(&mut self.starts) {
            if event.after_tokens == Some(self.tokens) {
                *start = Some(now);
            }
        }
    }

    /// Returns the index of an event that is due and has not started, and marks the event as started.
    fn take_due(&mut self, now: Duration) -> Option<usize> {
        let due = |(start, started): &(Option<Duration>, bool)| !started && start.is_some_and(|at| at <= now);
        let index = self.starts.iter().position(due)?;
        self.starts[index].1 = true;
        Some(index)
    }

    fn next_start(&self) -> Option<Duration> {
        self.starts.iter().filter(|(_, started)| !started).filter_map(|(start, _)| *start).min()
    }
}

/// Applies events to the processes of the devices until the head exits. Returns the indices of the events that did not
/// happen.
pub fn apply(
    events: &[Event],
    devices: &BTreeMap<String, EventTarget>,
    program: &Path,
    reports: &mpsc::Receiver<HeadProgress>,
    elapsed: impl Fn() -> Duration,
) -> Result<Vec<usize>, LabError> {
    let mut timeline = Timeline::new(events);
    let mut prompt_at: Option<Duration> = None;
    let since = |start: Duration| elapsed().saturating_sub(start);
    // Background processes, each with the end of its event.
    let mut loads: Vec<(Duration, DeviceProcess)> = Vec::new();
    loop {
        let next = timeline.next_start().into_iter().chain(loads.iter().map(|(end, _)| *end)).min();
        let now = prompt_at.map(since);
        let wait = now.zip(next).map_or(POLL_INTERVAL, |(now, next)| next.saturating_sub(now));
        match reports.recv_timeout(wait.min(POLL_INTERVAL)) {
            Ok(HeadProgress::Prompt) => prompt_at = Some(elapsed()),
            Ok(HeadProgress::Token) => {
                timeline.record_token(events, prompt_at.map_or(Duration::ZERO, since));
            }
            Err(mpsc::RecvTimeoutError::Timeout) => {}
            Err(mpsc::RecvTimeoutError::Disconnected) => {
                let missed = timeline.starts.iter().enumerate().filter(|(_, (_, started))| !started);
                return Ok(missed.map(|(index, _)| index).collect());
            }
        }
        let Some(now) = prompt_at.map(since) else { continue };
        loads.retain(|(end, _)| *end > now);
        while let Some(index) = timeline.take_due(now) {
            let event = &events[index];
            let Some(device) = event.device.as_ref().and_then(|name| devices.get(name)) else { continue };
            let duration = event.duration.map_or(ENDLESS, |duration| Duration::from_secs_f64(duration.0));
            let load = begin(event, device, program, duration)?;
            loads.extend(load.map(|load| (now.saturating_add(duration), load)));
        }
    }
}

/// Starts an event. Returns the background process of the event, if there is one.
fn begin(
    event: &Event,
    device: &EventTarget,
    program: &Path,
    duration: Duration,
) -> Result<Option<DeviceProcess>, LabError> {
    let arguments = match event.change() {
        Some(Change::Load(load)) => CpuHog { threads: load.threads }.arguments().to_vec(),
        Some(Change::Memory(load)) => {
            let (program, memory, delay) = (program.into(), load.size, Duration::ZERO);
            MemoryHog { program, memory, delay, duration }.arguments().to_vec()
        }
        Some(Change::Leaves) => {
            if let Some(worker) = device.worker_freeze_handle {
                worker.freeze();
            }
            return Ok(None);
        }
        _ => return Ok(None),
    };
    let name = event.device.as_deref().unwrap_or_default();
    DeviceProcess::start(name, device.placement, program, &arguments).map(Some)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_due_once_at_their_time_or_token() {
        let events: Vec<Event> = serde_yaml::from_str(
            "[{at: 2 s, device: a, load: 1 threads}, {token: 2, device: a, leaves: true}, {token: 9, device: a, load: 1 threads}]",
        )
        .expect("events");
        let seconds = Duration::from_secs;
        let mut timeline = Timeline::new(&events);
        assert_eq!((timeline.take_due(seconds(1)), timeline.next_start()), (None, Some(seconds(2))));
        timeline.record_token(&events, seconds(1));
        assert_eq!(timeline.take_due(seconds(1)), None);
        timeline.record_token(&events, seconds(1));
        assert_eq!((timeline.take_due(seconds(1)), timeline.take_due(seconds(1))), (Some(1), None));
        assert_eq!((timeline.take_due(seconds(3)), timeline.next_start()), (Some(0), None));
        assert!(!timeline.starts[2].1, "token 9 was not generated");
    }

    #[test]
    fn load_begins_and_ends_with_its_event() {
        let events: Vec<Event> = serde_yaml::from_str(
            "[{at: 0 s, for: 50 ms, device: a, load: 1 threads}, {token: 3, device: a, load: 1 threads}]",
        )
        .expect("events");
        let processes = EventTarget { placement: Placement::default(), worker_freeze_handle: None };
        let devices = BTreeMap::from([("a".to_string(), processes)]);
        let (report_tx, reports) = mpsc::channel();
        let head = std::thread::spawn(move || {
            for (pause, report) in
                [(0, HeadProgress::Prompt), (30, HeadProgress::Token), (100, HeadProgress::Token)]
            {
                std::thread::sleep(Duration::from_millis(pause));
                report_tx.send(report).expect("a receiver");
            }
        });
        // Any program is sufficient; this one fails because of unknown arguments.
        #[allow(clippy::disallowed_methods)] // real processes take real time
        let start = std::time::Instant::now();
        let missed = apply(&events, &devices, Path::new("/bin/sleep"), &reports, || start.elapsed());
        head.join().expect("no panic");
        assert_eq!(missed.expect("processes start"), [1]);
    }
}
