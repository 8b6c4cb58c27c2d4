//! The stage runner: carries out the steps of the schedule on one device.
//!
//! It interprets `hearth_core::schedule` on one thread: it computes, puts activations into the outbox and starts
//! prefetches, in the order of the schedule and with no choice of its own. What it does is recorded as the device's
//! trace.
//!
//! A runner lives through the epochs of a session: a new request makes it forget the sequences
//! ([`StageRunner::reset`]), and a new plan also gives it other layers ([`StageRunner::reconfigure`]). Activations of
//! an earlier epoch are dropped.
//!
//! Not here: where messages come from and go to ([`crate::worker`], [`crate::coordinator`]).

use std::collections::BTreeMap;
use std::sync::Arc;

use hearth_core::schedule::Event;
use hearth_core::schedule::ModelPart;
use hearth_core::schedule::Schedule;
use hearth_core::schedule::Step;
use hearth_core::schedule::visits;
use hearth_schema::Plan;
use hearth_schema::pass::Pass;
use hearth_schema::plan::Processor;
use hearth_schema::scenario::ActivationFormat;
use hearth_schema::trace::Counter;
use hearth_schema::trace::Kind;
use hearth_schema::trace::Record;
use hearth_schema::trace::Resource;
use tokio::sync::mpsc;

use super::drafter::Drafter;
use super::model::{GpuOptions, LocalModel, pool};
use super::recorder::{self, At, Recorder, TraceLines};
use super::sampling::{SampleFn, Samplers};
use crate::error::{RingError, protocol_error};
use crate::wire::{Frame, Message, ReceivedActivations, activations};
use hearth_runtime::accelerator::Progress;
use hearth_runtime::clock::{Stopwatch, TimeSlice, wall_nanos};
use hearth_runtime::cost::ComputeCost;
use hearth_runtime::cpu::buffer_bytes;
use hearth_runtime::head::Head;
use hearth_runtime::memory::MemoryWatch;
use hearth_runtime::pool::Pool;
use hearth_runtime::residency::{WeightResidency, is_residency_known, resident_bytes};
use hearth_runtime::stage::Stage;
use hearth_runtime::weights::Weights;

/// A pass that has completed the ring.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PassOutput {
    pub pass: Pass,
    /// The tokens it gave: none if no output was wanted, else the drafts that stood, and one.
    pub tokens: Vec<u32>,
}

/// A sender for each of the places that a device sends to.
pub type Outbox = BTreeMap<usize, mpsc::UnboundedSender<Frame>>;

/// A device of the ring.
pub struct StageRunner {
    schedule: Schedule,
    stage: Stage,
    /// The ends of the model; on the head only.
    head: Option<Head>,
    weights: Arc<Weights>,
    outbox: Outbox,
    /// The epoch whose passes it takes.
    epoch: u32,
    /// Lines of the request's earlier epochs.
    past: Vec<(u32, TraceLines)>,
    residency: WeightResidency,
    recorder: Recorder,
    /// Chooses tokens, on the head.
    samplers: Option<Samplers>,
    /// Makes drafts, on a head that has a draft model.
    drafter: Option<Drafter>,
    /// The drafts of each pass in flight, on the head.
    drafts: BTreeMap<u32, Vec<u32>>,
    /// Activations of the current pass, [tokens, embedding].
    hidden: Vec<f32>,
    /// Since when this device has had nothing to do.
    idle_since: u64,
    /// The pass that was here last.
    last_pass: u32,
    /// The time at which its memory is sampled again.
    next_memory_sample: u64,
    /// Tokens of the largest pass so far.
    largest_pass: u32,
    pool: Arc<Pool>,
    /// Bytes that had been read ahead when the trace began.
    ahead_before: u64,
    /// Bytes that its control group had read again by then.
    refaults_before: u64,
}

const MISSING: &str = "a pass of tokens that are not there";

/// Sampling its memory takes a device at most one part in this many of its time.
const MEMORY_SAMPLE_SHARE: u64 = 100;

