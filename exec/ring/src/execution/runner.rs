//! The stage runner: executes the steps of the schedule on one device.
//!
//! The runner executes the steps of `hearth_core::schedule` on one thread, in order and without decisions of its own:
//! it computes, puts activations into the outbox and starts prefetches. The trace of the device records the steps.
//!
//! A runner is used in all epochs of a session: a new request clears its sequences ([`StageRunner::reset`]), and a
//! new plan also changes its layers ([`StageRunner::reconfigure`]). Activations of an earlier epoch are dropped.

use std::collections::BTreeMap;
use std::sync::Arc;

use hearth_core::schedule::{Event, ModelPart, Schedule, Step, parts_by_busy_period};
use hearth_profiles::Format;
use hearth_profiles::model::TokenMixer;
use hearth_schema::Plan;
use hearth_schema::pass::Pass;
use hearth_schema::plan::Processor;
use hearth_schema::scenario::ActivationFormat;
use hearth_schema::trace::{Counter, Resource, StepCost, StepKind, StepRecord};
use tokio::sync::mpsc;

use super::drafter::Drafter;
use super::model::{GpuOptions, LocalModel, create_thread_pool};
use super::recorder::{StepId, TraceLines, TraceRecorder};
use super::sampling::{SampleFn, Samplers};
use crate::error::{Result, RingError, protocol_error};
use crate::wire::{ActivationsHeader, Frame, Message, ReceivedActivations, activations};
use hearth_runtime::clock::{Stopwatch, ThreadTimes, monotonic_nanos};
use hearth_runtime::cpu::buffer_bytes;
use hearth_runtime::memory::MemoryWatch;
use hearth_runtime::residency::{WeightResidency, is_residency_known, resident_bytes};
use hearth_runtime::{
    CriticalPathCost, ExecError, InputOutputLayers, Stage, ThreadPool, UploadProgressReporter, Weights,
};

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PassOutput {
    pub pass: Pass,
    /// The accepted drafts and one more token; empty if the pass has no output.
    pub tokens: Vec<u32>,
}

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
    /// Activations of the current pass (`ModelShape::activation_length` for each token).
    hidden: Vec<f32>,
    /// The time at which the device became idle, in nanoseconds on this process's clock.
    idle_since: u64,
    last_pass: u32,
    next_memory_sample: u64,
    largest_pass: u32,
    pool: Arc<ThreadPool>,
    /// Bytes read ahead before the trace began.
    ahead_before: u64,
    /// Bytes refaulted in the control group before the trace began.
    refaults_before: u64,
}

/// Maximum number of passes in flight, per device of the ring. Two passes keep a device busy while activations are
/// being sent; more passes would only wait and use memory for their activations.
pub const MAX_PASSES_PER_DEVICE: usize = 2;

