//! The scheduler: continuous batching of requests over the slots of one ring.
//!
//! The plan has caches for a number of sequences; each is a slot. A request takes a vacant slot, best one whose tokens
//! so far are a prefix of the prompt: what is common need not be computed again, so that a conversation continues where
//! it was. Requests under way interleave in the ring as the sequences of one request do, and come and go without
//! affecting the others. A request whose client is gone (the receiver of its events is closed) leaves its slot with the
//! pass in flight. When a device is lost, all active sequences are computed again, as in any request; what vacant slots
//! held is lost.
//!
//! Not here: which pass enters next ([`hearth_core::schedule::Generation`]), and text.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use hearth_core::schedule::Generation;
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout_at};

use super::coordinator::Coordinator;
use super::pipeline::{MAX_WAIT, PassPipeline, Progress, SequenceTokens, event_or_timeout};
use crate::error::{RingError, protocol_error};
use crate::execution::{SampleFn, Samplers, TraceLines};
use crate::wire::{Message, Transport};

/// Passes after which traces are collected, so that no device keeps the lines of days.
/// source: assumed, some seconds of a fast ring
const MAX_PASSES_PER_REPORT: usize = 256;
/// The interval of collecting traces on a slow ring, so that its metrics move.
/// source: assumed
const REPORT_INTERVAL: Duration = Duration::from_secs(2);
/// The interval at which the head tries to reconnect to a lost device. source: assumed, an acceptable addition to the
/// time to first token
const REJOIN_INTERVAL: Duration = Duration::from_secs(30);

/// A request to a ring that serves.
pub struct Request {
    /// The prompt; at least one token.
    pub prompt: Vec<u32>,
    /// The maximum number of new tokens; at least one.
    pub max_new_tokens: u32,
    /// Turns logits into tokens.
    pub sampler: SampleFn,
    /// Where the response goes. A request whose receiver is gone is cancelled.
    pub response_tx: mpsc::UnboundedSender<ResponseEvent>,
}

/// An event of a response. After the last one the sender is dropped.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ResponseEvent {
    /// The request has a slot.
    Started {
        /// Tokens of its prompt that were found in the slot's cache.
        cached_tokens: u32,
    },
    /// A token; a stop token is the last.
    Token(u32),
    /// The request has failed, and why.
    Failed(String),
}

/// Receives now and then what a device, by name, has done since.
pub type OnReport = Arc<dyn Fn(&str, &TraceLines) + Send + Sync>;

/// How requests are served.
pub struct ServeOptions {
    /// The most tokens of a prompt that enter the ring as one batch.
    pub micro_batch: u32,
    /// Tokens that the draft model proposes at a time; 0 drafts nothing.
    pub draft_tokens: u32,
    /// Tokens that end a sequence.
    pub stop_tokens: Vec<u32>,
    pub on_report: Option<OnReport>,
}

impl ServeOptions {
    /// A pipeline whose slots hold nothing.
    fn empty_pipeline(&self, slots: u32) -> PassPipeline {
        let generation = Generation::vacant(slots, self.micro_batch, self.draft_tokens);
        let sequences = vec![SequenceTokens::default(); slots as usize];
        let mut pipeline = PassPipeline::new(generation, sequences, self.stop_tokens.clone());
        pipeline.reports = Some(Vec::new());
        pipeline
    }

    fn no_samplers(&self) -> Samplers {
        Samplers::new(Vec::new(), self.stop_tokens.clone())
    }
}

/// The slots of a ring, the active requests in them, and the queue of requests that wait for one.
struct RequestTable {
    pipeline: PassPipeline,
    /// The active request of each slot.
    active: Vec<Option<mpsc::UnboundedSender<ResponseEvent>>>,
    /// The time at which each slot was taken last, as a count of requests.
    last_used: Vec<u64>,
    queue: VecDeque<Request>,
    request_count: u64,
    /// Whether more requests can come.
    is_open: bool,
}

impl RequestTable {
    fn new(pipeline: PassPipeline, slots: usize) -> Self {
        Self {
            pipeline,
            active: vec![None; slots],
            last_used: vec![0; slots],
            queue: VecDeque::new(),
            request_count: 0,
            is_open: true,
        }
    }

