//! Simulation of a tensor-parallel run: the order in which the ranks compute and send.
//!
//! The head computes the embedding of a pass and sends it to every worker. Then, block by block, a rank computes its
//! slice, takes part in the all-reduce, and begins the next block when it has the sum. Nothing else synchronises the
//! ranks, so a rank may be ahead of others. After the last block the head computes the output.
//!
//! What a rank sends depends on the number of messages it has received ([`hearth_core::tensor::collective`]);
//! messages of a later block are counted when they arrive, and used when the rank reaches that block. An over-the-air
//! all-reduce sends no messages: when the last rank has finished, all have the sum after the given time.

use std::collections::BTreeMap;

use hearth_core::tensor::Collective;
use hearth_profiles::{Bytes, Seconds};
use hearth_schema::pass::Pass;
use hearth_schema::plan::tensor::{AllReduce, TensorPlan};
use hearth_schema::trace::{Counter, Kind, Reading, Record, Resource};

use crate::engine::{Engine, MAX_SIM_TIME, Nanos, Timer};
use crate::error::SimError;
use crate::input::Input;
use crate::resource::link::{Delivery, Network, cluster_links};

use super::rank::Rank;

/// A step of the run: the index of the pass, and 0 for the embedding or 1 + the block.
type BlockStep = (usize, u32);

/// An event of a rank.
#[derive(Debug, Clone, Copy)]
enum Event {
    /// The head has computed the embedding.
    Embedded,
    /// A rank has computed its slice of a block.
    Computed(usize),
    /// A message arrives at a rank.
    Delivered(usize, Message),
    /// All ranks have the sum of a step (over-the-air all-reduce).
    Summed(BlockStep),
    /// The head has computed the output of a pass.
    OutputComputed,
    /// A Wi-Fi transmission may have ended.
    Wifi,
}

#[derive(Debug, Clone, Copy)]
struct Message {
    step: BlockStep,
    from: usize,
    bytes: Bytes,
}

/// A message on a link: the receiver, the message, and the index of its send record.
type InFlight = (usize, Message, usize);

/// The progress of a rank.
#[derive(Debug, Clone)]
struct Progress {
    step: BlockStep,
    /// The time since which the rank waits in that step.
    waiting_since: Option<Nanos>,
    /// Number of messages sent in that step.
    sent: usize,
    /// Number of messages received, for each step that is not complete.
    received: BTreeMap<BlockStep, usize>,
}

/// The simulation of a tensor-parallel run.
pub struct TensorSimulation<'a> {
    engine: Engine<Event>,
    ranks: Vec<Rank<'a>>,
    progress: Vec<Progress>,
    network: Network<InFlight>,
    wifi_timer: Timer,
    passes: &'a [Pass],
    all_reduce: Collective,
    air_time: Seconds,
    tensor: &'a TensorPlan,
    embedding: u32,
    /// Number of blocks: 2 L.
    blocks: u32,
    /// Number of ranks that have reached the all-reduce of a step (over-the-air all-reduce).
    ranks_waiting: BTreeMap<BlockStep, usize>,
    ended: bool,
    records: Vec<Record>,
    readings: Vec<Reading>,
}

impl<'a> TensorSimulation<'a> {
    pub fn new(input: &Input<'a>, tensor: &'a TensorPlan, ranks: Vec<Rank<'a>>, passes: &'a [Pass]) -> Self {
        let start = Progress { step: (0, 0), waiting_since: Some(0), sent: 0, received: BTreeMap::new() };
        let shape = &input.cluster.model.shape;
        let mut engine = Engine::new();
        let wifi_timer = engine.new_timer();
        Self {
            engine,
            wifi_timer,
            progress: vec![start; ranks.len()],
            all_reduce: Collective { pattern: tensor.all_reduce, devices: ranks.len() },
            ranks,
            network: Network::new(cluster_links(input.cluster, input.plan)),
            passes,
            air_time: tensor.air_time.unwrap_or(Seconds(0.0)),
            tensor,
            embedding: shape.embedding,
            blocks: 2 * shape.layers.0,
            ranks_waiting: BTreeMap::new(),
            ended: false,
            records: Vec::new(),
            readings: Vec::new(),
        }
    }

