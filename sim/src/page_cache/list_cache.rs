//! List-based page caches: the common part of [`super::MgLruCache`], [`super::RandomCache`], [`super::MacosCache`] and
//! [`super::MacosMetalCache`].
//!
//! [`ListCache`] tracks for each chunk whether it is resident, in flight or used, and on which list it is, and counts
//! reads and evictions. An [`EvictionPolicy`] decides on which list a new chunk is inserted, what a use changes, and
//! which chunk is evicted. [`super::TwoListCache`] is separate, because its reclaim takes time and can be interrupted.

use super::lists::{ChunkList, ListLinks};
use super::{Access, Chunk, ChunkCounts, FetchResult, PageCache};

/// An eviction policy: decides how chunks are ordered on lists, and which chunk is evicted.
pub trait EvictionPolicy: std::fmt::Debug {
    /// Returns the index of the list for a new chunk; `awaited` is true if a reader waits for the chunk.
    fn insertion_list(&mut self, chunk: Chunk, awaited: bool) -> usize;
    /// Handles the use of a resident chunk, which is already marked as young.
    fn on_use(&mut self, _lists: &mut ChunkLists, _chunk: Chunk) {}
    /// Returns the next chunk to evict, which is not in flight; `None` only if all chunks are in flight.
    fn victim(&mut self, lists: &mut ChunkLists) -> Option<Chunk>;
    fn on_evict(&mut self, _chunk: Chunk) {}
    /// Returns the minimum capacity in chunks.
    fn min_capacity(&self) -> u32 {
        0
    }
    /// Returns the number of chunks that remain in memory after a long idle time; `None` if all remain.
    fn idle_capacity(&self) -> Option<u32> {
        None
    }
}

#[derive(Debug)]
pub struct ChunkLists {
    links: ListLinks,
    lists: Vec<ChunkList>,
    chunks: Vec<Page>,
    in_flight: u32,
    resident: u32,
    /// Number of chunks scanned for reclaim.
    pub scanned_chunks: u64,
}

#[derive(Debug, Clone, Copy, Default)]
#[allow(clippy::struct_excessive_bools, reason = "they are page flags")]
struct Page {
    list: Option<u8>,
    young: bool,
    /// Whether the chunk has been used since it was read.
    mapped: bool,
    locked: bool,
    awaited: bool,
}

impl ChunkLists {
    fn new(file_chunks: u32, lists: usize) -> Self {
        Self {
            links: ListLinks::new(file_chunks),
            lists: vec![ChunkList::new(); lists],
            chunks: vec![Page::default(); file_chunks as usize],
            in_flight: 0,
            resident: 0,
            scanned_chunks: 0,
        }
    }

    pub fn list_len(&self, list: usize) -> u32 {
        self.lists[list].len()
    }

    /// Returns the index of a chunk's list; `None` if the chunk is neither resident nor in flight.
    pub fn list_of(&self, chunk: Chunk) -> Option<usize> {
        self.chunks[chunk as usize].list.map(usize::from)
    }

    pub fn is_in_flight(&self, chunk: Chunk) -> bool {
        self.chunks[chunk as usize].locked
    }

    pub fn are_all_in_flight(&self) -> bool {
        self.in_flight == self.resident
    }

    /// Scans a chunk: clears its young mark. Returns whether the chunk has been used since its last scan.
    pub fn test_and_clear_young(&mut self, chunk: Chunk) -> bool {
        self.scanned_chunks += 1;
        std::mem::take(&mut self.chunks[chunk as usize].young)
    }

    pub fn oldest_chunk(&self, list: usize) -> Option<Chunk> {
        self.lists[list].oldest()
    }

    /// Moves a chunk to the newest end of a list.
    pub fn move_to_list(&mut self, chunk: Chunk, list: usize) {
        self.take(chunk);
        self.lists[list].push_newest(&mut self.links, chunk);
        self.chunks[chunk as usize].list = Some(list as u8);
    }

    /// Returns the oldest arrived chunk of a list. Moves older chunks, which are in flight, to the newest end.
    pub fn scan_for_arrived(&mut self, list: usize) -> Option<Chunk> {
        for _ in 0..self.list_len(list) {
            let chunk = self.oldest_chunk(list)?;
            self.scanned_chunks += 1;
            if !self.is_in_flight(chunk) {
                return Some(chunk);
            }
            self.move_to_list(chunk, list);
        }
        None
    }

