//! How right is the simulator, over many scenarios that were predicted and then measured?
//!
//! A [`Case`] is one scenario: predictions, and what was measured after each. [`scores`] says how far apart they are and in
//! what order they stand, [`page`] lays it out.
//!
//! Not here: running them (the command line), and the numbers of one run ([`hearth_core::metrics`]).

mod chart;
pub mod page;
pub mod scores;

use hearth_core::metrics::Metrics;
use hearth_core::metrics::Terms;
use hearth_schema::trace::Outcome;
use serde::{Deserialize, Serialize};

use self::scores::Scores;

/// The numbers of a run that are compared.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Numbers {
    /// Mean time per token after the first, in milliseconds; absent where none followed the first.
    pub tpot_ms: Option<f64>,
    /// Time to the first token, in milliseconds.
    pub ttft_ms: Option<f64>,
    /// Bytes read from disk for each token after the first, by all devices together; absent if that of one is lost.
    pub bytes_read: Option<f64>,
    /// Where a token's time went.
    pub terms: Terms,
}

impl Numbers {
    /// Those of a run; of one that ended badly there are no times.
    pub fn of(metrics: &Metrics) -> Self {
        let ok = metrics.outcome == Outcome::Ok;
        Self {
            tpot_ms: metrics.tpot_ms.map(|tpot| tpot.mean).filter(|_| ok),
            ttft_ms: metrics.ttft_ms.filter(|_| ok),
            bytes_read: metrics.bytes_read_per_token(),
            terms: metrics.terms_ms,
        }
    }
}

/// A scenario that was predicted and then measured, once or several times.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Case {
    /// The scenario's name.
    pub name: String,
    /// Its question.
    #[serde(default)]
    pub question: String,
    /// Each time that it was.
    pub runs: Vec<Run>,
}

/// A prediction, and what was measured after it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Run {
    /// The digest of the prediction, which was written before anything was executed.
    #[serde(default)]
    pub prediction: String,
    /// What was predicted.
    pub predicted: Numbers,
    /// What was measured.
    pub measured: Numbers,
    /// Whether the machine computed then as fast as when it was measured for the prediction.
    #[serde(default = "yes")]
    pub steady: bool,
    /// How often this was begun before and given up because it did not.
    #[serde(default)]
    pub started_over: u32,
}

/// Where nobody watched.
fn yes() -> bool {
    true
}

/// A scenario without numbers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Failed {
    /// The scenario's name.
    pub name: String,
    /// Why.
    pub why: String,
}

/// All that a report on a suite says.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Validation {
    /// What was run, as `scenarios/lab`.
    pub title: String,
    /// The machine, a line for each of its properties.
    pub machine: Vec<(String, String)>,
    /// The scenarios that were measured.
    pub cases: Vec<Case>,
    /// Those that were not.
    pub failed: Vec<Failed>,
}

impl Validation {
    /// How right the predictions were.
    pub fn scores(&self) -> Scores {
        let mut scores = Scores::of(&self.cases);
        scores.bars.push(scores::complete(&self.cases, &self.failed));
        scores
    }
}
