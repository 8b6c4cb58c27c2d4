//! Simulation of a phone that runs a model on its GPU and NPU without other devices.
//!
//! Each sync interval runs its kernels on the GPU and its graphs on the NPU in parallel; the CPU waits until both have
//! finished and starts the next interval. `hearth_core::soc` defines the intervals; the weights are in memory when the
//! run begins. The trace has a `compute` record for each pass, and a record for every kernel and wait, up to
//! [`MAX_DETAIL_RECORDS`].
//!
//! Not here: a phone in a ring, or a phone with too little memory for the model. [`crate::device`] simulates them: a
//! layer takes the total time of its intervals, and weights may have to be read from disk.

use hearth_core::compute_cost::ComputeCost;
use hearth_core::memory::DeviceMemory;
use hearth_core::schedule::Generation;
use hearth_core::soc::sync::poll_time;
use hearth_core::soc::{SocLatencyModel, SyncInterval};
use hearth_profiles::device::{DeviceProfile, Soc};
use hearth_profiles::{Bytes, Seconds};
use hearth_schema::pass::{MAX_PASS_TOKENS, Pass};
use hearth_schema::plan::Processor;
use hearth_schema::scenario::Workload;
use hearth_schema::trace::{Counter, Header, Outcome, Resource, StepCost, StepKind, StepRecord, Trace};

use crate::engine::{Engine, MAX_SIM_TIME, Nanos};
use crate::error::SimError;
use crate::input::{Input, ScenarioEvents};
use crate::speculation::{AcceptanceSampler, Drafter};
use crate::trace::{TraceCollector, counter_reading, memory_readings, new_record};

/// Maximum number of trace records of kernels and waits: enough for a few hundred passes of an 8B model.
const MAX_DETAIL_RECORDS: usize = 400_000;

/// Returns the SoC of a plan's only device, if no events occur and all weights are in memory from the start.
pub fn standalone_soc<'a>(
    input: &Input,
    scenario_events: &ScenarioEvents,
    device: &'a DeviceProfile,
    memory: &DeviceMemory,
) -> Option<&'a Soc> {
    let plan = input.plan;
    let is_alone = plan.devices.len() == 1 && scenario_events.events.is_empty();
    let starts_at_once = input.cluster.workload.arrivals.is_none();
    let is_in_memory = input.options.starts_warm
        && (input.options.ignore_memory_shortages || memory.weights <= memory.weight_cache);
    // The latency model of a SoC knows only models whose layers are alike.
    let is_known = input.cluster.model.shape.has_equal_layers();
    let is_plain = !plan.devices[0].residency.uses_anonymous_memory() && plan.kind.is_ring();
    device.soc.as_ref().filter(|_| is_alone && starts_at_once && is_in_memory && is_plain && is_known)
}

/// The processors that run kernels; [`Event::Kernel`] has an index of this list.
const PROCESSORS: [Resource; 2] = [Resource::Gpu, Resource::Npu];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Event {
    /// The processor with this index in [`PROCESSORS`] has finished its current kernel.
    Kernel(usize),
    Cpu,
}

pub fn simulate(
    input: &Input,
    soc: &Soc,
    device: &DeviceProfile,
    memory: &DeviceMemory,
    header: Header,
) -> Result<Trace, SimError> {
    let (cluster, plan) = (input.cluster, input.plan);
    let kv_format = plan.kv_cache_format.format();
    let latency_model = SocLatencyModel::new(soc, &cluster.model, kv_format);
    let workload = with_graph_batches(&cluster.workload, latency_model.max_graph_size());
    let drafter = plan.draft_model.as_ref().zip(cluster.draft_model.as_ref());
    let mut run = SocSimulation {
        layers: cluster.model.shape.layers.0,
        bytes: cluster.model.all_layers_bytes(),
        work: ComputeCost::for_main_memory(device, &cluster.model, kv_format),
        latency_model,
        sleep: soc.sync_costs.min_sleep.value,
        drafter: drafter.map(|(planned, model)| Drafter::new(device, model, kv_format, planned.processor)),
        engine: Engine::new(),
        records: Vec::new(),
        detail_records: 0,
    };
    let acceptance = AcceptanceSampler::new(cluster.seed, &workload);
    let mut generation = Generation::new(&workload);
    let (mut passes, mut readings, mut tokens) = (Vec::new(), Vec::new(), 0);
    while let Some(pass) = generation.begin_pass() {
        passes.push(pass);
        let at = run.pass(pass);
        if at > MAX_SIM_TIME {
            return Err(SimError::RunTooLong { tokens, at: Seconds::from_nanos(at) });
        }
        if !pass.has_output {
            continue;
        }
        let accepted = acceptance.accepted_drafts(pass);
        tokens += generation.complete_pass(pass.index, accepted)?;
        let bytes = [Bytes::ZERO, cluster.model.total_bytes(), memory.unreclaimable_memory];
        readings.extend(memory_readings(0, pass.index, at, bytes));
        if pass.drafted > 0 {
            readings.push(counter_reading(0, Counter::Accepted, pass.index, at, u64::from(accepted)));
        }
    }
    Ok(TraceCollector { header, records: run.records, readings }.finish(passes, Outcome::Ok))
}

