//! Charts of the time per token over the number of rounds and over the model size, from the runs of a report.
//!
//! A line over the number of rounds k joins the runs with the same origin (simulated or measured) and the same model. A
//! line over the model size joins the runs with the same origin and the same number of rounds; the model size is the
//! size of the weights. A trace has only the name of the model, so the size is taken from the shipped model with this
//! name, and runs of other models are left out.
//!
//! Not here: charts of a sweep, which the command line adds ([`crate::charts::lines`]).

use std::collections::{BTreeMap, BTreeSet};

use hearth_profiles::model::shipped_profile;
use hearth_schema::Trace;
use hearth_schema::trace::StepKind;

use crate::charts::lines::{AxisPosition, LineChart, Series};
use crate::comparison::{Run, origin_word};
use crate::text::numbers;

/// Charts the time per token over the number of rounds per token; `None` unless a line has two points.
pub fn tpot_by_rounds(runs: &[(&Run, &Trace)]) -> Option<LineChart> {
    let points = runs.iter().filter_map(|(run, trace)| {
        let case = (origin_word(run.origin), run.model.clone());
        Some((case, u64::from(rounds_of(trace)?), run.metrics.tpot_ms?.mean_ms))
    });
    lines(points, "Time per token over k", "rounds of the ring for a token, k", |k| k.to_string())
}

/// Charts the time per token over the size of the model; `None` unless a line has two points.
pub fn tpot_by_model_size(runs: &[(&Run, &Trace)]) -> Option<LineChart> {
    let points = runs.iter().filter_map(|(run, trace)| {
        let bytes = shipped_profile(&trace.header.model_name).ok()?.total_bytes().0;
        let k = rounds_of(trace).map_or_else(|| "sliced layers".to_owned(), |k| format!("k = {k}"));
        Some(((origin_word(run.origin), k), bytes, run.metrics.tpot_ms?.mean_ms))
    });
    let label = |bytes: u64| numbers::format_bytes(bytes as f64);
    lines(points, "Time per token over model size", "bytes of the model's weights", label)
}

/// Returns the number of rounds per token; `None` without computing steps, or for a tensor-parallel plan.
fn rounds_of(trace: &Trace) -> Option<u32> {
    let windows = trace.records.iter().filter(|record| record.kind == StepKind::Compute);
    let last = windows.map(|record| record.round).max()?;
    trace.header.parallelism.is_ring().then(|| last.saturating_add(1))
}

/// What the runs of a line have in common: the origin (simulated or measured), and the model or the rounds.
type Case = (&'static str, String);

fn lines(
    points: impl Iterator<Item = (Case, u64, f64)>,
    title: &str,
    x_title: &str,
    label: impl Fn(u64) -> String,
) -> Option<LineChart> {
    // Several runs at one position are averaged.
    let mut cases: BTreeMap<Case, BTreeMap<u64, Vec<f64>>> = BTreeMap::new();
    for (case, at, time) in points {
        cases.entry(case).or_default().entry(at).or_default().push(time);
    }
    // A single position is no line.
    cases.retain(|_, times| times.len() > 1);
    let at: BTreeSet<u64> = cases.values().flat_map(BTreeMap::keys).copied().collect();
    let (min, max) = (*at.first()?, *at.last()?);
    let position = |at: u64| AxisPosition {
        x_fraction: (at - min) as f64 / (max - min).max(1) as f64,
        label: label(at),
    };
    let mean = |times: &Vec<f64>| times.iter().sum::<f64>() / times.len() as f64;
    Some(LineChart {
        title: title.into(),
        x_title: x_title.into(),
        unit: "ms".into(),
        x_positions: at.iter().map(|at| position(*at)).collect(),
        series: cases
            .iter()
            .map(|((origin, case), times)| Series {
                name: format!("{origin}, {case}"),
                values: at.iter().map(|at| times.get(at).map(mean)).collect(),
            })
            .collect(),
        marks_missing_values: false,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn positions_are_proportional_and_equal_ones_are_averaged() {
        let case = || ("simulated", "m".to_owned());
        let points = [(case(), 1, 10.0), (case(), 4, 40.0), (case(), 2, 20.0), (case(), 2, 30.0)];
        let found = lines(points.into_iter(), "t", "k", |k| k.to_string()).expect("a line");
        let fractions: Vec<f64> = found.x_positions.iter().map(|position| position.x_fraction).collect();
        assert_eq!(fractions, [0.0, 1.0 / 3.0, 1.0]);
        assert_eq!(found.series[0].values, [Some(10.0), Some(25.0), Some(40.0)]);
        assert!(lines([(case(), 3, 1.0)].into_iter(), "t", "k", |k| k.to_string()).is_none());
    }
}
