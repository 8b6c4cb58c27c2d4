//! How does a line of the trace begin?
//!
//! Not here: what becomes of it. Whoever begins it sets its end, its cost and what else it has.

use hearth_schema::trace::Kind;
use hearth_schema::trace::Record;
use hearth_schema::trace::Resource;

use crate::engine::Nanos;

/// A line of a device about a pass, by index, and a round, which begins and ends now.
pub fn begun(device: usize, resource: Resource, kind: Kind, (pass, round): (u32, u32), now: Nanos) -> Record {
    Record {
        device: device as u16,
        resource,
        kind,
        pass,
        round,
        layers: None,
        start: now,
        end: now,
        bytes: 0,
        peer: None,
        cost: None,
    }
}
