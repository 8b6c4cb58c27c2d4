//! Ring simulation: simulates a plan whose devices compute windows of layers in turn.
//!
//! [`Simulation`] has a [`DeviceSim`] for each device of the plan, the links between the devices, and the engine that
//! orders their events. `hearth_core::schedule::Generation` decides which passes enter the ring when the head device
//! is free. Weights in GPU memory are loaded before the run begins; all other weights are then on disk, unless
//! [`crate::Options::starts_warm`] is set.
//!
//! The events of a scenario change the load, the memory and the ring ([`timeline`], [`reconfiguration`]).

pub mod adaptation;
pub mod reachability;
pub mod reconfiguration;
pub mod requests;
pub mod timeline;

use std::borrow::Cow;
use std::sync::Arc;

use hearth_core::memory::DeviceMemory;
use hearth_core::recovery::Recovery;
use hearth_core::schedule::batching::BatchLimits;
use hearth_core::schedule::{Generation, Schedule};
use hearth_profiles::Seconds;
use hearth_profiles::device::DeviceProfile;
use hearth_profiles::model::ModelProfile;
use hearth_schema::Plan;
use hearth_schema::pass::Pass;
use hearth_schema::trace::{Counter, Header, Outcome, Resource, StepKind, StepRecord, Trace};

use crate::device::context::{DeviceOutput, Event, Message, SimContext};
use crate::device::{DeviceSim, setup};
use crate::engine::{Engine, MAX_SIM_TIME, Nanos, Timer};
use crate::error::SimError;
use crate::input::{Input, ScenarioEvents, SimulationResult};
use crate::network::{NetworkSim, member_order};
use crate::speculation::AcceptanceSampler;
use crate::trace::{TraceCollector, counter_reading, memory_readings, new_record};

use adaptation::SimulatedAdaptation;
use reachability::{HeldMessage, Reachability};
use requests::SimulatedRequests;
use timeline::EventTimeline;

/// Number of consecutive events without a new trace record after which the ring is considered deadlocked.
/// source: assumed, a hundred times the number of events of the longest step of a large model
const MAX_IDLE_EVENTS: u32 = 20_000_000;

#[derive(Debug)]
pub(crate) struct Ring<'a> {
    /// The devices by device ID: those of the first plan in ring order, then those that joined the ring later.
    pub(crate) devices: Vec<DeviceSim<'a>>,
    /// The index of each device among the members of the cluster, by device ID.
    pub(crate) member_indices: Vec<usize>,
    pub(crate) memories: Vec<DeviceMemory>,
    /// The IDs of the current plan's devices in ring order. The head device has ID 0 in every plan.
    pub(crate) order: Vec<usize>,
}

#[derive(Debug)]
pub(crate) struct Simulation<'a> {
    pub(crate) input: Input<'a>,
    pub(crate) scenario_events: ScenarioEvents<'a>,
    pub(crate) engine: Engine<Event>,
    pub(crate) ring: Ring<'a>,
    pub(crate) network: NetworkSim<Event>,
    /// The indices of the cluster's members, in the order in which the links number the members.
    pub(crate) link_order: Vec<usize>,
    /// Decides which passes enter the ring next.
    pub(crate) generation: Generation,
    /// The requests, if they arrive during the run.
    pub(crate) requests: Option<SimulatedRequests>,
    pub(crate) arrival_timer: Timer,
    /// The limits for the batches of the current plan.
    pub(crate) batch_limits: BatchLimits,
    acceptance: AcceptanceSampler,
    /// The passes that have started, in order.
    passes: Vec<Pass>,
    /// Number of tokens that have been generated, in all sequences.
    pub(crate) generated_tokens: u32,
    pub(crate) timeline: EventTimeline,
    pub(crate) timeline_timer: Timer,
    pub(crate) reachability: Reachability,
    pub(crate) recovery: Recovery,
    /// Changes the plan when devices become slower, if the run does so.
    pub(crate) adaptation: Option<SimulatedAdaptation>,
    /// The time at which all devices have confirmed the current plan.
    pub(crate) ready_at: Nanos,
    /// The plans made during the run, in order of time.
    pub(crate) new_plans: Vec<Plan>,
    pub(crate) outcome: Outcome,
    pub(crate) has_ended: bool,
    pub(crate) trace: TraceCollector,
}

/// Simulates a ring plan that fits in the memory of its devices.
pub fn simulate(
    input: &Input,
    scenario_events: &ScenarioEvents,
    devices: &[&DeviceProfile],
    memories: Vec<DeviceMemory>,
    header: Header,
) -> Result<SimulationResult, SimError> {
    let models = setup::stored_models(input);
    let mut simulation = Simulation::new(*input, *scenario_events, devices, memories, &models, header);
    simulation.run()?;
    let Simulation { trace, passes, requests, timeline, outcome, new_plans, .. } = simulation;
    let unreached_events = timeline.unreached_events();
    let mut run_events = timeline.run_events;
    run_events.sort_by_key(|run_event| run_event.start_ns);
    let admissions = requests.map(|requests| requests.admissions).unwrap_or_default();
    let trace = Trace { run_events, admissions, ..trace.finish(passes, outcome) };
    Ok(SimulationResult { trace, new_plans, unreached_event_indices: unreached_events })
}

