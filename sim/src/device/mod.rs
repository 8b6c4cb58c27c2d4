//! A simulated device: executes the steps of its schedule on one thread of control, as the executor does.
//!
//! A message is handled when the steps of the previous message are complete. Computations on the CPU read mapped
//! weights (`MappedComputation`). Computations on the GPU do not use the disk, except that with Metal a CPU thread
//! first reads the mapped weights. Sending messages and reading ahead in the helper thread take no time of this thread.
//!
//! Not here: the choice of the steps (`hearth_core::schedule`), and the ring (`crate::ring`).

pub mod background_load;
pub mod context;
mod layout;
mod mapped_computation;
mod reconfiguration;
mod residency;
pub mod setup;
pub mod storage;

use std::collections::{BTreeSet, VecDeque};
use std::ops::Range;

use hearth_core::compute_cost::ComputeCost;
use hearth_core::expert_routes::ExpertRoutes;
use hearth_core::residency::{ReadOrigin, WeightPart};
use hearth_core::schedule::{Event as ScheduleEvent, ModelPart, Schedule, Step};
use hearth_profiles::device::DeviceProfile;
use hearth_profiles::model::ModelProfile;
use hearth_profiles::{Bytes, Format, Seconds, Sourced};
use hearth_schema::pass::{Batch, Pass};
use hearth_schema::plan::Processor;
use hearth_schema::trace::{Resource, StepCost, StepKind, StepRecord};

use crate::engine::{Nanos, Timer};
use crate::error::SimError;
use crate::page_cache::Chunk;
use crate::random::{self, StreamPurpose};
use crate::resource::CpuSim;
use crate::speculation::Drafter;
use crate::trace::{TimedSteps, gpu_step_with_copies, new_record, record_steps};

use context::{DeviceOutput, Event, Message, SimContext};
use layout::WeightLayout;
use mapped_computation::{ComputationAction, ComputationStep, ExpertGroup, MappedComputation, Segment};
use residency::WeightResidency;
use storage::{Storage, WAKE_LATENCY};

const PAGE_BYTES: u64 = 4096;

#[derive(Debug)]
enum ThreadState {
    Idle,
    Computing(Box<MappedComputation>),
    /// Steps of known duration, already in the trace. `output` is the index of the pass whose output they complete.
    Fixed {
        output: Option<u32>,
    },
}

#[derive(Debug)]
pub struct DeviceSim<'a> {
    /// Index of this device among all devices of the run, which does not change when the ring gets a new plan.
    id: usize,
    device: &'a DeviceProfile,
    model: &'a ModelProfile,
    /// Size of an element of the KV cache.
    kv_format: Format,
    /// Bytes uploaded to the GPU for every token, by layer; a layer beyond the end of the list uploads nothing.
    uploads: Vec<Bytes>,
    seed: u64,
    pub schedule: Schedule,
    layout: WeightLayout,
    /// Received messages and the times of their arrival.
    inbox: VecDeque<(Message, Nanos)>,
    steps: VecDeque<Step>,
    thread: ThreadState,
    /// GPU steps that wait until their mapped weights are in memory, and the index of the pass that the steps complete.
    after_computation: Option<(TimedSteps, Option<u32>)>,
    idle_since: Nanos,
    cpu: CpuSim,
    cpu_timer: Timer,
    /// Timer of [`Event::Wake`].
    wake_timer: Timer,
    /// GPU speed as a fraction of its full speed.
    gpu_speed: f64,
    pub storage: Storage,
    disk_timer: Timer,
    disk_timer_at: Option<Nanos>,
    residency: Box<dyn WeightResidency>,
    /// Which experts the tokens use, if the model is a mixture.
    routes: Option<ExpertRoutes<'a>>,
    /// Whether reading an embedding row does not read the pages around the row.
    reads_single_rows: bool,
    /// Indices of the blocks of the embedding that have been read; a block has the size of a row, rounded up to pages.
    rows: BTreeSet<u64>,
    /// Bytes read from disk that `storage` does not count: into GPU memory, or before `storage` was replaced.
    earlier_bytes_read: Bytes,
    drafter: Option<Drafter<'a>>,
}

