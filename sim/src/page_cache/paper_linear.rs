//! Page cache that reproduces the formula of the prima.cpp paper: reload = need - capacity.
//!
//! Appendix A.3: a device that needs more memory than its capacity reloads need - capacity bytes for every token. To
//! achieve this in a cyclic scan, the policy evicts the most recently used chunk, which is needed last. It evicts a
//! prefetched chunk that is not used yet only if the reader could not continue otherwise. No kernel works like this;
//! the bytes that this policy reloads are a lower bound for those of [`super::TwoListCache`].

use super::lists::{ChunkList, ListLinks};
use super::{Access, Chunk, ChunkCounts, FetchResult, PageCache};

/// A page cache that reloads for each token only the weights that exceed its capacity.
#[derive(Debug)]
pub struct PaperPageCache {
    capacity: u32,
    chunks: Vec<State>,
    awaited: Vec<bool>,
    links: ListLinks,
    /// Chunks that have not been used since they were read, the oldest chunk at the tail.
    fresh: ChunkList,
    /// Used chunks, the least recently used chunk at the tail.
    used: ChunkList,
    in_flight: u32,
    counters: ChunkCounts,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Absent,
    InFlight,
    Fresh,
    Used,
}

impl PaperPageCache {
    pub fn new(file_chunks: u32, capacity: u32) -> Self {
        Self {
            capacity,
            chunks: vec![State::Absent; file_chunks as usize],
            awaited: vec![false; file_chunks as usize],
            links: ListLinks::new(file_chunks),
            fresh: ChunkList::new(),
            used: ChunkList::new(),
            in_flight: 0,
            counters: ChunkCounts::default(),
        }
    }

    fn evict(&mut self, chunk: Chunk) {
        match self.chunks[chunk as usize] {
            State::Fresh => self.fresh.remove(&mut self.links, chunk),
            State::Used => self.used.remove(&mut self.links, chunk),
            State::Absent | State::InFlight => return,
        }
        self.chunks[chunk as usize] = State::Absent;
        self.counters.evicted += 1;
    }
}

impl PageCache for PaperPageCache {
    fn access(&mut self, chunk: Chunk) -> Access {
        let state = &mut self.chunks[chunk as usize];
        match state {
            State::Absent | State::InFlight => {
                self.awaited[chunk as usize] = true;
                if *state == State::Absent { Access::Absent } else { Access::InFlight }
            }
            State::Fresh => {
                *state = State::Used;
                self.fresh.remove(&mut self.links, chunk);
                self.used.push_newest(&mut self.links, chunk);
                Access::Hit
            }
            State::Used => {
                self.used.move_to_head(&mut self.links, chunk);
                Access::Hit
            }
        }
    }

    fn prefetch(&mut self, chunk: Chunk) -> FetchResult {
        if self.chunks[chunk as usize] != State::Absent {
            return FetchResult::Present;
        }
        while self.resident_chunks() >= self.capacity {
            // If the reader would wait forever, the chunk that was read farthest ahead is evicted.
            let stuck = self.awaited[chunk as usize] && self.in_flight == 0;
            let farthest = self.fresh.newest().filter(|_| stuck);
            let Some(victim) = self.used.newest().or(farthest) else { return FetchResult::NoMemory };
            self.evict(victim);
        }
        self.chunks[chunk as usize] = State::InFlight;
        self.in_flight += 1;
        self.counters.fetched += 1;
        FetchResult::Started
    }

    fn on_arrival(&mut self, chunk: Chunk) {
        if self.chunks[chunk as usize] != State::InFlight {
            return;
        }
        let awaited = std::mem::take(&mut self.awaited[chunk as usize]);
        self.in_flight -= 1;
        let (state, list) =
            if awaited { (State::Used, &mut self.used) } else { (State::Fresh, &mut self.fresh) };
        self.chunks[chunk as usize] = state;
        list.push_newest(&mut self.links, chunk);
    }

    fn release(&mut self, chunk: Chunk) {
        self.counters.released += u64::from(self.contains(chunk));
        self.evict(chunk);
    }

    fn set_capacity(&mut self, chunks: u32) {
        self.capacity = chunks;
        while self.resident_chunks() > self.capacity
            && let Some(victim) = self.used.newest().or(self.fresh.oldest())
        {
            self.evict(victim);
        }
    }

    fn capacity(&self) -> u32 {
        self.capacity
    }

    fn resident_chunks(&self) -> u32 {
        self.fresh.len() + self.used.len() + self.in_flight
    }

    fn file_chunks(&self) -> u32 {
        self.chunks.len() as u32
    }

    fn contains(&self, chunk: Chunk) -> bool {
        matches!(self.chunks[chunk as usize], State::Fresh | State::Used)
    }

    fn counters(&self) -> ChunkCounts {
        self.counters
    }
}
