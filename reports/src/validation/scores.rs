//! How near do predictions come to measurements?
//!
//! - The error of a number: a prediction over what was measured after it, less 1. Of several runs it is that of median
//!   size, the larger of two: each prediction was made before its measurement, from profiles of its own time, so that too
//!   much once and too little once do not even out.
//! - A scenario whose own repeats spread by more than 15 % (largest less smallest, over the median) stands on an edge:
//!   no single number is right. It is judged by interval: within the repeats there is no error, beyond them the error
//!   is to the nearest of them. One that lies within has no part in the median of all errors.
//! - The order: every pair of scenarios whose measured times differ by more than a margin must not stand the other
//!   way round in the prediction.
//! - The terms of a token's time: predicted less measured, as a share of the measured time per token.
//!
//! Not here: laying it out ([`super::page`]).

use std::collections::BTreeSet;

use hearth_core::metrics::Terms;
use serde::Serialize;

use super::{Case, Failed, Numbers, Run};

/// Repeats that spread by more than this have no single number.
pub const EDGE: f64 = 0.15;
/// The median of all errors may be this much.
pub const MEDIAN_BAR: f64 = 0.10;
/// No error may be more.
pub const WORST_BAR: f64 = 0.25;
/// The median error of the time to the first token may be this much.
pub const FIRST_TOKEN_BAR: f64 = 0.15;
/// The median error of the bytes read for a token may be this much.
pub const BYTES_BAR: f64 = 0.05;
/// Measured times that differ by more than this are to be ordered right, nearly always.
pub const APART: f64 = 0.10;
/// The share of them that has to be.
pub const ORDERED_BAR: f64 = 0.95;
/// Those that differ by more than this, always.
pub const FAR_APART: f64 = 0.35;
/// Where fewer bytes than this a token were both predicted and read they are pages of the programs, whose share has no
/// meaning.
/// source: assumed
pub const WORTH_COMPARING: f64 = 2e6;

/// A number of a scenario, predicted and measured.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Judged {
    /// The median of what was predicted.
    pub predicted: f64,
    /// The median of what was measured.
    pub measured: f64,
    /// The smallest and the largest of what was measured.
    pub range: [f64; 2],
    /// How many were measured.
    pub runs: usize,
    /// Largest less smallest, over the median.
    pub spread: f64,
    /// Whether the repeats spread too far for a single number.
    pub edge: bool,
    /// By how much the prediction is too large, as a share.
    pub error: f64,
}

impl Judged {
    /// Of runs, each with what was predicted and then measured; none without any, or where nothing was measured to
    /// divide by.
    pub fn of(runs: &[(Option<f64>, Option<f64>)]) -> Option<Judged> {
        let (predictions, measurements): (Vec<_>, Vec<_>) = runs.iter().copied().unzip();
        let predicted = median(&sorted(&predictions)?)?;
        let values = sorted(&measurements)?;
        let range = [*values.first()?, *values.last()?];
        let measured = median(&values)?;
        if range[0] <= 0.0 {
            return None;
        }
        let spread = (range[1] - range[0]) / measured;
        let edge = spread > EDGE;
        let error = if edge {
            predicted / predicted.clamp(range[0], range[1]) - 1.0
        } else {
            let error =
                |(predicted, measured): &(Option<f64>, Option<f64>)| Some((*predicted)? / (*measured)? - 1.0);
            let mut errors: Vec<f64> = runs.iter().filter_map(error).collect();
            errors.sort_by(|one, other| one.abs().total_cmp(&other.abs()));
            *errors.get(errors.len() / 2)?
        };
        Some(Judged { predicted, measured, range, runs: values.len(), spread, edge, error })
    }
}

/// Everything that is asked of one scenario.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Scored {
    /// Its name.
    pub name: String,
    /// Time per token, in milliseconds.
    pub tpot: Option<Judged>,
    /// Time to the first token, in milliseconds.
    pub ttft: Option<Judged>,
    /// Bytes read for a token.
    pub bytes_read: Option<Judged>,
    /// Each term: the means of what was predicted and measured, and the difference as a share of the time per token.
    pub terms: Vec<Term>,
}