impl StageRunner {
    /// A device that holds its layers. `outbox` has a sender for each of the schedule's receivers, and `progress`
    /// receives how far the upload to its GPU has come.
    pub fn new(
        plan: &Arc<Plan>,
        place: usize,
        model: &LocalModel,
        threads: usize,
        outbox: Outbox,
        epoch: u32,
        progress: &Progress,
    ) -> Result<Self, RingError> {
        let gpu_options = GpuOptions { fallback_to_cpu: false, progress };
        Self::with_pool(pool(threads)?, plan, place, model, outbox, epoch, gpu_options)
    }

    fn with_pool(
        pool: Arc<Pool>,
        plan: &Arc<Plan>,
        place: usize,
        model: &LocalModel,
        outbox: Outbox,
        epoch: u32,
        gpu_options: GpuOptions<'_>,
    ) -> Result<Self, RingError> {
        let weights = model.weights.clone();
        let residency = WeightResidency::start(&weights, plan, place, || MemoryWatch::shared().reading());
        let (stage, head) = model.stage(plan, place, &pool, residency.barrier(), gpu_options)?;
        Ok(Self {
            schedule: Schedule::new(plan.clone(), place),
            stage,
            head,
            weights,
            outbox,
            epoch,
            past: Vec::new(),
            residency,
            recorder: Recorder::new(place as u16),
            samplers: None,
            drafter: None,
            drafts: BTreeMap::new(),
            hidden: Vec::new(),
            idle_since: wall_nanos(),
            last_pass: 0,
            next_memory_sample: 0,
            largest_pass: 0,
            pool,
            ahead_before: 0,
            refaults_before: recorder::refaults(),
        })
    }

    /// Drafts with this model where its plan says so. Head only.
    pub fn with_draft(mut self, draft: Option<&LocalModel>) -> Result<Self, RingError> {
        let plan = self.schedule.plan();
        self.drafter = match draft.filter(|_| plan.draft.is_some()) {
            Some(draft) => Some(Drafter::for_plan(draft, plan, &self.pool)?),
            None => None,
        };
        Ok(self)
    }

    /// Takes up a plan for the passes from `first_pass` on, in another epoch. The trace so far is kept, and with the
    /// plan of before so are the weights in memory.
    pub fn reconfigure(
        mut self,
        plan: &Arc<Plan>,
        first_pass: u32,
        model: &LocalModel,
        outbox: Outbox,
        epoch: u32,
        progress: &Progress,
    ) -> Result<StageRunner, RingError> {
        let is_same = self.schedule.plan() == plan;
        if first_pass == 0 {
            // Before the first pass of a request: passes given up in the request before are none of this one's.
            self.schedule = Schedule::new(self.schedule.plan().clone(), self.schedule.device());
        }
        self.schedule.react(&Event::Replanned { plan: plan.clone(), first_pass })?;
        let lines = self.take_lines();
        self.past.push((self.epoch, lines));
        (self.outbox, self.epoch) = (outbox, epoch);
        self.drafts.clear();
        let place = self.schedule.device();
        self.recorder.set_device(place as u16);
        if is_same {
            self.stage.truncate(0);
            self.residency.reset();
            self.idle_since = wall_nanos();
            return Ok(self);
        }
        let StageRunner {
            schedule,
            stage,
            head,
            residency,
            recorder,
            past,
            outbox,
            samplers,
            drafter,
            pool,
            ..
        } = self;
        let gpu_options = GpuOptions { fallback_to_cpu: true, progress };
        // Two parts at once may be more than there is memory for.
        drop((stage, head, residency));
        let (refaults_before, fresh) = (
            self.refaults_before,
            StageRunner::with_pool(pool, plan, place, model, outbox, epoch, gpu_options)?,
        );
        Ok(StageRunner { schedule, past, recorder, samplers, drafter, refaults_before, ..fresh })
    }

