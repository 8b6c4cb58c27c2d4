//! What did this device do, when, and what did it read?
//!
//! Writes the records of a device's trace. Times are nanoseconds on this process's own clock; the head
//! shifts other devices' records by the offset it estimated from the shortest ping.
//!
//! Not here: how a computing step's time is divided ([`crate::clock`]).

use std::fs;
use std::ops::Range;

use hearth_schema::trace::Cost;
use hearth_schema::trace::Counter;
use hearth_schema::trace::Kind;
use hearth_schema::trace::Reading;
use hearth_schema::trace::Record;
use hearth_schema::trace::Resource;

use crate::clock::wall_nanos;
use crate::memory::MemoryWatch;

/// The lines of one device's trace.
#[derive(Debug, Clone, Default)]
pub struct Lines {
    /// Steps.
    pub records: Vec<Record>,
    /// Counters.
    pub readings: Vec<Reading>,
}

/// Collects one device's lines.
#[derive(Debug)]
pub struct Recorder {
    device: u16,
    lines: Lines,
    counter: ReadCounter,
    read_before: u64,
}

/// The step being recorded: its pass and round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct At {
    /// Pass index.
    pub pass: u32,
    /// Round.
    pub round: u32,
}

impl Recorder {
    /// For the device at a place in the ring.
    pub fn new(device: u16) -> Self {
        let counter = ReadCounter::of_this_process();
        Self { device, lines: Lines::default(), read_before: counter.bytes(), counter }
    }

    /// Begins a new trace.
    pub fn reset(&mut self) {
        self.lines = Lines::default();
        self.read_before = self.counter.bytes();
    }

    /// The device has another place in the ring from now on.
    pub fn move_to(&mut self, device: u16) {
        self.device = device;
    }

    /// The lines so far, taken out.
    pub fn take(&mut self) -> Lines {
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

    /// A counter's value now.
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
pub fn layers(range: &Range<u32>) -> Option<[u32; 2]> {
    Some([range.start, range.end])
}

/// A computing step's cost, with the bytes that were read while it ran.
pub fn cost(cpu: u64, queue: u64, touched: u64, faulted: u64) -> Cost {
    let faulted = faulted.min(touched);
    Cost { cpu, queue, copy: 0, resident: touched - faulted, faulted }
}

/// Counts the bytes that a process or thread has caused to be read from disk (`read_bytes` of its `io` file);
/// 0 where there is no such file. The file stays open: it is read around every step.
#[derive(Debug)]
pub struct ReadCounter {
    file: Option<fs::File>,
}

impl ReadCounter {
    /// Of the whole process.
    pub fn of_this_process() -> Self {
        Self { file: fs::File::open("/proc/self/io").ok() }
    }

    /// Of the calling thread.
    pub fn of_this_thread() -> Self {
        Self { file: fs::File::open("/proc/thread-self/io").ok() }
    }

    /// Bytes so far.
    pub fn bytes(&self) -> u64 {
        self.read().unwrap_or(0)
    }

    #[cfg(unix)]
    fn read(&self) -> Option<u64> {
        use std::os::unix::fs::FileExt;
        let mut text = [0u8; 256];
        let length = self.file.as_ref()?.read_at(&mut text, 0).ok()?;
        let text = std::str::from_utf8(&text[..length]).ok()?;
        text.lines().find_map(|line| line.strip_prefix("read_bytes:"))?.trim().parse().ok()
    }

    #[cfg(not(unix))]
    fn read(&self) -> Option<u64> {
        self.file.as_ref().and(None)
    }
}

/// Bytes by which this process presses on memory: those of its control group that cannot be taken back, or
/// outside of any limit the fall of the machine's available memory since its model was opened.
pub fn unreclaimable() -> u64 {
    MemoryWatch::shared().pressing()
}

/// Bytes of files that this process's control group had to read again; 0 where that is not known.
pub fn refaults() -> u64 {
    MemoryWatch::shared().refaults().unwrap_or(0)
}