    /// Runs the simulation. Returns the records and readings of its trace.
    pub fn run(mut self) -> Result<(Vec<Record>, Vec<Reading>), SimError> {
        self.begin(0);
        while !self.ended
            && let Some(event) = self.engine.next_event()
        {
            if self.engine.now() > MAX_SIM_TIME {
                let tokens = self.readings.iter().filter(|reading| reading.device == 0).count() as u32;
                return Err(SimError::RunTooLong { tokens, at: Seconds::from_nanos(self.engine.now()) });
            }
            match event {
                Event::Embedded => self.send_embedding(),
                Event::Computed(place) => self.begin_all_reduce(place),
                Event::Delivered(place, message) => self.on_delivery(place, message),
                Event::Summed(step) => self.on_sum(step),
                Event::OutputComputed => self.on_output(),
                Event::Wifi => self.poll_links(),
            }
        }
        Ok((self.records, self.readings))
    }

    /// Begins a pass on the head.
    fn begin(&mut self, index: usize) {
        let (now, pass) = (self.engine.now(), self.passes[index]);
        self.progress[0].step = (index, 0);
        let end = now.saturating_add(self.ranks[0].embed(pass).to_nanos());
        let record = self.ranks[0].record(Kind::Embed, pass, 0, now);
        let cost = Some(hearth_schema::trace::Cost { cpu: end - now, ..Default::default() });
        self.records.push(Record { end, cost, ..record });
        self.engine.schedule_at(end, Event::Embedded);
    }

    /// Sends the embedding to every worker, and begins the head's first block.
    fn send_embedding(&mut self) {
        let step = self.progress[0].step;
        let rows = Bytes(4 * u64::from(self.embedding)) * u64::from(self.passes[step.0].tokens);
        for to in 1..self.ranks.len() {
            self.send(0, to, step, rows);
        }
        self.compute(0, 0);
    }

    /// Begins a block on a rank.
    fn compute(&mut self, place: usize, block: u32) {
        let now = self.engine.now();
        let progress = &mut self.progress[place];
        progress.received.remove(&progress.step);
        progress.step.1 = block + 1;
        (progress.waiting_since, progress.sent) = (None, 0);
        let pass = self.passes[progress.step.0];
        let rank = &mut self.ranks[place];
        let record = rank.record(Kind::Compute, pass, block, now);
        let end = rank.block(now, block as usize, pass, &record, &mut self.records);
        self.engine.schedule_at(end, Event::Computed(place));
    }

    /// Begins the all-reduce of a rank's partial result.
    fn begin_all_reduce(&mut self, place: usize) {
        let (now, step) = (self.engine.now(), self.progress[place].step);
        self.progress[place].waiting_since = Some(now);
        if self.all_reduce.pattern == AllReduce::OverTheAir && self.ranks.len() > 1 {
            let ranks_waiting = self.ranks_waiting.entry(step).or_insert(0);
            *ranks_waiting += 1;
            if *ranks_waiting == self.ranks.len() {
                self.ranks_waiting.remove(&step);
                self.engine.schedule_after(self.air_time.to_nanos(), Event::Summed(step));
            }
        } else {
            self.advance(place);
        }
    }

    /// Sends the messages that are due, and continues if the sum is complete.
    fn advance(&mut self, place: usize) {
        let step = self.progress[place].step;
        let received = self.progress[place].received.get(&step).copied().unwrap_or(0);
        let due = self.all_reduce.due_messages(place, received);
        let tokens = self.passes[step.0].tokens;
        let bytes = self.all_reduce.message_bytes(self.tensor.partial_bytes(self.embedding, tokens));
        for number in self.progress[place].sent..due {
            self.send(place, self.all_reduce.receiver(place, number), step, bytes);
        }
        self.progress[place].sent = due;
        if received >= self.all_reduce.awaited_messages(place) {
            self.finish_all_reduce(place);
        }
    }

    /// Continues after an all-reduce.
    fn finish_all_reduce(&mut self, place: usize) {
        let (now, (index, block)) = (self.engine.now(), self.progress[place].step);
        if block < self.blocks {
            self.compute(place, block);
        } else if place > 0 {
            let progress = &mut self.progress[place];
            progress.received.remove(&(index, block));
            progress.step = (index + 1, 0);
            progress.waiting_since = Some(now);
            if progress.received.contains_key(&progress.step) {
                self.compute(place, 0);
            }
        } else {
            self.progress[0].received.remove(&(index, block));
            self.output(index);
        }
    }

