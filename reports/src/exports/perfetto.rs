//! Exports traces in the Chrome trace event format, for Perfetto and `chrome://tracing`.
//!
//! Each device is a process and each resource a thread. Steps are complete events (`ph: X`) in microseconds,
//! counters are `C` events, and the messages of the ring are flow arrows (`s`, `f`). A process id is a position in
//! the ring, from 1, because viewers treat 0 as the idle process. If several traces are exported together, the
//! process ids continue from one trace to the next, and a prefix distinguishes the process names.
//!
//! The part of a computing step that waited for the disk is exported a second time, as a "disk demand" event. The
//! trace has only the length of this part, so the event is put at the start of the step. Viewers drop
//! events of one thread that overlap without being nested, so concurrent steps on one resource get additional threads
//! ("disk prefetch 2").

use std::collections::BTreeMap;

use hearth_schema::Trace;
use hearth_schema::trace::{Counter, Origin, Resource, StepKind, StepRecord};
use serde::Serialize;
use serde_json::{Value, json};

use crate::timeline::{activities, events, messages};

/// Resources of a device and the names of their threads, in the order of the thread ids, from 1.
const THREADS: [(Resource, &str); 7] = [
    (Resource::Cpu, "cpu"),
    (Resource::Gpu, "gpu"),
    (Resource::DiskDemand, "disk demand"),
    (Resource::DiskPrefetch, "disk prefetch"),
    (Resource::Tx, "tx"),
    (Resource::Rx, "rx"),
    (Resource::Npu, "npu"),
];

/// Number of resources with interleaved thread ids: the first threads of all these resources, then their second
/// threads, and so on.
const INTERLEAVED: usize = 6;

/// Id of the first thread of the NPU, larger than the ids of all threads of the other resources.
const NPU_THREAD: usize = 500_000;

/// Id of the first thread of run events, larger than the ids of all threads of steps.
const EVENT_THREAD: usize = 1_000_000;

#[derive(Default, Serialize)]
struct Event<'e> {
    name: &'e str,
    /// The phase of the trace event format, which is the kind of event.
    ph: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    cat: Option<&'static str>,
    pid: usize,
    tid: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    ts: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    dur: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<usize>,
    /// Binding point of the end of a flow: `e` binds it to the enclosing slice instead of the next one.
    #[serde(skip_serializing_if = "Option::is_none")]
    bp: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    args: Option<Args>,
}

#[derive(Serialize)]
#[serde(untagged)]
enum Args {
    Step {
        pass: u32,
        round: u32,
        #[serde(skip_serializing_if = "Option::is_none")]
        layers: Option<[u32; 2]>,
        bytes: u64,
        #[serde(skip_serializing_if = "Option::is_none")]
        cost_us: Option<CostMicros>,
    },
    /// The `args` object of a counter or of a metadata event.
    Other(Value),
}

#[derive(Serialize)]
struct CostMicros {
    cpu: f64,
    queue: f64,
    copy: f64,
    disk: f64,
}

#[derive(Serialize)]
struct RunInfo<'t> {
    origin: Origin,
    scenario: &'t str,
    model: &'t str,
    plan: &'t str,
    seed: u64,
    version: &'t str,
}

struct Events {
    out: Vec<u8>,
    /// Number of flows so far, which is also the id of the latest flow.
    flows: usize,
}

impl Events {
    fn push(&mut self, event: &Event<'_>) {
        // The list begins with `[` and a line break.
        self.out.extend_from_slice(if self.out.ends_with(b"[\n") { b"" } else { b",\n" });
        append(&mut self.out, event);
    }

    fn push_metadata(&mut self, name: &str, [pid, tid]: [usize; 2], args: Value) {
        let args = Some(Args::Other(args));
        self.push(&Event { name, ph: "M", pid, tid, args, ..Event::default() });
    }
}

fn append(out: &mut Vec<u8>, value: &impl Serialize) {
    serde_json::to_writer(out, value).expect("events are serializable, and writing to memory cannot fail");
}

/// Exports traces into one JSON file for a timeline viewer. Each trace has an optional prefix for its device names.
pub fn export_traces(traces: &[(Option<&str>, &Trace)]) -> Vec<u8> {
    let mut events = Events { out: b"{\"traceEvents\":[\n".to_vec(), flows: 0 };
    let mut base = 1;
    for (prefix, trace) in traces {
        let slices = slices(trace);
        devices(&mut events, *prefix, trace, base);
        threads(&mut events, &slices, base);
        steps(&mut events, trace, &slices, base);
        counters(&mut events, trace, base);
        flows(&mut events, trace, &slices, base);
        run_events(&mut events, trace, base);
        base += trace.header.devices.len();
    }
    let mut out = events.out;
    out.extend_from_slice(b"\n],\"displayTimeUnit\":\"ms\",\"otherData\":{\"runs\":");
    let runs = traces.iter().map(|(_, Trace { header, .. })| RunInfo {
        origin: header.origin,
        scenario: &header.scenario_name,
        model: &header.model_name,
        plan: &header.plan_digest,
        seed: header.seed,
        version: &header.program_version,
    });
    append(&mut out, &runs.collect::<Vec<_>>());
    out.extend_from_slice(b"}}\n");
    out
}