impl<'a> Simulation<'a> {
    fn new(
        input: Input<'a>,
        scenario_events: ScenarioEvents<'a>,
        devices: &[&'a DeviceProfile],
        memories: Vec<DeviceMemory>,
        models: &'a [Cow<'a, ModelProfile>],
        header: Header,
    ) -> Self {
        let mut engine = Engine::new();
        let plan = Arc::new(input.plan.clone());
        let new_device = |(index, device): (usize, &&'a DeviceProfile)| {
            let schedule = Schedule::new(plan.clone(), index);
            let is_pinned = plan.devices[index].residency.uses_anonymous_memory();
            let (model, memory) = (&models[index], &memories[index]);
            let mut device = setup::new_device(input, device, model, schedule, index, memory, &mut engine);
            if input.options.starts_warm || is_pinned {
                setup::warm_page_cache(&mut device);
            }
            device
        };
        let devices: Vec<_> = devices.iter().enumerate().map(new_device).collect();
        let member = |name: &String| input.cluster.members.iter().position(|it| it.name == *name);
        let network = NetworkSim::new(input.cluster, input.plan, &mut engine);
        let timeline_timer = engine.new_timer();
        let arrival_timer = engine.new_timer();
        let requests = SimulatedRequests::new(&input);
        let workload = &input.cluster.workload;
        let generation = if requests.is_some() {
            let can_truncate = !input.cluster.model.shape.is_recurrent();
            let drafts = workload.drafted_tokens();
            Generation::with_vacant_slots(workload.sequences, workload.micro_batch, drafts, can_truncate)
        } else {
            Generation::new(workload)
        };
        let mut simulation = Self {
            input,
            scenario_events,
            engine,
            ring: Ring {
                order: (0..devices.len()).collect(),
                devices,
                member_indices: plan.devices.iter().filter_map(|device| member(&device.name)).collect(),
                memories,
            },
            network,
            link_order: member_order(input.cluster, input.plan),
            generation,
            requests,
            arrival_timer,
            batch_limits: BatchLimits::for_plan(&plan),
            acceptance: AcceptanceSampler::new(input.cluster.seed, &input.cluster.workload),
            passes: Vec::new(),
            generated_tokens: 0,
            timeline: EventTimeline::new(scenario_events.events),
            timeline_timer,
            reachability: Reachability::new(input.cluster.members.len()),
            recovery: Recovery::with_running_ring(plan),
            adaptation: SimulatedAdaptation::new(&input, &scenario_events),
            ready_at: 0,
            new_plans: Vec::new(),
            outcome: Outcome::Ok,
            has_ended: false,
            trace: TraceCollector { header, records: Vec::new(), readings: Vec::new() },
        };
        simulation.schedule_next_action();
        simulation
    }

    fn run(&mut self) -> Result<(), SimError> {
        self.apply_initial_background_load();
        self.begin_batches()?;
        let (mut idle, mut records) = (0, 0);
        while !self.has_ended {
            let event = self.engine.next_event().filter(|_| idle < MAX_IDLE_EVENTS);
            let (tokens, at) = (self.generated_tokens, Seconds::from_nanos(self.engine.now()));
            let Some(event) = event else { return Err(SimError::Deadlock { tokens, at }) };
            if self.engine.now() > MAX_SIM_TIME {
                return Err(SimError::RunTooLong { tokens, at });
            }
            idle = if self.trace.records.len() == records { idle + 1 } else { 0 };
            records = self.trace.records.len();
            match event {
                Event::Wake(id) => self.with_device(id, DeviceSim::on_wake)?,
                Event::Cpu(id) => self.with_device(id, DeviceSim::on_cpu_timer)?,
                Event::Disk(id) => self.with_device(id, DeviceSim::on_disk_timer)?,
                Event::Wifi => self.collect_deliveries(),
                Event::Deliver(id, message) => self.on_delivery(id, message)?,
                Event::Timeline => self.run_due_actions()?,
                // `begin_batches` admits the request.
                Event::Arrival => {}
                Event::Helper(id) => self.with_device(id, DeviceSim::on_helper_wake)?,
            }
            self.begin_batches()?;
        }
        let now = self.engine.now();
        self.ring.devices.iter_mut().for_each(|device| device.flush_records(now, &mut self.trace.records));
        Ok(())
    }

    fn begin_batches(&mut self) -> Result<(), SimError> {
        self.receive_confirmations()?;
        while self.recovery.is_ring_running() && self.ring.devices[0].is_idle() {
            self.admit_requests()?;
            let Some(batch) = self.generation.begin_batch(self.batch_limits) else { break };
            let changes = self.requests.as_mut().map(SimulatedRequests::take_cache_changes);
            let batch = batch.with_cache_changes(changes.unwrap_or_default());
            self.passes.extend(batch.passes());
            if let Some(adaptation) = &mut self.adaptation {
                adaptation.begin_batch(&batch);
            }
            self.with_device(0, |device, ctx| device.begin_batch(batch, ctx))?;
        }
        Ok(())
    }

