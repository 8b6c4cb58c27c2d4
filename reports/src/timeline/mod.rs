//! Timelines of a trace: the activities of each device, its messages and its events.

pub mod activities;
pub mod events;
pub mod messages;

#[cfg(test)]
use hearth_schema::trace::{Resource, StepKind, StepRecord};

/// Returns a record of pass 0 and round 0 that has no layers, bytes, peer or cost.
#[cfg(test)]
fn record(device: u16, resource: Resource, kind: StepKind, [start, end]: [u64; 2]) -> StepRecord {
    StepRecord { device_index: device, resource, kind, start_ns: start, end_ns: end, ..StepRecord::default() }
}