fn devices(events: &mut Events, prefix: Option<&str>, trace: &Trace, base: usize) {
    for (device, pid) in trace.header.devices.iter().zip(base..) {
        let name = prefix.map_or(device.name.clone(), |prefix| format!("{prefix} {}", device.name));
        events.push_metadata("process_name", [pid, 0], json!({ "name": name }));
        events.push_metadata("process_sort_index", [pid, 0], json!({ "sort_index": pid }));
    }
}

struct Slice {
    record: usize,
    /// Whether the slice is the disk wait of a computing step instead of the step itself.
    demand: bool,
    device: u16,
    /// Index of the resource in [`THREADS`].
    resource: usize,
    start: u64,
    end: u64,
    /// Index of the thread among the threads of the same resource, from 0.
    thread_index: usize,
}

impl Slice {
    fn thread_id(&self) -> usize {
        if self.resource < INTERLEAVED {
            return 1 + self.resource + INTERLEAVED * self.thread_index;
        }
        NPU_THREAD + self.thread_index
    }
}

/// Returns all slices of a trace in the order of their starts, each on the first free thread of its resource.
fn slices(trace: &Trace) -> Vec<Slice> {
    let mut slices = Vec::new();
    for (index, record) in trace.records.iter().enumerate() {
        let mut push = |resource: Resource, demand, start, end| {
            let resource = THREADS.iter().position(|(known, _)| *known == resource).unwrap_or(0);
            let device = record.device_index;
            slices.push(Slice { record: index, demand, device, resource, start, end, thread_index: 0 });
        };
        push(record.resource, false, record.start_ns, record.end_ns);
        if record.resource == Resource::Cpu && record.is_processor_work() {
            let [(_, queue), (_, demand), ..] = activities::activity_durations(record);
            if demand > 0 {
                push(Resource::DiskDemand, true, record.start_ns + queue, record.start_ns + queue + demand);
            }
        }
    }
    slices.sort_by_key(|slice| (slice.start, slice.end, slice.record));
    let mut thread_ends: BTreeMap<(u16, usize), Vec<u64>> = BTreeMap::new();
    for slice in &mut slices {
        let ends = thread_ends.entry((slice.device, slice.resource)).or_default();
        slice.thread_index = free_thread(ends, slice.start, slice.end);
    }
    slices
}

/// Returns the index of the first thread that is free at `start`, and occupies the thread until `end`. `ends` has the
/// end of the last slice of each thread; a new thread is added if no thread is free.
fn free_thread(ends: &mut Vec<u64>, start: u64, end: u64) -> usize {
    if let Some(index) = ends.iter().position(|&end| end <= start) {
        ends[index] = end;
        return index;
    }
    ends.push(end);
    ends.len() - 1
}

/// Writes the names and the sort indices of the threads that are used.
fn threads(events: &mut Events, slices: &[Slice], base: usize) {
    let used: BTreeMap<(u16, usize), &Slice> =
        slices.iter().map(|slice| ((slice.device, slice.thread_id()), slice)).collect();
    for ((device, tid), slice) in used {
        let (pid, (_, name)) = (base + usize::from(device), THREADS[slice.resource]);
        let name = match slice.thread_index {
            0 => name.to_owned(),
            index => format!("{name} {}", index + 1),
        };
        events.push_metadata("thread_name", [pid, tid], json!({ "name": name }));
        let sort_index = 1000 * slice.resource + slice.thread_index;
        events.push_metadata("thread_sort_index", [pid, tid], json!({ "sort_index": sort_index }));
    }
}

fn steps(events: &mut Events, trace: &Trace, slices: &[Slice], base: usize) {
    for slice in slices {
        let record = &trace.records[slice.record];
        let pid = base + usize::from(record.device_index);
        let (ts, dur) = (Some(micros(slice.start)), Some(micros(slice.end.saturating_sub(slice.start))));
        let event = Event { ph: "X", pid, tid: slice.thread_id(), ts, dur, ..Event::default() };
        if slice.demand {
            events.push(&Event { name: "wait for the disk", cat: Some("disk"), ..event });
            continue;
        }
        let cost_us = record.cost.map(|_| {
            let [queue, disk, copy, cpu] =
                activities::activity_durations(record).map(|(_, nanos)| micros(nanos));
            CostMicros { cpu, queue, copy, disk }
        });
        let StepRecord { pass_index: pass, round, layers, bytes, .. } = *record;
        let args = Some(Args::Step { pass, round, layers, bytes, cost_us });
        events.push(&Event { name: &title(record), cat: Some(category(record.kind)), args, ..event });
    }
}

