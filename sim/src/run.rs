//! What happens when a plan is run on modelled devices?
//!
//! One world: a station for each device of the plan, the links between them, and the engine that orders their
//! events. The schedule says what is done, the stations how long it takes; the trace is the executor's.
//!
//! Which pass enters when the head is free is `hearth_core::schedule::Generation`'s to say. Weights are on disk when
//! the run begins, unless [`Options::warm`]; those in GPU memory are loaded already.
//!
//! What happens to the devices meanwhile is a scenario's business: loads, memory that others take, devices that leave
//! ([`Surroundings`]; [`crate::agenda`], [`crate::renewal`]).
//!
//! Plans that slice layers run in [`crate::tensor`], a phone whose GPU and NPU compute alone in [`crate::soc`].
//!
//! Not here: of what stations and links are made ([`crate::setting`]), and speeds and times as numbers, which
//! `hearth_core::metrics` computes from the trace.

use std::borrow::Cow;
use std::sync::Arc;

use hearth_core::Cluster;
use hearth_core::draft;
use hearth_core::replan::Replanner;
use hearth_core::schedule::Generation;
use hearth_core::schedule::Schedule;
use hearth_core::schedule::passes;
use hearth_profiles::device::Device;
use hearth_profiles::model::{DigestMatch, ModelProfile};
use hearth_profiles::{Bytes, Document, Seconds};
use hearth_schema::Plan;
use hearth_schema::happenings::Sort;
use hearth_schema::pass::Pass;
use hearth_schema::residency::Residency;
use hearth_schema::scenario::Workload;
use hearth_schema::trace::Counter;
use hearth_schema::trace::Header;
use hearth_schema::trace::Kind;
use hearth_schema::trace::Origin;
use hearth_schema::trace::Outcome;
use hearth_schema::trace::Reading;
use hearth_schema::trace::Record;
use hearth_schema::trace::Resource;
use hearth_schema::trace::Trace;
use hearth_schema::trace::TracedDevice;

use crate::absence::{Absence, Held};
use crate::acceptance::Acceptance;
use crate::agenda::Agenda;
use crate::budget::Budget;
use crate::engine::{Engine, Nanos, Timer};
use crate::error::SimError;
use crate::lines::begun;
use crate::page_cache::CHUNK_BYTES;
use crate::page_cache::of_device::unvalidated;
use crate::resource::link::{Delivery, Post};
use crate::setting;
use crate::station::{Desk, Message, Outgoing, Station};

/// More than a model of a terabyte has with the usual stream buffer.
const MOST_PIECES: u64 = 1 << 24;

/// What is simulated.
#[derive(Debug, Clone, Copy)]
pub struct Input<'a> {
    /// The scenario with everything resolved.
    pub cluster: &'a Cluster,
    /// The plan to run.
    pub plan: &'a Plan,
    /// How closely it is looked at.
    pub options: &'a Options,
}

/// How a run is simulated.
#[derive(Debug, Clone, PartialEq)]
pub struct Options {
    /// The unit of the page cache, but for a device that manages its residency in pieces of its own. Finer is
    /// slower and closer to the kernel.
    pub chunk: Bytes,
    /// Whether memory is at the start as tokens before the run would have left it.
    pub warm: bool,
    /// Whether every memory is taken to hold whatever a device pins, and nothing ends because it does not fit.
    pub ignore_memory: bool,
    /// How much more than its profile says a device's process may hold of its room for weights. How much it is, the
    /// seed decides: near the edge where a share just fits, this and where the first fault of a token lies (the
    /// embedding row, which aligns the read-ahead) decide what a token reads.
    pub process_spread: Bytes,
    /// Whether a row of the embedding is read with what lies around it, as an engine reads it that tells the system
    /// nothing of the table.
    pub rows_read_around: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            chunk: Bytes(CHUNK_BYTES),
            warm: false,
            ignore_memory: false,
            process_spread: Bytes::ZERO,
            rows_read_around: false,
        }
    }
}

/// What happens around the ring while it runs.
#[derive(Debug, Clone, Copy, Default)]
pub struct Surroundings<'a> {
    /// The scenario's events.
    pub events: &'a [hearth_schema::events::Event],
    /// Who plans again when a device is gone; nobody if absent.
    pub replanner: Option<&'a dyn Replanner>,
}

