//! How does a device carry out the schedule's steps?
//!
//! A node interprets `schema::schedule` on one thread: it computes, hands activations to the outbox, and
//! starts prefetches, in the order the schedule says and with no choice of its own. What it does is
//! recorded as the device's trace.
//!
//! Not here: where messages come from and go to ([`super::worker`], [`super::head`]).

use std::collections::BTreeMap;
use std::sync::Arc;

use hearth_schema::Plan;
use hearth_schema::schedule::{Event, Part, Pass, Processor, Schedule, Step, visits};
use hearth_schema::trace::{Counter, Kind, Record};
use tokio::sync::mpsc;

use crate::clock::{Stopwatch, Stretch, wall_nanos};
use crate::cost::ComputeCost;
use crate::cpu::buffer_bytes;
use crate::head::Head;
use crate::memory::MemoryWatch;
use crate::residency::{Keeper, is_told, resident_bytes};
use crate::ring::LocalModel;
use crate::ring::error::RingError;
use crate::ring::recorder::{self, At, Lines, Recorder};
use crate::ring::wire::{Frame, Message};
use crate::stage::Stage;
use crate::weights::Weights;

/// What turns logits into a token, on the head.
pub type Sample = Box<dyn FnMut(&[f32]) -> u32 + Send>;

/// A device of the ring.
pub struct Node {
    schedule: Schedule,
    stage: Stage,
    /// The ends of the model; on the head only.
    head: Option<Head>,
    weights: Arc<Weights>,
    outbox: BTreeMap<usize, mpsc::UnboundedSender<Frame>>,
    keeper: Keeper,
    recorder: Recorder,
    sample: Option<Sample>,
    /// Activations of the pass at hand, [tokens, embedding].
    hidden: Vec<f32>,
    /// Since when this device has had nothing to do.
    idle_since: u64,
    /// The pass that was here last.
    last_pass: u32,
    /// When its memory is looked at again.
    next_look: u64,
    /// Tokens of the largest pass so far.
    largest_pass: u32,
    threads: usize,
    /// Bytes that the keeper had read when the trace began.
    ahead_before: u64,
    /// Bytes that its control group had read again by then.
    refaults_before: u64,
}

/// Looking at its memory takes a device at most one part in so many of its time.
const LOOK_SHARE: u64 = 100;

impl Node {
    /// A device that holds its layers. `outbox` has a sender for each of the schedule's receivers.
    pub fn new(
        plan: &Arc<Plan>,
        place: usize,
        model: &LocalModel,
        threads: usize,
        outbox: BTreeMap<usize, mpsc::UnboundedSender<Frame>>,
    ) -> Result<Self, RingError> {
        let weights = model.weights.clone();
        let keeper = Keeper::start(&weights, plan, place, || MemoryWatch::shared().room());
        let (stage, head) = model.stage(plan, place, threads, keeper.gate())?;
        Ok(Self {
            schedule: Schedule::new(plan.clone(), place),
            stage,
            head,
            weights,
            outbox,
            keeper,
            recorder: Recorder::new(place as u16),
            sample: None,
            hidden: Vec::new(),
            idle_since: wall_nanos(),
            last_pass: 0,
            next_look: 0,
            largest_pass: 0,
            threads,
            ahead_before: 0,
            refaults_before: recorder::refaults(),
        })
    }

    /// Forgets the sequence and the trace; on the head, takes what samples its tokens.
    pub fn reset(&mut self, sample: Option<Sample>) {
        self.schedule = Schedule::new(self.schedule.plan().clone(), self.schedule.device());
        self.stage.truncate(0);
        self.recorder.reset();
        self.keeper.reset();
        self.ahead_before = self.keeper.bytes_read();
        self.refaults_before = recorder::refaults();
        self.sample = sample;
        self.idle_since = wall_nanos();
    }

    /// The trace since the last reset.
    pub fn take_lines(&mut self) -> Lines {
        for span in self.keeper.take_spans() {
            let record = self.recorder.span(span.at, Kind::Prefetch, span.start, span.end);
            record.bytes = span.bytes;
            record.layers = span.layers;
        }
        self.look(self.last_pass);
        self.recorder.take()
    }

