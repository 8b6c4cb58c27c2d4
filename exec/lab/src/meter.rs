//! Measures the bytes that each device reads per token, with the counter of its disk throttle.
//!
//! The executor counts the bytes that its process reads, and the kernel counts the bytes that pass the throttle. The
//! two counters are independent, so each counter checks the other one. A thread samples the throttle counters, which
//! are interpolated at the times of the counter readings in the trace, because a device that reads ahead is still
//! reading after it has sent its activations. The times of the tokens relate this process's clock to that of the trace.

use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::Duration;

use hearth_schema::Trace;
use hearth_schema::trace::{Counter, CounterReading, StepKind};
use serde::{Deserialize, Serialize};

use super::{Cgroup, ThrottleCounter};
use hearth_runtime::clock::monotonic_nanos;
use hearth_runtime::memory::CgroupMemory;

/// Maximum relative difference, without a warning, between the bytes read in the trace and in the throttle counter.
pub const COUNTER_TOLERANCE: f64 = 0.05;
/// Minimum difference for a warning, in bytes per token; pages of the program itself cause smaller differences.
const MIN_COMPARED_BYTES: f64 = (1 << 20) as f64;
/// The interval between two samples of the throttle counters. A sample costs a few microseconds of CPU time.
const SAMPLE_INTERVAL: Duration = Duration::from_millis(10);
/// The minimum interval in nanoseconds between two samples of the devices' memory. Shorter peaks may be missed.
const MEMORY_INTERVAL_NS: u64 = 100_000_000;

/// A device of the lab whose counters are sampled.
#[derive(Debug)]
pub struct WatchedDevice<'g> {
    pub name: String,
    pub cgroup: Option<&'g Cgroup>,
    /// Whether the disk reads of the device are throttled. The kernel counts only throttled reads.
    pub is_throttled: bool,
    /// Number of bytes of the device's copy of the model that are in the page cache before the run.
    pub resident_bytes_before: u64,
}

/// A time in nanoseconds, and the values of all throttle counters at this time.
type Sample = (u64, Vec<u64>);

/// Samples the counters of all devices of a lab until [`Meter::finish`] is called.
#[derive(Debug)]
pub struct Meter<'g> {
    devices: Vec<WatchedDevice<'g>>,
    /// The refaulted bytes and the number of OOM kills of each device before the run.
    before: Vec<(u64, u64)>,
    /// The maximum of the sampled unreclaimable bytes of each device.
    peaks: Vec<u64>,
    next_memory_sample: u64,
    /// The times of the generated tokens, in nanoseconds on this process's clock.
    token_times: Vec<u64>,
    /// The thread that samples the throttle counters until `stop_sampler` is dropped.
    sampler: JoinHandle<Vec<Sample>>,
    stop_sampler: mpsc::Sender<()>,
}

/// The measurements of one device during a run.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct DeviceUsage {
    pub name: String,
    /// The memory limit of the device's control group, in bytes.
    #[serde(rename = "memory_limit")]
    pub memory_limit_bytes: Option<u64>,
    /// Number of bytes of the device's copy of the model that were in the page cache before the run.
    #[serde(rename = "resident_before")]
    pub resident_bytes_before: u64,
    /// Bytes read per token after the first token, as counted by the disk throttle; `None` without a throttle.
    #[serde(rename = "throttle_bytes_per_token")]
    pub throttled_read_bytes_per_token: Option<f64>,
    /// Bytes read per token after the first token, as recorded in the trace.
    #[serde(rename = "trace_bytes_per_token")]
    pub traced_read_bytes_per_token: f64,
    /// Maximum of the device's unreclaimable memory in bytes, which is sampled after tokens.
    #[serde(rename = "peak_unreclaimable")]
    pub peak_unreclaimable_bytes: Option<u64>,
    /// Bytes of file pages that were reclaimed from the page cache and read again during the run.
    #[serde(rename = "refaults")]
    pub refaulted_bytes: Option<u64>,
    /// Number of processes that the kernel killed because the memory limit was exceeded.
    pub oom_kills: Option<u64>,
}

impl<'g> Meter<'g> {
    /// Starts to sample the counters of `devices`, which are in ring order.
    pub fn start(devices: Vec<WatchedDevice<'g>>) -> Self {
        let count = |device: &WatchedDevice| {
            let Some(memory) = device.cgroup.map(Cgroup::memory) else { return (0, 0) };
            (memory.refaulted_bytes().unwrap_or(0), memory.oom_kills().unwrap_or(0))
        };
        let before = devices.iter().map(count).collect();
        let throttle = |device: &WatchedDevice| {
            device.cgroup.filter(|_| device.is_throttled).map(Cgroup::throttle_counter)
        };
        let throttles: Vec<_> = devices.iter().map(throttle).collect();
        let (stop_sampler, stopped) = mpsc::channel();
        let sampler = std::thread::spawn(move || sample(&throttles, &stopped));
        let (peaks, token_times) = (vec![0; devices.len()], Vec::new());
        Self { devices, before, peaks, next_memory_sample: 0, token_times, sampler, stop_sampler }
    }