fn idle_cpu(device: &DeviceProfile) -> CpuSim {
    CpuSim::new(f64::from(device.cpu.cores)).with_quota(device.cpu.quota.as_ref())
}

/// Returns a cost of a device profile, or zero if the profile omits it.
pub(crate) fn cost_or_zero(cost: Option<&Sourced<Seconds>>) -> Seconds {
    cost.map_or(Seconds(0.0), |cost| cost.value)
}

impl<'a> DeviceSim<'a> {
    /// Returns whether the device is ready to begin a batch.
    pub fn is_idle(&self) -> bool {
        matches!(self.thread, ThreadState::Idle) && self.steps.is_empty() && self.inbox.is_empty()
    }

    pub fn begin_batch(&mut self, batch: Batch, ctx: &mut SimContext) -> Result<(), SimError> {
        self.steps.extend(self.schedule.react(&ScheduleEvent::Begin(batch))?);
        self.run_steps(ctx)
    }

    pub fn deliver(&mut self, message: Message, ctx: &mut SimContext) -> Result<(), SimError> {
        self.inbox.push_back((message, ctx.engine.now()));
        self.run_steps(ctx)
    }

    /// Handles [`Event::Cpu`]: a computation may have ended.
    pub fn on_cpu_timer(&mut self, ctx: &mut SimContext) -> Result<(), SimError> {
        let now = ctx.engine.now();
        let slowdown = self.cpu.slowdown_time(now, 0);
        if self.cpu.pop_completed(now).is_some()
            && let ThreadState::Computing(computation) = &mut self.thread
        {
            if self.residency.mark_used(computation.end_batch(now, slowdown)) {
                ctx.engine.schedule_after(0, Event::Helper(self.id));
            }
            let next = computation.advance(now, &mut self.storage, self.residency.as_mut());
            self.continue_computation(next, ctx);
        }
        self.run_steps(ctx)
    }

    /// Handles [`Event::Wake`]: ends a step of known duration, or continues a computation that waited.
    pub fn on_wake(&mut self, ctx: &mut SimContext) -> Result<(), SimError> {
        match &mut self.thread {
            ThreadState::Computing(computation) => {
                let next = computation.resume(ctx.engine.now(), &mut self.storage, self.residency.as_mut());
                self.continue_computation(next, ctx);
            }
            ThreadState::Fixed { output } => {
                ctx.outputs.extend(output.map(DeviceOutput::Output));
                self.thread = ThreadState::Idle;
                self.idle_since = ctx.engine.now();
            }
            ThreadState::Idle => self.idle_since = ctx.engine.now(),
        }
        self.run_steps(ctx)
    }

    pub fn on_helper_wake(&mut self, ctx: &mut SimContext) -> Result<(), SimError> {
        let now = ctx.engine.now();
        if let Some(at) = self.residency.run_helper(now, &mut self.storage) {
            ctx.engine.schedule_at(at, Event::Helper(self.id));
        }
        if let ThreadState::Computing(computation) = &mut self.thread
            && computation.waits_for_helper()
        {
            let next = computation.advance(now, &mut self.storage, self.residency.as_mut());
            self.continue_computation(next, ctx);
        }
        self.residency.report_finished_reads(ctx.records);
        self.run_steps(ctx)
    }

    /// Handles [`Event::Disk`]: reads may be complete.
    pub fn on_disk_timer(&mut self, ctx: &mut SimContext) -> Result<(), SimError> {
        let now = ctx.engine.now();
        self.disk_timer_at = None;
        while let Some(chunk) = self.storage.pop_completed(now) {
            let woken = self.residency.on_arrival(now, chunk);
            self.wake_helper_if(woken, ctx);
            if let ThreadState::Computing(computation) = &mut self.thread
                && computation.on_arrival(chunk)
            {
                self.continue_computation(ComputationAction::Retry(now + WAKE_LATENCY), ctx);
            }
        }
        self.residency.report_finished_reads(ctx.records);
        self.run_steps(ctx)
    }

    /// Moves the records of unfinished reads to the trace at the end of the run.
    pub fn flush_records(&mut self, now: Nanos, records: &mut Vec<StepRecord>) {
        self.residency.flush_records(now, records);
    }

