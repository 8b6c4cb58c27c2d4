//! Tensor-parallel run: simulates the computations and messages of the ranks in order.
//!
//! The head computes the embedding of a pass and sends it to every worker. Then, block by block, a rank computes its
//! slice, takes part in the all-reduce, and begins the next block when it has the sum of all ranks. Nothing else
//! synchronises the ranks, so a rank may be ahead of other ranks. After the last block the head computes the output.
//!
//! Which messages a rank sends depends on the number of messages that it has received
//! ([`hearth_core::tensor::collective`]). Messages of a later block are counted when they arrive, and used when the
//! rank reaches that block. An over-the-air all-reduce sends no messages: all ranks have the sum a fixed time after the
//! last rank has finished.

use std::collections::BTreeMap;

use hearth_core::tensor::Collective;
use hearth_profiles::{Bytes, Seconds};
use hearth_schema::pass::Pass;
use hearth_schema::plan::tensor_parallel::{AllReduce, TensorParallelPlan};
use hearth_schema::trace::{CounterReading, Resource, StepCost, StepKind, StepRecord};

use crate::engine::{Engine, MAX_SIM_TIME, Nanos};
use crate::error::SimError;
use crate::input::Input;
use crate::network::NetworkSim;
use crate::trace::memory_readings;

use super::rank::Rank;

/// A step of the run: the index of the pass, and 0 for the embedding or the index of the block plus 1.
type BlockStep = (usize, u32);

#[derive(Debug, Clone, Copy)]
enum Event {
    Embedded,
    /// The rank with this index has computed its slice of a block.
    Computed(usize),
    /// A message arrives at the rank with this index.
    Delivered(usize, Message),
    /// All ranks have the sum of a step (over-the-air all-reduce).
    Summed(BlockStep),
    OutputComputed,
    Wifi,
}

#[derive(Debug, Clone, Copy)]
struct Message {
    step: BlockStep,
    /// Index of the sending rank; `None` for the sum of an over-the-air all-reduce.
    from: Option<usize>,
    bytes: Bytes,
}

#[derive(Debug, Clone)]
struct Progress {
    step: BlockStep,
    /// The time since which the rank waits for messages of `step`; `None` if the rank does not wait.
    waiting_since: Option<Nanos>,
    sent: usize,
    /// Number of messages received for each step that is not complete.
    received: BTreeMap<BlockStep, usize>,
}

pub struct TensorSimulation<'a> {
    engine: Engine<Event>,
    ranks: Vec<Rank<'a>>,
    progress: Vec<Progress>,
    network: NetworkSim<Event>,
    passes: &'a [Pass],
    all_reduce: Collective,
    air_time: Seconds,
    tensor: &'a TensorParallelPlan,
    embedding: u32,
    /// Number of blocks: every layer has an attention and a feed-forward block.
    blocks: u32,
    /// For an over-the-air all-reduce: the number of ranks that have finished each step.
    ranks_waiting: BTreeMap<BlockStep, usize>,
    ended: bool,
    records: Vec<StepRecord>,
    readings: Vec<CounterReading>,
}

impl<'a> TensorSimulation<'a> {
    pub fn new(
        input: &Input<'a>,
        tensor: &'a TensorParallelPlan,
        ranks: Vec<Rank<'a>>,
        passes: &'a [Pass],
    ) -> Self {
        let start = Progress { step: (0, 0), waiting_since: Some(0), sent: 0, received: BTreeMap::new() };
        let shape = &input.cluster.model.shape;
        let mut engine = Engine::new();
        let network = NetworkSim::new(input.cluster, input.plan, &mut engine);
        Self {
            engine,
            progress: vec![start; ranks.len()],
            all_reduce: Collective { algorithm: tensor.all_reduce, devices: ranks.len() },
            ranks,
            network,
            passes,
            air_time: tensor.all_reduce_time.unwrap_or(Seconds(0.0)),
            tensor,
            embedding: shape.embedding_length,
            blocks: 2 * shape.layers.0,
            ranks_waiting: BTreeMap::new(),
            ended: false,
            records: Vec::new(),
            readings: Vec::new(),
        }
    }

