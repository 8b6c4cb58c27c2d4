//! Page caches: which chunks of its weights a device holds in memory, and which it must read again.
//!
//! A device's share of the weights is a file of equal chunks (2 MiB by default, 128 KiB where the details of reclaim
//! matter). A policy is told which chunks are touched, read ahead, arrived and evicted on request; it answers what is
//! in memory, and decides what is evicted to make room. It knows no time: the simulation submits the reads and reports
//! their arrivals.
//!
//! The law of [`PageCache`], checked by `tests::check_invariants` for every policy: resident chunks never exceed the
//! capacity, and hits + misses = touches requested.
//!
//! | policy | model | source |
//! |---|---|---|
//! | [`PaperLinear`] | reload = need - capacity | prima.cpp paper, appendix A.3 |
//! | [`TwoList`] | classic Linux in a memory cgroup | mm/vmscan.c, mm/workingset.c; measured |
//! | [`MgLru`] | Linux with generations | mm/vmscan.c; unvalidated |
//! | [`Random`] | any chunk with equal probability | no kernel |
//! | [`Macos`], [`MacosMetal`] | queues, and a wired set | xnu; prima.cpp paper, Eq. 16; unvalidated |
//! | [`Android`] | classic Linux with zram | lmkd, zram; unvalidated |
//!
//! [`for_device`] builds the policy of a device. [`Readahead`], the same for every policy, decides what is read with a miss.

mod android;
pub mod for_device;
mod listed;
mod lists;
mod macos;
mod mglru;
mod paper_linear;
mod random;
mod readahead;
mod two_list;

#[cfg(test)]
mod paper_figures;

pub use android::{Android, ZramConfig};
pub use macos::{Macos, MacosMetal};
pub use mglru::MgLru;
pub use paper_linear::PaperLinear;
pub use random::Random;
pub use readahead::Readahead;
pub use two_list::TwoList;

/// The default size of a chunk.
pub const CHUNK_BYTES: u64 = 2 << 20;

/// The index of a chunk in a device's share.
pub type Chunk = u32;

/// The result of a touch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// The chunk is in memory.
    Hit,
    /// A read of it is in progress: wait for its arrival.
    InFlight,
    /// The chunk must be read, by [`PageCache::prefetch`] and possibly by read-ahead.
    Absent,
}

/// The result of a request to read ahead.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fetch {
    /// The chunk is in memory or in flight.
    Present,
    /// Room was made; the caller must read it and report its arrival.
    Started,
    /// Nothing can be evicted now, everything is in flight.
    NoRoom,
    /// Reclaim takes time: let it pass and ask again.
    Again,
}

/// Totals in chunks since the start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counters {
    pub requested: u64,
    /// Touches of chunks in memory.
    pub hits: u64,
    /// Other touches.
    pub misses: u64,
    /// Reads started.
    pub fetched: u64,
    pub evicted: u64,
    /// The part of them evicted by [`PageCache::release`].
    pub released: u64,
    /// The part of them evicted by [`PageCache::discard`].
    pub discarded: u64,
    /// Used chunks among the rest, which reclaim unmaps.
    pub unmapped: u64,
    /// Reads of chunks that had been evicted.
    pub refaults: u64,
    /// Chunks moved to the active list.
    pub activated: u64,
    /// Chunks scanned for reclaim, which takes time of some thread.
    pub scanned: u64,
}

/// A policy that decides what stays in memory.
pub trait PageCache: std::fmt::Debug {
    /// A copy, because a simulation can be copied.
    fn boxed(&self) -> Box<dyn PageCache>;

    /// The reader touches a chunk. If it is not in memory the reader waits, and its touch counts when it
    /// [resumes](PageCache::resume).
    fn access(&mut self, chunk: Chunk) -> Access;
    /// The reader that waited for a chunk runs again and maps it. Returns false if the chunk was evicted since its
    /// arrival: then the reader faults again.
    fn resume(&mut self, chunk: Chunk) -> bool {
        self.holds(chunk)
    }
    /// A touch by `MADV_POPULATE_READ`.
    fn populate(&mut self, chunk: Chunk) -> Access {
        self.access(chunk)
    }

    /// Allocates a chunk that is about to be read, evicting others if there is no room.
    fn prefetch(&mut self, chunk: Chunk) -> Fetch;
    /// A chunk in flight has been read.
    fn arrived(&mut self, chunk: Chunk);
    /// Like [`PageCache::prefetch`], for a caller that cannot let time pass.
    fn prefetch_now(&mut self, chunk: Chunk) -> Fetch {
        loop {
            match self.prefetch(chunk) {
                Fetch::Again => {}
                done => return done,
            }
        }
    }
    /// Evicts a chunk that will not be needed soon, as `MADV_PAGEOUT` does. One in flight stays.
    fn release(&mut self, chunk: Chunk);
    /// Evicts a chunk by unmapping and `POSIX_FADV_DONTNEED`, which leaves no shadow: its return is no refault.
    fn discard(&mut self, chunk: Chunk) {
        self.release(chunk);
    }

    /// Handles an idle time after which the system takes back wired memory.
    fn on_idle(&mut self) {}
    /// Whether the process has not been killed for lack of memory.
    fn survives(&self) -> bool {
        true
    }