    fn take(&mut self, chunk: Chunk) {
        if let Some(list) = self.chunks[chunk as usize].list.take() {
            self.lists[usize::from(list)].remove(&mut self.links, chunk);
        }
    }
}

#[derive(Debug)]
pub struct ListCache<P> {
    policy: P,
    lists: ChunkLists,
    capacity: u32,
    counters: ChunkCounts,
}

impl<P: EvictionPolicy> ListCache<P> {
    pub(super) fn with_policy(policy: P, list_count: usize, file_chunks: u32, capacity: u32) -> Self {
        let capacity = capacity.max(policy.min_capacity());
        let lists = ChunkLists::new(file_chunks, list_count);
        Self { policy, lists, capacity, counters: ChunkCounts::default() }
    }

    fn evict(&mut self, chunk: Chunk) {
        self.lists.take(chunk);
        self.lists.chunks[chunk as usize] = Page::default();
        self.lists.resident -= 1;
        self.policy.on_evict(chunk);
        self.counters.evicted += 1;
    }

    fn shrink_to(&mut self, chunks: u32) {
        while self.lists.resident > chunks {
            let Some(victim) = self.policy.victim(&mut self.lists) else { return };
            self.counters.unmapped += u64::from(self.lists.chunks[victim as usize].mapped);
            self.evict(victim);
        }
    }
}

impl<P: EvictionPolicy> PageCache for ListCache<P> {
    fn access(&mut self, chunk: Chunk) -> Access {
        if self.resume(chunk) {
            return Access::Hit;
        }
        let page = &mut self.lists.chunks[chunk as usize];
        page.awaited = true;
        if page.locked { Access::InFlight } else { Access::Absent }
    }

    fn resume(&mut self, chunk: Chunk) -> bool {
        let held = self.contains(chunk);
        if held {
            let page = &mut self.lists.chunks[chunk as usize];
            (page.young, page.mapped) = (true, true);
            self.policy.on_use(&mut self.lists, chunk);
        }
        held
    }

    fn prefetch(&mut self, chunk: Chunk) -> FetchResult {
        if self.lists.chunks[chunk as usize].list.is_some() {
            return FetchResult::Present;
        }
        self.shrink_to(self.capacity.saturating_sub(1));
        if self.lists.resident >= self.capacity {
            return FetchResult::NoMemory;
        }
        let awaited = std::mem::take(&mut self.lists.chunks[chunk as usize].awaited);
        let list = self.policy.insertion_list(chunk, awaited);
        self.lists.move_to_list(chunk, list);
        self.lists.chunks[chunk as usize].locked = true;
        self.lists.in_flight += 1;
        self.lists.resident += 1;
        self.counters.fetched += 1;
        FetchResult::Started
    }

    fn on_arrival(&mut self, chunk: Chunk) {
        let page = &mut self.lists.chunks[chunk as usize];
        if std::mem::take(&mut page.locked) {
            self.lists.in_flight -= 1;
        }
    }

    fn release(&mut self, chunk: Chunk) {
        if self.contains(chunk) {
            self.counters.released += 1;
            self.evict(chunk);
        }
    }

    fn on_idle(&mut self) {
        if let Some(chunks) = self.policy.idle_capacity() {
            self.shrink_to(chunks);
        }
    }

    fn set_capacity(&mut self, chunks: u32) {
        self.capacity = chunks.max(self.policy.min_capacity());
        self.shrink_to(self.capacity);
    }

    fn capacity(&self) -> u32 {
        self.capacity
    }

    fn resident_chunks(&self) -> u32 {
        self.lists.resident
    }

    fn file_chunks(&self) -> u32 {
        self.lists.chunks.len() as u32
    }

    fn contains(&self, chunk: Chunk) -> bool {
        let page = &self.lists.chunks[chunk as usize];
        page.list.is_some() && !page.locked
    }

    fn counters(&self) -> ChunkCounts {
        ChunkCounts { scanned: self.lists.scanned_chunks, ..self.counters }
    }
}
