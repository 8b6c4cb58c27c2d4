//! The pass pipeline: the active sequences, the passes in flight, and the deadline of the next pass.
//!
//! Passes enter as soon as the head is free ([`Generation`] decides which), activations come back after each round, and
//! outputs give tokens, which enter as the next passes. So several passes are in flight: batches of a prompt, and
//! passes of several sequences. When the ring is reconfigured in mid-request, all tokens so far enter the new one as a
//! prompt, because their keys and values were spread over the old one; a generated token is never sampled again.

use std::collections::BTreeMap;
use std::time::Duration;

use hearth_core::recovery::Event;
use hearth_core::schedule::{Generation, GenerationError};
use hearth_schema::pass::Pass;
use hearth_schema::trace::{Reading, Record};
use tokio::time::Instant;
use tokio::time::error::Elapsed;

use super::coordinator::Coordinator;
use super::worker_connection::HeadEvent;
use crate::error::{RingError, protocol_error};
use crate::execution::{PassOutput, TraceLines};
use crate::wire::{DataEvent, Message, Transport};

/// The wait that replaces a deadline beyond the range of the clock. source: assumed, longer than any pass
pub(super) const MAX_WAIT: Duration = Duration::from_hours(24 * 365);

/// Passes in flight for each device of the ring. Two keep a device at work while the next pass is on its way; more
/// would only wait, each with its activations in some device's memory.
const MAX_PASSES_PER_DEVICE: usize = 2;

/// A sequence in progress.
#[derive(Debug, Clone, Default)]
pub(super) struct SequenceTokens {
    /// The prompt, followed by the tokens generated so far.
    pub(super) all: Vec<u32>,
    pub(super) prompt_len: usize,
}

/// The passes that are in flight in the ring.
pub(super) struct PassPipeline {
    pub(super) generation: Generation,
    pub(super) sequences: Vec<SequenceTokens>,
    stop_tokens: Vec<u32>,
    pub(super) passes: Vec<Pass>,
    /// Trace lines that workers have sent, each with its device's name; `None` until they are requested.
    pub(super) reports: Option<Vec<(String, TraceLines)>>,
    /// The time at which each pass in flight entered, by its index.
    in_flight: BTreeMap<u32, Instant>,
    /// The time at which a pass came out last.
    last_output: Option<Instant>,
}

/// The outcome of one step of the head.
pub(super) enum Progress {
    /// Something that gave no token.
    Work,
    /// These tokens of a sequence are complete.
    Tokens(u32, Vec<u32>),
    /// Nothing: no pass can enter and no event is pending.
    Idle,
}

impl PassPipeline {
    /// A pipeline that no pass has entered.
    pub(super) fn new(generation: Generation, sequences: Vec<SequenceTokens>, stop_tokens: Vec<u32>) -> Self {
        let (passes, in_flight) = (Vec::new(), BTreeMap::new());
        Self { generation, sequences, stop_tokens, passes, reports: None, in_flight, last_output: None }
    }

    /// Whether no pass is in flight.
    pub(super) fn is_empty(&self) -> bool {
        self.in_flight.is_empty()
    }

    /// Returns when the next pass to finish counts as late. Passes do not overtake each other. With one round per
    /// token, a pass has the ring to itself once the pass before it has finished; with more rounds it may also wait for
    /// all passes that entered after it.
    pub(super) fn next_deadline(&self, limit: Duration, rounds: u32) -> Instant {
        let entered = self.in_flight.values().next().copied();
        let ahead = if rounds > 1 { self.in_flight.len().max(1) } else { 1 };
        let since = entered.max(self.last_output).unwrap_or_else(Instant::now);
        since.checked_add(limit.saturating_mul(ahead as u32)).unwrap_or(since + MAX_WAIT)
    }