    /// Refuses passes before this one: they were given up with an earlier plan.
    pub fn set_first_pass(&mut self, first_pass: u32) -> Result<(), RingError> {
        let plan = self.schedule.plan().clone();
        self.schedule.react(&Event::Replanned { plan, first_pass })?;
        Ok(())
    }

    /// Forgets all sequences and the trace of earlier epochs; on the head, takes what chooses tokens.
    pub fn reset(&mut self, epoch: u32, samplers: Option<Samplers>) {
        (self.epoch, self.past) = (epoch, Vec::new());
        self.schedule = Schedule::new(self.schedule.plan().clone(), self.schedule.device());
        self.stage.truncate(0);
        self.recorder.reset();
        self.residency.reset();
        self.ahead_before = self.residency.bytes_read();
        self.refaults_before = recorder::refaults();
        self.samplers = samplers;
        self.drafts.clear();
        if let Some(drafter) = &mut self.drafter {
            drafter.forget();
        }
        self.idle_since = wall_nanos();
    }

    /// Gives a sequence another sampler, on the head.
    pub fn set_sampler(&mut self, sequence: u32, sampler: SampleFn) {
        self.samplers.get_or_insert_with(|| Samplers::new(Vec::new(), Vec::new())).set(sequence, sampler);
    }

    /// The trace since the last reset, epoch by epoch.
    pub fn take_trace(&mut self) -> Vec<(u32, TraceLines)> {
        let lines = self.take_lines();
        let mut all = std::mem::take(&mut self.past);
        all.push((self.epoch, lines));
        all
    }

    fn take_lines(&mut self) -> TraceLines {
        for span in self.residency.take_spans() {
            let at = At { pass: span.origin.pass, round: span.origin.round };
            let record = self.recorder.span(at, Kind::Prefetch, span.start, span.end);
            record.bytes = span.bytes;
            record.layers = span.origin.layers;
        }
        self.sample_memory(self.last_pass);
        self.recorder.take()
    }

    /// Samples its memory: what cannot be reclaimed, what was read again, and which weights are resident, where the
    /// system reports it.
    fn sample_memory(&mut self, pass: u32) {
        let start = wall_nanos();
        let refaults = recorder::refaults().saturating_sub(self.refaults_before);
        self.recorder.counter(pass, Counter::Refaults, refaults);
        self.recorder.counter(pass, Counter::Unreclaimable, recorder::unreclaimable());
        if is_residency_known(&self.weights) {
            let own = visits(self.schedule.plan(), self.schedule.device());
            let resident = own.iter().flatten().map(|part| resident_bytes(&self.weights, part)).sum();
            self.recorder.counter(pass, Counter::Resident, resident);
        }
        let end = wall_nanos();
        self.next_memory_sample = end + (end - start) * MEMORY_SAMPLE_SHARE;
    }

    /// Lets a pass of a sequence enter the ring, of which these are all tokens so far. Head only. Returns the pass if
    /// it is complete without having left.
    pub fn begin_pass(&mut self, pass: Pass, so_far: &[u32]) -> Result<Option<PassOutput>, RingError> {
        let steps = self.schedule.react(&Event::Begin(pass))?;
        self.reserve_buffers(pass);
        self.perform(pass, steps, so_far)
    }

