//! Descriptions and times of the events during a run.

use hearth_schema::Trace;
use hearth_schema::run_events::RunEvent;

use crate::text::escape::{sanitize_name, sanitize_sentence};

/// Describes an event briefly: the device, the kind of event, and details.
pub fn describe_event(event: &RunEvent) -> String {
    let RunEvent { kind, device, details, .. } = event;
    let device = device.as_ref().map_or_else(String::new, |name| format!("{}: ", sanitize_name(name)));
    let details =
        if details.is_empty() { String::new() } else { format!(" ({})", sanitize_sentence(details)) };
    format!("{device}{}{details}", kind.description())
}

/// Returns the sorted times at which the events of a trace began or ended, in nanoseconds.
pub fn event_boundaries_ns(trace: &Trace) -> Vec<u64> {
    let ends = trace.run_events.iter().flat_map(|event| [Some(event.start_ns), event.end_ns]);
    let mut moments: Vec<u64> = ends.flatten().collect();
    moments.sort_unstable();
    moments.dedup();
    moments
}