    /// Records the time of a generated token, and samples the memory of all devices if the last sample is old enough.
    pub fn on_token(&mut self) {
        let now = monotonic_nanos();
        self.token_times.push(now);
        if now < self.next_memory_sample {
            return;
        }
        self.next_memory_sample = now + MEMORY_INTERVAL_NS;
        for (device, peak) in self.devices.iter().zip(&mut self.peaks) {
            let bytes = device.cgroup.and_then(|group| group.memory().unreclaimable_bytes());
            *peak = (*peak).max(bytes.unwrap_or(0));
        }
    }

    /// Stops sampling and returns the measurements of each device. `trace` is the trace of the same run.
    pub fn finish(self, trace: &Trace) -> Vec<DeviceUsage> {
        let offset = clock_offset(trace, &self.token_times);
        drop(self.stop_sampler);
        let samples = self.sampler.join().unwrap_or_default();
        let usage = |(index, device): (usize, &WatchedDevice)| {
            let memory = device.cgroup.map(Cgroup::memory);
            let since = |number: fn(&CgroupMemory) -> Option<u64>, before: u64| {
                Some(number(memory.as_ref()?)?.saturating_sub(before))
            };
            let interval = measured_interval(trace, index as u16);
            let throttle = interval.zip(offset).map(|((from, to, tokens), offset)| {
                let bytes = |at: u64| interpolate(&samples, index, at.saturating_add_signed(offset));
                (bytes(to.time_ns) - bytes(from.time_ns)) / f64::from(tokens)
            });
            let trace = interval.map_or(0.0, |(from, to, tokens)| {
                to.value.saturating_sub(from.value) as f64 / f64::from(tokens)
            });
            DeviceUsage {
                name: device.name.clone(),
                memory_limit_bytes: memory.as_ref().and_then(CgroupMemory::limit_bytes),
                resident_bytes_before: device.resident_bytes_before,
                throttled_read_bytes_per_token: throttle.filter(|_| device.is_throttled && memory.is_some()),
                traced_read_bytes_per_token: trace,
                peak_unreclaimable_bytes: memory.as_ref().map(|_| self.peaks[index]),
                refaulted_bytes: since(CgroupMemory::refaulted_bytes, self.before[index].0),
                oom_kills: since(CgroupMemory::oom_kills, self.before[index].1),
            }
        };
        self.devices.iter().enumerate().map(usage).collect()
    }
}

impl DeviceUsage {
    /// Returns (trace - throttle) / throttle for the bytes read per token, if the difference requires a warning.
    pub fn relative_counter_difference(&self) -> Option<f64> {
        let (throttle, trace) = (self.throttled_read_bytes_per_token?, self.traced_read_bytes_per_token);
        let apart = (trace - throttle).abs();
        let differs = apart > COUNTER_TOLERANCE * throttle.max(trace) && apart > MIN_COMPARED_BYTES;
        differs.then(|| trace / throttle.max(1.0) - 1.0)
    }
}

/// Returns the nanoseconds to add to a time in the trace to get a time on this process's clock. A token time is
/// recorded shortly after the token is complete, so the smallest difference is the most accurate.
fn clock_offset(trace: &Trace, token_times: &[u64]) -> Option<i64> {
    let outputs =
        trace.records.iter().filter(|record| record.device_index == 0 && record.kind == StepKind::Output);
    let mut ends: Vec<u64> = outputs.map(|record| record.end_ns).collect();
    ends.sort_unstable();
    // If an output step can generate several tokens, only the first token surely belongs to the first output step.
    let pairs = if ends.len() == token_times.len() { ends.len() } else { 1 };
    ends.truncate(pairs);
    ends.iter().zip(token_times).map(|(&end, &time)| (time as i64).wrapping_sub(end as i64)).min()
}

/// Returns a device's readings of read bytes after the prompt and the last token, and the number of tokens between.
fn measured_interval(trace: &Trace, device: u16) -> Option<(&CounterReading, &CounterReading, u32)> {
    let mut passes = trace.passes.iter().filter(|pass| pass.has_output).map(|pass| pass.index);
    let (first, last) = (passes.next()?, passes.next_back()?);
    let of =
        |reading: &&CounterReading| (reading.device_index, reading.counter) == (device, Counter::BytesRead);
    let until = |pass: u32| trace.readings.iter().filter(of).rfind(|reading| reading.pass_index <= pass);
    let tokens = trace.passes.iter().filter(|pass| pass.has_output).count() - 1;
    Some((until(first)?, until(last)?, tokens as u32))
}

