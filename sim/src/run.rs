//! What happens when a plan is run on modelled devices?
//!
//! One world: a station for each device of the plan, the links between them, and the engine that orders their
//! events. The schedule says what is done, the stations how long it takes; the trace is the executor's.
//!
//! Which pass enters when the head is free is `hearth_schema::schedule::Generation`'s to say. Weights are on disk when the run begins, unless [`Options::warm`]; those in
//! GPU memory are loaded already.
//!
//! Plans that slice layers run in [`crate::tensor`].
//!
//! Not here: speeds and times as numbers. `hearth_schema::metrics` computes them from the trace.

use std::borrow::Cow;
use std::sync::Arc;

use hearth_profiles::device::{Device, PageCachePolicy};
use hearth_profiles::model::{DigestMatch, ModelProfile};
use hearth_profiles::{Bytes, BytesPerSecond, Document, Seconds};
use hearth_schema::cluster::Joined;
use hearth_schema::conversion::{converted, model_as};
use hearth_schema::draft;
use hearth_schema::plan::PlannedDevice;
use hearth_schema::residency::Residency;
use hearth_schema::scenario::Workload;
use hearth_schema::schedule::{Generation, Part, Pass, Processor, Schedule, passes, visits};
use hearth_schema::trace::{
    Counter, Header, Kind, Origin, Outcome, Reading, Record, Resource, Trace, TracedDevice,
};
use hearth_schema::{Cluster, Plan};

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

use crate::acceptance::Acceptance;
use crate::budget::Budget;
use crate::drafter::Drafter;
use crate::engine::{Engine, Timer};
use crate::error::SimError;
use crate::helper::Helper;
use crate::keeper::Keeper;
use crate::layout::Layout;
use crate::page_cache::of_device::{Placed, unvalidated, unwired_after};
use crate::page_cache::{Access, CHUNK_BYTES, Chunk, Fetch};
use crate::resource::link::{Delivery, Post, Wire};
use crate::resource::{AirLink, ConstantLink, DiskSpeed};
use crate::station::{Desk, Message, Outgoing, Parts, Station};
use crate::storage::Storage;
use crate::stream::Stream;

/// The read-ahead of an untuned Linux, where a profile does not say.
const USUAL_READ_AHEAD: Bytes = Bytes(128 << 10);

/// Which random stream draws what a process holds; places are added to it.
const PROCESS_PAGES: u64 = 3 << 40;

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
}

impl Default for Options {
    fn default() -> Self {
        Self { chunk: Bytes(CHUNK_BYTES), warm: false, ignore_memory: false, process_spread: Bytes::ZERO }
    }
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
}

#[derive(Debug, Clone)]
struct World<'a> {
    engine: Engine<Event>,
    stations: Vec<Station<'a>>,
    unreclaimable: Vec<Bytes>,
    /// Each message goes with its receiver and the index of its record.
    post: Post<(usize, Message, usize)>,
    air_timer: Timer,
    generation: Generation,
    acceptance: Acceptance,
    /// The passes begun.
    passes: Vec<Pass>,
    /// A device's system has killed it.
    killed: bool,
    records: Vec<Record>,
    readings: Vec<Reading>,
}

