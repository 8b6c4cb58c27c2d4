//! The events of a run as text and as JSON: what happened, when, and the time per token meanwhile.
//!
//! Not here: the numbers (`hearth_core::metrics::around`).

use hearth_core::metrics::around::Around;
use hearth_core::metrics::around::Phases;
use hearth_core::metrics::around::around;
use hearth_profiles::Seconds;
use hearth_schema::Trace;
use hearth_schema::happenings::Happening;
use hearth_schema::happenings::Sort;
use serde::Serialize;

/// An event as `--json` prints it.
#[derive(Debug, Serialize)]
pub struct EventSummary {
    #[serde(flatten)]
    happening: Happening,
    #[serde(flatten)]
    around: Around,
}

/// The events of a trace.
pub fn summaries(trace: &Trace) -> Vec<EventSummary> {
    let summary = |happening: &Happening| EventSummary {
        happening: happening.clone(),
        around: around(trace, happening),
    };
    trace.happenings.iter().map(summary).collect()
}

/// The events as text; empty if there were none.
pub fn lines(trace: &Trace) -> String {
    use std::fmt::Write;
    let mut text = String::new();
    for EventSummary { happening, around } in summaries(trace) {
        let Happening { sort, device, start, end, what, .. } = &happening;
        let time = |nanos: u64| Seconds::from_nanos(nanos).to_string();
        let whom = device.as_ref().map_or(String::new(), |name| format!("{name}: "));
        let what = if what.is_empty() { String::new() } else { format!(" ({what})") };
        let until = end.map_or("the end".into(), time);
        let _ = writeln!(text, "  {} to {until}  {whom}{}{what}", time(*start), sort.phrase());
        if matches!(sort, Sort::Silent | Sort::NotReplanned | Sort::OutOfMemory) {
            continue;
        }
        let _ = writeln!(
            text,
            "    ms a token: {}; the longest {}",
            phases(&around.tpot_ms, 1.0),
            phases(&around.longest_ms, 1.0)
        );
        if *sort == Sort::Memory {
            let _ = writeln!(text, "    memory pressure in %: {}", phases(&around.pressure, 100.0));
        }
    }
    if text.is_empty() { text } else { format!("what happened\n{text}") }
}

fn phases(phases: &Phases, factor: f64) -> String {
    let number = |value: Option<f64>| value.map_or("-".to_owned(), |value| format!("{:.1}", value * factor));
    let Phases { before, beside, after } = phases;
    format!("{} before, {} meanwhile, {} after", number(*before), number(*beside), number(*after))
}
