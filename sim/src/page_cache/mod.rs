//! Page caches: which chunks of the weights are in a device's memory, and which must be read again.
//!
//! A device's share of the weights is a file of equal chunks (2 MiB by default, 128 KiB where the details of reclaim
//! matter). A policy tracks which chunks are in memory, and decides which chunks are evicted to free memory. The
//! simulation tells the policy which chunks are touched, prefetched, read or evicted on request. A policy has no clock:
//! the simulation submits the reads and reports their arrivals.
//!
//! The contract of [`PageCache`], which `tests::check_invariants` checks for every policy: resident chunks never
//! exceed the capacity, and every chunk that was read is resident or evicted.
//!
//! | policy | model | source |
//! |---|---|---|
//! | [`PaperFormulaCache`] | reload = need - capacity | prima.cpp paper, appendix A.3 |
//! | [`TwoListCache`] | classic Linux in a memory cgroup | mm/vmscan.c, mm/workingset.c; measured |
//! | [`MgLruCache`] | Linux with generations | mm/vmscan.c; unvalidated |
//! | [`RandomCache`] | any chunk with equal probability | no kernel |
//! | [`MacosCache`], [`MacosMetalCache`] | queues, and a wired set | xnu; prima.cpp paper, Eq. 16; unvalidated |
//! | [`TwoListCache::with_zram`] | Android: classic Linux with zram | lmkd, zram; unvalidated |
//!
//! [`config`] builds the policy of a device. [`Readahead`] decides which chunks are read with a missing chunk.

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
pub use paper_linear::PaperFormulaCache;
pub use random::RandomCache;
pub use readahead::Readahead;
pub use two_list::TwoListCache;
pub use zram::ZramConfig;

/// Default size of a chunk in bytes.
pub const CHUNK_BYTES: u64 = 2 << 20;

/// The index of a chunk in a device's share of the weights.
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
pub enum Fetch {
    /// The chunk is in memory or in flight.
    Present,
    /// Memory is allocated for the chunk: the caller must read it and report its arrival.
    Started,
    /// No memory is free and nothing can be evicted, for example because all chunks are in flight.
    NoMemory,
    /// Reclaim is not finished: call again after the time that the scan took.
    Again,
}

/// Counts of what a page cache has done since the start of the run, in chunks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counters {
    /// Number of chunks whose read was started.
    pub fetched: u64,
    pub evicted: u64,
    /// Number of chunks evicted by [`PageCache::release`]; included in `evicted`.
    pub released: u64,
    /// Number of chunks evicted by [`PageCache::discard`]; included in `evicted`.
    pub discarded: u64,
    /// Number of used chunks evicted by reclaim, which has to unmap these chunks; included in `evicted`.
    pub unmapped: u64,
    /// Number of reads of chunks that had been evicted.
    pub refaults: u64,
    /// Number of chunks moved to the active list.
    pub activated: u64,
    /// Number of chunks scanned for reclaim, which takes time of the thread that allocates memory.
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
    fn prefetch(&mut self, chunk: Chunk) -> Fetch;
    fn on_arrival(&mut self, chunk: Chunk);
    /// Calls [`PageCache::prefetch`] until reclaim is complete, for callers that do not simulate the time of reclaim.
    fn prefetch_now(&mut self, chunk: Chunk) -> Fetch {
        loop {
            match self.prefetch(chunk) {
                Fetch::Again => {}
                fetch => return fetch,
            }
        }
    }
    /// Evicts a chunk that will not be needed soon, as `MADV_PAGEOUT` does. A chunk in flight is not evicted.
    fn release(&mut self, chunk: Chunk);
    /// Evicts a chunk by unmapping and `POSIX_FADV_DONTNEED`, without a shadow entry: a later read is no refault.
    fn discard(&mut self, chunk: Chunk) {
        self.release(chunk);
    }

    /// Handles an idle time after which the system unwires memory.
    fn on_idle(&mut self) {}
    /// Whether the process has not been killed for lack of memory.
    fn is_alive(&self) -> bool {
        true
    }

    /// Sets the capacity in chunks, when other programs allocate or free memory.
    fn set_capacity(&mut self, chunks: u32);
    /// Returns the capacity in chunks.
    fn capacity(&self) -> u32;
    /// Returns the number of allocated chunks, including those in flight.
    fn resident_chunks(&self) -> u32;
    /// Returns the number of chunks in the device's share.
    fn share_chunks(&self) -> u32;
    /// Whether a chunk is in memory, and not in flight.
    fn contains(&self, chunk: Chunk) -> bool;
    fn counters(&self) -> Counters;
}

#[cfg(test)]
pub(crate) mod tests {
    use proptest::prelude::*;

    use super::*;

    #[derive(Debug, Clone)]
    pub(crate) enum Op {
        Access(Chunk),
        Prefetch(Chunk),
        Arrive,
        Release(Chunk),
        Capacity(u32),
        Idle,
    }