/// A term of a token's time.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Term {
    /// Its name.
    pub name: &'static str,
    /// The mean of the predictions, in milliseconds.
    pub predicted: f64,
    /// The mean of what was measured.
    pub measured: f64,
    /// Predicted less measured, over the measured time per token.
    pub error: f64,
}

/// The errors of one quantity over all scenarios.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Errors {
    /// Scenarios that have it.
    pub count: usize,
    /// The median of the errors' sizes, without those that lie within an interval.
    pub median: Option<f64>,
    /// The largest of all.
    pub worst: Option<f64>,
    /// Scenarios judged by interval.
    pub edges: usize,
}

/// How many pairs of scenarios stand in the right order.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Order {
    /// By how much the measured times differ at least.
    pub apart: f64,
    /// Pairs that do.
    pub pairs: usize,
    /// Of these, pairs that the prediction orders as the measurement.
    pub right: usize,
    /// The others, as `faster, slower` by measurement.
    pub wrong: Vec<[String; 2]>,
}

impl Order {
    /// The share that is right; none without pairs.
    pub fn share(&self) -> Option<f64> {
        (self.pairs > 0).then(|| self.right as f64 / self.pairs as f64)
    }
}

/// Something that is demanded.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Bar {
    /// In words.
    pub text: String,
    /// What was found; none if there was nothing to look at.
    pub found: Option<f64>,
    /// Whether it is met.
    pub met: bool,
}

/// All scores of a suite.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Scores {
    /// By scenario.
    pub cases: Vec<Scored>,
    /// Times per token.
    pub tpot: Errors,
    /// Times to the first token.
    pub ttft: Errors,
    /// Bytes read.
    pub bytes_read: Errors,
    /// The mean size of each term's error, as a share of the time per token.
    pub terms: Vec<(&'static str, f64)>,
    /// Pairs that differ by more than [`APART`] and by more than [`FAR_APART`].
    pub order: [Order; 2],
    /// What is demanded.
    pub bars: Vec<Bar>,
}

impl Scores {
    /// Of measured scenarios.
    pub fn of(cases: &[Case]) -> Scores {
        let cases: Vec<Scored> = cases.iter().map(scored).collect();
        let errors = |of: fn(&Scored) -> Option<Judged>| errors(cases.iter().filter_map(of));
        let (tpot, ttft) = (errors(|case| case.tpot), errors(|case| case.ttft));
        let bytes_read = errors(|case| case.bytes_read);
        let order = [APART, FAR_APART].map(|apart| order(&cases, apart));
        let bars = bars(&tpot, &ttft, &bytes_read, &order);
        Scores { terms: terms(&cases), tpot, ttft, bytes_read, order, bars, cases }
    }
}

/// The scores of each time by itself: of all scenarios' first runs, of all second ones, and so on.
pub fn by_pass(cases: &[Case]) -> Vec<Scores> {
    let most = cases.iter().map(|case| case.runs.len()).max().unwrap_or(0);
    let only = |case: &Case, pass: usize| {
        let runs = vec![case.runs.get(pass)?.clone()];
        Some(Case { name: case.name.clone(), question: case.question.clone(), runs })
    };
    let pass = |pass| Scores::of(&cases.iter().filter_map(|case| only(case, pass)).collect::<Vec<_>>());
    (0..most).map(pass).collect()
}

fn scored(case: &Case) -> Scored {
    let judged = |of: fn(&Numbers) -> Option<f64>| {
        Judged::of(&case.runs.iter().map(|run| (of(&run.predicted), of(&run.measured))).collect::<Vec<_>>())
    };
    let tpot = judged(|numbers| numbers.tpot_ms);
    // A byte at least, so that there is something to divide by.
    let bytes = judged(|numbers| numbers.bytes_read.map(|read| read.max(1.0)));
    Scored {
        name: case.name.clone(),
        ttft: judged(|numbers| numbers.ttft_ms),
        bytes_read: bytes.filter(|bytes| bytes.measured.max(bytes.predicted) >= WORTH_COMPARING),
        terms: tpot.map_or(Vec::new(), |tpot| term_errors(case, tpot.measured)),
        tpot,
    }
}

/// The terms, hidden reading after those that sum.
fn rows(terms: &Terms) -> Vec<(&'static str, f64)> {
    terms.rows().into_iter().chain([("hidden_disk", terms.hidden_disk)]).collect()
}

