//! Where did the mean token's time go, on which device, and how even were the tokens?
//!
//! Bars of the terms for each run, bars for each device, the time of every token in order, how those
//! times are spread, and the weights in memory over time.
//!
//! Not here: the picture of one token ([`crate::gantt`]).

use hearth_core::metrics::DeviceMetrics;
use hearth_core::metrics::Terms;
use hearth_core::metrics::device_terms;
use hearth_schema::Trace;
use hearth_schema::happenings::Happening;
use hearth_schema::happenings::Sort;
use hearth_schema::trace::Counter;

use crate::comparison::Run;
use crate::escape;
use crate::happenings;
use crate::rounding::{self, Fixed};
use crate::svg::{self, Anchor, Drawing};
use crate::terms;
use crate::tokens::{self, Token};

const GUTTER: u32 = 58;
const BAR_HEIGHT: f64 = 20.0;
const BAR_STEP: f64 = 48.0;
/// Height of a plot of curves, in pixels.
pub const PLOT_HEIGHT: f64 = 170.0;
/// Where it begins.
pub const PLOT_TOP: f64 = 8.0;
/// A curve of more points is drawn from the means of as many groups.
const MOST_POINTS: usize = 400;
/// Classes of curves; more runs than these share a colour.
const CURVES: [&str; 4] = ["line-0", "line-1", "line-2", "line-3"];

/// The terms of each run as a stacked bar.
pub fn breakdown(runs: &[&Run]) -> Option<Drawing> {
    let most = runs.iter().map(|run| positive(run)).fold(0.0, f64::max);
    if most <= 0.0 {
        return None;
    }
    let mut drawing = Drawing::new("breakdown", "Where the mean token's time goes", 0);
    let mut top = 0.0;
    for run in runs {
        let Some(tpot) = run.metrics.tpot_ms else { continue };
        let label = format!("{}, {}", run.heading(), rounding::milliseconds(tpot.mean));
        drawing.text("name", (0.0, 0.0), top + 14.0, Anchor::Start, &label);
        let mut at = 0.0;
        for (term, (_, value)) in terms::SUMMED.iter().zip(run.metrics.terms_ms.rows()) {
            at = bar(&mut drawing, term.class, term.label, (at, value), most, top + 20.0);
        }
        top += BAR_STEP;
    }
    axis(&mut drawing, most, top, "ms");
    Some(drawing)
}

/// What sums to a bar's width: a term below zero has no width.
fn positive(run: &Run) -> f64 {
    run.metrics.terms_ms.rows().iter().map(|(_, value)| value.max(0.0)).sum()
}

/// A piece of a bar; returns where the next one begins.
fn bar(
    drawing: &mut Drawing,
    class: &'static str,
    label: &'static str,
    from: (f64, f64),
    most: f64,
    top: f64,
) -> f64 {
    let (at, value) = (from.0, from.1.max(0.0));
    if seen(value, most) {
        drawing.explain(class, label);
        let hover = format!("{label}: {}", rounding::milliseconds(value));
        drawing.block(class, [at / most, (at + value) / most], [top, top + BAR_HEIGHT], &hover);
    }
    at + value
}

fn axis(drawing: &mut Drawing, most: f64, top: f64, unit: &str) {
    let (ticks, digits) = svg::ticks(most, 5);
    let last = ticks.len() - 1;
    for (index, tick) in ticks.into_iter().enumerate() {
        let x = if most > 0.0 { tick / most } else { 0.0 };
        drawing.line("grid", (x, top), (x, top + 5.0));
        let unit = if index == last { format!(" {unit}") } else { String::new() };
        let anchor = if index == 0 { Anchor::Start } else { Anchor::Middle };
        let text = format!("{}{unit}", rounding::tick(tick, digits));
        drawing.text("tick", (x, 0.0), top + 17.0, anchor, &text);
    }
    drawing.reach(top + 22.0);
}