    /// Executes steps and handles received messages until a step takes simulated time.
    fn run_steps(&mut self, ctx: &mut SimContext) -> Result<(), SimError> {
        while matches!(self.thread, ThreadState::Idle) {
            if let Some(step) = self.steps.pop_front() {
                self.execute(step, ctx);
            } else if let Some((message, arrival)) = self.inbox.pop_front() {
                self.receive(message, arrival, ctx)?;
            } else {
                break;
            }
        }
        self.update_disk_timer(ctx);
        Ok(())
    }

    fn receive(&mut self, message: Message, arrival: Nanos, ctx: &mut SimContext) -> Result<(), SimError> {
        ctx.records.push(StepRecord {
            resource: Resource::Rx,
            start_ns: self.idle_since.min(arrival),
            end_ns: arrival,
            bytes: message.bytes.0,
            peer: Some(message.sender_id as u16),
            ..self.record(StepKind::Receive, message.batch.index(), message.round, ctx)
        });
        let event = ScheduleEvent::Arrived { batch: message.batch, round: message.round };
        self.steps.extend(self.schedule.react(&event)?);
        Ok(())
    }

    fn execute(&mut self, step: Step, ctx: &mut SimContext) {
        match step {
            Step::Draft { batch, pass } => self.draft(batch, pass, ctx),
            Step::Embed { batch } => {
                let record = self.record(StepKind::Embed, batch.index(), 0, ctx);
                let segments = self.embedding_rows(batch.passes());
                self.start_computation(record, segments, ctx);
            }
            Step::Compute { batch, round, layers, processor: Processor::Cpu } => {
                let (cost, fixed) = (self.cpu_cost(), cost_or_zero(self.device.cpu.window_overhead.as_ref()));
                let work = layers
                    .clone()
                    .flat_map(|layer| {
                        let own = if layer == layers.start { fixed } else { Seconds(0.0) };
                        self.layer_work(&cost, layer, batch.passes(), own)
                    })
                    .collect();
                let mut record = self.record(StepKind::Compute, batch.index(), round, ctx);
                record.layers = Some([layers.start, layers.end]);
                self.compute_part(&ModelPart::Layers(layers), record, work, ctx);
            }
            Step::Compute { batch, round, layers, processor: Processor::Gpu } => {
                let mut record = self.record(StepKind::Compute, batch.index(), round, ctx);
                record.layers = Some([layers.start, layers.end]);
                let steps = self.gpu_steps(&record, &batch);
                self.run_on_gpu(&ModelPart::Layers(layers), record, (steps, None), ctx);
            }
            Step::Output { batch, processor: Processor::Gpu } => {
                let record = self.record(StepKind::Output, batch.index(), self.schedule.plan().rounds, ctx);
                let steps = self.gpu_output_steps(&record, batch.output_count());
                let wiring = StepRecord { kind: StepKind::Compute, ..record };
                self.run_on_gpu(&ModelPart::Output, wiring, (steps, Some(batch.index())), ctx);
            }
            Step::Output { batch, processor: Processor::Cpu } => {
                let fixed = cost_or_zero(self.device.cpu.token_overhead.as_ref());
                let time = self.cpu_cost().output_time(batch.output_count()) + fixed;
                let segment = self.segment(self.layout.output_chunks.clone(), time);
                let record = self.record(StepKind::Output, batch.index(), self.schedule.plan().rounds, ctx);
                self.compute_part(&ModelPart::Output, record, vec![segment], ctx);
            }
            Step::Send { batch, round, next_round, receiver: to } => {
                let format = self.schedule.plan().activation_format;
                let bytes = format.bytes_per_token(&self.model.shape) * u64::from(batch.tokens());
                let message =
                    Message { batch, round: next_round, sender_round: round, sender_id: self.id, bytes };
                ctx.outputs.push(DeviceOutput::Send(to, message));
            }
            Step::Prefetch { part, batch, round } => {
                let woken = self.residency.request(self.weight_part(&part, batch, round));
                self.wake_helper_if(woken, ctx);
            }
            Step::Release { part, batch, round } => {
                let woken = self.residency.release(self.weight_part(&part, batch, round));
                self.wake_helper_if(woken, ctx);
            }
        }
    }

