//! Comparison of simulated and measured runs.
//!
//! Every trace becomes a [`Run`] with its metrics. A simulated and a measured run of the same plan become a [`Pair`]
//! with a row for each quantity. The error is the predicted value minus the measured value. The terms of a run sum to
//! its TPOT. If a run has several tokens, its TPOT and its terms have confidence intervals
//! ([`hearth_core::metrics::intervals`]), which are combined for the error.
//!
//! With more than two traces, each run is paired with the first run of the other origin and the same plan. The other
//! runs remain unpaired, and a note explains why.
//!
//! Not here: rounding (`crate::text::numbers`) and layout (`crate::sections::tables`).

pub mod terms;

use std::collections::BTreeSet;

use hearth_core::metrics;
use hearth_core::metrics::Metrics;
use hearth_core::metrics::intervals::ConfidenceIntervals;
use hearth_core::metrics::token_times::TokenTimes;
use hearth_schema::Trace;
use hearth_schema::trace::{Origin, Outcome};
use serde::{Deserialize, Serialize};

use crate::text::escape;

/// The role of a quantity in a table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// A term of the time per token.
    #[serde(alias = "part")]
    Term,
    /// The mean time per token, the sum of the terms.
    Total,
    /// A quantity outside the sum.
    #[serde(alias = "beside")]
    Other,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Unit {
    #[serde(rename = "ms")]
    Milliseconds,
    #[serde(rename = "tokens/s")]
    TokensPerSecond,
    #[serde(rename = "bytes")]
    Bytes,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Quantity {
    /// The key of the quantity, such as `cpu`, `tpot` or `bytes_read_per_token`.
    pub key: String,
    pub unit: Unit,
    #[serde(alias = "place")]
    pub role: Role,
    /// `None` if the run ended before the quantity could be measured.
    pub value: Option<f64>,
    /// Half the width of the confidence interval of the value, if known.
    #[serde(rename = "interval")]
    pub interval_half_width: Option<f64>,
}

/// The metrics of one trace.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Run {
    /// `simulated` or `measured`; further runs of the same origin are numbered, as in `measured-2`.
    pub label: String,
    pub origin: Origin,
    pub scenario: String,
    pub model: String,
    #[serde(rename = "plan")]
    pub plan_digest: String,
    /// Number of tokens in the prompts that were processed completely.
    #[serde(default, alias = "prompts")]
    pub prompt_tokens: u64,
    /// Number of generated tokens after the first.
    #[serde(rename = "tokens")]
    pub decoded_tokens: usize,
    /// Confidence intervals of the means; `None` for too few tokens.
    pub intervals: Option<ConfidenceIntervals>,
    pub metrics: Metrics,
}

/// A predicted and a measured value of one quantity.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Row {
    pub key: String,
    pub unit: Unit,
    #[serde(alias = "place")]
    pub role: Role,
    pub predicted: Option<f64>,
    pub measured: Option<f64>,
    pub error: Option<f64>,
    /// The error in percent of the measured value; `None` if the measured value is zero.
    pub error_percent: Option<f64>,
    /// Half the width of the confidence interval of the error.
    #[serde(rename = "interval")]
    pub interval_half_width: Option<f64>,
}

/// A simulated and a measured run of the same plan.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Pair {
    /// Index of the simulated run in [`Comparison::runs`].
    pub predicted: usize,
    /// Index of the measured run in [`Comparison::runs`].
    pub measured: usize,
    pub rows: Vec<Row>,
}

/// A cell of a table of published results that belongs to the scenario of a run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PublishedCell {
    /// Index of the run in [`Comparison::runs`].
    pub run: usize,
    /// The name of the document.
    pub document: String,
    pub source: String,
    pub row: String,
    pub system: String,
    /// Whether the tables compare the run with this cell: its system was requested, or it is the only cell.
    #[serde(alias = "chosen")]
    pub selected: bool,
    pub tpot_ms: Option<f64>,
    pub ttft_ms: Option<f64>,
    /// The outcome of the published run; `None` if it completed.
    pub outcome: Option<Outcome>,
    /// Maximum relative error of a simulated time.
    pub tolerance: f64,
    /// Whether parameters of the shipped device profiles were fitted to this row.
    #[serde(rename = "fitted")]
    pub is_fitted: bool,
}

