//! What did every device do while one token went around the ring?
//!
//! The picture of the prima.cpp paper's Fig. 6: a row for each processor and disk, time to the right,
//! reading ahead in green, computing that waits for the disk in orange, messages as arrows, waiting
//! left empty. It shows the token of median duration, which is more like the others than any one.
//!
//! Not here: how steps are split into blocks ([`crate::blocks`]).

use std::collections::BTreeSet;

use hearth_schema::Trace;
use hearth_schema::trace::Kind;
use hearth_schema::trace::Record;
use hearth_schema::trace::Resource;

use crate::blocks::{self, Activity, Block, Lane};
use crate::comparison::Run;
use crate::happenings;
use crate::messages;
use crate::rounding;
use crate::svg::{self, Anchor, Drawing};
use crate::tokens::Token;

const GUTTER: u32 = 40;
const NAME_HEIGHT: f64 = 20.0;
const LANE_HEIGHT: f64 = 15.0;
const LANE_STEP: f64 = 18.0;
const DEVICE_GAP: f64 = 8.0;
const AXIS_HEIGHT: f64 = 20.0;
/// Blocks of one kind closer than this share of the width are drawn as one: nobody could tell them
/// apart, and a trace of a million steps still makes a picture that opens.
const MERGE_SHARE: f64 = 0.0005;
/// More arrows than this would be a grey blur.
const MOST_ARROWS: usize = 4000;

/// The order of the legend.
const LEGEND: [Activity; 7] = [
    Activity::Cpu,
    Activity::Gpu,
    Activity::Copy,
    Activity::Queue,
    Activity::Demand,
    Activity::Hidden,
    Activity::Beside,
];

/// The picture of one token. `span` is the time that the whole width stands for, in nanoseconds.
pub fn draw(run: &Run, trace: &Trace, token: Token, span: u64) -> Drawing {
    let title = format!("{}: one token, {}", run.heading(), rounding::milliseconds(millis(token.duration())));
    let mut drawing = Drawing::new(&format!("gantt-{}", run.label), &title, GUTTER);
    let blocks = blocks::within(&trace.records, [token.start, token.end]);
    let rows = rows(run, trace);
    let bottom = rows.last().map_or(0.0, |row| row.top + LANE_HEIGHT) + DEVICE_GAP;
    axis(&mut drawing, span, bottom);
    for row in &rows {
        if row.lane == Lane::Cpu {
            let name = &run.metrics.devices[usize::from(row.device)].name;
            drawing.label("name", 0.0, row.top - 5.0, name);
        }
        let label = match row.lane {
            Lane::Cpu => "cpu",
            Lane::Gpu => "gpu",
            Lane::Disk => "disk",
        };
        drawing.label("tick", 0.0, row.top + LANE_HEIGHT - 3.5, label);
        let width = token.duration() as f64 / span.max(1) as f64;
        drawing.block("lane", [0.0, width], [row.top, row.top + LANE_HEIGHT], "");
    }
    fill(&mut drawing, &rows, &blocks, trace, token, span);
    arrows(&mut drawing, &rows, trace, token, span);
    for moment in happenings::moments(trace) {
        if (token.start..=token.end).contains(&moment) {
            let x = share(moment, token, span);
            drawing.line("happening", (x, 2.0), (x, bottom));
            drawing.explain("happening", "something happened");
        }
    }
    drawing
}

struct Row {
    device: u16,
    lane: Lane,
    top: f64,
}

/// A processor row for every device, the others for those that use them anywhere in the trace.
fn rows(run: &Run, trace: &Trace) -> Vec<Row> {
    let mut used = BTreeSet::new();
    for record in &trace.records {
        let demand =
            || blocks::parts(record).iter().any(|&(kind, nanos)| kind == Activity::Demand && nanos > 0);
        let lane = match record.resource {
            Resource::Gpu => Lane::Gpu,
            Resource::DiskDemand | Resource::DiskPrefetch => Lane::Disk,
            Resource::Cpu if blocks::is_work(record) && demand() => Lane::Disk,
            _ => continue,
        };
        used.insert((record.device, lane));
    }
    let mut rows = Vec::new();
    let mut top = NAME_HEIGHT;
    for device in 0..run.metrics.devices.len() as u16 {
        for lane in [Lane::Cpu, Lane::Gpu, Lane::Disk] {
            if lane == Lane::Cpu || used.contains(&(device, lane)) {
                rows.push(Row { device, lane, top });
                top += LANE_STEP;
            }
        }
        top += NAME_HEIGHT + DEVICE_GAP;
    }
    rows
}

fn axis(drawing: &mut Drawing, span: u64, bottom: f64) {
    let most = millis(span);
    let (ticks, digits) = svg::ticks(most, 6);
    for tick in ticks {
        let x = if most > 0.0 { tick / most } else { 0.0 };
        // No line behind the names, which reach over the gutter's edge.
        if tick > 0.0 {
            drawing.line("grid", (x, 2.0), (x, bottom));
        }
        let text = rounding::tick(tick, digits);
        drawing.text("tick", (x, 0.0), bottom + 14.0, Anchor::Middle, &text);
    }
    drawing.label("tick", 0.0, bottom + 14.0, "ms");
    drawing.reach(bottom + AXIS_HEIGHT);
}

