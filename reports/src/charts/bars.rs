//! Stacked bar charts: the terms of the mean time per token of each run, and the work of each device.

use hearth_core::metrics::{DeviceMetrics, Terms, device_terms};
use hearth_schema::Trace;
use plotters::element::Text;

use super::drawing::{CssClass, Drawing, ShapeWithTooltip};
use super::{Axis, gantt, label, plot, text};
use crate::comparison::Run;
use crate::comparison::terms::SUMMED_TERMS;
use crate::text::numbers;

/// Height of the row of a bar, which includes the heading of the bar, in pixels.
const BAR_STEP: f64 = 48.0;
/// Vertical position of the heading in the row of a bar, as a fraction of [`BAR_STEP`].
const HEADING: f64 = 0.04;
/// Top and bottom of a bar within its row, as fractions of [`BAR_STEP`].
const BAR: [f64; 2] = [0.42, 0.84];

/// CSS classes of the terms of the time per token, in the order of [`SUMMED_TERMS`].
const TERM_CLASSES: [CssClass; 7] = [
    CssClass::Cpu,
    CssClass::Gpu,
    CssClass::Memory,
    CssClass::Demand,
    CssClass::Network,
    CssClass::Queue,
    CssClass::Bubble,
];

struct Bar {
    heading: String,
    /// CSS class, meaning and length in milliseconds of each segment of the bar.
    segments: Vec<(CssClass, &'static str, f64)>,
}

/// Draws the terms of the time per token of each run as a stacked bar; `None` if no run has a time per token.
pub fn draw_tpot_breakdown(runs: &[&Run]) -> Option<Drawing> {
    let timed = runs.iter().filter_map(|run| Some((run, run.metrics.tpot_ms?)));
    let bars = timed.map(|(run, tpot)| {
        let heading = format!("{}, {}", run.heading(), numbers::format_milliseconds(tpot.mean_ms));
        let terms = SUMMED_TERMS.iter().zip(TERM_CLASSES).zip(run.metrics.terms_ms.named_terms());
        let segments = terms.map(|((term, class), (_, value))| (class, term.label, value)).collect();
        Bar { heading, segments }
    });
    let bars: Vec<Bar> = bars.collect();
    let max = bars.iter().map(length).fold(0.0, f64::max);
    stacked("breakdown", "Breakdown of the mean time per token", &bars, max)
}

/// Draws a stacked bar for each device of a run: the time per token in which the device computes, copies, waits and
/// reads ahead. `max` is the time at the right end of the axis, in milliseconds.
pub fn draw_device_work(run: &Run, trace: &Trace, max: f64) -> Option<Drawing> {
    run.metrics.tpot_ms?;
    let title = format!("{}: work of each device for a token", run.heading());
    let devices = run.metrics.devices.iter().zip(device_terms(trace));
    let bars: Vec<Bar> = devices.map(|(device, terms)| device_bar(device, &terms)).collect();
    stacked(&format!("devices-{}", run.label), &title, &bars, max)
}

fn device_bar(device: &DeviceMetrics, terms: &Terms) -> Bar {
    let heading = if device.trace_lost {
        format!("{}, unknown: its trace is lost", device.name)
    } else {
        format!("{}, busy {}", device.name, numbers::format_milliseconds(device.busy_ms))
    };
    // In the order of the legend, which ends with the reads that are not hidden.
    let times = [terms.cpu, terms.gpu, terms.memory, terms.queue, terms.demand_disk, device.hidden_disk_ms];
    let segments = gantt::LEGEND.into_iter().zip(times).map(|((_, class, meaning), ms)| (class, meaning, ms));
    Bar { heading, segments: segments.collect() }
}

/// Returns the length of the longest bar that [`draw_device_work`] draws for a run, in milliseconds.
pub fn max_device_bar_ms(run: &Run) -> f64 {
    let width = |device: &DeviceMetrics| {
        device.busy_ms.max(device.demand_disk_ms).max(0.0) + device.hidden_disk_ms.max(0.0)
    };
    run.metrics.devices.iter().map(width).fold(0.0, f64::max)
}

/// Returns the length of a bar in milliseconds; a negative segment has no width.
fn length(bar: &Bar) -> f64 {
    bar.segments.iter().map(|(_, _, value)| value.max(0.0)).sum()
}

fn stacked(id: &str, title: &str, bars: &[Bar], max: f64) -> Option<Drawing> {
    if bars.is_empty() || !max.is_finite() || max <= 0.0 {
        return None;
    }
    // A segment that is only a rounding error is not drawn.
    let visible = |value: f64| value > max * 1e-6;
    let mut drawing = Drawing::new(id, title, 0);
    // The legend has the order of the segments, even if the first bar lacks some of them.
    for index in 0..bars[0].segments.len() {
        if let Some(bar) = bars.iter().find(|bar| visible(bar.segments[index].2)) {
            drawing.add_to_legend(bar.segments[index].0, bar.segments[index].1);
        }
    }
    let x = Axis::new(0.0..max, 6, &|value| label(*value, "ms"));
    plot(&mut drawing, BAR_STEP * bars.len() as f64, x, Axis::rows(bars.len()), |chart| {
        for (row, bar) in bars.iter().enumerate() {
            let row = row as f64;
            let heading_at = (0.0, row + HEADING);
            chart.draw_series([Text::new(bar.heading.clone(), heading_at, text(CssClass::Name))])?;
            let mut start = 0.0;
            for (class, meaning, value) in bar.segments.iter().filter(|segment| visible(segment.2)) {
                let corners = vec![(start, row + BAR[0]), (start + value, row + BAR[1])];
                let tooltip = format!("{meaning}: {}", numbers::format_milliseconds(*value));
                chart.draw_series([ShapeWithTooltip { points: corners, class: *class, tooltip }])?;
                start += value;
            }
        }
        Ok(())
    });
    Some(drawing)
}