    /// Handles a pending event, or lets a pass enter.
    pub(super) async fn advance<T: Transport>(
        &mut self,
        coordinator: &mut Coordinator<T>,
    ) -> Result<Progress, RingError> {
        // Events come first: news of the ring should not wait for a computing step.
        if let Ok(event) = coordinator.events.try_recv() {
            return self.handle(event, coordinator).await;
        }
        let can_enter = self.in_flight.len() < MAX_PASSES_PER_DEVICE * coordinator.plan().devices.len();
        let Some(pass) = can_enter.then(|| self.generation.begin()).flatten() else {
            return Ok(Progress::Idle);
        };
        self.passes.push(pass);
        self.in_flight.insert(pass.index, Instant::now());
        let so_far = self.sequences.get(pass.sequence as usize).map_or(&[][..], |tokens| &tokens.all);
        let output = coordinator.runner()?.begin_pass(pass, so_far)?;
        self.finish_pass(output, coordinator)
    }

    /// Handles an event of the ring.
    pub(super) async fn handle<T: Transport>(
        &mut self,
        event: HeadEvent,
        coordinator: &mut Coordinator<T>,
    ) -> Result<Progress, RingError> {
        if let HeadEvent::Data(DataEvent::Activations(received)) = &event {
            let output = coordinator.runner()?.receive(received)?;
            return self.finish_pass(output, coordinator);
        }
        if let (HeadEvent::Message { connection, frame }, Some(reports)) = (&event, &mut self.reports)
            && let Message::Report { .. } = frame.message
        {
            let name = coordinator.connections.name_of(*connection);
            reports.extend(name.zip(trace_lines(&frame.payload)));
            return Ok(Progress::Work);
        }
        // The next ring begins with all tokens so far. Asked twice, the generation answers the same.
        let mut resumed = self.generation.clone();
        let (recomputed, first_pass) = (resumed.restart(), resumed.next_pass());
        coordinator.reconfiguration.resume_at(first_pass, recomputed);
        let steps = coordinator.handle(event)?;
        if !steps.is_empty() {
            // The passes in flight are given up.
            self.generation = resumed;
            self.in_flight.clear();
            self.last_output = None;
            coordinator.settle(steps).await?;
        }
        Ok(Progress::Work)
    }

    /// A pass may be out after a step, and tokens with it.
    fn finish_pass<T: Transport>(
        &mut self,
        output: Option<PassOutput>,
        coordinator: &mut Coordinator<T>,
    ) -> Result<Progress, RingError> {
        let Some(PassOutput { pass, tokens }) = output else { return Ok(Progress::Work) };
        self.in_flight.remove(&pass.index);
        self.last_output = Some(Instant::now());
        let Some(accepted) = tokens.len().checked_sub(1) else { return Ok(Progress::Work) };
        let broken = |error: GenerationError| protocol_error("the ring", &error.to_string());
        self.generation.output(pass.index, accepted as u32).map_err(broken)?;
        if self.stop_tokens.contains(&tokens[accepted]) {
            self.generation.give_up(pass.sequence);
        }
        let sequence = self.sequences.get_mut(pass.sequence as usize);
        let sequence =
            sequence.ok_or_else(|| protocol_error("the ring", "a token of an unknown sequence"))?;
        sequence.all.extend_from_slice(&tokens);
        // Devices are taken in between requests, so no step follows.
        coordinator.react(Event::Token);
        coordinator.log.token_output();
        Ok(Progress::Tokens(pass.sequence, tokens))
    }
}

/// Parses the payload of a worker's report.
pub(super) fn trace_lines(payload: &[u8]) -> Option<TraceLines> {
    let (records, readings) = serde_json::from_slice::<(Vec<Record>, Vec<Reading>)>(payload).ok()?;
    Some(TraceLines { records, readings })
}

/// The event that ends a wait with a limit.
pub(super) fn event_or_timeout(event: Result<Option<HeadEvent>, Elapsed>, limit: Duration) -> HeadEvent {
    match event {
        Ok(Some(event)) => event,
        Ok(None) => HeadEvent::Cancel,
        Err(_) => HeadEvent::PassTimeout(limit),
    }
}
