//! The recorder of a device's trace.
//!
//! Times are nanoseconds on this process's own clock; the head shifts other devices' records by the offset of their
//! clocks.
//!
//! Not here: how a computing step's time is divided ([`hearth_runtime::clock`]).

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
pub use hearth_runtime::residency::At;

/// The lines of one device's trace.
#[derive(Debug, Clone, Default)]
pub struct TraceLines {
    /// Steps.
    pub records: Vec<Record>,
    /// Counters.
    pub readings: Vec<Reading>,
}

/// Collects one device's lines.
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
        Self { device, lines: TraceLines::default(), read_before: counter.bytes(), counter }
    }

    /// Begins a new trace.
    pub fn reset(&mut self) {
        self.lines = TraceLines::default();
        self.read_before = self.counter.bytes();
    }

    /// The device has another place in the ring from now on.
    pub fn set_device(&mut self, device: u16) {
        self.device = device;
    }

    /// The lines so far, taken out.
    pub fn take(&mut self) -> TraceLines {
        std::mem::take(&mut self.lines)
    }

    /// A step that occupied a resource from `start` to `end`.
    #[allow(clippy::missing_panics_doc)] // the list is not empty after a push
    pub fn span(&mut self, at: At, kind: Kind, start: u64, end: u64) -> &mut Record {
        let resource = match kind {
            Kind::Send => Resource::Tx,
            Kind::Receive => Resource::Rx,
            Kind::Prefetch => Resource::DiskPrefetch,
            // The last three only a simulated SoC has.
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
    pub fn counter(&mut self, pass: u32, counter: Counter, value: u64) {
        let at = wall_nanos();
        self.lines.readings.push(Reading { device: self.device, counter, pass, at, value });
    }

    /// Bytes this process has read from disk since the trace began.
    pub fn bytes_read(&self) -> u64 {
        self.counter.bytes().saturating_sub(self.read_before)
    }
}

/// Layers as a record has them.
pub fn layers(range: &Range<u32>) -> [u32; 2] {
    [range.start, range.end]
}

/// A computing step's cost, with the bytes that were read while it ran.
pub fn cost(cpu: u64, queue: u64, touched: u64, faulted: u64) -> Cost {
    let faulted = faulted.min(touched);
    Cost { cpu, queue, copy: 0, resident: touched - faulted, faulted }
}

/// Bytes by which this process presses on memory: those of its control group that cannot be reclaimed, or
/// outside of any limit the fall of the machine's available memory since its model was opened.
pub fn unreclaimable() -> u64 {
    MemoryWatch::shared().pressing()
}

/// Bytes of files that this process's control group had to read again; 0 where that is not known.
pub fn refaults() -> u64 {
    MemoryWatch::shared().refaults().unwrap_or(0)
}
