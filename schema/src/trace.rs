//! Trace: a record of all steps, counters and events of a run.
//!
//! A trace file has JSON lines: a header, one line for each pass, step, counter or event, and an end line with the
//! outcome. Simulator and executor write the same schema. Times are integer nanoseconds from the start of the run, on
//! the head's clock. Measured times of another device are shifted by the clock offset that the handshake estimated.
//!
//! When a device computes its window for a pass, it writes these lines, all with the same round: `receive` (from the
//! start of waiting to the arrival of the message), `compute`, and `send` (from the start of sending; in a simulation
//! until the message has been sent). The last message to the head device and the `output` line have the number of
//! rounds of the plan as their round. A `prefetch` line is written only if data were read. On the head device a token
//! begins with `embed` and ends with `output`. A `draft` line may come before `embed`, and a pass with drafts has an
//! `accepted` counter. A SoC that runs alone writes `kernel` and `synchronise` lines as details of a `compute` line.
//!
//! Not here: the metrics of a trace (`hearth_core::metrics`).

use std::io::{BufRead, Write};
use std::ops::Range;

use hearth_profiles::device::PageCachePolicy;
use serde::{Deserialize, Serialize};

use crate::pass::{Pass, is_default};
use crate::plan::Parallelism;
use crate::run_events::RunEvent;

/// Maximum length of a line of a trace file, in bytes.
const MAX_LINE_BYTES: u64 = 1 << 20;
/// Maximum number of run events in a trace file: several for each event of the largest scenario.
const MAX_RUN_EVENTS: usize = 5000;
/// Maximum number of lines of a trace file, enough for a run of two hours on a fast ring.
const MAX_LINES: usize = 50_000_000;

/// Whether the simulator or the executor wrote a trace.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Origin {
    Simulated,
    Measured,
}

/// A device in the header of a trace.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TracedDevice {
    /// The name of the device in the plan.
    pub name: String,
    /// Digest of the device's profile, if there is one.
    #[serde(default, rename = "profile", skip_serializing_if = "Option::is_none")]
    pub profile_digest: Option<String>,
    /// Total main memory in bytes. Memory pressure is a fraction of this value.
    #[serde(rename = "memory_total")]
    pub total_memory_bytes: u64,
    /// Operating system and kernel version of a measured device.
    #[serde(rename = "kernel", default, skip_serializing_if = "Option::is_none")]
    pub os_and_kernel: Option<String>,
    /// Text about the parts of the device's simulation model that have not been validated; absent if there are none.
    #[serde(rename = "unvalidated", default, skip_serializing_if = "Option::is_none")]
    pub unvalidated_parts: Option<String>,
    /// The page-cache policy of a simulated device.
    #[serde(rename = "policy", default, skip_serializing_if = "Option::is_none")]
    pub page_cache_policy: Option<PageCachePolicy>,
}

/// The first line of a trace file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Header {
    /// The type and version of the file: `trace/1`.
    pub schema: String,
    pub origin: Origin,
    #[serde(rename = "scenario")]
    pub scenario_name: String,
    #[serde(rename = "plan")]
    pub plan_digest: String,
    #[serde(rename = "model")]
    pub model_name: String,
    /// The kind of parallelism. With tensor parallelism, the `round` of a step is the index of a block (two per layer).
    #[serde(rename = "kind", default, skip_serializing_if = "Parallelism::is_ring")]
    pub parallelism: Parallelism,
    pub seed: u64,
    /// The version of the program that wrote the trace.
    #[serde(rename = "version")]
    pub program_version: String,
    /// The devices in ring order; `device` in other lines is an index into this list.
    pub devices: Vec<TracedDevice>,
}