/// For each device of a run: what its steps took of a token, and reading ahead.
pub fn devices(run: &Run, trace: &Trace, most: f64) -> Option<Drawing> {
    if most <= 0.0 || run.metrics.tpot_ms.is_none() {
        return None;
    }
    let title = format!("{}: each device's share of a token", run.heading());
    let mut drawing = Drawing::new(&format!("devices-{}", run.label), &title, 0);
    let rows: Vec<(&DeviceMetrics, [Piece; 6])> = run
        .metrics
        .devices
        .iter()
        .zip(device_terms(trace))
        .map(|(device, terms)| (device, pieces(device, &terms)))
        .collect();
    // In one order, whichever device has a piece first.
    for place in 0..6 {
        if let Some((_, pieces)) = rows.iter().find(|(_, pieces)| seen(pieces[place].2, most)) {
            drawing.explain(pieces[place].0, pieces[place].1);
        }
    }
    let mut top = 0.0;
    for (device, pieces) in rows {
        let heading = if device.trace_lost {
            format!("{}, unknown: its trace is lost", device.name)
        } else {
            format!("{}, busy {}", device.name, rounding::milliseconds(device.busy_ms))
        };
        drawing.text("name", (0.0, 0.0), top + 14.0, Anchor::Start, &heading);
        let mut at = 0.0;
        for (class, label, value) in pieces {
            at = bar(&mut drawing, class, label, (at, value), most, top + 20.0);
        }
        top += BAR_STEP;
    }
    axis(&mut drawing, most, top, "ms");
    Some(drawing)
}

/// Class, meaning and milliseconds of a piece of a bar.
type Piece = (&'static str, &'static str, f64);

/// What a device's bar is made of.
fn pieces(device: &DeviceMetrics, terms: &Terms) -> [Piece; 6] {
    [
        ("cpu", "computing, CPU", terms.cpu),
        ("gpu", "computing, GPU", terms.gpu),
        ("memory", "copying", terms.memory),
        ("queue", "waiting for a processor", terms.queue),
        ("demand", "waiting for the disk", terms.demand_disk),
        ("hidden", "reading ahead, hidden", device.hidden_disk_ms),
    ]
}

/// Whether a piece has a width: what is left over by floating-point noise is no bubble.
fn seen(value: f64, most: f64) -> bool {
    value > most * 1e-6
}

/// The longest bar that [`devices`] draws for a run.
pub fn longest(run: &Run) -> f64 {
    let width = |device: &DeviceMetrics| {
        device.busy_ms.max(device.demand_disk_ms).max(0.0) + device.hidden_disk_ms.max(0.0)
    };
    run.metrics.devices.iter().map(width).fold(0.0, f64::max)
}

/// The time of every token, in order.
pub fn every_token(runs: &[(&Run, &Trace)]) -> Option<Drawing> {
    let times = times(runs);
    let most = times.iter().flatten().copied().fold(0.0, f64::max);
    let count = times.iter().map(Vec::len).max().unwrap_or(0);
    if most <= 0.0 || count < 2 {
        return None;
    }
    let mut drawing = Drawing::new("tokens", "Time of every token", GUTTER);
    let height = plot(&mut drawing, most, "ms");
    for (index, times) in times.iter().enumerate().filter(|(_, times)| times.len() > 1) {
        let last = (count - 1) as f64;
        let points: Vec<(f64, f64)> =
            thin(times).into_iter().map(|(at, time)| (at / last, time / height)).collect();
        curve(&mut drawing, index, &points, runs);
    }
    for (_, trace) in runs {
        let ends: Vec<u64> = tokens::of(trace).iter().map(|token| token.end).collect();
        for moment in happenings::moments(trace) {
            // In the middle of the token under way.
            let at = ends.iter().filter(|&&end| end <= moment).count().min(ends.len().saturating_sub(1));
            let x = at as f64 / (count - 1) as f64;
            drawing.line("happening", (x, PLOT_TOP), (x, PLOT_TOP + PLOT_HEIGHT));
            drawing.explain("happening", "something happened");
        }
    }
    let (ticks, _) = svg::ticks(count as f64, 5);
    for tick in ticks.into_iter().filter(|tick| *tick >= 1.0 && tick.fract() == 0.0) {
        let x = (tick - 1.0) / (count - 1) as f64;
        let text = rounding::tick(tick, 0);
        drawing.text("tick", (x, 0.0), PLOT_TOP + PLOT_HEIGHT + 20.0, Anchor::Middle, &text);
    }
    drawing.label("tick", 0.0, PLOT_TOP + PLOT_HEIGHT + 20.0, "token");
    drawing.reach(PLOT_TOP + PLOT_HEIGHT + 25.0);
    Some(drawing)
}

