//! A ring of devices: simulates a plan whose devices compute windows of layers in turn.
//!
//! [`Simulation`] has a [`DeviceSim`] for each device of the plan, the links between them, and the engine that orders
//! their events. `hearth_core::schedule::Generation` decides which pass enters the ring when the head is free.
//! Weights are on disk when the run begins, unless [`crate::Options::warm_start`] is set; weights in GPU memory are
//! already loaded.
//!
//! The events of a scenario affect the run: background load, memory pressure, devices that leave ([`timeline`],
//! [`reachability`], [`reconfiguration`]).

mod links;
mod passes;
pub mod reachability;
pub mod reconfiguration;
pub mod timeline;

use std::borrow::Cow;
use std::sync::Arc;

use hearth_core::memory::DeviceMemory;
use hearth_core::recovery::Recovery;
use hearth_core::schedule::Schedule;
use hearth_profiles::Seconds;
use hearth_profiles::device::Device;
use hearth_profiles::model::ModelProfile;
use hearth_schema::Plan;
use hearth_schema::run_events::RunEventKind;
use hearth_schema::trace::{Counter, Header, Outcome, Reading, Trace};

use crate::device::context::{Event, Message, Outgoing, SimContext};
use crate::device::{DeviceSim, setup};
use crate::engine::{Engine, MAX_SIM_TIME, Nanos, Timer};
use crate::error::SimError;
use crate::input::{Disturbances, Input, Run};
use crate::trace::TraceCollector;

use links::RingLinks;
use passes::{PassControl, PassOutput};
use reachability::{HeldMessage, Reachability};
use timeline::EventTimeline;

/// Maximum number of successive events that add no trace record; after more the ring counts as deadlocked.
/// source: assumed, a hundred times the events of the longest step of a large model
const MAX_IDLE_EVENTS: u32 = 20_000_000;

/// The devices of a run and their order in the ring.
#[derive(Debug, Clone)]
pub(crate) struct Ring<'a> {
    /// The devices by slot: those of the first plan in ring order, then those that joined the ring later.
    pub(crate) devices: Vec<DeviceSim<'a>>,
    /// The index of each slot's device in the cluster's members.
    pub(crate) members: Vec<usize>,
    pub(crate) memories: Vec<DeviceMemory>,
    /// The slots of the current plan's devices in ring order; the head has slot 0 in every plan.
    pub(crate) order: Vec<usize>,
}

/// The simulation of a ring.
#[derive(Debug, Clone)]
pub(crate) struct Simulation<'a> {
    pub(crate) input: Input<'a>,
    pub(crate) disturbances: Disturbances<'a>,
    pub(crate) engine: Engine<Event>,
    pub(crate) ring: Ring<'a>,
    pub(crate) links: RingLinks,
    pub(crate) passes: PassControl,
    /// Tokens generated so far, of all sequences.
    pub(crate) tokens: u32,
    pub(crate) timeline: EventTimeline,
    pub(crate) timeline_timer: Timer,
    pub(crate) reachability: Reachability,
    pub(crate) recovery: Recovery,
    /// The time at which all devices have confirmed a new plan.
    pub(crate) ready_at: Nanos,
    /// Plans made during the run.
    pub(crate) plans: Vec<Plan>,
    pub(crate) outcome: Outcome,
    pub(crate) ended: bool,
    pub(crate) trace: TraceCollector,
}

/// Simulates a ring plan that fits in the memory of its devices.
pub fn simulate(
    input: &Input,
    disturbances: &Disturbances,
    devices: &[&Device],
    memories: Vec<DeviceMemory>,
    header: Header,
) -> Result<Run, SimError> {
    let models = setup::stored_models(input);
    let mut simulation = Simulation::new(*input, *disturbances, devices, memories, &models, header);
    simulation.run()?;
    let Simulation { trace, passes, timeline, outcome, plans, .. } = simulation;
    let unreached_events = timeline.unreached_events();
    let mut run_events = timeline.run_events;
    run_events.sort_by_key(|run_event| run_event.start);
    let trace = Trace { run_events, ..trace.finish(passes.into_started(), outcome) };
    Ok(Run { trace, plans, unreached_events })
}

impl<'a> Simulation<'a> {
    fn new(
        input: Input<'a>,
        disturbances: Disturbances<'a>,
        devices: &[&'a Device],
        memories: Vec<DeviceMemory>,
        models: &'a [Cow<'a, ModelProfile>],
        header: Header,
    ) -> Self {
        let mut engine = Engine::new();
        let plan = Arc::new(input.plan.clone());
        let devices: Vec<_> = devices
            .iter()
            .enumerate()
            .map(|(place, device)| {
                let schedule = Schedule::new(plan.clone(), place);
                let is_pinned = plan.devices[place].residency.is_pinned();
                let mut config =
                    setup::device_config(input, device, &models[place], schedule, place, &memories[place]);
                if input.options.warm_start || is_pinned {
                    setup::warm_page_cache(&mut config.storage, &config.layout, &config.residency);
                }
                DeviceSim::new(config, &mut engine)
            })
            .collect();
        let member = |name: &String| input.cluster.members.iter().position(|it| it.name == *name);
        let (wifi_timer, timeline_timer) = (engine.new_timer(), engine.new_timer());
        let mut simulation = Self {
            input,
            disturbances,
            engine,
            ring: Ring {
                order: (0..devices.len()).collect(),
                devices,
                members: plan.devices.iter().filter_map(|device| member(&device.name)).collect(),
                memories,
            },
            links: RingLinks::new(input.cluster, input.plan, wifi_timer),
            passes: PassControl::new(input.cluster),
            tokens: 0,
            timeline: EventTimeline::new(disturbances.events),
            timeline_timer,
            reachability: Reachability::new(input.cluster.members.len()),
            recovery: Recovery::running(plan),
            ready_at: 0,
            plans: Vec::new(),
            outcome: Outcome::Ok,
            ended: false,
            trace: TraceCollector { header, records: Vec::new(), readings: Vec::new() },
        };
        simulation.schedule_timeline();
        simulation
    }