    /// Processes received activations. Returns the pass if it is complete. Ignores activations of an earlier epoch.
    pub fn receive(&mut self, arrival: &ReceivedActivations) -> Result<Option<PassOutput>, RingError> {
        let ReceivedActivations { from, epoch, pass, round, activations: ref bytes, in_half, at } = *arrival;
        if epoch < self.epoch {
            return Ok(None);
        }
        if epoch > self.epoch {
            let what = format!("activations of epoch {epoch}, and this device is in {}", self.epoch);
            return Err(protocol_error(&format!("device {from}"), &what));
        }
        let steps = self.schedule.react(&Event::Arrived { pass, round })?;
        let wrong = |what: String| RingError::Protocol { name: self.name().into(), what };
        if in_half && !self.sends_f16() {
            return Err(wrong("activations in f16, and the plan says f32".into()));
        }
        let count = pass.tokens as usize * self.embedding();
        let Some(hidden) = activations::decode(bytes, in_half, count) else {
            let format = if in_half { "f16" } else { "f32" };
            return Err(wrong(format!("{} bytes of activations for {count} {format}", bytes.len())));
        };
        self.reserve_buffers(pass);
        self.hidden = hidden;
        let since = self.idle_since.min(at);
        let record = self.recorder.span(At { pass: pass.index, round }, Kind::Receive, since, at);
        record.bytes = bytes.len() as u64;
        record.peer = Some(from);
        self.perform(pass, steps, &[])
    }

    /// A pass that is larger than any before takes memory for its buffers, which the weights must not fill.
    fn reserve_buffers(&mut self, pass: Pass) {
        if pass.tokens > self.largest_pass {
            let plan = self.schedule.plan();
            let positions = u64::from(plan.context) * u64::from(plan.sequences);
            let cache = self.stage.cache_bytes() / positions.max(1);
            let shape = self.weights.shape();
            let logits = u64::from(pass.drafted) * u64::from(shape.vocabulary) * size_of::<f32>() as u64;
            let buffers = buffer_bytes(shape, pass.tokens, self.pool.threads()) + logits;
            self.residency.reserve(buffers + cache * u64::from(pass.tokens));
            self.largest_pass = pass.tokens;
        }
    }

    fn embedding(&self) -> usize {
        self.weights.shape().embedding as usize
    }

    /// Whether activations travel in f16.
    fn sends_f16(&self) -> bool {
        self.schedule.plan().activations == ActivationFormat::F16
    }

    fn name(&self) -> &str {
        &self.schedule.plan().devices[self.schedule.device()].name
    }

    fn perform(
        &mut self,
        pass: Pass,
        steps: Vec<Step>,
        so_far: &[u32],
    ) -> Result<Option<PassOutput>, RingError> {
        let mut tokens = Vec::new();
        for step in steps {
            match step {
                Step::Rollback { sequence, position } => self.stage.roll_back(sequence, position),
                Step::Draft { pass } => self.draft(pass, so_far)?,
                Step::Embed { pass } => self.embed(pass, so_far)?,
                Step::Compute { pass, round, layers, processor } => {
                    let positions: Vec<u32> =
                        (pass.first_position..pass.first_position + pass.tokens).collect();
                    let at = At { pass: pass.index, round };
                    if processor == Processor::Cpu {
                        self.residency.begin(&ModelPart::Layers(layers.clone()), at);
                    }
                    let ((), measured) = self.measure(|runner| {
                        let (stage, hidden) = (&mut runner.stage, &mut runner.hidden);
                        let cost = stage.forward_of(pass.sequence, layers.clone(), hidden, &positions)?;
                        Ok(((), cost))
                    })?;
                    let touched = self.weights.part_bytes(&ModelPart::Layers(layers.clone()));
                    let processor = self.carried_out_by(processor);
                    let record = self.computed(at, Kind::Compute, measured, touched);
                    record.layers = Some(recorder::layers(&layers));
                    set_processor(record, processor);
                }
                Step::Output { pass, processor } => {
                    tokens = self.output(pass, processor)?;
                }
                Step::Send { pass, round, next_round, to } => self.send(pass, round, next_round, to)?,
                Step::Prefetch { part, pass, round } => {
                    self.residency.prefetch(part, At { pass: pass.index, round });
                }
                Step::Release { part, .. } => self.residency.release(part),
            }
        }
        self.idle_since = wall_nanos();
        let is_out = self.schedule.device() == 0 && !self.schedule.is_in_flight(pass.index);
        Ok(is_out.then_some(PassOutput { pass, tokens }))
    }

