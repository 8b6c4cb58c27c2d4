//! Scores of the agreement between simulated and published numbers.
//!
//! - The error of a time: simulated / published - 1; and the median of the absolute errors over the cells that have a
//!   published time and did not run out of memory.
//! - The order of the systems in a row: pairs whose published times differ by more than a fifth should have the same
//!   order in the simulation. A run that ran out of memory counts as slower than any other run.
//! - The order of the rows in a column: Spearman's rank correlation of published and simulated times.
//! - Outcomes: whether the same runs ran out of memory.
//! - Memory pressure: the median of the absolute differences of published and simulated shares of memory.
//! - Claims: whether a ratio is within the range that agrees with the text.
//! - Speeds, where they were published instead of times ([`super::speeds`]).

use hearth_profiles::Fraction;
use hearth_schema::trace::Outcome;
use serde::Serialize;

use super::results::CellResults;
use super::speeds::{InferencePhase, SpeedScores};
use super::{Claim, ClaimQuantity, PublishedResults, ResultCell, ResultRow, System};

/// Ratio of two published times up to which the order of the two systems is not compared.
const TIE_RATIO: f64 = 1.2;

/// Relative difference below which two simulated quantities count as equal. source: assumed, below all effects
const EQUAL_WITHIN: f64 = 1e-3;

/// A published time, the simulated time, and the error of the simulated time relative to the published time.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TimeComparison {
    pub row: String,
    pub system: String,
    pub published_ms: f64,
    /// The simulated time; `None` if the cell could not be simulated or the run did not complete.
    pub simulated_ms: Option<f64>,
    #[serde(rename = "error")]
    pub relative_error: Option<f64>,
    pub tolerance: f64,
    /// Whether parameters of the device profiles were fitted to the published times of this row.
    #[serde(rename = "fitted")]
    pub is_fitted: bool,
    /// Whether the simulated time is within the tolerance. With a tolerance of 0.5 or more, the ratio of the
    /// two times may be up to 1 + tolerance in either direction.
    #[serde(rename = "within")]
    pub is_within_tolerance: bool,
    /// Whether the document excludes this time from the medians.
    #[serde(rename = "excluded", skip_serializing_if = "std::ops::Not::not")]
    pub is_excluded: bool,
}

