//! Charts of the time of every token: in order, and as a cumulative distribution.

use hearth_core::metrics::token_times::{DecodeStep, TokenTimes};
use hearth_schema::Trace;
use plotters::element::PathElement;

use super::drawing::{CssClass, Drawing};
use super::{Axis, GUTTER, MAX_POINTS, PLOT_HEIGHT, Scale, label, millis, plot};
use crate::comparison::Run;
use crate::timeline::events;

/// Draws the time of every token of each run in order, with vertical lines at the beginning and the end of each run
/// event.
pub fn draw_time_series(runs: &[(&Run, &Trace)]) -> Option<Drawing> {
    let times = times(runs);
    let max = times.iter().flatten().copied().fold(0.0, f64::max);
    let count = times.iter().map(Vec::len).max().unwrap_or(0);
    if max <= 0.0 || count < 2 {
        return None;
    }
    let mut drawing = Drawing::new("tokens", "Time of every token", GUTTER);
    let moments: Vec<f64> = runs.iter().flat_map(|(_, trace)| tokens_at_events(trace)).collect();
    add_runs_to_legend(&mut drawing, runs, &times);
    if !moments.is_empty() {
        drawing.add_to_legend(CssClass::Event, "an event begins or ends");
    }
    let whole = |value: &f64| if value.fract() == 0.0 { label(*value, "") } else { String::new() };
    let x = Axis { title: "token", ..Axis::new(1.0..count as f64, 6, &whole) };
    let ms = |value: &f64| label(*value, "ms");
    let y = Axis { grid: true, ..Axis::new(0.0..max * 1.05, 5, &ms) };
    plot(&mut drawing, PLOT_HEIGHT, x, y, |chart| {
        for (index, times) in times.iter().enumerate().filter(|(_, times)| times.len() > 1) {
            chart.draw_series([PathElement::new(downsampled(times), CssClass::for_series(index))])?;
        }
        for at in moments {
            chart.draw_series([PathElement::new([(at, 0.0), (at, max * 1.05)], CssClass::Event)])?;
        }
        Ok(())
    });
    Some(drawing)
}

/// Returns the number of the token (from 1) that is in progress when each run event begins or ends.
fn tokens_at_events(trace: &Trace) -> Vec<f64> {
    let ends: Vec<u64> =
        TokenTimes::from_trace(trace).decode_steps.iter().map(|token| token.end_ns).collect();
    let number = |moment: u64| {
        let ended = ends.iter().filter(|&&end| end <= moment).count();
        (ended + 1).min(ends.len().max(1)) as f64
    };
    events::event_boundaries_ns(trace).into_iter().map(number).collect()
}

/// Draws the cumulative distribution of the times per token of each run.
pub fn draw_time_distribution(runs: &[(&Run, &Trace)]) -> Option<Drawing> {
    let mut times = times(runs);
    for times in &mut times {
        times.sort_unstable_by(f64::total_cmp);
    }
    let max = times.iter().flatten().copied().fold(0.0, f64::max);
    let min = times.iter().flatten().copied().fold(max, f64::min);
    if max <= 0.0 || times.iter().all(|times| times.len() < 2) {
        return None;
    }
    // A margin on both sides, so that the axis has a width even if all tokens took the same time.
    let margin = (0.1 * (max - min)).max(0.01 * max);
    let (from, to) = ((min - margin).max(0.0), max + margin);
    let mut drawing = Drawing::new("spread", "Distribution of the times", GUTTER);
    add_runs_to_legend(&mut drawing, runs, &times);
    // There is no space for a label of 100 % above that of 95 %.
    let percent = |share: &f64| if *share < 1.0 { label(share * 100.0, "%") } else { String::new() };
    let x = Axis::new(from..to, 6, &|value| label(*value, "ms"));
    let scale = Scale { range: 0.0..1.0, is_logarithmic: false, ticks: vec![0.0, 0.5, 0.95, 1.0] };
    let y = Axis { scale, format_label: &percent, title: "", grid: true };
    plot(&mut drawing, PLOT_HEIGHT, x, y, |chart| {
        for (index, times) in times.iter().enumerate().filter(|(_, times)| times.len() > 1) {
            let points = step_function(times, from, to);
            chart.draw_series([PathElement::new(points, CssClass::for_series(index))])?;
        }
        Ok(())
    });
    Some(drawing)
}

/// Returns the points of a step function: the cumulative distribution of sorted `times`, drawn between `from` and
/// `to`.
fn step_function(times: &[f64], from: f64, to: f64) -> Vec<(f64, f64)> {
    let mut points = vec![(from, 0.0), (times[0], 0.0)];
    let count = times.len().min(MAX_POINTS);
    for step in 1..=count {
        let share = step as f64 / count as f64;
        let rank = ((share * times.len() as f64).ceil() as usize).clamp(1, times.len());
        let before = points[points.len() - 1].1;
        points.extend([(times[rank - 1], before), (times[rank - 1], share)]);
    }
    points.push((to, 1.0));
    points
}

fn add_runs_to_legend(drawing: &mut Drawing, runs: &[(&Run, &Trace)], times: &[Vec<f64>]) {
    for (index, (run, _)) in runs.iter().enumerate().filter(|(index, _)| times[*index].len() > 1) {
        drawing.add_to_legend(CssClass::for_series(index), &run.heading());
    }
}

/// Returns the time of each token of each run, in milliseconds.
fn times(runs: &[(&Run, &Trace)]) -> Vec<Vec<f64>> {
    let times = |(_, trace): &(&Run, &Trace)| {
        TokenTimes::from_trace(trace).decode_steps.iter().map(DecodeStep::duration_ns).map(millis).collect()
    };
    runs.iter().map(times).collect()
}

/// Averages the times of consecutive tokens, so that at most [`MAX_POINTS`] points remain. A point is the token number,
/// from 1, and the mean time.
fn downsampled(times: &[f64]) -> Vec<(f64, f64)> {
    let group = times.len().div_ceil(MAX_POINTS).max(1);
    times
        .chunks(group)
        .enumerate()
        .map(|(index, chunk)| {
            let middle = (index * group) as f64 + 1.0 + (chunk.len() - 1) as f64 / 2.0;
            (middle, chunk.iter().sum::<f64>() / chunk.len() as f64)
        })
        .collect()
}
