//! The scheduler: continuous batching of requests over the slots of one ring.
//!
//! The plan has caches for a number of sequences; each cache is a slot. A request is assigned to a vacant slot,
//! preferably one whose cached tokens are a prefix of the prompt, which is not computed again. Active requests share
//! the ring like the sequences of one request. When the client of a request disconnects (the receiver of its events is
//! closed), the slot becomes vacant after the pass in flight. When a device is lost, all active sequences are computed
//! again, and the caches of vacant slots are lost.
//!
//! Not here: which slot a request enters and when ([`RequestSlots`]), and which passes start next ([`Generation`]).

use std::sync::Arc;
use std::time::Duration;

use hearth_core::adaptation;
use hearth_core::schedule::request_slots::{EnteredRequest, RequestProgress, RequestSlots};
use hearth_core::schedule::{Generation, GenerationError};
use hearth_schema::pass::Pass;
use hearth_schema::trace::Admission;
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout_at};

use super::coordinator::Coordinator;
use super::pipeline::{MAX_WAIT, PassPipeline, Progress, event_or_timeout};
use crate::error::{Result, RingError, protocol_error};
use crate::execution::{Samplers, SequenceOutput, TraceLines};
use crate::wire::{Message, Transport};
use hearth_runtime::clock::monotonic_nanos;

/// Number of passes after which traces are collected, to bound their size. source: assumed, seconds on a fast ring
const MAX_PASSES_PER_REPORT: usize = 256;
/// The interval at which a slow ring collects traces, so that metrics stay current. source: assumed
const REPORT_INTERVAL: Duration = Duration::from_secs(2);
/// The minimum interval between attempts to reconnect lost devices, because each attempt takes time. source: assumed
const REJOIN_INTERVAL: Duration = Duration::from_secs(30);
/// The maximum interval for devices that are lost soon after they have rejoined active requests. source: assumed
const MAX_REJOIN_INTERVAL: Duration = Duration::from_mins(16);

/// A request for tokens or an embedding to a ring that serves several requests at the same time.
pub struct Request {
    /// The tokens of the prompt; at least one token.
    pub prompt: Vec<u32>,
    /// The maximum number of generated tokens; at least one, also for an embedding, which has no tokens.
    pub max_new_tokens: u32,
    pub output: SequenceOutput,
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

/// What a device has done since its last report.
pub struct DeviceReport {
    /// The name of the device.
    pub device: String,
    pub lines: TraceLines,
    /// How many times as long as its profile says the device computes; `None` without a profile.
    pub slowdown: Option<f64>,
}

/// Receives the reports of the devices.
pub type OnDeviceReport = Arc<dyn Fn(&DeviceReport) + Send + Sync>;

pub struct ServeOptions {
    /// Maximum number of prompt tokens in one pass.
    pub micro_batch: u32,
    /// Number of tokens that the draft model proposes at a time; 0 disables drafting.
    pub draft_tokens: u32,
    /// Tokens that end a sequence.
    pub stop_tokens: Vec<u32>,
    pub on_device_report: Option<OnDeviceReport>,
}

impl ServeOptions {
    fn empty_pipeline(&self, slots: u32, can_truncate: bool) -> PassPipeline {
        let generation =
            Generation::with_vacant_slots(slots, self.micro_batch, self.draft_tokens, can_truncate);
        let texts = vec![Vec::new(); slots as usize];
        PassPipeline::new(generation, texts, self.stop_tokens.clone())
    }