/// What a run comes to.
#[derive(Debug, Clone)]
pub struct Run {
    /// What was done when.
    pub trace: Trace,
    /// The plans made in mid-run, in order.
    pub plans: Vec<Plan>,
    /// Which of the events did not come to happen before the run ended.
    pub not_come: Vec<usize>,
}

/// Something that happens at a place in the ring.
#[derive(Debug, Clone, Copy)]
pub enum Event {
    /// A step of known length is over, or a touch is tried again.
    Wake(usize),
    /// The processor may be done with something.
    Processor(usize),
    /// Reads may have arrived.
    Disk(usize),
    /// The helper goes on.
    Helper(usize),
    /// A transmission on the air may be over.
    Air,
    /// Activations arrive.
    Deliver(usize, Message),
    /// The agenda has something due.
    Agenda,
}

/// Longer than anybody would wait, three years, and far from the end of the clock.
pub(crate) const LONGEST: Nanos = 100_000_000_000_000_000;

/// More events than this without a line in the trace are a ring that turns and gets nowhere.
/// source: assumed, a hundred times what the longest step of a large model takes
const MOST_IDLE_EVENTS: u32 = 20_000_000;

/// A message on a link: its receiver's seat, and the index of the record of its sending.
pub(crate) type Sent = (usize, Message, usize);

#[derive(Debug, Clone)]
pub(crate) struct World<'a> {
    pub(crate) input: Input<'a>,
    pub(crate) surroundings: Surroundings<'a>,
    pub(crate) engine: Engine<Event>,
    /// By seat: the first plan's devices in ring order, then those that joined the ring later.
    pub(crate) stations: Vec<Station<'a>>,
    /// The members of the cluster at the seats.
    pub(crate) seats: Vec<usize>,
    /// The seats of the ring, in its order; the head's is 0 in every plan.
    pub(crate) ring: Vec<usize>,
    /// By seat.
    pub(crate) budgets: Vec<Budget>,
    pub(crate) post: Post<Sent>,
    /// The members of the cluster in the order in which links know them.
    linked: Vec<usize>,
    air_timer: Timer,
    pub(crate) generation: Generation,
    acceptance: Acceptance,
    /// The passes begun.
    passes: Vec<Pass>,
    /// Tokens that are out, of all sequences.
    pub(crate) tokens: u32,
    pub(crate) agenda: Agenda,
    pub(crate) agenda_timer: Timer,
    pub(crate) absence: Absence,
    /// A new plan is under way to the devices until then.
    pub(crate) ready: Nanos,
    /// A device is back and wants to be taken in between tokens.
    pub(crate) rejoins: bool,
    /// Plans made in mid-run.
    pub(crate) plans: Vec<Plan>,
    pub(crate) outcome: Outcome,
    pub(crate) ended: bool,
    pub(crate) header: Header,
    pub(crate) records: Vec<Record>,
    readings: Vec<Reading>,
}

/// Runs a plan while nothing else happens.
pub fn simulate(input: &Input) -> Result<Trace, SimError> {
    simulate_in(input, &Surroundings::default()).map(|run| run.trace)
}

