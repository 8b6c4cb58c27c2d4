//! The stage runner: executes the steps of the schedule on one device.
//!
//! The runner executes the steps of `hearth_core::schedule` on one thread, in order and without decisions of its own:
//! it computes, puts activations into the outbox and starts prefetches. The trace of the device records the steps.
//!
//! A runner is used in all epochs of a session: a new request clears its sequences ([`StageRunner::reset`]), and a
//! new plan also changes its layers ([`StageRunner::reconfigure`]). Activations of an earlier epoch are dropped.

mod head_steps;

use std::collections::BTreeMap;
use std::sync::Arc;

use hearth_core::schedule::{Event, ModelPart, Schedule, Step, parts_by_busy_period};
use hearth_profiles::Format;
use hearth_profiles::model::TokenMixer;
use hearth_schema::Plan;
use hearth_schema::pass::Batch;
use hearth_schema::plan::Processor;
use hearth_schema::scenario::ActivationFormat;
use hearth_schema::trace::{Counter, Resource, StepCost, StepKind, StepRecord};
use tokio::sync::mpsc;

use super::drafter::Drafter;
use super::model::{GpuOptions, LocalModel, create_thread_pool};
use super::recorder::{StepId, TraceLines, TraceRecorder};
use super::sampling::{Samplers, SequenceOutput};
use crate::error::{Result, RingError, protocol_error};
use crate::wire::{ActivationsHeader, Frame, Message, ReceivedActivations, activations};
use hearth_runtime::clock::{ThreadTimes, monotonic_nanos};
use hearth_runtime::cpu::buffer_bytes;
use hearth_runtime::memory::MemoryWatch;
use hearth_runtime::residency::{WeightResidency, is_residency_known, resident_bytes};
use hearth_runtime::{
    CriticalPathCost, ExecError, InputOutputLayers, Stage, ThreadPool, UploadProgressReporter, Weights,
};

/// A batch that has gone around the ring.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BatchOutput {
    pub batch: Batch,
    /// For each pass of the batch, the accepted drafts and one more token; empty if the pass has no output, or an
    /// embedding as its output.
    pub tokens: Vec<Vec<u32>>,
}

/// All tokens so far of the sequences of a batch, by sequence.
pub type SequenceTexts<'a> = BTreeMap<u32, &'a [u32]>;

/// The channels to the devices that receive activations from this device, by index of the receiver in the ring.
pub type Outbox = BTreeMap<usize, mpsc::UnboundedSender<Frame>>;

/// Executes the schedule of one device. Only the head has input and output layers, samplers and a draft model.
pub struct StageRunner {
    schedule: Schedule,
    stage: Stage,
    input_output: Option<InputOutputLayers>,
    weights: Arc<Weights>,
    outbox: Outbox,
    epoch: u32,
    /// Trace lines of the earlier epochs of the request, by epoch.
    past: Vec<(u32, TraceLines)>,
    residency: WeightResidency,
    recorder: TraceRecorder,
    samplers: Option<Samplers>,
    drafter: Option<Drafter>,
    /// The drafted tokens of each pass in flight, by pass index.
    drafts: BTreeMap<u32, Vec<u32>>,
    /// Activations of the current batch (`ModelShape::activation_length` for each token).
    hidden: Vec<f32>,
    /// The time at which the device became idle, in nanoseconds on this process's clock.
    idle_since: u64,
    last_pass: u32,
    next_memory_sample: u64,
    largest_batch: u32,
    pool: Arc<ThreadPool>,
    /// Bytes read ahead before the trace began.
    ahead_before: u64,
    /// Bytes refaulted in the control group before the trace began.
    refaults_before: u64,
}

/// Maximum number of batches in flight, per device of the ring. Two batches keep a device busy while activations are
/// being sent; more batches would only wait and use memory for their activations.
pub const MAX_BATCHES_PER_DEVICE: usize = 2;

/// The pause after a memory sample, as a multiple of the sampling time. So sampling takes at most 1 % of the time.
const MEMORY_SAMPLE_PAUSE: u64 = 100;

impl StageRunner {
    /// Creates the runner of a device and loads the layers of the device.
    pub fn new(
        plan: &Arc<Plan>,
        device_index: usize,
        model: &LocalModel,
        threads: usize,
        outbox: Outbox,
        epoch: u32,
        progress: &UploadProgressReporter,
    ) -> Result<Self> {
        let gpu_options = GpuOptions { fallback_to_cpu: false, progress };
        Self::with_pool(create_thread_pool(threads)?, plan, device_index, model, outbox, epoch, gpu_options)
    }

