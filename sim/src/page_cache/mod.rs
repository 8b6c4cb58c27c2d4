//! Page caches: which chunks of the weights are in a device's memory, and which must be read again.
//!
//! The weights are a file of equal chunks (2 MiB by default, 128 KiB where the details of reclaim matter). A policy
//! tracks which chunks are in memory, and decides which chunks are evicted to free memory. The simulation tells the
//! policy which chunks are touched, prefetched, read or evicted on request. A policy has no clock: the simulation
//! submits the reads and reports their arrivals.
//!
//! Every [`PageCache`] has two invariants: resident chunks never exceed the capacity, and every chunk that was read is
//! resident or evicted. `tests::check_invariants` checks them.
//!
//! | policy | model | source |
//! |---|---|---|
//! | [`PaperPageCache`] | reload = need - capacity | prima.cpp paper, appendix A.3 |
//! | [`TwoListCache`] | classic Linux in a memory cgroup | mm/vmscan.c, mm/workingset.c; measured |
//! | [`MgLruCache`] | Linux with generations | mm/vmscan.c; unvalidated |
//! | [`RandomCache`] | any chunk with equal probability | no kernel |
//! | [`MacosCache`], [`MacosMetalCache`] | queues, and a wired set | xnu; prima.cpp paper, Eq. 16; unvalidated |
//! | [`TwoListCache::with_zram`] | Android: classic Linux with zram | lmkd, zram; unvalidated |
//!
//! [`config`] builds the page cache of a device. [`Readahead`] decides which chunks are read with a missing chunk.

pub mod config;
mod list_cache;
mod lists;
mod macos;
mod mglru;
mod paper_linear;
mod random;
mod readahead;
mod two_list;
mod zram;

#[cfg(test)]
mod paper_figures;

pub use macos::{MacosCache, MacosMetalCache};
pub use mglru::MgLruCache;
pub use paper_linear::PaperPageCache;
pub use random::RandomCache;
pub use readahead::Readahead;
pub use two_list::TwoListCache;
pub use zram::ZramConfig;

/// Default size of a chunk in bytes.
pub const CHUNK_BYTES: u64 = 2 << 20;

/// The index of a chunk in the file of the weights.
pub type Chunk = u32;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// The chunk is in memory.
    Hit,
    /// A read of the chunk is in progress: wait for its arrival.
    InFlight,
    /// The chunk must be read: call [`PageCache::prefetch`], directly or through [`Readahead`].
    Absent,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FetchResult {
    /// The chunk is in memory or in flight.
    Present,
    /// Memory is allocated for the chunk: the caller must read it and report its arrival.
    Started,
    /// No memory is free and nothing can be evicted, for example because all chunks are in flight.
    NoMemory,
    /// Reclaim is not finished: call again after the time that the scan took.
    Retry,
}

/// Counts of what a page cache has done since the start of the run, in chunks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ChunkCounts {
    /// Number of chunks whose read was started.
    pub fetched: u64,
    pub evicted: u64,
    /// Number of chunks evicted by [`PageCache::release`]; included in `evicted`.
    pub released: u64,
    /// Number of chunks evicted by [`PageCache::discard`]; included in `evicted`.
    pub discarded: u64,
    /// Number of used chunks that reclaim has unmapped and evicted; included in `evicted`.
    pub unmapped: u64,
    /// Number of reads of chunks that had been evicted.
    pub refaults: u64,
    /// Number of chunks moved to the active list.
    pub activated: u64,
    /// Number of chunks scanned for reclaim. The thread that allocates memory scans them itself (direct reclaim).
    pub scanned: u64,
}

/// A page-cache policy, which decides which chunks of the weights stay in memory.
pub trait PageCache: std::fmt::Debug {
    /// Touches a chunk for a reader. If the chunk is missing, the reader waits and then [resumes](PageCache::resume).
    fn access(&mut self, chunk: Chunk) -> Access;
    /// Resumes a reader that waited for a chunk. Returns false if the chunk was evicted since it arrived.
    fn resume(&mut self, chunk: Chunk) -> bool {
        self.contains(chunk)
    }
    /// Touches a chunk with `MADV_POPULATE_READ`.
    fn populate(&mut self, chunk: Chunk) -> Access {
        self.access(chunk)
    }

