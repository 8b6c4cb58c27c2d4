//! Weight residency: the interface between a computation and the helper thread that reads a device's weights ahead.
//!
//! The plan's residency policy selects the helper thread. [`ReadAheadThread`] prefetches with `madvise` and leaves
//! eviction to the system; [`ManagedWeights`] keeps some pieces and streams the others. Both tell the computation which
//! chunks are available, and whether to wait for a missing chunk or to cause a page fault.

mod managed;
mod read_ahead;

use std::ops::Range;

use hearth_core::residency::{ReadOrigin, WeightPart};
use hearth_profiles::Bytes;
use hearth_schema::trace::{Resource, StepKind, StepRecord};

use crate::engine::Nanos;
use crate::page_cache::Chunk;
use crate::trace::new_record;

use super::layout::WeightLayout;
use super::mapped_computation::ExpertGroup;
use super::storage::{Storage, TouchResult};

pub use managed::ManagedWeights;
pub use read_ahead::ReadAheadThread;

/// Minimum duration of a system call in nanoseconds, so that successive calls have different times.
/// source: assumed
const SYSTEM_CALL: Nanos = 1000;

/// Whether the next chunks of a computation are in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Availability {
    /// This number of chunks can be used now.
    Ready(u32),
    /// The helper thread will read the next chunk: wait for its arrival.
    Pending,
    /// The next chunk must be read by a page fault.
    Missing,
}

/// A residency policy: reads a device's weights before their use and evicts them after their use.
pub trait WeightResidency: std::fmt::Debug {
    /// Returns whether the system decides which weights stay in memory. Then embedding rows remain in memory after
    /// their use, because they are small and used often, and any chunk may be evicted right after its use. Under
    /// managed residency a row is evicted at once, and a chunk only when the computation no longer needs it.
    fn leaves_eviction_to_system(&self) -> bool;
    /// Returns chunks to read in order. Reading them leaves the page cache in the state that earlier tokens leave.
    fn warm_chunks(&self, layout: &WeightLayout) -> Vec<Chunk>;
    /// Requests the weights of a part of the model before their use. Returns whether to wake the helper thread.
    fn request(&mut self, request: WeightPart) -> bool;
    /// Handles the start of the computation of a part of the model. Returns whether to wake the helper thread.
    fn begin_part(&mut self, _request: WeightPart, _storage: &Storage) -> bool {
        false
    }
    fn end_part(&mut self) {}
    /// Requests the eviction of a used part, unless the policy evicts pieces. Returns whether to wake the helper
    /// thread.
    fn release(&mut self, _request: WeightPart) -> bool {
        false
    }
    /// Returns how many of the first chunks of `chunks` can be used now or, if none, whether to wait or to fault.
    fn availability(&self, chunks: Range<Chunk>, storage: &Storage) -> Availability;
    /// Handles a page fault at a missing chunk; the computation needs `unit` bytes of this chunk.
    fn on_fault(&mut self, now: Nanos, chunk: Chunk, unit: Bytes, storage: &mut Storage) -> TouchResult;
    /// Handles the use of chunks by the computation. Returns whether to wake the helper thread.
    fn mark_used(&mut self, _chunks: Range<Chunk>) -> bool {
        false
    }
    /// Requests experts of a layer, which the computation is about to use, and starts to read those that are not in
    /// memory. Returns these, if the policy reads experts.
    fn request_experts(&mut self, _now: Nanos, _group: &ExpertGroup, _storage: &mut Storage) -> Vec<u32> {
        Vec::new()
    }
    /// Releases experts after their use. Returns whether to wake the helper thread.
    fn release_experts(&mut self, _layer: u32, _experts: &[u32]) -> bool {
        false
    }
    /// Returns how many experts of a layer are requested together.
    fn experts_per_group(&self) -> usize {
        usize::MAX
    }
    /// Runs the helper thread until a step takes time. Returns the time to continue; `None` if it waits for an event.
    fn run_helper(&mut self, now: Nanos, storage: &mut Storage) -> Option<Nanos>;
    /// Handles the arrival of a chunk. Returns whether to wake the helper thread.
    fn on_arrival(&mut self, now: Nanos, chunk: Chunk) -> bool;
    /// Moves the trace records of finished reads to `records`.
    fn report_finished_reads(&mut self, records: &mut Vec<StepRecord>);
    /// Moves the trace records of all reads to `records`; an unfinished read ends at `now`.
    fn flush_records(&mut self, now: Nanos, records: &mut Vec<StepRecord>);
}

fn read_record(device: u16, origin: ReadOrigin, now: Nanos, bytes: Bytes) -> StepRecord {
    let step = (origin.pass, origin.round);
    let record = new_record(device.into(), Resource::DiskPrefetch, StepKind::Prefetch, step, now);
    StepRecord { layers: origin.layers, bytes: bytes.0, ..record }
}
