//! Errors and rank agreement of predictions against measurements.
//!
//! - The error of a quantity: prediction / measurement - 1. For several runs it is the error with the median absolute
//!   value (the larger of two). Each run has its own prediction, made from its own profiles, so errors are not
//!   averaged: a prediction that is too high must not cancel one that is too low.
//! - A scenario whose measurements differ by more than 15 % ((largest - smallest) / median) has high variance, so no
//!   single value is correct. Its error is 0 for a prediction within the range of the measurements, and relative to
//!   the nearest measurement otherwise. Scenarios within their range are left out of the median error.
//! - The order: every pair of scenarios whose measured times differ by more than a margin should have the same order
//!   in the prediction.
//! - The terms of the time per token: (predicted - measured) / measured time per token.

use std::collections::BTreeSet;

use hearth_core::metrics::Terms;
use serde::Serialize;

use super::{FailedScenario, RunMetrics, RunPair, ValidationCase};

/// Spread, (largest - smallest) / median, above which repeated measurements have high variance.
pub const HIGH_VARIANCE_SPREAD: f64 = 0.15;
/// Relative difference of two measured times above which [`MIN_ORDERED_SHARE`] of the pairs should be in the right
/// order.
pub const RANK_MARGIN: f64 = 0.10;
/// Minimum share of pairs in the right order, for pairs that differ by more than [`RANK_MARGIN`].
pub const MIN_ORDERED_SHARE: f64 = 0.95;
/// Relative difference of two measured times above which all pairs should be in the right order.
pub const LARGE_RANK_MARGIN: f64 = 0.35;
/// Minimum number of bytes read per token that is compared; fewer bytes are reads of program files, not of weights.
/// source: assumed
pub const MIN_COMPARED_BYTES: f64 = 2e6;

/// The predicted and the measured value of a quantity of a scenario, and the error of the prediction.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct PredictionAccuracy {
    #[serde(rename = "predicted")]
    pub median_prediction: f64,
    #[serde(rename = "measured")]
    pub median_measurement: f64,
    /// The smallest and the largest measurement.
    #[serde(rename = "range")]
    pub measured_range: [f64; 2],
    #[serde(rename = "runs")]
    pub run_count: usize,
    /// The spread of the measurements: (largest - smallest) / median.
    #[serde(rename = "spread")]
    pub measured_spread: f64,
    /// Whether the spread exceeds [`HIGH_VARIANCE_SPREAD`].
    #[serde(rename = "high_variance")]
    pub has_high_variance: bool,
    /// Relative error of the prediction. With high variance, it is relative to the nearest end of `measured_range`.
    #[serde(rename = "error")]
    pub relative_error: f64,
}

impl PredictionAccuracy {
    /// Scores runs, each given as a prediction and a measurement. Returns `None` if there are no runs, a value is
    /// missing, or a measurement is not positive.
    pub fn from_runs(runs: &[(Option<f64>, Option<f64>)]) -> Option<PredictionAccuracy> {
        let (predictions, measurements): (Vec<_>, Vec<_>) = runs.iter().copied().unzip();
        let predicted = median(&sorted(&predictions)?)?;
        let values = sorted(&measurements)?;
        let range = [*values.first()?, *values.last()?];
        let measured = median(&values)?;
        if range[0] <= 0.0 {
            return None;
        }
        let spread = (range[1] - range[0]) / measured;
        let high_variance = spread > HIGH_VARIANCE_SPREAD;
        let error = if high_variance {
            predicted / predicted.clamp(range[0], range[1]) - 1.0
        } else {
            let errors = runs.iter().filter_map(|&(predicted, measured)| Some(predicted? / measured? - 1.0));
            let mut errors: Vec<f64> = errors.collect();
            errors.sort_by(|one, other| one.abs().total_cmp(&other.abs()));
            *errors.get(errors.len() / 2)?
        };
        Some(PredictionAccuracy {
            median_prediction: predicted,
            median_measurement: measured,
            measured_range: range,
            run_count: values.len(),
            measured_spread: spread,
            has_high_variance: high_variance,
            relative_error: error,
        })
    }
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct CaseScores {
    pub name: String,
    pub tpot: Option<PredictionAccuracy>,
    pub ttft: Option<PredictionAccuracy>,
    /// Accuracy of the predicted bytes read per token; `None` for fewer than [`MIN_COMPARED_BYTES`].
    #[serde(rename = "bytes_read")]
    pub bytes_read_per_token: Option<PredictionAccuracy>,
    pub terms: Vec<TermComparison>,
}

/// The error of a term of the time per token.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct TermComparison {
    pub name: &'static str,
    /// The mean of the predicted values of the term, in milliseconds.
    #[serde(rename = "predicted")]
    pub predicted_ms: f64,
    /// The mean of the measured values of the term, in milliseconds.
    #[serde(rename = "measured")]
    pub measured_ms: f64,
    /// Predicted minus measured term, divided by the measured time per token; positive if the prediction is too high.
    #[serde(rename = "error")]
    pub relative_error: f64,
}

