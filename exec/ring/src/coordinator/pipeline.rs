//! The pass pipeline: the active sequences, the batches in flight, and the deadline of the next batch.
//!
//! A batch starts as soon as the head is free; [`Generation`] decides which passes form it. Activations return to the
//! head after each round, and the last round gives tokens, which are the input of later passes. Several batches are in
//! flight at the same time: chunks of a prompt, and passes of several sequences. When the ring is reconfigured during a
//! request, all tokens so far enter the new ring as a prompt, because the KV cache of the old ring is lost. A
//! generated token is never sampled again.

use std::collections::BTreeMap;
use std::time::Duration;

use hearth_core::recovery::{Event, Step};
use hearth_core::schedule::batching::BatchLimits;
use hearth_core::schedule::{Generation, GenerationError};
use hearth_schema::pass::{Batch, CacheChange, Pass};
use hearth_schema::trace::{CounterReading, StepRecord};
use tokio::time::Instant;
use tokio::time::error::Elapsed;

use super::coordinator::Coordinator;
use super::worker_connection::HeadEvent;
use crate::error::{Result, RingError, protocol_error};
use crate::execution::{BatchOutput, MAX_BATCHES_PER_DEVICE, TraceLines};
use crate::wire::{BrokenLink, DataLinkEvent, Message, Transport};

/// The time limit of a pass, as a multiple of the time of the slowest pass on the same ring. source: assumed, because
/// other programs on a device can slow it down by this factor when they use its memory
const PASS_LIMIT_FACTOR: u32 = 20;
/// Minimum time limit of a pass. source: assumed, longer than a stall of Wi-Fi, than reading the weights of a device
/// from an SSD, and than the limit for sending a message, after which the receiver counts as unreachable
const MIN_PASS_LIMIT: Duration = Duration::from_secs(30);
/// The idle time after which the first pass has the whole limit, because other programs may have displaced the weights
/// from memory. source: assumed
const LONG_IDLE: Duration = Duration::from_secs(10);

/// Number of batches that are kept for measurements of devices. source: assumed, several times the number of passes
/// after which the devices report their steps
const MAX_RECENT_BATCHES: usize = 1024;

/// Maximum wait, used if a time limit would overflow the clock. source: assumed, longer than any pass
pub(super) const MAX_WAIT: Duration = Duration::from_hours(24 * 365);

pub(super) struct PassPipeline {
    pub(super) generation: Generation,
    /// The prompt of each sequence, followed by the tokens generated so far.
    pub(super) texts: Vec<Vec<u32>>,
    stop_tokens: Vec<u32>,
    pub(super) passes: Vec<Pass>,
    /// The last batches, by the index of their first pass, for measurements that arrive later.
    pub(super) recent_batches: BTreeMap<u32, Batch>,
    /// Received trace lines, each with the name of its worker; `None` if traces are collected only after the request.
    pub(super) trace_lines: Option<Vec<(String, TraceLines)>>,
    /// The start time and the number of tokens of each batch in flight, by the index of its first pass.
    in_flight: BTreeMap<u32, (Instant, u32)>,
    last_pass_end: Option<Instant>,
    slowest: SlowestPass,
    /// What the devices do with the caches before the next batch.
    pub(super) cache_changes: Vec<CacheChange>,
    /// Whether the caches were lost since this was last read.
    pub(super) has_lost_caches: bool,
}

/// The longest time of a batch on the current ring, and the longest time per token of a batch; zero before the first
/// batch.
#[derive(Debug, Clone, Copy, Default)]
struct SlowestPass {
    time: Duration,
    time_per_token: Duration,
}

/// The result of [`PassPipeline::advance`] or [`PassPipeline::handle_event`].
pub(super) enum Progress {
    /// Work was done, but no token is complete.
    Work,
    /// The indices of sequences, each with its new tokens.
    Tokens(Vec<(u32, Vec<u32>)>),
    /// No pass can start and no event is pending.
    Idle,
}