/// Runs a plan.
pub fn simulate(input: &Input) -> Result<Trace, SimError> {
    let devices = check(input)?;
    let header = header(input, &devices);
    if let Some(tensor) = input.plan.kind.tensor() {
        return crate::tensor::simulate(input, tensor, &devices, header);
    }
    let ignore = input.options.ignore_memory;
    let budgets: Vec<Option<Budget>> = devices
        .iter()
        .enumerate()
        .map(|(place, device)| {
            let device = draft::beside(input.plan, place, input.cluster.draft.as_ref(), device)?;
            Some(Budget::new(input.plan, place, &input.cluster.model, &device, ignore))
        })
        .collect();
    let shortages: Vec<_> = budgets.iter().flatten().flat_map(|budget| budget.shortages.clone()).collect();
    let drafts = budgets.iter().all(Option::is_some);
    let budgets: Vec<Budget> = budgets.into_iter().flatten().collect();
    if !drafts || !shortages.is_empty() && !ignore {
        // What would have been asked, as far as it does not depend on what is accepted.
        let passes = passes(&Workload { speculation: None, ..input.cluster.workload.clone() });
        let holds = input.plan.only_simulated().is_some();
        let unreclaimable = budgets.iter().filter(|_| holds).map(|budget| budget.unreclaimable);
        let (records, readings) = (Vec::new(), crate::tensor::needed(unreclaimable));
        return Ok(Trace { header, passes, records, readings, shortages, outcome: Outcome::OutOfMemory });
    }
    let models = models(input);
    let mut world = World::new(*input, &devices, &budgets, &models);
    world.run()?;
    let World { mut records, readings, passes, killed, .. } = world;
    records.sort_by_key(|record| record.start);
    let outcome = if killed { Outcome::Killed } else { Outcome::Ok };
    Ok(Trace { header, passes, records, readings, shortages: Vec::new(), outcome })
}

impl<'a> World<'a> {
    fn new(
        input: Input<'a>,
        devices: &[&'a Device],
        budgets: &[Budget],
        models: &'a [Cow<'a, ModelProfile>],
    ) -> Self {
        let mut engine = Engine::new();
        let plan = Arc::new(input.plan.clone());
        let stations = devices
            .iter()
            .enumerate()
            .map(|(place, device)| {
                let residency = plan.devices[place].residency;
                let memory = budgets[place].cache.saturating_sub(held_more(&input, place));
                let managed = residency.policy == Residency::Managed;
                let chunk = if managed { residency.piece() } else { input.options.chunk };
                let layout = Layout::new(&plan, place, &models[place], chunk);
                let memory = if residency.holds() { memory.min(whole(&layout, chunk)) } else { memory };
                let kept_by = if residency.holds() { &anonymous(device) } else { device };
                let mut storage = storage((kept_by, place, input.cluster.seed), &layout, memory, chunk);
                let keeper = if managed {
                    let visits = chunks_of(&layout, &visits(&plan, place));
                    Keeper::Managed(Box::new(Stream::new(
                        place,
                        residency,
                        &visits,
                        memory,
                        device.cpu.cores,
                        layout.chunks(),
                    )))
                } else {
                    Keeper::Ahead(Helper::new(place, residency, chunk, storage.window()))
                };
                if input.options.warm || residency.holds() {
                    warm(&mut storage, &layout, &keeper);
                }
                let parts = Parts {
                    device,
                    drafter: drafter(&input, place, device),
                    model: &models[place],
                    uploads: budgets[place].uploads.clone(),
                    kv_element: Bytes(plan.kv_cache.element_bytes()),
                    schedule: Schedule::new(plan.clone(), place),
                    seed: input.cluster.seed,
                    storage,
                    layout,
                    keeper,
                };
                Station::new(parts, &mut engine)
            })
            .collect();
        let air_timer = engine.timer();
        Self {
            engine,
            stations,
            unreclaimable: budgets.iter().map(|budget| budget.unreclaimable).collect(),
            post: Post::new(links(input)),
            air_timer,
            generation: Generation::new(&input.cluster.workload),
            acceptance: Acceptance::new(input.cluster.seed, &input.cluster.workload),
            passes: Vec::new(),
            killed: false,
            records: Vec::new(),
            readings: Vec::new(),
        }
    }