    fn with_pool(
        pool: Arc<ThreadPool>,
        plan: &Arc<Plan>,
        device_index: usize,
        model: &LocalModel,
        outbox: Outbox,
        epoch: u32,
        gpu_options: GpuOptions<'_>,
    ) -> Result<Self> {
        model.verify(plan, device_index, pool.threads(), gpu_options.progress)?;
        let weights = model.weights.clone();
        let residency =
            WeightResidency::start(&weights, plan, device_index, || MemoryWatch::shared().measure());
        let (stage, input_output) =
            model.stage(plan, device_index, &pool, residency.barrier(), gpu_options)?;
        Ok(Self {
            schedule: new_schedule(plan, device_index, &weights),
            stage,
            input_output,
            weights,
            outbox,
            epoch,
            past: Vec::new(),
            residency,
            recorder: TraceRecorder::new(device_index as u16),
            samplers: None,
            drafter: None,
            drafts: BTreeMap::new(),
            hidden: Vec::new(),
            idle_since: monotonic_nanos(),
            last_pass: 0,
            next_memory_sample: 0,
            largest_batch: 0,
            pool,
            ahead_before: 0,
            refaults_before: refaulted_bytes(),
        })
    }

    /// Returns the schedule of this device without passes and with empty caches.
    fn empty_schedule(&self) -> Schedule {
        new_schedule(self.schedule.plan(), self.schedule.device_index(), &self.weights)
    }

    /// Sets the draft model of the head, if the plan has a draft model.
    pub fn with_draft_model(mut self, draft: Option<&LocalModel>) -> Result<Self> {
        let plan = self.schedule.plan();
        let draft = draft.filter(|_| plan.draft_model.is_some());
        let target_tokens = self.weights.shape().vocab_size;
        let drafter = |draft| Drafter::for_plan(draft, target_tokens, plan, &self.pool);
        self.drafter = draft.map(drafter).transpose()?;
        Ok(self)
    }

    /// Changes to another plan and epoch for the passes from index `first_pass` on. The trace is kept. If the plan is
    /// the same, the weights stay in memory.
    pub fn reconfigure(
        mut self,
        plan: &Arc<Plan>,
        first_pass: u32,
        model: &LocalModel,
        outbox: Outbox,
        epoch: u32,
        progress: &UploadProgressReporter,
    ) -> Result<Self> {
        let is_same = self.schedule.plan() == plan;
        if first_pass == 0 {
            // Before the first pass of a request: abandoned passes of the previous request do not count.
            self.schedule = self.empty_schedule();
        }
        self.schedule.react(&Event::Replanned { plan: plan.clone(), first_pass })?;
        self.past = self.take_trace();
        (self.outbox, self.epoch) = (outbox, epoch);
        self.drafts.clear();
        let device_index = self.schedule.device_index();
        self.recorder.device_index = device_index as u16;
        if is_same {
            self.stage.truncate_kv_caches(0);
            self.residency.reset();
            self.idle_since = monotonic_nanos();
            return Ok(self);
        }
        let gpu_options = GpuOptions { fallback_to_cpu: true, progress };
        // The old and the new stage together may not fit into memory.
        drop((self.stage, self.input_output, self.residency));
        let new = Self::with_pool(self.pool, plan, device_index, model, self.outbox, epoch, gpu_options)?;
        let Self { schedule, past, recorder, samplers, drafter, refaults_before, .. } = self;
        Ok(Self { schedule, past, recorder, samplers, drafter, refaults_before, ..new })
    }

    /// Sets the index of the first pass of the plan. Passes with smaller indices belong to earlier plans.
    pub fn set_first_pass(&mut self, first_pass: u32) -> Result<()> {
        let plan = self.schedule.plan().clone();
        self.schedule.react(&Event::Replanned { plan, first_pass })?;
        Ok(())
    }

    /// Begins an epoch for a new request: clears all sequences and the trace, and on the head sets the samplers.
    pub fn reset(&mut self, epoch: u32, samplers: Option<Samplers>) {
        (self.epoch, self.past) = (epoch, Vec::new());
        self.schedule = self.empty_schedule();
        self.stage.truncate_kv_caches(0);
        self.recorder.reset();
        self.residency.reset();
        self.ahead_before = self.residency.bytes_read();
        self.refaults_before = refaulted_bytes();
        self.samplers = samplers;
        self.drafts.clear();
        if let Some(drafter) = &mut self.drafter {
            drafter.clear();
        }
        self.idle_since = monotonic_nanos();
    }

