//! Trace: what happened in a run, step by step.
//!
//! A trace is JSON lines: a header, one line a step or counter, and an end line with the outcome. The simulator and
//! the executor write the same schema; times are integer nanoseconds from the run's start, on the head's clock (a
//! measured trace of another device is shifted by the offset that its handshake estimated).
//!
//! The lines of one visit of a device all have the round of the visit: `receive` (from when it began to wait until
//! the message was there), `compute` steps, `send` (from when it was handed over; a simulated one lasts until the
//! message has left). The messages that the head receives and outputs last have the round `rounds`. `prefetch` lines
//! are those that read something. The head's token begins with `embed` and ends with `output`; a `draft` line may
//! stand before, and a pass with drafts has an `accepted` counter. A SoC that runs alone has `kernel` and
//! `synchronise` lines as parts of a `compute` line.
//!
//! Not here: what is computed from a trace (`hearth_core::metrics`).

use std::io::{BufRead, Write};
use std::ops::Range;

use hearth_profiles::device::PageCachePolicy;
use serde::{Deserialize, Serialize};

use crate::pass::{Pass, is_zero};
use crate::plan::Parallelism;
use crate::run_events::RunEvent;

/// The longest line read, in bytes.
const MAX_LINE_BYTES: u64 = 1 << 20;
/// The most events read: several for each that a scenario may have.
const MAX_RUN_EVENTS: usize = 5000;
/// The most lines read: two hours of a fast ring.
const MAX_LINES: usize = 50_000_000;

/// The runner that wrote a trace.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Origin {
    /// The simulator.
    Simulated,
    /// The executor.
    Measured,
}

/// A device as the trace knows it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TracedDevice {
    /// Its name in the plan.
    pub name: String,
    /// Digest of the profile it was simulated with or measured as.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub profile: Option<String>,
    /// Memory it has in total, in bytes: memory pressure is a share of it.
    pub memory_total: u64,
    /// System and kernel, where measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kernel: Option<String>,
    /// The parts of this device's model that have not been validated, if any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unvalidated: Option<String>,
    /// How its page cache was simulated, as its profile says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policy: Option<PageCachePolicy>,
}

/// The first line.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Header {
    /// `trace/1`.
    pub schema: String,
    pub origin: Origin,
    /// Name of the scenario.
    pub scenario: String,
    /// Digest of the plan that was run.
    pub plan: String,
    /// Name of the model.
    pub model: String,
    /// The kind of the plan; in a `tensor` trace a step's `round` is its block, two per layer.
    #[serde(default, skip_serializing_if = "Parallelism::is_ring")]
    pub kind: Parallelism,
    /// The run's seed.
    pub seed: u64,
    /// Version of this program.
    pub version: String,
    /// Devices in ring order; `device` in the lines is an index into it.
    pub devices: Vec<TracedDevice>,
}

/// The busy resource.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Resource {
    /// Processor.
    Cpu,
    /// Graphics processor.
    Gpu,
    /// Neural processor of a SoC.
    Npu,
    /// Disk, because a computation waited for it.
    DiskDemand,
    /// Disk, ahead of the data's turn.
    DiskPrefetch,
    /// Sending.
    Tx,
    /// Receiving, waiting included.
    Rx,
}

/// The kind of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// Embedding rows looked up.
    Embed,
    /// Layers computed.
    Compute,
    /// Logits computed and a token sampled.
    Output,
    /// Waiting for activations, until they were there.
    Receive,
    /// Activations handed over.
    Send,
    /// A part read ahead of its turn.
    Prefetch,
    /// Data copied to or from a GPU, or within.
    Copy,
    /// Tokens drafted by a small model, or a batch of the prompt read by it.
    Draft,
    /// A kernel of a SoC's GPU or a graph of its NPU: detail of a `compute` or `output` line, whose time it is part of.
    /// Its round counts the stages of a layer.
    Kernel,
    /// The CPU of a SoC waiting for GPU and NPU, and handing on: detail as well. Its `cpu` cost is polling, its `copy`
    /// cost what the events take.
    Synchronise,
    /// Graphs made at run time for a SoC's NPU.
    Prepare,
}