    pub fn run(mut self) -> Result<(Vec<StepRecord>, Vec<CounterReading>), SimError> {
        self.begin(0);
        while !self.ended
            && let Some(event) = self.engine.next_event()
        {
            if self.engine.now() > MAX_SIM_TIME {
                let tokens = self.readings.iter().filter(|reading| reading.device_index == 0).count() as u32;
                return Err(SimError::RunTooLong { tokens, at: Seconds::from_nanos(self.engine.now()) });
            }
            match event {
                Event::Embedded => self.send_embedding(),
                Event::Computed(rank) => self.begin_all_reduce(rank),
                Event::Delivered(rank, message) => self.on_delivery(rank, message),
                Event::Summed(step) => self.on_sum(step),
                Event::OutputComputed => self.on_output(),
                Event::Wifi => self.collect_deliveries(),
            }
        }
        Ok((self.records, self.readings))
    }

    fn begin(&mut self, index: usize) {
        let (now, pass) = (self.engine.now(), self.passes[index]);
        self.progress[0].step = (index, 0);
        let end = now.saturating_add(self.ranks[0].embed_time(pass).to_nanos());
        let record = self.ranks[0].new_record(StepKind::Embed, pass, 0, now);
        let cost = Some(StepCost { cpu_ns: end - now, ..StepCost::default() });
        self.records.push(StepRecord { end_ns: end, cost, ..record });
        self.engine.schedule_at(end, Event::Embedded);
    }

    fn send_embedding(&mut self) {
        let step = self.progress[0].step;
        let rows = Bytes(4 * u64::from(self.embedding)) * u64::from(self.passes[step.0].tokens);
        for to in 1..self.ranks.len() {
            self.send(0, to, step, rows);
        }
        self.compute(0, 0);
    }

    fn compute(&mut self, rank: usize, block: u32) {
        let now = self.engine.now();
        let progress = &mut self.progress[rank];
        progress.received.remove(&progress.step);
        progress.step.1 = block + 1;
        (progress.waiting_since, progress.sent) = (None, 0);
        let pass = self.passes[progress.step.0];
        let end = self.ranks[rank].simulate_block(now, block as usize, pass, &mut self.records);
        self.engine.schedule_at(end, Event::Computed(rank));
    }

    fn begin_all_reduce(&mut self, rank: usize) {
        let (now, step) = (self.engine.now(), self.progress[rank].step);
        self.progress[rank].waiting_since = Some(now);
        if self.all_reduce.algorithm == AllReduce::OverTheAir && self.ranks.len() > 1 {
            let ranks_waiting = self.ranks_waiting.entry(step).or_insert(0);
            *ranks_waiting += 1;
            if *ranks_waiting == self.ranks.len() {
                self.ranks_waiting.remove(&step);
                self.engine.schedule_after(self.air_time.to_nanos(), Event::Summed(step));
            }
        } else {
            self.advance(rank);
        }
    }

    /// Sends the due messages of a rank, and begins the next block of the rank if the all-reduce is complete.
    fn advance(&mut self, rank: usize) {
        let step = self.progress[rank].step;
        let received = self.progress[rank].received.get(&step).copied().unwrap_or(0);
        let due = self.all_reduce.due_messages(rank, received);
        let tokens = self.passes[step.0].tokens;
        let bytes = self.all_reduce.message_bytes(self.tensor.partial_result_bytes(self.embedding, tokens));
        for number in self.progress[rank].sent..due {
            self.send(rank, self.all_reduce.receiver(rank, number), step, bytes);
        }
        self.progress[rank].sent = due;
        if received >= self.all_reduce.total_messages(rank) {
            self.finish_all_reduce(rank);
        }
    }

