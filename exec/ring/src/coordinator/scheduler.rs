//! The scheduler: continuous batching of requests over the slots of one ring.
//!
//! The plan has caches for a number of sequences; each cache is a slot. A request is assigned to a vacant slot,
//! preferably one whose cached tokens are a prefix of the prompt, which is not computed again. Active requests share
//! the ring like the sequences of one request. When the client of a request disconnects (the receiver of its events is
//! closed), the slot becomes vacant after the pass in flight. When a device is lost, all active sequences are computed
//! again, and the caches of vacant slots are lost.
//!
//! Not here: which passes start next ([`hearth_core::schedule::Generation`]).

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use hearth_core::schedule::Generation;
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout_at};

use super::coordinator::Coordinator;
use super::pipeline::{MAX_WAIT, PassPipeline, Progress, SequenceTokens, event_or_timeout};
use crate::error::{Result, RingError, protocol_error};
use crate::execution::{SampleFn, Samplers, TraceLines};
use crate::wire::{Message, Transport};

/// Number of passes after which traces are collected, to bound their size. source: assumed, seconds on a fast ring
const MAX_PASSES_PER_REPORT: usize = 256;
/// The interval at which a slow ring collects traces, so that metrics stay current. source: assumed
const REPORT_INTERVAL: Duration = Duration::from_secs(2);
/// The minimum interval between attempts to reconnect lost devices, because each attempt takes time. source: assumed
const REJOIN_INTERVAL: Duration = Duration::from_secs(30);

/// A generation request to a ring that serves several requests at the same time.
pub struct Request {
    /// The tokens of the prompt; at least one token.
    pub prompt: Vec<u32>,
    /// The maximum number of generated tokens; at least one.
    pub max_new_tokens: u32,
    pub sampler: SampleFn,
    /// Sends the events of the response. The request is cancelled when the receiver is closed.
    pub response_tx: mpsc::UnboundedSender<ResponseEvent>,
}

/// An event of a response. The sender is dropped after the last event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ResponseEvent {
    /// The request has been assigned to a slot, whose KV cache already has `cached_tokens` tokens of the prompt.
    Started { cached_tokens: u32 },
    /// A generated token; no token follows a stop token.
    Token(u32),
    /// The request failed for this reason.
    Failed(String),
}

/// Receives the name of a device and its new trace lines, at intervals.
pub type OnTraceLines = Arc<dyn Fn(&str, &TraceLines) + Send + Sync>;

pub struct ServeOptions {
    /// Maximum number of prompt tokens in one pass.
    pub micro_batch: u32,
    /// Number of tokens that the draft model proposes at a time; 0 disables drafting.
    pub draft_tokens: u32,
    /// Tokens that end a sequence.
    pub stop_tokens: Vec<u32>,
    pub on_trace_lines: Option<OnTraceLines>,
}

impl ServeOptions {
    fn empty_pipeline(&self, slots: u32, can_truncate: bool) -> PassPipeline {
        let generation =
            Generation::with_vacant_slots(slots, self.micro_batch, self.draft_tokens, can_truncate);
        let sequences = vec![SequenceTokens::default(); slots as usize];
        let mut pipeline = PassPipeline::new(generation, sequences, self.stop_tokens.clone());
        pipeline.trace_lines = Some(Vec::new());
        pipeline
    }

    fn no_samplers(&self) -> Samplers {
        Samplers::new(Vec::new(), self.stop_tokens.clone())
    }
}

/// The slots of a ring, their active requests, and the queue of requests that wait for a slot.
struct Scheduler<'a, T: Transport> {
    coordinator: &'a mut Coordinator<T>,
    options: ServeOptions,
    pipeline: PassPipeline,
    active: Vec<Option<mpsc::UnboundedSender<ResponseEvent>>>,
    /// For each slot, the number of its last request, counted from 1; 0 before its first request.
    last_used: Vec<u64>,
    queue: VecDeque<Request>,
    request_count: u64,
    /// Whether more requests can arrive.
    is_open: bool,
    rejoin_at: Instant,
    reported_at: Instant,
}

