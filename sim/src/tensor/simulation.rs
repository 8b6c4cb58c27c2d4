//! Simulation of a tensor-parallel run: the order in which the ranks compute and send.
//!
//! The head computes the embedding of a pass and sends it to every worker. Then, block by block, a rank computes its
//! slice, takes part in the all-reduce, and begins the next block when it has the sum. Nothing else synchronises the
//! ranks, so a rank may be ahead of others. After the last block the head computes the output.
//!
//! What a rank sends depends on the number of messages it has received ([`hearth_core::tensor::collective`]); messages
//! of a later block wait for it. An over-the-air all-reduce sends no messages: when the last rank has finished, all
//! have the sum after the given time.

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

/// The position of a rank: the pass, and 0 for the embedding or 1 + the block.
type Stage = (usize, u32);

/// An event of a rank.
#[derive(Debug, Clone, Copy)]
enum Event {
    /// The head has computed the embedding.
    Embedded,
    Computed(usize),
    Delivered(usize, Message),
    /// All ranks have the sum of a stage (over-the-air all-reduce).
    Summed(Stage),
    Sampled,
    /// A Wi-Fi transmission may be over.
    Wifi,
}

#[derive(Debug, Clone, Copy)]
struct Message {
    stage: Stage,
    from: usize,
    bytes: Bytes,
}

/// A message on a link: its receiver, and the index of the record of its sending.
type InFlight = (usize, Message, usize);

/// The progress of a rank.
#[derive(Debug, Clone)]
struct Progress {
    stage: Stage,
    /// Since when it waits in that stage.
    waiting_since: Option<Nanos>,
    /// Messages sent in that stage.
    sent: usize,
    /// Messages received, of stages that are not over.
    received: BTreeMap<Stage, usize>,
}

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
    /// 2 L.
    blocks: u32,
    /// Ranks that have reached a stage (over-the-air all-reduce).
    gathered: BTreeMap<Stage, usize>,
    ended: bool,
    records: Vec<Record>,
    readings: Vec<Reading>,
}