    /// The draft model reads a batch of a prompt, or proposes the last tokens of a pass.
    fn draft(&mut self, pass: Pass, so_far: &[u32]) -> Result<(), RingError> {
        let end = pass.first_position as usize + (pass.tokens - pass.drafted) as usize;
        let so_far = so_far.get(..end).ok_or_else(|| protocol_error("the head", MISSING))?;
        let (passes, measured) = self.measure(|runner| {
            let drafter = runner.drafter.as_mut();
            let drafter = drafter.ok_or_else(|| RingError::plan("this head has no draft model"))?;
            if pass.drafted == 0 {
                drafter.read(pass.sequence, so_far)?;
            } else {
                let drafts = drafter.draft(pass.sequence, so_far, pass.drafted)?;
                runner.drafts.insert(pass.index, drafts);
            }
            let (cost, passes) = drafter.take_cost();
            Ok((passes, cost))
        })?;
        let bytes = self.drafter.as_ref().map_or(0, |drafter| drafter.weight_bytes);
        self.computed(At { pass: pass.index, round: 0 }, Kind::Draft, measured, bytes * u64::from(passes));
        Ok(())
    }

    fn embed(&mut self, pass: Pass, so_far: &[u32]) -> Result<(), RingError> {
        let first = pass.first_position as usize;
        let known = so_far.get(first..first + (pass.tokens - pass.drafted) as usize);
        let mut tokens = known.ok_or_else(|| protocol_error("the head", MISSING))?.to_vec();
        tokens.extend(self.drafts.get(&pass.index).into_iter().flatten());
        let tokens = &tokens[..];
        let ((), measured) = self.measure(|runner| {
            let mut watch = Stopwatch::start();
            runner.hidden = runner.head()?.embed(tokens)?;
            if runner.sends_f16() {
                activations::round(&mut runner.hidden);
            }
            Ok(((), cost_of(watch.lap())))
        })?;
        self.residency.embedded(&self.weights, tokens);
        let table: u64 = self.weights.embedding_extents().iter().map(|extent| extent.length).sum();
        let rows = table / u64::from(self.weights.shape().vocabulary).max(1) * u64::from(pass.tokens);
        // A missing row is read with what lies around it.
        let touched = rows.max(measured.faulted);
        self.computed(At { pass: pass.index, round: 0 }, Kind::Embed, measured, touched);
        Ok(())
    }

    fn output(&mut self, pass: Pass, processor: Processor) -> Result<Vec<u32>, RingError> {
        let at = At { pass: pass.index, round: self.schedule.plan().rounds };
        if processor == Processor::Cpu {
            self.residency.begin(&ModelPart::Output, at);
        }
        let drafts = self.drafts.remove(&pass.index).unwrap_or_default();
        let (tokens, measured) = self.measure(|runner| {
            let hidden = std::mem::take(&mut runner.hidden);
            let wanted = pass.outputs() as usize * runner.embedding();
            let (logits, mut cost) =
                runner.logits(&hidden[hidden.len().saturating_sub(wanted)..], processor)?;
            let mut watch = Stopwatch::start();
            let samplers = runner.samplers.as_mut();
            let tokens = samplers.and_then(|samplers| samplers.sample(pass.sequence, &logits, &drafts));
            cost += cost_of(watch.lap());
            Ok((tokens, cost))
        })?;
        let tokens = tokens.ok_or_else(|| protocol_error("the head", "nobody samples for this sequence"))?;
        let touched = self.weights.part_bytes(&ModelPart::Output);
        let processor = self.carried_out_by(processor);
        set_processor(self.computed(at, Kind::Output, measured, touched), processor);
        if pass.drafted > 0 {
            let accepted = tokens.len().saturating_sub(1) as u64;
            self.recorder.counter(pass.index, Counter::Accepted, accepted);
        }
        self.count(pass.index);
        Ok(tokens)
    }