    /// Computes the output of a pass on the head, or begins the next pass if this one has no output.
    fn output(&mut self, index: usize) {
        let (now, pass) = (self.engine.now(), self.passes[index]);
        if !pass.output {
            self.begin(index + 1);
            return;
        }
        let rank = &mut self.ranks[0];
        let record = rank.record(Kind::Output, pass, self.blocks, now);
        let end = rank.output(now, &record, &mut self.records);
        self.engine.schedule_at(end, Event::OutputComputed);
    }

    /// Records the counters of all ranks, and begins the next pass.
    fn on_output(&mut self) {
        let (at, index) = (self.engine.now(), self.progress[0].step.0);
        let pass = self.passes[index].index;
        for (place, rank) in (0..).zip(&self.ranks) {
            let counters = [
                (Counter::BytesRead, rank.bytes_read().0),
                (Counter::Resident, rank.memory.weights.0),
                (Counter::Unreclaimable, rank.memory.main_memory().0),
            ];
            let reading = |(counter, value)| Reading { device: place, counter, pass, at, value };
            self.readings.extend(counters.map(reading));
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
        let record = self.ranks[from].record(Kind::Send, pass, step.1.saturating_sub(1), now);
        self.records.push(Record { resource: Resource::Tx, bytes: bytes.0, peer: Some(to as u16), ..record });
        let item = (to, Message { step, from, bytes }, self.records.len() - 1);
        match self.network.send(now, [from, to], bytes, item) {
            Some((item, delivery)) => self.schedule_delivery(item, delivery),
            None => self.poll_links(),
        }
    }

    /// Schedules the arrivals of messages whose delivery is known by now, and the next event of the links.
    fn poll_links(&mut self) {
        while let Some((item, delivery)) = self.network.next_delivery(self.engine.now()) {
            self.schedule_delivery(item, delivery);
        }
        if let Some(at) = self.network.next_event() {
            self.engine.set_timer(self.wifi_timer, at, Event::Wifi);
        }
    }

    /// Schedules the arrival of a message whose delivery is known.
    fn schedule_delivery(&mut self, (to, message, record): InFlight, delivery: Delivery) {
        self.records[record].end = delivery.end.max(self.records[record].start);
        self.engine.schedule_at(delivery.arrival, Event::Delivered(to, message));
    }

    fn on_delivery(&mut self, place: usize, message: Message) {
        let now = self.engine.now();
        let progress = &mut self.progress[place];
        *progress.received.entry(message.step).or_insert(0) += 1;
        let waiting_since = progress.waiting_since.filter(|_| progress.step == message.step);
        self.record_receive(
            place,
            message.step,
            waiting_since.unwrap_or(now),
            message.bytes,
            Some(message.from),
        );
        match (waiting_since, message.step.1) {
            (None, _) => {}
            (Some(_), 0) => self.compute(place, 0),
            (Some(_), _) => self.advance(place),
        }
    }

    /// Continues all ranks with the sum (over-the-air all-reduce).
    fn on_sum(&mut self, step: BlockStep) {
        let bytes = self.tensor.partial_bytes(self.embedding, self.passes[step.0].tokens);
        for place in 0..self.ranks.len() {
            let since = self.progress[place].waiting_since.unwrap_or(self.engine.now());
            self.record_receive(place, step, since, bytes, None);
            self.finish_all_reduce(place);
        }
    }

    fn record_receive(
        &mut self,
        place: usize,
        step: BlockStep,
        since: Nanos,
        bytes: Bytes,
        from: Option<usize>,
    ) {
        let (now, pass) = (self.engine.now(), self.passes[step.0]);
        let record = self.ranks[place].record(Kind::Receive, pass, step.1.saturating_sub(1), since);
        self.records.push(Record {
            resource: Resource::Rx,
            end: now,
            bytes: bytes.0,
            peer: from.map(|from| from as u16),
            ..record
        });
    }
}