const MISSING: &str = "it started a pass with unknown tokens";

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
            largest_pass: 0,
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

    pub fn set_sampler(&mut self, sequence: u32, sampler: SampleFn) {
        self.samplers.get_or_insert_with(|| Samplers::new(Vec::new(), Vec::new())).set(sequence, sampler);
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
        let unreclaimable = MemoryWatch::shared().pressure_bytes();
        self.recorder.record_counter(pass, Counter::Unreclaimable, unreclaimable);
        if is_residency_known(&self.weights) {
            let own = parts_by_busy_period(self.schedule.plan(), self.schedule.device_index());
            let resident = own.iter().flatten().map(|part| resident_bytes(&self.weights, part)).sum();
            self.recorder.record_counter(pass, Counter::Resident, resident);
        }
        let end = monotonic_nanos();
        self.next_memory_sample = end + (end - start) * MEMORY_SAMPLE_PAUSE;
    }

    /// Starts a pass on the head. `so_far` has all tokens of the sequence. Returns the output if the pass is complete.
    pub fn begin_pass(&mut self, pass: Pass, so_far: &[u32]) -> Result<Option<PassOutput>> {
        let steps = self.schedule.react(&Event::Begin(pass))?;
        self.reserve_buffers(pass);
        self.perform(pass, steps, so_far)
    }

    /// Returns whether activations are processed, and not ignored because they belong to an earlier epoch or come from
    /// a device that does not send to this one.
    pub fn is_expected(&self, received: &ReceivedActivations) -> bool {
        let ReceivedActivations { sender_index, header, .. } = received;
        header.epoch >= self.epoch && self.schedule.sender(header.round) == Some(usize::from(*sender_index))
    }

    /// Processes activations, except those of an earlier epoch and those of a device that does not send to this one.
    /// Returns the output if the pass is complete. Fails with [`RingError::InvalidActivations`] and changes nothing if
    /// the sender is at fault.
    pub fn process_activations(&mut self, received: &ReceivedActivations) -> Result<Option<PassOutput>> {
        let ReceivedActivations { sender_index, header, activations: ref bytes, received_at_ns, .. } =
            *received;
        let ActivationsHeader { pass, round, .. } = header;
        if !self.is_expected(received) {
            return Ok(None);
        }
        let invalid = |what: String| RingError::InvalidActivations { sender_index, what };
        let hidden = self.decode(&header, bytes).map_err(invalid)?;
        let steps = self.schedule.react(&Event::Arrived { pass, round });
        let steps = steps.map_err(|error| invalid(error.to_string()))?;
        self.reserve_buffers(pass);
        self.hidden = hidden;
        let since = self.idle_since.min(received_at_ns);
        let step = StepId { pass: pass.index, round };
        let record = self.recorder.record_step(step, StepKind::Receive, since, received_at_ns);
        record.bytes = bytes.len() as u64;
        record.peer = Some(sender_index);
        self.perform(pass, steps, &[])
    }

    /// Decodes the activations of this epoch. Returns the reason if they are not valid.
    fn decode(&self, header: &ActivationsHeader, bytes: &[u8]) -> Result<Vec<f32>, String> {
        let ActivationsHeader { epoch, pass, is_f16, .. } = *header;
        if epoch != self.epoch {
            return Err(format!("they are of epoch {epoch}, but this device is in epoch {}", self.epoch));
        }
        if is_f16 && !self.sends_f16() {
            return Err("they are in f16, but the plan has f32".into());
        }
        let count = pass.tokens as usize * self.weights.shape().activation_length() as usize;
        let format = if is_f16 { "f16" } else { "f32" };
        let hidden = activations::decode(bytes, is_f16, count)
            .ok_or_else(|| format!("{} bytes for {count} values in {format}", bytes.len()))?;
        if hidden.iter().all(|value| value.is_finite()) {
            Ok(hidden)
        } else {
            Err(format!("a value of pass {} is not finite", pass.index))
        }
    }

    /// Reserves memory for the buffers of a pass that is larger than all earlier passes, before weights use the memory.
    fn reserve_buffers(&mut self, pass: Pass) {
        if pass.tokens > self.largest_pass {
            let plan = self.schedule.plan();
            let positions = u64::from(plan.context_length) * u64::from(plan.sequences);
            let shape = self.weights.shape();
            // Recurrent states are used as a whole from the first token on.
            let states = self.state_bytes();
            let cache = self.stage.kv_cache_bytes().saturating_sub(states) / positions.max(1);
            let new_states = if self.largest_pass == 0 { states } else { 0 };
            let logits = u64::from(pass.drafted) * u64::from(shape.vocab_size) * size_of::<f32>() as u64;
            let buffers = buffer_bytes(shape, pass.tokens, self.pool.threads()) + logits;
            self.residency.reserve(buffers + new_states + cache * u64::from(pass.tokens));
            self.largest_pass = pass.tokens;
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

    fn perform(&mut self, pass: Pass, steps: Vec<Step>, so_far: &[u32]) -> Result<Option<PassOutput>> {
        let mut tokens = Vec::new();
        for step in steps {
            match step {
                Step::Rollback { sequence, position } => self.stage.roll_back(sequence, position),
                Step::Draft { pass } => self.draft(pass, so_far)?,
                Step::Embed { pass } => self.embed(pass, so_far)?,
                Step::Compute { pass, round, layers, processor } => {
                    let positions: Vec<u32> = (pass.first_position..).take(pass.tokens as usize).collect();
                    let at = StepId { pass: pass.index, round };
                    if processor == Processor::Cpu {
                        self.residency.begin(&ModelPart::Layers(layers.clone()), at);
                    }
                    let ((), measured) = self.measure(|runner| {
                        let (stage, hidden) = (&mut runner.stage, &mut runner.hidden);
                        let (sequence, layers) = (pass.sequence_index, layers.clone());
                        Ok(((), stage.forward_sequence(sequence, layers, hidden, &positions)?))
                    })?;
                    let touched = self.weights.part_bytes(&ModelPart::Layers(layers.clone()));
                    let record = self.record_step(at, StepKind::Compute, processor, measured, touched);
                    record.layers = Some([layers.start, layers.end]);
                }
                Step::Output { pass, processor } => tokens = self.output(pass, processor)?,
                Step::Send { pass, round, next_round, receiver } => {
                    self.send(pass, round, next_round, receiver)?;
                }
                Step::Prefetch { part, pass, round } => {
                    self.residency.prefetch(part, StepId { pass: pass.index, round });
                }
                Step::Release { part, .. } => self.residency.release(part),
            }
        }
        self.idle_since = monotonic_nanos();
        let is_complete = self.schedule.device_index() == 0 && !self.schedule.is_in_flight(pass.index);
        Ok(is_complete.then_some(PassOutput { pass, tokens }))
    }

    /// Runs the draft model, which processes a batch of a prompt, or drafts the last tokens of a pass.
    fn draft(&mut self, pass: Pass, so_far: &[u32]) -> Result<()> {
        let end = pass.first_position as usize + (pass.tokens - pass.drafted) as usize;
        let so_far = so_far.get(..end).ok_or_else(|| protocol_error("the head", MISSING))?;
        let (passes, measured) = self.measure(|runner| {
            let drafter = runner.drafter.as_mut();
            let drafter = drafter.ok_or_else(|| RingError::invalid_plan("this head has no draft model"))?;
            if pass.drafted == 0 {
                drafter.prefill(pass.sequence_index, so_far)?;
            } else {
                let drafts = drafter.draft(pass.sequence_index, so_far, pass.drafted)?;
                runner.drafts.insert(pass.index, drafts);
            }
            let (cost, passes) = drafter.take_cost();
            Ok((passes, cost))
        })?;
        let bytes = self.drafter.as_ref().map_or(0, |drafter| drafter.weight_bytes);
        let step = StepId { pass: pass.index, round: 0 };
        self.record_step(step, StepKind::Draft, Processor::Cpu, measured, bytes * u64::from(passes));
        Ok(())
    }

    fn embed(&mut self, pass: Pass, so_far: &[u32]) -> Result<()> {
        let first = pass.first_position as usize;
        let known = so_far.get(first..first + (pass.tokens - pass.drafted) as usize);
        let mut tokens = known.ok_or_else(|| protocol_error("the head", MISSING))?.to_vec();
        tokens.extend(self.drafts.get(&pass.index).into_iter().flatten());
        let tokens = &tokens[..];
        let ((), measured) = self.measure(|runner| {
            let pool = Arc::clone(&runner.pool);
            // Several threads compute per-layer inputs.
            let (hidden, cost) =
                pool.measure(|| runner.input_output()?.embed(tokens).map_err(RingError::from));
            runner.hidden = hidden?;
            if runner.sends_f16() {
                activations::round_to_f16(&mut runner.hidden);
            }
            Ok(((), cost))
        })?;
        self.residency.release_embedding_rows(&self.weights, tokens);
        let table: u64 = self.weights.embedding_extents().iter().map(|extent| extent.length).sum();
        let rows = table / u64::from(self.weights.shape().vocab_size).max(1) * u64::from(pass.tokens);
        // A missing row is read together with neighbouring bytes.
        let touched = rows.max(measured.faulted);
        let step = StepId { pass: pass.index, round: 0 };
        self.record_step(step, StepKind::Embed, Processor::Cpu, measured, touched);
        Ok(())
    }

    fn output(&mut self, pass: Pass, processor: Processor) -> Result<Vec<u32>> {
        let at = StepId { pass: pass.index, round: self.schedule.plan().rounds };
        if processor == Processor::Cpu {
            self.residency.begin(&ModelPart::Output, at);
        }
        let drafts = self.drafts.remove(&pass.index).unwrap_or_default();
        let (tokens, measured) = self.measure(|runner| {
            let activations = std::mem::take(&mut runner.hidden);
            let hidden = runner.input_output()?.hidden_states(&activations);
            let wanted = pass.output_count() as usize * runner.embedding();
            let (logits, mut cost) =
                runner.logits(&hidden[hidden.len().saturating_sub(wanted)..], processor)?;
            let mut watch = Stopwatch::start();
            let samplers = runner.samplers.as_mut();
            let tokens = samplers.and_then(|samplers| samplers.sample(pass.sequence_index, &logits, &drafts));
            cost += cost_of(watch.lap());
            Ok((tokens, cost))
        })?;
        let tokens = tokens.ok_or_else(|| protocol_error("the head", "this sequence has no sampler"))?;
        let touched = self.weights.part_bytes(&ModelPart::Output);
        self.record_step(at, StepKind::Output, processor, measured, touched);
        if pass.drafted > 0 {
            let accepted = tokens.len().saturating_sub(1) as u64;
            self.recorder.record_counter(pass.index, Counter::Accepted, accepted);
        }
        self.record_counters(pass.index);
        Ok(tokens)
    }

    /// Computes logits on the planned processor, or on the CPU if the GPU no longer works.
    fn logits(&mut self, hidden: &[f32], processor: Processor) -> Result<(Vec<f32>, CriticalPathCost)> {
        if processor == Processor::Gpu
            && let Some((logits, cost)) = self.stage.logits(hidden)
        {
            return Ok((self.input_output()?.check_finite(logits)?, cost));
        }
        let input_output = self.input_output()?;
        let logits = input_output.logits(hidden)?;
        Ok((logits, input_output.last_logits_cost()))
    }

    fn input_output(&mut self) -> Result<&mut InputOutputLayers> {
        let input_output = self.input_output.as_mut();
        input_output
            .ok_or_else(|| RingError::invalid_plan("only the head has the embedding and the output layer"))
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

    fn send(&mut self, pass: Pass, round: u32, next_round: u32, to: usize) -> Result<()> {
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
        let header = ActivationsHeader { epoch: self.epoch, pass, round: next_round, is_f16 };
        let frame = Frame { message: Message::Activations(header), payload };
        let Some(link) = self.outbox.get(&to) else {
            return Err(protocol_error(self.name(), "it has no connection to a receiver in its plan"));
        };
        // If the connection is broken, its writer has reported it and the pass is lost with it.
        let _ = link.send(frame);
        let step = StepId { pass: pass.index, round };
        let record = self.recorder.record_step(step, StepKind::Send, start, monotonic_nanos());
        record.bytes = length;
        record.peer = Some(to as u16);
        if self.schedule.device_index() != 0 {
            self.record_counters(pass.index);
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