    fn no_samplers(&self) -> Samplers {
        Samplers::new(Vec::new(), self.stop_tokens.clone())
    }
}

/// What is recorded of a run with a fixed list of requests.
pub(super) struct RecordedRequests {
    pub(super) passes: Vec<Pass>,
    /// The entries into slots. `admitted_ns` is a time on this process's clock, `arrival_ns` is zero.
    pub(super) admissions: Vec<Admission>,
    pub(super) result: Result<()>,
}

/// A request that waits or is in a slot.
struct ServedRequest {
    /// The number of the request, in the order of arrival.
    number: u32,
    /// Its output while the request waits; the head has that of a request in a slot.
    output: Option<SequenceOutput>,
    response_tx: mpsc::UnboundedSender<ResponseEvent>,
}

impl ServedRequest {
    /// Takes the output of a slot that the request has left.
    fn keep_output<T: Transport>(&mut self, coordinator: &mut Coordinator<T>, slot: u32) -> Result<()> {
        let output = coordinator.runner()?.take_output(slot);
        self.output = Some(output.ok_or_else(|| protocol_error("the head", "this sequence has no sampler"))?);
        Ok(())
    }
}

/// The pipeline of a ring, and its requests.
struct Scheduler<'a, T: Transport> {
    coordinator: &'a mut Coordinator<T>,
    options: ServeOptions,
    pipeline: PassPipeline,
    slots: RequestSlots<ServedRequest>,
    /// The number of requests that have arrived.
    arrived: u32,
    /// The entries into slots, if the caller wants them, the passes and the traces of the devices in the end.
    admissions: Option<Vec<Admission>>,
    /// Whether more requests can arrive.
    is_open: bool,
    rejoin_at: Instant,
    /// The interval between attempts while requests are active.
    rejoin_interval: Duration,
    /// The last time at which devices rejoined active requests.
    rejoined_at: Option<Instant>,
    reported_at: Instant,
}

/// Serves requests until the request channel is closed. If the ring fails, all requests receive the error.
pub(super) async fn serve<T: Transport>(
    coordinator: &mut Coordinator<T>,
    options: ServeOptions,
    request_rx: &mut mpsc::UnboundedReceiver<Request>,
) -> Result<()> {
    let mut scheduler = Scheduler::new(coordinator, options);
    scheduler.pipeline.trace_lines = Some(Vec::new());
    scheduler.run_or_fail_all(request_rx).await
}

/// Serves requests as [`serve`] does, and returns their passes and entries into slots. The devices keep their traces.
pub(super) async fn serve_recorded<T: Transport>(
    coordinator: &mut Coordinator<T>,
    options: ServeOptions,
    request_rx: &mut mpsc::UnboundedReceiver<Request>,
) -> RecordedRequests {
    let mut scheduler = Scheduler::new(coordinator, options);
    scheduler.admissions = Some(Vec::new());
    let result = scheduler.run_or_fail_all(request_rx).await;
    let Scheduler { pipeline, admissions, .. } = scheduler;
    RecordedRequests { passes: pipeline.passes, admissions: admissions.unwrap_or_default(), result }
}

impl<'a, T: Transport> Scheduler<'a, T> {
    fn new(coordinator: &'a mut Coordinator<T>, options: ServeOptions) -> Self {
        let slots = coordinator.plan().sequences;
        let now = Instant::now();
        let pipeline = options.empty_pipeline(slots, coordinator.can_truncate_caches());
        let capacity = coordinator.plan().total_cache_tokens();
        let slots = RequestSlots::new(slots, capacity, coordinator.can_share_caches());
        Self {
            coordinator,
            pipeline,
            options,
            slots,
            arrived: 0,
            admissions: None,
            is_open: true,
            rejoin_at: now,
            rejoin_interval: REJOIN_INTERVAL,
            rejoined_at: None,
            reported_at: now,
        }
    }

    async fn run_or_fail_all(&mut self, request_rx: &mut mpsc::UnboundedReceiver<Request>) -> Result<()> {
        let ended = self.run(request_rx).await;
        if let Err(error) = &ended {
            self.enqueue_new(request_rx);
            self.fail_all(error);
        }
        ended
    }