/// Returns the value of a device's throttle counter at time `at`, in bytes, interpolated linearly between samples.
fn interpolate(samples: &[Sample], device: usize, at: u64) -> f64 {
    let after = samples.partition_point(|(time, _)| *time <= at);
    let value = |index: usize| samples.get(index).map(|(time, bytes)| (*time as f64, bytes[device] as f64));
    match (after.checked_sub(1).and_then(value), value(after)) {
        (Some((from, low)), Some((to, high))) => low + (high - low) * (at as f64 - from) / (to - from),
        (Some((_, bytes)), None) | (None, Some((_, bytes))) => bytes,
        (None, None) => 0.0,
    }
}

/// Samples the throttle counters until the channel `stopped` is closed. Returns no samples if no device has a throttle.
fn sample(throttles: &[Option<ThrottleCounter>], stopped: &mpsc::Receiver<()>) -> Vec<Sample> {
    let bytes = |throttle: &Option<ThrottleCounter>| throttle.as_ref().and_then(ThrottleCounter::bytes_read);
    let mut samples = Vec::new();
    while throttles.iter().any(Option::is_some) {
        let counts = throttles.iter().map(|throttle| bytes(throttle).unwrap_or(0)).collect();
        samples.push((monotonic_nanos(), counts));
        if stopped.recv_timeout(SAMPLE_INTERVAL) != Err(mpsc::RecvTimeoutError::Timeout) {
            break;
        }
    }
    samples
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counter_difference_beyond_the_tolerance_is_reported() {
        let difference = |throttled_read_bytes_per_token: Option<f64>, traced_read_bytes_per_token: f64| {
            let usage = DeviceUsage::default();
            DeviceUsage { throttled_read_bytes_per_token, traced_read_bytes_per_token, ..usage }
                .relative_counter_difference()
        };
        assert_eq!(difference(Some(100e6), 104e6), None);
        assert_eq!(difference(Some(100e6), 150e6), Some(0.5));
        assert_eq!(difference(Some(100e6), 0.0), Some(-1.0));
        assert_eq!(difference(Some(100e3), 0.0), None, "pages of the program");
        assert_eq!(difference(None, 100e6), None, "no throttle");
    }

    #[test]
    fn counters_are_interpolated_between_samples() {
        let samples = [(100, vec![0, 10]), (200, vec![0, 30]), (300, vec![0, 30])];
        let at = |time| interpolate(&samples, 1, time);
        assert_eq!(
            [at(0), at(100), at(150), at(200), at(250), at(900)],
            [10.0, 10.0, 20.0, 30.0, 30.0, 30.0]
        );
        assert_eq!(interpolate(&[], 0, 5), 0.0);
    }

    const TRACE: &str = r#"{"header":{"schema":"trace/1","origin":"measured","scenario":"s","plan":"p","model":"m","seed":1,"version":"0","devices":[{"name":"a","memory_total":5}]}}
{"pass":{"index":0,"first_position":0,"tokens":6,"output":true}}
{"pass":{"index":1,"first_position":6,"tokens":1,"output":true}}
{"pass":{"index":2,"first_position":7,"tokens":1,"output":true}}
{"step":{"device":0,"resource":"cpu","kind":"output","pass":0,"round":1,"start":80,"end":100}}
{"step":{"device":0,"resource":"cpu","kind":"output","pass":1,"round":1,"start":180,"end":200}}
{"step":{"device":0,"resource":"cpu","kind":"output","pass":2,"round":1,"start":280,"end":300}}
{"counter":{"device":0,"counter":"bytes_read","pass":0,"at":90,"value":1000}}
{"counter":{"device":0,"counter":"bytes_read","pass":1,"at":190,"value":1500}}
{"counter":{"device":0,"counter":"bytes_read","pass":2,"at":290,"value":1800}}
{"end":"ok"}
"#;

    #[test]
    fn measured_interval_and_clock_offset_of_a_trace() {
        let trace = Trace::read(&mut TRACE.as_bytes()).unwrap();
        // This clock is 1000 ahead, and tokens are recorded up to 30 late.
        let offset = clock_offset(&trace, &[1130, 1200, 1305]);
        assert_eq!(offset, Some(1000));
        let (from, to, tokens) = measured_interval(&trace, 0).unwrap();
        assert_eq!((from.time_ns, to.time_ns, tokens), (90, 290, 2));
        assert!(measured_interval(&trace, 1).is_none());
    }
}