    /// Applies a change to a device. The change must not cause the device to send messages or output tokens.
    pub(crate) fn change_device(
        &mut self,
        device_id: usize,
        change: impl FnOnce(&mut DeviceSim<'a>, &mut SimContext),
    ) {
        let (engine, records) = (&mut self.engine, &mut self.trace.records);
        let mut ctx = SimContext { engine, records, outputs: &mut Vec::new() };
        change(&mut self.ring.devices[device_id], &mut ctx);
    }

    pub(crate) fn with_device(
        &mut self,
        device_id: usize,
        act: impl FnOnce(&mut DeviceSim<'a>, &mut SimContext) -> Result<(), SimError>,
    ) -> Result<(), SimError> {
        let mut outgoing = Vec::new();
        let (engine, records) = (&mut self.engine, &mut self.trace.records);
        let mut ctx = SimContext { engine, records, outputs: &mut outgoing };
        act(&mut self.ring.devices[device_id], &mut ctx)?;
        if !self.has_ended && !self.ring.devices[device_id].storage.cache.is_process_alive() {
            let what = "the system killed the process, because the page cache is too small and no memory is left to compress";
            self.end_out_of_memory(device_id, Outcome::Killed, what);
        }
        let plans = self.new_plans.len();
        for sent in outgoing {
            if self.new_plans.len() != plans {
                // A token has caused a new plan: the remaining messages belong to the old ring.
                break;
            }
            match sent {
                DeviceOutput::Send(to, message) => self.send(self.ring.order[to], message),
                DeviceOutput::Output(batch) => self.on_output(batch)?,
            }
        }
        Ok(())
    }

    fn send(&mut self, receiver: usize, message: Message) {
        let now = self.engine.now();
        if self.is_disconnected(message.sender_id, receiver) {
            self.reachability.held_messages.push(HeldMessage { receiver, message, unsent_since: Some(now) });
        } else {
            self.transmit(receiver, message, now);
        }
    }

    pub(crate) fn transmit(&mut self, to: usize, message: Message, submit_time: Nanos) {
        let (engine, records) = (&mut self.engine, &mut self.trace.records);
        let Message { ref batch, sender_round: sent_round, sender_id: from, bytes, .. } = message;
        let step = (batch.index(), sent_round);
        let record = new_record(from, Resource::Tx, StepKind::Send, step, submit_time);
        records.push(StepRecord { end_ns: engine.now(), bytes: bytes.0, peer: Some(to as u16), ..record });
        // The links number all members; devices that join the ring later may have IDs in another order.
        let index = |id: usize| {
            let member = self.ring.member_indices[id];
            self.link_order.iter().position(|&it| it == member).unwrap_or(id)
        };
        let endpoints = [index(from), index(to)];
        self.network.send(engine, records, endpoints, bytes, Event::Deliver(to, message));
        self.collect_deliveries();
    }

    pub(crate) fn collect_deliveries(&mut self) {
        self.network.schedule_arrivals(&mut self.engine, &mut self.trace.records, Event::Wifi);
    }

    /// Handles the outputs of a batch: counts its tokens, and records the counters of all devices.
    fn on_output(&mut self, batch: u32) -> Result<(), SimError> {
        let at = self.engine.now();
        let first = self.passes.get(batch as usize..).unwrap_or_default();
        let joined = first.iter().skip(1).take_while(|pass| pass.is_joined).count();
        let passes = first[..first.len().min(joined + 1)].to_vec();
        let (mut tokens, mut accepted_drafts) = (0, Vec::new());
        for pass in passes.into_iter().filter(|pass| pass.has_output) {
            let drawn = Pass { sequence_index: self.request_of(&pass), ..pass };
            let accepted = if pass.drafted > 0 { self.acceptance.accepted_drafts(drawn) } else { 0 };
            let new = self.generation.complete_pass(pass.index, accepted)?;
            self.add_request_tokens(&pass, new);
            tokens += new;
            if pass.drafted > 0 {
                let value = u64::from(accepted);
                accepted_drafts.push(counter_reading(0, Counter::Accepted, pass.index, at, value));
            }
        }
        let requests = self.requests.as_ref();
        self.has_ended |=
            self.generation.is_finished() && requests.is_none_or(SimulatedRequests::are_finished);
        for &id in &self.ring.order {
            let device = &self.ring.devices[id];
            let bytes = [device.bytes_read(), device.resident_bytes(), self.unreclaimable_bytes(id)];
            self.trace.readings.extend(memory_readings(id, batch, at, bytes));
        }
        self.trace.readings.extend(accepted_drafts);
        self.on_tokens(tokens)
    }
}