    /// Returns the processor that carried out a step planned for `planned`: not a lost GPU, not even for the step in
    /// which it was lost.
    fn carried_out_by(&self, planned: Processor) -> Processor {
        if self.stage.has_gpu() { planned } else { Processor::Cpu }
    }

    /// Computes logits on the planned processor if it still works, otherwise on the CPU.
    fn logits(&mut self, hidden: &[f32], processor: Processor) -> Result<(Vec<f32>, ComputeCost), RingError> {
        if processor == Processor::Gpu
            && let Some((logits, cost)) = self.stage.logits(hidden)
        {
            return Ok((self.head()?.finite(logits)?, cost));
        }
        let head = self.head()?;
        let logits = head.logits(hidden)?;
        Ok((logits, head.last_cost()))
    }

    fn head(&mut self) -> Result<&mut Head, RingError> {
        self.head.as_mut().ok_or_else(|| RingError::plan("only the head embeds and outputs"))
    }

    /// Does a computing step. The counters are read around it, not in it: reading them takes time too.
    fn measure<T>(
        &mut self,
        work: impl FnOnce(&mut Self) -> Result<(T, ComputeCost), RingError>,
    ) -> Result<(T, Measured), RingError> {
        let before = self.demand_read();
        let start = wall_nanos();
        let (value, cost) = work(self)?;
        let end = wall_nanos();
        let faulted = self.demand_read().saturating_sub(before) + self.residency.take_awaited();
        Ok((value, Measured { start, end, cost, faulted }))
    }

    /// Bytes read from disk so far, less those that the helper read ahead.
    fn demand_read(&self) -> u64 {
        self.recorder.bytes_read().saturating_sub(self.residency.bytes_read() - self.ahead_before)
    }

    fn computed(&mut self, at: At, kind: Kind, measured: Measured, touched: u64) -> &mut Record {
        let Measured { start, end, cost, faulted } = measured;
        let record = self.recorder.span(at, kind, start, end);
        record.bytes = touched;
        record.cost = Some(recorder::cost(cost.cpu_ns, cost.queue_ns, touched, faulted));
        record
    }

    fn send(&mut self, pass: Pass, round: u32, next_round: u32, to: usize) -> Result<(), RingError> {
        let start = wall_nanos();
        let (payload, in_half) = activations::encode(&self.hidden, self.sends_f16());
        let length = payload.len() as u64;
        let message = Message::activations(self.epoch, pass, next_round, in_half);
        let frame = Frame { message, payload };
        let Some(link) = self.outbox.get(&to) else {
            return Err(protocol_error(self.name(), "its plan sends where it has no connection to"));
        };
        // If the connection is broken, its writer has reported it and the pass is lost with it.
        let _ = link.send(frame);
        let record = self.recorder.span(At { pass: pass.index, round }, Kind::Send, start, wall_nanos());
        record.bytes = length;
        record.peer = Some(to as u16);
        if self.schedule.device() != 0 {
            self.count(pass.index);
        }
        Ok(())
    }

    fn count(&mut self, pass: u32) {
        self.last_pass = pass;
        let read = self.recorder.bytes_read();
        self.recorder.counter(pass, Counter::BytesRead, read);
        if wall_nanos() >= self.next_memory_sample {
            self.sample_memory(pass);
        }
    }
}

/// A step on a GPU occupies that, and its time is not divided further.
fn set_processor(record: &mut Record, processor: Processor) {
    if processor == Processor::Gpu {
        record.resource = Resource::Gpu;
        record.cost = None;
    }
}

/// When a step ran, and what it cost.
#[derive(Clone, Copy)]
struct Measured {
    start: u64,
    end: u64,
    cost: ComputeCost,
    /// Bytes that it waited for.
    faulted: u64,
}

/// The cost of a slice of this thread alone.
fn cost_of(slice: TimeSlice) -> ComputeCost {
    let TimeSlice { wall, cpu, queue } = slice;
    ComputeCost { wall_ns: wall, cpu_ns: cpu, queue_ns: queue, all_cpu_ns: cpu }
}