    /// Removes and returns the output of a sequence.
    pub fn take_output(&mut self, sequence: u32) -> Option<SequenceOutput> {
        self.samplers.as_mut()?.take(sequence)
    }

    pub fn set_output(&mut self, sequence: u32, output: SequenceOutput) {
        self.samplers.get_or_insert_with(|| Samplers::new(Vec::new(), Vec::new())).set(sequence, output);
    }

    /// Removes and returns the trace lines since the last reset, by epoch.
    pub fn take_trace(&mut self) -> Vec<(u32, TraceLines)> {
        for span in self.residency.take_spans() {
            let at = StepId { pass: span.origin.pass, round: span.origin.round };
            let record = self.recorder.record_step(at, StepKind::Prefetch, span.start_ns, span.end_ns);
            record.bytes = span.bytes;
            record.layers = span.origin.layers;
        }
        self.sample_memory(self.last_pass);
        let mut all = std::mem::take(&mut self.past);
        all.push((self.epoch, std::mem::take(&mut self.recorder.lines)));
        all
    }

    /// Records the unreclaimable bytes, the refaulted bytes and, if the system reports them, the resident weight bytes.
    fn sample_memory(&mut self, pass: u32) {
        let start = monotonic_nanos();
        let refaults = refaulted_bytes().saturating_sub(self.refaults_before);
        self.recorder.record_counter(pass, Counter::Refaults, refaults);
        // The residency policy frees its buffers when other programs need memory.
        let buffers = self.residency.buffer_bytes();
        let unreclaimable = MemoryWatch::shared().pressure_bytes().saturating_sub(buffers);
        self.recorder.record_counter(pass, Counter::Unreclaimable, unreclaimable);
        if let Some(available) = MemoryWatch::shared().available_bytes() {
            self.recorder.record_counter(pass, Counter::Available, available);
        }
        if is_residency_known(&self.weights) {
            let own = parts_by_busy_period(self.schedule.plan(), self.schedule.device_index());
            let cached: u64 = own.iter().flatten().map(|part| resident_bytes(&self.weights, part)).sum();
            self.recorder.record_counter(pass, Counter::Resident, cached + buffers);
        }
        let end = monotonic_nanos();
        self.next_memory_sample = end + (end - start) * MEMORY_SAMPLE_PAUSE;
    }

    /// Starts a batch on the head. Returns the output if the batch is complete.
    pub fn begin_batch(&mut self, batch: &Batch, texts: &SequenceTexts<'_>) -> Result<Option<BatchOutput>> {
        let steps = self.schedule.react(&Event::Begin(batch.clone()))?;
        self.reserve_buffers(batch);
        self.perform(batch, steps, texts)
    }

    /// Returns whether activations are processed, and not ignored because they belong to an earlier epoch or come from
    /// a device that does not send to this one.
    pub fn is_expected(&self, received: &ReceivedActivations) -> bool {
        let ReceivedActivations { sender_index, header, .. } = received;
        header.epoch >= self.epoch && self.schedule.sender(header.round) == Some(usize::from(*sender_index))
    }

    /// Processes activations, except those of an earlier epoch and those of a device that does not send to this one.
    /// Returns the output if the batch is complete. Fails with [`RingError::InvalidActivations`] and changes nothing if
    /// the sender is at fault.
    pub fn process_activations(&mut self, received: &ReceivedActivations) -> Result<Option<BatchOutput>> {
        let ReceivedActivations { sender_index, header, activations: bytes, received_at_ns, .. } = received;
        let (sender_index, received_at_ns) = (*sender_index, *received_at_ns);
        let (batch, round) = (&header.batch, header.round);
        if !self.is_expected(received) {
            return Ok(None);
        }
        let invalid = |what: String| RingError::InvalidActivations { sender_index, what };
        let hidden = self.decode(header, bytes).map_err(invalid)?;
        let steps = self.schedule.react(&Event::Arrived { batch: batch.clone(), round });
        let steps = steps.map_err(|error| invalid(error.to_string()))?;
        self.reserve_buffers(batch);
        self.hidden = hidden;
        let since = self.idle_since.min(received_at_ns);
        let step = StepId { pass: batch.index(), round };
        let record = self.recorder.record_step(step, StepKind::Receive, since, received_at_ns);
        record.bytes = bytes.len() as u64;
        record.peer = Some(sender_index);
        self.perform(batch, steps, &SequenceTexts::new())
    }