/// Which share of the tokens was done within a time.
pub fn spread(runs: &[(&Run, &Trace)]) -> Option<Drawing> {
    let mut times = times(runs);
    for times in &mut times {
        times.sort_unstable_by(f64::total_cmp);
    }
    let most = times.iter().flatten().copied().fold(0.0, f64::max);
    let least = times.iter().flatten().copied().fold(most, f64::min);
    if most <= 0.0 || times.iter().all(|times| times.len() < 2) {
        return None;
    }
    // Room on both sides, and a width even if all tokens took the same time.
    let margin = (0.1 * (most - least)).max(0.01 * most);
    let (from, width) = ((least - margin).max(0.0), most + margin - (least - margin).max(0.0));
    let across = |time: f64| (time - from) / width;
    let mut drawing = Drawing::new("spread", "Share of the tokens done within a time", GUTTER);
    for share in [0.0, 0.5, 0.95, 1.0] {
        let y = PLOT_TOP + PLOT_HEIGHT * (1.0 - share);
        drawing.line("grid", (0.0, y), (1.0, y));
        // 100 % has no room of its own above 95 %.
        if share < 1.0 {
            let text = format!("{} %", Fixed::new(share * 100.0, 0).text());
            drawing.label("tick", 0.0, y + 4.0, &text);
        }
    }
    for (index, times) in times.iter().enumerate().filter(|(_, times)| times.len() > 1) {
        let mut points = vec![(0.0, 0.0), (across(times[0]), 0.0)];
        let steps = times.len().min(MOST_POINTS);
        for step in 1..=steps {
            let share = step as f64 / steps as f64;
            let rank = ((share * times.len() as f64).ceil() as usize).clamp(1, times.len());
            let before = points[points.len() - 1].1;
            points.push((across(times[rank - 1]), before));
            points.push((across(times[rank - 1]), share));
        }
        points.push((1.0, 1.0));
        curve(&mut drawing, index, &points, runs);
    }
    let y = PLOT_TOP + PLOT_HEIGHT + 17.0;
    let (ticks, digits) = svg::ticks_between(from, from + width, 5);
    let last = ticks.len() - 1;
    for (index, tick) in ticks.into_iter().enumerate() {
        let unit = if index == last { " ms" } else { "" };
        let text = format!("{}{unit}", rounding::tick(tick, digits));
        drawing.text("tick", (across(tick), 0.0), y, Anchor::Middle, &text);
    }
    drawing.reach(y + 5.0);
    Some(drawing)
}

fn times(runs: &[(&Run, &Trace)]) -> Vec<Vec<f64>> {
    let of = |trace: &Trace| tokens::of(trace).iter().map(Token::duration).map(millis).collect();
    runs.iter().map(|(_, trace)| of(trace)).collect()
}

/// At most [`MOST_POINTS`] points: place and mean of as many groups.
fn thin(times: &[f64]) -> Vec<(f64, f64)> {
    let group = times.len().div_ceil(MOST_POINTS).max(1);
    times
        .chunks(group)
        .enumerate()
        .map(|(index, chunk)| {
            let middle = (index * group) as f64 + (chunk.len() - 1) as f64 / 2.0;
            (middle, chunk.iter().sum::<f64>() / chunk.len() as f64)
        })
        .collect()
}

fn curve(drawing: &mut Drawing, index: usize, points: &[(f64, f64)], runs: &[(&Run, &Trace)]) {
    let class = CURVES[index % CURVES.len()];
    drawing.curve(class, PLOT_TOP, PLOT_TOP + PLOT_HEIGHT, points);
    drawing.explain(class, &runs[index].0.heading());
}

