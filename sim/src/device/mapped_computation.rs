//! Mapped computation: computes with memory-mapped weights, some of which are still on disk.
//!
//! A [`MappedComputation`] uses the weights as the executor's threads do, layer by layer and chunk by chunk. It
//! computes with the chunks that are in memory; for a missing chunk it blocks in a page fault or waits for the helper
//! thread. Consecutive available chunks ([`crate::device::residency`]) are used in one batch.

use std::collections::VecDeque;
use std::ops::Range;

use hearth_core::expert_cache::ExpertId;
use hearth_profiles::{Bytes, Seconds};
use hearth_schema::trace::{StepCost, StepKind, StepRecord};

use super::residency::{Availability, WeightResidency};
use super::storage::{NO_MEMORY_RETRY_DELAY, Storage, TouchResult, UNCACHED_READ};
use crate::engine::Nanos;
use crate::page_cache::Chunk;
use crate::random::{self, StreamPurpose};
use crate::resource::ReadKind;

/// Probability that a thread that was woken for a page also needs the previous page, because the page boundary lies
/// inside the load instruction that faulted and is repeated.
/// source: computed for `Q4_K`, where 128 of the 144 bytes of a block are loaded 32 bytes at a time, from multiples
/// of 16: of nine possible boundaries four lie inside a load. Other formats are assumed to be similar.
const CROSSING_PROBABILITY: f64 = 4.0 / 9.0;

/// A range of consecutive chunks of weights, and the time of computing with all of them.
#[derive(Debug)]
pub struct Segment {
    pub chunks: Range<Chunk>,
    /// Time of computing with the segment if all its chunks are in memory and no other program runs.
    pub compute_time: Seconds,
    /// Number of bytes of each chunk that the computation needs.
    pub bytes_per_chunk: Bytes,
    /// The expert that the segment belongs to, if any.
    pub expert: Option<ExpertId>,
}

/// A group of experts of a layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExpertGroup {
    pub layer: u32,
    pub experts: Vec<u32>,
    /// Whether the group is the first one of a batch in the layer.
    pub is_first: bool,
}