    /// Queues the requests that have come so far.
    fn enqueue_new(&mut self, request_rx: &mut mpsc::UnboundedReceiver<Request>) {
        loop {
            match request_rx.try_recv() {
                Ok(request) => self.queue.push_back(request),
                Err(mpsc::error::TryRecvError::Empty) => return,
                Err(mpsc::error::TryRecvError::Disconnected) => {
                    self.is_open = false;
                    return;
                }
            }
        }
    }

    /// Cancels the requests whose clients are gone.
    fn cancel_abandoned(&mut self) {
        self.queue.retain(|request| !request.response_tx.is_closed());
        for (sequence, response_tx) in (0..).zip(&mut self.active) {
            if response_tx.as_ref().is_some_and(mpsc::UnboundedSender::is_closed) {
                *response_tx = None;
                self.pipeline.generation.give_up(sequence);
            }
        }
    }

    /// Returns the vacant slot for a prompt, and how many of its first tokens are cached there. What is gained is
    /// computing these; what is lost is the rest of the slot's tokens, which a later request may continue. Of equally
    /// good slots it is the least recently used.
    fn slot_for(&self, prompt: &[u32]) -> Option<(u32, u32)> {
        let generation = &self.pipeline.generation;
        let overlap = |slot: u32| {
            let tokens = &self.pipeline.sequences[slot as usize].all;
            let cached = &tokens[..tokens.len().min(generation.held(slot) as usize)];
            let common = cached.iter().zip(prompt).take_while(|(one, other)| one == other).count();
            (slot, common, cached.len() - common)
        };
        let vacant = (0..self.active.len() as u32).filter(|&slot| generation.is_vacant(slot));
        let worth = |&(slot, gained, lost): &(u32, usize, usize)| {
            (gained as i64 - lost as i64, std::cmp::Reverse(self.last_used[slot as usize]))
        };
        vacant.map(overlap).max_by_key(worth).map(|(slot, common, _)| (slot, common as u32))
    }

    /// Sends a request its tokens; the slot is free after the last.
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

    /// Fails all requests, active and queued.
    fn fail_all(&mut self, error: &RingError) {
        let active = self.active.iter_mut().filter_map(Option::take);
        let queued = self.queue.drain(..).map(|request| request.response_tx);
        for response_tx in active.chain(queued) {
            let _ = response_tx.send(ResponseEvent::Failed(error.to_string()));
        }
    }
}

/// Serves requests until no more can come. If the ring fails, all requests get its error.
pub(super) async fn serve<T: Transport>(
    coordinator: &mut Coordinator<T>,
    options: ServeOptions,
    request_rx: &mut mpsc::UnboundedReceiver<Request>,
) -> Result<(), RingError> {
    let slots = coordinator.plan().sequences;
    let table = RequestTable::new(options.empty_pipeline(slots), slots as usize);
    let now = Instant::now();
    let started = coordinator.start_request(options.no_samplers()).await;
    let mut scheduler = Scheduler { coordinator, options, table, rejoin_at: now, reported_at: now };
    let ended = match started {
        Ok(()) => scheduler.run(request_rx).await,
        Err(error) => Err(error),
    };
    if let Err(error) = &ended {
        scheduler.table.enqueue_new(request_rx);
        scheduler.table.fail_all(error);
    }
    ended
}

/// Admits requests to the ring's slots.
struct Scheduler<'a, T: Transport> {
    coordinator: &'a mut Coordinator<T>,
    options: ServeOptions,
    table: RequestTable,
    /// The time at which lost devices are tried again.
    rejoin_at: Instant,
    /// The time at which traces were collected last.
    reported_at: Instant,
}