fn counters(events: &mut Events, trace: &Trace, base: usize) {
    // The readings of several devices are not sorted by time, and viewers draw a late reading as a step back in time.
    let mut readings: Vec<_> = trace.readings.iter().collect();
    readings.sort_by_key(|reading| reading.time_ns);
    for reading in readings {
        let (name, unit) = match reading.counter {
            Counter::BytesRead => ("bytes read", "bytes"),
            Counter::Resident => ("resident bytes", "bytes"),
            Counter::Unreclaimable => ("unreclaimable bytes", "bytes"),
            Counter::Refaults => ("refaulted bytes", "bytes"),
            Counter::Available => ("available bytes", "bytes"),
            Counter::Accepted => ("accepted drafts", "tokens"),
        };
        let (pid, ts) = (base + usize::from(reading.device_index), Some(micros(reading.time_ns)));
        let args = Some(Args::Other(json!({ unit: reading.value })));
        events.push(&Event { name, ph: "C", pid, ts, args, ..Event::default() });
    }
}

/// Writes run events to separate threads of the process of their device, or of the first process if they concern the
/// whole ring. Overlapping events are written to different threads.
fn run_events(out: &mut Events, trace: &Trace, base: usize) {
    let last = trace.records.iter().map(|record| record.end_ns).max().unwrap_or(0);
    let mut thread_ends: BTreeMap<usize, Vec<u64>> = BTreeMap::new();
    for event in &trace.run_events {
        let device = trace.header.devices.iter().position(|it| Some(&it.name) == event.device.as_ref());
        let pid = base + device.unwrap_or(0);
        let end = event.end_ns.unwrap_or(last).max(event.start_ns);
        let ends = thread_ends.entry(pid).or_default();
        let known_threads = ends.len();
        let index = free_thread(ends, event.start_ns, end);
        let tid = EVENT_THREAD + index;
        if index == known_threads {
            out.push_metadata("thread_name", [pid, tid], json!({ "name": "events" }));
        }
        let (ts, dur) = (Some(micros(event.start_ns)), Some(micros(end - event.start_ns)));
        let name = events::describe_event(event);
        out.push(&Event { name: &name, ph: "X", cat: Some("event"), pid, tid, ts, dur, ..Event::default() });
    }
}

fn flows(events: &mut Events, trace: &Trace, slices: &[Slice], base: usize) {
    let steps = slices.iter().filter(|slice| !slice.demand);
    let threads: BTreeMap<usize, usize> = steps.map(|slice| (slice.record, slice.thread_id())).collect();
    let thread = |record: usize| threads.get(&record).copied().unwrap_or(0);
    for [send, receive] in messages::find_messages(&trace.records) {
        let [sent, received] = [send, receive].map(|index| &trace.records[index]);
        // A slice contains its start but not its end, so the arrow ends a nanosecond before the end.
        let arrow_end = received.end_ns.saturating_sub(1).max(received.start_ns);
        // The clocks of two devices are only synchronised approximately, and viewers reject arrows back in time.
        if arrow_end < sent.start_ns {
            continue;
        }
        events.flows += 1;
        let (cat, id) = (Some("ring"), Some(events.flows));
        let mut push = |ph, record: usize, at: u64, bp| {
            let (pid, tid) = (base + usize::from(trace.records[record].device_index), thread(record));
            let (name, ts) = ("activations", Some(micros(at)));
            events.push(&Event { name, ph, cat, pid, tid, ts, id, bp, ..Event::default() });
        };
        push("s", send, sent.start_ns, None);
        push("f", receive, arrow_end, Some("e"));
    }
}

fn category(kind: StepKind) -> &'static str {
    match kind {
        StepKind::Embed | StepKind::Compute | StepKind::Output | StepKind::Draft | StepKind::Kernel => {
            "compute"
        }
        StepKind::Synchronise => "wait",
        StepKind::Prepare => "prepare",
        StepKind::Copy => "copy",
        StepKind::Receive | StepKind::Send => "ring",
        StepKind::Prefetch => "disk",
    }
}

fn title(record: &StepRecord) -> String {
    let layers = record.layers.map_or_else(String::new, |[start, end]| format!(" layers {start}..{end}"));
    match record.kind {
        StepKind::Embed => "embed".into(),
        StepKind::Compute => format!("compute{layers}"),
        StepKind::Output => "output".into(),
        StepKind::Draft => "draft".into(),
        StepKind::Receive => "receive".into(),
        StepKind::Send => "send".into(),
        StepKind::Prefetch if record.layers.is_none() => "read ahead the output head".into(),
        StepKind::Prefetch => format!("read ahead{layers}"),
        StepKind::Copy => "copy".into(),
        StepKind::Kernel => format!("kernel, stage {}", record.round),
        StepKind::Synchronise => format!("wait, stage {}", record.round),
        StepKind::Prepare => "make graphs".into(),
    }
}

/// Converts nanoseconds to microseconds, the unit of the format.
fn micros(nanos: u64) -> f64 {
    nanos as f64 / 1e3
}