fn term_errors(case: &Case, tpot: f64) -> Vec<Term> {
    let count = case.runs.len().max(1) as f64;
    let mean = |of: fn(&Run) -> &Numbers| {
        let mut sums = rows(&Terms::default());
        for run in &case.runs {
            sums.iter_mut().zip(rows(&of(run).terms)).for_each(|(sum, (_, term))| sum.1 += term / count);
        }
        sums
    };
    let (predicted, measured) = (mean(|run| &run.predicted), mean(|run| &run.measured));
    let term = |((name, predicted), (_, measured)): ((&'static str, f64), (&str, f64))| Term {
        name,
        predicted,
        measured,
        error: (predicted - measured) / tpot,
    };
    predicted.into_iter().zip(measured).map(term).collect()
}

fn errors(judged: impl Iterator<Item = Judged>) -> Errors {
    let judged: Vec<Judged> = judged.collect();
    let sizes = |which: fn(&&Judged) -> bool| {
        let mut sizes: Vec<f64> = judged.iter().filter(which).map(|one| one.error.abs()).collect();
        sizes.sort_by(f64::total_cmp);
        sizes
    };
    Errors {
        count: judged.len(),
        median: median(&sizes(|one| !one.edge || one.error != 0.0)),
        worst: sizes(|_| true).last().copied(),
        edges: judged.iter().filter(|one| one.edge).count(),
    }
}

/// All of these, if each is a number.
fn sorted(values: &[Option<f64>]) -> Option<Vec<f64>> {
    let mut found: Vec<f64> = values.iter().copied().flatten().filter(|value| value.is_finite()).collect();
    found.sort_by(f64::total_cmp);
    (found.len() == values.len()).then_some(found)
}

/// Of sorted values.
fn median(sorted: &[f64]) -> Option<f64> {
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => None,
        count if count % 2 == 1 => Some(sorted[middle]),
        _ => Some(f64::midpoint(sorted[middle - 1], sorted[middle])),
    }
}

fn terms(cases: &[Scored]) -> Vec<(&'static str, f64)> {
    let with: Vec<&Scored> = cases.iter().filter(|case| !case.terms.is_empty()).collect();
    let names = with.first().map_or(Vec::new(), |case| case.terms.iter().map(|term| term.name).collect());
    let mean = |(at, name): (usize, &'static str)| {
        let sum = with.iter().fold(0.0, |sum, case| sum + case.terms[at].error.abs());
        (name, sum / with.len() as f64)
    };
    names.into_iter().enumerate().map(mean).collect()
}

fn order(cases: &[Scored], apart: f64) -> Order {
    let timed: Vec<(&str, Judged)> =
        cases.iter().filter_map(|case| Some((case.name.as_str(), case.tpot?))).collect();
    let mut found = Order { apart, pairs: 0, right: 0, wrong: Vec::new() };
    for (index, &(name, one)) in timed.iter().enumerate() {
        for &(other_name, other) in &timed[index + 1..] {
            let ((fast, faster), (slow, slower)) = if one.measured <= other.measured {
                ((name, one), (other_name, other))
            } else {
                ((other_name, other), (name, one))
            };
            if slower.measured <= faster.measured * (1.0 + apart) {
                continue;
            }
            found.pairs += 1;
            if faster.predicted < slower.predicted {
                found.right += 1;
            } else {
                found.wrong.push([fast.to_owned(), slow.to_owned()]);
            }
        }
    }
    found
}

/// Whether every scenario has all its numbers: one that was predicted to end badly, or did, tells of no time.
pub(super) fn complete(cases: &[Case], failed: &[Failed]) -> Bar {
    let names = cases.iter().map(|case| &case.name).chain(failed.iter().map(|failed| &failed.name));
    let all = names.collect::<BTreeSet<_>>().len();
    let without = failed.iter().map(|failed| &failed.name).collect::<BTreeSet<_>>().len();
    Bar {
        text: "scenarios that have all their numbers: all".into(),
        found: (all > 0).then(|| (all - without) as f64 / all as f64),
        met: without == 0 && all > 0,
    }
}