    /// Decodes the activations of this epoch. Returns the reason if they are not valid.
    fn decode(&self, header: &ActivationsHeader, bytes: &[u8]) -> Result<Vec<f32>, String> {
        let ActivationsHeader { epoch, ref batch, is_f16, .. } = *header;
        if epoch != self.epoch {
            return Err(format!("they are of epoch {epoch}, but this device is in epoch {}", self.epoch));
        }
        if is_f16 && !self.sends_f16() {
            return Err("they are in f16, but the plan has f32".into());
        }
        let count = batch.tokens() as usize * self.weights.shape().activation_length() as usize;
        let format = if is_f16 { "f16" } else { "f32" };
        let hidden = activations::decode(bytes, is_f16, count)
            .ok_or_else(|| format!("{} bytes for {count} values in {format}", bytes.len()))?;
        if hidden.iter().all(|value| value.is_finite()) {
            Ok(hidden)
        } else {
            Err(format!("a value of pass {} is not finite", batch.index()))
        }
    }

    /// Reserves memory for the buffers of a batch that is larger than all earlier ones, before weights use the memory.
    fn reserve_buffers(&mut self, batch: &Batch) {
        let tokens = batch.tokens();
        if tokens > self.largest_batch {
            let plan = self.schedule.plan();
            let positions = u64::from(plan.context_length) * u64::from(plan.sequences);
            let shape = self.weights.shape();
            // Recurrent states are used as a whole from the first token on.
            let states = self.state_bytes();
            let cache = self.stage.kv_cache_bytes().saturating_sub(states) / positions.max(1);
            let new_states = if self.largest_batch == 0 { states } else { 0 };
            // One row is part of the buffers.
            let rows = batch.output_count().saturating_sub(1);
            let logits = u64::from(rows) * u64::from(shape.vocab_size) * size_of::<f32>() as u64;
            let buffers = buffer_bytes(shape, tokens, self.pool.threads()) + logits;
            self.residency.reserve(buffers + new_states + cache * u64::from(tokens));
            self.largest_batch = tokens;
        }
    }

    /// Returns the size of the recurrent states of all sequences.
    fn state_bytes(&self) -> u64 {
        let mixers = self
            .stage
            .layer_ranges()
            .iter()
            .cloned()
            .flatten()
            .map(|layer| self.weights.shape().mixer(layer));
        let states = mixers.filter(TokenMixer::is_recurrent);
        let bytes: u64 = states.map(|mixer| mixer.cache_bytes(0, Format::F32).0).sum();
        bytes * u64::from(self.schedule.plan().sequences)
    }

    fn embedding(&self) -> usize {
        self.weights.shape().embedding_length as usize
    }

    fn sends_f16(&self) -> bool {
        self.schedule.plan().activation_format == ActivationFormat::F16
    }

    fn name(&self) -> &str {
        &self.schedule.plan().devices[self.schedule.device_index()].name
    }

    fn perform(
        &mut self,
        batch: &Batch,
        steps: Vec<Step>,
        texts: &SequenceTexts<'_>,
    ) -> Result<Option<BatchOutput>> {
        let mut tokens = Vec::new();
        for step in steps {
            match step {
                Step::Draft { batch, pass } => self.draft(batch, pass, texts)?,
                Step::Embed { batch } => self.embed(&batch, texts)?,
                Step::Compute { batch, round, layers, processor } => {
                    let at = StepId { pass: batch.index(), round };
                    if processor == Processor::Cpu {
                        self.residency.begin(&ModelPart::Layers(layers.clone()), at);
                    }
                    let ((), measured) = self.measure(|runner| {
                        let (stage, hidden) = (&mut runner.stage, &mut runner.hidden);
                        Ok(((), stage.forward_batch(layers.clone(), hidden, &batch)?))
                    })?;
                    let touched = self.weights.part_bytes(&ModelPart::Layers(layers.clone()));
                    let record = self.record_step(at, StepKind::Compute, processor, measured, touched);
                    record.layers = Some([layers.start, layers.end]);
                }
                Step::Output { batch, processor } => tokens = self.output(&batch, processor)?,
                Step::Send { batch, round, next_round, receiver } => {
                    self.send(batch, round, next_round, receiver)?;
                }
                Step::Prefetch { part, batch, round } => {
                    self.residency.prefetch(part, StepId { pass: batch, round });
                }
                Step::Release { part, .. } => self.residency.release(part),
            }
        }
        self.idle_since = monotonic_nanos();
        let is_complete = self.schedule.device_index() == 0 && !self.schedule.is_in_flight(batch.index());
        Ok(is_complete.then(|| BatchOutput { batch: batch.clone(), tokens }))
    }