/// The resource that a step uses.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Resource {
    #[default]
    Cpu,
    Gpu,
    Npu,
    /// The disk, while a computation waits for it.
    DiskDemand,
    /// The disk, for prefetched data.
    DiskPrefetch,
    /// The network, while a message is sent.
    Tx,
    /// The network, while a message is awaited and received.
    Rx,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StepKind {
    /// Embedding rows are looked up.
    Embed,
    /// Layers are computed.
    #[default]
    Compute,
    /// Logits are computed and a token is sampled.
    Output,
    /// Activations are awaited and received.
    Receive,
    /// Activations are sent.
    Send,
    /// A part of the weights is prefetched.
    Prefetch,
    /// Data are copied to, from or within a GPU.
    Copy,
    /// The draft model drafts tokens or processes a batch of the prompt.
    Draft,
    /// A GPU kernel or an NPU graph of a SoC runs, as a part of a `compute` or `output` step. The `round` is the index
    /// of the interval between two synchronisations in the layer.
    Kernel,
    /// The CPU of a SoC synchronises GPU and NPU, as a part of a `compute` or `output` step. In the cost of this step,
    /// `cpu` is the time of polling and `copy` is the time of the synchronisation events.
    Synchronise,
    /// Graphs for the NPU of a SoC are built at run time.
    Prepare,
}

/// The cost of a computing step: times in nanoseconds, and bytes of weights.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StepCost {
    /// CPU time of the thread on the critical path, in nanoseconds.
    #[serde(rename = "cpu")]
    pub cpu_ns: u64,
    /// Run-queue delay: nanoseconds for which the thread on the critical path was runnable but not running.
    #[serde(rename = "queue")]
    pub queue_ns: u64,
    /// Time of memory copies, in nanoseconds.
    #[serde(rename = "copy", default, skip_serializing_if = "is_default")]
    pub copy_ns: u64,
    /// Bytes of the step's weights that were in memory.
    #[serde(rename = "resident", default, skip_serializing_if = "is_default")]
    pub resident_bytes: u64,
    /// Bytes of the step's weights that had to be read from disk.
    #[serde(rename = "faulted", default, skip_serializing_if = "is_default")]
    pub faulted_bytes: u64,
}

/// A step of a device in a run.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StepRecord {
    /// The index of the device in [`Header::devices`].
    #[serde(rename = "device")]
    pub device_index: u16,
    pub resource: Resource,
    pub kind: StepKind,
    #[serde(rename = "pass")]
    pub pass_index: u32,
    pub round: u32,
    /// The layers that the step works on: index of the first layer, and index after the last one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub layers: Option<[u32; 2]>,
    /// Start in nanoseconds from the start of the run.
    #[serde(rename = "start")]
    pub start_ns: u64,
    /// End in nanoseconds from the start of the run.
    #[serde(rename = "end")]
    pub end_ns: u64,
    /// Size in bytes of the weights used, the message sent or received, or the data prefetched or copied.
    #[serde(default, skip_serializing_if = "is_default")]
    pub bytes: u64,
    /// The index of the device at the other end of a message, or of the device whose message started the step.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peer: Option<u16>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cost: Option<StepCost>,
}

impl StepRecord {
    /// Whether the step is work of a processor, as opposed to disk reads, messages and waiting.
    pub fn is_processor_work(&self) -> bool {
        matches!(
            self.kind,
            StepKind::Embed
                | StepKind::Compute
                | StepKind::Output
                | StepKind::Copy
                | StepKind::Draft
                | StepKind::Prepare
        )
    }

    pub fn duration_ns(&self) -> u64 {
        self.end_ns.saturating_sub(self.start_ns)
    }

    /// Returns the layers that the step works on; an empty range if the step is not for layers.
    pub fn layer_range(&self) -> Range<u32> {
        self.layers.map_or(0..0, |[start, end]| start..end)
    }
}

/// The quantity that a counter measures.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Counter {
    /// Bytes read from disk since the run began.
    BytesRead,
    /// Bytes of the device's weights that are in memory.
    Resident,
    /// Bytes that the kernel cannot reclaim under memory pressure: KV cache and buffers. If the process has no
    /// memory limit, the value is the decrease of the machine's available memory since the start of the run.
    Unreclaimable,
    /// Bytes of file pages that were reclaimed while in use and read again.
    Refaults,
    /// Memory that the device has for the run, in bytes: free memory, page cache that can be reclaimed, and what the
    /// process already uses.
    Available,
    /// The number of drafted tokens of the pass that the target model accepted.
    Accepted,
}

