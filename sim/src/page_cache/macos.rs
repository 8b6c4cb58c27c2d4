//! Page caches of macOS: [`MacosCache`], and [`MacosMetalCache`] for weights that the GPU uses through Metal.
//!
//! Without Metal (xnu, osfmk/vm/vm_pageout.c and vm_resident.c) pages read ahead are on a *speculative* queue, which
//! is evicted first, the oldest page first; a speculative page that is used becomes active. Pages that a fault needs
//! are active at once. While the active queue is longer than the inactive queue, its oldest pages move to the inactive
//! queue, and their young marks are cleared. An inactive page that was used meanwhile becomes active again, any other
//! inactive page is evicted. File pages keep a minimum of memory, and memory of other programs is compressed: the
//! capacity accounts for both ([`super::config`]).
//!
//! With Metal (prima.cpp paper, Eq. 16) weights are *wired*, that is, never evicted, up to the recommended working set.
//! A larger share is read again completely for every token, which here follows from least-recently-used eviction. After
//! an idle time of about a second the weights are unwired and become ordinary memory, which other programs may take.
//!
//! Not checked against a machine. Not here: dirty pages, swap files, the memory accesses of other programs.

use super::Chunk;
use super::list_cache::{ChunkLists, EvictionPolicy, ListCache};

const SPECULATIVE: usize = 0;
const INACTIVE: usize = 1;
const ACTIVE: usize = 2;

#[derive(Debug)]
pub struct MacosEvictionPolicy {
    floor: u32,
}

/// The page cache of macOS for weights that Metal does not wire.
pub type MacosCache = ListCache<MacosEvictionPolicy>;

impl MacosCache {
    /// Creates an empty cache for `share` chunks, whose capacity never falls below `floor`.
    pub fn new(share: u32, capacity: u32, floor: u32) -> Self {
        Self::with_rules(MacosEvictionPolicy { floor }, 3, share, capacity)
    }
}

impl EvictionPolicy for MacosEvictionPolicy {
    fn insertion_list(&mut self, _chunk: Chunk, awaited: bool) -> usize {
        if awaited { ACTIVE } else { SPECULATIVE }
    }

    fn on_use(&mut self, pages: &mut ChunkLists, chunk: Chunk) {
        if pages.list_of(chunk) == Some(SPECULATIVE) {
            pages.put(chunk, ACTIVE);
        }
    }

    fn victim(&mut self, pages: &mut ChunkLists) -> Option<Chunk> {
        if pages.are_all_in_flight() {
            return None;
        }
        if let Some(chunk) = pages.scan_for_arrived(SPECULATIVE) {
            return Some(chunk);
        }
        // No page is used meanwhile, and every scan clears the mark of a page, so some scan finds an unmarked page.
        loop {
            while pages.list_len(ACTIVE) > pages.list_len(INACTIVE) {
                let oldest = pages.oldest(ACTIVE)?;
                pages.test_and_clear_young(oldest);
                pages.put(oldest, INACTIVE);
            }
            for _ in 0..pages.list_len(INACTIVE) {
                let Some(chunk) = pages.scan_for_arrived(INACTIVE) else { break };
                if !pages.test_and_clear_young(chunk) {
                    return Some(chunk);
                }
                pages.put(chunk, ACTIVE);
            }
            if pages.scan_for_arrived(INACTIVE).is_none()
                && pages.list_len(ACTIVE) <= pages.list_len(INACTIVE)
            {
                // Everything inactive is in flight.
                return pages.scan_for_arrived(ACTIVE);
            }
        }
    }

    fn min_capacity(&self) -> u32 {
        self.floor
    }
}

#[derive(Debug)]
pub struct WiredEvictionPolicy {
    ordinary: u32,
}

/// The page cache of macOS for weights that the GPU uses, which Metal wires.
pub type MacosMetalCache = ListCache<WiredEvictionPolicy>;

impl MacosMetalCache {
    /// Creates an empty cache in which `wired` chunks may be wired, of which `ordinary` remain after an idle time.
    pub fn new(share: u32, wired: u32, ordinary: u32) -> Self {
        Self::with_rules(WiredEvictionPolicy { ordinary }, 1, share, wired)
    }
}

impl EvictionPolicy for WiredEvictionPolicy {
    fn insertion_list(&mut self, _chunk: Chunk, _awaited: bool) -> usize {
        0
    }

    fn on_use(&mut self, pages: &mut ChunkLists, chunk: Chunk) {
        pages.put(chunk, 0);
    }

    fn victim(&mut self, pages: &mut ChunkLists) -> Option<Chunk> {
        pages.scan_for_arrived(0)
    }

    fn idle_capacity(&self) -> Option<u32> {
        Some(self.ordinary)
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{cyclic, prefetch};
    use super::super::{Access, PageCache};
    use super::*;

    #[test]
    fn speculative_pages_are_evicted_first() {
        let mut cache = MacosCache::new(8, 4, 0);
        (0..4).for_each(|chunk| prefetch(&mut cache, chunk));
        // 0 is the oldest but was used, so it is active; 1 is the oldest speculative page.
        assert_eq!(cache.access(0), Access::Hit);
        prefetch(&mut cache, 4);
        prefetch(&mut cache, 5);
        assert_eq!((0..6).filter(|&chunk| cache.contains(chunk)).collect::<Vec<_>>(), [0, 3, 4, 5]);
    }

    #[test]
    fn file_floor_is_kept() {
        // 0.15 of 100 chunks of memory.
        let mut cache = MacosCache::new(100, 60, 15);
        cyclic(&mut cache, 1);
        cache.set_capacity(5);
        assert_eq!((cache.capacity(), cache.resident_chunks()), (15, 15));
    }

    #[test]
    fn idle_weights_are_unwired() {
        let mut cache = MacosMetalCache::new(100, 100, 40);
        cyclic(&mut cache, 1);
        cache.on_idle();
        assert_eq!(cache.resident_chunks(), 40);
        // The forty most recently used chunks remain, and one round reads the other sixty again.
        assert_eq!((cyclic(&mut cache, 1), cyclic(&mut cache, 1)), (60, 0));
    }
}
