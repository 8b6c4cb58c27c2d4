//! Page caches of macOS: [`MacosCache`], and [`MacosMetalCache`] for weights that the GPU uses through Metal.
//!
//! Without Metal (xnu, osfmk/vm/vm_pageout.c and vm_resident.c) pages read ahead are on a *speculative* queue, which
//! is evicted first, the oldest page first; a speculative page that is used becomes active. Pages that a fault needs
//! are active at once. While the active queue is longer than the inactive queue, its oldest pages move to the inactive
//! queue, and their reference bits are cleared. An inactive page that was used meanwhile becomes active again, and any
//! other inactive page is evicted. File pages keep a minimum of memory, and memory of other programs is compressed: the
//! capacity accounts for both ([`super::config`]).
//!
//! With Metal (prima.cpp paper, Eq. 16) weights are *wired*, that is, never evicted, up to the recommended working set.
//! A larger set is read again completely for every token, which here follows from least-recently-used eviction. After
//! an idle time of about a second the weights are unwired and become ordinary memory, which other programs may take.
//!
//! Not validated on a machine. Not here: dirty pages, swap files, the memory accesses of other programs.

use super::Chunk;
use super::list_cache::{ChunkLists, EvictionPolicy, ListCache};

const SPECULATIVE: usize = 0;
const INACTIVE: usize = 1;
const ACTIVE: usize = 2;

#[derive(Debug)]
pub struct MacosEvictionPolicy {
    min_capacity: u32,
}

/// The page cache of macOS for weights that Metal does not wire.
pub type MacosCache = ListCache<MacosEvictionPolicy>;

impl MacosCache {
    /// Creates an empty page cache whose capacity, in chunks, never falls below `min_capacity`.
    pub fn new(file_chunks: u32, capacity: u32, min_capacity: u32) -> Self {
        Self::with_policy(MacosEvictionPolicy { min_capacity }, 3, file_chunks, capacity)
    }
}

impl EvictionPolicy for MacosEvictionPolicy {
    fn insertion_list(&mut self, _chunk: Chunk, awaited: bool) -> usize {
        if awaited { ACTIVE } else { SPECULATIVE }
    }

    fn on_use(&mut self, lists: &mut ChunkLists, chunk: Chunk) {
        if lists.list_of(chunk) == Some(SPECULATIVE) {
            lists.move_to_list(chunk, ACTIVE);
        }
    }

    fn victim(&mut self, lists: &mut ChunkLists) -> Option<Chunk> {
        if lists.are_all_in_flight() {
            return None;
        }
        if let Some(chunk) = lists.scan_for_arrived(SPECULATIVE) {
            return Some(chunk);
        }
        // No page is used meanwhile, and every scan clears the mark of a page, so some scan finds an unmarked page.
        loop {
            while lists.list_len(ACTIVE) > lists.list_len(INACTIVE) {
                let oldest = lists.oldest_chunk(ACTIVE)?;
                lists.test_and_clear_young(oldest);
                lists.move_to_list(oldest, INACTIVE);
            }
            for _ in 0..lists.list_len(INACTIVE) {
                let Some(chunk) = lists.scan_for_arrived(INACTIVE) else { break };
                if !lists.test_and_clear_young(chunk) {
                    return Some(chunk);
                }
                lists.move_to_list(chunk, ACTIVE);
            }
            if lists.scan_for_arrived(INACTIVE).is_none()
                && lists.list_len(ACTIVE) <= lists.list_len(INACTIVE)
            {
                // Everything inactive is in flight.
                return lists.scan_for_arrived(ACTIVE);
            }
        }
    }

    fn min_capacity(&self) -> u32 {
        self.min_capacity
    }
}

#[derive(Debug)]
pub struct WiredEvictionPolicy {
    idle_capacity: u32,
}

/// The page cache of macOS for weights that the GPU uses, which Metal wires.
pub type MacosMetalCache = ListCache<WiredEvictionPolicy>;

impl MacosMetalCache {
    /// Creates an empty page cache that wires up to `capacity` chunks; `idle_capacity` remain after an idle time.
    pub fn new(file_chunks: u32, capacity: u32, idle_capacity: u32) -> Self {
        Self::with_policy(WiredEvictionPolicy { idle_capacity }, 1, file_chunks, capacity)
    }
}

impl EvictionPolicy for WiredEvictionPolicy {
    fn insertion_list(&mut self, _chunk: Chunk, _awaited: bool) -> usize {
        0
    }

    fn on_use(&mut self, lists: &mut ChunkLists, chunk: Chunk) {
        lists.move_to_list(chunk, 0);
    }

    fn victim(&mut self, lists: &mut ChunkLists) -> Option<Chunk> {
        lists.scan_for_arrived(0)
    }

    fn idle_capacity(&self) -> Option<u32> {
        Some(self.idle_capacity)
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{prefetch_chunk, read_cyclically};
    use super::super::{Access, PageCache};
    use super::*;

    #[test]
    fn speculative_pages_are_evicted_first() {
        let mut cache = MacosCache::new(8, 4, 0);
        (0..4).for_each(|chunk| prefetch_chunk(&mut cache, chunk));
        // 0 is the oldest but was used, so it is active; 1 is the oldest speculative page.
        assert_eq!(cache.access(0), Access::Hit);
        prefetch_chunk(&mut cache, 4);
        prefetch_chunk(&mut cache, 5);
        assert_eq!((0..6).filter(|&chunk| cache.contains(chunk)).collect::<Vec<_>>(), [0, 3, 4, 5]);
    }

    #[test]
    fn file_floor_is_kept() {
        // 0.15 of 100 chunks of memory.
        let mut cache = MacosCache::new(100, 60, 15);
        read_cyclically(&mut cache, 1);
        cache.set_capacity(5);
        assert_eq!((cache.capacity(), cache.resident_chunks()), (15, 15));
    }

    #[test]
    fn idle_weights_are_unwired() {
        let mut cache = MacosMetalCache::new(100, 100, 40);
        read_cyclically(&mut cache, 1);
        cache.on_idle();
        assert_eq!(cache.resident_chunks(), 40);
        // The forty most recently used chunks remain, and one round reads the other sixty again.
        assert_eq!((read_cyclically(&mut cache, 1), read_cyclically(&mut cache, 1)), (60, 0));
    }
}