impl PassPipeline {
    pub(super) fn new(generation: Generation, texts: Vec<Vec<u32>>, stop_tokens: Vec<u32>) -> Self {
        let (passes, in_flight, slowest) = (Vec::new(), BTreeMap::new(), SlowestPass::default());
        let (trace_lines, last_pass_end) = (None, None);
        Self {
            generation,
            texts,
            stop_tokens,
            passes,
            recent_batches: BTreeMap::new(),
            trace_lines,
            in_flight,
            last_pass_end,
            slowest,
            cache_changes: Vec::new(),
            has_lost_caches: false,
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.in_flight.is_empty()
    }

    pub(super) fn batches_in_flight(&self) -> usize {
        self.in_flight.len()
    }

    /// Returns the deadline of the oldest pass in flight. Passes finish in order, so `limit` counts from the end of
    /// the previous pass. With more than one round per token, a pass may also wait for all passes that started later,
    /// so `limit` is multiplied by the number of passes in flight.
    pub(super) fn next_deadline(&self, limit: Duration, rounds: u32) -> Instant {
        let entered = self.in_flight.values().next().map(|&(entered, _)| entered);
        let ahead = if rounds > 1 { self.in_flight.len().max(1) } else { 1 };
        let since = entered.max(self.last_pass_end).unwrap_or_else(Instant::now);
        since.checked_add(limit.saturating_mul(ahead as u32)).unwrap_or(since + MAX_WAIT)
    }

    /// Returns the time limit of the oldest pass in flight: a multiple of what the slowest pass on this ring took, at
    /// least [`MIN_PASS_LIMIT`] and at most `limit`. Before the first pass has finished, it is `limit`.
    pub(super) fn pass_limit(&self, limit: Duration) -> Duration {
        let SlowestPass { time, time_per_token } = self.slowest;
        let tokens = self.in_flight.values().next().map_or(1, |&(_, tokens)| tokens);
        let expected = time.max(time_per_token.saturating_mul(tokens));
        if expected.is_zero() {
            return limit;
        }
        limit.min(expected.saturating_mul(PASS_LIMIT_FACTOR).max(MIN_PASS_LIMIT))
    }

    /// Handles a pending event, or starts the next pass if no event is pending.
    pub(super) async fn advance<T: Transport>(
        &mut self,
        coordinator: &mut Coordinator<T>,
    ) -> Result<Progress> {
        // Events come first, so that they do not wait for a computing step.
        if let Ok(event) = coordinator.events.try_recv() {
            return self.handle_event(event, coordinator).await;
        }
        let can_enter = self.in_flight.len() < MAX_BATCHES_PER_DEVICE * coordinator.plan().devices.len();
        let begin = || self.generation.begin_batch(BatchLimits::for_plan(coordinator.plan()));
        let Some(batch) = can_enter.then(begin).flatten() else {
            return Ok(Progress::Idle);
        };
        let batch = batch.with_cache_changes(std::mem::take(&mut self.cache_changes));
        self.passes.extend(batch.passes());
        // Only measurements during requests need them.
        if self.trace_lines.is_some() {
            self.recent_batches.insert(batch.index(), batch.clone());
            if self.recent_batches.len() > MAX_RECENT_BATCHES {
                self.recent_batches.pop_first();
            }
        }
        let is_cold =
            self.in_flight.is_empty() && self.last_pass_end.is_some_and(|end| end.elapsed() > LONG_IDLE);
        if is_cold {
            self.slowest = SlowestPass::default();
        }
        self.in_flight.insert(batch.index(), (Instant::now(), batch.tokens()));
        let text = |pass: &Pass| {
            let text = self.texts.get(pass.sequence_index as usize)?;
            Some((pass.sequence_index, &text[..]))
        };
        let texts = batch.passes().iter().filter_map(text).collect();
        let output = coordinator.runner()?.begin_batch(&batch, &texts)?;
        self.finish_batch(output, coordinator)
    }

    pub(super) async fn handle_event<T: Transport>(
        &mut self,
        event: HeadEvent,
        coordinator: &mut Coordinator<T>,
    ) -> Result<Progress> {
        let mut event = event;
        if let HeadEvent::Data(DataLinkEvent::Activations(received)) = &event {
            match coordinator.runner()?.process_activations(received) {
                Ok(output) => return self.finish_batch(output, coordinator),
                Err(RingError::InvalidActivations { sender_index: peer_index, what: reason }) => {
                    let epoch = coordinator.connected_epoch;
                    let broken = BrokenLink { epoch, peer_index, is_fault: true, reason };
                    event = HeadEvent::Data(DataLinkEvent::LinkBroken(broken));
                }
                Err(error) => return Err(error),
            }
        }
        if let (HeadEvent::Message { connection, frame, .. }, Some(trace_lines)) =
            (&event, &mut self.trace_lines)
            && let Message::TraceLines { .. } = frame.message
        {
            let name = coordinator.connections.name_of(*connection);
            trace_lines.extend(name.zip(parse_trace_lines(&frame.payload)));
            return Ok(Progress::Work);
        }
        if let HeadEvent::PassTimeout(limit) = event
            && limit < coordinator.options.pass_timeout
            && coordinator.find_stall().is_none()
        {
            // All devices wait for a slow computation that the counts do not show: wait longer.
            self.slowest.time = self.slowest.time.saturating_mul(2);
            return Ok(Progress::Work);
        }
        self.recover(coordinator, |coordinator| coordinator.handle_event(event)).await?;
        Ok(Progress::Work)
    }

    /// Changes to the best plan for the available devices and their measured conditions.
    pub(super) async fn plan_again<T: Transport>(&mut self, coordinator: &mut Coordinator<T>) -> Result<()> {
        self.recover(coordinator, |coordinator| Ok(coordinator.plan_again())).await
    }

    /// Lets the coordinator react. If that leads to another ring, its passes begin with all tokens so far.
    async fn recover<T: Transport>(
        &mut self,
        coordinator: &mut Coordinator<T>,
        react: impl FnOnce(&mut Coordinator<T>) -> Result<Vec<Step>>,
    ) -> Result<()> {
        // A copy, because the reaction may not lead to another ring.
        let mut resumed = self.generation.clone();
        let (recomputed, first_pass) = (resumed.restart(), resumed.next_pass_index());
        coordinator.reconfiguration.resume_at(first_pass, recomputed);
        let steps = react(coordinator)?;
        if !steps.is_empty() {
            // The passes in flight are abandoned.
            self.generation = resumed;
            self.in_flight.clear();
            (self.last_pass_end, self.slowest) = (None, SlowestPass::default());
            self.cache_changes.clear();
            self.has_lost_caches = true;
            coordinator.execute_recovery(steps).await?;
        }
        Ok(())
    }

    /// Removes the batch that has finished, if there is one, and stores its tokens.
    fn finish_batch<T: Transport>(
        &mut self,
        output: Option<BatchOutput>,
        coordinator: &mut Coordinator<T>,
    ) -> Result<Progress> {
        let Some(BatchOutput { batch, tokens }) = output else { return Ok(Progress::Work) };
        let now = Instant::now();
        if let Some((entered, tokens)) = self.in_flight.remove(&batch.index()) {
            let time = now - self.last_pass_end.map_or(entered, |end| end.max(entered));
            self.slowest.time = self.slowest.time.max(time);
            self.slowest.time_per_token = self.slowest.time_per_token.max(time / tokens.max(1));
        }
        self.last_pass_end = Some(now);
        let mut new_tokens = Vec::new();
        for (pass, tokens) in batch.passes().iter().zip(tokens).filter(|(pass, _)| pass.has_output) {
            let broken = |error: GenerationError| protocol_error("the ring", error.to_string());
            let accepted = tokens.len().saturating_sub(1) as u32;
            self.generation.complete_pass(pass.index, accepted).map_err(broken)?;
            // A sequence without a token ends with its embedding.
            if tokens.last().is_none_or(|last| self.stop_tokens.contains(last)) {
                self.generation.cancel(pass.sequence_index);
            }
            let text = self.texts.get_mut(pass.sequence_index as usize);
            let text =
                text.ok_or_else(|| protocol_error("the ring", "a token belongs to an unknown sequence"))?;
            text.extend_from_slice(&tokens);
            // Devices rejoin at intervals, not after a token, so no step follows.
            coordinator.react(Event::Token);
            coordinator.log.record_token();
            new_tokens.push((pass.sequence_index, tokens));
        }
        Ok(if new_tokens.is_empty() { Progress::Work } else { Progress::Tokens(new_tokens) })
    }
}

pub(super) fn parse_trace_lines(payload: &[u8]) -> Option<TraceLines> {
    let (records, readings) =
        serde_json::from_slice::<(Vec<StepRecord>, Vec<CounterReading>)>(payload).ok()?;
    Some(TraceLines { records, readings })
}

/// Converts the result of a wait for an event: a timeout becomes `PassTimeout`, and a closed channel `Cancel`.
pub(super) fn event_or_timeout(event: Result<Option<HeadEvent>, Elapsed>, limit: Duration) -> HeadEvent {
    match event {
        Ok(Some(event)) => event,
        Ok(None) => HeadEvent::Cancel,
        Err(_) => HeadEvent::PassTimeout(limit),
    }
}
