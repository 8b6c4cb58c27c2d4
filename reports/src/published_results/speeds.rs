//! Published speeds of one GPU, compared with a roofline prediction from its compute rate and bandwidth.
//!
//! A row of a `published/1` document can be a run on one GPU (key `roofline`) instead of a scenario; the systems of
//! such a row are GPUs. Speeds are in tokens per second; a prompt of P tokens at v tokens per second has a time to
//! first token of P / v.
//!
//! The error of a speed is predicted / published - 1. The mean of the absolute errors does not include rows to which
//! parameters were fitted, nor speeds that the document excludes; excluded speeds are shown with the reason.
//!
//! Not here: the prediction (`hearth_sim::mobile_gpu`).

use std::fmt::Write;

use hearth_profiles::{BytesPerSecond, FlopsPerSecond, PerSecond, Seconds, Sourced};
use serde::{Deserialize, Serialize};

use super::results::{CellResult, CellResults};
use super::{PublishedResults, ResultCell, ResultRow, System};
use crate::document::{Block, Table, Text};
use crate::text::{distinct_names, numbers};

/// Maximum number of prompt tokens, and of generated tokens, of a run. source: assumed, the longest context of a model
const MAX_TOKENS: u32 = 1 << 20;

/// The quantisation of weights with one scale per channel (ML Drift paper, section 4.2).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum ChannelQuantisation {
    /// 8 bits for all weights.
    #[serde(rename = "q8")]
    Q8,
    /// 8 bits in attention, 4 bits in the embedding and the feed-forward block.
    #[serde(rename = "8/4/4")]
    Mixed,
}

/// A run on one GPU: the prefill of a prompt, then decoding.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GpuRun {
    /// The path of the `model/1` document, relative to the folder of the `published/1` document.
    pub model: String,
    #[serde(rename = "weights")]
    pub quantisation: ChannelQuantisation,
    #[serde(rename = "prompt")]
    pub prompt_tokens: u32,
    #[serde(rename = "generate")]
    pub generated_tokens: u32,
}

/// The maximum compute rate and memory bandwidth that a GPU achieves.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GpuPeakRates {
    #[serde(rename = "compute")]
    pub compute_rate: Sourced<FlopsPerSecond>,
    /// Bandwidth of reading weights and the KV cache from memory.
    pub bandwidth: Sourced<BytesPerSecond>,
}

/// The reasons why the speeds of a cell are excluded from the means; `None` for a speed that is included.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExclusionReasons {
    pub prefill: Option<String>,
    pub decode: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum InferencePhase {
    Prefill,
    Decode,
}

