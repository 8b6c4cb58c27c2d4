//! How does a computation go through weights of which some are still on disk?
//!
//! As the executor's threads do: layer by layer, chunk by chunk, computing on what is there and blocking in a
//! page fault on what is not. Chunks that are in memory one after another are computed as one piece, up to the
//! next missing one; while reads or prefetches are under way a piece is at most a few chunks, because what is
//! there now may be evicted before its turn.
//!
//! Not here: how long a layer takes ([`crate::rates`]), and what to do when the walk is over
//! ([`crate::station`]).

use std::collections::VecDeque;
use std::ops::Range;

use hearth_profiles::Seconds;
use hearth_schema::trace::{Cost, Record};

use crate::engine::Nanos;
use crate::page_cache::Chunk;
use crate::resource::Flow;
use crate::storage::{NO_ROOM_PAUSE, Storage, Touch};

/// Chunks computed as one piece while anything else goes on.
const PIECE: u32 = 4;

/// Chunks and the time that a processor needs for all of them.
#[derive(Debug, Clone)]
pub struct Segment {
    /// Which chunks.
    pub chunks: Range<Chunk>,
    /// How long, when they are at hand and nobody disturbs.
    pub time: Seconds,
}

/// What a walk does next.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Next {
    /// Compute for so long.
    Compute(Seconds),
    /// Wait until the chunk it stands at has arrived.
    Wait,
    /// Try the touch again then.
    Retry(Nanos),
    /// It is over.
    Done,
}

/// A computing step on its way.
#[derive(Debug, Clone)]
pub struct Walk {
    /// The step's record, completed at the end.
    pub record: Record,
    segments: VecDeque<Segment>,
    /// Threads that fault and compute together: the kernel's work is divided among them as well.
    threads: f64,
    /// Time for each chunk of the first segment.
    each: Seconds,
    /// When the kernel is done with the fault it stands in.
    fault_until: Nanos,
    /// It waits for the first chunk of the first segment.
    waits: bool,
    /// Computing since then.
    since: Nanos,
    work: Seconds,
}

impl Walk {
    /// A walk of so many threads through segments in order.
    pub fn new(record: Record, segments: impl IntoIterator<Item = Segment>, threads: f64) -> Self {
        let segments = segments.into_iter().collect();
        let zero = Seconds(0.0);
        let mut walk = Self {
            record,
            segments,
            threads,
            each: zero,
            fault_until: 0,
            waits: false,
            since: 0,
            work: zero,
        };
        walk.record.cost = Some(Cost::default());
        walk.enter();
        walk
    }

    fn enter(&mut self) {
        if let Some(segment) = self.segments.front() {
            self.each = segment.time * (1.0 / segment.chunks.len().max(1) as f64);
        }
    }

    fn cost(&mut self) -> &mut Cost {
        self.record.cost.get_or_insert_default()
    }

    /// Goes on: `quiet` says that nothing else touches this device's page cache.
    pub fn advance(&mut self, now: Nanos, storage: &mut Storage, quiet: bool) -> Next {
        loop {
            let Some(segment) = self.segments.front_mut() else { return Next::Done };
            let most = if quiet { u32::MAX } else { PIECE };
            let end = segment.chunks.end.min(segment.chunks.start.saturating_add(most));
            let first = segment.chunks.start;
            let held = (first..end).take_while(|&chunk| storage.view().view().holds(chunk)).count() as u32;
            if first == segment.chunks.end {
                self.segments.pop_front();
                self.enter();
                continue;
            }
            if held == 0 {
                let touch = storage.touch(now, first, Flow::Fault);
                let bytes = storage.chunk().0;
                self.cost().faulted += bytes;
                self.record.bytes += bytes;
                return self.blocked(now, touch, storage);
            }
            segment.chunks.start += held;
            for chunk in first..first + held {
                storage.touch(now, chunk, Flow::Fault);
            }
            let bytes = u64::from(held) * storage.chunk().0;
            self.cost().resident += bytes;
            self.record.bytes += bytes;
            let toil = storage.toil() * (1.0 / self.threads);
            return self.compute(now, self.each * f64::from(held) + toil);
        }
    }

    /// Tries the failed touch again.
    pub fn retry(&mut self, now: Nanos, storage: &mut Storage) -> Next {
        let Some(segment) = self.segments.front() else { return Next::Done };
        match storage.retry(now, segment.chunks.start, Flow::Fault) {
            Touch::Ready => self.advance(now, storage, false),
            touch => self.blocked(now, touch, storage),
        }
    }

    /// A chunk has arrived. If it is the one that the walk waits for, it goes on with it.
    pub fn arrived(&mut self, now: Nanos, chunk: Chunk) -> Option<Next> {
        let segment = self.segments.front_mut()?;
        if !self.waits || segment.chunks.start != chunk {
            return None;
        }
        self.waits = false;
        segment.chunks.start += 1;
        let toil = Seconds::from_nanos(self.fault_until.saturating_sub(now));
        Some(self.compute(now, self.each + toil))
    }

    /// The piece is computed: what of its time was not work was waiting for a core.
    pub fn computed(&mut self, now: Nanos) {
        let (wall, work) = (now - self.since, self.work.to_nanos());
        let cost = self.cost();
        cost.cpu += work.min(wall);
        cost.queue += wall.saturating_sub(work);
    }

    fn blocked(&mut self, now: Nanos, touch: Touch, storage: &mut Storage) -> Next {
        // The kernel's work for a fault is done while the disk reads.
        let until = now + (storage.toil() * (1.0 / self.threads)).to_nanos();
        if touch == Touch::NoRoom {
            return Next::Retry(until.max(now + NO_ROOM_PAUSE));
        }
        self.fault_until = until;
        self.waits = true;
        Next::Wait
    }

    fn compute(&mut self, now: Nanos, work: Seconds) -> Next {
        (self.since, self.work) = (now, work);
        Next::Compute(work)
    }
}