    /// Allocates memory for a chunk that is about to be read; evicts other chunks if no memory is free.
    fn prefetch(&mut self, chunk: Chunk) -> FetchResult;
    fn on_arrival(&mut self, chunk: Chunk);
    /// Calls [`PageCache::prefetch`] until reclaim is complete, for callers that do not simulate the time of reclaim.
    fn prefetch_now(&mut self, chunk: Chunk) -> FetchResult {
        loop {
            match self.prefetch(chunk) {
                FetchResult::Retry => {}
                fetch => return fetch,
            }
        }
    }
    /// Evicts a chunk that will not be needed soon, as `MADV_PAGEOUT` does. A chunk in flight is not evicted.
    fn release(&mut self, chunk: Chunk);
    /// Unmaps and evicts a chunk with `POSIX_FADV_DONTNEED`. A later read of the chunk does not count as a refault.
    fn discard(&mut self, chunk: Chunk) {
        self.release(chunk);
    }

    /// Handles a long idle time, after which the system unwires memory.
    fn on_idle(&mut self) {}
    /// Returns false after the process was killed for lack of memory.
    fn is_process_alive(&self) -> bool {
        true
    }

    /// Sets the capacity in chunks, for example after other programs have allocated or freed memory.
    fn set_capacity(&mut self, chunks: u32);
    /// Returns the capacity in chunks.
    fn capacity(&self) -> u32;
    /// Returns the number of allocated chunks, including those in flight.
    fn resident_chunks(&self) -> u32;
    /// Returns the number of chunks in the file of the weights.
    fn file_chunks(&self) -> u32;
    /// Returns whether a chunk is in memory. A chunk in flight is not.
    fn contains(&self, chunk: Chunk) -> bool;
    fn counters(&self) -> ChunkCounts;
}

#[cfg(test)]
pub(crate) mod tests {
    use proptest::prelude::*;

    use super::*;

    #[derive(Debug, Clone)]
    pub(crate) enum CacheOp {
        Access(Chunk),
        Prefetch(Chunk),
        Arrive,
        Release(Chunk),
        Capacity(u32),
        Idle,
    }

    /// Performs operations on a page cache and checks its invariants after each operation.
    pub(crate) fn check_invariants(cache: &mut dyn PageCache, ops: &[CacheOp]) {
        let mut in_flight = std::collections::VecDeque::new();
        for op in ops {
            let before = cache.resident_chunks();
            match *op {
                CacheOp::Access(chunk) => {
                    let held = cache.contains(chunk);
                    assert_eq!(cache.access(chunk) == Access::Hit, held, "{op:?}");
                }
                CacheOp::Prefetch(chunk) => {
                    let held = cache.contains(chunk) || in_flight.contains(&chunk);
                    let fetch = cache.prefetch_now(chunk);
                    assert_eq!(fetch == FetchResult::Present, held, "{op:?}");
                    if fetch == FetchResult::Started {
                        in_flight.push_back(chunk);
                    }
                }
                CacheOp::Arrive => {
                    if let Some(chunk) = in_flight.pop_front() {
                        cache.on_arrival(chunk);
                        assert!(cache.contains(chunk), "{op:?}");
                    }
                }
                CacheOp::Release(chunk) => {
                    cache.release(chunk);
                    assert!(!cache.contains(chunk), "{op:?}");
                }
                CacheOp::Capacity(chunks) => cache.set_capacity(chunks),
                CacheOp::Idle => cache.on_idle(),
            }
            // Chunks in flight cannot be evicted when the capacity shrinks, but no chunk is added.
            let bound = if matches!(op, CacheOp::Capacity(_)) { in_flight.len() as u32 } else { before };
            let resident = cache.resident_chunks();
            assert!(resident <= cache.capacity().max(bound), "{resident} after {op:?}");
            let held = (0..cache.file_chunks()).filter(|&chunk| cache.contains(chunk)).count();
            assert_eq!(held + in_flight.len(), resident as usize, "{op:?}");
            let counted = cache.counters();
            assert_eq!(counted.fetched - counted.evicted, u64::from(resident), "{op:?}");
        }
    }

    pub(crate) fn zram_config(swappable: u32, swapped_per_eviction: u32, kill_threshold: u32) -> ZramConfig {
        ZramConfig {
            swappable_chunks: swappable,
            swapped_per_eviction_permille: swapped_per_eviction,
            compressed_permille: 333,
            kill_threshold_chunks: kill_threshold,
        }
    }

    const CHUNKS: u32 = 24;

