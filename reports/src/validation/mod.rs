//! Validation of the simulator on a suite of scenarios that were predicted and then measured.
//!
//! A [`Case`] is one scenario: predictions, and the measurement after each. [`scores`] computes errors and order,
//! [`page`] lays them out.
//!
//! Not here: running them (the command line), and the numbers of one run ([`hearth_core::metrics`]).

pub mod page;
pub mod scores;

use hearth_core::metrics::{Metrics, Terms};
use hearth_schema::trace::Outcome;
use serde::{Deserialize, Serialize};

use self::scores::Scores;

#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct RunNumbers {
    /// Mean time per token after the first, in milliseconds; absent where none followed the first.
    pub tpot_ms: Option<f64>,
    pub ttft_ms: Option<f64>,
    /// Bytes read from disk per token after the first, by all devices; absent if the trace of one is lost.
    pub bytes_read: Option<f64>,
    pub terms: Terms,
}

impl RunNumbers {
    /// The numbers of a run; a run that did not complete has no times.
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
    pub name: String,
    /// The question that the scenario answers.
    #[serde(default)]
    pub question: String,
    pub runs: Vec<Run>,
}

/// A prediction and the measurement after it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Run {
    /// The digest of the prediction, which was written before the run.
    #[serde(default)]
    pub prediction: String,
    pub predicted: RunNumbers,
    pub measured: RunNumbers,
    /// Whether the machine was as fast as when it was measured for the prediction.
    #[serde(default = "yes")]
    pub steady: bool,
    /// The number of earlier attempts that were given up because it was not.
    #[serde(default, alias = "started_over")]
    pub restarts: u32,
}

fn yes() -> bool {
    true
}

/// A scenario without numbers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Failed {
    pub name: String,
    #[serde(alias = "why")]
    pub reason: String,
}

/// The results of a suite.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Validation {
    /// The suite, such as `scenarios/lab`.
    pub title: String,
    /// The machine, a line for each of its properties.
    pub machine: Vec<(String, String)>,
    /// The measured scenarios.
    pub cases: Vec<Case>,
    /// The scenarios without a measurement.
    pub failed: Vec<Failed>,
}

impl Validation {
    pub fn scores(&self) -> Scores {
        let mut scores = Scores::of(&self.cases);
        scores.criteria.push(scores::complete(&self.cases, &self.failed));
        scores
    }
}

#[cfg(test)]
impl Case {
    /// A case with one run for each measured time per token; half of the time is computing and half reading.
    fn fixture(name: &str, predicted: f64, measured: &[f64]) -> Self {
        let numbers = |ms: f64| RunNumbers {
            tpot_ms: Some(ms),
            ttft_ms: Some(2.0 * ms),
            bytes_read: Some(ms * 1e6),
            terms: Terms { cpu: 0.5 * ms, demand_disk: 0.5 * ms, ..Terms::default() },
        };
        let run = |&ms: &f64| Run {
            prediction: "sha256:1".into(),
            predicted: numbers(predicted),
            measured: numbers(ms),
            steady: true,
            restarts: 0,
        };
        let question = "Is <it> right?".into();
        Self { name: name.into(), question, runs: measured.iter().map(run).collect() }
    }
}
