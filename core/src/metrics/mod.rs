//! Metrics of a trace: time per token, its terms, and metrics of each device.
//!
//! The time per output token (TPOT) covers the tokens after the first of each sequence: it is the time between two
//! outputs of a sequence, divided by the number of tokens of the later output, which is more than one if drafts were
//! accepted. The TPOT is exactly the sum of these terms:
//!
//! - `cpu`, `gpu`, `memory`: thread CPU time of computing steps, wall time of GPU steps, and time of memory
//!   copies, on any device; drafting is a computing step of the head;
//! - `demand_disk`: wall time of a CPU step minus its CPU time, run-queue delay and copies;
//! - `network`: time from the head's `send` to its `receive`, minus the time that the message spent on other devices
//!   by their own clocks (there is no shared clock);
//! - `queue`: time ready but not running: run-queue delay, and gaps between the steps of the device that has the
//!   token, for example while it works on another sequence;
//! - `bubble`: the rest. It is greater than zero only if no pass is in flight during an interval, for example while
//!   the ring is rebuilt after a loss.
//!
//! With tensor parallelism all devices work on a token at the same time, see `lockstep`. `hidden_disk` is the time of
//! read-ahead minus the time that computations of the same device waited for the disk meanwhile. It is not part of
//! the sum.

pub mod confidence_intervals;
pub mod event_impact;
pub mod sequences;
pub mod token_times;

mod lockstep;

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use self::sequences::{RequestMetrics, SequenceMetrics, SpeculationMetrics};
use self::token_times::{DecodeStep, TokenTimes};
use hearth_profiles::PerSecond;
use hearth_schema::run_events::RunEventKind;
use hearth_schema::trace::{
    Counter, CounterReading, MemoryKind, Outcome, Resource, ShortageRecord, StepKind, StepRecord, Trace,
    TracedDevice,
};

/// Speed of silent reading, in tokens. source: Brysbaert 2019, "How many words do we read per minute?": 238 words a
/// minute, with 1.3 tokens to a word
pub const READING_SPEED: PerSecond = PerSecond(5.2);

/// Mean, median and 95th percentile (nearest rank) of the time per token, in milliseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct LatencySummary {
    #[serde(rename = "mean")]
    pub mean_ms: f64,
    #[serde(rename = "p50")]
    pub p50_ms: f64,
    #[serde(rename = "p95")]
    pub p95_ms: f64,
}

/// The terms of the time per token ([definitions](self)), in milliseconds. All but `hidden_disk` sum to the mean TPOT.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Terms {
    pub cpu: f64,
    pub gpu: f64,
    pub memory: f64,
    pub demand_disk: f64,
    #[serde(alias = "air")]
    pub network: f64,
    pub queue: f64,
    pub bubble: f64,
    pub hidden_disk: f64,
}

impl Terms {
    /// Returns the sum of all terms except `hidden_disk`, which is the mean TPOT, in milliseconds.
    pub fn sum(&self) -> f64 {
        self.cpu + self.gpu + self.memory + self.demand_disk + self.network + self.queue + self.bubble
    }

    /// Returns the names and values of the terms that sum to the mean TPOT, in the order in which reports list them.
    pub fn named_terms(&self) -> [(&'static str, f64); 7] {
        [
            ("cpu", self.cpu),
            ("gpu", self.gpu),
            ("memory", self.memory),
            ("demand_disk", self.demand_disk),
            ("network", self.network),
            ("queue", self.queue),
            ("bubble", self.bubble),
        ]
    }
}

/// Metrics of one device, averaged over the generated tokens after the first.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct DeviceMetrics {
    pub name: String,
    /// Maximum memory pressure: unreclaimable bytes divided by total memory.
    pub memory_pressure: f64,
    /// Bytes read from disk per generated token after the first.
    pub bytes_read_per_token: f64,
    /// Bytes of weights in memory at the end of the run.
    pub resident_bytes: u64,
    /// Milliseconds per token that the device spends in computing steps, including waits for the disk.
    pub busy_ms: f64,
    /// Milliseconds per token that computing steps waited for the disk.
    pub demand_disk_ms: f64,
    /// Milliseconds per token of read-ahead that no computation waited for.
    pub hidden_disk_ms: f64,
    /// Whether the device failed and its trace was lost. If so, zeros in the other fields stand for unknown values.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub trace_lost: bool,
}

