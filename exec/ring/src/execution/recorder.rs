//! The recorder of a device's trace.
//!
//! Times are nanoseconds on this process's clock. The head later adds the clock offset of the device to the times.

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

#[derive(Debug)]
pub struct TraceRecorder {
    /// The index of the device in the ring, for the lines that are recorded from now on.
    pub device_index: u16,
    pub lines: TraceLines,
    counter: ReadCounter,
    read_before: u64,
}

impl TraceRecorder {
    pub fn new(device_index: u16) -> Self {
        let counter = ReadCounter::for_current_process();
        Self { device_index, lines: TraceLines::default(), read_before: counter.bytes_read(), counter }
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

    pub fn record_counter(&mut self, pass_index: u32, counter: Counter, value: u64) {
        let (device_index, time_ns) = (self.device_index, monotonic_nanos());
        self.lines.readings.push(CounterReading { device_index, counter, pass_index, time_ns, value });
    }

    /// Returns the bytes that this process has read from disk since the trace began.
    pub fn bytes_read(&self) -> u64 {
        self.counter.bytes_read().saturating_sub(self.read_before)
    }
}
