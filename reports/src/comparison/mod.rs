//! Comparison of simulated and measured runs.
//!
//! Every trace becomes a [`Run`] with its metrics. A simulated and a measured run of the same plan become a
//! [`RunComparison`] with a row for each quantity. The error is the predicted value minus the measured value. The terms
//! of a run sum to its TPOT. If a run has several tokens, its TPOT and its terms have confidence intervals
//! ([`hearth_core::metrics::confidence_intervals`]), which are combined for the error.
//!
//! With more than two traces, each run is paired with the first run of the same plan that has the other
//! origin (simulated or measured). The other runs remain unpaired, and a note explains why.

pub mod terms;

use hearth_core::metrics::confidence_intervals::ConfidenceIntervals;
use hearth_core::metrics::token_times::TokenTimes;
use hearth_core::metrics::{self, Metrics};
use hearth_schema::Trace;
use hearth_schema::trace::{Origin, Outcome};
use serde::Serialize;

use crate::text::escape;

/// The role of a quantity in a table of quantities.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum QuantityRole {
    /// A term of the time per token.
    Term,
    /// The mean time per token, the sum of the terms.
    Total,
    /// A quantity that is not a part of the time per token, such as `ttft`.
    Other,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum Unit {
    #[serde(rename = "ms")]
    Milliseconds,
    #[serde(rename = "tokens/s")]
    TokensPerSecond,
    #[serde(rename = "bytes")]
    Bytes,
}

/// A quantity of one run.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Quantity {
    /// The key of the quantity, such as `cpu`, `tpot` or `bytes_read_per_token`.
    pub key: &'static str,
    pub unit: Unit,
    pub role: QuantityRole,
    /// `None` if the run ended before the quantity could be measured.
    pub value: Option<f64>,
    /// Half the width of the 95 % confidence interval of `value`; `None` if unknown.
    pub interval_half_width: Option<f64>,
}

/// The metrics of one trace.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Run {
    /// `simulated` or `measured`; further runs of the same origin are numbered, as in `measured-2`.
    pub label: String,
    pub origin: Origin,
    pub scenario: String,
    pub model: String,
    #[serde(rename = "plan")]
    pub plan_digest: String,
    /// Number of tokens in the prompts that were processed completely.
    pub prompt_tokens: u64,
    /// Number of generated tokens without the first token of each request.
    #[serde(rename = "tokens")]
    pub decoded_tokens: usize,
    /// Confidence intervals of the mean time per token and of its terms; `None` if there are too few tokens.
    #[serde(rename = "intervals")]
    pub confidence_intervals: Option<ConfidenceIntervals>,
    pub metrics: Metrics,
}

/// A predicted and a measured value of one quantity.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct QuantityComparison {
    pub key: &'static str,
    pub unit: Unit,
    pub role: QuantityRole,
    #[serde(rename = "predicted")]
    pub predicted_value: Option<f64>,
    #[serde(rename = "measured")]
    pub measured_value: Option<f64>,
    pub error: Option<f64>,
    /// The error in percent of the measured value; `None` if the measured value is zero.
    pub error_percent: Option<f64>,
    /// Half the width of the 95 % confidence interval of `error`; `None` if unknown.
    #[serde(rename = "interval")]
    pub interval_half_width: Option<f64>,
}

/// A simulated and a measured run of the same plan.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RunComparison {
    /// Index of the simulated run in [`Comparison::runs`].
    #[serde(rename = "predicted")]
    pub predicted_run_index: usize,
    /// Index of the measured run in [`Comparison::runs`].
    #[serde(rename = "measured")]
    pub measured_run_index: usize,
    #[serde(rename = "rows")]
    pub quantity_comparisons: Vec<QuantityComparison>,
}

/// A cell of a table of published results that belongs to the scenario of a run.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PublishedCell {
    /// Index of the run in [`Comparison::runs`].
    #[serde(rename = "run")]
    pub run_index: usize,
    /// The name of the `published/1` document.
    pub document: String,
    pub source: String,
    pub row: String,
    pub system: String,
    /// Whether the tables compare the run with this cell: its system was requested, or there is no other cell.
    #[serde(rename = "selected")]
    pub is_selected: bool,
    pub tpot_ms: Option<f64>,
    pub ttft_ms: Option<f64>,
    /// How the published run failed; `None` if it completed.
    pub outcome: Option<Outcome>,
    /// Maximum accepted relative error of a simulated time.
    pub tolerance: f64,
    /// Whether parameters of the shipped device profiles were fitted to the row of this cell.
    #[serde(rename = "fitted")]
    pub is_fitted: bool,
}

/// All runs of a report, and the pairs of a simulated and a measured run.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Comparison {
    /// The runs, in the order of the traces.
    pub runs: Vec<Run>,
    #[serde(rename = "pairs")]
    pub run_comparisons: Vec<RunComparison>,
    /// Warnings for the reader about the comparison.
    pub notes: Vec<String>,
    /// The published results of the scenarios of the runs, if requested.
    #[serde(rename = "published", skip_serializing_if = "Vec::is_empty")]
    pub published_cells: Vec<PublishedCell>,
    /// Caveats in the documents of published results.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub caveats: Vec<String>,
}

