//! Events of a run: their descriptions and their moments.
//!
//! Not here: the time of a token before, during and after them ([`crate::sections`]).

use hearth_schema::Trace;
use hearth_schema::run_events::RunEvent;

use crate::text::escape;

/// An event in a few words: the device, what happened, and the details.
pub fn describe(event: &RunEvent) -> String {
    let device =
        event.device.as_ref().map_or_else(String::new, |device| format!("{}: ", escape::name(device)));
    let details =
        if event.what.is_empty() { String::new() } else { format!(" ({})", escape::phrase(&event.what)) };
    format!("{device}{}{details}", event.kind.phrase())
}

/// The moments at which an event began or ended, in nanoseconds.
pub fn moments(trace: &Trace) -> Vec<u64> {
    let ends = trace.run_events.iter().flat_map(|event| [Some(event.start), event.end]);
    let mut moments: Vec<u64> = ends.flatten().collect();
    moments.sort_unstable();
    moments.dedup();
    moments
}
