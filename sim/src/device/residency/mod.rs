//! Weight residency: a computation's view of the helper thread that reads a device's weights ahead.
//!
//! The plan's policy chooses the thread: [`ReadAhead`] advises or populates and leaves eviction to the system;
//! [`ManagedStream`] keeps some pieces and streams the others. A walk asks either one which chunks are available, and what
//! to do if there are none.

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

/// The shortest system call, which keeps events apart.
/// source: assumed
const SYSTEM_CALL: Nanos = 1000;

/// The most chunks computed at once while the helper thread may evict them.
const MAX_BATCH: u32 = 4;

/// The state of the weights at the position of a computation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Availability {
    /// This many chunks can be used now.
    Ready(u32),
    /// The helper thread is about to bring the chunk: wait for it.
    Pending,
    /// The chunk must be faulted in.
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
            WeightResidency::System(helper) => helper.read(request),
            WeightResidency::Managed(stream) => stream.request(request),
        }
    }

    /// Begins the computation of a part. Returns whether the helper must be woken.
    pub fn begin(&mut self, request: PartRequest, storage: &Storage) -> bool {
        match self {
            WeightResidency::System(_) => false,
            WeightResidency::Managed(stream) => stream.begin(request, storage),
        }
    }

    pub fn end(&mut self) {
        if let WeightResidency::Managed(stream) = self {
            stream.end();
        }
    }

    /// Evicts a part; a managed stream has done so piece by piece. Returns whether the helper must be woken.
    pub fn release(&mut self, request: PartRequest) -> bool {
        match self {
            WeightResidency::System(helper) => helper.evict(request),
            WeightResidency::Managed(_) => false,
        }
    }

    /// Returns how many of these chunks can be used now.
    pub fn find(&self, chunks: Range<Chunk>, storage: &Storage) -> Availability {
        let helper = match self {
            WeightResidency::System(helper) => helper,
            WeightResidency::Managed(stream) => return stream.find(chunks, storage),
        };
        let max = if helper.is_idle() { u32::MAX } else { MAX_BATCH };
        let end = chunks.end.min(chunks.start.saturating_add(max));
        let cache = storage.cache();
        match (chunks.start..end).take_while(|&chunk| cache.holds(chunk)).count() as u32 {
            0 => Availability::Missing,
            ready => Availability::Ready(ready),
        }
    }

    /// Faults at a missing chunk, of which the computation needs `unit` bytes.
    pub fn fault(&mut self, now: Nanos, chunk: Chunk, unit: Bytes, storage: &mut Storage) -> Touch {
        match self {
            // An embedding row; of anything else a whole chunk is needed.
            WeightResidency::System(_) if unit < storage.chunk() => storage.read_uncached(now, unit),
            WeightResidency::System(_) => storage.touch(now, chunk, Flow::Fault),
            WeightResidency::Managed(stream) => stream.fault(now, chunk, unit, storage),
        }
    }

    /// Whether the system decides what stays in memory. Then embedding rows stay after their use, because they are
    /// small and used often, and a chunk may be evicted right after its use. A managed device evicts rows at once, and
    /// a chunk only when it is done with it.
    pub fn is_left_to_system(&self) -> bool {
        matches!(self, WeightResidency::System(_))
    }

    /// Reports chunks as used. Returns whether the helper must be woken.
    pub fn used(&mut self, chunks: Range<Chunk>) -> bool {
        match self {
            WeightResidency::System(_) => false,
            WeightResidency::Managed(stream) => stream.used(chunks),
        }
    }

    /// Runs the helper thread until it has used time. Returns the time at which it continues, `None` if it waits for an
    /// event.
    pub fn work(&mut self, now: Nanos, storage: &mut Storage) -> Option<Nanos> {
        match self {
            WeightResidency::System(helper) => helper.work(now, storage),
            WeightResidency::Managed(stream) => stream.work(now, storage),
        }
    }

    /// Handles the arrival of a chunk. Returns whether the helper must be woken.
    pub fn arrived(&mut self, now: Nanos, chunk: Chunk) -> bool {
        match self {
            WeightResidency::System(helper) => helper.arrived(now, chunk),
            WeightResidency::Managed(stream) => stream.arrived(now, chunk),
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

/// The record of a read for a part, which starts with `bytes`.
fn read_record(device: u16, origin: ReadOrigin, now: Nanos, bytes: Bytes) -> Record {
    let place = (origin.pass, origin.round);
    let line = start_record(device.into(), Resource::DiskPrefetch, Kind::Prefetch, place, now);
    Record { layers: origin.layers, bytes: bytes.0, ..line }
}
