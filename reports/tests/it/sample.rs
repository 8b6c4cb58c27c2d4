//! A realistic pair of traces, for tests and for the example.
//!
//! The ring has three devices and two rounds: a laptop (head) that reads a few bytes on demand, a desktop with a GPU,
//! and a phone with too little memory. Times are computed from constants and a short fixed sequence of deviations.

use hearth_profiles::device::PageCachePolicy;
use hearth_schema::Trace;
use hearth_schema::pass::Pass;
use hearth_schema::plan::Parallelism;
use hearth_schema::trace::{
    Counter, CounterReading, Header, Origin, Outcome, Resource, StepCost, StepKind, StepRecord, TracedDevice,
};

const MICRO: u64 = 1_000;
const MIB: u64 = 1 << 20;
const ROUNDS: u32 = 2;

/// Names of the devices. All other arrays of device values have this order.
const NAMES: [&str; 3] = ["laptop", "desktop", "phone"];
/// Number of layers in a window of each device.
const LAYERS: [u32; 3] = [6, 8, 2];
// Times per window in microseconds.
const CPU_TIMES: [u64; 3] = [5_200, 1_500, 6_300];
const GPU_TIMES: [u64; 3] = [0, 3_100, 0];
const DISK_WAITS: [u64; 3] = [900, 0, 2_400];
const READ_AHEAD_TIMES: [u64; 3] = [9_000, 0, 12_500];
const RESIDENT_MIB: [u64; 3] = [1_900, 2_600, 480];
const MEMORY_MIB: [u64; 3] = [8_192, 16_384, 3_072];

/// Times of a measured run in percent of the simulated times, used cyclically.
const DEVIATIONS: [u64; 7] = [104, 98, 111, 101, 96, 108, 131];

/// A trace under construction.
#[derive(Default)]
struct Run {
    measured: bool,
    records: Vec<StepRecord>,
    readings: Vec<CounterReading>,
    /// The time in nanoseconds at which the disk of each device is free.
    disk_free: [u64; 3],
    /// Number of bytes that each device has read from disk so far.
    read: [u64; 3],
    /// Number of deviations ([`DEVIATIONS`]) that have been applied so far.
    time_count: usize,
}

/// Returns a simulated and a measured trace of one plan, with `tokens` generated tokens.
pub fn pair(tokens: u32) -> Vec<Trace> {
    vec![trace(Origin::Simulated, tokens), trace(Origin::Measured, tokens)]
}

pub fn trace(origin: Origin, tokens: u32) -> Trace {
    let measured = origin == Origin::Measured;
    let mut run = Run { measured, ..Run::default() };
    let passes: Vec<Pass> = (0..tokens)
        .map(|index| match index {
            0 => Pass::new(0, 0, 16, true),
            _ => Pass::new(index, 15 + index, 1, true),
        })
        .collect();
    let mut now = 0;
    for pass in &passes {
        now = run.pass(pass.index, u64::from(pass.tokens), now);
    }
    run.records.sort_by_key(|record| (record.start_ns, record.device_index));
    Trace {
        header: header(origin),
        passes,
        admissions: vec![],
        records: run.records,
        readings: run.readings,
        shortages: vec![],
        run_events: vec![],
        outcome: Outcome::Ok,
    }
}

fn header(origin: Origin) -> Header {
    let measured = origin == Origin::Measured;
    Header {
        schema: Trace::SCHEMA.into(),
        origin,
        scenario_name: "kitchen-3".into(),
        plan_digest: "sha256:5d0c1f9be2a47763".into(),
        model_name: "llama-8b-q4_k_m".into(),
        parallelism: Parallelism::Ring,
        seed: 7,
        program_version: "0.1.0".into(),
        devices: NAMES
            .into_iter()
            .zip(MEMORY_MIB)
            .map(|(name, memory_mib)| TracedDevice {
                name: name.into(),
                profile_digest: Some(format!("sha256:{:016x}", 0x1234_5678_9abc_u64 * memory_mib)),
                total_memory_bytes: memory_mib * MIB,
                os_and_kernel: measured.then(|| "Linux 6.12.48".into()),
                unvalidated_parts: (name == "phone" && !measured)
                    .then(|| "page cache policy of this kernel".into()),
                page_cache_policy: (!measured).then_some(PageCachePolicy::TwoList),
            })
            .collect(),
    }
}

impl Run {
    /// Converts microseconds to nanoseconds, with the next of the [`DEVIATIONS`] if the run is measured.
    fn time(&mut self, micros: u64) -> u64 {
        if !self.measured {
            return micros * MICRO;
        }
        self.time_count += 1;
        micros * MICRO * DEVIATIONS[self.time_count % DEVIATIONS.len()] / 100
    }

