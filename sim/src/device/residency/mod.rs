//! Weight residency: a computation's view of the helper thread that reads a device's weights ahead.
//!
//! The plan's policy selects the thread: [`ReadAhead`] advises or populates and leaves eviction to the system;
//! [`ManagedStream`] keeps some pieces and streams the others. Both tell a walk which chunks are available, and
//! whether to wait or to fault if there are none.

pub mod managed;
pub mod read_ahead;

use std::ops::Range;

use hearth_core::residency::{PartRequest, ReadOrigin};
use hearth_profiles::Bytes;
use hearth_schema::trace::{Kind, Record, Resource};

use crate::engine::Nanos;
use crate::page_cache::Chunk;
use crate::resource::Flow;
use crate::trace::start_record;

use super::storage::{Storage, Touch};

pub use managed::ManagedStream;
pub use read_ahead::ReadAhead;

/// Minimum duration of a system call in nanoseconds, so that events do not coincide.
/// source: assumed
const SYSTEM_CALL: Nanos = 1000;

/// Maximum number of chunks computed as one batch while the helper thread may evict them.
const MAX_BATCH: u32 = 4;

/// The state of the weights at the position of a computation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Availability {
    /// This many chunks can be used now.
    Ready(u32),
    /// The helper thread will read the chunk: wait for it.
    Pending,
    /// The chunk must be read by a page fault.
    Missing,
}

/// The policy that reads a device's weights before their use and evicts them after it.
#[derive(Debug, Clone)]
pub enum WeightResidency {
    System(ReadAhead),
    Managed(Box<ManagedStream>),
}

impl WeightResidency {
    /// Requests a part that will be needed. Returns whether the helper must be woken.
    pub fn request(&mut self, request: PartRequest) -> bool {
        match self {
            WeightResidency::System(helper) => helper.queue_read(request),
            WeightResidency::Managed(stream) => stream.request(request),
        }
    }

    /// Begins the computation of a part. Returns whether the helper must be woken.
    pub fn begin_part(&mut self, request: PartRequest, storage: &Storage) -> bool {
        match self {
            WeightResidency::System(_) => false,
            WeightResidency::Managed(stream) => stream.begin_part(request, storage),
        }
    }

    /// Ends the computation of a part.
    pub fn end_part(&mut self) {
        if let WeightResidency::Managed(stream) = self {
            stream.end_part();
        }
    }

    /// Evicts a part; a managed stream does so piece by piece instead. Returns whether the helper must be woken.
    pub fn release(&mut self, request: PartRequest) -> bool {
        match self {
            WeightResidency::System(helper) => helper.queue_eviction(request),
            WeightResidency::Managed(_) => false,
        }
    }

    /// Returns how many of these chunks can be used now.
    pub fn availability(&self, chunks: Range<Chunk>, storage: &Storage) -> Availability {
        let helper = match self {
            WeightResidency::System(helper) => helper,
            WeightResidency::Managed(stream) => return stream.availability(chunks, storage),
        };
        let max = if helper.is_idle() { u32::MAX } else { MAX_BATCH };
        let end = chunks.end.min(chunks.start.saturating_add(max));
        let cache = storage.cache();
        match (chunks.start..end).take_while(|&chunk| cache.holds(chunk)).count() as u32 {
            0 => Availability::Missing,
            ready => Availability::Ready(ready),
        }
    }

    /// Handles a page fault at a missing chunk, of which the computation needs `unit` bytes.
    pub fn on_fault(&mut self, now: Nanos, chunk: Chunk, unit: Bytes, storage: &mut Storage) -> Touch {
        match self {
            // An embedding row: all other computations need whole chunks.
            WeightResidency::System(_) if unit < storage.chunk_size() => storage.read_uncached(now, unit),
            WeightResidency::System(_) => storage.touch(now, chunk, Flow::Fault),
            WeightResidency::Managed(stream) => stream.on_fault(now, chunk, unit, storage),
        }
    }

    /// Whether the system decides what stays in memory. Then embedding rows remain in memory after their use, because
    /// they are small and used often, and a chunk may be evicted right after its use. A managed device evicts a row
    /// at once, and a chunk only when the computation no longer needs it.
    pub fn is_left_to_system(&self) -> bool {
        matches!(self, WeightResidency::System(_))
    }

    /// Marks chunks as used. Returns whether the helper must be woken.
    pub fn mark_used(&mut self, chunks: Range<Chunk>) -> bool {
        match self {
            WeightResidency::System(_) => false,
            WeightResidency::Managed(stream) => stream.mark_used(chunks),
        }
    }

    /// Runs the helper thread until it has spent time. Returns the time at which it continues; `None` if it waits for
    /// an event.
    pub fn run_helper(&mut self, now: Nanos, storage: &mut Storage) -> Option<Nanos> {
        match self {
            WeightResidency::System(helper) => helper.run(now, storage),
            WeightResidency::Managed(stream) => stream.run_helper(now, storage),
        }
    }

    /// Handles the arrival of a chunk. Returns whether the helper must be woken.
    pub fn on_arrival(&mut self, now: Nanos, chunk: Chunk) -> bool {
        match self {
            WeightResidency::System(helper) => helper.on_arrival(now, chunk),
            WeightResidency::Managed(stream) => stream.on_arrival(now, chunk),
        }
    }

    /// Moves the records of finished reads to the trace.
    pub fn report(&mut self, records: &mut Vec<Record>) {
        match self {
            WeightResidency::System(helper) => helper.report(records),
            WeightResidency::Managed(stream) => stream.report(records),
        }
    }

    /// Moves the records of all reads to the trace; an unfinished read ends at its progress so far.
    pub fn flush(&mut self, now: Nanos, records: &mut Vec<Record>) {
        match self {
            WeightResidency::System(helper) => helper.flush(now, records),
            WeightResidency::Managed(stream) => stream.flush(now, records),
        }
    }
}

/// Returns the record of a read for a part that begins with `bytes`.
fn read_record(device: u16, origin: ReadOrigin, now: Nanos, bytes: Bytes) -> Record {
    let place = (origin.pass, origin.round);
    let record = start_record(device.into(), Resource::DiskPrefetch, Kind::Prefetch, place, now);
    Record { layers: origin.layers, bytes: bytes.0, ..record }
}