fn fill(drawing: &mut Drawing, rows: &[Row], blocks: &[Block], trace: &Trace, token: Token, span: u64) {
    for activity in LEGEND.into_iter().filter(|shown| blocks.iter().any(|block| block.activity == *shown)) {
        let (class, meaning) = look(activity);
        drawing.explain(class, meaning);
    }
    let near = (span as f64 * MERGE_SHARE) as u64;
    let mut index = 0;
    while index < blocks.len() {
        let first = blocks[index];
        let (mut end, mut count) = (first.end, 1);
        while let Some(next) = blocks.get(index + count) {
            let same = (next.device, next.lane, next.activity) == (first.device, first.lane, first.activity);
            let small = next.end - next.start < near || end - first.start < near;
            if !(same && small && next.start <= end.saturating_add(near)) {
                break;
            }
            end = end.max(next.end);
            count += 1;
        }
        index += count;
        let Some(row) = rows.iter().find(|row| (row.device, row.lane) == (first.device, first.lane)) else {
            continue;
        };
        let (class, meaning) = look(first.activity);
        let hover = if count == 1 {
            hover(&trace.records[first.record], meaning, first.end - first.start)
        } else {
            format!("{meaning}: {count} steps, within {}", rounding::milliseconds(millis(end - first.start)))
        };
        let across = [share(first.start, token, span), share(end, token, span)];
        drawing.block(class, across, [row.top, row.top + LANE_HEIGHT], &hover);
    }
}

fn hover(record: &Record, meaning: &str, nanos: u64) -> String {
    let what = match record.kind {
        Kind::Embed => "embedding".into(),
        Kind::Output => "output and sampling".into(),
        Kind::Draft => "drafting".into(),
        Kind::Copy => "copy".into(),
        Kind::Receive | Kind::Send => "message".into(),
        Kind::Kernel => "kernel".into(),
        Kind::Synchronise => "waiting".into(),
        Kind::Prepare => "making graphs".into(),
        Kind::Compute | Kind::Prefetch => match record.layers {
            Some([start, end]) if end > start + 1 => format!("layers {start} to {}", end - 1),
            Some([start, _]) => format!("layer {start}"),
            None => "output head".into(),
        },
    };
    format!("{meaning}: {what}, round {}, {}", record.round, rounding::milliseconds(millis(nanos)))
}

fn look(activity: Activity) -> (&'static str, &'static str) {
    match activity {
        Activity::Cpu => ("cpu", "computing, CPU"),
        Activity::Gpu => ("gpu", "computing, GPU"),
        Activity::Copy => ("memory", "copying"),
        Activity::Queue => ("queue", "queueing"),
        Activity::Demand => ("demand", "waiting for the disk"),
        Activity::Hidden => ("hidden", "reading ahead, hidden"),
        Activity::Beside => ("beside", "reading ahead beside its own computing"),
    }
}

fn arrows(drawing: &mut Drawing, rows: &[Row], trace: &Trace, token: Token, span: u64) {
    let records: Vec<Record> =
        trace.records.iter().filter(|record| record.pass == token.pass).cloned().collect();
    let middle = |device: u16, lane: Lane| {
        let row = rows.iter().find(|row| (row.device, row.lane) == (device, lane));
        row.map(|row| row.top + LANE_HEIGHT / 2.0)
    };
    for message in messages::among(&records).into_iter().take(MOST_ARROWS) {
        let (sent, received) = (&records[message.sent], &records[message.received]);
        let inside = |at: u64| (token.start..=token.end).contains(&at);
        if !inside(sent.start) || !inside(received.end) {
            continue;
        }
        // From the row that worked last to the one that works next.
        let work =
            |device: u16| records.iter().filter(move |step| step.device == device && blocks::is_work(step));
        let before = work(sent.device).filter(|step| step.end <= sent.start).max_by_key(|step| step.end);
        let after =
            work(received.device).filter(|step| step.start >= received.end).min_by_key(|step| step.start);
        let lane = |step: Option<&Record>| match step {
            Some(step) if step.resource == Resource::Gpu => Lane::Gpu,
            _ => Lane::Cpu,
        };
        let ends = (middle(sent.device, lane(before)), middle(received.device, lane(after)));
        let (Some(from), Some(to)) = ends else { continue };
        drawing.explain("message", "message");
        let tail = (share(sent.start, token, span), from);
        drawing.arrow("message", tail, (share(received.end, token, span), to));
    }
}

fn share(at: u64, token: Token, span: u64) -> f64 {
    at.saturating_sub(token.start) as f64 / span.max(1) as f64
}

fn millis(nanos: u64) -> f64 {
    nanos as f64 * 1e-6
}