/// Runs a plan while these things happen.
pub fn simulate_in(input: &Input, surroundings: &Surroundings) -> Result<Run, SimError> {
    let devices = check(input)?;
    crate::renewal::check(input, surroundings)?;
    let header = header(input, &devices);
    if let Some(tensor) = input.plan.kind.tensor() {
        let trace = crate::tensor::simulate(input, tensor, &devices, header)?;
        return Ok(Run { trace, plans: vec![], not_come: vec![] });
    }
    let ignore = input.options.ignore_memory;
    let budgets = devices.iter().enumerate().map(|(place, device)| setting::budget(input, place, device));
    let budgets: Vec<Option<Budget>> = budgets.collect();
    let shortages: Vec<_> = budgets.iter().flatten().flat_map(|budget| budget.shortages.clone()).collect();
    let drafts = budgets.iter().all(Option::is_some);
    let budgets: Vec<Budget> = budgets.into_iter().flatten().collect();
    if !drafts || !shortages.is_empty() && !ignore {
        // What would have been asked, as far as it does not depend on what is accepted.
        let passes = passes(&Workload { speculation: None, ..input.cluster.workload.clone() });
        let holds = input.plan.only_simulated().is_some();
        let unreclaimable = budgets.iter().filter(|_| holds).map(|budget| budget.unreclaimable);
        let (records, readings) = (Vec::new(), crate::tensor::needed(unreclaimable));
        let (happenings, outcome) = (Vec::new(), Outcome::OutOfMemory);
        return Ok(Run {
            trace: Trace { header, passes, records, readings, shortages, happenings, outcome },
            plans: vec![],
            not_come: (0..surroundings.events.len()).collect(),
        });
    }
    if let Some(soc) = crate::soc::alone(input, surroundings, devices[0], &budgets[0]) {
        let trace = crate::soc::simulate(input, soc, devices[0], &budgets[0], header)?;
        return Ok(Run { trace, plans: vec![], not_come: vec![] });
    }
    let models = setting::models(input);
    let mut world = World::new(*input, *surroundings, &devices, budgets, &models, header);
    world.run()?;
    let World { header, mut records, readings, passes, agenda, outcome, plans, .. } = world;
    records.sort_by_key(|record| record.start);
    let not_come = agenda.not_come();
    let mut happenings = agenda.happenings;
    happenings.sort_by_key(|happening| happening.start);
    let shortages = Vec::new();
    let trace = Trace { header, passes, records, readings, shortages, happenings, outcome };
    Ok(Run { trace, plans, not_come })
}

impl<'a> World<'a> {
    fn new(
        input: Input<'a>,
        surroundings: Surroundings<'a>,
        devices: &[&'a Device],
        budgets: Vec<Budget>,
        models: &'a [Cow<'a, ModelProfile>],
        header: Header,
    ) -> Self {
        let mut engine = Engine::new();
        let plan = Arc::new(input.plan.clone());
        let stations = devices
            .iter()
            .enumerate()
            .map(|(place, device)| {
                let schedule = Schedule::new(plan.clone(), place);
                let holds = plan.devices[place].residency.holds();
                let mut parts =
                    setting::parts(input, device, &models[place], schedule, place, &budgets[place]);
                if input.options.warm || holds {
                    setting::warm(&mut parts.storage, &parts.layout, &parts.keeper);
                }
                Station::new(parts, &mut engine)
            })
            .collect();
        let member = |name: &String| input.cluster.members.iter().position(|it| it.name == *name);
        let (air_timer, agenda_timer) = (engine.timer(), engine.timer());
        let mut world = Self {
            input,
            surroundings,
            engine,
            stations,
            seats: plan.devices.iter().filter_map(|device| member(&device.name)).collect(),
            ring: (0..devices.len()).collect(),
            budgets,
            post: Post::new(setting::links(input)),
            linked: setting::linked(input),
            air_timer,
            generation: Generation::new(&input.cluster.workload),
            acceptance: Acceptance::new(input.cluster.seed, &input.cluster.workload),
            passes: Vec::new(),
            tokens: 0,
            agenda: Agenda::new(surroundings.events),
            agenda_timer,
            absence: Absence::new(input.cluster.members.len()),
            ready: 0,
            rejoins: false,
            plans: Vec::new(),
            outcome: Outcome::Ok,
            ended: false,
            header,
            records: Vec::new(),
            readings: Vec::new(),
        };
        world.set_agenda();
        world
    }