    fn run(&mut self) -> Result<(), SimError> {
        self.begin()?;
        while !self.killed && !self.generation.is_over() {
            // Every device waiting for another would be a fault of the schedule, which its tests exclude.
            let event = self.engine.next_event().expect("a ring under way has a next event");
            match event {
                Event::Wake(place) => self.at(place, Station::wake)?,
                Event::Processor(place) => self.at(place, Station::processor)?,
                Event::Disk(place) => self.at(place, Station::arrivals)?,
                Event::Air => self.settle(),
                Event::Deliver(place, message) => {
                    self.at(place, |station, desk| station.deliver(message, desk))?;
                }
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
        while self.stations[0].is_free()
            && let Some(pass) = self.generation.begin()
        {
            self.passes.push(pass);
            self.at(0, |station, desk| station.begin(pass, desk))?;
        }
        Ok(())
    }

    fn at(
        &mut self,
        place: usize,
        act: impl FnOnce(&mut Station<'a>, &mut Desk) -> Result<(), SimError>,
    ) -> Result<(), SimError> {
        let mut outgoing = Vec::new();
        let mut desk = Desk { engine: &mut self.engine, records: &mut self.records, outgoing: &mut outgoing };
        act(&mut self.stations[place], &mut desk)?;
        if !self.stations[place].storage.view().view().survives() {
            self.killed = true;
        }
        for sent in outgoing {
            match sent {
                Outgoing::Send(to, message) => self.send(place, to, message),
                Outgoing::Output(pass) => self.output(pass)?,
            }
        }
        Ok(())
    }

    fn send(&mut self, from: usize, to: usize, message: Message) {
        let now = self.engine.now();
        self.records.push(Record {
            device: from as u16,
            resource: Resource::Tx,
            kind: Kind::Send,
            pass: message.pass.index,
            round: message.sent_in,
            layers: None,
            start: now,
            end: now,
            bytes: message.bytes.0,
            peer: Some(to as u16),
            cost: None,
        });
        let item = (to, message, self.records.len() - 1);
        if let Some((item, delivery)) = self.post.send(now, [from, to], message.bytes, item) {
            self.left(item, delivery);
        }
        self.settle();
    }

    /// Looks which messages have left over the air, and when to look again.
    fn settle(&mut self) {
        while let Some((item, delivery)) = self.post.settled(self.engine.now()) {
            self.left(item, delivery);
        }
        if let Some(at) = self.post.next_event() {
            self.engine.set(self.air_timer, at, Event::Air);
        }
    }

    /// A message is on its last way to its receiver.
    fn left(&mut self, (to, message, record): (usize, Message, usize), delivery: Delivery) {
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
        self.generation.output(pass, accepted)?;
        let at = self.engine.now();
        for (place, station) in self.stations.iter().enumerate() {
            let resident = station.resident().0;
            let counters = [
                (Counter::BytesRead, station.storage.delivered().0),
                (Counter::Resident, resident),
                (Counter::Unreclaimable, self.unreclaimable[place].0),
            ];
            self.readings.extend(counters.map(|(counter, value)| Reading {
                device: place as u16,
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
        Ok(())
    }
}

/// The model as each device has it: where weights are pinned, in the formats that they are converted to.
fn models<'a>(input: &Input<'a>) -> Vec<Cow<'a, ModelProfile>> {
    let (plan, model) = (input.plan, &input.cluster.model);
    let of = |(place, planned): (usize, &PlannedDevice)| {
        let residency = planned.residency;
        if !residency.holds() {
            return Cow::Borrowed(model);
        }
        let on_gpu =
            |layer: u32| (0..plan.rounds).any(|round| plan.gpu_window(place, round).contains(&layer));
        let as_planned = |layer: u32| residency.format_on(on_gpu(layer));
        let mut own = model_as(model, residency.weights_as, as_planned);
        own.output = converted(&model.output, residency.format_on(plan.output == Processor::Gpu));
        Cow::Owned(own)
    };
    plan.devices.iter().enumerate().map(of).collect()
}

/// The draft model, on the head of a plan that has one.
fn drafter<'a>(input: &Input<'a>, place: usize, device: &'a Device) -> Option<Drafter<'a>> {
    let (planned, model) = (input.plan.draft.as_ref()?, input.cluster.draft.as_ref()?);
    let kv_element = Bytes(input.plan.kv_cache.element_bytes());
    (place == 0).then(|| Drafter::new(device, model, kv_element, planned.processor))
}

/// The plan's devices in ring order, if everything fits together.
fn check<'a>(input: &Input<'a>) -> Result<Vec<&'a Device>, SimError> {
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
    let traced = |(place, device): (usize, &&Device)| TracedDevice {
        name: input.plan.devices[place].name.clone(),
        profile: Some(hearth_schema::digest::of(&device.to_yaml())),
        memory_total: device.memory.total.value.0,
        kernel: None,
        unvalidated: unvalidated(device),
    };
    Header {
        schema: Trace::SCHEMA.into(),
        origin: Origin::Simulated,
        scenario: input.plan.scenario.name.clone(),
        plan: input.plan.digest(),
        model: input.plan.model.name.clone(),
        kind: input.plan.kind.parallelism(),
        seed: input.cluster.seed,
        version: env!("CARGO_PKG_VERSION").into(),
        devices: devices.iter().enumerate().map(traced).collect(),
    }
}

/// What a device's process holds beyond its profile, drawn from a stream of its own.
fn held_more(input: &Input, place: usize) -> Bytes {
    let mut stream = ChaCha8Rng::seed_from_u64(input.cluster.seed);
    stream.set_stream(PROCESS_PAGES | place as u64);
    let part = (stream.next_u64() >> 11) as f64 / (1u64 << 53) as f64;
    Bytes((input.options.process_spread.as_f64() * part) as u64)
}

/// The chunks of each visit, in the order of use.
fn chunks_of(layout: &Layout, visits: &[Vec<Part>]) -> Vec<Vec<Chunk>> {
    let chunks = |parts: &Vec<Part>| parts.iter().flat_map(|part| layout.part(part)).collect();
    visits.iter().map(chunks).collect()
}

/// The device with its own memory kept as anonymous pages are: by two lists, or by the paper's formula.
fn anonymous(device: &Device) -> Device {
    let mut device = device.clone();
    if device.memory.page_cache != PageCachePolicy::PaperLinear {
        device.memory.page_cache = PageCachePolicy::TwoList;
    }
    device
}

/// Memory for the whole file.
fn whole(layout: &Layout, chunk: Bytes) -> Bytes {
    chunk * (u64::from(layout.chunks()) + 2)
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
            cache.resume(chunk);
        }
    }
}

fn storage(
    (device, place, seed): (&Device, usize, u64),
    layout: &Layout,
    cache: Bytes,
    chunk: Bytes,
) -> Storage {
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
    let placed = Placed { device, place, seed, room: cache, share: layout.chunks(), chunk };
    Storage::with_chunks(placed.policy(), read_ahead, speed, chunk).unwired_after(unwired_after(device))
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

/// The links between the plan's devices.
pub(crate) fn links(input: Input) -> AirLink {
    let table = &input.cluster.links;
    let names: Vec<&str> = input.plan.devices.iter().map(|device| device.name.as_str()).collect();
    let (mut wires, mut ways) = (ConstantLink::new(Wire::from(table.usual())), Vec::new());
    for (from, sender) in names.iter().enumerate() {
        for (to, receiver) in names.iter().enumerate().filter(|&(to, _)| to != from) {
            match table.joined(sender, receiver) {
                Some(Joined::Link(link)) => wires = wires.with(from, to, Wire::from(link)),
                Some(Joined::Air(way)) => ways.push((from, to, way)),
                // Pairs that cannot reach each other have no wire of their own: `check` has seen that none is used.
                None => {}
            }
        }
    }
    let links = AirLink::new(wires, table.air(), input.cluster.seed);
    ways.iter().fold(links, |links, (from, to, way)| links.with(*from, *to, way))
}