    /// Counts what of its weights is in memory, where the system tells.
    fn look(&mut self, pass: u32) {
        if !is_told(&self.weights) {
            self.next_look = u64::MAX;
            return;
        }
        let start = wall_nanos();
        let own = visits(self.schedule.plan(), self.schedule.device());
        let resident = own.iter().flatten().map(|part| resident_bytes(&self.weights, part)).sum();
        self.recorder.counter(pass, Counter::Resident, resident);
        let end = wall_nanos();
        self.next_look = end + (end - start) * LOOK_SHARE;
    }

    /// Lets a batch of tokens enter the ring. Head only. A token, if one was sampled without leaving.
    pub fn begin(&mut self, pass: Pass, tokens: &[u32]) -> Result<Option<u32>, RingError> {
        let steps = self.schedule.react(&Event::Begin(pass))?;
        self.make_room(pass);
        self.perform(steps, tokens)
    }

    /// Takes activations that arrived at a moment of this process's clock. A token, if one was sampled.
    pub fn arrived(
        &mut self,
        pass: Pass,
        round: u32,
        activations: &[u8],
        at: u64,
        from: u16,
    ) -> Result<Option<u32>, RingError> {
        let steps = self.schedule.react(&Event::Arrived { pass, round })?;
        let expected = pass.tokens as usize * self.embedding() * size_of::<f32>();
        if activations.len() != expected {
            return Err(RingError::Protocol {
                name: self.name().into(),
                what: format!("{} bytes of activations instead of {expected}", activations.len()),
            });
        }
        self.make_room(pass);
        self.hidden = bytemuck::pod_collect_to_vec(activations);
        let since = self.idle_since.min(at);
        let record = self.recorder.span(At { pass: pass.index, round }, Kind::Receive, since, at);
        record.bytes = activations.len() as u64;
        record.peer = Some(from);
        self.perform(steps, &[])
    }

    /// A pass that is larger than any before takes memory for its buffers, which the weights must not fill.
    fn make_room(&mut self, pass: Pass) {
        if pass.tokens > self.largest_pass {
            let cache = self.stage.cache_bytes() / u64::from(self.schedule.plan().context).max(1);
            let buffers = buffer_bytes(self.weights.shape(), pass.tokens, self.threads);
            self.keeper.reserve(buffers + cache * u64::from(pass.tokens));
            self.largest_pass = pass.tokens;
        }
    }

    fn embedding(&self) -> usize {
        self.weights.shape().embedding as usize
    }

    fn name(&self) -> &str {
        &self.schedule.plan().devices[self.schedule.device()].name
    }

    fn check_processor(&self, processor: Processor) -> Result<(), RingError> {
        match processor {
            Processor::Cpu => Ok(()),
            Processor::Gpu => Err(RingError::Plan(format!(
                "the plan puts layers of `{}` on a GPU, and this build computes on CPUs only; plan with \
                 `gpu_layers: 0`",
                self.name()
            ))),
        }
    }

    fn perform(&mut self, steps: Vec<Step>, tokens: &[u32]) -> Result<Option<u32>, RingError> {
        let mut sampled = None;
        for step in steps {
            match step {
                Step::Rollback { position, .. } => self.stage.truncate(position),
                Step::Draft { .. } => {
                    return Err(RingError::Plan("this build does not run draft models".into()));
                }
                Step::Embed { pass } => self.embed(pass, tokens)?,
                Step::Compute { pass, round, layers, processor } => {
                    self.check_processor(processor)?;
                    let positions: Vec<u32> =
                        (pass.first_position..pass.first_position + pass.tokens).collect();
                    let at = At { pass: pass.index, round };
                    self.keeper.begin(&Part::Layers(layers.clone()), at);
                    let ((), measured) = self.measure(|node| {
                        let cost = node.stage.forward(layers.clone(), &mut node.hidden, &positions)?;
                        Ok(((), cost))
                    })?;
                    let touched = self.weights.part_bytes(&Part::Layers(layers.clone()));
                    self.computed(at, Kind::Compute, measured, touched).layers = recorder::layers(&layers);
                }
                Step::Output { pass, processor } => {
                    self.check_processor(processor)?;
                    sampled = self.output(pass)?;
                }
                Step::Send { pass, round, next_round, to } => self.send(pass, round, next_round, to)?,
                Step::Prefetch { part, pass, round } => {
                    self.keeper.prefetch(part, At { pass: pass.index, round });
                }
                Step::Release { part, .. } => self.keeper.release(part),
            }
        }
        self.idle_since = wall_nanos();
        Ok(sampled)
    }