/// All runs of a report, and the pairs among them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Comparison {
    /// The runs, in the order of the given traces.
    pub runs: Vec<Run>,
    /// The pairs, in the order of the run that comes first.
    pub pairs: Vec<Pair>,
    /// Warnings about the comparison.
    pub notes: Vec<String>,
    /// Published results of the same scenarios, if requested.
    #[serde(rename = "published", default, skip_serializing_if = "Vec::is_empty")]
    pub published_cells: Vec<PublishedCell>,
    /// Caveats of the documents of published results.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub caveats: Vec<String>,
}

impl Run {
    /// Computes the metrics of a trace.
    pub(crate) fn new(label: String, trace: &Trace) -> Self {
        let mut metrics = metrics::compute(trace);
        for device in &mut metrics.devices {
            device.name = escape::name(&device.name);
        }
        let outputs = TokenTimes::from_trace(trace);
        Self {
            label,
            origin: trace.header.origin,
            scenario: escape::name(&trace.header.scenario),
            model: escape::name(&trace.header.model),
            plan_digest: escape::name(&trace.header.plan_digest),
            prompt_tokens: outputs.prompt_tokens(trace),
            decoded_tokens: outputs.decoded_tokens(),
            intervals: ConfidenceIntervals::from_trace(trace),
            metrics,
        }
    }

    /// Returns the label with a capital first letter.
    pub fn heading(&self) -> String {
        let mut chars = self.label.chars();
        chars.next().map(|first| first.to_uppercase().chain(chars).collect()).unwrap_or_default()
    }

    /// Returns the quantities in the order of a table, the terms first.
    pub fn quantities(&self) -> Vec<Quantity> {
        let (metrics, known) = (&self.metrics, self.intervals);
        let tpot = metrics.tpot_ms;
        let with_interval = |key: &str, role, value, interval_half_width| Quantity {
            key: key.into(),
            unit: Unit::Milliseconds,
            role,
            value,
            interval_half_width,
        };
        let ms = |key: &str, role, value| with_interval(key, role, value, None);
        let mut rows: Vec<Quantity> = metrics
            .terms_ms
            .rows()
            .into_iter()
            .enumerate()
            .map(|(index, (key, value))| {
                with_interval(key, Role::Term, tpot.map(|_| value), known.map(|known| known.terms[index]))
            })
            .collect();
        rows.push(with_interval(
            "tpot",
            Role::Total,
            tpot.map(|tpot| tpot.mean),
            known.map(|known| known.tpot),
        ));
        rows.push(ms(terms::HIDDEN_DISK.key, Role::Other, tpot.map(|_| metrics.terms_ms.hidden_disk)));
        rows.push(ms("tpot_p50", Role::Other, tpot.map(|tpot| tpot.p50)));
        rows.push(ms("tpot_p95", Role::Other, tpot.map(|tpot| tpot.p95)));
        rows.push(ms("ttft", Role::Other, metrics.ttft_ms));
        rows.push(Quantity {
            key: "tokens_per_s".into(),
            unit: Unit::TokensPerSecond,
            role: Role::Other,
            value: metrics.tokens_per_s,
            interval_half_width: None,
        });
        rows.push(Quantity {
            key: "bytes_read_per_token".into(),
            unit: Unit::Bytes,
            role: Role::Other,
            value: metrics.bytes_read_per_token().filter(|_| tpot.is_some()),
            interval_half_width: None,
        });
        rows
    }
}