/// A device with too little memory for the run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct MemoryShortage {
    pub device: String,
    #[serde(rename = "memory")]
    pub memory_kind: MemoryKind,
    /// The minimum memory of the kind `memory_kind` that the run needs on the device, in bytes.
    pub needed_bytes: u64,
    pub available_bytes: u64,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Metrics {
    pub outcome: Outcome,
    /// The devices with too little memory, if the run ended because a device ran out of memory.
    #[serde(default, alias = "short_of_memory", skip_serializing_if = "Vec::is_empty")]
    pub memory_shortages: Vec<MemoryShortage>,
    /// Time per output token after the first, in milliseconds; absent if there is only one token.
    pub tpot_ms: Option<LatencySummary>,
    /// Mean time to the first token of a sequence, in milliseconds; absent if no token was generated.
    pub ttft_ms: Option<f64>,
    /// Rate of the output tokens after the first of the run, in tokens per second, over all sequences.
    pub tokens_per_s: Option<f64>,
    pub terms_ms: Terms,
    /// The metrics of each sequence, if there are several.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub sequences: Vec<SequenceMetrics>,
    /// The metrics of all requests, if they arrived during the run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub requests: Option<RequestMetrics>,
    /// The metrics of speculative decoding, if tokens were drafted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub speculation: Option<SpeculationMetrics>,
    pub devices: Vec<DeviceMetrics>,
    pub seed: u64,
}

impl Metrics {
    /// Returns the disk bytes read by all devices per generated token after the first; `None` if a trace was lost.
    pub fn bytes_read_per_token(&self) -> Option<f64> {
        let known = |device: &DeviceMetrics| (!device.trace_lost).then_some(device.bytes_read_per_token);
        // `sum` of an empty iterator would be -0.
        self.devices.iter().map(known).try_fold(0.0, |sum, read| Some(sum + read?))
    }
}

pub fn compute_metrics(trace: &Trace) -> Metrics {
    let by_pass = group_by_pass(&trace.records);
    let first = trace.passes.first();
    let has_arrivals = !trace.admissions.is_empty();
    let begin =
        first.and_then(|pass| records_of(&by_pass, pass.index, 0).map(|record| record.start_ns).min());
    // Requests that arrive during the run may have waited for the first pass.
    let begin = begin.map(|begin| if has_arrivals { 0 } else { begin });
    let outputs = TokenTimes::from_records(trace, &by_pass);
    let share = 1.0 / outputs.decoded_tokens() as f64;
    let mut terms = Terms::default();
    for step in &outputs.decode_steps {
        add_share(&mut terms, &step_terms(trace, &by_pass, step), share);
    }
    let devices = devices(trace, &outputs);
    terms.hidden_disk = total(devices.iter().map(|device| device.hidden_disk_ms));
    let token_times = sequences::token_times_summary(&outputs.decode_steps);
    // The mean is the sum of the terms of the steps, in their order.
    let time = total(outputs.decode_steps.iter().map(|step| millis(step.duration_ns())));
    let mean_ms = time / outputs.decoded_tokens() as f64;
    let tpot = token_times.map(|times| LatencySummary { mean_ms, p50_ms: times.p50, p95_ms: times.p95 });
    let mean = tpot.map(|tpot| tpot.mean_ms);
    let to_first = |begin: u64| {
        let sum = total(outputs.first_tokens.iter().map(|first| millis(first.since_request(begin))));
        (!outputs.first_tokens.is_empty()).then(|| sum / outputs.first_tokens.len() as f64)
    };
    Metrics {
        outcome: trace.outcome,
        memory_shortages: memory_shortages(trace),
        tpot_ms: tpot,
        ttft_ms: begin.and_then(to_first),
        tokens_per_s: mean.and_then(|mean| sequences::token_rate(&outputs, mean)),
        terms_ms: terms,
        sequences: sequences::sequence_metrics(&outputs, begin),
        requests: if has_arrivals { sequences::request_metrics(&outputs, token_times) } else { None },
        speculation: sequences::speculation_metrics(&outputs, &by_pass, mean),
        devices,
        seed: trace.header.seed,
    }
}