/// Serves requests until the request channel is closed. If the ring fails, all requests receive the error.
pub(super) async fn serve<T: Transport>(
    coordinator: &mut Coordinator<T>,
    options: ServeOptions,
    request_rx: &mut mpsc::UnboundedReceiver<Request>,
) -> Result<()> {
    let slots = coordinator.plan().sequences;
    let now = Instant::now();
    let pipeline = options.empty_pipeline(slots, coordinator.can_truncate_caches());
    let mut scheduler = Scheduler {
        coordinator,
        pipeline,
        options,
        active: vec![None; slots as usize],
        last_used: vec![0; slots as usize],
        queue: VecDeque::new(),
        request_count: 0,
        is_open: true,
        rejoin_at: now,
        reported_at: now,
    };
    let ended = scheduler.run(request_rx).await;
    if let Err(error) = &ended {
        scheduler.enqueue_new(request_rx);
        scheduler.fail_all(error);
    }
    ended
}

impl<T: Transport> Scheduler<'_, T> {
    async fn run(&mut self, request_rx: &mut mpsc::UnboundedReceiver<Request>) -> Result<()> {
        self.coordinator.start_request(self.options.no_samplers()).await?;
        loop {
            self.enqueue_new(request_rx);
            self.cancel_abandoned();
            self.rejoin_lost_devices().await?;
            self.admit_queued()?;
            let progress = match self.pipeline.advance(self.coordinator).await? {
                Progress::Idle if !self.is_open && self.pipeline.generation.is_finished() => return Ok(()),
                Progress::Idle => self.wait(request_rx).await?,
                progress => progress,
            };
            if let Progress::Tokens(slots) = progress {
                for (slot, tokens) in slots {
                    self.send_tokens(slot, tokens);
                }
            }
            self.report()?;
        }
    }

    fn enqueue_new(&mut self, request_rx: &mut mpsc::UnboundedReceiver<Request>) {
        while let Ok(request) = request_rx.try_recv() {
            self.queue.push_back(request);
        }
        self.is_open &= !(request_rx.is_closed() && request_rx.is_empty());
    }

    fn cancel_abandoned(&mut self) {
        self.queue.retain(|request| !request.response_tx.is_closed());
        for (sequence, response_tx) in (0..).zip(&mut self.active) {
            if response_tx.as_ref().is_some_and(mpsc::UnboundedSender::is_closed) {
                *response_tx = None;
                self.pipeline.generation.cancel(sequence);
            }
        }
    }

    /// Returns the best vacant slot for a prompt, and the length of the prompt's prefix in the cache of this slot. The
    /// score of a slot is the number of tokens that it saves minus the number of other cached tokens, which a later
    /// request could use. Of slots with the same score, the least recently used slot is chosen.
    fn slot_for(&self, prompt: &[u32]) -> Option<(u32, u32)> {
        let generation = &self.pipeline.generation;
        let rank = |slot: u32| {
            let tokens = &self.pipeline.sequences[slot as usize].tokens;
            let cached = &tokens[..tokens.len().min(generation.cached_tokens(slot) as usize)];
            let common = cached.iter().zip(prompt).take_while(|(one, other)| one == other).count();
            let reused = generation.reusable_tokens(slot, prompt.len() as u32, common as u32);
            let score = i64::from(reused) - (cached.len() as i64 - i64::from(reused));
            (score, std::cmp::Reverse(self.last_used[slot as usize]), slot, common as u32)
        };
        let vacant = (0..self.active.len() as u32).filter(|&slot| generation.is_vacant(slot));
        vacant.map(rank).max().map(|(_, _, slot, common)| (slot, common))
    }

    /// Sends tokens to the request in a slot. Frees the slot after the last token.
    fn send_tokens(&mut self, slot: u32, tokens: Vec<u32>) {
        let Some(active) = self.active.get_mut(slot as usize) else { return };
        let Some(response_tx) = active else { return };
        for token in tokens {
            // `cancel_abandoned` notices a closed receiver.
            let _ = response_tx.send(ResponseEvent::Token(token));
        }
        if self.pipeline.generation.is_vacant(slot) {
            *active = None;
        }
    }

    fn fail_all(&mut self, error: &RingError) {
        let active = self.active.iter_mut().filter_map(Option::take);
        let queued = self.queue.drain(..).map(|request| request.response_tx);
        for response_tx in active.chain(queued) {
            let _ = response_tx.send(ResponseEvent::Failed(error.to_string()));
        }
    }

    fn admit_queued(&mut self) -> Result<()> {
        while let Some(request) = self.queue.front() {
            let Some((slot, common)) = self.slot_for(&request.prompt) else { return Ok(()) };
            let Some(request) = self.queue.pop_front() else { return Ok(()) };
            let Request { prompt, max_new_tokens, sampler, response_tx } = request;
            let tokens = prompt.len() as u64 + u64::from(max_new_tokens);
            let context = self.coordinator.plan().context_length;
            if prompt.is_empty() || max_new_tokens == 0 || tokens > u64::from(context) {
                let what = format!("{} prompt tokens and {max_new_tokens} new tokens", prompt.len());
                let reason = format!("{what} do not fit the context of {context} positions");
                let _ = response_tx.send(ResponseEvent::Failed(reason));
                continue;
            }
            let entered =
                self.pipeline.generation.admit_request(slot, prompt.len() as u32, common, max_new_tokens);
            let cached_tokens = entered.map_err(|error| protocol_error("the head", error.to_string()))?;
            self.coordinator.runner()?.set_sampler(slot, sampler);
            self.request_count += 1;
            self.last_used[slot as usize] = self.request_count;
            self.pipeline.sequences[slot as usize] = SequenceTokens::from_prompt(prompt);
            let _ = response_tx.send(ResponseEvent::Started { cached_tokens });
            self.active[slot as usize] = Some(response_tx);
        }
        Ok(())
    }

    async fn wait(&mut self, request_rx: &mut mpsc::UnboundedReceiver<Request>) -> Result<Progress> {
        let limit = self.pipeline.pass_limit(self.coordinator.options.pass_timeout);
        let deadline = if self.pipeline.is_empty() {
            // No pass is in flight.
            Instant::now() + MAX_WAIT
        } else {
            self.pipeline.next_deadline(limit, self.coordinator.plan().rounds)
        };
        tokio::select! {
            event = timeout_at(deadline, self.coordinator.events.recv()) => {
                self.pipeline.handle_event(event_or_timeout(event, limit), self.coordinator).await
            }
            request = request_rx.recv(), if self.is_open => {
                self.is_open = request.is_some();
                self.queue.extend(request);
                Ok(Progress::Work)
            }
        }
    }

    /// Reconnects lost devices before a request starts on an idle ring. The caches of the new ring are empty.
    async fn rejoin_lost_devices(&mut self) -> Result<()> {
        let pipeline = &self.pipeline;
        let is_idle = pipeline.generation.is_finished() && pipeline.is_empty();
        let is_due = Instant::now() >= self.rejoin_at && !self.queue.is_empty();
        if !is_idle || !is_due || self.coordinator.reconfiguration.recovery.unavailable_devices().is_empty() {
            return Ok(());
        }
        self.rejoin_at = Instant::now() + REJOIN_INTERVAL;
        let (slots, can_truncate) =
            (self.coordinator.plan().sequences, self.coordinator.can_truncate_caches());
        self.pipeline = self.options.empty_pipeline(slots, can_truncate);
        self.coordinator.start_request(self.options.no_samplers()).await
    }

    /// Requests the traces of the devices at intervals, and forwards received traces.
    fn report(&mut self) -> Result<()> {
        let pipeline = &mut self.pipeline;
        let is_due = self.reported_at.elapsed() >= REPORT_INTERVAL && !pipeline.passes.is_empty();
        if is_due || pipeline.passes.len() >= MAX_PASSES_PER_REPORT {
            self.reported_at = Instant::now();
            pipeline.passes.clear();
            let plan = self.coordinator.plan().clone();
            self.coordinator.connections.broadcast(&plan, &Message::CollectTrace);
            let head = &plan.devices[0].name;
            let own = self.coordinator.runner()?.take_trace().into_iter();
            pipeline.trace_lines.get_or_insert_default().extend(own.map(|(_, lines)| (head.clone(), lines)));
        }
        for (name, lines) in pipeline.trace_lines.iter_mut().flat_map(|received| received.drain(..)) {
            if let Some(on_report) = &self.options.on_trace_lines {
                on_report(&name, &lines);
            }
        }
        Ok(())
    }
}