/// The errors of one quantity over all scenarios.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct ErrorStatistics {
    /// Number of scenarios that have the quantity.
    #[serde(rename = "count")]
    pub scenario_count: usize,
    /// The median absolute error, without the scenarios with high variance and an error of 0.
    pub median: Option<f64>,
    /// The largest absolute error.
    pub max: Option<f64>,
    #[serde(rename = "high_variance")]
    pub high_variance_count: usize,
}

/// The agreement of the predicted order of scenarios with the measured order, over pairs of scenarios.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RankAgreement {
    /// Relative difference of the two measured times of a pair above which the pair counts.
    pub margin: f64,
    /// Number of pairs whose measured times differ by more than the margin.
    #[serde(rename = "pairs")]
    pub pair_count: usize,
    /// Number of these `pair_count` pairs that are predicted in the measured order.
    #[serde(rename = "right")]
    pub concordant_pair_count: usize,
    /// The pairs that are predicted in the wrong order; the scenario that was measured as faster is the first.
    #[serde(rename = "wrong")]
    pub discordant_pairs: Vec<[String; 2]>,
}

impl RankAgreement {
    /// Returns the share of pairs in the right order; `None` if there are no pairs.
    pub fn concordant_share(&self) -> Option<f64> {
        (self.pair_count > 0).then(|| self.concordant_pair_count as f64 / self.pair_count as f64)
    }
}

