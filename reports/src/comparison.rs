//! How far is the prediction from the measurement?
//!
//! Every trace becomes a [`Run`] with its numbers. A simulated and a measured run of the same plan
//! become a [`Pair`]: a row a quantity, the error of the prediction being predicted less measured. The
//! terms of a pair sum to its TPOT. Where a run has several tokens, its time per token and the terms have the
//! interval of [`hearth_core::metrics::intervals`], and the error has that of both.
//!
//! With more than two traces each run finds a partner: the first run of the other origin with the same
//! plan. Runs without a partner stand alone, and a note says why.
//!
//! Not here: how numbers are rounded (`rounding`) and laid out (`tables`).

use std::collections::BTreeSet;

use hearth_core::metrics;
use hearth_core::metrics::Metrics;
use hearth_core::metrics::intervals::Intervals;
use hearth_core::metrics::outputs::Outputs;
use hearth_schema::Trace;
use hearth_schema::trace::Origin;
use hearth_schema::trace::Outcome;
use serde::{Deserialize, Serialize};

use crate::published::beside::Printed;
use crate::{escape, terms};

/// Where a quantity stands in a table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Place {
    /// A part of the time per token.
    Part,
    /// The mean time per token, which the parts sum to.
    Total,
    /// Beside the sum.
    Beside,
}

/// What a number counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Unit {
    /// Milliseconds.
    #[serde(rename = "ms")]
    Milliseconds,
    /// Tokens a second.
    #[serde(rename = "tokens/s")]
    TokensPerSecond,
    /// Bytes.
    #[serde(rename = "bytes")]
    Bytes,
}

/// A number of a run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Quantity {
    /// Its key: `cpu`, `tpot`, `bytes_read_per_token`.
    pub key: String,
    /// What it counts.
    pub unit: Unit,
    /// Where it stands.
    pub place: Place,
    /// Its value; absent if the run did not get that far.
    pub value: Option<f64>,
    /// Half the width of the interval around it; absent where nothing is known of it.
    pub interval: Option<f64>,
}

/// A trace's numbers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Run {
    /// `simulated` or `measured`, with a number from the second of a kind on.
    pub label: String,
    /// Simulated or measured.
    pub origin: Origin,
    /// The scenario's name.
    pub scenario: String,
    /// The model's name.
    pub model: String,
    /// The plan's digest.
    pub plan: String,
    /// Tokens of its prompts, as far as they were read to their ends.
    #[serde(default)]
    pub prompts: u64,
    /// How many tokens after the first were made.
    pub tokens: usize,
    /// How sure its means are, with more than one turn.
    pub intervals: Option<Intervals>,
    /// Its numbers.
    pub metrics: Metrics,
}

/// A quantity predicted and measured.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// Its key.
    pub key: String,
    /// What it counts.
    pub unit: Unit,
    /// Where it stands.
    pub place: Place,
    /// By the simulator.
    pub predicted: Option<f64>,
    /// By the executor.
    pub measured: Option<f64>,
    /// Predicted less measured.
    pub error: Option<f64>,
    /// The error in percent of the measured value; absent where that is zero.
    pub error_percent: Option<f64>,
    /// Half the width of the interval around the error.
    pub interval: Option<f64>,
}

/// A simulated and a measured run of the same plan.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Pair {
    /// Index of the simulated run.
    pub predicted: usize,
    /// Index of the measured run.
    pub measured: usize,
    /// A row a quantity.
    pub rows: Vec<Row>,
}

/// All runs of a report, and which of them are compared.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Comparison {
    /// In the order the traces were given.
    pub runs: Vec<Run>,
    /// In the order of their first run.
    pub pairs: Vec<Pair>,
    /// What a reader has to know before comparing.
    pub notes: Vec<String>,
    /// What others published of the same scenarios, if that was asked for.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub published: Vec<Printed>,
    /// What the documents say of these numbers.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub caveats: Vec<String>,
}

