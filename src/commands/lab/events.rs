//! Applies a scenario's events to real processes.
//!
//! The head reports when its prompt enters the ring and when each token is out. At an event's time another process of the
//! device computes or takes memory, within the device's limits and on its processors, until the event ends. A device that
//! leaves is stopped: it sends nothing more, and its system keeps what is sent to it, as for a device out of range. (The
//! peers of a killed process would notice at once.)
//!
//! Not here: which events are possible ([`super::checks`]), and how the head reacts.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::mpsc;
use std::time::Duration;

use hearth_lab::{Child, CpuHog, LabError, MemoryHog, Placement, ProcessStopper};
use hearth_schema::events::Change;
use hearth_schema::events::Event;

/// Longer than any run.
const TO_THE_END: Duration = Duration::from_hours(24);
/// How often the end of the run is checked while there is no event.
const POLL_INTERVAL: Duration = Duration::from_millis(200);

/// What the head reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HeadReport {
    /// The prompt enters the ring.
    Begins,
    /// A token is out.
    Token,
}

/// The processes of a device.
pub struct DeviceProcesses<'a> {
    /// Where its processes run.
    pub seat: Placement<'a>,
    /// Its worker; none on the head.
    pub worker: Option<ProcessStopper>,
}

/// The events that are still to come, and when.
#[derive(Debug, Default, PartialEq)]
struct Timeline {
    /// For each event its start, once it is known, and whether it has begun.
    starts: Vec<(Option<Duration>, bool)>,
    tokens: u32,
}

impl Timeline {
    fn new(events: &[Event]) -> Self {
        let at = |event: &Event| (event.at.map(|at| Duration::from_secs_f64(at.0.max(0.0))), false);
        Self { starts: events.iter().map(at).collect(), tokens: 0 }
    }

    /// Records a token, `since` the beginning.
    fn token(&mut self, events: &[Event], since: Duration) {
        self.tokens += 1;
        for (event, (start, _)) in events.iter().zip(&mut self.starts) {
            if event.token == Some(self.tokens) {
                *start = Some(since);
            }
        }
    }

    /// Takes an event that is due.
    fn due(&mut self, since: Duration) -> Option<usize> {
        let due =
            |(start, begun): &(Option<Duration>, bool)| !begun && start.is_some_and(|start| start <= since);
        let index = self.starts.iter().position(due)?;
        self.starts[index].1 = true;
        Some(index)
    }

    /// When the next event is due, if that is known.
    fn next(&self) -> Option<Duration> {
        self.starts.iter().filter(|(_, begun)| !begun).filter_map(|(start, _)| *start).min()
    }
}

/// Applies events until the head ends. Returns the indices of those that did not happen.
pub fn apply(
    events: &[Event],
    hands: &BTreeMap<String, DeviceProcesses>,
    program: &Path,
    said: &mpsc::Receiver<HeadReport>,
    elapsed: impl Fn() -> Duration,
) -> Result<Vec<usize>, LabError> {
    let mut timeline = Timeline::new(events);
    let mut begun: Option<Duration> = None;
    // Other programs of the devices, and when they are ended.
    let mut others: Vec<(Duration, Child)> = Vec::new();
    loop {
        let next = timeline.next().into_iter().chain(others.iter().map(|(end, _)| *end)).min();
        let since = begun.map(|begun| elapsed().saturating_sub(begun));
        let wait = since
            .zip(next)
            .map_or(POLL_INTERVAL, |(since, next)| next.saturating_sub(since).min(POLL_INTERVAL));
        match said.recv_timeout(wait) {
            Ok(HeadReport::Begins) => begun = Some(elapsed()),
            Ok(HeadReport::Token) => {
                let since = begun.map_or(Duration::ZERO, |begun| elapsed().saturating_sub(begun));
                timeline.token(events, since);
            }
            Err(mpsc::RecvTimeoutError::Timeout) => {}
            Err(mpsc::RecvTimeoutError::Disconnected) => {
                let missed = timeline.starts.iter().enumerate().filter(|(_, (_, begun))| !begun);
                return Ok(missed.map(|(index, _)| index).collect());
            }
        }
        let Some(since) = begun.map(|begun| elapsed().saturating_sub(begun)) else { continue };
        others.retain(|(end, _)| *end > since);
        while let Some(index) = timeline.due(since) {
            let event = &events[index];
            let hand = event.device.as_ref().and_then(|device| hands.get(device));
            let lasts = event.lasts.map_or(TO_THE_END, |lasts| Duration::from_secs_f64(lasts.0));
            if let Some(other) = hand.map(|hand| begin(event, hand, program, lasts)).transpose()?.flatten() {
                others.push((since.saturating_add(lasts), other));
            }
        }
    }
}

/// Begins an event; returns the process that ends with it.
fn begin(
    event: &Event,
    hand: &DeviceProcesses,
    program: &Path,
    lasts: Duration,
) -> Result<Option<Child>, LabError> {
    let name = event.device.as_deref().unwrap_or_default();
    match event.change() {
        Some(Change::Load(load)) => {
            Child::start(name, hand.seat, program, &CpuHog { threads: load.threads }.arguments()).map(Some)
        }
        Some(Change::Memory(taken)) => {
            let hog = MemoryHog {
                program: program.into(),
                memory: taken.taken,
                after: Duration::ZERO,
                hold: lasts,
            };
            Child::start(name, hand.seat, program, &hog.arguments()).map(Some)
        }
        Some(Change::Leaves) => {
            if let Some(worker) = hand.worker {
                worker.stop();
            }
            Ok(None)
        }
        _ => Ok(None),
    }
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
        assert_eq!((timeline.due(seconds(1)), timeline.next()), (None, Some(seconds(2))));
        timeline.token(&events, seconds(1));
        assert_eq!(timeline.due(seconds(1)), None);
        timeline.token(&events, seconds(1));
        assert_eq!((timeline.due(seconds(1)), timeline.due(seconds(1))), (Some(1), None));
        assert_eq!((timeline.due(seconds(3)), timeline.next()), (Some(0), None));
        assert!(!timeline.starts[2].1, "token 9 did not come");
    }

    #[test]
    fn load_begins_and_ends_with_its_event() {
        let events: Vec<Event> = serde_yaml::from_str(
            "[{at: 0 s, for: 50 ms, device: a, load: 1 threads}, {token: 3, device: a, load: 1 threads}]",
        )
        .expect("events");
        let hands =
            BTreeMap::from([("a".to_string(), DeviceProcesses { seat: Placement::default(), worker: None })]);
        let (sender, said) = mpsc::channel();
        let talk = std::thread::spawn(move || {
            for (pause, word) in [(0, HeadReport::Begins), (30, HeadReport::Token), (100, HeadReport::Token)]
            {
                std::thread::sleep(Duration::from_millis(pause));
                sender.send(word).expect("somebody listens");
            }
        });
        // Any program does: it is started with arguments that it does not know.
        #[allow(clippy::disallowed_methods)] // real processes take real time
        let start = std::time::Instant::now();
        let missed = apply(&events, &hands, Path::new("/bin/sleep"), &said, || start.elapsed());
        talk.join().expect("it has said all");
        assert_eq!(missed.expect("processes start"), [1]);
    }
}
