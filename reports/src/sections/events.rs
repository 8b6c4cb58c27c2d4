//! The section on the events during a run, such as slow, lost or memory-constrained devices, and on their effects.
//!
//! The section has a table with the time per token before, during and after each event, a table of memory pressure if
//! other programs allocated memory, and a sentence on the cost of each lost device.

use hearth_core::metrics::event_impact::{EventImpact, PhaseValues, event_impact};
use hearth_schema::Trace;
use hearth_schema::run_events::{RunEvent, RunEventKind};

use crate::comparison::Run;
use crate::document::{Block, Table, Text};
use crate::text::{escape, numbers};
use crate::timeline::events::describe_event;

pub fn section_blocks(runs: &[(&Run, &Trace)]) -> Vec<Block> {
    let mut blocks = Vec::new();
    for (run, trace) in runs.iter().filter(|(_, trace)| !trace.run_events.is_empty()) {
        let events: Vec<(&RunEvent, EventImpact)> =
            trace.run_events.iter().map(|event| (event, event_impact(trace, event))).collect();
        blocks.push(Block::Table(times(run, &events)));
        blocks.extend(pressure(run, &events).into_block());
        blocks.extend(lost_devices(trace, &events).map(Block::Paragraph));
    }
    if !blocks.is_empty() {
        blocks.push(Block::Definitions("What the columns mean", DEFINITIONS.to_vec()));
    }
    blocks
}

const DEFINITIONS: [(&str, &str); 3] = [
    ("Before", "Tokens that ended before the event began."),
    ("During", "Tokens that overlap with the event."),
    ("After", "Tokens that began after the event ended."),
];

fn times(run: &Run, events: &[(&RunEvent, EventImpact)]) -> Table {
    let row = |(event, impact): &(&RunEvent, EventImpact)| {
        let time = |nanos: u64| Text::from(numbers::format_milliseconds(nanos as f64 * 1e-6));
        let cell = |value: Option<f64>| Text::from_option(value.map(numbers::format_milliseconds));
        let PhaseValues { before, during, after } = impact.tpot_ms;
        vec![
            Text::default().append_name(describe_event(event)),
            time(event.start_ns),
            event.end_ns.map_or_else(|| Text::from("end of run"), time),
            cell(before),
            cell(during),
            cell(after),
            cell(impact.max_tpot_ms.during),
        ]
    };
    let caption = format!("{}: events, and the mean time per token around them.", run.heading());
    let headings = ["Event", "From", "To", "Before", "During", "After", "Longest during"];
    Table::new(caption, headings, events.iter().map(row))
}

fn pressure(run: &Run, events: &[(&RunEvent, EventImpact)]) -> Table {
    let row = |(event, impact): &(&RunEvent, EventImpact)| {
        let cell = |value: Option<f64>| Text::from_option(value.map(numbers::format_percent));
        let PhaseValues { before, during, after } = impact.memory_pressure;
        vec![Text::default().append_name(describe_event(event)), cell(before), cell(during), cell(after)]
    };
    let caption = format!("{}: maximum memory pressure of the device.", run.heading());
    let rows = events.iter().filter(|(event, _)| event.kind == RunEventKind::Memory).map(row);
    Table::new(caption, ["Event", "Before", "During", "After"], rows)
}

/// Describes the cost of each lost device: the time until the loss was detected, and the time until the first token of
/// the new ring.
fn lost_devices(trace: &Trace, events: &[(&RunEvent, EventImpact)]) -> Option<Text> {
    let mut text = Text::default();
    for (silent, _) in events.iter().filter(|(event, _)| event.kind == RunEventKind::Silent) {
        let Some(detected) = silent.end_ns else { continue };
        let replanned =
            trace.run_events.iter().find(|it| it.kind == RunEventKind::Replanned && it.start_ns == detected);
        let device = silent.device.as_deref().unwrap_or("the ring");
        let millis = |from: u64, to: u64| numbers::format_milliseconds(to.saturating_sub(from) as f64 * 1e-6);
        text = text.append_name(escape::sanitize_name(device)).append_words(format!(
            " was detected as lost {} after its last message",
            millis(silent.start_ns, detected)
        ));
        text = match replanned.and_then(|it| it.end_ns) {
            Some(first_token) => text.append_words(format!(
                "; the first token of the new ring followed {} later, {} after the last message. ",
                millis(detected, first_token),
                millis(silent.start_ns, first_token)
            )),
            None => text.append_words("; no token followed. "),
        };
    }
    (!text.0.is_empty()).then_some(text)
}