    /// Performs operations on a page cache and checks the invariants of the page cache after each operation.
    pub(crate) fn check_invariants(cache: &mut dyn PageCache, ops: &[Op]) {
        let mut in_flight = std::collections::VecDeque::new();
        for op in ops {
            let before = cache.resident_chunks();
            match *op {
                Op::Access(chunk) => {
                    let held = cache.contains(chunk);
                    assert_eq!(cache.access(chunk) == Access::Hit, held, "{op:?}");
                }
                Op::Prefetch(chunk) => {
                    let held = cache.contains(chunk) || in_flight.contains(&chunk);
                    let fetch = cache.prefetch_now(chunk);
                    assert_eq!(fetch == Fetch::Present, held, "{op:?}");
                    if fetch == Fetch::Started {
                        in_flight.push_back(chunk);
                    }
                }
                Op::Arrive => {
                    if let Some(chunk) = in_flight.pop_front() {
                        cache.on_arrival(chunk);
                        assert!(cache.contains(chunk), "{op:?}");
                    }
                }
                Op::Release(chunk) => {
                    cache.release(chunk);
                    assert!(!cache.contains(chunk), "{op:?}");
                }
                Op::Capacity(chunks) => cache.set_capacity(chunks),
                Op::Idle => cache.on_idle(),
            }
            // Chunks in flight cannot be evicted when the capacity shrinks, but no chunk is added.
            let bound = if matches!(op, Op::Capacity(_)) { in_flight.len() as u32 } else { before };
            let resident = cache.resident_chunks();
            assert!(resident <= cache.capacity().max(bound), "{resident} after {op:?}");
            let held = (0..cache.share_chunks()).filter(|&chunk| cache.contains(chunk)).count();
            assert_eq!(held + in_flight.len(), resident as usize, "{op:?}");
            let counted = cache.counters();
            assert_eq!(counted.fetched - counted.evicted, u64::from(resident), "{op:?}");
        }
    }

    pub(crate) fn zram(swappable_chunks: u32, swapped_per_eviction: u32, kill_threshold: u32) -> ZramConfig {
        ZramConfig {
            swappable_chunks,
            swapped_per_eviction_permille: swapped_per_eviction,
            compressed_permille: 333,
            kill_threshold_chunks: kill_threshold,
        }
    }

    const SHARE: u32 = 24;

    fn ops() -> impl Strategy<Value = Vec<Op>> {
        let op = prop_oneof![
            4 => (0..SHARE).prop_map(Op::Access),
            4 => (0..SHARE).prop_map(Op::Prefetch),
            6 => Just(Op::Arrive),
            1 => (0..SHARE).prop_map(Op::Release),
            1 => (0..SHARE).prop_map(Op::Capacity),
            1 => Just(Op::Idle),
        ];
        prop::collection::vec(op, 0..200)
    }

    proptest! {
        #[test]
        fn every_policy_keeps_invariants(
            ops in ops(), capacity in 1..SHARE, seed: u64, floor in 0..SHARE, swappable in 0..SHARE, rate in 0u32..3000,
        ) {
            let zram = zram(swappable, rate, 4);
            for cache in [
                &mut PaperFormulaCache::new(SHARE, capacity) as &mut dyn PageCache,
                &mut TwoListCache::new(SHARE, capacity),
                &mut MgLruCache::new(SHARE, capacity),
                &mut RandomCache::new(SHARE, capacity, seed, 0),
                &mut MacosCache::new(SHARE, capacity, floor),
                &mut MacosMetalCache::new(SHARE, capacity, floor),
                &mut TwoListCache::new(SHARE, capacity).with_zram(zram),
            ] {
                check_invariants(cache, &ops);
            }
        }
    }

    /// Touches a chunk, and reads the chunk if it is missing.
    pub(crate) fn read(cache: &mut dyn PageCache, chunk: Chunk) {
        if cache.access(chunk) == Access::Absent {
            prefetch(cache, chunk);
            assert!(cache.resume(chunk));
        }
    }

    pub(crate) fn prefetch(cache: &mut dyn PageCache, chunk: Chunk) {
        assert_eq!(cache.prefetch_now(chunk), Fetch::Started);
        cache.on_arrival(chunk);
    }

    /// Reads all chunks of a share in order, `rounds` times. Returns the number of chunks fetched in the last round.
    pub(crate) fn cyclic(cache: &mut dyn PageCache, rounds: u32) -> u64 {
        let mut before = 0;
        for _ in 0..rounds {
            before = cache.counters().fetched;
            (0..cache.share_chunks()).for_each(|chunk| read(cache, chunk));
        }
        cache.counters().fetched - before
    }

    #[test]
    fn cyclic_reads_by_policy() {
        let zram = zram(0, 1000, 0);
        // The name, the cache of a share of 100 chunks, the number of rounds, and the chunks read in the last one.
        let cases: [(&str, &mut dyn PageCache, u32, u64); 12] = [
            ("paper-linear, fits", &mut PaperFormulaCache::new(100, 100), 3, 0),
            ("two-list, fits", &mut TwoListCache::new(100, 100), 3, 0),
            ("mglru, fits", &mut MgLruCache::new(100, 100), 3, 0),
            ("random, fits", &mut RandomCache::new(100, 100, 1, 0), 3, 0),
            ("macos, fits", &mut MacosCache::new(100, 100, 15), 3, 0),
            ("macos-metal, fits", &mut MacosMetalCache::new(100, 100, 50), 3, 0),
            // The share exceeds the capacity by ten chunks: the paper's policy reads ten again, Linux all.
            ("paper-linear", &mut PaperFormulaCache::new(100, 90), 5, 10),
            ("two-list", &mut TwoListCache::new(100, 90), 5, 100),
            ("zram without swappable memory", &mut TwoListCache::new(100, 80).with_zram(zram), 5, 100),
            // Each chunk is used once and then passes through all generations before its next use.
            ("mglru", &mut MgLruCache::new(100, 90), 6, 100),
            // According to the paper all of the share is read again, or nothing.
            ("macos-metal, wired", &mut MacosMetalCache::new(100, 100, 40), 4, 0),
            ("macos-metal", &mut MacosMetalCache::new(100, 99, 40), 4, 100),
        ];
        for (name, cache, rounds, expected) in cases {
            assert_eq!(cyclic(cache, rounds), expected, "{name}");
            assert!(cache.is_alive(), "{name}");
            if expected == 0 {
                assert_eq!(cache.counters().fetched, 100, "{name}");
            }
        }
    }
}
