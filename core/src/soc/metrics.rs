//! Metrics of a trace of a single device with a SoC.
//!
//! A game can draw a frame only in a gap of the GPU's queue, so the longest time without a gap matters, not the GPU
//! utilisation (HeteroLLM paper, section 5.5).
//!
//! Not here: times per token and their terms ([`crate::metrics`]).

use hearth_profiles::Seconds;
use hearth_profiles::device::soc::{Soc, SocStrategy};
use serde::Serialize;

use hearth_schema::trace::{Resource, StepCost, StepKind, StepRecord, Trace};

/// The frame time of a game at 60 frames per second.
pub const FRAME_TIME: Seconds = Seconds(1.0 / 60.0);

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SocMetrics {
    pub strategy: &'static str,
    /// Prefill speed in prompt tokens per second, without the time to build NPU graphs.
    pub prefill_tokens_per_s: Option<f64>,
    /// Prefill speed in prompt tokens per second, including the time to build NPU graphs.
    pub prefill_with_preparation_tokens_per_s: Option<f64>,
    /// Decoding speed: generated tokens after the first, per second.
    pub decode_tokens_per_s: Option<f64>,
    /// Time to build NPU graphs at run time, in seconds.
    pub graph_preparation_s: f64,
    /// Power during prefill, in watts; absent if the device profile does not give it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prefill_power_w: Option<f64>,
    /// Energy of prefill, in joules: power times duration. The energy of decoding is not known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prefill_energy_j: Option<f64>,
    pub prefill_queue: QueueOccupancy,
    pub decode_queue: QueueOccupancy,
    #[serde(rename = "waiting")]
    pub sync_overhead: SyncOverhead,
}

/// Occupancy of the GPU's queue during prefill or decoding.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize)]
pub struct QueueOccupancy {
    /// The longest time for which kernels ran without a gap, in milliseconds.
    #[serde(rename = "max_ms")]
    pub max_busy_ms: f64,
    /// The duration of the longest kernel, in milliseconds.
    pub max_kernel_ms: f64,
    /// The fraction of the time of prefill or decoding in which kernels ran, from 0 to 1.
    pub busy_share: f64,
    /// Whether kernels never run for [`FRAME_TIME`] or longer without a gap, so that a game can draw frames in time.
    #[serde(rename = "leaves_frames")]
    pub frame_deadlines_met: bool,
}

/// The cost of synchronising GPU and NPU in a run.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize)]
pub struct SyncOverhead {
    /// The number of intervals that end with a synchronisation of GPU and NPU.
    #[serde(rename = "stages")]
    pub sync_count: u64,
    /// Total time of the synchronisation events, in milliseconds.
    pub events_ms: f64,
    /// Total time in which a CPU core polled the flag of a kernel, in milliseconds.
    #[serde(rename = "polled_ms")]
    pub polling_ms: f64,
}

impl SocMetrics {
    /// Computes the metrics of a trace of one device; `None` if the trace has no kernels of a SoC.
    pub fn from_trace(trace: &Trace, soc: &Soc, strategy: SocStrategy) -> Option<Self> {
        trace.records.iter().find(|record| record.kind == StepKind::Kernel)?;
        let prompt =
            |pass: u32| trace.passes.get(pass as usize).is_some_and(|it| it.drafted == 0 && it.tokens > 1);
        let preparing = trace.records.iter().filter(|it| it.kind == StepKind::Prepare);
        let preparation = Seconds::from_nanos(preparing.map(StepRecord::duration_ns).sum()).0;
        let tokens: f64 =
            trace.passes.iter().filter(|it| prompt(it.index)).map(|it| f64::from(it.tokens)).sum();
        let prefill_time = duration(trace, &prompt).filter(|time| *time > preparation);
        let power = soc.power.as_ref().map(|power| power.strategy_power(strategy).0);
        Some(Self {
            strategy: strategy.name(),
            prefill_tokens_per_s: prefill_time.map(|time| tokens / (time - preparation)),
            prefill_with_preparation_tokens_per_s: prefill_time.map(|time| tokens / time),
            decode_tokens_per_s: crate::metrics::compute_metrics(trace).tokens_per_s,
            graph_preparation_s: preparation,
            prefill_power_w: power,
            prefill_energy_j: power.zip(prefill_time).map(|(power, time)| power * time),
            prefill_queue: queue_occupancy(trace, &prompt),
            decode_queue: queue_occupancy(trace, &|pass| !prompt(pass)),
            sync_overhead: sync_overhead(trace),
        })
    }
}

/// Returns the seconds from the first start to the last end of the records of all passes for which `of` is true.
fn duration(trace: &Trace, of: &impl Fn(u32) -> bool) -> Option<f64> {
    let records = || trace.records.iter().filter(|record| of(record.pass_index));
    let (start, end) = (records().map(|it| it.start_ns).min()?, records().map(|it| it.end_ns).max()?);
    Some(Seconds::from_nanos(end.saturating_sub(start)).0)
}

fn queue_occupancy(trace: &Trace, of: &impl Fn(u32) -> bool) -> QueueOccupancy {
    let Some(time) = duration(trace, of) else { return QueueOccupancy::default() };
    let on_gpu =
        trace.records.iter().filter(|it| it.kind == StepKind::Kernel && it.resource == Resource::Gpu);
    let mut kernels: Vec<[u64; 2]> =
        on_gpu.filter(|it| of(it.pass_index)).map(|it| [it.start_ns, it.end_ns]).collect();
    kernels.sort_unstable();
    let (mut longest, mut kernel, mut busy) = (0, 0, 0);
    let mut busy_span: Option<[u64; 2]> = None;
    for &[start, end] in &kernels {
        let begun = busy_span.filter(|span| span[1] >= start).map_or(start, |span| span[0]);
        busy_span = Some([begun, end]);
        longest = longest.max(end - begun);
        kernel = kernel.max(end - start);
        busy += end - start;
    }
    let [longest, kernel, busy] = [longest, kernel, busy].map(Seconds::from_nanos);
    QueueOccupancy {
        max_busy_ms: longest.as_millis(),
        max_kernel_ms: kernel.as_millis(),
        busy_share: if time > 0.0 { busy.0 / time } else { 0.0 },
        frame_deadlines_met: longest < FRAME_TIME,
    }
}

fn sync_overhead(trace: &Trace) -> SyncOverhead {
    let events = trace.records.iter().filter(|record| record.kind == StepKind::Synchronise);
    let costs: Vec<StepCost> = events.map(|record| record.cost.unwrap_or_default()).collect();
    let millis = |of: fn(&StepCost) -> u64| Seconds::from_nanos(costs.iter().map(of).sum()).as_millis();
    let (events_ms, polled_ms) = (millis(|cost| cost.copy_ns), millis(|cost| cost.cpu_ns));
    SyncOverhead { sync_count: costs.len() as u64, events_ms, polling_ms: polled_ms }
}