/// The value of a counter of a device at a point in time.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CounterReading {
    /// The index of the device in [`Header::devices`].
    #[serde(rename = "device")]
    pub device_index: u16,
    pub counter: Counter,
    /// The index of the pass after which the counter was read.
    #[serde(rename = "pass")]
    pub pass_index: u32,
    /// The time at which the counter was read, in nanoseconds from the start of the run.
    #[serde(rename = "at")]
    pub time_ns: u64,
    /// The value: a number of tokens for [`Counter::Accepted`], a number of bytes for every other counter.
    pub value: u64,
}

/// The kind of memory of which a device has too little.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MemoryKind {
    Main,
    /// Dedicated GPU memory.
    Gpu,
}

/// A device with too little memory for the run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ShortageRecord {
    /// The index of the device in [`Header::devices`].
    #[serde(rename = "device")]
    pub device_index: u16,
    #[serde(rename = "memory")]
    pub memory_kind: MemoryKind,
    /// The minimum memory that the run needs on the device, in bytes.
    #[serde(rename = "needed")]
    pub needed_bytes: u64,
    /// The memory that is available to the run, in bytes.
    #[serde(rename = "available")]
    pub available_bytes: u64,
}

/// The outcome of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// The run finished.
    Ok,
    /// A device ran out of memory.
    OutOfMemory,
    /// A device failed or was stopped.
    Killed,
}

impl Outcome {
    /// Returns the outcome as text for users.
    pub fn label(self) -> &'static str {
        match self {
            Outcome::Ok => "ok",
            Outcome::OutOfMemory => "out of memory",
            Outcome::Killed => "killed",
        }
    }
}

/// A request that enters a slot of a server. Passes of the slot from `first_pass` on belong to it, until the next request
/// enters the slot. A preempted request is admitted again, with the same index.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Admission {
    /// The index of the request, from 0, in the order of arrival.
    pub request: u32,
    /// The slot, which is the sequence of its passes.
    pub sequence: u32,
    pub first_pass: u32,
    /// When the request arrived, in nanoseconds from the start of the run.
    pub arrival_ns: u64,
    /// When it entered the slot, in nanoseconds from the start of the run.
    pub admitted_ns: u64,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Line {
    Header(Header),
    Pass(Pass),
    Admission(Admission),
    Step(StepRecord),
    Counter(CounterReading),
    Shortage(ShortageRecord),
    Event(RunEvent),
    End(Outcome),
}

impl Line {
    fn device(&self) -> Option<u16> {
        match self {
            Line::Step(StepRecord { device_index: device, .. })
            | Line::Counter(CounterReading { device_index: device, .. })
            | Line::Shortage(ShortageRecord { device_index: device, .. }) => Some(*device),
            _ => None,
        }
    }
}

#[derive(Debug, Clone, PartialEq)]
pub struct Trace {
    pub header: Header,
    pub passes: Vec<Pass>,
    /// The requests that entered slots, in the order of entry; empty if all requests start when the run begins.
    pub admissions: Vec<Admission>,
    /// The steps, ordered by start time within each device.
    pub records: Vec<StepRecord>,
    pub readings: Vec<CounterReading>,
    /// The devices with too little memory, if the run ended because a device ran out of memory.
    pub shortages: Vec<ShortageRecord>,
    /// The run events, ordered by start time.
    pub run_events: Vec<RunEvent>,
    pub outcome: Outcome,
}

/// Why a trace cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// A line, counted from 1, is not valid.
    #[error(
        "line {line}: {what}; give a complete trace that `hearth simulate` or `hearth execute` of this version wrote"
    )]
    Line { line: usize, what: String },
    /// The trace has no end line, because its writer was stopped.
    #[error("the trace has no end line: the run that wrote it was stopped; run it again")]
    Truncated,
    /// Reading or writing the trace failed.
    #[error(transparent)]
    Io(#[from] std::io::Error),
}