impl Run {
    /// Computes the metrics of a trace.
    pub(crate) fn new(label: String, trace: &Trace) -> Self {
        let mut metrics = metrics::compute_metrics(trace);
        for device in &mut metrics.devices {
            device.name = escape::sanitize_name(&device.name);
        }
        let outputs = TokenTimes::from_trace(trace);
        Self {
            label,
            origin: trace.header.origin,
            scenario: escape::sanitize_name(&trace.header.scenario_name),
            model: escape::sanitize_name(&trace.header.model_name),
            plan_digest: escape::sanitize_name(&trace.header.plan_digest),
            prompt_tokens: outputs.prompt_tokens(),
            decoded_tokens: outputs.decoded_tokens(),
            confidence_intervals: ConfidenceIntervals::from_trace(trace),
            metrics,
        }
    }

    /// Returns the label of the run with a capital first letter.
    pub fn heading(&self) -> String {
        let mut chars = self.label.chars();
        chars.next().map(|first| first.to_uppercase().chain(chars).collect()).unwrap_or_default()
    }

    /// Returns the quantities of the run in the order of a table, the terms of the time per token first.
    pub fn quantities(&self) -> Vec<Quantity> {
        let (metrics, intervals) = (&self.metrics, self.confidence_intervals);
        let tpot = metrics.tpot_ms;
        let ms = Unit::Milliseconds;
        let terms = metrics.terms_ms.named_terms().into_iter().enumerate().map(|(index, (key, value))| {
            let interval = intervals.map(|intervals| intervals.term_half_widths_ms[index]);
            (key, ms, QuantityRole::Term, tpot.map(|_| value), interval)
        });
        let interval = intervals.map(|intervals| intervals.tpot_half_width_ms);
        let total = ("tpot", ms, QuantityRole::Total, tpot.map(|tpot| tpot.mean_ms), interval);
        let bytes_read = metrics.bytes_read_per_token().filter(|_| tpot.is_some());
        let others = [
            (terms::HIDDEN_DISK_TIME.key, ms, tpot.map(|_| metrics.terms_ms.hidden_disk)),
            ("tpot_p50", ms, tpot.map(|tpot| tpot.p50_ms)),
            ("tpot_p95", ms, tpot.map(|tpot| tpot.p95_ms)),
            ("ttft", ms, metrics.ttft_ms),
            ("tokens_per_s", Unit::TokensPerSecond, metrics.tokens_per_s),
            ("bytes_read_per_token", Unit::Bytes, bytes_read),
        ];
        let others = others.map(|(key, unit, value)| (key, unit, QuantityRole::Other, value, None));
        let all = terms.chain([total]).chain(others).map(|(key, unit, role, value, interval_half_width)| {
            Quantity { key, unit, role, value, interval_half_width }
        });
        all.collect()
    }
}

impl Comparison {
    /// Computes the metrics of traces, which must have been validated, and pairs the runs.
    pub(crate) fn new(traces: &[Trace]) -> Self {
        let runs: Vec<Run> =
            labels(traces).into_iter().zip(traces).map(|(label, trace)| Run::new(label, trace)).collect();
        let pairs = paired_runs(traces).into_iter();
        let pairs: Vec<RunComparison> = pairs.map(|indices| RunComparison::new(indices, &runs)).collect();
        let notes = notes(traces, &runs, &pairs);
        Self { runs, run_comparisons: pairs, notes, published_cells: Vec::new(), caveats: Vec::new() }
    }

    /// Returns the indices of the runs that are in no pair.
    pub fn unpaired_run_indices(&self) -> Vec<usize> {
        let paired = |index: &usize| self.run_comparisons.iter().any(|it| it.run_indices().contains(index));
        (0..self.runs.len()).filter(|index| !paired(index)).collect()
    }

    /// Returns the index of the run that the summary describes: the measured run of the first pair, else the first
    /// measured run, else the first run.
    pub fn main_run_index(&self) -> usize {
        let measured = || self.runs.iter().position(|run| run.origin == Origin::Measured);
        self.run_comparisons.first().map(|pair| pair.measured_run_index).or_else(measured).unwrap_or(0)
    }

    /// Returns the published cell that a run is compared with, if exactly one is selected.
    pub fn published_cell(&self, run: usize) -> Option<&PublishedCell> {
        let mut selected =
            self.published_cells.iter().filter(|cell| cell.run_index == run && cell.is_selected);
        selected.next().filter(|_| selected.next().is_none())
    }
}

impl RunComparison {
    fn new((predicted, measured): (usize, usize), runs: &[Run]) -> Self {
        let row = |(left, right): (Quantity, Quantity)| {
            let error = left.value.zip(right.value).map(|(predicted, measured)| predicted - measured);
            let base = right.value.filter(|&measured| measured != 0.0);
            let half_widths = left.interval_half_width.zip(right.interval_half_width);
            QuantityComparison {
                key: left.key,
                unit: left.unit,
                role: left.role,
                predicted_value: left.value,
                measured_value: right.value,
                error,
                error_percent: error.zip(base).map(|(error, base)| 100.0 * error / base),
                // The errors of the two values are independent, so their variances add up.
                interval_half_width: half_widths.map(|(one, other)| one.hypot(other)),
            }
        };
        let quantities = runs[predicted].quantities().into_iter().zip(runs[measured].quantities());
        let rows = quantities.map(row).collect();
        Self { predicted_run_index: predicted, measured_run_index: measured, quantity_comparisons: rows }
    }