    async fn run(&mut self, request_rx: &mut mpsc::UnboundedReceiver<Request>) -> Result<()> {
        self.coordinator.start_request(self.options.no_samplers()).await?;
        loop {
            self.enqueue_new(request_rx);
            self.cancel_abandoned();
            self.rejoin_lost_devices().await?;
            self.admit_queued()?;
            self.make_room_for_tokens()?;
            let progress = match self.pipeline.advance(self.coordinator).await? {
                Progress::Idle if !self.is_open && self.pipeline.generation.is_finished() => return Ok(()),
                Progress::Idle => self.wait(request_rx).await?,
                progress => progress,
            };
            if let Progress::Tokens(slots) = progress {
                for (slot, tokens) in slots {
                    self.send_tokens(slot, &tokens)?;
                }
                let cached_tokens = self.active_tokens();
                let in_flight = self.pipeline.batches_in_flight() + 1;
                self.adapt_plan(adaptation::Event::BatchCompleted { cached_tokens, in_flight }).await?;
            }
            self.report()?;
            if self.is_idle() && !self.slots.is_any_waiting() {
                self.adapt_plan(adaptation::Event::Idle).await?;
            }
        }
    }

    async fn adapt_plan(&mut self, event: adaptation::Event) -> Result<()> {
        if self.coordinator.reconfiguration.should_change_plan(event) {
            self.pipeline.plan_again(self.coordinator).await?;
        }
        Ok(())
    }

    /// Returns the number of tokens of active requests in the caches.
    fn active_tokens(&self) -> u64 {
        let cached = |slot| u64::from(self.pipeline.generation.cached_tokens(slot));
        self.slots.active_slots().map(cached).sum()
    }

    /// Whether no request is in a slot and no pass in flight.
    fn is_idle(&self) -> bool {
        self.pipeline.generation.is_finished() && self.pipeline.is_empty()
    }

    fn enqueue_new(&mut self, request_rx: &mut mpsc::UnboundedReceiver<Request>) {
        while let Ok(request) = request_rx.try_recv() {
            self.enqueue(request);
        }
        self.is_open &= !(request_rx.is_closed() && request_rx.is_empty());
    }

    fn enqueue(&mut self, request: Request) {
        let Request { prompt, max_new_tokens, output, response_tx } = request;
        let (tokens, context) = (prompt.len(), self.coordinator.plan().context_length);
        let fits = tokens as u64 + u64::from(max_new_tokens) <= u64::from(context);
        if tokens > 0 && max_new_tokens > 0 && fits {
            let request = ServedRequest { number: self.arrived, output: Some(output), response_tx };
            self.arrived = self.arrived.wrapping_add(1);
            self.slots.enqueue(request, prompt, max_new_tokens);
            return;
        }
        let what = format!("{tokens} prompt tokens and {max_new_tokens} new tokens");
        let reason = format!("{what} do not fit the context of {context} positions");
        let _ = response_tx.send(ResponseEvent::Failed(reason));
    }

    fn cancel_abandoned(&mut self) {
        self.slots.cancel(&mut self.pipeline.generation, |request| request.response_tx.is_closed());
    }

    /// Sends tokens to the request in a slot.
    fn send_tokens(&mut self, slot: u32, tokens: &[u32]) -> Result<()> {
        if let Some(request) = self.slots.request(slot) {
            for &token in tokens {
                // `cancel_abandoned` notices a closed receiver.
                let _ = request.response_tx.send(ResponseEvent::Token(token));
            }
        }
        // An embedding has no token.
        let is_stopped = tokens.last().is_none_or(|last| self.options.stop_tokens.contains(last));
        let PassPipeline { generation, texts, .. } = &self.pipeline;
        let progress = self.slots.add_tokens(slot, tokens.len() as u32, is_stopped, generation, texts);
        match progress {
            RequestProgress::Preempted(request) => request.keep_output(self.coordinator, slot),
            RequestProgress::Continues | RequestProgress::Ended(_) => Ok(()),
        }
    }