impl<T: Transport> Scheduler<'_, T> {
    async fn run(&mut self, request_rx: &mut mpsc::UnboundedReceiver<Request>) -> Result<(), RingError> {
        loop {
            self.table.enqueue_new(request_rx);
            self.table.cancel_abandoned();
            self.rejoin_lost_devices().await?;
            self.admit_queued()?;
            let progress = match self.table.pipeline.advance(self.coordinator).await? {
                Progress::Idle if !self.table.is_open && self.table.pipeline.generation.is_over() => {
                    return Ok(());
                }
                Progress::Idle => self.wait(request_rx).await?,
                progress => progress,
            };
            if let Progress::Tokens(slot, tokens) = progress {
                self.table.send_tokens(slot, tokens);
            }
            self.report()?;
        }
    }

    /// Assigns free slots to queued requests.
    fn admit_queued(&mut self) -> Result<(), RingError> {
        let table = &mut self.table;
        while let Some(request) = table.queue.front() {
            let Some((slot, common)) = table.slot_for(&request.prompt) else { return Ok(()) };
            let Some(request) = table.queue.pop_front() else { return Ok(()) };
            let Request { prompt, max_new_tokens, sampler, response_tx } = request;
            let tokens = prompt.len() as u64 + u64::from(max_new_tokens);
            let context = self.coordinator.plan().context;
            if prompt.is_empty() || max_new_tokens == 0 || tokens > u64::from(context) {
                let _ = response_tx.send(ResponseEvent::Failed(format!(
                    "{} prompt tokens and {max_new_tokens} new ones do not fit the context of {context} positions",
                    prompt.len()
                )));
                continue;
            }
            let entered = table.pipeline.generation.enter(slot, prompt.len() as u32, common, max_new_tokens);
            let cached_tokens = entered.map_err(|error| protocol_error("the head", &error.to_string()))?;
            self.coordinator.runner()?.set_sampler(slot, sampler);
            table.request_count += 1;
            table.last_used[slot as usize] = table.request_count;
            table.pipeline.sequences[slot as usize] =
                SequenceTokens { prompt_len: prompt.len(), all: prompt };
            let _ = response_tx.send(ResponseEvent::Started { cached_tokens });
            table.active[slot as usize] = Some(response_tx);
        }
        Ok(())
    }

    /// Waits for the next event of the ring, or request.
    async fn wait(
        &mut self,
        request_rx: &mut mpsc::UnboundedReceiver<Request>,
    ) -> Result<Progress, RingError> {
        let Self { coordinator, table, .. } = self;
        let limit = coordinator.options.pass_deadline;
        let deadline = if table.pipeline.is_empty() {
            // Nothing can be late.
            Instant::now() + MAX_WAIT
        } else {
            table.pipeline.next_deadline(limit, coordinator.plan().rounds)
        };
        tokio::select! {
            event = timeout_at(deadline, coordinator.events.recv()) => {
                table.pipeline.handle(event_or_timeout(event, limit), coordinator).await
            }
            request = request_rx.recv(), if table.is_open => {
                table.is_open = request.is_some();
                table.queue.extend(request);
                Ok(Progress::Work)
            }
        }
    }

    /// Takes lost devices in again before a request enters an idle ring. The new ring holds nothing.
    async fn rejoin_lost_devices(&mut self) -> Result<(), RingError> {
        let pipeline = &self.table.pipeline;
        let is_idle = pipeline.generation.is_over() && pipeline.is_empty();
        let is_due = Instant::now() >= self.rejoin_at && !self.table.queue.is_empty();
        if !is_idle || !is_due || self.coordinator.reconfiguration.recovery.gone().is_empty() {
            return Ok(());
        }
        self.rejoin_at = Instant::now() + REJOIN_INTERVAL;
        self.table.pipeline = self.options.empty_pipeline(self.coordinator.plan().sequences);
        self.coordinator.start_request(self.options.no_samplers()).await
    }

    /// Has the devices send their traces now and then, and passes on what came.
    fn report(&mut self) -> Result<(), RingError> {
        let pipeline = &mut self.table.pipeline;
        let is_due = self.reported_at.elapsed() >= REPORT_INTERVAL && !pipeline.passes.is_empty();
        if is_due || pipeline.passes.len() >= MAX_PASSES_PER_REPORT {
            self.reported_at = Instant::now();
            pipeline.passes.clear();
            let plan = self.coordinator.plan().clone();
            self.coordinator.connections.broadcast(&plan, &Message::Collect);
            let head = &plan.devices[0].name;
            let own = self.coordinator.runner()?.take_trace();
            let own = own.into_iter().map(|(_, lines)| (head.clone(), lines));
            pipeline.reports.get_or_insert_default().extend(own);
        }
        for (name, lines) in pipeline.reports.iter_mut().flat_map(|reports| reports.drain(..)) {
            if let Some(on_report) = &self.options.on_report {
                on_report(&name, &lines);
            }
        }
        Ok(())
    }
}
