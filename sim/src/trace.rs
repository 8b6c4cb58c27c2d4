//! Trace collection: builds the records, the counter readings and the trace of a simulation.

use hearth_profiles::device::{DeviceProfile, Gpu};
use hearth_profiles::{Bytes, Document, Seconds};
use hearth_schema::pass::Pass;
use hearth_schema::trace::{
    Counter, CounterReading, Header, Origin, Outcome, Resource, ShortageRecord, StepKind, StepRecord, Trace,
    TracedDevice,
};

use crate::engine::Nanos;
use crate::input::Input;
use crate::page_cache::config::describe_unvalidated_parts;

#[derive(Debug)]
pub struct TraceCollector {
    pub header: Header,
    pub records: Vec<StepRecord>,
    pub readings: Vec<CounterReading>,
}

impl TraceCollector {
    /// Returns the trace of a run without run events; its records are sorted by start time.
    pub fn finish(mut self, passes: Vec<Pass>, outcome: Outcome) -> Trace {
        self.records.sort_by_key(|record| record.start_ns);
        let Self { header, records, readings } = self;
        let (shortages, run_events) = (Vec::new(), Vec::new());
        Trace { header, passes, admissions: Vec::new(), records, readings, shortages, run_events, outcome }
    }
}

/// Returns the record of a step that starts and ends at `now`. The caller sets the end, the cost and the other fields.
pub fn new_record(
    device: usize,
    resource: Resource,
    kind: StepKind,
    (pass, round): (u32, u32),
    now: Nanos,
) -> StepRecord {
    StepRecord {
        device_index: device as u16,
        resource,
        kind,
        pass_index: pass,
        round,
        layers: None,
        start_ns: now,
        end_ns: now,
        bytes: 0,
        peer: None,
        cost: None,
    }
}

/// Consecutive steps of known duration.
pub type TimedSteps = Vec<(StepRecord, Seconds)>;

/// Returns three steps: an upload to a GPU, `step` on the GPU, and a download. The records of both copies are made from
/// `copy`. With unified memory nothing is copied, so only the GPU step is returned.
pub fn gpu_step_with_copies(
    gpu: &Gpu,
    step: (StepRecord, Seconds),
    copy: &StepRecord,
    upload: Bytes,
    download: Bytes,
) -> TimedSteps {
    if gpu.unified_memory {
        return vec![step];
    }
    let copy =
        |bytes: Bytes| StepRecord { kind: StepKind::Copy, bytes: bytes.0, layers: None, ..copy.clone() };
    let (up, down) = (copy(upload), copy(download));
    vec![(up, gpu.upload.transfer_time(upload)), step, (down, gpu.download.transfer_time(download))]
}

/// Records steps of known duration, one after another from `now` on. Returns the end time of the last step.
pub fn record_steps(records: &mut Vec<StepRecord>, now: Nanos, steps: TimedSteps) -> Nanos {
    steps.into_iter().fold(now, |start, (record, time)| {
        let end = start.saturating_add(time.to_nanos());
        records.push(StepRecord { start_ns: start, end_ns: end, ..record });
        end
    })
}

/// Returns the reading of a device's counter after a pass.
pub fn counter_reading(device: usize, counter: Counter, pass: u32, at: Nanos, value: u64) -> CounterReading {
    CounterReading { device_index: device as u16, counter, pass_index: pass, time_ns: at, value }
}

/// Returns a device's readings after a pass: bytes read from disk, bytes of weights in memory, unreclaimable bytes.
pub fn memory_readings(device: usize, pass: u32, at: Nanos, bytes: [Bytes; 3]) -> [CounterReading; 3] {
    let [read, resident, unreclaimable] = bytes;
    [(Counter::BytesRead, read), (Counter::Resident, resident), (Counter::Unreclaimable, unreclaimable)]
        .map(|(counter, bytes)| counter_reading(device, counter, pass, at, bytes.0))
}

/// Returns the trace of a plan that does not fit in memory: memory shortages and unreclaimable memory of each device.
pub fn out_of_memory_trace(
    header: Header,
    passes: Vec<Pass>,
    unreclaimable_memory: impl Iterator<Item = Bytes>,
    shortages: Vec<ShortageRecord>,
) -> Trace {
    let reading =
        |(device, bytes): (usize, Bytes)| counter_reading(device, Counter::Unreclaimable, 0, 0, bytes.0);
    let readings = unreclaimable_memory.enumerate().map(reading).collect();
    let collector = TraceCollector { header, records: Vec::new(), readings };
    Trace { shortages, ..collector.finish(passes, Outcome::OutOfMemory) }
}

pub fn build_header(input: &Input, devices: &[&DeviceProfile]) -> Header {
    let names = input.plan.devices.iter().map(|planned| &planned.name);
    Header {
        schema: Trace::SCHEMA.into(),
        origin: Origin::Simulated,
        scenario_name: input.plan.scenario.name.clone(),
        plan_digest: input.plan.digest(),
        model_name: input.plan.model.name.clone(),
        parallelism: input.plan.kind.parallelism(),
        seed: input.cluster.seed,
        program_version: env!("CARGO_PKG_VERSION").into(),
        devices: names.zip(devices).map(|(name, device)| build_traced_device(name, device)).collect(),
    }
}

pub fn build_traced_device(name: &str, device: &DeviceProfile) -> TracedDevice {
    TracedDevice {
        name: name.to_owned(),
        profile_digest: Some(hearth_schema::digest::digest_text(&device.to_yaml())),
        total_memory_bytes: device.memory.total_memory.value.0,
        os_and_kernel: None,
        unvalidated_parts: describe_unvalidated_parts(device),
        page_cache_policy: Some(device.memory.page_cache),
    }
}