    /// Runs the draft model, whose weights are in memory. On the CPU it competes for the cores like any computation.
    fn draft(&mut self, batch: u32, pass: Pass, ctx: &mut SimContext) {
        let Some(drafter) = &mut self.drafter else { return };
        let (time, processor) = (drafter.pass_time(pass), drafter.processor);
        let record = self.record(StepKind::Draft, batch, 0, ctx);
        match processor {
            Processor::Cpu => {
                let segment = self.segment(0..0, time);
                self.start_computation(record, vec![segment], ctx);
            }
            Processor::Gpu => {
                let time = time * (1.0 / self.gpu_speed);
                self.run_timed(vec![(StepRecord { resource: Resource::Gpu, ..record }, time)], None, ctx);
            }
        }
    }

    fn weight_part(&self, part: &ModelPart, pass: u32, round: u32) -> WeightPart {
        let layers = match part {
            ModelPart::Layers(layers) => Some([layers.start, layers.end]),
            ModelPart::Output => None,
        };
        let origin = ReadOrigin { pass, round, layers };
        WeightPart { pieces: self.layout.part_chunks(part), origin }
    }

    fn wake_helper_if(&self, woken: bool, ctx: &mut SimContext) {
        if woken {
            ctx.engine.schedule_after(0, Event::Helper(self.id));
        }
    }

    /// Returns the computation with a segment of which it needs all bytes.
    fn segment(&self, chunks: Range<Chunk>, time: Seconds) -> ComputationStep {
        let bytes_per_chunk = self.storage.chunk_size;
        ComputationStep::Compute(Segment { chunks, compute_time: time, bytes_per_chunk, expert: None })
    }

    /// Returns the computation of a layer, which takes `fixed` time besides that of its tokens.
    fn layer_work(
        &self,
        cost: &ComputeCost<'_>,
        layer: u32,
        passes: &[Pass],
        fixed: Seconds,
    ) -> Vec<ComputationStep> {
        let time = cost.layer_time(layer, passes);
        let chunks = self.layout.layer_chunks(layer);
        let Some(routes) = self.routes.filter(|_| self.model.shape.layer_experts(layer).is_some()) else {
            return vec![self.segment(chunks, time + fixed)];
        };
        let experts = routes.experts_used(layer, passes);
        // The time is that of the expected number of experts, which have the part of it that their bytes have.
        let group = &self.model.layers[layer as usize];
        let tokens = passes.iter().map(|pass| pass.tokens).sum();
        let share_read = routes.shape.share_read(tokens);
        let of_experts = group.expert_bytes().as_f64() * share_read;
        let others = group.bytes().as_f64() - group.expert_bytes().as_f64();
        let share = of_experts / (of_experts + others).max(1.0);
        let time_of_one = time * (share / (share_read * f64::from(routes.shape.count)).max(1.0));
        let mut work = vec![self.segment(chunks, time * (1.0 - share) + fixed)];
        let group_size = self.residency.experts_per_group().min(experts.len()).max(1);
        let groups: Vec<ExpertGroup> = (0..)
            .zip(experts.chunks(group_size))
            .map(|(index, experts)| ExpertGroup { layer, experts: experts.to_vec(), is_first: index == 0 })
            .collect();
        work.extend(groups.first().cloned().map(ComputationStep::Request));
        for (index, group) in groups.iter().enumerate() {
            // The next group is read while this one is computed.
            work.extend(groups.get(index + 1).cloned().map(ComputationStep::Request));
            work.extend(group.experts.iter().flat_map(|&expert| {
                let matrices: Vec<_> = self.layout.experts().chunks((layer, expert)).collect();
                let compute_time = time_of_one * (1.0 / matrices.len().max(1) as f64);
                matrices.into_iter().map(move |chunks| {
                    ComputationStep::Compute(Segment {
                        chunks,
                        compute_time,
                        bytes_per_chunk: self.storage.chunk_size,
                        expert: Some((layer, expert)),
                    })
                })
            }));
            work.push(ComputationStep::Release(group.clone()));
        }
        work
    }

