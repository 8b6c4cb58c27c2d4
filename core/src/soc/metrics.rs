//! Metrics of a trace of a SoC that ran alone.
//!
//! Speeds, the energy of the prompt, the time for making graphs, the CPU's waiting, and the longest time for which
//! the GPU's queue was held without a gap. The frame of a game waits until the queue lets it in, so the longest hold
//! matters, not the share of the GPU (HeteroLLM paper, section 5.5).
//!
//! Not here: times per token and their terms ([`crate::metrics`]).

use hearth_profiles::Seconds;
use hearth_profiles::device::soc::{Soc, Strategy};
use serde::Serialize;

use hearth_schema::trace::{Kind, Resource, Trace};

/// A frame of a game that is drawn sixty times a second.
pub const FRAME: Seconds = Seconds(1.0 / 60.0);

/// The numbers.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SocMetrics {
    /// The requested strategy.
    pub strategy: &'static str,
    /// Tokens of the prompts over the time until the first token, without the time for making graphs.
    pub prefill_tokens_per_s: Option<f64>,
    /// The same with it.
    pub prefill_with_preparation_tokens_per_s: Option<f64>,
    /// Generated tokens after the first over their time.
    pub decode_tokens_per_s: Option<f64>,
    /// Seconds for making graphs at run time.
    pub graph_preparation_s: f64,
    /// Power while the prompt is read, in watts, where it is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prefill_power_w: Option<f64>,
    /// Energy of the prompt, in joules: that power over that time. None is known for generating.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prefill_energy_j: Option<f64>,
    /// The GPU's queue while the prompt is read.
    pub prefill_queue: Queue,
    /// The same while tokens are generated.
    pub decode_queue: Queue,
    /// How processors waited for one another.
    pub waiting: Waiting,
}

/// How the GPU's queue was held, in milliseconds.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize)]
pub struct Queue {
    /// The longest stretch without a gap.
    pub max_ms: f64,
    /// The longest kernel.
    pub max_kernel_ms: f64,
    /// The share of the time in which kernels ran.
    pub busy_share: f64,
    /// Whether a game can draw a frame in time between any two kernels.
    pub leaves_frames: bool,
}

/// How processors waited for one another.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize)]
pub struct Waiting {
    /// Pairs of events.
    pub stages: u64,
    /// Milliseconds of synchronization events.
    pub events_ms: f64,
    /// Milliseconds in which a CPU core polled a flag.
    pub polled_ms: f64,
}

impl SocMetrics {
    /// Computes the metrics of a trace of one device, `None` if it has no SoC kernels.
    pub fn of(trace: &Trace, soc: &Soc, strategy: Strategy) -> Option<Self> {
        trace.records.iter().find(|record| record.kind == Kind::Kernel)?;
        let prompt =
            |pass: u32| trace.passes.get(pass as usize).is_some_and(|it| it.drafted == 0 && it.tokens > 1);
        let seconds = |span: [u64; 2]| Seconds::from_nanos(span[1].saturating_sub(span[0])).0;
        let (read, generated) = (span(trace, &prompt), span(trace, &|pass| !prompt(pass)));
        let preparation: u64 = trace
            .records
            .iter()
            .filter(|it| it.kind == Kind::Prepare)
            .map(hearth_schema::trace::Record::duration)
            .sum();
        let preparation = Seconds::from_nanos(preparation).0;
        let tokens: f64 =
            trace.passes.iter().filter(|it| prompt(it.index)).map(|it| f64::from(it.tokens)).sum();
        let reading = read.map(seconds).filter(|time| *time > preparation);
        let power = soc.power.as_ref().map(|power| power.of(strategy).0);
        Some(Self {
            strategy: strategy.name(),
            prefill_tokens_per_s: reading.map(|time| tokens / (time - preparation)),
            prefill_with_preparation_tokens_per_s: reading.map(|time| tokens / time),
            decode_tokens_per_s: crate::metrics::compute(trace).tokens_per_s,
            graph_preparation_s: preparation,
            prefill_power_w: power,
            prefill_energy_j: power.zip(reading).map(|(power, time)| power * time),
            prefill_queue: read.map_or_else(Queue::default, |span| queue(trace, &prompt, seconds(span))),
            decode_queue: generated
                .map_or_else(Queue::default, |span| queue(trace, &|pass| !prompt(pass), seconds(span))),
            waiting: waiting(trace),
        })
    }
}

/// Returns the time from the first to the last record of the selected passes.
fn span(trace: &Trace, of: &impl Fn(u32) -> bool) -> Option<[u64; 2]> {
    let lines = || trace.records.iter().filter(|record| of(record.pass));
    Some([lines().map(|it| it.start).min()?, lines().map(|it| it.end).max()?])
}

fn queue(trace: &Trace, of: &impl Fn(u32) -> bool, time: f64) -> Queue {
    let mut kernels: Vec<[u64; 2]> = trace
        .records
        .iter()
        .filter(|it| it.kind == Kind::Kernel && it.resource == Resource::Gpu && of(it.pass))
        .map(|it| [it.start, it.end])
        .collect();
    kernels.sort_unstable();
    let (mut longest, mut kernel, mut busy) = (0, 0, 0);
    let mut stretch: Option<[u64; 2]> = None;
    for [start, end] in kernels {
        let begun = stretch.filter(|stretch| stretch[1] >= start).map_or(start, |stretch| stretch[0]);
        stretch = Some([begun, end]);
        longest = longest.max(end - begun);
        kernel = kernel.max(end - start);
        busy += end - start;
    }
    let seconds = |nanos: u64| Seconds::from_nanos(nanos);
    Queue {
        max_ms: seconds(longest).as_millis(),
        max_kernel_ms: seconds(kernel).as_millis(),
        busy_share: if time > 0.0 { seconds(busy).0 / time } else { 0.0 },
        leaves_frames: seconds(longest) < FRAME,
    }
}

fn waiting(trace: &Trace) -> Waiting {
    let lines = trace.records.iter().filter(|record| record.kind == Kind::Synchronise);
    let zero = (0, 0, 0);
    let (stages, events, polled) = lines.fold(zero, |(stages, events, polled), line| {
        let cost = line.cost.unwrap_or_default();
        (stages + 1, events + cost.copy, polled + cost.cpu)
    });
    let millis = |nanos: u64| Seconds::from_nanos(nanos).as_millis();
    Waiting { stages, events_ms: millis(events), polled_ms: millis(polled) }
}