/// Returns the terms of one decode step, in milliseconds, by the rule for rings or for tensor parallelism.
fn step_terms(trace: &Trace, by_pass: &ByPass<'_>, step: &DecodeStep) -> Terms {
    let devices = trace.header.devices.len();
    if trace.header.parallelism.is_ring() {
        decompose(by_pass, step, devices)
    } else {
        lockstep::decompose(by_pass, step, devices)
    }
}

/// Returns the terms of each device in milliseconds per token, in the order of the devices in the trace header. `cpu`,
/// `gpu`, `memory` and `demand_disk` are the device's part of these terms, `queue` is the run-queue delay in its steps.
pub fn device_terms(trace: &Trace) -> Vec<Terms> {
    let outputs = TokenTimes::from_trace(trace);
    let passes: BTreeSet<u32> = outputs.decode_steps.iter().map(|step| step.batch).collect();
    let mut sums = vec![Terms::default(); trace.header.devices.len()];
    let work = trace.records.iter().filter(|record| record.is_processor_work());
    for record in work.filter(|record| passes.contains(&record.pass_index)) {
        if let Some(sum) = sums.get_mut(usize::from(record.device_index)) {
            charge(sum, record);
        }
    }
    let mean = |sum: &Terms| {
        let mut mean = Terms::default();
        add_share(&mut mean, sum, 1.0 / outputs.decoded_tokens().max(1) as f64);
        mean
    };
    sums.iter().map(mean).collect()
}

fn memory_shortages(trace: &Trace) -> Vec<MemoryShortage> {
    let name = |device: u16| trace.header.devices.get(usize::from(device)).map(|device| device.name.clone());
    let named = |shortage: &ShortageRecord| MemoryShortage {
        device: name(shortage.device_index).unwrap_or_default(),
        memory_kind: shortage.memory_kind,
        needed_bytes: shortage.needed_bytes,
        available_bytes: shortage.available_bytes,
    };
    trace.shortages.iter().map(named).collect()
}

type ByPass<'t> = BTreeMap<(u32, u16), Vec<&'t StepRecord>>;

fn group_by_pass(records: &[StepRecord]) -> ByPass<'_> {
    let mut groups: ByPass<'_> = BTreeMap::new();
    for record in records {
        groups.entry((record.pass_index, record.device_index)).or_default().push(record);
    }
    groups
}

fn records_of<'t>(by_pass: &ByPass<'t>, pass: u32, device: u16) -> impl Iterator<Item = &'t StepRecord> {
    by_pass.get(&(pass, device)).into_iter().flatten().copied()
}

fn readings_of(
    trace: &Trace,
    device: u16,
    counter: Counter,
) -> impl DoubleEndedIterator<Item = &CounterReading> {
    trace.readings.iter().filter(move |it| (it.device_index, it.counter) == (device, counter))
}

fn millis(nanos: u64) -> f64 {
    nanos as f64 * 1e-6
}

/// Returns the sum of the numbers, 0 if there are none; [`Iterator::sum`] would then return -0.
fn total(numbers: impl Iterator<Item = f64>) -> f64 {
    numbers.fold(0.0, |sum, number| sum + number)
}

fn total_millis<'t>(records: impl IntoIterator<Item = &'t StepRecord>) -> f64 {
    total(records.into_iter().map(|record| millis(record.duration_ns())))
}

