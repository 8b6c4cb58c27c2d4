//! A realistic pair of traces, for tests and for the example.
//!
//! The ring has three devices and two rounds: a laptop (head) that reads a few bytes on demand, a desktop with a GPU,
//! and a phone with too little memory. Times are computed from constants and a short fixed sequence of deviations.

use hearth_profiles::device::PageCachePolicy;
use hearth_schema::Trace;
use hearth_schema::pass::Pass;
use hearth_schema::plan::Parallelism;
use hearth_schema::trace::{
    Cost, Counter, Header, Kind, Origin, Outcome, Reading, Record, Resource, TracedDevice,
};

const MICRO: u64 = 1_000;
const MIB: u64 = 1 << 20;
const ROUNDS: u32 = 2;

/// The times of a device per window in microseconds, and its memory.
struct Costs {
    name: &'static str,
    layers: u32,
    cpu: u64,
    gpu: u64,
    /// Time waiting for the disk.
    demand: u64,
    /// Time reading ahead.
    ahead: u64,
    resident_mib: u64,
    memory_mib: u64,
}

const DEVICES: [Costs; 3] = [
    Costs {
        name: "laptop",
        layers: 6,
        cpu: 5_200,
        gpu: 0,
        demand: 900,
        ahead: 9_000,
        resident_mib: 1_900,
        memory_mib: 8_192,
    },
    Costs {
        name: "desktop",
        layers: 8,
        cpu: 1_500,
        gpu: 3_100,
        demand: 0,
        ahead: 0,
        resident_mib: 2_600,
        memory_mib: 16_384,
    },
    Costs {
        name: "phone",
        layers: 2,
        cpu: 6_300,
        gpu: 0,
        demand: 2_400,
        ahead: 12_500,
        resident_mib: 480,
        memory_mib: 3_072,
    },
];

/// Times of a measured run in percent of the simulated times, used cyclically.
const DEVIATIONS: [u64; 7] = [104, 98, 111, 101, 96, 108, 131];

/// A trace under construction.
struct Run {
    measured: bool,
    records: Vec<Record>,
    readings: Vec<Reading>,
    /// The time in nanoseconds at which the disk of each device is free.
    disk_free: [u64; 3],
    /// Bytes that each device has read.
    read: [u64; 3],
    /// Number of durations that were generated.
    time_count: usize,
}

/// Returns a simulated and a measured trace of one plan, with `tokens` generated tokens.
pub fn pair(tokens: u32) -> Vec<Trace> {
    vec![trace(Origin::Simulated, tokens), trace(Origin::Measured, tokens)]
}

pub fn trace(origin: Origin, tokens: u32) -> Trace {
    let measured = origin == Origin::Measured;
    let mut run = Run {
        measured,
        records: Vec::new(),
        readings: Vec::new(),
        disk_free: [0; 3],
        read: [0; 3],
        time_count: 0,
    };
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
    run.records.sort_by_key(|record| (record.start, record.device));
    Trace {
        header: header(origin),
        passes,
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
        scenario: "kitchen-3".into(),
        plan_digest: "sha256:5d0c1f9be2a47763".into(),
        model: "llama-8b-q4_k_m".into(),
        kind: Parallelism::Ring,
        seed: 7,
        version: "0.1.0".into(),
        devices: DEVICES
            .iter()
            .map(|device| TracedDevice {
                name: device.name.into(),
                profile_digest: Some(format!("sha256:{:016x}", 0x1234_5678_9abc_u64 * device.memory_mib)),
                memory_total: device.memory_mib * MIB,
                kernel: measured.then(|| "Linux 6.12.48".into()),
                unvalidated: (device.name == "phone" && !measured)
                    .then(|| "page cache policy of this kernel".into()),
                policy: (!measured).then_some(PageCachePolicy::TwoList),
            })
            .collect(),
    }
}

impl Run {
    /// Returns a time in nanoseconds; times of a measured run deviate.
    fn time(&mut self, micros: u64) -> u64 {
        if !self.measured {
            return micros * MICRO;
        }
        self.time_count += 1;
        micros * MICRO * DEVIATIONS[self.time_count % DEVIATIONS.len()] / 100
    }

