//! What happens when a plan is run on modelled devices?
//!
//! One world: a station for each device of the plan, the links between them, and the engine that orders their
//! events. The schedule says what is done, the stations how long it takes; the trace is the executor's.
//!
//! Passes of a prompt follow each other into the ring as soon as the head is free; a generated token enters
//! when the one before it is out. Weights are on disk when the run begins, unless [`Options::warm`]; those in
//! GPU memory are loaded already.
//!
//! What happens to the devices meanwhile is a scenario's business: loads, memory that others take, devices that leave
//! ([`Surroundings`]; [`crate::agenda`], [`crate::renewal`]).
//!
//! Not here: speeds and times as numbers. `hearth_schema::metrics` computes them from the trace.

use std::sync::Arc;

use hearth_profiles::device::{Device, Os, PageCachePolicy};
use hearth_profiles::model::DigestMatch;
use hearth_profiles::{Bytes, BytesPerSecond, Document, Seconds};
use hearth_schema::replan::Replanner;
use hearth_schema::residency::Residency;
use hearth_schema::schedule::{Part, Pass, Schedule, passes, visits};
use hearth_schema::trace::{
    Counter, Header, Kind, Origin, Outcome, Reading, Record, Resource, Trace, TracedDevice,
};
use hearth_schema::{Cluster, Plan};

use crate::absence::{Absence, Held};
use crate::agenda::Agenda;
use crate::budget::Budget;
use crate::engine::{Engine, Nanos, Timer};
use crate::error::SimError;
use crate::helper::Helper;
use crate::keeper::Keeper;
use crate::layout::Layout;
use crate::page_cache::{Access, CHUNK_BYTES, Chunk, Fetch, PaperLinear, Policy, TwoList};
use crate::resource::link::Wire;
use crate::resource::{ConstantLink, DiskSpeed, Link};
use crate::station::{Desk, Message, Outgoing, Parts, Station};
use crate::storage::{Storage, chunks_in};
use crate::stream::Stream;

/// The read-ahead of an untuned Linux, where a profile does not say.
const USUAL_READ_AHEAD: Bytes = Bytes(128 << 10);

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
}

impl Default for Options {
    fn default() -> Self {
        Self { chunk: Bytes(CHUNK_BYTES), warm: false }
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
    /// Activations arrive.
    Deliver(usize, Message),
    /// The agenda has something due.
    Agenda,
}

/// More events than this without a line in the trace are a ring that turns and gets nowhere.
/// source: assumed, a hundred times what the longest step of a large model takes
const MOST_IDLE_EVENTS: u32 = 20_000_000;

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
    pub(crate) links: ConstantLink,
    pub(crate) passes: Vec<Pass>,
    /// How many passes have begun.
    pub(crate) begun: usize,
    /// How many passes, in order, need no looking after any more: up to that of the last token that is out.
    pub(crate) done: usize,
    /// Index of the pass whose token must be out before the next pass begins.
    pub(crate) awaited: Option<u32>,
    /// Tokens that are out.
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
    let budgets: Vec<Budget> = devices
        .iter()
        .enumerate()
        .map(|(place, device)| Budget::new(input.plan, place, &input.cluster.model, device))
        .collect();
    let header = header(input, &devices);
    let passes = passes(input.cluster.workload);
    if budgets.iter().any(|budget| !budget.fits) {
        let (records, readings, happenings) = (Vec::new(), Vec::new(), Vec::new());
        let outcome = Outcome::OutOfMemory;
        return Ok(Run {
            trace: Trace { header, passes, records, readings, happenings, outcome },
            plans: vec![],
            not_come: (0..surroundings.events.len()).collect(),
        });
    }
    let mut world = World::new(*input, *surroundings, &devices, budgets, passes, header);
    world.run()?;
    let World { header, mut records, readings, passes, agenda, outcome, plans, .. } = world;
    records.sort_by_key(|record| record.start);
    let not_come = agenda.not_come();
    let mut happenings = agenda.happenings;
    happenings.sort_by_key(|happening| happening.start);
    Ok(Run { trace: Trace { header, passes, records, readings, happenings, outcome }, plans, not_come })
}