    /// Returns a segment for the embedding row of each token of a batch. The tokens are unknown: each row is drawn
    /// log-uniformly, because vocabularies list frequent tokens first and token frequencies follow Zipf's law.
    fn embedding_rows(&mut self, batch: &[Pass]) -> Vec<ComputationStep> {
        let (rows, row_bytes) =
            (u64::from(self.model.shape.vocab_size).max(1), self.model.embedding_row_bytes());
        let time = self.cpu_cost().embedding_time(1);
        let chunk = self.storage.chunk_size;
        let pages = Bytes(row_bytes.0.next_multiple_of(PAGE_BYTES));
        let bytes_per_chunk = if self.reads_single_rows { pages } else { chunk };
        let segment = |(sequence, position): (u32, u32)| {
            let position = u64::from(position);
            let share = random::draw(self.seed, StreamPurpose::EmbeddingRow, sequence, position);
            let row = ((share * ((rows + 1) as f64).ln()).exp() as u64).saturating_sub(1).min(rows - 1);
            let chunks = self.layout.embedding_row_chunks(row, row_bytes, chunk);
            let is_kept = self.reads_single_rows && self.residency.leaves_eviction_to_system();
            let is_resident = is_kept && !self.rows.insert(row * row_bytes.0 / bytes_per_chunk.0.max(1));
            let chunks = if is_resident { chunks.start..chunks.start } else { chunks };
            ComputationStep::Compute(Segment { chunks, compute_time: time, bytes_per_chunk, expert: None })
        };
        let positions = batch.iter().flat_map(|pass| {
            let positions = pass.first_position..pass.first_position + pass.tokens;
            positions.map(|position| (pass.sequence_index, position))
        });
        positions.map(segment).collect()
    }

    /// Returns the bytes of the device's weights that are in memory.
    pub fn resident_bytes(&self) -> Bytes {
        let own = self.layout.own_chunks();
        self.storage.chunk_size * own.filter(|&chunk| self.storage.cache.contains(chunk)).count() as u64
    }

    /// Returns the upload, computation and download of a window's GPU layers; unified memory needs no copies.
    fn gpu_steps(&self, compute: &StepRecord, batch: &Batch) -> TimedSteps {
        let Some(gpu) = &self.device.gpu else { return Vec::new() };
        let work = ComputeCost::for_gpu(gpu, self.model, self.kv_format);
        let overhead = cost_or_zero(gpu.window_overhead.as_ref());
        let layers = compute.layer_range().map(|layer| work.layer_time(layer, batch.passes()));
        let time: Seconds = overhead + layers.sum();
        // Deviation: a change of the GPU's speed during a computation applies from the next window on.
        let time = time * (1.0 / self.gpu_speed);
        let bytes = self.model.shape.hidden_state_bytes() * u64::from(batch.tokens());
        let uploads = compute.layer_range().filter_map(|layer| self.uploads.get(layer as usize));
        let up = bytes + uploads.copied().sum::<Bytes>();
        let on_gpu = StepRecord { resource: Resource::Gpu, ..compute.clone() };
        gpu_step_with_copies(gpu, (on_gpu, time), compute, up, bytes)
    }

    /// Returns the GPU steps that compute the logits of `positions` positions: the upload of their hidden states, the
    /// matmul with the output matrix, the download of the logits, and the fixed CPU time of a token.
    fn gpu_output_steps(&self, output: &StepRecord, positions: u32) -> TimedSteps {
        let Some(gpu) = &self.device.gpu else { return Vec::new() };
        let time = ComputeCost::for_gpu(gpu, self.model, self.kv_format).output_time(positions)
            * (1.0 / self.gpu_speed);
        let on_gpu = StepRecord { resource: Resource::Gpu, kind: StepKind::Compute, ..output.clone() };
        let fixed = cost_or_zero(self.device.cpu.token_overhead.as_ref());
        let cost = StepCost { cpu_ns: fixed.to_nanos(), ..StepCost::default() };
        let up = self.model.shape.hidden_state_bytes() * u64::from(positions);
        let logits = Bytes(4 * u64::from(self.model.shape.vocab_size)) * u64::from(positions);
        let mut steps = gpu_step_with_copies(gpu, (on_gpu, time), output, up, logits);
        steps.push((StepRecord { cost: Some(cost), ..output.clone() }, fixed));
        steps
    }