impl<'a> TensorSimulation<'a> {
    pub fn new(input: &Input<'a>, tensor: &'a TensorPlan, ranks: Vec<Rank<'a>>, passes: &'a [Pass]) -> Self {
        let start = Progress { stage: (0, 0), waiting_since: Some(0), sent: 0, received: BTreeMap::new() };
        let shape = &input.cluster.model.shape;
        let mut engine = Engine::new();
        let wifi_timer = engine.timer();
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
            gathered: BTreeMap::new(),
            ended: false,
            records: Vec::new(),
            readings: Vec::new(),
        }
    }

    pub fn run(mut self) -> Result<(Vec<Record>, Vec<Reading>), SimError> {
        self.begin(0);
        while !self.ended
            && let Some(event) = self.engine.next_event()
        {
            if self.engine.now() > MAX_SIM_TIME {
                let tokens = self.readings.iter().filter(|reading| reading.device == 0).count() as u32;
                return Err(SimError::TooLong { tokens, at: Seconds::from_nanos(self.engine.now()) });
            }
            match event {
                Event::Embedded => self.send_embedding(),
                Event::Computed(place) => self.begin_all_reduce(place),
                Event::Delivered(place, message) => self.delivered(place, message),
                Event::Summed(stage) => self.summed(stage),
                Event::Sampled => self.sampled(),
                Event::Wifi => self.poll_links(),
            }
        }
        Ok((self.records, self.readings))
    }

    /// Begins a pass on the head.
    fn begin(&mut self, index: usize) {
        let (now, pass) = (self.engine.now(), self.passes[index]);
        self.progress[0].stage = (index, 0);
        let end = now.saturating_add(self.ranks[0].embed(pass).to_nanos());
        let record = self.ranks[0].record(Kind::Embed, pass, 0, now);
        let cost = Some(hearth_schema::trace::Cost { cpu: end - now, ..Default::default() });
        self.records.push(Record { end, cost, ..record });
        self.engine.at(end, Event::Embedded);
    }

    /// Sends the embedding to every worker, and begins the head's first block.
    fn send_embedding(&mut self) {
        let stage = self.progress[0].stage;
        let rows = Bytes(4 * u64::from(self.embedding)) * u64::from(self.passes[stage.0].tokens);
        for to in 1..self.ranks.len() {
            self.send(0, to, stage, rows);
        }
        self.compute(0, 0);
    }

    fn compute(&mut self, place: usize, block: u32) {
        let now = self.engine.now();
        let progress = &mut self.progress[place];
        progress.received.remove(&progress.stage);
        progress.stage.1 = block + 1;
        (progress.waiting_since, progress.sent) = (None, 0);
        let pass = self.passes[progress.stage.0];
        let rank = &mut self.ranks[place];
        let record = rank.record(Kind::Compute, pass, block, now);
        let end = rank.block(now, block as usize, pass, &record, &mut self.records);
        self.engine.at(end, Event::Computed(place));
    }

    /// Enters the all-reduce with a partial result.
    fn begin_all_reduce(&mut self, place: usize) {
        let (now, stage) = (self.engine.now(), self.progress[place].stage);
        self.progress[place].waiting_since = Some(now);
        if self.all_reduce.pattern == AllReduce::OverTheAir && self.ranks.len() > 1 {
            let gathered = self.gathered.entry(stage).or_insert(0);
            *gathered += 1;
            if *gathered == self.ranks.len() {
                self.gathered.remove(&stage);
                self.engine.after(self.air_time.to_nanos(), Event::Summed(stage));
            }
        } else {
            self.advance(place);
        }
    }

    /// Sends the messages that are due, and continues if the sum is complete.
    fn advance(&mut self, place: usize) {
        let stage = self.progress[place].stage;
        let received = self.progress[place].received.get(&stage).copied().unwrap_or(0);
        let due = self.all_reduce.due(place, received);
        let tokens = self.passes[stage.0].tokens;
        let bytes = self.all_reduce.message(self.tensor.partial_bytes(self.embedding, tokens));
        for number in self.progress[place].sent..due {
            self.send(place, self.all_reduce.receiver(place, number), stage, bytes);
        }
        self.progress[place].sent = due;
        if received >= self.all_reduce.awaited(place) {
            self.finish_all_reduce(place);
        }
    }

    /// Continues after an all-reduce.
    fn finish_all_reduce(&mut self, place: usize) {
        let (now, (index, block)) = (self.engine.now(), self.progress[place].stage);
        if block < self.blocks {
            self.compute(place, block);
        } else if place > 0 {
            let progress = &mut self.progress[place];
            progress.received.remove(&(index, block));
            progress.stage = (index + 1, 0);
            progress.waiting_since = Some(now);
            if progress.received.contains_key(&progress.stage) {
                self.compute(place, 0);
            }
        } else {
            self.progress[0].received.remove(&(index, block));
            self.output(index);
        }
    }

    /// Ends a pass on the head.
    fn output(&mut self, index: usize) {
        let (now, pass) = (self.engine.now(), self.passes[index]);
        if !pass.output {
            self.begin(index + 1);
            return;
        }
        let rank = &mut self.ranks[0];
        let record = rank.record(Kind::Output, pass, self.blocks, now);
        let end = rank.output(now, &record, &mut self.records);
        self.engine.at(end, Event::Sampled);
    }

    fn sampled(&mut self) {
        let (at, index) = (self.engine.now(), self.progress[0].stage.0);
        let pass = self.passes[index].index;
        for (place, rank) in (0..).zip(&self.ranks) {
            let counters = [
                (Counter::BytesRead, rank.read().0),
                (Counter::Resident, rank.held.weights.0),
                (Counter::Unreclaimable, rank.held.main().0),
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

    fn send(&mut self, from: usize, to: usize, stage: Stage, bytes: Bytes) {
        let now = self.engine.now();
        let pass = self.passes[stage.0];
        let record = self.ranks[from].record(Kind::Send, pass, stage.1.saturating_sub(1), now);
        self.records.push(Record { resource: Resource::Tx, bytes: bytes.0, peer: Some(to as u16), ..record });
        let item = (to, Message { stage, from, bytes }, self.records.len() - 1);
        match self.network.send(now, [from, to], bytes, item) {
            Some((item, delivery)) => self.schedule_delivery(item, delivery),
            None => self.poll_links(),
        }
    }

    /// Handles the messages that have left, and sets the timer for the next.
    fn poll_links(&mut self) {
        while let Some((item, delivery)) = self.network.next_delivery(self.engine.now()) {
            self.schedule_delivery(item, delivery);
        }
        if let Some(at) = self.network.next_event() {
            self.engine.set(self.wifi_timer, at, Event::Wifi);
        }
    }

    /// Schedules the arrival of a message that has left.
    fn schedule_delivery(&mut self, (to, message, record): InFlight, delivery: Delivery) {
        self.records[record].end = delivery.left.max(self.records[record].start);
        self.engine.at(delivery.arrives, Event::Delivered(to, message));
    }

    fn delivered(&mut self, place: usize, message: Message) {
        let now = self.engine.now();
        let progress = &mut self.progress[place];
        *progress.received.entry(message.stage).or_insert(0) += 1;
        let waiting_since = progress.waiting_since.filter(|_| progress.stage == message.stage);
        self.record_receive(
            place,
            message.stage,
            waiting_since.unwrap_or(now),
            message.bytes,
            Some(message.from),
        );
        match (waiting_since, message.stage.1) {
            (None, _) => {}
            (Some(_), 0) => self.compute(place, 0),
            (Some(_), _) => self.advance(place),
        }
    }

    /// Gives all ranks the sum (over-the-air all-reduce).
    fn summed(&mut self, stage: Stage) {
        let bytes = self.tensor.partial_bytes(self.embedding, self.passes[stage.0].tokens);
        for place in 0..self.ranks.len() {
            let since = self.progress[place].waiting_since.unwrap_or(self.engine.now());
            self.record_receive(place, stage, since, bytes, None);
            self.finish_all_reduce(place);
        }
    }

    fn record_receive(
        &mut self,
        place: usize,
        stage: Stage,
        since: Nanos,
        bytes: Bytes,
        from: Option<usize>,
    ) {
        let (now, pass) = (self.engine.now(), self.passes[stage.0]);
        let record = self.ranks[place].record(Kind::Receive, pass, stage.1.saturating_sub(1), since);
        self.records.push(Record {
            resource: Resource::Rx,
            end: now,
            bytes: bytes.0,
            peer: from.map(|from| from as u16),
            ..record
        });
    }
}