/// An acceptance criterion and its result.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Criterion {
    pub text: String,
    /// The value for this suite; `None` if no scenario has the quantity.
    pub value: Option<f64>,
    #[serde(rename = "met")]
    pub is_met: bool,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Scores {
    pub cases: Vec<CaseScores>,
    pub tpot: ErrorStatistics,
    pub ttft: ErrorStatistics,
    pub bytes_read: ErrorStatistics,
    /// Names of the terms of the time per token, and their mean absolute errors as shares of that time.
    #[serde(rename = "terms")]
    pub mean_term_errors: Vec<(&'static str, f64)>,
    /// The order of pairs that differ by more than [`RANK_MARGIN`], and by more than [`LARGE_RANK_MARGIN`].
    #[serde(rename = "order")]
    pub rank_agreements: [RankAgreement; 2],
    pub criteria: Vec<Criterion>,
}

impl Scores {
    pub fn from_cases(cases: &[ValidationCase]) -> Scores {
        let cases: Vec<CaseScores> = cases.iter().map(score_case).collect();
        let errors = |of: fn(&CaseScores) -> Option<PredictionAccuracy>| errors(cases.iter().filter_map(of));
        let (tpot, ttft) = (errors(|case| case.tpot), errors(|case| case.ttft));
        let bytes_read = errors(|case| case.bytes_read_per_token);
        let rank_agreements = [RANK_MARGIN, LARGE_RANK_MARGIN].map(|margin| rank_agreement(&cases, margin));
        let criteria = criteria(&tpot, &ttft, &bytes_read, &rank_agreements);
        let mean_term_errors = term_means(&cases);
        Scores { cases, tpot, ttft, bytes_read, mean_term_errors, rank_agreements, criteria }
    }
}

/// Scores each repetition separately: the first runs of all scenarios, then the second runs, and so on.
pub fn score_repetitions(cases: &[ValidationCase]) -> Vec<Scores> {
    let count = cases.iter().map(|case| case.run_pairs.len()).max().unwrap_or(0);
    let only = |case: &ValidationCase, repetition: usize| {
        let runs = vec![case.run_pairs.get(repetition)?.clone()];
        Some(ValidationCase { name: case.name.clone(), question: case.question.clone(), run_pairs: runs })
    };
    let score = |repetition| {
        Scores::from_cases(&cases.iter().filter_map(|case| only(case, repetition)).collect::<Vec<_>>())
    };
    (0..count).map(score).collect()
}

fn score_case(case: &ValidationCase) -> CaseScores {
    let score = |of: fn(&RunMetrics) -> Option<f64>| {
        let runs = case.run_pairs.iter().map(|run| (of(&run.predicted_metrics), of(&run.measured_metrics)));
        PredictionAccuracy::from_runs(&runs.collect::<Vec<_>>())
    };
    let tpot = score(|numbers| numbers.tpot_ms);
    // At least 1 byte, to avoid a division by zero.
    let bytes = score(|numbers| numbers.bytes_read_per_token.map(|read| read.max(1.0)));
    CaseScores {
        name: case.name.clone(),
        ttft: score(|numbers| numbers.ttft_ms),
        bytes_read_per_token: bytes
            .filter(|bytes| bytes.median_measurement.max(bytes.median_prediction) >= MIN_COMPARED_BYTES),
        terms: tpot.map_or(Vec::new(), |tpot| term_errors(case, tpot.median_measurement)),
        tpot,
    }
}

/// Returns names and values of the terms of the time per token and of the hidden disk time.
fn named_terms(terms: &Terms) -> Vec<(&'static str, f64)> {
    terms.named_terms().into_iter().chain([("hidden_disk", terms.hidden_disk)]).collect()
}

fn term_errors(case: &ValidationCase, tpot: f64) -> Vec<TermComparison> {
    let count = case.run_pairs.len().max(1) as f64;
    let mean = |of: fn(&RunPair) -> &RunMetrics| {
        let mut sums = named_terms(&Terms::default());
        for run in &case.run_pairs {
            let terms = named_terms(&of(run).terms);
            sums.iter_mut().zip(terms).for_each(|(sum, (_, term))| sum.1 += term / count);
        }
        sums
    };
    let (predicted, measured) = (mean(|run| &run.predicted_metrics), mean(|run| &run.measured_metrics));
    let term = |((name, predicted_ms), (_, measured_ms)): ((&'static str, f64), (&str, f64))| {
        let relative_error = (predicted_ms - measured_ms) / tpot;
        TermComparison { name, predicted_ms, measured_ms, relative_error }
    };
    predicted.into_iter().zip(measured).map(term).collect()
}

fn errors(scores: impl Iterator<Item = PredictionAccuracy>) -> ErrorStatistics {
    let scores: Vec<PredictionAccuracy> = scores.collect();
    let sizes = |which: fn(&&PredictionAccuracy) -> bool| {
        let mut sizes: Vec<f64> = scores.iter().filter(which).map(|one| one.relative_error.abs()).collect();
        sizes.sort_by(f64::total_cmp);
        sizes
    };
    ErrorStatistics {
        scenario_count: scores.len(),
        median: median(&sizes(|one| !one.has_high_variance || one.relative_error != 0.0)),
        max: sizes(|_| true).last().copied(),
        high_variance_count: scores.iter().filter(|one| one.has_high_variance).count(),
    }
}

/// Returns the values in ascending order; `None` if a value is missing or not finite.
fn sorted(values: &[Option<f64>]) -> Option<Vec<f64>> {
    let mut found: Vec<f64> = values.iter().copied().flatten().filter(|value| value.is_finite()).collect();
    found.sort_by(f64::total_cmp);
    (found.len() == values.len()).then_some(found)
}

pub(crate) fn median(sorted: &[f64]) -> Option<f64> {
    let middle = sorted.len().checked_sub(1)? / 2;
    Some(f64::midpoint(sorted[middle], sorted[sorted.len() / 2]))
}

/// Returns the name and the mean absolute error of each term of the time per token.
fn term_means(cases: &[CaseScores]) -> Vec<(&'static str, f64)> {
    let with: Vec<&CaseScores> = cases.iter().filter(|case| !case.terms.is_empty()).collect();
    let names = with.first().map_or(Vec::new(), |case| case.terms.iter().map(|term| term.name).collect());
    let mean = |(at, name): (usize, &'static str)| {
        let sum = with.iter().fold(0.0, |sum, case| sum + case.terms[at].relative_error.abs());
        (name, sum / with.len() as f64)
    };
    names.into_iter().enumerate().map(mean).collect()
}

fn rank_agreement(cases: &[CaseScores], margin: f64) -> RankAgreement {
    let timed: Vec<(&str, PredictionAccuracy)> =
        cases.iter().filter_map(|case| Some((case.name.as_str(), case.tpot?))).collect();
    let mut found =
        RankAgreement { margin, pair_count: 0, concordant_pair_count: 0, discordant_pairs: Vec::new() };
    for (index, &(name, one)) in timed.iter().enumerate() {
        for &(other_name, other) in &timed[index + 1..] {
            let ((fast, faster), (slow, slower)) = if one.median_measurement <= other.median_measurement {
                ((name, one), (other_name, other))
            } else {
                ((other_name, other), (name, one))
            };
            if slower.median_measurement <= faster.median_measurement * (1.0 + margin) {
                continue;
            }
            found.pair_count += 1;
            if faster.median_prediction < slower.median_prediction {
                found.concordant_pair_count += 1;
            } else {
                found.discordant_pairs.push([fast.to_owned(), slow.to_owned()]);
            }
        }
    }
    found
}

/// Returns the acceptance criterion that all metrics of every scenario are known. A scenario that fails, or is
/// predicted to fail, has no metrics.
pub(super) fn completeness_criterion(cases: &[ValidationCase], failed: &[FailedScenario]) -> Criterion {
    let names = cases.iter().map(|case| &case.name).chain(failed.iter().map(|failed| &failed.name));
    let all = names.collect::<BTreeSet<_>>().len();
    let without = failed.iter().map(|failed| &failed.name).collect::<BTreeSet<_>>().len();
    Criterion {
        text: "scenarios with all numbers: all".into(),
        value: (all > 0).then(|| (all - without) as f64 / all as f64),
        is_met: without == 0 && all > 0,
    }
}

fn criteria(
    tpot: &ErrorStatistics,
    ttft: &ErrorStatistics,
    bytes: &ErrorStatistics,
    order: &[RankAgreement; 2],
) -> Vec<Criterion> {
    let percent = |share: f64| format!("{:.0} %", share * 100.0);
    let limits = [
        ("median error of the time per token", tpot.median, 0.10),
        ("largest error of the time per token", tpot.max, 0.25),
        ("median error of the time to first token", ttft.median, 0.15),
        ("median error of the bytes read per token", bytes.median, 0.05),
    ];
    let at_most = |(what, value, max): (&str, Option<f64>, f64)| Criterion {
        text: format!("{what}: at most {}", percent(max)),
        value,
        is_met: value.is_some_and(|value| value <= max),
    };
    let mut criteria = limits.map(at_most).to_vec();
    // If no scenario reads enough bytes, none are compared.
    criteria[3].is_met |= bytes.scenario_count == 0;
    let [near, far] = order;
    let ordered = |order: &RankAgreement, min: f64| Criterion {
        text: format!(
            "pairs that differ by more than {}: at least {} in the right order",
            percent(order.margin),
            percent(min)
        ),
        value: order.concordant_share(),
        // If there are no such pairs, no order is wrong.
        is_met: order.concordant_share().is_none_or(|share| share >= min),
    };
    criteria.extend([ordered(near, MIN_ORDERED_SHARE), ordered(far, 1.0)]);
    criteria
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn high_variance_is_scored_against_the_range() {
        let score = |predicted: f64, measured: &[f64]| {
            let runs: Vec<_> = measured.iter().map(|&ms| (Some(predicted), Some(ms))).collect();
            PredictionAccuracy::from_runs(&runs).expect("numbers")
        };
        let steady = score(110.0, &[99.0, 104.0, 100.0]);
        assert!((steady.relative_error - 0.1).abs() < 1e-12);
        assert_eq!((steady.has_high_variance, steady.median_measurement), (false, 100.0));
        let within = score(150.0, &[100.0, 200.0, 180.0]);
        assert_eq!((within.has_high_variance, within.relative_error), (true, 0.0));
        assert_eq!(within.measured_range, [100.0, 200.0]);
        let beyond = score(50.0, &[100.0, 200.0]);
        assert_eq!((beyond.relative_error, beyond.median_measurement), (-0.5, 150.0));
        for nothing in
            [(None, Some(1.0)), (Some(1.0), None), (Some(f64::NAN), Some(1.0)), (Some(1.0), Some(0.0))]
        {
            assert_eq!(PredictionAccuracy::from_runs(&[nothing]), None);
        }
        assert_eq!(PredictionAccuracy::from_runs(&[]), None);
    }

    #[test]
    fn errors_of_opposite_sign_do_not_cancel() {
        let error = |runs: &[(f64, f64)]| {
            let runs: Vec<_> =
                runs.iter().map(|&(predicted, measured)| (Some(predicted), Some(measured))).collect();
            PredictionAccuracy::from_runs(&runs).expect("numbers").relative_error
        };
        // One prediction is too high and one too low: the medians nearly agree, although both predictions are wrong.
        assert!((error(&[(112.0, 100.0), (89.0, 100.0)]) - 0.12).abs() < 1e-12);
        assert!((error(&[(112.0, 100.0), (89.0, 100.0), (101.0, 100.0)]) + 0.11).abs() < 1e-12);
    }

    #[test]
    fn scenarios_within_their_range_do_not_lower_the_median() {
        let edges = [
            ValidationCase::fixture("a", 120.0, &[100.0]),
            ValidationCase::fixture("b", 150.0, &[100.0, 200.0]),
            ValidationCase::fixture("c", 150.0, &[100.0, 200.0]),
        ];
        let scores = Scores::from_cases(&edges);
        assert_eq!((scores.tpot.scenario_count, scores.tpot.high_variance_count), (3, 2));
        assert!(scores.tpot.median.is_some_and(|median| (median - 0.2).abs() < 1e-12));
        // A prediction outside the range counts.
        let beyond =
            Scores::from_cases(&[edges[0].clone(), ValidationCase::fixture("d", 300.0, &[100.0, 200.0])]);
        assert!(beyond.tpot.median.is_some_and(|median| (median - 0.35).abs() < 1e-12));
        let failed = FailedScenario { name: "a".into(), reason: "?".into() };
        assert!(completeness_criterion(&edges, &[]).is_met);
        assert_eq!(completeness_criterion(&edges, &[failed.clone(), failed]).value, Some(2.0 / 3.0));
    }

    #[test]
    fn bytes_on_one_side_only_are_an_error() {
        let mut unread = ValidationCase::fixture("a", 100.0, &[100.0]);
        let mut lost = unread.run_pairs[0].clone();
        lost.measured_metrics.bytes_read_per_token = None;
        unread.run_pairs[0].measured_metrics.bytes_read_per_token = Some(0.0);
        let error = |case: &ValidationCase| Scores::from_cases(std::slice::from_ref(case)).bytes_read.max;
        assert!(error(&unread).is_some_and(|worst| worst > 1.0));
        unread.run_pairs[0].predicted_metrics.bytes_read_per_token = Some(1e6);
        assert_eq!(error(&unread), None, "pages of the programs");
        unread.run_pairs[0] = lost;
        assert_eq!(error(&unread), None, "a lost trace has no bytes");
    }

    #[test]
    fn pairs_beyond_the_margin_have_an_order() {
        // b is only 5 % slower than a, so this pair does not count; c and d are predicted in the wrong order.
        let cases = [
            ValidationCase::fixture("a", 100.0, &[100.0]),
            ValidationCase::fixture("b", 90.0, &[105.0]),
            ValidationCase::fixture("c", 260.0, &[200.0]),
            ValidationCase::fixture("d", 240.0, &[230.0]),
        ];
        let scores = Scores::from_cases(&cases);
        let [near, far] = &scores.rank_agreements;
        assert_eq!((near.pair_count, near.concordant_pair_count), (5, 4));
        assert_eq!(near.discordant_pairs, [["c", "d"].map(String::from)]);
        assert_eq!((far.pair_count, far.concordant_pair_count), (4, 4));
        assert_eq!(scores.tpot.scenario_count, 4);
        let max = scores.tpot.max.expect("errors");
        assert!((max - 0.3).abs() < 1e-12);
        let met: Vec<bool> = scores.criteria.iter().map(|criterion| criterion.is_met).collect();
        // The median of 0, 4.3, 14.3 and 30 % is 9.3 %.
        assert_eq!(met, [true, false, true, false, false, true]);
    }

    #[test]
    fn each_repetition_has_its_own_scores() {
        let mut several = ValidationCase::fixture("a", 110.0, &[100.0, 110.0]);
        several.run_pairs[1].predicted_metrics = several.run_pairs[1].measured_metrics.clone();
        let repetitions = score_repetitions(&[several.clone(), ValidationCase::fixture("b", 50.0, &[50.0])]);
        let max: Vec<_> =
            repetitions.iter().map(|scores| scores.tpot.max.map(|worst| (worst * 1e3).round())).collect();
        assert_eq!(max, [Some(100.0), Some(0.0)]);
        assert_eq!(repetitions[1].cases.len(), 1, "b was run once");
        // The medians of predictions and measurements agree.
        let tpot = Scores::from_cases(&[several]).cases[0].tpot;
        assert_eq!(tpot.map(|tpot| tpot.median_prediction), Some(110.0));
        assert!(score_repetitions(&[]).is_empty());
    }

    #[test]
    fn term_errors_are_shares_of_the_measured_time() {
        let scores = Scores::from_cases(&[ValidationCase::fixture("a", 120.0, &[100.0, 100.0])]);
        let cpu = scores.cases[0].terms[0];
        assert_eq!((cpu.name, cpu.predicted_ms, cpu.measured_ms), ("cpu", 60.0, 50.0));
        assert!((cpu.relative_error - 0.1).abs() < 1e-12);
        assert_eq!(scores.mean_term_errors.len(), 8, "seven that sum, and hidden reading");
        assert!((scores.mean_term_errors[3].1 - 0.1).abs() < 1e-12);
    }

    #[test]
    fn without_cases_no_numeric_criterion_is_met() {
        let scores = Scores::from_cases(&[]);
        let met: Vec<bool> = scores.criteria.iter().map(|criterion| criterion.is_met).collect();
        assert_eq!(met, [false, false, false, true, true, true]);
        assert_eq!(scores.mean_term_errors, []);
    }
}