fn charge(terms: &mut Terms, record: &StepRecord) {
    let wall = millis(record.duration_ns());
    if record.resource == Resource::Gpu {
        terms.gpu += wall;
        return;
    }
    if record.kind == StepKind::Copy {
        terms.memory += wall;
        return;
    }
    let cost = record.cost.unwrap_or_default();
    let cpu = millis(cost.cpu_ns).min(wall);
    let queue = millis(cost.queue_ns).min(wall - cpu);
    let copy = millis(cost.copy_ns).min(wall - cpu - queue);
    terms.cpu += cpu;
    terms.queue += queue;
    terms.memory += copy;
    terms.demand_disk += wall - cpu - queue - copy;
}

/// Returns the terms of one decode step of a ring, in milliseconds.
fn decompose(by_pass: &ByPass<'_>, token: &DecodeStep, devices: usize) -> Terms {
    let mut terms = Terms::default();
    let records = |device: u16| records_of(by_pass, token.batch, device);
    let mut explained = 0.0;
    // The draft model reads chunks of prompts while the batch is on other devices, or after its output.
    let embed = records(0).find(|record| record.kind == StepKind::Embed).map(|record| record.start_ns);
    let is_aside = |record: &&StepRecord| {
        record.kind == StepKind::Draft && embed.is_some_and(|embed| record.start_ns >= embed)
    };
    for record in records(0).filter(|record| record.is_processor_work() && !is_aside(record)) {
        charge(&mut terms, record);
        explained += millis(record.duration_ns());
    }
    // Each message that the head sends comes back to it after one round.
    for sent in records(0).filter(|record| record.kind == StepKind::Send) {
        let received = records(0).filter(|it| it.kind == StepKind::Receive && it.end_ns >= sent.start_ns);
        let Some(back) = received.min_by_key(|record| record.end_ns) else { continue };
        let round_trip = millis(back.end_ns - sent.start_ns);
        explained += round_trip;
        let mut away = 0.0;
        for device in 1..devices as u16 {
            away += charge_round(&mut terms, records(device).filter(|record| record.round == sent.round));
        }
        terms.network += round_trip - away;
    }
    // After an interruption, the time before the first step of the pass is a bubble: the ring was rebuilt, or tokens
    // were recomputed.
    let begun = records(0).map(|record| record.start_ns).min().filter(|_| token.was_interrupted);
    let lost = millis(begun.map_or(0, |begun| begun.saturating_sub(token.start_ns)));
    terms.queue += (millis(token.duration_ns()) - explained - lost).max(0.0);
    terms.bubble = millis(token.duration_ns()) - terms.sum();
    terms
}

/// Adds to `terms` the steps of a device from the arrival of a message until the device sends the next message. Returns
/// the time from arrival to sending, in milliseconds.
fn charge_round<'t>(terms: &mut Terms, records: impl Iterator<Item = &'t StepRecord>) -> f64 {
    let (mut arrived, mut left, mut worked) = (None, None, 0.0);
    for record in records {
        match record.kind {
            StepKind::Receive => arrived = Some(record.end_ns),
            StepKind::Send => left = Some(record.start_ns),
            _ if record.is_processor_work() => {
                charge(terms, record);
                worked += millis(record.duration_ns());
            }
            _ => {}
        }
    }
    let (Some(arrived), Some(left)) = (arrived, left) else { return worked };
    let stayed = millis(left.saturating_sub(arrived)).max(worked);
    terms.queue += stayed - worked;
    stayed
}

/// Adds each term of `one`, multiplied by `share`, to the same term of `total`.
fn add_share(total: &mut Terms, one: &Terms, share: f64) {
    total.cpu += one.cpu * share;
    total.gpu += one.gpu * share;
    total.memory += one.memory * share;
    total.demand_disk += one.demand_disk * share;
    total.network += one.network * share;
    total.queue += one.queue * share;
    total.bubble += one.bubble * share;
}