    /// Sets the capacity in chunks, because other programs take or return memory.
    fn set_capacity(&mut self, chunks: u32);
    /// The capacity in chunks.
    fn capacity(&self) -> u32;
    /// Chunks allocated, including those in flight.
    fn resident(&self) -> u32;
    /// Chunks of the device's share.
    fn share(&self) -> u32;
    /// Whether a chunk is in memory.
    fn holds(&self, chunk: Chunk) -> bool;
    /// Totals since the start.
    fn counters(&self) -> Counters;
}

impl Clone for Box<dyn PageCache> {
    fn clone(&self) -> Self {
        self.boxed()
    }
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

    /// Checks the invariants of every policy under any order of operations.
    pub(crate) fn check_invariants(cache: &mut dyn PageCache, ops: &[Op]) {
        let mut in_flight = std::collections::VecDeque::new();
        for op in ops {
            let before = cache.resident();
            match *op {
                Op::Access(chunk) => {
                    let held = cache.holds(chunk);
                    assert_eq!(cache.access(chunk) == Access::Hit, held, "{op:?}");
                }
                Op::Prefetch(chunk) => {
                    let held = cache.holds(chunk) || in_flight.contains(&chunk);
                    let fetch = cache.prefetch_now(chunk);
                    assert_eq!(fetch == Fetch::Present, held, "{op:?}");
                    if fetch == Fetch::Started {
                        in_flight.push_back(chunk);
                    }
                }
                Op::Arrive => {
                    if let Some(chunk) = in_flight.pop_front() {
                        cache.arrived(chunk);
                        assert!(cache.holds(chunk), "{op:?}");
                    }
                }
                Op::Release(chunk) => {
                    cache.release(chunk);
                    assert!(!cache.holds(chunk), "{op:?}");
                }
                Op::Capacity(chunks) => cache.set_capacity(chunks),
                Op::Idle => cache.on_idle(),
            }
            // Chunks in flight cannot be evicted when the capacity shrinks; but nothing is added.
            let bound = if matches!(op, Op::Capacity(_)) { in_flight.len() as u32 } else { before };
            assert!(cache.resident() <= cache.capacity().max(bound), "{} after {op:?}", cache.resident());
            let held = (0..cache.share()).filter(|&chunk| cache.holds(chunk)).count();
            assert_eq!(held + in_flight.len(), cache.resident() as usize, "{op:?}");
            let counted = cache.counters();
            assert_eq!(counted.hits + counted.misses, counted.requested, "{op:?}");
            assert_eq!(counted.fetched - counted.evicted, u64::from(cache.resident()), "{op:?}");
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
            let zram = ZramConfig { swappable, swapped_per_eviction: rate, compressed: 333, kill_below: 4 };
            for cache in [
                &mut PaperLinear::new(SHARE, capacity) as &mut dyn PageCache,
                &mut TwoList::new(SHARE, capacity),
                &mut MgLru::new(SHARE, capacity),
                &mut Random::new(SHARE, capacity, seed, 0),
                &mut Macos::new(SHARE, capacity, floor),
                &mut MacosMetal::new(SHARE, capacity, floor),
                &mut Android::new(TwoList::new(SHARE, capacity), zram),
            ] {
                check_invariants(cache, &ops);
            }
        }
    }

    /// Touches a chunk and reads it if it is missing.
    pub(crate) fn read(cache: &mut dyn PageCache, chunk: Chunk) {
        if cache.access(chunk) == Access::Absent {
            prefetch(cache, chunk);
            assert!(cache.resume(chunk));
        }
    }

    /// Reads a chunk ahead.
    pub(crate) fn prefetch(cache: &mut dyn PageCache, chunk: Chunk) {
        assert_eq!(cache.prefetch_now(chunk), Fetch::Started);
        cache.arrived(chunk);
    }

    /// Reads a share cyclically, one chunk after another, and returns the fetches of the last round.
    pub(crate) fn cyclic(cache: &mut dyn PageCache, rounds: u32) -> u64 {
        let mut before = 0;
        for _ in 0..rounds {
            before = cache.counters().fetched;
            (0..cache.share()).for_each(|chunk| read(cache, chunk));
        }
        cache.counters().fetched - before
    }

    #[test]
    fn fitting_share_is_read_once() {
        for cache in [
            &mut PaperLinear::new(100, 100) as &mut dyn PageCache,
            &mut TwoList::new(100, 100),
            &mut MgLru::new(100, 100),
            &mut Random::new(100, 100, 1, 0),
            &mut Macos::new(100, 100, 15),
            &mut MacosMetal::new(100, 100, 50),
        ] {
            assert_eq!(cyclic(cache, 3), 0);
            assert_eq!(cache.counters().fetched, 100);
        }
    }

    #[test]
    fn paper_linear_and_two_list_differ_on_oversized_share() {
        // Ten chunks too many: the paper reads ten again, Linux everything.
        assert_eq!(cyclic(&mut PaperLinear::new(100, 90), 5), 10);
        assert_eq!(cyclic(&mut TwoList::new(100, 90), 5), 100);
    }
}