fn bars(tpot: &Errors, ttft: &Errors, bytes: &Errors, order: &[Order; 2]) -> Vec<Bar> {
    let percent = |share: f64| format!("{:.0} %", share * 100.0);
    let at_most = |text: String, found: Option<f64>, bar: f64| Bar {
        text,
        found,
        met: found.is_some_and(|found| found <= bar),
    };
    let [near, far] = order;
    let ordered = |order: &Order, bar: f64| Bar {
        text: format!(
            "pairs that differ by more than {}: at least {} ordered right",
            percent(order.apart),
            percent(bar)
        ),
        found: order.share(),
        // Without such a pair nothing is out of order.
        met: order.share().is_none_or(|share| share >= bar),
    };
    vec![
        at_most(
            format!("median error of the time per token: at most {}", percent(MEDIAN_BAR)),
            tpot.median,
            MEDIAN_BAR,
        ),
        at_most(
            format!("largest error of the time per token: at most {}", percent(WORST_BAR)),
            tpot.worst,
            WORST_BAR,
        ),
        at_most(
            format!("median error of the time to the first token: at most {}", percent(FIRST_TOKEN_BAR)),
            ttft.median,
            FIRST_TOKEN_BAR,
        ),
        Bar {
            // Where nothing streams, no bytes are compared.
            met: bytes.count == 0 || bytes.median.is_some_and(|median| median <= BYTES_BAR),
            ..at_most(
                format!("median error of the bytes read for a token: at most {}", percent(BYTES_BAR)),
                bytes.median,
                BYTES_BAR,
            )
        },
        ordered(near, ORDERED_BAR),
        ordered(far, 1.0),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn case(name: &str, predicted: f64, measured: &[f64]) -> Case {
        let numbers = |ms: f64| Numbers {
            tpot_ms: Some(ms),
            ttft_ms: Some(2.0 * ms),
            bytes_read: Some(ms * 1e6),
            terms: Terms { cpu: 0.5 * ms, demand_disk: 0.5 * ms, ..Terms::default() },
        };
        let run = |&ms: &f64| Run {
            prediction: String::new(),
            predicted: numbers(predicted),
            measured: numbers(ms),
            steady: true,
            started_over: 0,
        };
        Case { name: name.into(), question: String::new(), runs: measured.iter().map(run).collect() }
    }

    #[test]
    fn an_error_is_against_the_median_or_on_an_edge_against_the_interval() {
        let judged = |predicted: f64, measured: &[f64]| {
            let runs: Vec<_> = measured.iter().map(|&ms| (Some(predicted), Some(ms))).collect();
            Judged::of(&runs).expect("numbers")
        };
        let calm = judged(110.0, &[99.0, 104.0, 100.0]);
        assert!((calm.error - 0.1).abs() < 1e-12 && !calm.edge && calm.measured == 100.0);
        let within = judged(150.0, &[100.0, 200.0, 180.0]);
        assert!(within.edge && within.error == 0.0 && within.range == [100.0, 200.0]);
        let beyond = judged(50.0, &[100.0, 200.0]);
        assert_eq!((beyond.error, beyond.measured), (-0.5, 150.0));
        for nothing in
            [(None, Some(1.0)), (Some(1.0), None), (Some(f64::NAN), Some(1.0)), (Some(1.0), Some(0.0))]
        {
            assert_eq!(Judged::of(&[nothing]), None);
        }
        assert_eq!(Judged::of(&[]), None);
    }

    #[test]
    fn errors_of_different_runs_do_not_even_out() {
        let error = |runs: &[(f64, f64)]| {
            let runs: Vec<_> =
                runs.iter().map(|&(predicted, measured)| (Some(predicted), Some(measured))).collect();
            Judged::of(&runs).expect("numbers").error
        };
        // Too much once and too little once: the medians of both sides nearly agree, and every prediction was off.
        assert!((error(&[(112.0, 100.0), (89.0, 100.0)]) - 0.12).abs() < 1e-12);
        assert!((error(&[(112.0, 100.0), (89.0, 100.0), (101.0, 100.0)]) + 0.11).abs() < 1e-12);
    }

    #[test]
    fn what_is_judged_by_interval_makes_no_median_smaller() {
        let edges = [
            case("a", 120.0, &[100.0]),
            case("b", 150.0, &[100.0, 200.0]),
            case("c", 150.0, &[100.0, 200.0]),
        ];
        let scores = Scores::of(&edges);
        assert_eq!((scores.tpot.count, scores.tpot.edges), (3, 2));
        assert!(scores.tpot.median.is_some_and(|median| (median - 0.2).abs() < 1e-12));
        // One that lies beyond its interval counts.
        let beyond = Scores::of(&[edges[0].clone(), case("d", 300.0, &[100.0, 200.0])]);
        assert!(beyond.tpot.median.is_some_and(|median| (median - 0.35).abs() < 1e-12));
        let failed = Failed { name: "a".into(), why: "?".into() };
        assert_eq!(
            (complete(&edges, &[]).met, complete(&edges, &[failed.clone(), failed]).found),
            (true, Some(2.0 / 3.0))
        );
    }

    #[test]
    fn bytes_that_only_one_side_has_are_an_error() {
        let mut unread = case("a", 100.0, &[100.0]);
        let mut lost = unread.runs[0].clone();
        lost.measured.bytes_read = None;
        unread.runs[0].measured.bytes_read = Some(0.0);
        let error = |case: &Case| Scores::of(std::slice::from_ref(case)).bytes_read.worst;
        assert!(error(&unread).is_some_and(|worst| worst > 1.0));
        unread.runs[0].predicted.bytes_read = Some(1e6);
        assert_eq!(error(&unread), None, "pages of the programs");
        unread.runs[0] = lost;
        assert_eq!(error(&unread), None, "nobody knows what was read");
    }

    #[test]
    fn pairs_far_enough_apart_have_an_order() {
        // b is 5 % slower than a, which is no pair; c and d stand the other way round in the prediction.
        let cases = [
            case("a", 100.0, &[100.0]),
            case("b", 90.0, &[105.0]),
            case("c", 260.0, &[200.0]),
            case("d", 240.0, &[230.0]),
        ];
        let scores = Scores::of(&cases);
        let [near, far] = &scores.order;
        assert_eq!((near.pairs, near.right, near.wrong.as_slice()), (5, 4, &[["c".into(), "d".into()]][..]));
        assert_eq!((far.pairs, far.right), (4, 4));
        assert_eq!(scores.tpot.count, 4);
        let worst = scores.tpot.worst.expect("errors");
        assert!((worst - 0.3).abs() < 1e-12);
        let met: Vec<bool> = scores.bars.iter().map(|bar| bar.met).collect();
        // The median of 0, 4.3, 14.3 and 30 % is 9.3 %.
        assert_eq!(met, [true, false, true, false, false, true]);
    }

    #[test]
    fn each_pass_has_scores_of_its_own() {
        let mut several = case("a", 110.0, &[100.0, 110.0]);
        several.runs[1].predicted = several.runs[1].measured.clone();
        let passes = by_pass(&[several.clone(), case("b", 50.0, &[50.0])]);
        let worst: Vec<_> =
            passes.iter().map(|scores| scores.tpot.worst.map(|worst| (worst * 1e3).round())).collect();
        assert_eq!(worst, [Some(100.0), Some(0.0)]);
        assert_eq!(passes[1].cases.len(), 1, "b was run once");
        // Both are off by as much in the median, so that the medians agree.
        assert_eq!(Scores::of(&[several]).cases[0].tpot.map(|tpot| tpot.predicted), Some(110.0));
        assert!(by_pass(&[]).is_empty());
    }

    #[test]
    fn terms_are_shares_of_the_measured_time() {
        let scores = Scores::of(&[case("a", 120.0, &[100.0, 100.0])]);
        let cpu = scores.cases[0].terms[0];
        assert_eq!((cpu.name, cpu.predicted, cpu.measured), ("cpu", 60.0, 50.0));
        assert!((cpu.error - 0.1).abs() < 1e-12);
        assert_eq!(scores.terms.len(), 8, "seven that sum, and hidden reading");
        assert!((scores.terms[3].1 - 0.1).abs() < 1e-12);
    }

    #[test]
    fn without_anything_no_bar_is_met_that_needs_a_number() {
        let scores = Scores::of(&[]);
        let met: Vec<bool> = scores.bars.iter().map(|bar| bar.met).collect();
        assert_eq!(met, [false, false, false, true, true, true]);
        assert_eq!(scores.terms, []);
    }
}