    fn run(&mut self) -> Result<(), SimError> {
        self.settle_in();
        self.begin()?;
        let (mut idle, mut lines) = (0, 0);
        while !self.ended {
            let event = self.engine.next_event().filter(|_| idle < MOST_IDLE_EVENTS);
            let Some(event) = event else {
                let (tokens, at) = (self.tokens, Seconds::from_nanos(self.engine.now()));
                return Err(SimError::StandsStill { tokens, at });
            };
            if self.engine.now() > LONGEST {
                let (tokens, at) = (self.tokens, Seconds::from_nanos(self.engine.now()));
                return Err(SimError::TooLong { tokens, at });
            }
            idle = if self.records.len() == lines { idle + 1 } else { 0 };
            lines = self.records.len();
            match event {
                Event::Wake(place) => self.at(place, Station::wake)?,
                Event::Processor(place) => self.at(place, Station::processor)?,
                Event::Disk(place) => self.at(place, Station::arrivals)?,
                Event::Air => self.settle(),
                Event::Deliver(place, message) => self.arrive(place, message)?,
                Event::Agenda => self.look_at_agenda()?,
                Event::Helper(place) => self.at(place, |station, desk| {
                    station.help(desk);
                    Ok(())
                })?,
            }
            self.begin()?;
        }
        for place in 0..self.stations.len() {
            self.at(place, |station, desk| {
                station.flush(desk);
                Ok(())
            })?;
        }
        Ok(())
    }

    /// The head takes up the next pass if it is free and the pass may begin.
    fn begin(&mut self) -> Result<(), SimError> {
        while self.engine.now() >= self.ready
            && self.stations[0].is_free()
            && let Some(pass) = self.generation.begin()
        {
            self.passes.push(pass);
            self.at(0, |station, desk| station.begin(pass, desk))?;
        }
        Ok(())
    }