    /// Returns the indices of the simulated and the measured run in [`Comparison::runs`].
    pub fn run_indices(&self) -> [usize; 2] {
        [self.predicted_run_index, self.measured_run_index]
    }
}

fn labels(traces: &[Trace]) -> Vec<String> {
    let origins: Vec<Origin> = traces.iter().map(|trace| trace.header.origin).collect();
    let label = |(index, origin): (usize, &Origin)| {
        let word = origin_word(*origin);
        match origins[..index].iter().filter(|earlier| *earlier == origin).count() {
            0 => word.to_owned(),
            earlier => format!("{word}-{}", earlier + 1),
        }
    };
    origins.iter().enumerate().map(label).collect()
}

/// Returns the word for an origin: `simulated` or `measured`.
pub(crate) fn origin_word(origin: Origin) -> &'static str {
    match origin {
        Origin::Simulated => "simulated",
        Origin::Measured => "measured",
    }
}

/// Pairs each run with the first run of the same plan that has the other origin (simulated or measured). Returns the
/// pairs as indices of the simulated and the measured run, without duplicates.
fn paired_runs(traces: &[Trace]) -> Vec<(usize, usize)> {
    let mut pairs = Vec::new();
    for (index, trace) in traces.iter().enumerate() {
        let partner = traces.iter().position(|other| {
            other.header.origin != trace.header.origin && other.header.plan_digest == trace.header.plan_digest
        });
        let Some(partner) = partner else { continue };
        let pair = match trace.header.origin {
            Origin::Simulated => (index, partner),
            Origin::Measured => (partner, index),
        };
        if !pairs.contains(&pair) {
            pairs.push(pair);
        }
    }
    pairs
}

fn notes(traces: &[Trace], runs: &[Run], pairs: &[RunComparison]) -> Vec<String> {
    let mut notes = Vec::new();
    let mut models = traces.iter().map(|trace| &trace.header.model_name);
    if let Some(first) = models.next()
        && let Some(other) = models.find(|model| *model != first)
    {
        notes.push(format!(
            "The traces are of different models, `{first}` and `{other}`: their times cannot be compared."
        ));
    }
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
            origin_word(runs[0].origin)
        ));
    }
    notes.extend(pairs.iter().flat_map(|pair| pair_notes(pair.run_indices().map(|index| &runs[index]))));
    for run in runs {
        let ended = match run.metrics.outcome {
            Outcome::Ok => None,
            Outcome::OutOfMemory => Some("a device ran out of memory"),
            Outcome::Killed => Some("a device died or was stopped"),
        };
        let heading = run.heading();
        if let Some(ended) = ended {
            let tokens = tokens_in_words(run.decoded_tokens);
            notes.push(format!("{heading} did not finish: {ended}. It has {tokens}."));
        } else if run.decoded_tokens == 0 {
            notes.push(format!("{heading} has no token after the first, so it has no time per token."));
        }
    }
    notes.extend(unvalidated(traces, runs));
    notes
}

/// Returns a note for each difference between a predicted and a measured run of the same plan.
fn pair_notes([predicted, measured]: [&Run; 2]) -> Vec<String> {
    let (heading, label) = (predicted.heading(), &measured.label);
    let differ = |one: u64, other: u64| one != other && one > 0 && other > 0;
    let mut notes = Vec::new();
    let [names, other_names] =
        [predicted, measured].map(|run| run.metrics.devices.iter().map(|device| &device.name));
    if names.ne(other_names) {
        notes.push(format!(
            "{heading} and {label} have different device names, although the plan is the same."
        ));
    }
    let (prompt, other) = (predicted.prompt_tokens, measured.prompt_tokens);
    if differ(prompt, other) {
        notes.push(format!(
            "{heading} read a prompt of {prompt} tokens and {label} one of {other}: their times to first token are for different work."
        ));
    }
    let (decoded, other) = (predicted.decoded_tokens, measured.decoded_tokens);
    if differ(decoded as u64, other as u64) {
        notes.push(format!(
            "{heading} has {decoded} tokens after the first and {label} has {other}: their means are for different work."
        ));
    }
    notes
}

/// Returns a note for each device profile that is not fully validated, with the runs that use it.
fn unvalidated(traces: &[Trace], runs: &[Run]) -> Vec<String> {
    let mut found: Vec<(String, Vec<String>)> = Vec::new();
    for (run, trace) in runs.iter().zip(traces) {
        for device in &trace.header.devices {
            let Some(what) = &device.unvalidated_parts else { continue };
            let (name, what) = (escape::sanitize_name(&device.name), escape::sanitize_sentence(what));
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