    fn run(&mut self) -> Result<(), SimError> {
        self.apply_initial_load();
        self.begin_passes()?;
        let (mut idle, mut records) = (0, 0);
        while !self.ended {
            let event = self.engine.next_event().filter(|_| idle < MAX_IDLE_EVENTS);
            let Some(event) = event else {
                let (tokens, at) = (self.tokens, Seconds::from_nanos(self.engine.now()));
                return Err(SimError::Deadlock { tokens, at });
            };
            if self.engine.now() > MAX_SIM_TIME {
                let (tokens, at) = (self.tokens, Seconds::from_nanos(self.engine.now()));
                return Err(SimError::RunTooLong { tokens, at });
            }
            idle = if self.trace.records.len() == records { idle + 1 } else { 0 };
            records = self.trace.records.len();
            match event {
                Event::Wake(place) => self.with_device(place, DeviceSim::on_wake)?,
                Event::Processor(place) => self.with_device(place, DeviceSim::on_processor)?,
                Event::Disk(place) => self.with_device(place, DeviceSim::on_disk)?,
                Event::Wifi => self.collect_deliveries(),
                Event::Deliver(place, message) => self.on_delivery(place, message)?,
                Event::Timeline => self.run_due_actions()?,
                Event::Helper(place) => self.with_device(place, |device, ctx| {
                    device.on_helper(ctx);
                    Ok(())
                })?,
            }
            self.begin_passes()?;
        }
        for place in 0..self.ring.devices.len() {
            self.with_device(place, |device, ctx| {
                device.flush(ctx);
                Ok(())
            })?;
        }
        Ok(())
    }

    /// Starts passes as long as the head is free and the next pass may begin.
    fn begin_passes(&mut self) -> Result<(), SimError> {
        self.receive_confirmations()?;
        while self.recovery.is_running()
            && self.ring.devices[0].is_free()
            && let Some(pass) = self.passes.start()
        {
            self.with_device(0, |device, ctx| device.begin_pass(pass, ctx))?;
        }
        Ok(())
    }

    pub(crate) fn with_device(
        &mut self,
        slot: usize,
        act: impl FnOnce(&mut DeviceSim<'a>, &mut SimContext) -> Result<(), SimError>,
    ) -> Result<(), SimError> {
        let mut outgoing = Vec::new();
        let mut ctx = SimContext {
            engine: &mut self.engine,
            records: &mut self.trace.records,
            outgoing: &mut outgoing,
        };
        act(&mut self.ring.devices[slot], &mut ctx)?;
        if !self.ended && !self.ring.devices[slot].storage.cache().is_alive() {
            let what = "the system killed the process: no memory to compress, and too little page cache";
            self.record_event(
                RunEventKind::OutOfMemory,
                Some(self.name(slot)),
                self.engine.now(),
                what.into(),
            );
            (self.outcome, self.ended) = (Outcome::Killed, true);
        }
        let plans = self.plans.len();
        for sent in outgoing {
            if self.plans.len() != plans {
                // A token has caused a new plan: the remaining messages belong to the old ring.
                break;
            }
            match sent {
                Outgoing::Send(to, message) => self.send(slot, self.ring.order[to], message),
                Outgoing::Output(pass) => self.on_output(pass)?,
            }
        }
        Ok(())
    }

    fn send(&mut self, from: usize, to: usize, message: Message) {
        let now = self.engine.now();
        if self.is_disconnected(from, to) {
            self.reachability.hold(HeldMessage { from, to, message, unsent_since: Some(now) });
        } else {
            self.transmit(from, to, message, now);
        }
    }

    /// Sends a message that was submitted at the time `submitted`.
    pub(crate) fn transmit(&mut self, from: usize, to: usize, message: Message, submitted: Nanos) {
        let (engine, records) = (&mut self.engine, &mut self.trace.records);
        self.links.transmit(engine, records, &self.ring.members, (from, to), message, submitted);
    }

    /// Schedules the arrivals of messages whose delivery is known by now.
    pub(crate) fn collect_deliveries(&mut self) {
        self.links.collect(&mut self.engine, &mut self.trace.records);
    }

    /// Handles the output of a pass: lets the next pass enter, and records the counters of all devices.
    fn on_output(&mut self, pass: u32) -> Result<(), SimError> {
        let PassOutput { tokens, accepted_drafts, drafted_tokens } = self.passes.finish(pass)?;
        self.ended |= self.passes.generation.is_over();
        let at = self.engine.now();
        for &slot in &self.ring.order {
            let device = &self.ring.devices[slot];
            let counters = [
                (Counter::BytesRead, device.bytes_read().0),
                (Counter::Resident, device.resident_bytes().0),
                (Counter::Unreclaimable, self.unreclaimable(slot).0),
            ];
            self.trace.readings.extend(counters.map(|(counter, value)| Reading {
                device: slot as u16,
                counter,
                pass,
                at,
                value,
            }));
        }
        if drafted_tokens > 0 {
            let (counter, value) = (Counter::Accepted, u64::from(accepted_drafts));
            self.trace.readings.push(Reading { device: 0, counter, pass, at, value });
        }
        self.on_tokens(tokens)
    }
}