    fn finish_all_reduce(&mut self, rank: usize) {
        let (now, (index, block)) = (self.engine.now(), self.progress[rank].step);
        if block < self.blocks {
            self.compute(rank, block);
        } else if rank > 0 {
            let progress = &mut self.progress[rank];
            progress.received.remove(&(index, block));
            progress.step = (index + 1, 0);
            progress.waiting_since = Some(now);
            if progress.received.contains_key(&progress.step) {
                self.compute(rank, 0);
            }
        } else {
            self.progress[0].received.remove(&(index, block));
            self.output(index);
        }
    }

    /// Computes the output of a pass on the head device. Begins the next pass if this pass has no output.
    fn output(&mut self, index: usize) {
        let (now, pass) = (self.engine.now(), self.passes[index]);
        if !pass.has_output {
            self.begin(index + 1);
            return;
        }
        let end = self.ranks[0].simulate_output(now, self.blocks, pass, &mut self.records);
        self.engine.schedule_at(end, Event::OutputComputed);
    }

    fn on_output(&mut self) {
        let (at, index) = (self.engine.now(), self.progress[0].step.0);
        let pass = self.passes[index].index;
        for (index, rank) in self.ranks.iter().enumerate() {
            let bytes =
                [rank.bytes_read(), rank.pinned_memory.weights, rank.pinned_memory.unreclaimable_memory()];
            self.readings.extend(memory_readings(index, pass, at, bytes));
        }
        if index + 1 < self.passes.len() {
            self.begin(index + 1);
        } else {
            self.ended = true;
        }
    }

    fn send(&mut self, from: usize, to: usize, step: BlockStep, bytes: Bytes) {
        let now = self.engine.now();
        let pass = self.passes[step.0];
        let record = self.ranks[from].new_record(StepKind::Send, pass, step.1.saturating_sub(1), now);
        let (resource, peer) = (Resource::Tx, Some(to as u16));
        self.records.push(StepRecord { resource, bytes: bytes.0, peer, ..record });
        let arrival = Event::Delivered(to, Message { step, from: Some(from), bytes });
        if !self.network.send(&mut self.engine, &mut self.records, [from, to], bytes, arrival) {
            self.collect_deliveries();
        }
    }

    fn collect_deliveries(&mut self) {
        self.network.schedule_arrivals(&mut self.engine, &mut self.records, Event::Wifi);
    }

    fn on_delivery(&mut self, rank: usize, message: Message) {
        let now = self.engine.now();
        let progress = &mut self.progress[rank];
        *progress.received.entry(message.step).or_insert(0) += 1;
        let waiting_since = progress.waiting_since.filter(|_| progress.step == message.step);
        self.record_receive(rank, message, waiting_since.unwrap_or(now));
        match (waiting_since, message.step.1) {
            (None, _) => {}
            (Some(_), 0) => self.compute(rank, 0),
            (Some(_), _) => self.advance(rank),
        }
    }

    fn on_sum(&mut self, step: BlockStep) {
        let bytes = self.tensor.partial_result_bytes(self.embedding, self.passes[step.0].tokens);
        for rank in 0..self.ranks.len() {
            let since = self.progress[rank].waiting_since.unwrap_or(self.engine.now());
            self.record_receive(rank, Message { step, from: None, bytes }, since);
            self.finish_all_reduce(rank);
        }
    }

    fn record_receive(&mut self, rank: usize, Message { step, from, bytes }: Message, since: Nanos) {
        let (now, pass) = (self.engine.now(), self.passes[step.0]);
        let record = self.ranks[rank].new_record(StepKind::Receive, pass, step.1.saturating_sub(1), since);
        let (resource, peer) = (Resource::Rx, from.map(|from| from as u16));
        self.records.push(StepRecord { resource, end_ns: now, bytes: bytes.0, peer, ..record });
    }
}
