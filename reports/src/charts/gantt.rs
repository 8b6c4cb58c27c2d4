//! The Gantt chart of one token: the work of every device while the token goes around the ring.
//!
//! The layout is that of Fig. 6 of the prima.cpp paper: a row for each processor and disk, time on the horizontal
//! axis, reading ahead in green, computation that waits for the disk in orange, messages as arrows, and empty space
//! where a device waits. Reports draw the token of median duration.

use std::collections::BTreeSet;

use hearth_core::metrics::token_times::DecodeStep;
use hearth_schema::Trace;
use hearth_schema::trace::{Resource, StepKind, StepRecord};

use super::drawing::{CssClass, Drawing};
use super::{label, millis, round_values};
use crate::comparison::Run;
use crate::text::numbers;
use crate::timeline::activities::{self, Activity, Lane};
use crate::timeline::{events, messages};

// Dimensions in pixels.
const GUTTER: u32 = 40;
const NAME_HEIGHT: f64 = 20.0;
const LANE_HEIGHT: f64 = 15.0;
const LANE_STEP: f64 = 18.0;
const DEVICE_GAP: f64 = 8.0;
const AXIS_HEIGHT: f64 = 20.0;
/// Maximum gap between merged intervals of the same activity, as a share of the width. Merging intervals
/// lets browsers open the page of a trace with a million steps.
const MERGE_SHARE: f64 = 0.0005;
/// Maximum number of message arrows in a chart; more arrows could not be distinguished.
const MAX_ARROWS: usize = 4000;

/// The CSS class and the legend text of each activity, in the order of the legend.
pub(super) const LEGEND: [(Activity, CssClass, &str); 7] = [
    (Activity::Cpu, CssClass::Cpu, "computing, CPU"),
    (Activity::Gpu, CssClass::Gpu, "computing, GPU"),
    (Activity::Copy, CssClass::Memory, "copying"),
    (Activity::Queue, CssClass::Queue, "waiting for a processor"),
    (Activity::DemandRead, CssClass::Demand, "waiting for the disk"),
    (Activity::HiddenRead, CssClass::Hidden, "reading ahead, hidden"),
    (Activity::ConcurrentRead, CssClass::Concurrent, "reading ahead while computing"),
];

/// One token of a trace, and the layout of its chart.
struct Gantt<'t> {
    trace: &'t Trace,
    token: DecodeStep,
    /// The time that the width of the plot represents, in nanoseconds.
    span: u64,
    rows: Vec<Row>,
}

struct Row {
    /// Index of the device in the ring.
    device: u16,
    lane: Lane,
    label: &'static str,
    /// Distance from the top of the drawing, in pixels.
    top: f64,
}

/// Draws the Gantt chart of one token. `span` is the time that the width of the plot represents, in nanoseconds.
pub fn draw_gantt(run: &Run, trace: &Trace, token: DecodeStep, span: u64) -> Drawing {
    let duration = numbers::format_milliseconds(millis(token.duration_ns()));
    let title = format!("{}: one token, {duration}", run.heading());
    let mut drawing = Drawing::new(&format!("gantt-{}", run.label), &title, GUTTER);
    let gantt = Gantt { trace, token, span, rows: rows(run, trace) };
    let bottom = gantt.rows.last().map_or(0.0, |row| row.top + LANE_HEIGHT) + DEVICE_GAP;
    axis(&mut drawing, span, bottom);
    for row in &gantt.rows {
        if row.lane == Lane::Cpu {
            let name = &run.metrics.devices[usize::from(row.device)].name;
            drawing.add_gutter_text(CssClass::Name, row.top - 5.0, name);
        }
        drawing.add_gutter_text(CssClass::Tick, row.top + LANE_HEIGHT - 3.5, row.label);
        let x = [0.0, gantt.fraction(token.end_ns)];
        drawing.add_rect(CssClass::Lane, x, [row.top, row.top + LANE_HEIGHT], "");
    }
    gantt.draw(&mut drawing);
    gantt.arrows(&mut drawing);
    for moment in events::event_boundaries_ns(trace) {
        if gantt.contains(moment) {
            let x = gantt.fraction(moment);
            drawing.add_line(CssClass::Event, (x, 2.0), (x, bottom));
            drawing.add_to_legend(CssClass::Event, "an event begins or ends");
        }
    }
    drawing
}

/// Returns a CPU row for every device, and GPU and disk rows for the devices that use them anywhere in the trace.
fn rows(run: &Run, trace: &Trace) -> Vec<Row> {
    let mut used = BTreeSet::new();
    for record in &trace.records {
        let waits = |&(kind, nanos): &(Activity, u64)| kind == Activity::DemandRead && nanos > 0;
        let demand = || activities::activity_durations(record).iter().any(waits);
        let lane = match record.resource {
            Resource::Gpu => Lane::Gpu,
            Resource::DiskDemand | Resource::DiskPrefetch => Lane::Disk,
            Resource::Cpu if record.is_processor_work() && demand() => Lane::Disk,
            _ => continue,
        };
        used.insert((record.device_index, lane));
    }
    let mut rows = Vec::new();
    let mut top = NAME_HEIGHT;
    for device in 0..run.metrics.devices.len() as u16 {
        for (lane, label) in [(Lane::Cpu, "cpu"), (Lane::Gpu, "gpu"), (Lane::Disk, "disk")] {
            if lane == Lane::Cpu || used.contains(&(device, lane)) {
                rows.push(Row { device, lane, label, top });
                top += LANE_STEP;
            }
        }
        top += NAME_HEIGHT + DEVICE_GAP;
    }
    rows
}