/// Where the time of a computing step went, in nanoseconds, and what it read.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cost {
    /// Thread CPU time on the critical path.
    pub cpu: u64,
    /// Time runnable but not running.
    pub queue: u64,
    /// Explicit copies.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub copy: u64,
    /// Bytes of its weights found in memory.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub resident: u64,
    /// Bytes of its weights that had to be read.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub faulted: u64,
}

/// One step of one device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Record {
    /// Place in the ring.
    pub device: u16,
    pub resource: Resource,
    pub kind: Kind,
    pub pass: u32,
    pub round: u32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub layers: Option<[u32; 2]>,
    /// Nanoseconds from the run's start.
    pub start: u64,
    /// Nanoseconds from the run's start.
    pub end: u64,
    /// Bytes moved: weights touched, message sent, data prefetched.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub bytes: u64,
    /// The other end of a message, or the device whose message started the step.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peer: Option<u16>,
    /// Where the time went, for computing steps.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cost: Option<Cost>,
}

impl Record {
    /// The duration in nanoseconds.
    pub fn duration(&self) -> u64 {
        self.end.saturating_sub(self.start)
    }

    /// The layers, as a range.
    pub fn layer_range(&self) -> Range<u32> {
        self.layers.map_or(0..0, |[start, end]| start..end)
    }
}

/// A counted quantity.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Counter {
    /// Bytes read from disk since the run began.
    BytesRead,
    /// Bytes of weights in memory.
    Resident,
    /// Bytes that memory pressure cannot take back: key-value cache and buffers. Measured outside of any limit
    /// it is the fall of the machine's available memory since the run's start.
    Unreclaimable,
    /// Bytes of files that had been reclaimed while in use and were read again.
    Refaults,
    /// Drafted tokens of the pass that the large model accepted. Tokens, not bytes.
    Accepted,
}

/// A counter's value at a moment.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Reading {
    /// Place in the ring.
    pub device: u16,
    pub counter: Counter,
    /// The pass after which it was measured.
    pub pass: u32,
    /// Nanoseconds from the run's start.
    pub at: u64,
    /// Its value, in bytes where the counter does not say otherwise.
    pub value: u64,
}

/// Which memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MemoryKind {
    /// Main memory.
    Main,
    /// The GPU's own.
    Gpu,
}

/// A device on which a run does not fit.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Shortage {
    /// Place in the ring.
    pub device: u16,
    pub memory: MemoryKind,
    /// The minimum memory that the run needs, in bytes.
    pub needed: u64,
    /// The memory that is available to it, in bytes.
    pub available: u64,
}

/// How a run ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// The run finished.
    Ok,
    /// A device ran out of memory.
    OutOfMemory,
    /// A device died or was stopped.
    Killed,
}

impl Outcome {
    /// The outcome for people.
    pub fn word(self) -> &'static str {
        match self {
            Outcome::Ok => "ok",
            Outcome::OutOfMemory => "out of memory",
            Outcome::Killed => "killed",
        }
    }
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Line {
    Header(Header),
    Pass(Pass),
    Step(Record),
    Counter(Reading),
    Shortage(Shortage),
    Event(RunEvent),
    End(Outcome),
}

/// A whole trace.
#[derive(Debug, Clone, PartialEq)]
pub struct Trace {
    pub header: Header,
    pub passes: Vec<Pass>,
    /// The steps, ordered by start time within each device.
    pub records: Vec<Record>,
    pub readings: Vec<Reading>,
    /// Devices whose memory the run exceeds; empty unless it ended so.
    pub shortages: Vec<Shortage>,
    /// Events of the run, in the order of their starts.
    pub run_events: Vec<RunEvent>,
    /// How it ended.
    pub outcome: Outcome,
}

/// Why a trace cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// A line is not a line of a trace.
    #[error(
        "line {line}: {what}; give a trace that `hearth simulate` or `hearth execute` wrote with this version, whole"
    )]
    Line {
        /// The line, from 1.
        line: usize,
        /// The violated rule.
        what: String,
    },
    /// No end line: the writer was stopped.
    #[error("the trace has no end line: the run that wrote it was stopped; run it again")]
    Truncated,
    /// Reading or writing failed.
    #[error(transparent)]
    Io(#[from] std::io::Error),
}