impl Run {
    /// A trace's numbers under a label.
    pub(crate) fn new(label: String, trace: &Trace) -> Self {
        let mut metrics = metrics::compute(trace);
        for device in &mut metrics.devices {
            device.name = escape::name(&device.name);
        }
        let outputs = Outputs::of(trace);
        Self {
            label,
            origin: trace.header.origin,
            scenario: escape::name(&trace.header.scenario),
            model: escape::name(&trace.header.model),
            plan: escape::name(&trace.header.plan),
            prompts: outputs.prompts(trace),
            tokens: outputs.tokens(),
            intervals: Intervals::of(trace),
            metrics,
        }
    }

    /// The label with a capital, for a heading.
    pub fn heading(&self) -> String {
        let mut chars = self.label.chars();
        chars.next().map(|first| first.to_uppercase().chain(chars).collect()).unwrap_or_default()
    }

    /// Its numbers in the order of a table, the parts first and in a row.
    pub fn quantities(&self) -> Vec<Quantity> {
        let (metrics, known) = (&self.metrics, self.intervals);
        let tpot = metrics.tpot_ms;
        let sure = |key: &str, place, value, interval| Quantity {
            key: key.into(),
            unit: Unit::Milliseconds,
            place,
            value,
            interval,
        };
        let ms = |key: &str, place, value| sure(key, place, value, None);
        let mut rows: Vec<Quantity> = metrics
            .terms_ms
            .rows()
            .into_iter()
            .enumerate()
            .map(|(place, (key, value))| {
                sure(key, Place::Part, tpot.map(|_| value), known.map(|known| known.terms[place]))
            })
            .collect();
        rows.push(sure("tpot", Place::Total, tpot.map(|tpot| tpot.mean), known.map(|known| known.tpot)));
        rows.push(ms(terms::HIDDEN.key, Place::Beside, tpot.map(|_| metrics.terms_ms.hidden_disk)));
        rows.push(ms("tpot_p50", Place::Beside, tpot.map(|tpot| tpot.p50)));
        rows.push(ms("tpot_p95", Place::Beside, tpot.map(|tpot| tpot.p95)));
        rows.push(ms("ttft", Place::Beside, metrics.ttft_ms));
        rows.push(Quantity {
            key: "tokens_per_s".into(),
            unit: Unit::TokensPerSecond,
            place: Place::Beside,
            value: metrics.tokens_per_s,
            interval: None,
        });
        rows.push(Quantity {
            key: "bytes_read_per_token".into(),
            unit: Unit::Bytes,
            place: Place::Beside,
            value: metrics.bytes_read_per_token().filter(|_| tpot.is_some()),
            interval: None,
        });
        rows
    }
}

impl Comparison {
    /// The numbers of the traces, which must have been checked, and the pairs among them.
    pub(crate) fn new(traces: &[Trace]) -> Self {
        let runs: Vec<Run> =
            labels(traces).into_iter().zip(traces).map(|(label, trace)| Run::new(label, trace)).collect();
        let pairs: Vec<Pair> = partners(traces)
            .into_iter()
            .map(|(predicted, measured)| Pair::new(predicted, measured, &runs))
            .collect();
        let notes = notes(traces, &runs, &pairs);
        Self { runs, pairs, notes, published: Vec::new(), caveats: Vec::new() }
    }

    /// The runs that are in no pair.
    pub fn single(&self) -> Vec<usize> {
        let paired = |index: &usize| self.pairs.iter().any(|pair| pair.has(*index));
        (0..self.runs.len()).filter(|index| !paired(index)).collect()
    }