impl Comparison {
    /// Computes the metrics of traces, which must have been validated, and pairs the runs.
    pub(crate) fn new(traces: &[Trace]) -> Self {
        let runs: Vec<Run> =
            labels(traces).into_iter().zip(traces).map(|(label, trace)| Run::new(label, trace)).collect();
        let pairs: Vec<Pair> = paired_runs(traces)
            .into_iter()
            .map(|(predicted, measured)| Pair::new(predicted, measured, &runs))
            .collect();
        let notes = notes(traces, &runs, &pairs);
        Self { runs, pairs, notes, published_cells: Vec::new(), caveats: Vec::new() }
    }

    /// Returns the indices of the runs that are in no pair.
    pub fn unpaired(&self) -> Vec<usize> {
        let paired = |index: &usize| self.pairs.iter().any(|pair| pair.contains(*index));
        (0..self.runs.len()).filter(|index| !paired(index)).collect()
    }

    /// Returns the index of the run that the summary describes: the measured run of the first pair, else the first
    /// measured run, else the first run.
    pub fn main_run(&self) -> usize {
        let measured = || self.runs.iter().position(|run| run.origin == Origin::Measured);
        self.pairs.first().map(|pair| pair.measured).or_else(measured).unwrap_or(0)
    }

    /// Returns the published cell that a run is compared with, if exactly one is selected.
    pub fn published_cell(&self, run: usize) -> Option<&PublishedCell> {
        let mut selected = self.published_cells.iter().filter(|cell| cell.run == run && cell.selected);
        selected.next().filter(|_| selected.next().is_none())
    }
}

impl Pair {
    fn new(predicted: usize, measured: usize, runs: &[Run]) -> Self {
        let rows = runs[predicted]
            .quantities()
            .into_iter()
            .zip(runs[measured].quantities())
            .map(|(left, right)| {
                let error = left.value.zip(right.value).map(|(predicted, measured)| predicted - measured);
                let base = right.value.filter(|&measured| measured != 0.0);
                Row {
                    key: left.key,
                    unit: left.unit,
                    role: left.role,
                    predicted: left.value,
                    measured: right.value,
                    error,
                    error_percent: error.zip(base).map(|(error, base)| 100.0 * error / base),
                    // The errors of the two values are independent, so their variances add up.
                    interval_half_width: left
                        .interval_half_width
                        .zip(right.interval_half_width)
                        .map(|(one, other)| one.hypot(other)),
                }
            })
            .collect();
        Self { predicted, measured, rows }
    }

    fn contains(&self, run: usize) -> bool {
        self.predicted == run || self.measured == run
    }

    pub fn row(&self, key: &str) -> Option<&Row> {
        self.rows.iter().find(|row| row.key == key)
    }
}

fn labels(traces: &[Trace]) -> Vec<String> {
    let mut counts = [0, 0];
    traces
        .iter()
        .map(|trace| {
            let (slot, word) = match trace.header.origin {
                Origin::Simulated => (0, "simulated"),
                Origin::Measured => (1, "measured"),
            };
            counts[slot] += 1;
            if counts[slot] == 1 { word.to_owned() } else { format!("{word}-{}", counts[slot]) }
        })
        .collect()
}

/// Pairs each run with the first run of the same plan and the other origin. Returns indices of simulated and measured
/// runs, without duplicates.
fn paired_runs(traces: &[Trace]) -> Vec<(usize, usize)> {
    let mut found = BTreeSet::new();
    let mut ordered = Vec::new();
    for (index, trace) in traces.iter().enumerate() {
        let partner = traces.iter().position(|other| {
            other.header.origin != trace.header.origin && other.header.plan_digest == trace.header.plan_digest
        });
        let Some(partner) = partner else { continue };
        let pair = match trace.header.origin {
            Origin::Simulated => (index, partner),
            Origin::Measured => (partner, index),
        };
        if found.insert(pair) {
            ordered.push(pair);
        }
    }
    ordered
}

