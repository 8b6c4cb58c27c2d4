//! Walk: a computation that goes through weights of which some are still on disk.
//!
//! It works as the executor's threads do: layer by layer, chunk by chunk, computing on what is in memory and otherwise
//! blocking in a page fault or waiting for the helper thread. Consecutive chunks that are available are computed as one
//! batch.
//!
//! Not here: what is available ([`crate::device::residency`]), how long a layer takes ([`hearth_core::compute_cost`]).

use std::collections::VecDeque;
use std::ops::Range;

use hearth_profiles::{Bytes, Seconds};
use hearth_schema::trace::{Cost, Kind, Record};

use super::residency::{Availability, WeightResidency};
use super::storage::{NO_ROOM_PAUSE, Storage, Touch, UNCACHED};
use crate::engine::Nanos;
use crate::page_cache::Chunk;
use crate::random::{self, Purpose};
use crate::resource::Flow;

/// The probability that a thread that was woken for a page needs the page before it as well: the border lies inside the
/// load that faulted, which is repeated as a whole.
/// source: computed for `Q4_K`, of whose blocks of 144 bytes 128 are loaded by 32 bytes, from multiples of 16: of nine
/// possible borders four lie inside a load. Other formats are assumed to be similar.
const CROSSING_PROBABILITY: f64 = 4.0 / 9.0;

/// Chunks, and the time that a processor needs for all of them.
#[derive(Debug, Clone)]
pub struct Segment {
    pub chunks: Range<Chunk>,
    /// The duration if all chunks are in memory and no other program runs.
    pub time: Seconds,
    /// Bytes needed of each chunk.
    pub unit: Bytes,
}

/// The next action of a walk.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Next {
    Compute(Seconds),
    /// Wait until the chunk has arrived, or the helper has passed it.
    Wait,
    /// Try the touch again then.
    Retry(Nanos),
    Done,
}

/// The condition that a walk waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Waiting {
    No,
    /// Room for this chunk.
    Room(Chunk),
    /// This chunk, or pages read past the cache.
    Chunk(Chunk),
    /// The chunk has arrived and the thread is being woken.
    Woken(Chunk),
    Helper,
}

/// A computing step in progress.
#[derive(Debug, Clone)]
pub struct Walk {
    /// The step's record, completed at the end.
    pub record: Record,
    segments: VecDeque<Segment>,
    /// Threads that fault and compute together: the kernel's work is divided among them as well.
    threads: f64,
    /// The run's seed.
    seed: u64,
    /// Time for each chunk of the first segment.
    chunk_time: Seconds,
    /// Time of segments too short to have a chunk of their own, spent with the next.
    carried_time: Seconds,
    /// The time at which the kernel is done with the current fault.
    fault_until: Nanos,
    waiting: Waiting,
    /// Whether the first chunk of the first segment is already counted in the record.
    counted: bool,
    /// Whether the chunk behind the awaited one was in memory when the wait began.
    held_behind: bool,
    batch: Range<Chunk>,
    /// The start of the current computation.
    since: Nanos,
    work: Seconds,
}

impl Walk {
    /// A walk of `threads` threads through segments in order.
    pub fn new(record: Record, segments: impl IntoIterator<Item = Segment>, threads: f64, seed: u64) -> Self {
        let segments = segments.into_iter().collect();
        let zero = Seconds(0.0);
        let mut walk = Self {
            record,
            segments,
            threads,
            seed,
            chunk_time: zero,
            carried_time: zero,
            fault_until: 0,
            waiting: Waiting::No,
            counted: false,
            held_behind: false,
            batch: 0..0,
            since: 0,
            work: zero,
        };
        walk.record.cost = Some(Cost::default());
        walk.enter();
        walk
    }

    /// Enters the first segment that has chunks.
    fn enter(&mut self) {
        while let Some(empty) = self.segments.pop_front_if(|segment| segment.chunks.is_empty()) {
            self.carried_time += empty.time;
        }
        if let Some(segment) = self.segments.front() {
            self.chunk_time = segment.time * (1.0 / segment.chunks.len() as f64);
        }
    }

    fn cost(&mut self) -> &mut Cost {
        self.record.cost.get_or_insert_default()
    }

    pub fn waits_for_helper(&self) -> bool {
        self.waiting == Waiting::Helper
    }

    /// Continues with what the residency provides.
    pub fn advance(&mut self, now: Nanos, storage: &mut Storage, residency: &mut WeightResidency) -> Next {
        self.waiting = Waiting::No;
        let Some(segment) = self.segments.front() else {
            return if self.carried_time.0 > 0.0 {
                self.compute(now, 0..0, Seconds(0.0))
            } else {
                Next::Done
            };
        };
        let (first, unit) = (segment.chunks.start, segment.unit);
        match residency.find(segment.chunks.clone(), storage) {
            Availability::Ready(held) => {
                for chunk in first..first + held {
                    storage.touch(now, chunk, Flow::Fault);
                }
                let bytes = (u64::from(held) - u64::from(std::mem::take(&mut self.counted))) * unit.0;
                self.cost().resident += bytes;
                self.record.bytes += bytes;
                let kernel_time = storage.take_kernel_time() * (1.0 / self.threads);
                self.compute(now, first..first + held, self.chunk_time * f64::from(held) + kernel_time)
            }
            Availability::Pending => {
                self.count_faulted(unit);
                self.waiting = Waiting::Helper;
                Next::Wait
            }
            Availability::Missing => {
                let touch = residency.fault(now, first, unit, storage);
                self.count_faulted(unit);
                self.blocked(now, first, touch, storage)
            }
        }
    }