/// A published speed and the predicted one, in tokens per second.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SpeedComparison {
    pub row: String,
    pub system: String,
    #[serde(rename = "stage")]
    pub phase: InferencePhase,
    #[serde(rename = "published")]
    pub published_tokens_per_s: f64,
    /// The predicted speed; `None` if it could not be predicted.
    #[serde(rename = "predicted")]
    pub predicted_tokens_per_s: Option<f64>,
    /// Predicted / published - 1.
    #[serde(rename = "error")]
    pub relative_error: Option<f64>,
    /// Whether the GPU's compute rate and bandwidth were fitted to the published speeds of this row.
    #[serde(rename = "fitted")]
    pub is_fitted: bool,
    /// The reason why the speed is excluded from the means; `None` if it is included.
    #[serde(rename = "excluded", skip_serializing_if = "Option::is_none")]
    pub exclusion_reason: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct MeanRelativeError {
    #[serde(rename = "error")]
    pub relative_error: f64,
    /// Number of cells (row and system) in the mean.
    #[serde(rename = "cells")]
    pub cell_count: usize,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SpeedScores {
    /// All speeds, in the order of rows and systems.
    #[serde(rename = "all")]
    pub comparisons: Vec<SpeedComparison>,
    /// The mean error of the prefill speeds; `None` if all prefill speeds are excluded.
    #[serde(rename = "prefill")]
    pub prefill_error: Option<MeanRelativeError>,
    /// The mean error of the decode speeds; `None` if all decode speeds are excluded.
    #[serde(rename = "decode")]
    pub decode_error: Option<MeanRelativeError>,
}

impl ResultRow {
    /// Returns the published time per token of a cell of this row.
    pub fn tpot(&self, cell: &ResultCell) -> Option<Seconds> {
        cell.tpot.or_else(|| Some(Seconds(1.0 / cell.decode_speed?.0)))
    }

    /// Returns the published time to the first token of a cell of this row.
    pub fn ttft(&self, cell: &ResultCell) -> Option<Seconds> {
        let prompt = self.gpu_run.as_ref().map(|roofline| f64::from(roofline.prompt_tokens));
        cell.ttft.or_else(|| Some(Seconds(prompt? / cell.prefill_speed?.0)))
    }
}

/// Returns the reason why a system cannot run a row: a row with `roofline` needs a GPU, any other row a planner.
pub(super) fn mismatch_reason(row: &ResultRow, system: &System) -> Option<String> {
    let name = &system.name;
    match (row.gpu_run.is_some(), &system.gpu, &system.planner) {
        (true, Some(_), _) | (false, _, Some(_)) => None,
        (true, None, _) => Some(format!("is a `roofline`, but `{name}` has no `gpu`")),
        (false, _, None) => Some(format!("is a `scenario`, but `{name}` has no `planner`")),
    }
}

/// Returns the first inconsistency of a row as an error message; `None` if the row is consistent.
pub(super) fn check_row(row: &ResultRow, systems: &[System]) -> Option<String> {
    let refuse = |what: &str| Some(format!("row `{}` {what}", row.label));
    match (&row.scenario, &row.gpu_run) {
        (Some(_), Some(_)) => return refuse("has both a `scenario` and a `roofline`: choose one"),
        (None, None) => return refuse("has neither a `scenario` nor a `roofline`: add one"),
        (_, Some(roofline)) => {
            let [prompt, generate] = [roofline.prompt_tokens, roofline.generated_tokens];
            if ![prompt, generate].iter().all(|tokens| (1..=MAX_TOKENS).contains(tokens)) {
                return refuse(&format!(
                    "has {prompt} prompt tokens and {generate} generated tokens: each must be from 1 to {MAX_TOKENS}"
                ));
            }
        }
        (Some(_), None) => {}
    }
    let is_roofline = row.gpu_run.is_some();
    for (name, cell) in &row.cells_by_system {
        let Some(system) = systems.iter().find(|system| system.name == *name) else { continue };
        if let Some(what) = mismatch_reason(row, system) {
            return refuse(&what);
        }
        let speeds = [cell.prefill_speed, cell.decode_speed];
        let reasons = [&cell.exclusion_reasons.prefill, &cell.exclusion_reasons.decode];
        let has_speed = speeds.iter().any(Option::is_some) || reasons.iter().any(|reason| reason.is_some());
        if !is_roofline && has_speed {
            return refuse("is a `scenario`: give `ttft` and `tpot` instead of `prefill` and `decode`");
        }
        if speeds.iter().flatten().any(|speed| speed.0 <= 0.0) {
            return refuse("has a speed that is not positive: correct it");
        }
        if (cell.prefill_speed.is_some() && cell.ttft.is_some())
            || (cell.decode_speed.is_some() && cell.tpot.is_some())
        {
            return refuse(&format!("has both a speed and a time for `{name}`, in the same phase: keep one"));
        }
        if reasons.into_iter().zip(speeds).any(|(reason, speed)| reason.is_some() && speed.is_none()) {
            return refuse(&format!("excludes a speed of `{name}`, which has none: add the speed"));
        }
    }
    None
}

/// Returns the first inconsistency of a system as an error message; `None` if the system is consistent.
pub(super) fn check_system(system: &System) -> Option<String> {
    let refuse = |what: &str| Some(format!("system `{}` {what}", system.name));
    match (&system.gpu, &system.planner) {
        (Some(_), Some(_)) => refuse("has both a `gpu` and a `planner`: choose one"),
        (None, None) => refuse("has neither a `planner` nor a `gpu`: add one"),
        (Some(gpu), None) if gpu.compute_rate.value.0 <= 0.0 || gpu.bandwidth.value.0 <= 0.0 => {
            refuse("has a `gpu` with a rate of zero: correct it")
        }
        _ => None,
    }
}

impl SpeedScores {
    /// Compares predictions with the published speeds; `None` if there are no published speeds.
    pub fn from_results(published: &PublishedResults, results: &CellResults) -> Option<SpeedScores> {
        let mut all = Vec::new();
        for (index, row, system, cell) in published.cells() {
            let Some(roofline) = &row.gpu_run else { continue };
            let run = results.get(&index).and_then(CellResult::simulated_run);
            let prompt = f64::from(roofline.prompt_tokens) * 1e3;
            let prefill = run.and_then(|run| Some(prompt / run.ttft_ms?));
            let decode = run.and_then(|run| Some(1e3 / run.tpot_ms?));
            for (phase, published_speed, predicted, exclusion_reason) in [
                (InferencePhase::Prefill, cell.prefill_speed, prefill, &cell.exclusion_reasons.prefill),
                (InferencePhase::Decode, cell.decode_speed, decode, &cell.exclusion_reasons.decode),
            ] {
                let Some(PerSecond(published_speed)) = published_speed else { continue };
                all.push(SpeedComparison {
                    row: row.label.clone(),
                    system: system.name.clone(),
                    phase,
                    published_tokens_per_s: published_speed,
                    predicted_tokens_per_s: predicted,
                    relative_error: predicted.map(|predicted| predicted / published_speed - 1.0),
                    is_fitted: published.fitted_rows.contains(&row.label),
                    exclusion_reason: exclusion_reason.clone(),
                });
            }
        }
        let mean = |phase: InferencePhase| {
            let is_included = |speed: &&SpeedComparison| !speed.is_fitted && speed.exclusion_reason.is_none();
            let counted = all.iter().filter(|speed| speed.phase == phase).filter(is_included);
            let errors: Vec<f64> = counted.filter_map(|speed| Some(speed.relative_error?.abs())).collect();
            let cell_count = errors.len();
            let relative_error = errors.iter().sum::<f64>() / cell_count as f64;
            (cell_count > 0).then_some(MeanRelativeError { relative_error, cell_count })
        };
        let [prefill_error, decode_error] = [InferencePhase::Prefill, InferencePhase::Decode].map(mean);
        (!all.is_empty()).then_some(SpeedScores { comparisons: all, prefill_error, decode_error })
    }

    /// Returns the published and predicted speeds and the mean errors as text for a terminal.
    pub fn summary_text(&self) -> String {
        let mut text = String::from("  tokens per second: published, predicted, error\n");
        let width = |name: fn(&SpeedComparison) -> &str| {
            self.comparisons.iter().map(|speed| name(speed).len()).max().unwrap_or(0)
        };
        let (row_width, system_width) = (width(|speed| &speed.row), width(|speed| &speed.system));
        for pair in
            self.comparisons.chunk_by(|one, other| (&one.row, &one.system) == (&other.row, &other.system))
        {
            let _ = write!(text, "  {:row_width$}  {:system_width$}", pair[0].row, pair[0].system);
            for speed in pair {
                let what = if speed.phase == InferencePhase::Prefill { "prefill" } else { "decode" };
                let _ = write!(text, "  {what} {:>19}", speed.numbers());
            }
            text += if pair[0].is_fitted { "  (fitted)\n" } else { "\n" };
        }
        for excluded in self.excluded() {
            let _ = writeln!(text, "  {excluded}");
        }
        let _ = writeln!(text, "  {}", self.means());
        text
    }

    /// Returns a line for each excluded speed, with the reason for the exclusion.
    fn excluded(&self) -> impl Iterator<Item = String> {
        self.comparisons.iter().filter_map(|speed| {
            Some(format!("* {}, {}: {}", speed.row, speed.system, speed.exclusion_reason.as_ref()?))
        })
    }

    fn means(&self) -> String {
        let mean = |mean: Option<MeanRelativeError>| {
            mean.map_or("none".into(), |mean| {
                format!("{:.2} % over {} cells", mean.relative_error * 100.0, mean.cell_count)
            })
        };
        format!(
            "Mean error without fitted rows and the {} excluded numbers (*): prefill {}, decode {}.",
            self.excluded().count(),
            mean(self.prefill_error),
            mean(self.decode_error)
        )
    }

    /// Returns the tables and the mean errors as blocks of a report.
    pub fn to_blocks(&self) -> Vec<Block> {
        let mut blocks = Vec::new();
        for (phase, what) in
            [(InferencePhase::Prefill, "Reading the prompt"), (InferencePhase::Decode, "Generating")]
        {
            let speeds: Vec<&SpeedComparison> =
                self.comparisons.iter().filter(|speed| speed.phase == phase).collect();
            let systems = distinct_names(speeds.iter().map(|speed| speed.system.as_str()));
            let rows = speeds.chunk_by(|one, other| one.row == other.row).map(|row| {
                let fitted = if row[0].is_fitted { " (fitted)" } else { "" };
                let cell = |name: &&str| {
                    let found = row.iter().find(|speed| speed.system == **name);
                    Text::from_option(found.map(|speed| speed.numbers()))
                };
                let first = Text::from(format!("{}{fitted}", row[0].row));
                std::iter::once(first).chain(systems.iter().map(cell)).collect()
            });
            let caption = format!(
                "{what}, tokens per second: published, predicted, error. * excluded from the mean, see below."
            );
            let headings = std::iter::once("Row").chain(systems.iter().copied());
            blocks.push(Block::Table(Table::new(caption, headings, rows).with_only_text_columns()));
        }
        let notes = [self.means()].into_iter().chain(self.excluded());
        blocks.extend(notes.map(|note| Block::Paragraph(note.into())));
        blocks
    }
}

impl SpeedComparison {
    fn numbers(&self) -> String {
        let star = if self.exclusion_reason.is_some() { " *" } else { "" };
        let Some((predicted, error)) = self.predicted_tokens_per_s.zip(self.relative_error) else {
            return format!("{}, none{star}", self.published_tokens_per_s);
        };
        let digits = if predicted >= 100.0 { 0 } else { 2 - u32::from(predicted >= 10.0) };
        format!(
            "{}, {}, {:+.1} %{star}",
            self.published_tokens_per_s,
            numbers::format_decimal(predicted, digits),
            error * 100.0
        )
    }
}

#[cfg(test)]
mod tests {
    use hearth_profiles::document::Document;
    use hearth_schema::trace::Outcome;

    use super::super::results::SimulatedRun;
    use super::*;

    const DOCUMENT: &str = "\
schema: published/1
name: made-up
title: Two models
source: nobody
fitted: [a]
tolerance: 25 %
systems:
  - {name: small, gpu: {compute: {value: 1 TFLOP/s, source: made up}, bandwidth: {value: 10 GB/s, source: made up}}}
rows:
  - label: a
    roofline: {model: a.yaml, weights: q8, prompt: 100, generate: 10}
    cells: {small: {prefill: 200 /s, decode: 10 /s}}
  - label: b
    roofline: {model: b.yaml, weights: 8/4/4, prompt: 100, generate: 10}
    cells: {small: {prefill: 100 /s, decode: 20 /s}}
  - label: c
    roofline: {model: c.yaml, weights: 8/4/4, prompt: 100, generate: 10}
    cells: {small: {prefill: 50 /s, decode: 40 /s, left_out: {decode: It is a misprint.}}}
";

    fn ran(ttft_ms: f64, tpot_ms: f64) -> CellResult {
        SimulatedRun::fixture(Some(tpot_ms), Some(ttft_ms), Outcome::Ok)
    }

    #[test]
    fn means_leave_out_fitted_and_excluded_cells() {
        let published = PublishedResults::from_yaml(DOCUMENT).expect("a valid document");
        let results: CellResults =
            [((0, 0), ran(500.0, 100.0)), ((1, 0), ran(800.0, 40.0)), ((2, 0), ran(2500.0, 100.0))].into();
        let speeds = SpeedScores::from_results(&published, &results).expect("speeds");
        // b: 100 / 0.8 = 125 against 100, 1 / 0.04 = 25 against 20. c: 40 against 50; 10 against 40 is excluded.
        let close = |mean: Option<MeanRelativeError>, error: f64, cells: usize| {
            let mean = mean.expect("a mean");
            (mean.relative_error - error).abs() < 1e-12 && mean.cell_count == cells
        };
        assert!(close(speeds.prefill_error, 0.225, 2), "{:?}", speeds.prefill_error);
        assert!(close(speeds.decode_error, 0.25, 1), "{:?}", speeds.decode_error);
        let text = speeds.summary_text();
        assert!(text.contains("50, 40.0, -20.0 %") && text.contains("40, 10.0, -75.0 % *"), "{text}");
        assert!(text.contains("* c, small: It is a misprint.") && text.contains("(fitted)"), "{text}");
        let scores = super::super::scores::PublishedScores::from_results(&published, &results);
        assert!(scores.speed_scores.is_some());
        assert!(scores.tpot_comparisons.iter().any(|error| error.is_excluded));
        // The errors of the times per token are 0 and 40 / 50 - 1; one is excluded.
        let median = scores.median_tpot_error.expect("times");
        assert!((median - 0.1).abs() < 1e-12, "{median}");
    }

    #[test]
    fn inconsistent_rows_are_refused() {
        const RUN: &str = "roofline: {model: a.yaml, weights: q8, prompt: 100, generate: 10}";
        for (from, to, expected) in [
            ("prompt: 100", "prompt: 0", "0 prompt tokens and 10 generated tokens"),
            (RUN, "about: x", "unknown field `about`"),
            (RUN, "", "neither a `scenario`"),
            ("  - label: a\n", "  - label: a\n    scenario: a.yaml\n", "both a `scenario`"),
            ("weights: q8", "weights: q9", "unknown variant `q9`"),
            ("decode: 10 /s", "decode: 0 /s", "not positive"),
            ("decode: 10 /s", "decode: 10 /s, tpot: 1 s", "both a speed and a time"),
            ("prefill: 50 /s, decode: 40 /s", "prefill: 50 /s", "excludes a speed"),
            ("value: 10 GB/s", "value: 0 GB/s", "a rate of zero"),
            ("{name: small, gpu", "{name: small, planner: {strategy: single}, gpu", "both a `gpu`"),
            ("  - {name: small", "  - {name: other, planner: {strategy: single}}\n  - {name: small", ""),
        ] {
            let text = DOCUMENT.replacen(from, to, 1);
            assert_ne!(text, DOCUMENT);
            match PublishedResults::from_yaml(&text) {
                Ok(_) => assert!(expected.is_empty(), "{to} was accepted"),
                Err(error) => assert!(error.to_string().contains(expected), "{to}: {error}"),
            }
        }
        let planned = DOCUMENT
            .replace("  - {name: small", "  - {name: other, planner: {strategy: single}}\n  - {name: small");
        let wrong = planned.replacen("cells: {small:", "cells: {other:", 1);
        let error = PublishedResults::from_yaml(&wrong).expect_err("no GPU").to_string();
        assert!(error.contains("has no `gpu`"), "{error}");
    }
}
