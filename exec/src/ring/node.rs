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
use hearth_schema::schedule::{Event, Part, Pass, Processor, Schedule, Step};
use hearth_schema::trace::{Counter, Kind};
use tokio::sync::mpsc;

use crate::clock::{thread_cpu_nanos, wall_nanos};
use crate::cost::ComputeCost;
use crate::head::Head;
use crate::prefetch::{Prefetcher, bytes};
use crate::residency::resident_bytes;
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
    prefetcher: Option<Prefetcher>,
    recorder: Recorder,
    sample: Option<Sample>,
    /// Activations of the pass at hand, [tokens, embedding].
    hidden: Vec<f32>,
    /// Since when this device has had nothing to do.
    idle_since: u64,
    /// The pass that was here last.
    last_pass: u32,
}

impl Node {
    /// A device that holds its layers. `outbox` has a sender for each of the schedule's receivers.
    pub fn new(
        plan: &Arc<Plan>,
        place: usize,
        model: &LocalModel,
        threads: usize,
        outbox: BTreeMap<usize, mpsc::UnboundedSender<Frame>>,
    ) -> Result<Self, RingError> {
        let (stage, head) = model.stage(plan, place, threads)?;
        let weights = model.weights.clone();
        let device = &plan.devices[place];
        let prefetcher = device
            .prefetches()
            .then(|| Prefetcher::start(weights.clone(), device.residency, device.prefetch_budget));
        Ok(Self {
            schedule: Schedule::new(plan.clone(), place),
            stage,
            head,
            weights,
            outbox,
            prefetcher,
            recorder: Recorder::new(place as u16),
            sample: None,
            hidden: Vec::new(),
            idle_since: wall_nanos(),
            last_pass: 0,
        })
    }

    /// Forgets the sequence and the trace; on the head, takes what samples its tokens.
    pub fn reset(&mut self, sample: Option<Sample>) {
        self.schedule = Schedule::new(self.schedule.plan().clone(), self.schedule.device());
        self.stage.truncate(0);
        self.recorder.reset();
        if let Some(prefetcher) = &self.prefetcher {
            prefetcher.take_spans();
        }
        self.sample = sample;
        self.idle_since = wall_nanos();
    }

    /// The trace since the last reset.
    pub fn take_lines(&mut self) -> Lines {
        if let Some(prefetcher) = &self.prefetcher {
            for span in prefetcher.take_spans() {
                let record = self.recorder.span(span.at, Kind::Prefetch, span.start, span.end);
                record.bytes = span.bytes;
                record.layers = span.layers;
            }
        }
        let (plan, place) = (self.schedule.plan(), self.schedule.device());
        let mut parts: Vec<Part> = plan.windows(place).into_iter().map(Part::Layers).collect();
        parts.extend((place == 0).then_some(Part::Output));
        let resident = parts.iter().map(|part| resident_bytes(&self.weights, part)).sum();
        self.recorder.counter(self.last_pass, Counter::Resident, resident);
        self.recorder.take()
    }

    /// Lets a batch of tokens enter the ring. Head only. A token, if one was sampled without leaving.
    pub fn begin(&mut self, pass: Pass, tokens: &[u32]) -> Result<Option<u32>, RingError> {
        let steps = self.schedule.react(&Event::Begin(pass))?;
        self.perform(steps, tokens)
    }

    /// Whether nothing of a pass is still under way here.
    pub fn is_done(&self, pass: Pass) -> bool {
        !self.schedule.is_under_way(pass)
    }

    /// Takes activations that arrived at a moment of this process's clock. A token, if one was sampled.
    pub fn arrived(
        &mut self,
        pass: Pass,
        round: u32,
        activations: &[u8],
        at: u64,
    ) -> Result<Option<u32>, RingError> {
        let steps = self.schedule.react(&Event::Arrived { pass, round })?;
        let expected = pass.tokens as usize * self.embedding() * size_of::<f32>();
        if activations.len() != expected {
            return Err(RingError::Protocol {
                name: self.name().into(),
                what: format!("{} bytes of activations instead of {expected}", activations.len()),
            });
        }
        self.hidden = bytemuck::pod_collect_to_vec(activations);
        let since = self.idle_since.min(at);
        let record = self.recorder.span(At { pass: pass.index, round }, Kind::Receive, since, at);
        record.bytes = activations.len() as u64;
        self.perform(steps, &[])
    }

    fn embedding(&self) -> usize {
        self.weights.shape().embedding as usize
    }