    fn ops() -> impl Strategy<Value = Vec<CacheOp>> {
        let op = prop_oneof![
            4 => (0..CHUNKS).prop_map(CacheOp::Access),
            4 => (0..CHUNKS).prop_map(CacheOp::Prefetch),
            6 => Just(CacheOp::Arrive),
            1 => (0..CHUNKS).prop_map(CacheOp::Release),
            1 => (0..CHUNKS).prop_map(CacheOp::Capacity),
            1 => Just(CacheOp::Idle),
        ];
        prop::collection::vec(op, 0..200)
    }

    proptest! {
        #[test]
        fn every_policy_keeps_invariants(
            ops in ops(), capacity in 1..CHUNKS, seed: u64, floor in 0..CHUNKS, swappable in 0..CHUNKS, rate in 0u32..3000,
        ) {
            let zram = zram_config(swappable, rate, 4);
            for cache in [
                &mut PaperPageCache::new(CHUNKS, capacity) as &mut dyn PageCache,
                &mut TwoListCache::new(CHUNKS, capacity),
                &mut MgLruCache::new(CHUNKS, capacity),
                &mut RandomCache::new(CHUNKS, capacity, seed, 0),
                &mut MacosCache::new(CHUNKS, capacity, floor),
                &mut MacosMetalCache::new(CHUNKS, capacity, floor),
                &mut TwoListCache::new(CHUNKS, capacity).with_zram(zram),
            ] {
                check_invariants(cache, &ops);
            }
        }
    }

    /// Touches a chunk, and reads the chunk if it is missing.
    pub(crate) fn read_chunk(cache: &mut dyn PageCache, chunk: Chunk) {
        if cache.access(chunk) == Access::Absent {
            prefetch_chunk(cache, chunk);
            assert!(cache.resume(chunk));
        }
    }

    pub(crate) fn prefetch_chunk(cache: &mut dyn PageCache, chunk: Chunk) {
        assert_eq!(cache.prefetch_now(chunk), FetchResult::Started);
        cache.on_arrival(chunk);
    }

    /// Reads all chunks of the file in order, `rounds` times. Returns the number of chunks fetched in the last round.
    pub(crate) fn read_cyclically(cache: &mut dyn PageCache, rounds: u32) -> u64 {
        let mut before = 0;
        for _ in 0..rounds {
            before = cache.counters().fetched;
            (0..cache.file_chunks()).for_each(|chunk| read_chunk(cache, chunk));
        }
        cache.counters().fetched - before
    }

    #[test]
    fn cyclic_reads_by_policy() {
        let zram = zram_config(0, 1000, 0);
        // The name, the cache of a file of 100 chunks, the number of rounds, and the chunks read in the last one.
        let cases: [(&str, &mut dyn PageCache, u32, u64); 12] = [
            ("paper-linear, fits", &mut PaperPageCache::new(100, 100), 3, 0),
            ("two-list, fits", &mut TwoListCache::new(100, 100), 3, 0),
            ("mglru, fits", &mut MgLruCache::new(100, 100), 3, 0),
            ("random, fits", &mut RandomCache::new(100, 100, 1, 0), 3, 0),
            ("macos, fits", &mut MacosCache::new(100, 100, 15), 3, 0),
            ("macos-metal, fits", &mut MacosMetalCache::new(100, 100, 50), 3, 0),
            // The file exceeds the capacity by ten chunks: the paper's policy reads ten again, Linux all.
            ("paper-linear", &mut PaperPageCache::new(100, 90), 5, 10),
            ("two-list", &mut TwoListCache::new(100, 90), 5, 100),
            ("zram without swappable memory", &mut TwoListCache::new(100, 80).with_zram(zram), 5, 100),
            // Each chunk is used once and then passes through all generations before its next use.
            ("mglru", &mut MgLruCache::new(100, 90), 6, 100),
            // According to the paper all of the file is read again, or nothing.
            ("macos-metal, wired", &mut MacosMetalCache::new(100, 100, 40), 4, 0),
            ("macos-metal", &mut MacosMetalCache::new(100, 99, 40), 4, 100),
        ];
        for (name, cache, rounds, expected) in cases {
            assert_eq!(read_cyclically(cache, rounds), expected, "{name}");
            assert!(cache.is_process_alive(), "{name}");
            if expected == 0 {
                assert_eq!(cache.counters().fetched, 100, "{name}");
            }
        }
    }
}
