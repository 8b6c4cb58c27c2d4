//! Page cache that evicts at random.
//!
//! Every chunk that is not in flight is evicted with equal probability. A cyclic scan of s chunks with a capacity of c
//! chunks has m misses, more than the excess s - c and fewer than s: between two uses of a chunk about m others are
//! evicted, so it is still in memory with probability (1 - 1/c)^m, and m = s (1 - (1 - 1/c)^m). No kernel does this;
//! the number of misses is between those of [`super::PaperFormulaCache`] and of LRU.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::Rng;

use super::Chunk;
use super::list_cache::{ChunkLists, EvictionPolicy, ListCache};
use crate::random::{self, StreamPurpose};

/// Maximum number of draws for an eviction. After that, the first chunk that is not in flight is evicted.
const MAX_DRAWS: u32 = 64;

#[derive(Debug)]
pub struct RandomEvictionPolicy {
    stream: ChaCha8Rng,
    held: Vec<Chunk>,
    /// The position of each chunk in `held`.
    at: Vec<u32>,
}

pub type RandomCache = ListCache<RandomEvictionPolicy>;

impl RandomCache {
    /// Creates an empty cache for `share` chunks; seed and device slot select which chunks are evicted.
    pub fn new(share: u32, capacity: u32, seed: u64, slot: u64) -> Self {
        let stream = random::stream(seed, StreamPurpose::Eviction, 0, slot);
        let rules = RandomEvictionPolicy { stream, held: Vec::new(), at: vec![0; share as usize] };
        Self::with_rules(rules, 1, share, capacity)
    }
}

impl EvictionPolicy for RandomEvictionPolicy {
    fn insertion_list(&mut self, chunk: Chunk, _awaited: bool) -> usize {
        self.at[chunk as usize] = self.held.len() as u32;
        self.held.push(chunk);
        0
    }

    fn victim(&mut self, pages: &mut ChunkLists) -> Option<Chunk> {
        if pages.are_all_in_flight() {
            return None;
        }
        let count = self.held.len();
        for _ in 0..MAX_DRAWS {
            let chunk = self.held[(self.stream.next_u64() % count as u64) as usize];
            pages.scanned_chunks += 1;
            if !pages.is_in_flight(chunk) {
                return Some(chunk);
            }
        }
        self.held.iter().copied().find(|&chunk| !pages.is_in_flight(chunk))
    }

    fn on_evict(&mut self, chunk: Chunk) {
        let at = self.at[chunk as usize];
        self.held.swap_remove(at as usize);
        if let Some(&moved) = self.held.get(at as usize) {
            self.at[moved as usize] = at;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::cyclic;
    use super::*;

    #[test]
    fn cycle_reads_between_excess_and_all() {
        // s = 1000, c = 900: m = 1000 (1 - e^(-m / 900)) has the solution m = 193.
        let reads = cyclic(&mut RandomCache::new(1000, 900, 7, 0), 30);
        assert!((160..240).contains(&reads), "{reads}");
    }

    #[test]
    fn evictions_follow_seed_and_place() {
        let reads = |seed, slot| {
            let mut cache = RandomCache::new(200, 150, seed, slot);
            (1..8).map(|_| cyclic(&mut cache, 1)).collect::<Vec<_>>()
        };
        assert_eq!(reads(1, 0), reads(1, 0));
        assert!(reads(1, 0) != reads(1, 1) && reads(1, 0) != reads(2, 0));
    }
}
