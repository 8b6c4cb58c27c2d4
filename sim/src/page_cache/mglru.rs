//! Page cache of Linux with the multi-generational LRU.
//!
//! As in mm/vmscan.c (`lru_gen`) and Documentation/mm/multigen_lru.rst, for clean file pages of one mapping:
//!
//! - **Two to four generations.** A page that is read by a fault begins in the youngest generation, a page that is read
//!   ahead begins in the oldest generation (`folio_add_lru`, `lru_gen_folio_seq`).
//! - **Eviction** scans the oldest generation. A page used since the last scan moves to the youngest generation, a page
//!   in flight moves to the next one (`sort_folio`), and any other page is evicted. An empty generation is removed.
//! - **Aging**: with two generations left, a walk over the page tables finds every page that was used, and moves it
//!   to a new youngest generation (`inc_max_seq`, `walk_mm`).
//!
//! Deviation: in the kernel all pages that a fault reads begin in the youngest generation; here only the awaited
//! chunk does, because [`super::PageCache`] does not distinguish the others from prefetched pages.
//!
//! Not here: refaults, and tiers, which count uses of pages through file descriptors; mapped pages have no such uses.

use super::Chunk;
use super::list_cache::{ChunkLists, EvictionPolicy, ListCache};

/// `MAX_NR_GENS` of include/linux/mmzone.h.
const MAX_GENERATIONS: u64 = 4;
/// `MIN_NR_GENS` of include/linux/mmzone.h.
const MIN_GENERATIONS: u64 = 2;

/// The state of the multi-generational LRU: the sequence numbers of the oldest and the youngest generation.
#[derive(Debug)]
pub struct MgLruEvictionPolicy {
    oldest: u64,
    youngest: u64,
}

/// The page cache of Linux with the multi-generational LRU.
pub type MgLruCache = ListCache<MgLruEvictionPolicy>;

impl MgLruCache {
    pub fn new(file_chunks: u32, capacity: u32) -> Self {
        let policy = MgLruEvictionPolicy { oldest: 0, youngest: MAX_GENERATIONS - 1 };
        Self::with_policy(policy, MAX_GENERATIONS as usize, file_chunks, capacity)
    }
}

fn list(generation: u64) -> usize {
    (generation % MAX_GENERATIONS) as usize
}

impl MgLruEvictionPolicy {
    /// Moves every used page to a new youngest generation.
    fn age(&mut self, lists: &mut ChunkLists) {
        self.youngest += 1;
        for generation in self.oldest..self.youngest {
            for _ in 0..lists.list_len(list(generation)) {
                let Some(chunk) = lists.oldest_chunk(list(generation)) else { break };
                let young = lists.test_and_clear_young(chunk);
                lists.move_to_list(chunk, list(if young { self.youngest } else { generation }));
            }
        }
    }
}

impl EvictionPolicy for MgLruEvictionPolicy {
    fn insertion_list(&mut self, _chunk: Chunk, awaited: bool) -> usize {
        list(if awaited { self.youngest } else { self.oldest })
    }

    fn victim(&mut self, lists: &mut ChunkLists) -> Option<Chunk> {
        if lists.are_all_in_flight() {
            return None;
        }
        // Each round removes a generation, and after two agings no page is young, so some round finds a page that is
        // not in flight.
        loop {
            let oldest = list(self.oldest);
            for _ in 0..lists.list_len(oldest) {
                let chunk = lists.oldest_chunk(oldest)?;
                if lists.is_in_flight(chunk) {
                    lists.move_to_list(chunk, list(self.oldest + 1));
                } else if lists.test_and_clear_young(chunk) {
                    lists.move_to_list(chunk, list(self.youngest));
                } else {
                    return Some(chunk);
                }
            }
            if self.youngest - self.oldest < MIN_GENERATIONS {
                self.age(lists);
            }
            self.oldest += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{prefetch_chunk, read_chunk};
    use super::super::{Access, FetchResult, PageCache};
    use super::*;

    #[test]
    fn prefetched_pages_are_evicted_first() {
        let mut cache = MgLruCache::new(8, 4);
        (0..2).for_each(|chunk| read_chunk(&mut cache, chunk));
        (2..5).for_each(|chunk| prefetch_chunk(&mut cache, chunk));
        // 2 and 3 are in the oldest generation, 0 and 1 in the youngest: 4 evicts 2.
        assert_eq!([0, 1, 2, 3, 4].map(|chunk| cache.contains(chunk)), [true, true, false, true, true]);
    }

    #[test]
    fn page_used_since_last_scan_is_kept() {
        let mut cache = MgLruCache::new(8, 2);
        (0..2).for_each(|chunk| prefetch_chunk(&mut cache, chunk));
        assert_eq!(cache.access(0), Access::Hit);
        assert_eq!(cache.prefetch(2), FetchResult::Started);
        assert!(cache.contains(0) && !cache.contains(1));
    }
}