impl Trace {
    /// The schema written and read.
    pub const SCHEMA: &'static str = "trace/1";

    /// Writes it as JSON lines.
    pub fn write(&self, out: &mut impl Write) -> std::io::Result<()> {
        let mut line = |line: &Line| {
            serde_json::to_writer(&mut *out, line)?;
            out.write_all(b"\n")
        };
        line(&Line::Header(self.header.clone()))?;
        for pass in &self.passes {
            line(&Line::Pass(*pass))?;
        }
        for record in &self.records {
            line(&Line::Step(record.clone()))?;
        }
        for reading in &self.readings {
            line(&Line::Counter(reading.clone()))?;
        }
        for shortage in &self.shortages {
            line(&Line::Shortage(shortage.clone()))?;
        }
        for run_event in &self.run_events {
            line(&Line::Event(run_event.clone()))?;
        }
        line(&Line::End(self.outcome))
    }

    /// Reads what [`Trace::write`] wrote.
    pub fn read(input: &mut impl BufRead) -> Result<Trace, TraceError> {
        let (mut header, mut outcome) = (None, None);
        let (mut passes, mut records, mut readings) = (Vec::new(), Vec::new(), Vec::new());
        let mut shortages = Vec::new();
        let mut run_events = Vec::new();
        let mut text = Vec::new();
        for number in 1..=MAX_LINES {
            text.clear();
            let read = std::io::Read::take(&mut *input, MAX_LINE_BYTES).read_until(b'\n', &mut text)?;
            if read == 0 {
                break;
            }
            let fail = |what: String| TraceError::Line { line: number, what };
            let line: Line = serde_json::from_slice(&text).map_err(|error| {
                let begins = String::from_utf8_lossy(&text).chars().take(40).collect::<String>();
                fail(match number {
                    1 => format!("this is no {} file: it begins with `{}`", Self::SCHEMA, begins.trim_end()),
                    _ => error.to_string(),
                })
            })?;
            match (line, &header) {
                (Line::Header(found), None) if found.schema == Self::SCHEMA => header = Some(found),
                (Line::Header(found), None) => {
                    return Err(fail(format!("schema `{}` is not `{}`", found.schema, Self::SCHEMA)));
                }
                (Line::Header(_), Some(_)) => return Err(fail("a second header".into())),
                (_, None) => return Err(fail("the first line must be the header".into())),
                (Line::Pass(pass), _) => passes.push(pass),
                (Line::Step(record), Some(header)) => {
                    check(&record, header.devices.len()).map_err(fail)?;
                    records.push(record);
                }
                (Line::Counter(reading), Some(header)) => {
                    if usize::from(reading.device) >= header.devices.len() {
                        return Err(fail(format!("device {} is not in the header", reading.device)));
                    }
                    readings.push(reading);
                }
                (Line::Shortage(shortage), Some(header)) => {
                    if usize::from(shortage.device) >= header.devices.len() {
                        return Err(fail(format!("device {} is not in the header", shortage.device)));
                    }
                    shortages.push(shortage);
                }
                (Line::Event(_), _) if run_events.len() == MAX_RUN_EVENTS => {
                    return Err(fail(format!("more than {MAX_RUN_EVENTS} events")));
                }
                (Line::Event(run_event), _) => {
                    if run_event.end.is_some_and(|end| end < run_event.start) {
                        return Err(fail("an event ends before it starts".into()));
                    }
                    run_events.push(run_event);
                }
                (Line::End(found), _) => outcome = Some(found),
            }
        }
        let (Some(header), Some(outcome)) = (header, outcome) else { return Err(TraceError::Truncated) };
        Ok(Trace { header, passes, records, readings, shortages, run_events, outcome })
    }
}

fn check(record: &Record, devices: usize) -> Result<(), String> {
    if usize::from(record.device) >= devices {
        return Err(format!("device {} is not in the header", record.device));
    }
    if record.end < record.start {
        return Err(format!("it ends at {} before it starts at {}", record.end, record.start));
    }
    Ok(())
}