fn is_within(error: Option<f64>, tolerance: f64) -> bool {
    error.is_some_and(|error| {
        let factor = (1.0 + error).max(1.0 / (1.0 + error));
        if tolerance >= 0.5 { factor <= 1.0 + tolerance } else { error.abs() <= tolerance }
    })
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PublishedScores {
    #[serde(rename = "tpot")]
    pub tpot_comparisons: Vec<TimeComparison>,
    #[serde(rename = "ttft")]
    pub ttft_comparisons: Vec<TimeComparison>,
    /// Median absolute error of the times per token.
    #[serde(rename = "median_tpot")]
    pub median_tpot_error: Option<f64>,
    /// Median absolute error of the times to the first token.
    #[serde(rename = "median_ttft")]
    pub median_ttft_error: Option<f64>,
    /// Median absolute error of the times per token of the rows to which no parameters were fitted.
    #[serde(rename = "median_tpot_held_out")]
    pub median_held_out_tpot_error: Option<f64>,
    /// Pairs of systems in the wrong order in the simulation, as `row: faster, slower`, with the published order.
    #[serde(rename = "misordered")]
    pub misordered_pairs: Vec<String>,
    /// Rank correlation of published and simulated times for each system with at least three rows.
    #[serde(rename = "rank_correlation")]
    pub rank_correlations: Vec<(String, f64)>,
    /// Cells whose outcome differs from the published outcome.
    pub outcome_mismatches: Vec<String>,
    /// Median absolute difference of the memory pressures, as a share of the memory of a device.
    pub median_pressure_difference: Option<f64>,
    pub claims: Vec<ClaimResult>,
    /// Published and predicted speeds of the rows with a run on one GPU (`roofline` in the `published/1` document).
    #[serde(rename = "speeds", skip_serializing_if = "Option::is_none")]
    pub speed_scores: Option<SpeedScores>,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ClaimResult {
    pub text: String,
    /// The minimum and the maximum ratio that agree with the text of the claim.
    #[serde(rename = "range")]
    pub ratio_range: [f64; 2],
    /// The simulated ratio; `None` if one of the runs did not complete.
    #[serde(rename = "ratio")]
    pub simulated_ratio: Option<f64>,
    pub holds: bool,
    /// Whether the two simulated quantities are equal, so that the claim says nothing about their order.
    pub is_tie: bool,
}

impl PublishedScores {
    pub fn from_results(published: &PublishedResults, results: &CellResults) -> Self {
        let [tpot, ttft] =
            [InferencePhase::Decode, InferencePhase::Prefill].map(|phase| errors(published, results, phase));
        Self {
            median_tpot_error: median(tpot.iter()),
            median_ttft_error: median(ttft.iter()),
            median_held_out_tpot_error: median(tpot.iter().filter(|error| !error.is_fitted)),
            misordered_pairs: misordered(published, results),
            rank_correlations: rank_correlation(published, &tpot),
            outcome_mismatches: outcome_mismatches(published, results),
            median_pressure_difference: median_pressure_difference(published, results),
            claims: published.claims.iter().map(|claim| score_claim(published, results, claim)).collect(),
            speed_scores: SpeedScores::from_results(published, results),
            tpot_comparisons: tpot,
            ttft_comparisons: ttft,
        }
    }
}

fn errors(published: &PublishedResults, results: &CellResults, phase: InferencePhase) -> Vec<TimeComparison> {
    let error_of = |(index, row, system, cell): ((usize, usize), &ResultRow, &System, &ResultCell)| {
        let (time, quantity, reason) = match phase {
            InferencePhase::Decode => (row.tpot(cell), ClaimQuantity::Tpot, &cell.exclusion_reasons.decode),
            InferencePhase::Prefill => (row.ttft(cell), ClaimQuantity::Ttft, &cell.exclusion_reasons.prefill),
        };
        let published_ms = time?.0 * 1e3;
        let simulated_ms = results.get(&index).and_then(|result| result.claim_quantity(quantity));
        let error = simulated_ms.map(|simulated| simulated / published_ms - 1.0);
        let tolerance = cell.tolerance.unwrap_or(published.tolerance).0;
        Some(TimeComparison {
            row: row.label.clone(),
            system: system.name.clone(),
            published_ms,
            simulated_ms,
            relative_error: error,
            tolerance,
            is_fitted: published.fitted_rows.contains(&row.label),
            is_within_tolerance: is_within(error, tolerance),
            is_excluded: reason.is_some(),
        })
    };
    published.cells().filter_map(error_of).collect()
}

/// Returns the median absolute error of the times that are not excluded.
fn median<'e>(errors: impl Iterator<Item = &'e TimeComparison>) -> Option<f64> {
    let counted = errors.filter(|error| !error.is_excluded);
    let mut sizes: Vec<f64> = counted.filter_map(|error| Some(error.relative_error?.abs())).collect();
    sizes.sort_by(f64::total_cmp);
    crate::validation::scores::median(&sizes)
}

/// Returns the published time per token of a cell in milliseconds; infinite if the run did not complete.
fn published_time(row: &ResultRow, cell: &ResultCell) -> Option<f64> {
    match cell.outcome {
        Some(Outcome::OutOfMemory | Outcome::Killed) => Some(f64::INFINITY),
        _ => row.tpot(cell).map(|time| time.0 * 1e3),
    }
}

fn misordered(published: &PublishedResults, results: &CellResults) -> Vec<String> {
    // The row, the system, its published time and its simulated time.
    let times = |(index, row, system, cell): ((usize, usize), &ResultRow, &System, &ResultCell)| {
        let result = results.get(&index);
        let simulated = result.and_then(|result| result.claim_quantity(ClaimQuantity::Tpot));
        let simulated = simulated.unwrap_or(f64::INFINITY);
        Some((row.label.clone(), system.name.clone(), published_time(row, cell)?, simulated))
    };
    let cells: Vec<(String, String, f64, f64)> = published.cells().filter_map(times).collect();
    let mut wrong = Vec::new();
    for (index, one) in cells.iter().enumerate() {
        for other in cells[index + 1..].iter().filter(|other| other.0 == one.0) {
            let (faster, slower) = if one.2 <= other.2 { (one, other) } else { (other, one) };
            if slower.2 > TIE_RATIO * faster.2 && faster.3 > slower.3 {
                wrong.push(format!("{}: {}, {}", one.0, faster.1, slower.1));
            }
        }
    }
    wrong
}

fn rank_correlation(published: &PublishedResults, errors: &[TimeComparison]) -> Vec<(String, f64)> {
    let correlation = |name: &str| {
        let column = errors.iter().filter(|error| error.system == name);
        let column: Vec<(f64, f64)> =
            column.filter_map(|error| Some((error.published_ms, error.simulated_ms?))).collect();
        if column.len() < 3 { None } else { spearman(&column) }
    };
    let systems = published.systems.iter();
    systems.filter_map(|system| Some((system.name.clone(), correlation(&system.name)?))).collect()
}

/// Returns Spearman's rank correlation: Pearson's correlation of the ranks, where equal values have the mean of their
/// ranks. `None` if all first values or all second values are equal.
fn spearman(pairs: &[(f64, f64)]) -> Option<f64> {
    let ranks = |values: Vec<f64>| -> Vec<f64> {
        let rank = |value: &f64| {
            let below = values.iter().filter(|other| *other < value).count();
            let equal = values.iter().filter(|other| *other == value).count();
            below as f64 + f64::midpoint(equal as f64, 1.0)
        };
        values.iter().map(rank).collect()
    };
    let (left, right) = pairs.iter().copied().unzip();
    let (left, right) = (ranks(left), ranks(right));
    let mean = f64::midpoint(pairs.len() as f64, 1.0);
    let product =
        |a: &[f64], b: &[f64]| -> f64 { a.iter().zip(b).map(|(x, y)| (x - mean) * (y - mean)).sum() };
    let scale = (product(&left, &left) * product(&right, &right)).sqrt();
    (scale > 0.0).then(|| product(&left, &right) / scale)
}

fn outcome_mismatches(published: &PublishedResults, results: &CellResults) -> Vec<String> {
    let differs = |(index, _, _, cell): &((usize, usize), &ResultRow, &System, &ResultCell)| {
        let run = results.get(index).and_then(|result| result.simulated_run());
        run.map(|run| run.outcome) != Some(cell.outcome.unwrap_or(Outcome::Ok))
    };
    let different = published.cells().filter(differs);
    different.map(|(_, row, system, _)| format!("{}, {}", row.label, system.name)).collect()
}

/// Returns the simulated memory pressure of a device in a cell. A device that the plan does not use has no weights.
pub(super) fn simulated_pressure(results: &CellResults, index: (usize, usize), device: &str) -> Option<f64> {
    let run = results.get(&index)?.simulated_run()?;
    Some(run.memory_pressure.get(device).copied().unwrap_or(0.0))
}

fn median_pressure_difference(published: &PublishedResults, results: &CellResults) -> Option<f64> {
    let of_cell = |(index, _, _, cell): ((usize, usize), _, _, &ResultCell)| {
        let difference = |(device, share): (&String, &Fraction)| {
            Some((simulated_pressure(results, index, device)? - share.0).abs())
        };
        cell.memory_pressure.iter().filter_map(difference).collect::<Vec<f64>>()
    };
    let mut differences: Vec<f64> = published.cells().flat_map(of_cell).collect();
    differences.sort_by(f64::total_cmp);
    crate::validation::scores::median(&differences)
}

fn score_claim(published: &PublishedResults, results: &CellResults, claim: &Claim) -> ClaimResult {
    let time = |cell| {
        published.cell_index(cell).and_then(|index| results.get(&index)?.claim_quantity(claim.quantity))
    };
    let ratio = time(&claim.numerator_cell)
        .zip(time(&claim.denominator_cell))
        .map(|(of, over)| of / over)
        .filter(|ratio| ratio.is_finite());
    let range = [claim.min_ratio, claim.max_ratio];
    let holds = ratio.is_some_and(|ratio| (claim.min_ratio..=claim.max_ratio).contains(&ratio));
    let is_tie = ratio.is_some_and(|ratio| (ratio - 1.0).abs() < EQUAL_WITHIN);
    ClaimResult { text: claim.text.clone(), ratio_range: range, simulated_ratio: ratio, holds, is_tie }
}

#[cfg(test)]
mod tests {
    use hearth_profiles::document::Document;

    use super::super::results::SimulatedRun;
    use super::*;

    const DOCUMENT: &str = "\
schema: published/1
name: made-up
title: Three rows
source: nobody
fitted: [a]
tolerance: 25 %
systems:
  - {name: one, planner: {strategy: single}}
  - {name: two, planner: {strategy: mem}}
rows:
  - {label: a, scenario: a.yaml, cells: {one: {tpot: 100 ms}, two: {tpot: 200 ms}}}
  - {label: b, scenario: b.yaml, cells: {one: {tpot: 200 ms}, two: {tpot: 230 ms}}}
  - {label: c, scenario: c.yaml, cells: {one: {tpot: 400 ms, tolerance: 100 %}, two: {outcome: out_of_memory}}}
claims:
  - {text: c is slow, of: [c, one], over: [a, one], from: 1.5, to: 2.5}
";

    #[test]
    fn errors_order_ranks_outcomes_and_claims() {
        let published = PublishedResults::from_yaml(DOCUMENT).expect("a valid document");
        let times = [(0, 0, 110.0), (0, 1, 105.0), (1, 0, 300.0), (1, 1, 240.0), (2, 0, 210.0), (2, 1, 1.0)];
        let mut results: CellResults = times
            .map(|(row, column, time)| ((row, column), SimulatedRun::fixture(Some(time), None, Outcome::Ok)))
            .into();
        results.insert((2, 1), SimulatedRun::fixture(Some(0.0), None, Outcome::OutOfMemory));
        let scores = PublishedScores::from_results(&published, &results);
        let errors = scores.tpot_comparisons.iter().filter_map(|error| error.relative_error);
        let off: Vec<i64> = errors.map(|off| (off * 1000.0).round() as i64).collect();
        // 110/100, 105/200, 300/200, 240/230, 210/400.
        assert_eq!(off, [100, -475, 500, 43, -475]);
        let within: Vec<bool> =
            scores.tpot_comparisons.iter().map(|error| error.is_within_tolerance).collect();
        // 400 / 210 = 1.9, which a tolerance of 100 % allows.
        assert_eq!(within, [true, false, false, true, true]);
        assert_eq!(scores.median_tpot_error, Some(0.475));
        let held_out = scores.median_held_out_tpot_error.expect("rows");
        assert!((held_out - 0.475).abs() < 1e-12, "0.043, 0.475, 0.5");
        // Row a: two is faster in the simulation only. Row b: the published times are too close. Row c: two runs out
        // of memory, as published.
        assert_eq!(scores.misordered_pairs, ["a: one, two"]);
        // Published 1, 2, 3; simulated 1, 3, 2: 1 - 6 (0 + 1 + 1) / (3 (9 - 1)).
        assert_eq!(scores.rank_correlations, [("one".to_owned(), 0.5)]);
        assert!(scores.outcome_mismatches.is_empty());
        let [claim] = &scores.claims[..] else { panic!("one claim") };
        assert!(claim.holds && (claim.simulated_ratio.expect("a ratio") - 210.0 / 110.0).abs() < 1e-12);
    }

    #[test]
    fn inconsistent_documents_are_refused() {
        for (from, to, expected) in [
            ("name: made-up", "name: ../up", "letters, digits"),
            ("{name: two, planner: {strategy: mem}}", "{name: one, planner: {strategy: mem}}", "two systems"),
            ("label: b", "label: a", "two rows"),
            ("cells: {one: {tpot: 100 ms}", "cells: {three: {tpot: 100 ms}", "not in `systems`"),
            ("tpot: 100 ms", "tpot: 0 ms", "not positive"),
            ("fitted: [a]", "fitted: [z]", "not the label of a row"),
            ("over: [a, one]", "over: [a, six]", "use the label of a row"),
            ("from: 1.5", "from: .nan", "0 < `from` <= `to`"),
        ] {
            let text = DOCUMENT.replacen(from, to, 1);
            assert_ne!(text, DOCUMENT);
            let error = PublishedResults::from_yaml(&text).expect_err(to).to_string();
            assert!(error.contains(expected), "{to}: {error}");
        }
    }
}
