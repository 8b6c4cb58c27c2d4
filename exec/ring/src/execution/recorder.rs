//! The recorder of a device's trace.
//!
//! Times are nanoseconds on this process's own clock. The head adds the clock offset of each device to its records.

use hearth_schema::trace::{Counter, CounterReading, Resource, StepKind, StepRecord};

use hearth_runtime::clock::monotonic_nanos;
use hearth_runtime::read_counter::ReadCounter;
pub use hearth_runtime::residency::StepId;

/// The lines of one device's trace.
#[derive(Debug, Clone, Default)]
pub struct TraceLines {
    /// Executed steps, with their times and costs.
    pub records: Vec<StepRecord>,
    /// Sampled values of counters.
    pub readings: Vec<CounterReading>,
}

/// Collects the trace lines of one device.
#[derive(Debug)]
pub struct TraceRecorder {
    /// The device's index in the ring, for the lines that are recorded from now on.
    pub device_index: u16,
    pub lines: TraceLines,
    counter: ReadCounter,
    read_before: u64,
}

impl TraceRecorder {
    /// Creates the recorder of the device with this index in the ring.
    pub fn new(device: u16) -> Self {
        let counter = ReadCounter::for_current_process();
        Self {
            device_index: device,
            lines: TraceLines::default(),
            read_before: counter.bytes_read(),
            counter,
        }
    }

    pub fn reset(&mut self) {
        self.lines = TraceLines::default();
        self.read_before = self.counter.bytes_read();
    }

    /// Records a step from `start` to `end`, in nanoseconds. Returns the record, so that details can be added.
    pub fn record_step(&mut self, at: StepId, kind: StepKind, start: u64, end: u64) -> &mut StepRecord {
        let resource = match kind {
            StepKind::Send => Resource::Tx,
            StepKind::Receive => Resource::Rx,
            StepKind::Prefetch => Resource::DiskPrefetch,
            _ => Resource::Cpu,
        };
        self.lines.records.push(StepRecord {
            device_index: self.device_index,
            resource,
            kind,
            pass_index: at.pass,
            round: at.round,
            layers: None,
            start_ns: start,
            end_ns: end.max(start),
            bytes: 0,
            peer: None,
            cost: None,
        });
        self.lines.records.last_mut().expect("just pushed")
    }

    pub fn record_counter(&mut self, pass: u32, counter: Counter, value: u64) {
        let at = monotonic_nanos();
        self.lines.readings.push(CounterReading {
            device_index: self.device_index,
            counter,
            pass_index: pass,
            time_ns: at,
            value,
        });
    }

    /// Returns the bytes that this process has read from disk since the trace began.
    pub fn bytes_read(&self) -> u64 {
        self.counter.bytes_read().saturating_sub(self.read_before)
    }
}