/// A step of a computation.
#[derive(Debug)]
pub enum ComputationStep {
    Compute(Segment),
    /// Request the experts of a group, which are used by later segments.
    Request(ExpertGroup),
    /// Release the experts of a group.
    Release(ExpertGroup),
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub enum ComputationAction {
    Compute(Seconds),
    /// Wait until the next chunk has arrived, or the helper thread has made the chunk available.
    Wait,
    Retry(Nanos),
    Done,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Waiting {
    No,
    /// The computation waits for free memory for this chunk.
    Memory(Chunk),
    /// The computation waits for the arrival of this chunk, or of pages that bypass the page cache.
    Chunk(Chunk),
    /// The chunk has arrived and the thread is being woken.
    Woken(Chunk),
    Helper,
}

#[derive(Debug)]
pub struct MappedComputation {
    /// The trace record of the computation, with its bytes and costs so far.
    pub record: StepRecord,
    work_left: VecDeque<ComputationStep>,
    /// Whether the helper thread has to be woken, because experts were released.
    wakes_helper: bool,
    /// Number of threads that compute together. They also share the kernel time for page faults equally.
    threads: f64,
    seed: u64,
    chunk_time: Seconds,
    /// Compute time of preceding segments without chunks, which is added to the time of the next batch.
    carried_time: Seconds,
    /// The time at which the kernel's work for the current page fault ends.
    fault_until: Nanos,
    waiting: Waiting,
    /// Whether the bytes of the next chunk are already counted in the record.
    counted: bool,
    /// Whether the chunk before the awaited chunk was in memory when the wait began.
    previous_was_cached: bool,
    batch: Range<Chunk>,
    since: Nanos,
    work: Seconds,
}

impl MappedComputation {
    /// Creates a computation in which `threads` threads together do `work` in order.
    pub fn new(mut record: StepRecord, work: Vec<ComputationStep>, threads: f64, seed: u64) -> Self {
        let zero = Seconds(0.0);
        record.cost = Some(StepCost::default());
        let mut computation = Self {
            record,
            work_left: work.into(),
            wakes_helper: false,
            threads,
            seed,
            chunk_time: zero,
            carried_time: zero,
            fault_until: 0,
            waiting: Waiting::No,
            counted: false,
            previous_was_cached: false,
            batch: 0..0,
            since: 0,
            work: zero,
        };
        computation.enter();
        computation
    }

    fn enter(&mut self) {
        let is_empty = |work: &mut ComputationStep| matches!(work, ComputationStep::Compute(segment) if segment.chunks.is_empty());
        while let Some(ComputationStep::Compute(empty)) = self.work_left.pop_front_if(is_empty) {
            self.carried_time += empty.compute_time;
        }
        if let Some(segment) = self.segment() {
            self.chunk_time = segment.compute_time * (1.0 / segment.chunks.len() as f64);
        }
    }

    /// Returns the segment that is computed now.
    fn segment(&self) -> Option<&Segment> {
        match self.work_left.front() {
            Some(ComputationStep::Compute(segment)) => Some(segment),
            _ => None,
        }
    }

    fn cost(&mut self) -> &mut StepCost {
        self.record.cost.get_or_insert_default()
    }

    pub fn waits_for_helper(&self) -> bool {
        self.waiting == Waiting::Helper
    }

    pub fn advance(
        &mut self,
        now: Nanos,
        storage: &mut Storage,
        residency: &mut dyn WeightResidency,
    ) -> ComputationAction {
        self.waiting = Waiting::No;
        self.request_and_release(now, storage, residency);
        let Some(segment) = self.segment() else {
            let carries = self.carried_time.0 > 0.0;
            return if carries { self.compute(now, 0..0, Seconds(0.0)) } else { ComputationAction::Done };
        };
        let (first, unit) = (segment.chunks.start, segment.bytes_per_chunk);
        match residency.availability(segment.chunks.clone(), storage) {
            Availability::Ready(held) => {
                for chunk in first..first + held {
                    storage.touch(now, chunk, ReadKind::Fault);
                }
                let bytes = (u64::from(held) - u64::from(std::mem::take(&mut self.counted))) * unit.0;
                self.cost().resident_bytes += bytes;
                self.record.bytes += bytes;
                let kernel_time = storage.take_kernel_time() * (1.0 / self.threads);
                self.compute(now, first..first + held, self.chunk_time * f64::from(held) + kernel_time)
            }
            Availability::Pending => {
                self.count_faulted(unit);
                self.waiting = Waiting::Helper;
                ComputationAction::Wait
            }
            Availability::Missing => {
                let touch = residency.on_fault(now, first, unit, storage);
                self.count_faulted(unit);
                self.wait_for(now, first, touch, storage)
            }
        }
    }

    /// Does the work before the next segment. Requested experts in memory are computed first, while the others are read.
    fn request_and_release(
        &mut self,
        now: Nanos,
        storage: &mut Storage,
        residency: &mut dyn WeightResidency,
    ) {
        while let Some(work) =
            self.work_left.pop_front_if(|work| !matches!(work, ComputationStep::Compute(_)))
        {
            match work {
                ComputationStep::Request(ref group @ ExpertGroup { layer, ref experts, .. }) => {
                    let missing = residency.request_experts(now, group, storage);
                    let expert = |work: &ComputationStep| match work {
                        ComputationStep::Compute(Segment { expert: Some((of, expert)), .. })
                            if *of == layer =>
                        {
                            Some(*expert)
                        }
                        _ => None,
                    };
                    let is_own =
                        |work: &ComputationStep| expert(work).is_some_and(|expert| experts.contains(&expert));
                    let work = self.work_left.make_contiguous();
                    let first = work.iter().position(is_own).unwrap_or(0);
                    let count = work[first..].iter().take_while(|work| is_own(work)).count();
                    work[first..first + count]
                        .sort_by_key(|work| expert(work).is_some_and(|expert| missing.contains(&expert)));
                }
                ComputationStep::Release(ExpertGroup { layer, experts, .. }) => {
                    self.wakes_helper |= residency.release_experts(layer, &experts);
                }
                ComputationStep::Compute(_) => {}
            }
            self.enter();
        }
    }

    /// Returns whether the helper thread has to be woken since the last call.
    pub fn take_helper_wake(&mut self) -> bool {
        std::mem::take(&mut self.wakes_helper)
    }

    fn count_faulted(&mut self, unit: Bytes) {
        if !std::mem::replace(&mut self.counted, true) {
            self.cost().faulted_bytes += unit.0;
            self.record.bytes += unit.0;
        }
    }

    /// Continues after a wait. If the computation waited for free memory, tries again to read the missing chunk.
    pub fn resume(
        &mut self,
        now: Nanos,
        storage: &mut Storage,
        residency: &mut dyn WeightResidency,
    ) -> ComputationAction {
        let Some(segment) = self.segment() else { return ComputationAction::Done };
        let first = segment.chunks.start;
        let chunk = match self.waiting {
            Waiting::Woken(chunk) => chunk,
            Waiting::Memory(chunk) => {
                return match storage.retry_touch(now, chunk, ReadKind::Fault) {
                    TouchResult::Ready => self.advance(now, storage, residency),
                    touch => self.wait_for(now, chunk, touch, storage),
                };
            }
            Waiting::No | Waiting::Chunk(_) | Waiting::Helper => {
                return self.advance(now, storage, residency);
            }
        };
        if chunk != UNCACHED_READ && !(storage.cache.resume(chunk) && storage.cache.resume(first)) {
            // The chunk was evicted before this thread ran: the thread faults again.
            return self.advance(now, storage, residency);
        }
        if let Some(previous) = self.lost_previous(first, storage, residency) {
            // When the previous chunk has arrived, the thread continues if this chunk is still in memory.
            self.previous_was_cached = false;
            let touch = storage.touch(now, previous, ReadKind::Fault);
            return self.wait_for(now, previous, touch, storage);
        }
        (self.waiting, self.counted) = (Waiting::No, false);
        let kernel_time = Seconds::from_nanos(self.fault_until.saturating_sub(now));
        self.compute(now, first..first + 1, self.chunk_time + kernel_time)
    }

    /// Returns the chunk before `first` if that chunk belongs to the last batch.
    fn previous(&self, first: Chunk) -> Option<Chunk> {
        (!self.batch.is_empty() && self.batch.end == first).then(|| first - 1)
    }

    /// Returns the chunk before `first` if the repeated load instruction needs it and it was evicted during the wait.
    fn lost_previous(
        &self,
        first: Chunk,
        storage: &Storage,
        residency: &dyn WeightResidency,
    ) -> Option<Chunk> {
        // Embedding rows are loaded separately, even if they are adjacent.
        let previous = self.previous(first).filter(|_| self.record.kind != StepKind::Embed)?;
        let evicted = self.previous_was_cached && !storage.cache.contains(previous);
        let reaches = || {
            let drawn =
                random::draw(self.seed, StreamPurpose::PageBoundary, self.record.pass_index, first.into());
            drawn < 1.0 - (1.0 - CROSSING_PROBABILITY).powf(self.threads)
        };
        (residency.leaves_eviction_to_system() && evicted && reaches()).then_some(previous)
    }

    /// Handles the arrival of a chunk. Returns whether the computation waited for this chunk and will be woken.
    pub fn on_arrival(&mut self, chunk: Chunk) -> bool {
        let woken =
            matches!(self.waiting, Waiting::Chunk(waited) if waited == chunk || chunk == UNCACHED_READ);
        if woken {
            self.waiting = Waiting::Woken(chunk);
        }
        woken
    }

    /// Ends or cancels the current batch and returns its chunks. Time beyond the work of the batch counts as waiting
    /// for a core. `slowdown` is the time that a slower clock has added to the work.
    pub fn end_batch(&mut self, now: Nanos, slowdown: Seconds) -> Range<Chunk> {
        let (wall, work) = (now - self.since, self.work.to_nanos() + slowdown.to_nanos());
        let cost = self.cost();
        cost.cpu_ns += work.min(wall);
        cost.queue_ns += wall.saturating_sub(work);
        self.batch.clone()
    }

    fn wait_for(
        &mut self,
        now: Nanos,
        chunk: Chunk,
        touch: TouchResult,
        storage: &mut Storage,
    ) -> ComputationAction {
        // The kernel's work for a fault is done while the disk reads.
        let until = now.saturating_add((storage.take_kernel_time() * (1.0 / self.threads)).to_nanos());
        if touch == TouchResult::NoMemory {
            self.waiting = Waiting::Memory(chunk);
            return ComputationAction::Retry(until.max(now + NO_MEMORY_RETRY_DELAY));
        }
        self.fault_until = until;
        self.previous_was_cached |= self.previous(chunk).is_some_and(|chunk| storage.cache.contains(chunk));
        self.waiting = Waiting::Chunk(chunk);
        ComputationAction::Wait
    }

    fn compute(&mut self, now: Nanos, batch: Range<Chunk>, time: Seconds) -> ComputationAction {
        let work = time + std::mem::replace(&mut self.carried_time, Seconds(0.0));
        (self.since, self.work, self.previous_was_cached) = (now, work, false);
        if let Some(ComputationStep::Compute(segment)) = self.work_left.front_mut() {
            segment.chunks.start = batch.end;
            if segment.chunks.is_empty() {
                self.work_left.pop_front();
                self.enter();
            }
        }
        self.batch = batch;
        ComputationAction::Compute(work)
    }
}

#[cfg(test)]
mod tests;
