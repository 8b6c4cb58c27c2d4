//! Page cache that evicts at random.
//!
//! Every chunk that is not in flight is evicted with equal probability. A cyclic scan of s chunks with a capacity of c
//! chunks has m misses, more than the excess s - c and fewer than s: between two uses of a chunk about m others are
//! evicted, so it is still in memory with probability (1 - 1/c)^m, and m = s (1 - (1 - 1/c)^m). No kernel does this.
//! The number of misses is between those of [`super::PaperPageCache`] and of LRU.

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
    /// Creates an empty page cache. The seed and the device ID determine which chunks are evicted.
    pub fn new(file_chunks: u32, capacity: u32, seed: u64, device_id: u64) -> Self {
        let stream = random::stream(seed, StreamPurpose::Eviction, 0, device_id);
        let policy = RandomEvictionPolicy { stream, held: Vec::new(), at: vec![0; file_chunks as usize] };
        Self::with_policy(policy, 1, file_chunks, capacity)
    }
}

impl EvictionPolicy for RandomEvictionPolicy {
    fn insertion_list(&mut self, chunk: Chunk, _awaited: bool) -> usize {
        self.at[chunk as usize] = self.held.len() as u32;
        self.held.push(chunk);
        0
    }

    fn victim(&mut self, lists: &mut ChunkLists) -> Option<Chunk> {
        if lists.are_all_in_flight() {
            return None;
        }
        let count = self.held.len();
        for _ in 0..MAX_DRAWS {
            let chunk = self.held[(self.stream.next_u64() % count as u64) as usize];
            lists.scanned_chunks += 1;
            if !lists.is_in_flight(chunk) {
                return Some(chunk);
            }
        }
        self.held.iter().copied().find(|&chunk| !lists.is_in_flight(chunk))
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
    use super::super::tests::read_cyclically;
    use super::*;

    #[test]
    fn cycle_reads_between_excess_and_all() {
        // s = 1000, c = 900: m = 1000 (1 - e^(-m / 900)) has the solution m = 193.
        let reads = read_cyclically(&mut RandomCache::new(1000, 900, 7, 0), 30);
        assert!((160..240).contains(&reads), "{reads}");
    }

    #[test]
    fn evictions_depend_on_seed_and_device() {
        let reads = |seed, device_id| {
            let mut cache = RandomCache::new(200, 150, seed, device_id);
            (1..8).map(|_| read_cyclically(&mut cache, 1)).collect::<Vec<_>>()
        };
        assert_eq!(reads(1, 0), reads(1, 0));
        assert!(reads(1, 0) != reads(1, 1) && reads(1, 0) != reads(2, 0));
    }
}