    /// Adds a step: `at` is its pass and round, `span` its start and end in nanoseconds.
    fn push(&mut self, device_index: u16, kind: StepKind, at: (u32, u32), span: [u64; 2]) -> &mut StepRecord {
        let resource = match kind {
            StepKind::Send => Resource::Tx,
            StepKind::Receive => Resource::Rx,
            StepKind::Prefetch => Resource::DiskPrefetch,
            _ => Resource::Cpu,
        };
        let ((pass_index, round), [start_ns, end_ns]) = (at, span);
        let step = StepRecord { device_index, resource, kind, pass_index, round, ..StepRecord::default() };
        self.records.push(StepRecord { start_ns, end_ns, ..step });
        self.records.last_mut().expect("a record was added")
    }

    /// Records a pass through the ring that begins at `begin`. Returns when its token was sampled, in nanoseconds.
    fn pass(&mut self, pass: u32, tokens: u64, begin: u64) -> u64 {
        let factor = 1 + tokens / 4;
        let mut now = begin + self.time(30);
        self.push(0, StepKind::Embed, (pass, 0), [begin, now]).cost =
            Some(StepCost { cpu_ns: now - begin, ..StepCost::default() });
        let mut waiting_since = [begin; 3];
        for round in 0..ROUNDS {
            for device in 0..3_u16 {
                now = self.window(device, (pass, round), now, factor);
                let sent = now + self.time(120);
                let to = (device + 1) % 3;
                let next_round = round + u32::from(to == 0);
                let send = self.push(device, StepKind::Send, (pass, round), [now, sent]);
                (send.bytes, send.peer) = (16_384 * tokens, Some(to));
                self.read_ahead(device, (pass, round), sent);
                waiting_since[usize::from(device)] = sent;
                now = sent + self.time(if self.measured { 2_300 } else { 1_900 });
                let since = waiting_since[usize::from(to)];
                let receive = self.push(to, StepKind::Receive, (pass, next_round), [since, now]);
                (receive.bytes, receive.peer) = (16_384 * tokens, Some(device));
            }
        }
        let end = now + self.time(2_800);
        self.push(0, StepKind::Output, (pass, ROUNDS), [now, end]).cost =
            Some(StepCost { cpu_ns: (end - now) / 8 * 7, queue_ns: (end - now) / 8, ..StepCost::default() });
        self.record_counters(pass, end);
        end
    }

    /// Records the computation of a window, `factor` times as long as for one token. Returns its end in nanoseconds.
    fn window(&mut self, device: u16, at: (u32, u32), begin: u64, factor: u64) -> u64 {
        let index = usize::from(device);
        let mut now = begin + self.time(40);
        let first = LAYERS[..index].iter().sum::<u32>() + at.1 * LAYERS.iter().sum::<u32>();
        let layers = Some([first, first + LAYERS[index]]);
        if GPU_TIMES[index] > 0 {
            let end = now + self.time(GPU_TIMES[index] * factor);
            let step = self.push(device, StepKind::Compute, at, [now, end]);
            (step.resource, step.layers) = (Resource::Gpu, layers);
            now = end;
        }
        let (cpu_ns, queue_ns) = (self.time(CPU_TIMES[index] * factor), self.time(60));
        let demand = self.time(DISK_WAITS[index]);
        let end = now + cpu_ns + queue_ns + demand;
        let (resident_bytes, faulted_bytes) = (400 * MIB, demand / 1_000 * 2_000);
        self.read[index] += faulted_bytes;
        let step = self.push(device, StepKind::Compute, at, [now, end]);
        step.layers = layers;
        step.cost = Some(StepCost { cpu_ns, queue_ns, copy_ns: 0, resident_bytes, faulted_bytes });
        end
    }

    /// Records the read-ahead of the next window, which begins as soon as the disk is free.
    fn read_ahead(&mut self, device: u16, at: (u32, u32), from: u64) {
        let (index, micros) = (usize::from(device), READ_AHEAD_TIMES[usize::from(device)]);
        if micros == 0 {
            return;
        }
        let start = from.max(self.disk_free[index]);
        let end = start + self.time(micros);
        self.disk_free[index] = end;
        self.read[index] += micros * 2_000;
        self.push(device, StepKind::Prefetch, at, [start, end]).bytes = micros * 2_000;
    }

    fn record_counters(&mut self, pass_index: u32, time_ns: u64) {
        for device_index in 0..3_u16 {
            let index = usize::from(device_index);
            let values = [
                (Counter::BytesRead, self.read[index]),
                (Counter::Resident, RESIDENT_MIB[index] * MIB * u64::from(10 + pass_index.min(10)) / 20),
                (Counter::Unreclaimable, MEMORY_MIB[index] * MIB / 11 + u64::from(pass_index) * MIB / 4),
            ];
            for (counter, value) in values {
                self.readings.push(CounterReading { device_index, counter, pass_index, time_ns, value });
            }
        }
    }
}
