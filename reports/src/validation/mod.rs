//! Validation of the simulator on a suite of scenarios that were predicted and then measured.
//!
//! A [`ValidationCase`] is one scenario with its predictions and the measurement that followed each prediction.
//! [`scores`] computes errors and rank agreement, and [`page`] makes the report.
//!
//! Not here: running the scenarios (the command line), and computing the metrics of a run ([`hearth_core::metrics`]).

pub mod page;
pub mod scores;

use hearth_core::metrics::{Metrics, Terms};
use hearth_schema::trace::Outcome;
use serde::{Deserialize, Serialize};

use self::scores::Scores;

/// The metrics of a run for which prediction and measurement are compared.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct RunMetrics {
    /// Mean time per token after the first, in milliseconds; `None` if the run has no such token or did not complete.
    pub tpot_ms: Option<f64>,
    pub ttft_ms: Option<f64>,
    /// Bytes read from disk per token after the first, on all devices; `None` if the trace of a device is lost.
    #[serde(rename = "bytes_read")]
    pub bytes_read_per_token: Option<f64>,
    /// Terms of the time per token, in milliseconds.
    pub terms: Terms,
}

impl RunMetrics {
    /// Selects the metrics of a run; a run that did not complete has no times.
    pub fn from_metrics(metrics: &Metrics) -> Self {
        let ok = metrics.outcome == Outcome::Ok;
        Self {
            tpot_ms: metrics.tpot_ms.map(|tpot| tpot.mean_ms).filter(|_| ok),
            ttft_ms: metrics.ttft_ms.filter(|_| ok),
            bytes_read_per_token: metrics.bytes_read_per_token(),
            terms: metrics.terms_ms,
        }
    }
}

/// A scenario that was predicted and then measured, once or several times.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ValidationCase {
    pub name: String,
    pub question: String,
    #[serde(rename = "runs")]
    pub run_pairs: Vec<RunPair>,
}

/// A prediction, and the measurement that was made after it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RunPair {
    /// The digest of the prediction, which was written before the measurement.
    #[serde(rename = "prediction", default)]
    pub prediction_digest: String,
    #[serde(rename = "predicted")]
    pub predicted_metrics: RunMetrics,
    #[serde(rename = "measured")]
    pub measured_metrics: RunMetrics,
    /// Whether the machine had the same speed during the measurement as when its profile was measured.
    #[serde(rename = "steady", default = "yes")]
    pub has_steady_speed: bool,
    /// Number of earlier measurements that were discarded because the speed of the machine had changed.
    #[serde(rename = "restarts", default, alias = "started_over")]
    pub discarded_attempts: u32,
}

fn yes() -> bool {
    true
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct FailedScenario {
    pub name: String,
    pub reason: String,
}

/// The results of a validation suite: the scenarios with their predictions and measurements.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Validation {
    /// The name of the suite, such as `scenarios/lab`.
    pub title: String,
    #[serde(rename = "machine")]
    pub machine_properties: Vec<(String, String)>,
    pub cases: Vec<ValidationCase>,
    #[serde(rename = "failed")]
    pub failed_scenarios: Vec<FailedScenario>,
}

impl Validation {
    pub fn scores(&self) -> Scores {
        let mut scores = Scores::from_cases(&self.cases);
        scores.criteria.push(scores::completeness_criterion(&self.cases, &self.failed_scenarios));
        scores
    }
}

#[cfg(test)]
impl ValidationCase {
    /// Returns a case with a run for each measured time per token, in milliseconds. Half of the time is computing, and
    /// half is waiting for the disk.
    fn fixture(name: &str, predicted: f64, measured: &[f64]) -> Self {
        let numbers = |ms: f64| RunMetrics {
            tpot_ms: Some(ms),
            ttft_ms: Some(2.0 * ms),
            bytes_read_per_token: Some(ms * 1e6),
            terms: Terms { cpu: 0.5 * ms, demand_disk: 0.5 * ms, ..Terms::default() },
        };
        let run = |&ms: &f64| RunPair {
            prediction_digest: "sha256:1".into(),
            predicted_metrics: numbers(predicted),
            measured_metrics: numbers(ms),
            has_steady_speed: true,
            discarded_attempts: 0,
        };
        let question = "Is <it> right?".into();
        Self { name: name.into(), question, run_pairs: measured.iter().map(run).collect() }
    }
}