fn devices(trace: &Trace, outputs: &TokenTimes) -> Vec<DeviceMetrics> {
    let steps = &outputs.decode_steps;
    let last = steps.last().map(|step| step.batch);
    let count = outputs.decoded_tokens().max(1) as f64;
    // Bytes read after the last prompt belong to the tokens that follow.
    let prompt = outputs.first_tokens.last().map(|first| first.batch);
    let after = steps.iter().filter(|step| prompt.is_none_or(|prompt| step.batch > prompt));
    let read_for: u64 = after.map(|step| u64::from(step.tokens())).sum();
    let metrics = |(index, device): (u16, &TracedDevice)| {
        let is_decoding = |pass: u32| steps.binary_search_by_key(&pass, |step| step.batch).is_ok();
        let own = || trace.records.iter().filter(|it| it.device_index == index && is_decoding(it.pass_index));
        let work: Vec<&StepRecord> = own().filter(|record| record.is_processor_work()).collect();
        let ahead: Vec<&StepRecord> = own().filter(|record| record.kind == StepKind::Prefetch).collect();
        let mut terms = Terms::default();
        for record in &work {
            charge(&mut terms, record);
        }
        let at = |counter: Counter, pass: Option<u32>| {
            let mut readings = readings_of(trace, index, counter).rev();
            let last = readings.find(|reading| pass.is_none_or(|pass| reading.pass_index <= pass));
            last.map_or(0, |reading| reading.value)
        };
        let unreclaimable = readings_of(trace, index, Counter::Unreclaimable).map(|it| it.value).max();
        let read = at(Counter::BytesRead, last).saturating_sub(at(Counter::BytesRead, prompt));
        DeviceMetrics {
            name: device.name.clone(),
            memory_pressure: unreclaimable.unwrap_or(0) as f64 / device.total_memory_bytes.max(1) as f64,
            bytes_read_per_token: if read_for == 0 { 0.0 } else { read as f64 / read_for as f64 },
            resident_bytes: at(Counter::Resident, None),
            busy_ms: total_millis(work.iter().copied()) / count,
            demand_disk_ms: terms.demand_disk / count,
            hidden_disk_ms: hidden(&ahead, &work) / count,
            trace_lost: is_lost(trace, index, &device.name),
        }
    };
    (0..).zip(&trace.header.devices).map(metrics).collect()
}

/// Whether a device was lost and the trace has neither records nor readings of the device.
fn is_lost(trace: &Trace, index: u16, name: &str) -> bool {
    let mut silent = trace.run_events.iter().filter(|it| it.kind == RunEventKind::Silent);
    silent.any(|it| it.device.as_deref() == Some(name))
        && !trace.records.iter().any(|record| record.device_index == index)
        && !trace.readings.iter().any(|reading| reading.device_index == index)
}

/// Returns the milliseconds of read-ahead during which no step of the device waited for the disk. The trace does not
/// tell when a step waited, so the disk wait of each step is subtracted from the read-ahead that overlaps the step.
/// `work` is ordered by start time. A later step can end before an earlier one, because processors work in parallel.
fn hidden(ahead: &[&StepRecord], work: &[&StepRecord]) -> f64 {
    let mut overlapping = vec![0u64; work.len()];
    for reading in ahead {
        let from = work.partition_point(|record| record.end_ns <= reading.start_ns);
        for (at, record) in work.iter().enumerate().skip(from) {
            if record.start_ns >= reading.end_ns {
                break;
            }
            let overlap =
                record.end_ns.min(reading.end_ns).saturating_sub(record.start_ns.max(reading.start_ns));
            overlapping[at] = overlapping[at].saturating_add(overlap);
        }
    }
    let waited = |(overlap, record): (&u64, &&StepRecord)| {
        let mut terms = Terms::default();
        charge(&mut terms, record);
        millis(*overlap).min(terms.demand_disk)
    };
    let all = total_millis(ahead.iter().copied());
    (overlapping.iter().zip(work).map(waited).fold(all, |left, ms| left - ms)).max(0.0)
}

#[cfg(test)]
mod tests;
