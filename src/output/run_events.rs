//! Formats the events of a run as text and as JSON, with the time per token before, during and after each event.

use std::fmt::Write;

use hearth_core::metrics::event_impact::{EventImpact, PhaseValues, event_impact};
use hearth_profiles::Seconds;
use hearth_schema::Trace;
use hearth_schema::run_events::{RunEvent, RunEventKind};
use serde::Serialize;

use super::escape_line;

/// An event of a run and its effect on the time per token, as `--json` prints them.
#[derive(Debug, Serialize)]
pub struct EventSummary {
    #[serde(flatten)]
    run_event: RunEvent,
    #[serde(flatten)]
    impact: EventImpact,
}

pub fn summaries(trace: &Trace) -> Vec<EventSummary> {
    let summary = |run_event: &RunEvent| EventSummary {
        run_event: run_event.clone(),
        impact: event_impact(trace, run_event),
    };
    trace.run_events.iter().map(summary).collect()
}

/// Formats the events of a run as text; empty if the run had no events.
pub fn format_events(trace: &Trace) -> String {
    let mut text = String::new();
    for EventSummary { run_event, impact } in summaries(trace) {
        let RunEvent { kind, device, start_ns: start, end_ns: end, details: what, .. } = &run_event;
        let time = |nanos: u64| Seconds::from_nanos(nanos).to_string();
        let name = device.as_ref().map_or(String::new(), |name| format!("{name}: "));
        let what = if what.is_empty() { String::new() } else { format!(" ({what})") };
        let until = end.map_or("the end".into(), time);
        let event = format!("{} to {until}  {name}{}{what}", time(*start), kind.description());
        let _ = writeln!(text, "  {}", escape_line(&event));
        if matches!(kind, RunEventKind::Silent | RunEventKind::NotReplanned | RunEventKind::OutOfMemory) {
            continue;
        }
        let (mean, longest) = (phases(&impact.tpot_ms, 1.0), phases(&impact.max_tpot_ms, 1.0));
        let _ = writeln!(text, "    ms per token: {mean}; longest token: {longest}");
        if *kind == RunEventKind::Memory {
            let _ = writeln!(text, "    memory pressure in %: {}", phases(&impact.memory_pressure, 100.0));
        }
    }
    if text.is_empty() { text } else { format!("events\n{text}") }
}

fn phases(phases: &PhaseValues, factor: f64) -> String {
    let number = |value: Option<f64>| value.map_or("-".to_owned(), |value| format!("{:.1}", value * factor));
    let PhaseValues { before, during, after } = phases;
    format!("{} before, {} during, {} after", number(*before), number(*during), number(*after))
}