    /// Runs and measures a computing step. The measured time does not include reading the counters.
    fn measure<T>(
        &mut self,
        work: impl FnOnce(&mut Self) -> Result<(T, CriticalPathCost)>,
    ) -> Result<(T, Measured)> {
        let before = self.demand_read();
        let start = monotonic_nanos();
        let (value, cost) = work(self)?;
        let end = monotonic_nanos();
        let faulted = self.demand_read().saturating_sub(before) + self.residency.take_awaited_bytes();
        Ok((value, Measured { start, end, cost, faulted }))
    }

    /// Returns the bytes read from disk so far, without the bytes that were read ahead.
    fn demand_read(&self) -> u64 {
        self.recorder.bytes_read().saturating_sub(self.residency.bytes_read() - self.ahead_before)
    }

    /// Records a computing step that uses `touched` bytes of weights; bytes not read from disk count as resident. A
    /// step that the GPU has executed has no cost, because only its total time is known.
    fn record_step(
        &mut self,
        at: StepId,
        kind: StepKind,
        planned: Processor,
        measured: Measured,
        touched: u64,
    ) -> &mut StepRecord {
        let Measured { start, end, cost, faulted } = measured;
        let record = self.recorder.record_step(at, kind, start, end);
        record.bytes = touched;
        if planned == Processor::Gpu && self.stage.has_gpu() {
            record.resource = Resource::Gpu;
            return record;
        }
        let CriticalPathCost { cpu_ns, queue_ns, .. } = cost;
        let faulted_bytes = faulted.min(touched);
        let resident_bytes = touched - faulted_bytes;
        record.cost = Some(StepCost { cpu_ns, queue_ns, copy_ns: 0, resident_bytes, faulted_bytes });
        record
    }

    fn send(&mut self, batch: Batch, round: u32, next_round: u32, to: usize) -> Result<()> {
        if let Some(&found) = self.hidden.iter().find(|value| !value.is_finite()) {
            // The received activations were finite, so this device is at fault, and its peer would report it.
            let layers = self.schedule.plan().window(self.schedule.device_index(), round);
            return Err(
                ExecError::NotFinite { what: format!("the outputs of layers {layers:?}"), found }.into()
            );
        }
        let start = monotonic_nanos();
        let (payload, is_f16) = activations::encode(&self.hidden, self.sends_f16());
        let length = payload.len() as u64;
        let index = batch.index();
        let header = ActivationsHeader { epoch: self.epoch, batch, round: next_round, is_f16 };
        let frame = Frame { message: Message::Activations(header), payload };
        let Some(link) = self.outbox.get(&to) else {
            return Err(protocol_error(self.name(), "it has no connection to a receiver in its plan"));
        };
        // If the connection is broken, its writer has reported it and the pass is lost with it.
        let _ = link.send(frame);
        let step = StepId { pass: index, round };
        let record = self.recorder.record_step(step, StepKind::Send, start, monotonic_nanos());
        record.bytes = length;
        record.peer = Some(to as u16);
        if self.schedule.device_index() != 0 {
            self.record_counters(index);
        }
        Ok(())
    }

    fn record_counters(&mut self, pass: u32) {
        self.last_pass = pass;
        let read = self.recorder.bytes_read();
        self.recorder.record_counter(pass, Counter::BytesRead, read);
        if monotonic_nanos() >= self.next_memory_sample {
            self.sample_memory(pass);
        }
    }
}

/// Returns the refaulted bytes of file pages in this process's control group; 0 if the number is unknown.
fn refaulted_bytes() -> u64 {
    MemoryWatch::shared().refaulted_bytes().unwrap_or(0)
}

/// The times of a step in nanoseconds, and its cost.
#[derive(Clone, Copy)]
struct Measured {
    start: u64,
    end: u64,
    cost: CriticalPathCost,
    /// The number of bytes from disk that the step waited for.
    faulted: u64,
}

/// Returns the schedule of a device without passes.
fn new_schedule(plan: &Arc<Plan>, device_index: usize, weights: &Weights) -> Schedule {
    Schedule::new(plan.clone(), device_index).with_truncation(!weights.shape().is_recurrent())
}

fn cost_of(slice: ThreadTimes) -> CriticalPathCost {
    let ThreadTimes { wall_ns, cpu_ns, queue_ns } = slice;
    CriticalPathCost { wall_ns, cpu_ns, queue_ns, all_threads_cpu_ns: cpu_ns }
}
