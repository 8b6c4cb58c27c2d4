//! What is known of one row of a sweep?
//!
//! Not here: how it is written ([`crate::sweep::table`]).

use hearth_schema::Plan;
use hearth_schema::metrics::Metrics;
use hearth_schema::trace::Outcome;
use serde::Serialize;

/// A plan in short.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Planned {
    /// Who made it.
    pub strategy: String,
    /// Rounds around the ring.
    pub rounds: u32,
    /// Each device and its window in ring order, GPU layers in brackets.
    pub windows: String,
}

/// A run in short.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Ran {
    /// Mean time of a token after the first; absent if there is none.
    pub tpot_ms: Option<f64>,
    /// Time to the first token.
    pub ttft_ms: Option<f64>,
    /// Tokens after the first, per second.
    pub tokens_per_s: Option<f64>,
    /// What all devices read from disk for a token after the first.
    pub bytes_read_per_token: f64,
    /// The largest share of a device's memory that cannot be reclaimed.
    pub memory_pressure: f64,
}

/// A row.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Row {
    /// Its place in the whole sweep, from 0.
    pub index: usize,
    /// The fields' values, as a document has them.
    pub values: Vec<String>,
    /// The run's seed.
    pub seed: u64,
    /// The plan, if there is one.
    #[serde(flatten)]
    pub plan: Option<Planned>,
    /// The run, if it came to its end.
    #[serde(flatten)]
    pub ran: Option<Ran>,
    /// `ok`, or what went wrong.
    pub outcome: String,
}

impl Planned {
    /// Of a plan.
    pub fn of(plan: &Plan) -> Self {
        let words = plan.devices.iter().map(|device| match device.gpu_layers {
            0 => format!("{} {}", device.name, device.window),
            gpu => format!("{} {} ({gpu})", device.name, device.window),
        });
        Self {
            strategy: plan.planner.strategy.clone(),
            rounds: plan.rounds,
            windows: words.collect::<Vec<_>>().join("; "),
        }
    }
}

impl Ran {
    /// Of the numbers of a run that came to its end.
    pub fn of(metrics: &Metrics) -> Option<Self> {
        (metrics.outcome == Outcome::Ok).then(|| Self {
            tpot_ms: metrics.tpot_ms.map(|tpot| tpot.mean),
            ttft_ms: metrics.ttft_ms,
            tokens_per_s: metrics.tokens_per_s,
            bytes_read_per_token: metrics.devices.iter().map(|device| device.bytes_read_per_token).sum(),
            memory_pressure: metrics.devices.iter().map(|device| device.memory_pressure).fold(0.0, f64::max),
        })
    }
}

/// How a run ended.
pub fn word(outcome: Outcome) -> &'static str {
    match outcome {
        Outcome::Ok => "ok",
        Outcome::OutOfMemory => "out of memory",
        Outcome::Killed => "killed",
    }
}