fn axis(drawing: &mut Drawing, span: u64, bottom: f64) {
    let max = millis(span);
    for tick in round_values(&(0.0..max), 8) {
        let x = if max > 0.0 { tick / max } else { 0.0 };
        // No grid line at zero: the device names, which are wider than the gutter, are there.
        if tick > 0.0 {
            drawing.add_line(CssClass::Grid, (x, 2.0), (x, bottom));
        }
        drawing.add_centred_text(CssClass::Tick, (x, bottom + 14.0), &label(tick, ""));
    }
    drawing.add_gutter_text(CssClass::Tick, bottom + 14.0, "ms");
    drawing.height = bottom + AXIS_HEIGHT;
}

impl Gantt<'_> {
    fn draw(&self, drawing: &mut Drawing) {
        let intervals =
            activities::intervals_within(&self.trace.records, [self.token.start_ns, self.token.end_ns]);
        for (activity, class, meaning) in LEGEND {
            if intervals.iter().any(|interval| interval.activity == activity) {
                drawing.add_to_legend(class, meaning);
            }
        }
        let near = (self.span as f64 * MERGE_SHARE) as u64;
        let mut index = 0;
        while index < intervals.len() {
            let first = intervals[index];
            let (mut end, mut count) = (first.end_ns, 1);
            while let Some(next) = intervals.get(index + count) {
                let same = (next.device_index, next.lane, next.activity)
                    == (first.device_index, first.lane, first.activity);
                let small = next.end_ns - next.start_ns < near || end - first.start_ns < near;
                if !(same && small && next.start_ns <= end.saturating_add(near)) {
                    break;
                }
                end = end.max(next.end_ns);
                count += 1;
            }
            index += count;
            let style = LEGEND.into_iter().find(|(activity, ..)| *activity == first.activity);
            let row = self.row(first.device_index, first.lane);
            let Some(((_, class, meaning), row)) = style.zip(row) else { continue };
            let tooltip = if count == 1 {
                tooltip(&self.trace.records[first.record_index], meaning, first.end_ns - first.start_ns)
            } else {
                let duration = numbers::format_milliseconds(millis(end - first.start_ns));
                format!("{meaning}: {count} steps, within {duration}")
            };
            let x = [self.fraction(first.start_ns), self.fraction(end)];
            drawing.add_rect(class, x, [row.top, row.top + LANE_HEIGHT], &tooltip);
        }
    }

    fn arrows(&self, drawing: &mut Drawing) {
        let records = self.trace.records.iter().filter(|record| record.pass_index == self.token.batch);
        let records: Vec<StepRecord> = records.cloned().collect();
        for message in messages::find_messages(&records).into_iter().take(MAX_ARROWS) {
            let [sent, received] = message.map(|index| &records[index]);
            if !self.contains(sent.start_ns) || !self.contains(received.end_ns) {
                continue;
            }
            // The arrow starts at the row of the last work before sending and ends at the row of the next work.
            let work = |device: u16| {
                records.iter().filter(move |step| step.device_index == device && step.is_processor_work())
            };
            let before = work(sent.device_index).filter(|step| step.end_ns <= sent.start_ns);
            let after = work(received.device_index).filter(|step| step.start_ns >= received.end_ns);
            let row = |device: u16, step: Option<&StepRecord>| {
                let on_gpu = step.is_some_and(|step| step.resource == Resource::Gpu);
                self.row(device, if on_gpu { Lane::Gpu } else { Lane::Cpu })
            };
            let from = row(sent.device_index, before.max_by_key(|step| step.end_ns));
            let to = row(received.device_index, after.min_by_key(|step| step.start_ns));
            let Some((from, to)) = from.zip(to) else { continue };
            drawing.add_to_legend(CssClass::Message, "message");
            let end = |at: u64, row: &Row| (self.fraction(at), row.top + LANE_HEIGHT / 2.0);
            drawing.add_arrow(CssClass::Message, end(sent.start_ns, from), end(received.end_ns, to));
        }
    }

    fn row(&self, device: u16, lane: Lane) -> Option<&Row> {
        self.rows.iter().find(|row| (row.device, row.lane) == (device, lane))
    }

    fn contains(&self, at: u64) -> bool {
        (self.token.start_ns..=self.token.end_ns).contains(&at)
    }

    /// Returns the horizontal position of a time, as a fraction of the width.
    fn fraction(&self, at: u64) -> f64 {
        at.saturating_sub(self.token.start_ns) as f64 / self.span.max(1) as f64
    }
}

fn tooltip(record: &StepRecord, meaning: &str, nanos: u64) -> String {
    let what = match record.kind {
        StepKind::Embed => "embedding".into(),
        StepKind::Output => "output and sampling".into(),
        StepKind::Draft => "drafting".into(),
        StepKind::Copy => "copy".into(),
        StepKind::Receive | StepKind::Send => "message".into(),
        StepKind::Kernel => "kernel".into(),
        StepKind::Synchronise => "waiting".into(),
        StepKind::Prepare => "making graphs".into(),
        StepKind::Compute | StepKind::Prefetch => match record.layers {
            Some([start, end]) if end > start + 1 => format!("layers {start} to {}", end - 1),
            Some([start, _]) => format!("layer {start}"),
            None => "output head".into(),
        },
    };
    format!("{meaning}: {what}, round {}, {}", record.round, numbers::format_milliseconds(millis(nanos)))
}
