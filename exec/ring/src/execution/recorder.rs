//! The recorder of a device's trace.
//!
//! Times are nanoseconds on this process's own clock. The head adds the clock offset of each device to its records.
//!
//! Not here: the division of a step's time into CPU time and waiting ([`hearth_runtime::clock`]).

use std::ops::Range;

use hearth_schema::trace::Cost;
use hearth_schema::trace::Counter;
use hearth_schema::trace::Kind;
use hearth_schema::trace::Reading;
use hearth_schema::trace::Record;
use hearth_schema::trace::Resource;

use hearth_runtime::clock::wall_nanos;
use hearth_runtime::memory::MemoryWatch;
use hearth_runtime::read_counter::ReadCounter;
pub use hearth_runtime::residency::StepId;

/// The lines of one device's trace.
#[derive(Debug, Clone, Default)]
pub struct TraceLines {
    /// Executed steps.
    pub records: Vec<Record>,
    /// Sampled values of counters.
    pub readings: Vec<Reading>,
}

/// Collects the trace lines of one device.
#[derive(Debug)]
pub struct Recorder {
    device: u16,
    lines: TraceLines,
    counter: ReadCounter,
    read_before: u64,
}

impl Recorder {
    /// Creates the recorder of the device at a place in the ring.
    pub fn new(device: u16) -> Self {
        let counter = ReadCounter::of_this_process();
        Self { device, lines: TraceLines::default(), read_before: counter.bytes_read(), counter }
    }

    /// Begins a new trace.
    pub fn reset(&mut self) {
        self.lines = TraceLines::default();
        self.read_before = self.counter.bytes_read();
    }

    /// Sets the device's place in the ring for the following lines.
    pub fn set_device(&mut self, device: u16) {
        self.device = device;
    }

    /// Takes the lines recorded so far.
    pub fn take_lines(&mut self) -> TraceLines {
        std::mem::take(&mut self.lines)
    }

    /// Records a step from `start` to `end`, in nanoseconds. Returns the record, so that details can be added.
    #[allow(clippy::missing_panics_doc)] // the list is not empty after a push
    pub fn record_step(&mut self, at: StepId, kind: Kind, start: u64, end: u64) -> &mut Record {
        let resource = match kind {
            Kind::Send => Resource::Tx,
            Kind::Receive => Resource::Rx,
            Kind::Prefetch => Resource::DiskPrefetch,
            // Only a simulated SoC has the last three.
            Kind::Embed
            | Kind::Compute
            | Kind::Output
            | Kind::Copy
            | Kind::Draft
            | Kind::Kernel
            | Kind::Synchronise
            | Kind::Prepare => Resource::Cpu,
        };
        self.lines.records.push(Record {
            device: self.device,
            resource,
            kind,
            pass: at.pass,
            round: at.round,
            layers: None,
            start,
            end: end.max(start),
            bytes: 0,
            peer: None,
            cost: None,
        });
        self.lines.records.last_mut().expect("just pushed")
    }

    /// Records the current value of a counter.
    pub fn record_counter(&mut self, pass: u32, counter: Counter, value: u64) {
        let at = wall_nanos();
        self.lines.readings.push(Reading { device: self.device, counter, pass, at, value });
    }

    /// Returns the bytes that this process has read from disk since the trace began.
    pub fn bytes_read(&self) -> u64 {
        self.counter.bytes_read().saturating_sub(self.read_before)
    }
}

/// Converts a range of layers to the form of a record, `[first, end]`.
pub fn layers(range: &Range<u32>) -> [u32; 2] {
    [range.start, range.end]
}

/// Creates the cost of a computing step: CPU and queue time in nanoseconds, the bytes of weights that it used, and
/// the bytes that were read from disk meanwhile.
pub fn cost(cpu: u64, queue: u64, touched: u64, faulted: u64) -> Cost {
    let faulted = faulted.min(touched);
    Cost { cpu, queue, copy: 0, resident: touched - faulted, faulted }
}

/// Returns the unreclaimable bytes of this process's control group, or without a memory limit the decrease of the
/// machine's available memory since the model was opened.
pub fn unreclaimable_bytes() -> u64 {
    MemoryWatch::shared().pressure_bytes()
}

/// Returns the refaulted bytes of files in this process's control group; 0 if this is unknown.
pub fn refaulted_bytes() -> u64 {
    MemoryWatch::shared().refaulted_bytes().unwrap_or(0)
}