/// Returns the workload. If the scenario does not limit its micro-batch, the largest NPU graph size is the limit.
fn with_graph_batches(workload: &Workload, largest: u64) -> Workload {
    let largest = u32::try_from(largest).unwrap_or(u32::MAX);
    let micro_batch = if workload.micro_batch < MAX_PASS_TOKENS { workload.micro_batch } else { largest };
    Workload { micro_batch, ..workload.clone() }
}

#[derive(Debug)]
struct SocSimulation<'a> {
    layers: u32,
    bytes: Bytes,
    work: ComputeCost<'a>,
    latency_model: SocLatencyModel<'a>,
    /// Minimum duration of a sleep of a CPU thread.
    sleep: Seconds,
    drafter: Option<Drafter<'a>>,
    engine: Engine<Event>,
    records: Vec<StepRecord>,
    detail_records: usize,
}

impl SocSimulation<'_> {
    fn pass(&mut self, pass: Pass) -> Nanos {
        if let Some(drafter) = &mut self.drafter {
            let (time, processor) = (drafter.pass_time(pass), drafter.processor);
            let resource = if processor == Processor::Gpu { Resource::Gpu } else { Resource::Cpu };
            self.step(StepKind::Draft, resource, pass, time);
        }
        let embed = self.work.embedding_time(pass.tokens);
        self.step(StepKind::Embed, Resource::Cpu, pass, embed);
        let forward = self.latency_model.forward_cost(pass);
        if forward.preparation_time.0 > 0.0 {
            self.step(StepKind::Prepare, Resource::Cpu, pass, forward.preparation_time);
        }
        let compute = StepRecord {
            layers: Some([0, self.layers]),
            bytes: self.bytes.0,
            ..new_record(0, Resource::Gpu, StepKind::Compute, (pass.index, 0), self.engine.now())
        };
        for layer in 0..self.layers {
            for (index, interval) in (0..).zip(&forward.layer_intervals) {
                self.run_interval(interval, pass, index, Some([layer, layer + 1]));
            }
        }
        self.records.push(StepRecord { end_ns: self.engine.now(), ..compute });
        if pass.has_output {
            let output = new_record(0, Resource::Gpu, StepKind::Output, (pass.index, 1), self.engine.now());
            self.run_interval(&forward.output_interval, pass, forward.layer_intervals.len() as u32, None);
            self.records.push(StepRecord { end_ns: self.engine.now(), ..output });
        }
        self.engine.now()
    }

    /// Simulates a step of duration `time` on `resource`, during which all other processors are idle.
    fn step(&mut self, kind: StepKind, resource: Resource, pass: Pass, time: Seconds) {
        let (start, step) = (self.engine.now(), (pass.index, 0));
        self.run_cpu(time.to_nanos());
        let cost =
            (resource == Resource::Cpu).then(|| StepCost { cpu_ns: time.to_nanos(), ..StepCost::default() });
        let end = self.engine.now();
        self.records.push(StepRecord { end_ns: end, cost, ..new_record(0, resource, kind, step, start) });
    }

    /// Simulates the kernels of a sync interval. Ends when the CPU can start the next interval.
    fn run_interval(&mut self, interval: &SyncInterval, pass: Pass, index: u32, layers: Option<[u32; 2]>) {
        let begin = self.engine.now();
        let (kernels, mut next) = ([&interval.kernel_seconds, &interval.graph_seconds], [0, 0]);
        for (processor, times) in kernels.iter().enumerate() {
            self.begin_kernel(processor, times.first());
        }
        while next != kernels.map(Vec::len) {
            let Some(Event::Kernel(processor)) = self.engine.next_event() else { break };
            let (times, at) = (kernels[processor], next[processor]);
            let (end, time) = (self.engine.now(), Seconds(times[at]).to_nanos());
            let (resource, start) = (PROCESSORS[processor], end.saturating_sub(time));
            let record = new_record(0, resource, StepKind::Kernel, (pass.index, index), start);
            self.push_detail(StepRecord { end_ns: end, layers, ..record });
            next[processor] += 1;
            self.begin_kernel(processor, times.get(at + 1));
        }
        if interval.event_count > 0 {
            let (waited, events) = (self.engine.now() - begin, Seconds(interval.event_seconds).to_nanos());
            self.run_cpu(events);
            let polled = poll_time(Seconds::from_nanos(waited), self.sleep);
            let cost = Some(StepCost { cpu_ns: polled.to_nanos(), copy_ns: events, ..StepCost::default() });
            let record = new_record(0, Resource::Cpu, StepKind::Synchronise, (pass.index, index), begin);
            self.push_detail(StepRecord { end_ns: self.engine.now(), cost, layers, ..record });
        }
    }

    /// Advances the clock by `duration` while the GPU and the NPU are idle.
    fn run_cpu(&mut self, duration: Nanos) {
        self.engine.schedule_after(duration, Event::Cpu);
        while self.engine.next_event().is_some_and(|event| event != Event::Cpu) {}
    }

    fn begin_kernel(&mut self, processor: usize, time: Option<&f64>) {
        if let Some(&time) = time {
            self.engine.schedule_after(Seconds(time).to_nanos(), Event::Kernel(processor));
        }
    }

    fn push_detail(&mut self, record: StepRecord) {
        if self.detail_records < MAX_DETAIL_RECORDS {
            self.detail_records += 1;
            self.records.push(record);
        }
    }
}