impl Trace {
    /// The schema name in the header of every trace.
    pub const SCHEMA: &'static str = "trace/1";

    /// Writes the trace as JSON lines.
    pub fn write(&self, out: &mut impl Write) -> std::io::Result<()> {
        let lines = [Line::Header(self.header.clone())]
            .into_iter()
            .chain(self.passes.iter().copied().map(Line::Pass))
            .chain(self.admissions.iter().copied().map(Line::Admission))
            .chain(self.records.iter().cloned().map(Line::Step))
            .chain(self.readings.iter().cloned().map(Line::Counter))
            .chain(self.shortages.iter().cloned().map(Line::Shortage))
            .chain(self.run_events.iter().cloned().map(Line::Event))
            .chain([Line::End(self.outcome)]);
        for line in lines {
            serde_json::to_writer(&mut *out, &line)?;
            out.write_all(b"\n")?;
        }
        Ok(())
    }

    /// Reads a trace that [`Trace::write`] has written.
    pub fn read(input: &mut impl BufRead) -> Result<Trace, TraceError> {
        let (mut header, mut outcome) = (None::<Header>, None);
        let (mut passes, mut records, mut readings) = (Vec::new(), Vec::new(), Vec::new());
        let (mut shortages, mut run_events, mut text) = (Vec::new(), Vec::new(), Vec::new());
        let mut admissions = Vec::new();
        for number in 1..=MAX_LINES {
            text.clear();
            let read = std::io::Read::take(&mut *input, MAX_LINE_BYTES).read_until(b'\n', &mut text)?;
            if read == 0 {
                break;
            }
            let fail = |what: String| TraceError::Line { line: number, what };
            let line: Line = serde_json::from_slice(&text).map_err(|error| {
                if number > 1 {
                    return fail(error.to_string());
                }
                let begins = String::from_utf8_lossy(&text).chars().take(40).collect::<String>();
                fail(format!("this is not a {} file: it begins with `{}`", Self::SCHEMA, begins.trim_end()))
            })?;
            if let (Some(device), Some(header)) = (line.device(), &header)
                && usize::from(device) >= header.devices.len()
            {
                return Err(fail(format!("device {device} is not in the header")));
            }
            match (line, &header) {
                (Line::Header(found), None) if found.schema == Self::SCHEMA => header = Some(found),
                (Line::Header(Header { schema, .. }), None) => {
                    return Err(fail(format!("the schema is `{schema}` instead of `{}`", Self::SCHEMA)));
                }
                (Line::Header(_), Some(_)) => return Err(fail("this is a second header".into())),
                (_, None) => return Err(fail("the first line must be the header".into())),
                (Line::Pass(pass), _) => passes.push(pass),
                (Line::Admission(admission), _) => admissions.push(admission),
                (Line::Step(StepRecord { start_ns: start, end_ns: end, .. }), _) if end < start => {
                    return Err(fail(format!("a step ends at {end} ns, before its start at {start} ns")));
                }
                (Line::Step(record), _) => records.push(record),
                (Line::Counter(reading), _) => readings.push(reading),
                (Line::Shortage(shortage), _) => shortages.push(shortage),
                (Line::Event(_), _) if run_events.len() == MAX_RUN_EVENTS => {
                    return Err(fail(format!("the trace has more than {MAX_RUN_EVENTS} events")));
                }
                (Line::Event(run_event), _) => {
                    if run_event.end_ns.is_some_and(|end| end < run_event.start_ns) {
                        return Err(fail("an event ends before it starts".into()));
                    }
                    run_events.push(run_event);
                }
                (Line::End(found), _) => outcome = Some(found),
            }
        }
        let (Some(header), Some(outcome)) = (header, outcome) else { return Err(TraceError::Truncated) };
        Ok(Trace { header, passes, admissions, records, readings, shortages, run_events, outcome })
    }
}