    /// Releases caches of earlier requests, or lets the youngest request leave, if the next tokens need the memory.
    fn make_room_for_tokens(&mut self) -> Result<()> {
        if std::mem::take(&mut self.pipeline.has_lost_caches) {
            self.slots.lose_caches();
        }
        let PassPipeline { generation, texts, .. } = &mut self.pipeline;
        if let Some((slot, request)) = self.slots.make_room_for_tokens(generation, texts) {
            request.keep_output(self.coordinator, slot)?;
        }
        self.pipeline.cache_changes.extend(self.slots.take_cache_changes());
        Ok(())
    }

    fn fail_all(&mut self, error: &RingError) {
        for request in self.slots.drain() {
            let _ = request.response_tx.send(ResponseEvent::Failed(error.to_string()));
        }
    }

    fn admit_queued(&mut self) -> Result<()> {
        let PassPipeline { generation, texts, .. } = &mut self.pipeline;
        let first_pass = generation.next_pass_index();
        let broken = |error: GenerationError| protocol_error("the head", error.to_string());
        while let Some(entered) = self.slots.admit(generation, texts).map_err(broken)? {
            let EnteredRequest { request, slot, cached_tokens, is_resumed } = entered;
            if let Some(output) = request.output.take() {
                self.coordinator.runner()?.set_output(slot, output);
            }
            if let Some(admissions) = &mut self.admissions {
                let (request, admitted_ns) = (request.number, monotonic_nanos());
                let admission = Admission { request, sequence: slot, first_pass, arrival_ns: 0, admitted_ns };
                admissions.push(admission);
            }
            if !is_resumed {
                let _ = request.response_tx.send(ResponseEvent::Started { cached_tokens });
            }
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
                if let Some(request) = request {
                    self.enqueue(request);
                }
                Ok(Progress::Work)
            }
        }
    }

    /// Reconnects lost devices while there are requests. The caches of the new ring are empty: the tokens of active
    /// requests are computed again.
    async fn rejoin_lost_devices(&mut self) -> Result<()> {
        if self.admissions.is_some() {
            // The passes and traces of the run are those of one ring.
            return Ok(());
        }
        let has_requests = self.slots.is_any_waiting() || self.slots.active_slots().next().is_some();
        let is_due = has_requests && Instant::now() >= self.rejoin_at;
        if !is_due || self.coordinator.reconfiguration.recovery.unavailable_devices().is_empty() {
            return Ok(());
        }
        if !self.is_idle() {
            self.coordinator.rejoin_lost_devices().await;
            if self.coordinator.reconfiguration.recovery.must_plan() {
                let since_rejoin = self.rejoined_at.replace(Instant::now()).map(|at| at.elapsed());
                let is_lost_again = since_rejoin.is_some_and(|time| time < 4 * self.rejoin_interval);
                // A device that is lost again and again would only make the requests start again.
                self.rejoin_interval = if is_lost_again {
                    MAX_REJOIN_INTERVAL.min(2 * self.rejoin_interval)
                } else {
                    REJOIN_INTERVAL
                };
                self.pipeline.plan_again(self.coordinator).await?;
            }
            // After the attempt, which may take longer than the interval.
            self.rejoin_at = Instant::now() + self.rejoin_interval;
            return Ok(());
        }
        self.rejoin_at = Instant::now() + REJOIN_INTERVAL;
        let (slots, can_truncate) =
            (self.coordinator.plan().sequences, self.coordinator.can_truncate_caches());
        self.pipeline = self.options.empty_pipeline(slots, can_truncate);
        self.pipeline.trace_lines = Some(Vec::new());
        self.slots.lose_caches();
        self.coordinator.start_request(self.options.no_samplers()).await
    }

    /// Requests the traces of the devices at intervals, and forwards received traces.
    fn report(&mut self) -> Result<()> {
        if self.admissions.is_some() {
            return Ok(());
        }
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
        for (device, lines) in pipeline.trace_lines.iter_mut().flat_map(|received| received.drain(..)) {
            let slowdown = self.coordinator.measure(&device, &pipeline.recent_batches, &lines);
            if let Some(on_report) = &self.options.on_device_report {
                on_report(&DeviceReport { device, lines, slowdown });
            }
        }
        Ok(())
    }
}