    fn name(&self) -> &str {
        &self.schedule.plan().devices[self.schedule.device()].name
    }

    fn perform(&mut self, steps: Vec<Step>, tokens: &[u32]) -> Result<Option<u32>, RingError> {
        let mut sampled = None;
        for step in steps {
            match step {
                Step::Embed { pass } => self.embed(pass, tokens)?,
                Step::Compute { pass, round, layers, processor } => {
                    if processor == Processor::Gpu {
                        return Err(RingError::Plan(format!(
                            "the plan puts layers of `{}` on a GPU, and this build computes on CPUs only; plan \
                             with `gpu_layers: 0`",
                            self.name()
                        )));
                    }
                    let start = wall_nanos();
                    let read = self.recorder.bytes_read();
                    let positions: Vec<u32> =
                        (pass.first_position..pass.first_position + pass.tokens).collect();
                    let cost = self.stage.forward(layers.clone(), &mut self.hidden, &positions)?;
                    let touched = bytes(&self.weights, &Part::Layers(layers.clone()));
                    let at = At { pass: pass.index, round };
                    self.computed(at, Kind::Compute, start, cost, touched, read).layers =
                        recorder::layers(&layers);
                }
                Step::Output { pass } => sampled = self.output(pass)?,
                Step::Send { pass, round, to } => self.send(pass, round, to)?,
                Step::Prefetch { part, pass, round } => {
                    if let Some(prefetcher) = &self.prefetcher {
                        prefetcher.request(part, At { pass: pass.index, round });
                    }
                }
            }
        }
        self.idle_since = wall_nanos();
        Ok(sampled)
    }

    fn embed(&mut self, pass: Pass, tokens: &[u32]) -> Result<(), RingError> {
        let start = wall_nanos();
        let read = self.recorder.bytes_read();
        let cpu = thread_cpu_nanos();
        self.hidden = self.head()?.embed(tokens)?;
        let cost = ComputeCost { cpu_ns: thread_cpu_nanos() - cpu, ..ComputeCost::default() };
        let at = At { pass: pass.index, round: 0 };
        self.computed(at, Kind::Embed, start, cost, 0, read);
        Ok(())
    }

    fn output(&mut self, pass: Pass) -> Result<Option<u32>, RingError> {
        let start = wall_nanos();
        let read = self.recorder.bytes_read();
        let hidden = std::mem::take(&mut self.hidden);
        let logits = self.head()?.logits_of_last(&hidden)?;
        let mut cost = self.head()?.last_cost();
        let cpu = thread_cpu_nanos();
        let sampled = self.sample.as_mut().map(|sample| sample(&logits));
        cost.cpu_ns += thread_cpu_nanos() - cpu;
        let touched = bytes(&self.weights, &Part::Output);
        let at = At { pass: pass.index, round: self.schedule.plan().rounds };
        self.computed(at, Kind::Output, start, cost, touched, read);
        self.count(pass.index);
        Ok(sampled)
    }

    fn head(&mut self) -> Result<&mut Head, RingError> {
        self.head.as_mut().ok_or_else(|| RingError::Plan("only the head embeds and outputs".into()))
    }

    /// Records a computing step that ends now.
    fn computed(
        &mut self,
        at: At,
        kind: Kind,
        start: u64,
        cost: ComputeCost,
        touched: u64,
        read: u64,
    ) -> &mut hearth_schema::trace::Record {
        let faulted = self.recorder.bytes_read() - read;
        let record = self.recorder.step(at, kind, start);
        record.bytes = touched;
        record.cost = Some(recorder::cost(cost.cpu_ns, cost.queue_ns, touched, faulted));
        record
    }

    fn send(&mut self, pass: Pass, round: u32, to: usize) -> Result<(), RingError> {
        let start = wall_nanos();
        let payload = bytemuck::cast_slice(&self.hidden).to_vec();
        let length = payload.len() as u64;
        let frame = Frame { message: Message::activations(pass, round), payload };
        let sent = self.outbox.get(&to).is_some_and(|link| link.send(frame).is_ok());
        if !sent {
            let name = self.schedule.plan().devices[to].name.clone();
            return Err(RingError::Gone { name, why: "its connection is closed".into() });
        }
        // A leg is told by the round that the device at its start works in: on the way back to the head that
        // is one less than the round the head takes up.
        let mine = if to == 0 { round - 1 } else { round };
        let record = self.recorder.step(At { pass: pass.index, round: mine }, Kind::Send, start);
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
        self.recorder.counter(pass, Counter::Unreclaimable, recorder::unreclaimable());
    }
}
