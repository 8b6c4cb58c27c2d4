//! Charts of memory over a run: the weights in memory and the memory pressure, with a strip for each device.

use hearth_schema::Trace;
use hearth_schema::run_events::{RunEvent, RunEventKind};
use hearth_schema::trace::{Counter, TracedDevice};
use plotters::element::{PathElement, Rectangle, Text};
use plotters::style::Color;

use super::drawing::{CssClass, Drawing};
use super::{Axis, MAX_POINTS, label, plot, text};
use crate::comparison::Run;
use crate::text::{escape, numbers};

/// Pixels from one strip to the next, including the heading of the strip.
const STRIP_STEP: f64 = 62.0;
/// Top and bottom of a strip within its row of height [`STRIP_STEP`], as fractions of this height.
const STRIP: [f64; 2] = [0.32, 0.84];

struct Strip {
    heading: String,
    /// Time in seconds and height in the strip (0 to 1) of each reading.
    points: Vec<(f64, f64)>,
}

/// Draws the bytes of weights in memory on each device over a run, relative to the largest value of any device.
pub fn draw_residency(run: &Run, trace: &Trace) -> Option<Drawing> {
    let readings = Readings::of(trace, Counter::Resident)?;
    let max = readings.values.iter().map(|(_, _, value)| *value).max().filter(|max| *max > 0)?;
    let devices = run.metrics.devices.iter().enumerate();
    let strips = devices.filter_map(|(device, metrics)| {
        let points = readings.of_device(device, max as f64);
        let bytes = points.last()?.1 * max as f64;
        let heading = format!("{}, {} at the end", metrics.name, numbers::format_bytes(bytes));
        Some(Strip { heading, points })
    });
    let (id, title) = (format!("residency-{}", run.label), format!("{}: weights in memory", run.heading()));
    Some(draw(&id, &title, CssClass::Series0, strips.collect(), readings.seconds))
}

/// Draws the memory pressure of each device over a run; `None` if no other program allocated memory or was
/// swapped out during the run.
pub fn draw_memory_pressure(run: &Run, trace: &Trace) -> Option<Drawing> {
    let takes_memory =
        |run_event: &RunEvent| matches!(run_event.kind, RunEventKind::Memory | RunEventKind::Swap);
    let readings = Readings::of(trace, Counter::Unreclaimable)?;
    if !trace.run_events.iter().any(takes_memory) {
        return None;
    }
    let strip = |(index, device): (usize, &TracedDevice)| {
        let points = readings.of_device(index, device.total_memory_bytes.max(1) as f64);
        let max = points.iter().map(|&(_, share)| share).fold(0.0, f64::max);
        let heading =
            format!("{}, at most {}", escape::sanitize_name(&device.name), numbers::format_percent(max));
        Strip { heading, points }
    };
    let strips = trace.header.devices.iter().enumerate().map(strip).collect();
    let (id, title) = (format!("pressure-{}", run.label), format!("{}: memory pressure", run.heading()));
    Some(draw(&id, &title, CssClass::Series1, strips, readings.seconds))
}

struct Readings {
    /// Device index, seconds since the first reading, and value of each reading.
    values: Vec<(usize, f64, u64)>,
    /// Seconds from the first to the last reading.
    seconds: f64,
}

impl Readings {
    /// Returns the readings of a counter on all devices; `None` if all readings have the same time.
    fn of(trace: &Trace, counter: Counter) -> Option<Self> {
        let readings = || trace.readings.iter().filter(|reading| reading.counter == counter);
        let begin = readings().map(|reading| reading.time_ns).min()?;
        let end = readings().map(|reading| reading.time_ns).max()?;
        let seconds = |at: u64| (at - begin) as f64 * 1e-9;
        let values = readings()
            .map(|reading| (usize::from(reading.device_index), seconds(reading.time_ns), reading.value))
            .collect();
        (end > begin).then(|| Self { values, seconds: seconds(end) })
    }

    /// Returns the time of each reading of a device in seconds, and its value as a share of `max`. At most about
    /// [`MAX_POINTS`] readings are returned.
    fn of_device(&self, device: usize, max: f64) -> Vec<(f64, f64)> {
        let all = self.values.iter().filter(|(of, ..)| *of == device);
        let all: Vec<(f64, f64)> = all.map(|&(_, at, value)| (at, (value as f64 / max).min(1.0))).collect();
        let group = all.len().div_ceil(MAX_POINTS).max(1);
        all.iter().step_by(group).chain(all.last()).copied().collect()
    }
}

fn draw(id: &str, title: &str, class: CssClass, strips: Vec<Strip>, seconds: f64) -> Drawing {
    let mut drawing = Drawing::new(id, title, 0);
    let x = Axis::new(0.0..seconds, 6, &|value| label(*value, "s"));
    plot(&mut drawing, STRIP_STEP * strips.len() as f64, x, Axis::rows(strips.len()), |chart| {
        for (row, strip) in strips.into_iter().enumerate() {
            let row = row as f64;
            let height = |share: f64| row + STRIP[1] - (STRIP[1] - STRIP[0]) * share;
            let points: Vec<(f64, f64)> =
                strip.points.iter().map(|&(at, share)| (at, height(share))).collect();
            let corners = [(0.0, row + STRIP[0]), (seconds, row + STRIP[1])];
            chart.draw_series([Text::new(strip.heading, (0.0, row + 0.02), text(CssClass::Name))])?;
            chart.draw_series([Rectangle::new(corners, CssClass::Lane.filled())])?;
            chart.draw_series([PathElement::new(points, class)])?;
        }
        Ok(())
    });
    drawing
}