impl<'a> World<'a> {
    fn new(
        input: Input<'a>,
        surroundings: Surroundings<'a>,
        devices: &[&'a Device],
        budgets: Vec<Budget>,
        passes: Vec<Pass>,
        header: Header,
    ) -> Self {
        let mut engine = Engine::new();
        let plan = Arc::new(input.plan.clone());
        let stations = devices
            .iter()
            .enumerate()
            .map(|(place, device)| {
                let schedule = Schedule::new(plan.clone(), place);
                let mut parts = parts(input, device, schedule, place, budgets[place]);
                if input.options.warm {
                    warm(&mut parts.storage, &parts.layout, &parts.keeper);
                }
                Station::new(parts, &mut engine)
            })
            .collect();
        let member = |name: &String| input.cluster.members.iter().position(|it| it.name == *name);
        let agenda_timer = engine.timer();
        let mut world = Self {
            input,
            surroundings,
            engine,
            stations,
            seats: plan.devices.iter().filter_map(|device| member(&device.name)).collect(),
            ring: (0..devices.len()).collect(),
            budgets,
            links: links(input),
            passes,
            begun: 0,
            done: 0,
            awaited: None,
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
            idle = if self.records.len() == lines { idle + 1 } else { 0 };
            lines = self.records.len();
            match event {
                Event::Wake(place) => self.at(place, Station::wake)?,
                Event::Processor(place) => self.at(place, Station::processor)?,
                Event::Disk(place) => self.at(place, Station::arrivals)?,
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
            && self.awaited.is_none()
            && self.begun < self.passes.len()
            && self.stations[0].is_free()
        {
            let pass = self.passes[self.begun];
            self.begun += 1;
            if pass.output {
                self.awaited = Some(pass.index);
            }
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
        for sent in outgoing {
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
            self.put_on_the_air(from, to, message, now);
        }
    }

    /// Sends a message that was handed over then.
    pub(crate) fn put_on_the_air(&mut self, from: usize, to: usize, message: Message, handed: Nanos) {
        let now = self.engine.now();
        let delivery = self.links.send(now, from, to, message.bytes);
        let left = delivery.arrives.saturating_sub(self.links.latency(from, to).to_nanos());
        self.records.push(Record {
            device: from as u16,
            resource: Resource::Tx,
            kind: Kind::Send,
            pass: message.pass.index,
            round: message.sent_in,
            layers: None,
            start: handed,
            end: left.max(now),
            bytes: message.bytes.0,
            peer: Some(to as u16),
            cost: None,
        });
        let message = Message { at: delivery.arrives, ..message };
        self.engine.at(delivery.arrives, Event::Deliver(to, message));
    }

    /// A token is out: the next may enter, and the counters are read.
    fn output(&mut self, pass: u32) -> Result<(), SimError> {
        self.awaited = None;
        self.done = self.begun;
        self.ended = self.begun == self.passes.len();
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
        self.token_out()
    }
}

/// A device's part of the plan of its schedule, with an empty page cache.
pub(crate) fn parts<'a>(
    input: Input<'a>,
    device: &'a Device,
    schedule: Schedule,
    seat: usize,
    budget: Budget,
) -> Parts<'a> {
    let (plan, place, memory) = (schedule.plan().clone(), schedule.device(), budget.cache);
    let residency = plan.devices[place].residency;
    let managed = residency.policy == Residency::Managed;
    let chunk = if managed { residency.piece() } else { input.options.chunk };
    let layout = Layout::new(&plan, place, &input.cluster.model, chunk);
    let storage = storage(device, &layout, memory, chunk);
    let keeper = if managed {
        let visits = chunks_of(&layout, &visits(&plan, place));
        let (cores, chunks) = (device.cpu.cores, layout.chunks());
        Keeper::Managed(Box::new(Stream::new(seat, residency, &visits, memory, cores, chunks)))
    } else {
        Keeper::Ahead(Helper::new(seat, residency, chunk, storage.window()))
    };
    Parts {
        seat,
        device,
        model: &input.cluster.model,
        kv_element: Bytes(plan.kv_cache.element_bytes()),
        schedule,
        seed: input.cluster.seed,
        storage,
        layout,
        keeper,
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
    cluster.links.carry(plan)?;
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
    }
}

/// What of a device has not been checked against a machine.
fn unvalidated(device: &Device) -> Option<String> {
    match (device.memory.page_cache, device.os) {
        (PageCachePolicy::TwoList, Os::Linux) => None,
        (PageCachePolicy::TwoList, os) => Some(format!("page cache of {os:?} as classic Linux")),
        (PageCachePolicy::PaperLinear, _) => {
            Some("page cache by the paper's formula, not by a kernel".into())
        }
    }
}

/// The chunks of each visit, in the order of use.
fn chunks_of(layout: &Layout, visits: &[Vec<Part>]) -> Vec<Vec<Chunk>> {
    let chunks = |parts: &Vec<Part>| parts.iter().flat_map(|part| layout.part(part)).collect();
    visits.iter().map(chunks).collect()
}

/// Leaves memory as tokens before the run would have: a share that fits is there; of one that does not, what the page
/// cache keeps when it is read round and round.
fn warm(storage: &mut Storage, layout: &Layout, keeper: &Keeper) {
    let chunks: Vec<Chunk> = match keeper {
        Keeper::Ahead(_) => layout.own().chain(layout.own()).collect(),
        Keeper::Managed(stream) => stream.kept().collect(),
    };
    let cache = storage.cache().cache();
    for chunk in chunks {
        if cache.access(chunk) == Access::Absent && cache.prefetch_now(chunk) == Fetch::Started {
            cache.arrived(chunk);
        }
    }
}

fn storage(device: &Device, layout: &Layout, cache: Bytes, chunk: Bytes) -> Storage {
    let sequential = device.disk.sequential.value;
    let or_sequential = |rate: &Option<hearth_profiles::Sourced<BytesPerSecond>>| {
        rate.as_ref().map_or(sequential, |rate| rate.value)
    };
    let explicit = or_sequential(&device.disk.populate);
    let speed = DiskSpeed {
        bandwidth: BytesPerSecond(sequential.0.max(explicit.0)),
        fault: or_sequential(&device.disk.fault),
        explicit,
        throttle: device.disk.limit.as_ref().map(|limit| limit.value),
        latency: device.disk.latency.as_ref().map_or(Seconds(0.0), |latency| latency.value),
    };
    let read_ahead = read_ahead(device, chunk);
    let capacity = chunks_in(cache, chunk);
    let share = layout.chunks();
    let policy = match device.memory.page_cache {
        PageCachePolicy::PaperLinear => Policy::PaperLinear(PaperLinear::new(share, capacity)),
        PageCachePolicy::TwoList => {
            let two_list = TwoList::new(share, capacity).with_size(cache.0 >> 30);
            Policy::TwoList(Box::new(two_list))
        }
    };
    Storage::with_chunks(policy, read_ahead, speed, chunk)
}

/// How far reading by faults runs ahead of computing.
///
/// Threads that share a layer's rows fault at as many places at once, so that some compute while others wait, be
/// the kernel's window ever so small. In the order of chunks that is a window which keeps the next chunk under
/// way: four chunks, half of it behind the miss and a quarter ahead of the marker.
fn read_ahead(device: &Device, chunk: Bytes) -> Bytes {
    let window = device.disk.read_ahead.as_ref().map_or(USUAL_READ_AHEAD, |window| window.value);
    if device.cpu.cores > 1 { window.max(chunk * 4) } else { window }
}

fn links(input: Input) -> ConstantLink {
    let wire =
        |link: &hearth_profiles::Link| Wire { latency: link.latency.value, bandwidth: link.bandwidth.value };
    let table = &input.cluster.links;
    let mut names: Vec<&str> = input.plan.devices.iter().map(|device| device.name.as_str()).collect();
    // Devices without a part may be given one by a later plan.
    names.extend(
        input
            .cluster
            .members
            .iter()
            .map(|it| it.name.as_str())
            .filter(|&it| input.plan.position(it).is_none()),
    );
    let mut links = ConstantLink::new(wire(table.usual()));
    for (from, sender) in names.iter().enumerate() {
        for (to, receiver) in names.iter().enumerate().filter(|&(to, _)| to != from) {
            // Pairs that cannot reach each other have no wire of their own: `check` has seen that none is used.
            if let Some(link) = table.between(sender, receiver) {
                links = links.with(from, to, wire(link));
            }
        }
    }
    links
}