    /// Counts the chunk at its position as faulted.
    fn count_faulted(&mut self, unit: Bytes) {
        if !std::mem::replace(&mut self.counted, true) {
            self.cost().faulted += unit.0;
            self.record.bytes += unit.0;
        }
    }

    /// Continues after a wait, or tries the failed touch again.
    pub fn retry(&mut self, now: Nanos, storage: &mut Storage, residency: &mut WeightResidency) -> Next {
        let Some(segment) = self.segments.front() else { return Next::Done };
        let first = segment.chunks.start;
        let chunk = match self.waiting {
            Waiting::Woken(chunk) => chunk,
            Waiting::Room(chunk) => {
                return match storage.retry(now, chunk, Flow::Fault) {
                    Touch::Ready => self.advance(now, storage, residency),
                    touch => self.blocked(now, chunk, touch, storage),
                };
            }
            Waiting::No | Waiting::Chunk(_) | Waiting::Helper => {
                return self.advance(now, storage, residency);
            }
        };
        if chunk != UNCACHED && !(storage.resume(chunk) && storage.resume(first)) {
            // Evicted before this thread ran: it faults again.
            return self.advance(now, storage, residency);
        }
        if let Some(behind) = self.lost_behind(first, storage, residency) {
            // When that one has arrived and this one is still there, it continues.
            self.held_behind = false;
            let touch = storage.touch(now, behind, Flow::Fault);
            return self.blocked(now, behind, touch, storage);
        }
        (self.waiting, self.counted) = (Waiting::No, false);
        let kernel_time = Seconds::from_nanos(self.fault_until.saturating_sub(now));
        self.compute(now, first..first + 1, self.chunk_time + kernel_time)
    }

    /// The chunk behind its position, if that has been used.
    fn behind(&self, first: Chunk) -> Option<Chunk> {
        (!self.batch.is_empty() && self.batch.end == first).then(|| first - 1)
    }

    /// The chunk behind its position, if it was evicted while the thread waited and the load reaches into it.
    fn lost_behind(&self, first: Chunk, storage: &Storage, residency: &WeightResidency) -> Option<Chunk> {
        // Rows of the embedding that happen to be adjacent are no matrix.
        let behind = self.behind(first).filter(|_| self.record.kind != Kind::Embed)?;
        let evicted = self.held_behind && !storage.cache().holds(behind);
        let reaches = || {
            let drawn = random::draw(self.seed, Purpose::PageBorder, self.record.pass, first.into());
            drawn < 1.0 - (1.0 - CROSSING_PROBABILITY).powf(self.threads)
        };
        (residency.is_left_to_system() && evicted && reaches()).then_some(behind)
    }

    /// Handles the arrival of a chunk. If the walk waits for it, the walk continues after the wake-up latency.
    pub fn arrived(&mut self, now: Nanos, chunk: Chunk, wake: Nanos) -> Option<Next> {
        let Waiting::Chunk(waited) = self.waiting else { return None };
        if waited != chunk && chunk != UNCACHED {
            return None;
        }
        self.waiting = Waiting::Woken(chunk);
        Some(Next::Retry(now + wake))
    }

    /// Ends or cancels the computation of a batch: the time that was not work was waiting for a core. A slower clock
    /// adds `slowdown` to the work. Returns its chunks.
    pub fn computed(&mut self, now: Nanos, slowdown: Seconds) -> Range<Chunk> {
        let (wall, work) = (now - self.since, self.work.to_nanos() + slowdown.to_nanos());
        let cost = self.cost();
        cost.cpu += work.min(wall);
        cost.queue += wall.saturating_sub(work);
        self.batch.clone()
    }

    fn blocked(&mut self, now: Nanos, chunk: Chunk, touch: Touch, storage: &mut Storage) -> Next {
        // The kernel's work for a fault is done while the disk reads.
        let until = now.saturating_add((storage.take_kernel_time() * (1.0 / self.threads)).to_nanos());
        if touch == Touch::NoRoom {
            self.waiting = Waiting::Room(chunk);
            return Next::Retry(until.max(now + NO_ROOM_PAUSE));
        }
        self.fault_until = until;
        self.held_behind |= self.behind(chunk).is_some_and(|behind| storage.cache().holds(behind));
        self.waiting = Waiting::Chunk(chunk);
        Next::Wait
    }

    fn compute(&mut self, now: Nanos, batch: Range<Chunk>, time: Seconds) -> Next {
        let work = time + std::mem::replace(&mut self.carried_time, Seconds(0.0));
        (self.since, self.work, self.held_behind) = (now, work, false);
        if let Some(segment) = self.segments.front_mut() {
            segment.chunks.start = batch.end;
            if segment.chunks.is_empty() {
                self.segments.pop_front();
                self.enter();
            }
        }
        self.batch = batch;
        Next::Compute(work)
    }
}

#[cfg(test)]
mod tests;