    /// The run that the summary is about: the first measured one of a pair, else the first measured
    /// one, else the first.
    pub fn leading(&self) -> usize {
        let measured = || self.runs.iter().position(|run| run.origin == Origin::Measured);
        self.pairs.first().map(|pair| pair.measured).or_else(measured).unwrap_or(0)
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
                    place: left.place,
                    predicted: left.value,
                    measured: right.value,
                    error,
                    error_percent: error.zip(base).map(|(error, base)| 100.0 * error / base),
                    // Of a difference of two that do not depend on each other.
                    interval: left.interval.zip(right.interval).map(|(one, other)| one.hypot(other)),
                }
            })
            .collect();
        Self { predicted, measured, rows }
    }

    fn has(&self, run: usize) -> bool {
        self.predicted == run || self.measured == run
    }

    /// The row of a quantity.
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

/// Pairs of a simulated and a measured run: each run with the first of the other origin.
fn partners(traces: &[Trace]) -> Vec<(usize, usize)> {
    let mut found = BTreeSet::new();
    let mut ordered = Vec::new();
    for (index, trace) in traces.iter().enumerate() {
        let partner = traces.iter().position(|other| {
            other.header.origin != trace.header.origin && other.header.plan == trace.header.plan
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

/// That not all traces are of the first one's model.
fn other_model(traces: &[Trace]) -> Option<String> {
    let first = &traces.first()?.header.model;
    let other = &traces.iter().find(|trace| trace.header.model != *first)?.header.model;
    Some(format!(
        "The traces are of different models, `{first}` and `{other}`: their times say nothing of each other."
    ))
}

fn notes(traces: &[Trace], runs: &[Run], pairs: &[Pair]) -> Vec<String> {
    let mut notes = Vec::new();
    notes.extend(other_model(traces));
    if runs.iter().any(|run| run.plan != runs[0].plan) {
        notes.push(
            "The traces are of different plans. Runs of different plans do different work: they stand side by \
             side, and no error is computed between them."
                .into(),
        );
    } else if runs.len() > 1 && pairs.is_empty() {
        notes.push(format!(
            "All {} traces are {}; there is nothing to compare a prediction with.",
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
                "{} and {} name their devices differently, although the plan is the same.",
                left.heading(),
                right.label
            ));
        }
        if left.prompts != right.prompts && left.prompts > 0 && right.prompts > 0 {
            notes.push(format!(
                "{} read a prompt of {} tokens and {} one of {}: their times to the first token are of different work.",
                left.heading(),
                left.prompts,
                right.label,
                right.prompts
            ));
        }
        if left.tokens != right.tokens && left.tokens > 0 && right.tokens > 0 {
            notes.push(format!(
                "{} has {} tokens after the first and {} has {}: their means are over different work.",
                left.heading(),
                left.tokens,
                right.label,
                right.tokens
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
            notes.push(format!("{} did not finish: {ended}. It has {}.", run.heading(), spell(run.tokens)));
        } else if run.tokens == 0 {
            notes.push(format!(
                "{} has no token after the first, so it has no time per token.",
                run.heading()
            ));
        }
    }
    notes.extend(unvalidated(traces, runs));
    notes
}

/// What has not been checked of devices, each once with the runs that it is said of.
fn unvalidated(traces: &[Trace], runs: &[Run]) -> Vec<String> {
    let mut said: Vec<(String, Vec<String>)> = Vec::new();
    for (run, trace) in runs.iter().zip(traces) {
        for device in &trace.header.devices {
            let Some(what) = &device.unvalidated else { continue };
            let (name, what) = (escape::name(&device.name), escape::phrase(what));
            let sentence = format!("{name} is unvalidated ({what}).");
            match said.iter_mut().find(|(known, _)| *known == sentence) {
                Some((_, of)) => of.push(run.heading()),
                None => said.push((sentence, vec![run.heading()])),
            }
        }
    }
    said.into_iter().map(|(sentence, of)| format!("{}: {sentence}", of.join(", "))).collect()
}

fn spell(tokens: usize) -> String {
    match tokens {
        0 => "no token after the first".into(),
        1 => "1 token after the first".into(),
        tokens => format!("{tokens} tokens after the first"),
    }
}