    /// Runs steps on the GPU. If the GPU reads mapped weights, a CPU thread first touches these weights.
    fn run_on_gpu(
        &mut self,
        part: &ModelPart,
        record: StepRecord,
        (steps, output): (TimedSteps, Option<u32>),
        ctx: &mut SimContext,
    ) {
        if !self.device.gpu_maps_weights() {
            return self.run_timed(steps, output, ctx);
        }
        self.after_computation = Some((steps, output));
        let mut chunks = vec![self.layout.part_chunks(part)];
        if let ModelPart::Layers(layers) = part {
            chunks.extend(layers.clone().map(|layer| self.layout.experts().layer_chunks(layer)));
        }
        let work = chunks.into_iter().map(|chunks| self.segment(chunks, Seconds(0.0))).collect();
        self.compute_part(part, record, work, ctx);
    }

    /// Starts steps of known duration. When they end, the output of the pass with index `output` is complete.
    fn run_timed(&mut self, steps: TimedSteps, output: Option<u32>, ctx: &mut SimContext) {
        let end = record_steps(ctx.records, ctx.engine.now(), steps);
        self.thread = ThreadState::Fixed { output };
        ctx.engine.set_timer(self.wake_timer, end, Event::Wake(self.id));
    }

    /// Starts a computation with a part of the mapped weights.
    fn compute_part(
        &mut self,
        part: &ModelPart,
        record: StepRecord,
        work: Vec<ComputationStep>,
        ctx: &mut SimContext,
    ) {
        let request = self.weight_part(part, record.pass_index, record.round);
        let woken = self.residency.begin_part(request, &self.storage);
        self.wake_helper_if(woken, ctx);
        self.start_computation(record, work, ctx);
    }

    fn start_computation(&mut self, record: StepRecord, work: Vec<ComputationStep>, ctx: &mut SimContext) {
        let mut computation =
            MappedComputation::new(record, work, f64::from(self.device.cpu.cores), self.seed);
        let next = computation.advance(ctx.engine.now(), &mut self.storage, self.residency.as_mut());
        self.thread = ThreadState::Computing(Box::new(computation));
        self.continue_computation(next, ctx);
    }

    fn continue_computation(&mut self, next: ComputationAction, ctx: &mut SimContext) {
        let now = ctx.engine.now();
        if let ThreadState::Computing(computation) = &mut self.thread {
            let woken = computation.take_helper_wake();
            self.wake_helper_if(woken, ctx);
        }
        match next {
            ComputationAction::Compute(work) => {
                self.cpu.start_job(now, 0, f64::from(self.device.cpu.cores), work.0);
                if let Some(at) = self.cpu.next_completion_time() {
                    ctx.engine.set_timer(self.cpu_timer, at, Event::Cpu(self.id));
                }
            }
            ComputationAction::Wait => {}
            ComputationAction::Retry(at) => ctx.engine.set_timer(self.wake_timer, at, Event::Wake(self.id)),
            ComputationAction::Done => {
                let thread = std::mem::replace(&mut self.thread, ThreadState::Idle);
                if let ThreadState::Computing(computation) = thread {
                    self.residency.end_part();
                    let record = StepRecord { end_ns: now, ..computation.record };
                    if record.kind == StepKind::Output {
                        ctx.outputs.push(DeviceOutput::Output(record.pass_index));
                    }
                    ctx.records.push(record);
                }
                self.idle_since = now;
                if let Some((steps, output)) = self.after_computation.take() {
                    self.run_timed(steps, output, ctx);
                }
            }
        }
    }

    /// Sets the disk timer to the time at which the next read completes, if this time has changed.
    fn update_disk_timer(&mut self, ctx: &mut SimContext) {
        let next = self.storage.next_event_time();
        if next != self.disk_timer_at
            && let Some(at) = next
        {
            ctx.engine.set_timer(self.disk_timer, at, Event::Disk(self.id));
            self.disk_timer_at = next;
        }
    }

    fn cpu_cost(&self) -> ComputeCost<'a> {
        ComputeCost::for_main_memory(self.device, self.model, self.kv_format)
    }

    fn record(&self, kind: StepKind, batch: u32, round: u32, ctx: &SimContext) -> StepRecord {
        new_record(self.id, Resource::Cpu, kind, (batch, round), ctx.engine.now())
    }
}