    fn push(
        &mut self,
        device: u16,
        kind: Kind,
        at: (u32, u32),
        span: [u64; 2],
        fill: impl FnOnce(&mut Record),
    ) {
        let resource = match kind {
            Kind::Send => Resource::Tx,
            Kind::Receive => Resource::Rx,
            Kind::Prefetch => Resource::DiskPrefetch,
            _ => Resource::Cpu,
        };
        let (pass, round) = at;
        let [start, end] = span;
        let mut record = Record {
            device,
            resource,
            kind,
            pass,
            round,
            layers: None,
            start,
            end,
            bytes: 0,
            peer: None,
            cost: None,
        };
        fill(&mut record);
        self.records.push(record);
    }

    /// Records a pass through the ring. Returns the time at which its token was sampled.
    fn pass(&mut self, pass: u32, tokens: u64, begin: u64) -> u64 {
        let factor = 1 + tokens / 4;
        let mut now = begin + self.time(30);
        self.push(0, Kind::Embed, (pass, 0), [begin, now], |record| {
            record.cost = Some(Cost { cpu: now - begin, ..Cost::default() });
        });
        let mut waiting_since = [begin; 3];
        for round in 0..ROUNDS {
            for device in 0..3_u16 {
                now = self.window(device, (pass, round), now, factor);
                let sent = now + self.time(120);
                let to = (device + 1) % 3;
                let next_round = round + u32::from(to == 0);
                self.push(device, Kind::Send, (pass, round), [now, sent], |record| {
                    record.bytes = 16_384 * tokens;
                    record.peer = Some(to);
                });
                self.read_ahead(device, (pass, round), sent);
                waiting_since[usize::from(device)] = sent;
                now = sent + self.time(if self.measured { 2_300 } else { 1_900 });
                let since = waiting_since[usize::from(to)];
                self.push(to, Kind::Receive, (pass, next_round), [since, now], |record| {
                    record.bytes = 16_384 * tokens;
                    record.peer = Some(device);
                });
            }
        }
        let end = now + self.time(2_800);
        self.push(0, Kind::Output, (pass, ROUNDS), [now, end], |record| {
            record.cost = Some(Cost { cpu: (end - now) / 8 * 7, queue: (end - now) / 8, ..Cost::default() });
        });
        self.record_counters(pass, end);
        end
    }

    /// Records the computation of a window. Returns its end time.
    fn window(&mut self, device: u16, at: (u32, u32), begin: u64, factor: u64) -> u64 {
        let costs = &DEVICES[usize::from(device)];
        let mut now = begin + self.time(40);
        let first: u32 = DEVICES[..usize::from(device)].iter().map(|device| device.layers).sum::<u32>()
            + at.1 * DEVICES.iter().map(|device| device.layers).sum::<u32>();
        let layers = Some([first, first + costs.layers]);
        if costs.gpu > 0 {
            let end = now + self.time(costs.gpu * factor);
            self.push(device, Kind::Compute, at, [now, end], |record| {
                record.resource = Resource::Gpu;
                record.layers = layers;
            });
            now = end;
        }
        let (cpu, queue) = (self.time(costs.cpu * factor), self.time(60));
        let demand = self.time(costs.demand);
        let end = now + cpu + queue + demand;
        let faulted = demand / 1_000 * 2_000;
        self.read[usize::from(device)] += faulted;
        self.push(device, Kind::Compute, at, [now, end], |record| {
            record.layers = layers;
            record.cost = Some(Cost { cpu, queue, copy: 0, resident: 400 * MIB, faulted });
        });
        end
    }

    /// Records reading ahead of the next window as soon as the disk is free.
    fn read_ahead(&mut self, device: u16, at: (u32, u32), from: u64) {
        let costs = &DEVICES[usize::from(device)];
        if costs.ahead == 0 {
            return;
        }
        let start = from.max(self.disk_free[usize::from(device)]);
        let end = start + self.time(costs.ahead);
        self.disk_free[usize::from(device)] = end;
        self.read[usize::from(device)] += costs.ahead * 2_000;
        self.push(device, Kind::Prefetch, at, [start, end], |record| record.bytes = costs.ahead * 2_000);
    }

    /// Records the counters of all devices.
    fn record_counters(&mut self, pass: u32, at: u64) {
        for device in 0..3_u16 {
            let costs = &DEVICES[usize::from(device)];
            let resident = costs.resident_mib * MIB * u64::from(10 + pass.min(10)) / 20;
            let values = [
                (Counter::BytesRead, self.read[usize::from(device)]),
                (Counter::Resident, resident),
                (Counter::Unreclaimable, costs.memory_mib * MIB / 11 + u64::from(pass) * MIB / 4),
            ];
            for (counter, value) in values {
                self.readings.push(Reading { device, counter, pass, at, value });
            }
        }
    }
}