/// Returns a note if the traces are of different models.
fn different_models(traces: &[Trace]) -> Option<String> {
    let first = &traces.first()?.header.model;
    let other = &traces.iter().find(|trace| trace.header.model != *first)?.header.model;
    Some(format!(
        "The traces are of different models, `{first}` and `{other}`: their times cannot be compared."
    ))
}

fn notes(traces: &[Trace], runs: &[Run], pairs: &[Pair]) -> Vec<String> {
    let mut notes = Vec::new();
    notes.extend(different_models(traces));
    if runs.iter().any(|run| run.plan_digest != runs[0].plan_digest) {
        notes.push(
            "The traces are of different plans. Runs of different plans do different work, so no error is computed \
             between them."
                .into(),
        );
    } else if runs.len() > 1 && pairs.is_empty() {
        notes.push(format!(
            "All {} traces are {}, so no prediction is compared with a measurement.",
            runs.len(),
            {
                match runs[0].origin {
                    Origin::Simulated => "simulated",
                    Origin::Measured => "measured",
                }
            }
        ));
    }
    for pair in pairs {
        let (left, right) = (&runs[pair.predicted], &runs[pair.measured]);
        let names = |run: &Run| -> Vec<String> {
            run.metrics.devices.iter().map(|device| device.name.clone()).collect()
        };
        if names(left) != names(right) {
            notes.push(format!(
                "{} and {} have different device names, although the plan is the same.",
                left.heading(),
                right.label
            ));
        }
        if left.prompt_tokens != right.prompt_tokens && left.prompt_tokens > 0 && right.prompt_tokens > 0 {
            notes.push(format!(
                "{} read a prompt of {} tokens and {} one of {}: their times to first token are for different work.",
                left.heading(),
                left.prompt_tokens,
                right.label,
                right.prompt_tokens
            ));
        }
        if left.decoded_tokens != right.decoded_tokens && left.decoded_tokens > 0 && right.decoded_tokens > 0
        {
            notes.push(format!(
                "{} has {} tokens after the first and {} has {}: their means are for different work.",
                left.heading(),
                left.decoded_tokens,
                right.label,
                right.decoded_tokens
            ));
        }
    }
    for run in runs {
        let ended = match run.metrics.outcome {
            Outcome::Ok => None,
            Outcome::OutOfMemory => Some("a device ran out of memory"),
            Outcome::Killed => Some("a device died or was stopped"),
        };
        if let Some(ended) = ended {
            notes.push(format!(
                "{} did not finish: {ended}. It has {}.",
                run.heading(),
                tokens_in_words(run.decoded_tokens)
            ));
        } else if run.decoded_tokens == 0 {
            notes.push(format!(
                "{} has no token after the first, so it has no time per token.",
                run.heading()
            ));
        }
    }
    notes.extend(unvalidated(traces, runs));
    notes
}

/// Returns a note for each device profile that is not fully validated, with the runs that use it.
fn unvalidated(traces: &[Trace], runs: &[Run]) -> Vec<String> {
    let mut found: Vec<(String, Vec<String>)> = Vec::new();
    for (run, trace) in runs.iter().zip(traces) {
        for device in &trace.header.devices {
            let Some(what) = &device.unvalidated else { continue };
            let (name, what) = (escape::name(&device.name), escape::phrase(what));
            let sentence = format!("the profile of {name} is not validated ({what}).");
            match found.iter_mut().find(|(known, _)| *known == sentence) {
                Some((_, of)) => of.push(run.heading()),
                None => found.push((sentence, vec![run.heading()])),
            }
        }
    }
    found.into_iter().map(|(sentence, of)| format!("{}: {sentence}", of.join(", "))).collect()
}

fn tokens_in_words(tokens: usize) -> String {
    match tokens {
        0 => "no token after the first".into(),
        1 => "1 token after the first".into(),
        tokens => format!("{tokens} tokens after the first"),
    }
}
