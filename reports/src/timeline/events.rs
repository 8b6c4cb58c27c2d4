//! Descriptions and times of the events during a run.

use hearth_schema::Trace;
use hearth_schema::run_events::RunEvent;

use crate::text::escape;

/// Describes an event briefly: the device, the kind of event, and details.
pub fn describe(event: &RunEvent) -> String {
    let device = event
        .device
        .as_ref()
        .map_or_else(String::new, |device| format!("{}: ", escape::sanitize_name(device)));
    let details = if event.details.is_empty() {
        String::new()
    } else {
        format!(" ({})", escape::sanitize_sentence(&event.details))
    };
    format!("{device}{}{details}", event.kind.description())
}

/// Returns the sorted times at which an event began or ended, in nanoseconds.
pub fn event_boundaries_ns(trace: &Trace) -> Vec<u64> {
    let ends = trace.run_events.iter().flat_map(|event| [Some(event.start_ns), event.end_ns]);
    let mut moments: Vec<u64> = ends.flatten().collect();
    moments.sort_unstable();
    moments.dedup();
    moments
}