    fn embed(&mut self, pass: Pass, tokens: &[u32]) -> Result<(), RingError> {
        let ((), measured) = self.measure(|node| {
            let mut watch = Stopwatch::start();
            node.hidden = node.head()?.embed(tokens)?;
            Ok(((), cost_of(watch.cut())))
        })?;
        self.keeper.embedded(&self.weights, tokens);
        let table: u64 = self.weights.embedding_extents().iter().map(|extent| extent.length).sum();
        let rows = table / u64::from(self.weights.shape().vocabulary).max(1) * u64::from(pass.tokens);
        // A missing row is read with what lies around it.
        let touched = rows.max(measured.faulted);
        self.computed(At { pass: pass.index, round: 0 }, Kind::Embed, measured, touched);
        Ok(())
    }

    fn output(&mut self, pass: Pass) -> Result<Option<u32>, RingError> {
        let at = At { pass: pass.index, round: self.schedule.plan().rounds };
        self.keeper.begin(&Part::Output, at);
        let (sampled, measured) = self.measure(|node| {
            let hidden = std::mem::take(&mut node.hidden);
            let logits = node.head()?.logits_of_last(&hidden)?;
            let mut cost = node.head()?.last_cost();
            let mut watch = Stopwatch::start();
            let sampled = node.sample.as_mut().map(|sample| sample(&logits));
            cost += cost_of(watch.cut());
            Ok((sampled, cost))
        })?;
        let touched = self.weights.part_bytes(&Part::Output);
        self.computed(at, Kind::Output, measured, touched);
        self.count(pass.index);
        Ok(sampled)
    }

    fn head(&mut self) -> Result<&mut Head, RingError> {
        self.head.as_mut().ok_or_else(|| RingError::Plan("only the head embeds and outputs".into()))
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
        let faulted = self.demand_read().saturating_sub(before) + self.keeper.take_awaited();
        Ok((value, Measured { start, end, cost, faulted }))
    }

    /// Bytes read from disk so far, less those that the helper read ahead.
    fn demand_read(&self) -> u64 {
        self.recorder.bytes_read().saturating_sub(self.keeper.bytes_read() - self.ahead_before)
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
        let payload = bytemuck::cast_slice(&self.hidden).to_vec();
        let length = payload.len() as u64;
        let frame = Frame { message: Message::activations(pass, next_round), payload };
        let sent = self.outbox.get(&to).is_some_and(|link| link.send(frame).is_ok());
        if !sent {
            let name = self.schedule.plan().devices[to].name.clone();
            return Err(RingError::Gone { name, why: "its connection is closed".into() });
        }
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
        if wall_nanos() >= self.next_look {
            self.look(pass);
        }
        let refaults = recorder::refaults().saturating_sub(self.refaults_before);
        self.recorder.counter(pass, Counter::Refaults, refaults);
        self.recorder.counter(pass, Counter::Unreclaimable, recorder::unreclaimable());
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

/// The cost of a stretch of this thread alone.
fn cost_of(stretch: Stretch) -> ComputeCost {
    let Stretch { wall, cpu, queue } = stretch;
    ComputeCost { wall_ns: wall, cpu_ns: cpu, queue_ns: queue, all_cpu_ns: cpu }
}