    pub(crate) fn at(
        &mut self,
        seat: usize,
        act: impl FnOnce(&mut Station<'a>, &mut Desk) -> Result<(), SimError>,
    ) -> Result<(), SimError> {
        let mut outgoing = Vec::new();
        let mut desk = Desk { engine: &mut self.engine, records: &mut self.records, outgoing: &mut outgoing };
        act(&mut self.stations[seat], &mut desk)?;
        if !self.ended && !self.stations[seat].storage.view().view().survives() {
            let what = "its system killed the process: nothing is left to compress, and page cache is scarce";
            self.happened(Sort::OutOfMemory, Some(self.name(seat)), self.engine.now(), what.into());
            (self.outcome, self.ended) = (Outcome::Killed, true);
        }
        let plans = self.plans.len();
        for sent in outgoing {
            if self.plans.len() != plans {
                // A token has led to another plan: what follows it belongs to the ring that was given up.
                break;
            }
            match sent {
                Outgoing::Send(to, message) => self.send(seat, self.ring[to], message),
                Outgoing::Output(pass) => self.output(pass)?,
            }
        }
        Ok(())
    }

    fn send(&mut self, from: usize, to: usize, message: Message) {
        let now = self.engine.now();
        if self.is_cut(from, to) {
            self.absence.hold(Held { from, to, message, unsent: Some(now) });
        } else {
            self.put_on_the_way(from, to, message, now);
        }
    }

    /// Sends a message that was handed over then.
    pub(crate) fn put_on_the_way(&mut self, from: usize, to: usize, message: Message, handed: Nanos) {
        let now = self.engine.now();
        let line = begun(from, Resource::Tx, Kind::Send, (message.pass.index, message.sent_in), handed);
        self.records.push(Record { end: now, bytes: message.bytes.0, peer: Some(to as u16), ..line });
        let item = (to, message, self.records.len() - 1);
        let way = [from, to].map(|seat| self.place_on_links(seat));
        if let Some((item, delivery)) = self.post.send(now, way, message.bytes, item) {
            self.left(item, delivery);
        }
        self.settle();
    }

    fn place_on_links(&self, seat: usize) -> usize {
        // Every member is linked, and devices that join the ring later may do so in any order.
        self.linked.iter().position(|&member| member == self.seats[seat]).unwrap_or(seat)
    }

    /// Looks which messages have left over the air, and when to look again.
    pub(crate) fn settle(&mut self) {
        while let Some((item, delivery)) = self.post.settled(self.engine.now()) {
            self.left(item, delivery);
        }
        if let Some(at) = self.post.next_event() {
            self.engine.set(self.air_timer, at, Event::Air);
        }
    }

    /// A message is on its last way to its receiver.
    fn left(&mut self, (to, message, record): Sent, delivery: Delivery) {
        self.records[record].end = delivery.left.max(self.records[record].start);
        let message = Message { at: delivery.arrives, ..message };
        self.engine.at(delivery.arrives, Event::Deliver(to, message));
    }

    /// The tokens of a pass are out: the next may enter, and the counters are read.
    fn output(&mut self, pass: u32) -> Result<(), SimError> {
        let (accepted, drafted) = match self.passes.get(pass as usize) {
            Some(&begun) => (self.acceptance.of(begun), begun.drafted),
            None => (0, 0),
        };
        let tokens = self.generation.output(pass, accepted)?;
        self.ended |= self.generation.is_over();
        let at = self.engine.now();
        for &seat in &self.ring {
            let station = &self.stations[seat];
            let counters = [
                (Counter::BytesRead, station.read().0),
                (Counter::Resident, station.resident().0),
                (Counter::Unreclaimable, self.unreclaimable(seat).0),
            ];
            self.readings.extend(counters.map(|(counter, value)| Reading {
                device: seat as u16,
                counter,
                pass,
                at,
                value,
            }));
        }
        if drafted > 0 {
            let (counter, value) = (Counter::Accepted, u64::from(accepted));
            self.readings.push(Reading { device: 0, counter, pass, at, value });
        }
        self.tokens_out(tokens)
    }
}

/// The plan's devices in ring order, if everything fits together.
pub(crate) fn check<'a>(input: &Input<'a>) -> Result<Vec<&'a Device>, SimError> {
    let (cluster, plan) = (input.cluster, input.plan);
    plan.validate()?;
    if !((128 << 10)..=(8 << 20)).contains(&input.options.chunk.0) {
        return Err(SimError::Chunk { bytes: input.options.chunk.0 });
    }
    let same_shape = cluster.model.shape_digest() == plan.model.shape_digest;
    let same_file = plan
        .model
        .digest
        .as_ref()
        .is_some_and(|digest| cluster.model.matches(digest) != DigestMatch::Different);
    if plan.model.layers != cluster.model.shape.layers.0 || !(same_shape || same_file) {
        let (planned, given) = (plan.model.name.clone(), cluster.model.name.clone());
        return Err(SimError::OtherModel { planned, given });
    }
    let mut devices = Vec::new();
    for (place, planned) in plan.devices.iter().enumerate() {
        let name = planned.name.clone();
        let Some(member) = cluster.member(&name) else { return Err(SimError::UnknownDevice { place, name }) };
        let lack = match &member.device.gpu {
            _ if planned.gpu_layers == 0 => None,
            None => Some("has no `gpu`"),
            Some(gpu) if gpu.matvec.is_empty() => Some("has no rate in `gpu.matvec`"),
            Some(_) => None,
        };
        if let Some(lack) = lack {
            return Err(SimError::NoGpu { place, name, layers: planned.gpu_layers, lack });
        }
        let residency = planned.residency;
        let piece = residency.piece().0.max(1);
        if residency.policy == Residency::Managed && cluster.model.total_bytes().0 / piece > MOST_PIECES {
            return Err(SimError::Pieces { place, bytes: piece });
        }
        devices.push(&member.device);
    }
    if let Some(tensor) = plan.kind.tensor() {
        tensor.validate_cover(plan, &cluster.model.shape)?;
    }
    cluster.links.carry(plan)?;
    draft::check(plan, cluster)?;
    Ok(devices)
}

fn header(input: &Input, devices: &[&Device]) -> Header {
    let names = input.plan.devices.iter().map(|planned| &planned.name);
    Header {
        schema: Trace::SCHEMA.into(),
        origin: Origin::Simulated,
        scenario: input.plan.scenario.name.clone(),
        plan: input.plan.digest(),
        model: input.plan.model.name.clone(),
        kind: input.plan.kind.parallelism(),
        seed: input.cluster.seed,
        version: env!("CARGO_PKG_VERSION").into(),
        devices: names.zip(devices).map(|(name, device)| traced(name, device)).collect(),
    }
}

/// A device as the trace knows it.
pub(crate) fn traced(name: &str, device: &Device) -> TracedDevice {
    TracedDevice {
        name: name.to_owned(),
        profile: Some(hearth_schema::digest::of(&device.to_yaml())),
        memory_total: device.memory.total.value.0,
        kernel: None,
        unvalidated: unvalidated(device),
        policy: Some(device.memory.page_cache),
    }
}