/// Horizontal lines with their values; returns the value at the top of the plot.
pub fn plot(drawing: &mut Drawing, most: f64, unit: &str) -> f64 {
    let top = most * 1.05;
    let (ticks, digits) = svg::ticks(top, 4);
    let last = ticks.len() - 1;
    for (index, tick) in ticks.into_iter().enumerate() {
        let y = PLOT_TOP + PLOT_HEIGHT * (1.0 - tick / top);
        drawing.line("grid", (0.0, y), (1.0, y));
        let unit = if index == last { format!(" {unit}") } else { String::new() };
        drawing.label("tick", 0.0, y + 4.0, &format!("{}{unit}", rounding::tick(tick, digits)));
    }
    top
}

/// Weights in memory on each device over a run, as a share of the most any of them held.
pub fn residency(run: &Run, trace: &Trace) -> Option<Drawing> {
    let resident = || trace.readings.iter().filter(|reading| reading.counter == Counter::Resident);
    let most = resident().map(|reading| reading.value).max()?;
    let (begin, end) =
        (resident().map(|reading| reading.at).min()?, resident().map(|reading| reading.at).max()?);
    if most == 0 || begin == end {
        return None;
    }
    let title = format!("{}: weights in memory", run.heading());
    let mut drawing = Drawing::new(&format!("residency-{}", run.label), &title, 0);
    let mut top = 0.0;
    for (index, device) in run.metrics.devices.iter().enumerate() {
        let mine: Vec<(f64, f64)> = resident()
            .filter(|reading| usize::from(reading.device) == index)
            .map(|reading| ((reading.at - begin) as f64 / (end - begin) as f64, reading.value as f64))
            .collect();
        let Some(&(_, held)) = mine.last() else { continue };
        let label = format!("{}, {} at the end", device.name, rounding::bytes(held));
        drawing.text("name", (0.0, 0.0), top + 14.0, Anchor::Start, &label);
        let (over, under) = (top + 20.0, top + 52.0);
        drawing.block("lane", [0.0, 1.0], [over, under], "");
        let group = mine.len().div_ceil(MOST_POINTS).max(1);
        let points: Vec<(f64, f64)> = mine
            .iter()
            .step_by(group)
            .chain(mine.last())
            .map(|&(at, value)| (at, value / most as f64))
            .collect();
        drawing.curve(CURVES[0], over, under, &points);
        top += 62.0;
    }
    axis(&mut drawing, (end - begin) as f64 * 1e-9, top, "s");
    Some(drawing)
}

/// Memory pressure of each device over a run in which other programs took memory or were swapped out.
pub fn pressure(run: &Run, trace: &Trace) -> Option<Drawing> {
    let pressed = |happening: &Happening| matches!(happening.sort, Sort::Memory | Sort::Swap);
    let held = || trace.readings.iter().filter(|reading| reading.counter == Counter::Unreclaimable);
    let (begin, end) = (held().map(|reading| reading.at).min()?, held().map(|reading| reading.at).max()?);
    if begin == end || !trace.happenings.iter().any(pressed) {
        return None;
    }
    let title = format!("{}: memory pressure", run.heading());
    let mut drawing = Drawing::new(&format!("pressure-{}", run.label), &title, 0);
    let mut top = 0.0;
    for (index, device) in trace.header.devices.iter().enumerate() {
        let total = device.memory_total.max(1) as f64;
        let mine: Vec<(f64, f64)> = held()
            .filter(|reading| usize::from(reading.device) == index)
            .map(|it| ((it.at - begin) as f64 / (end - begin) as f64, (it.value as f64 / total).min(1.0)))
            .collect();
        let most = mine.iter().map(|&(_, share)| share).fold(0.0, f64::max);
        let label = format!("{}, at most {}", escape::name(&device.name), rounding::percent(most));
        drawing.text("name", (0.0, 0.0), top + 14.0, Anchor::Start, &label);
        let (over, under) = (top + 20.0, top + 52.0);
        drawing.block("lane", [0.0, 1.0], [over, under], "");
        let group = mine.len().div_ceil(MOST_POINTS).max(1);
        let points: Vec<(f64, f64)> = mine.iter().step_by(group).chain(mine.last()).copied().collect();
        drawing.curve(CURVES[1], over, under, &points);
        top += 62.0;
    }
    axis(&mut drawing, (end - begin) as f64 * 1e-9, top, "s");
    Some(drawing)
}

fn millis(nanos: u64) -> f64 {
    nanos as f64 * 1e-6
}
