//! Page cache of Android: classic Linux with zram and the low memory killer.
//!
//! A [`TwoList`] whose capacity grows under pressure: each evicted chunk of file pages makes the kernel compress some
//! anonymous memory of other applications into zram (vm.swappiness), as long as there is any. A chunk compressed to a
//! part `p` of itself frees 1 - p. The low memory killer ends the run if there is pressure, nothing is left to
//! compress, and the page cache is below its threshold (lmkd, `ro.lmk.*`; formerly
//! drivers/staging/android/lowmemorykiller.c, `minfree`).
//!
//! Not checked against a machine. Not here: applications killed to make room, pages that come back from zram.

use super::{Access, Chunk, Counters, Fetch, PageCache, TwoList};

const PER_MILLE: u64 = 1000;

/// The memory of other applications, and the killer's threshold.
#[derive(Debug, Clone, Copy)]
pub struct ZramConfig {
    /// Chunks of compressible anonymous memory.
    pub swappable: u32,
    /// Thousandths of a chunk compressed for each evicted chunk.
    pub swapped_per_eviction: u32,
    /// The compressed size in thousandths.
    pub compressed: u32,
    /// The page cache below which the run is killed under pressure.
    pub kill_below: u32,
}

/// The page cache of an Android device.
#[derive(Debug, Clone)]
pub struct Android {
    lists: TwoList,
    /// The capacity in chunks while nothing is compressed.
    base: u32,
    zram: ZramConfig,
    killed: bool,
}

impl Android {
    /// An empty cache, with nothing compressed.
    pub fn new(lists: TwoList, zram: ZramConfig) -> Self {
        Self { base: lists.capacity(), lists, zram, killed: false }
    }

    /// Thousandths of chunks compressed.
    fn swapped(&self) -> u64 {
        let evicted = self.lists.counters().evicted - self.evicted_on_request();
        let max = u64::from(self.zram.swappable) * PER_MILLE;
        (evicted * u64::from(self.zram.swapped_per_eviction)).min(max)
    }

    /// Chunks that left by request, not under pressure.
    fn evicted_on_request(&self) -> u64 {
        let counted = self.lists.counters();
        counted.released + counted.discarded
    }

    fn update_capacity(&mut self) {
        let left = PER_MILLE.saturating_sub(u64::from(self.zram.compressed));
        let gain = self.swapped() * left / PER_MILLE / PER_MILLE;
        let capacity = u64::from(self.base) + gain;
        self.lists.set_capacity(capacity.min(u64::from(u32::MAX)) as u32);
    }
}

impl PageCache for Android {
    fn boxed(&self) -> Box<dyn PageCache> {
        Box::new(self.clone())
    }

    fn access(&mut self, chunk: Chunk) -> Access {
        self.lists.access(chunk)
    }

    fn resume(&mut self, chunk: Chunk) -> bool {
        self.lists.resume(chunk)
    }

    fn populate(&mut self, chunk: Chunk) -> Access {
        self.lists.populate(chunk)
    }

    fn prefetch(&mut self, chunk: Chunk) -> Fetch {
        let evicted = self.lists.counters().evicted;
        let fetch = self.lists.prefetch(chunk);
        if self.lists.counters().evicted > evicted {
            let exhausted = self.swapped() == u64::from(self.zram.swappable) * PER_MILLE;
            self.killed |= exhausted && self.lists.capacity() < self.zram.kill_below;
            self.update_capacity();
        }
        fetch
    }

    fn arrived(&mut self, chunk: Chunk) {
        self.lists.arrived(chunk);
    }

    fn release(&mut self, chunk: Chunk) {
        self.lists.release(chunk);
    }

    fn discard(&mut self, chunk: Chunk) {
        self.lists.discard(chunk);
    }

    fn set_capacity(&mut self, chunks: u32) {
        self.base = chunks;
        self.update_capacity();
    }

    fn capacity(&self) -> u32 {
        self.lists.capacity()
    }

    fn resident(&self) -> u32 {
        self.lists.resident()
    }

    fn share(&self) -> u32 {
        self.lists.share()
    }

    fn holds(&self, chunk: Chunk) -> bool {
        self.lists.holds(chunk)
    }

    fn counters(&self) -> Counters {
        self.lists.counters()
    }

    fn survives(&self) -> bool {
        !self.killed
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::cyclic;
    use super::*;

    fn zram(swappable: u32, kill_below: u32) -> ZramConfig {
        ZramConfig { swappable, swapped_per_eviction: 1000, compressed: 333, kill_below }
    }

    #[test]
    fn compression_frees_memory() {
        // 100 chunks, room for 80. Thirty compressed chunks leave 30 x 0.667 = 20: then everything fits.
        let mut cache = Android::new(TwoList::new(100, 80), zram(30, 0));
        cyclic(&mut cache, 1);
        // In the first round e evictions make 100 = 80 + 0.667 e + e, so e = 12 and twelve chunks gave 8.
        assert_eq!((cache.counters().evicted, cache.capacity()), (12, 88));
        assert_eq!(cyclic(&mut cache, 4), 0);
        assert_eq!(cache.capacity(), 100);
    }

    #[test]
    fn without_swappable_memory_equals_two_list() {
        let mut cache = Android::new(TwoList::new(100, 80), zram(0, 0));
        assert_eq!(cyclic(&mut cache, 5), 100);
        assert!(cache.survives());
    }

    #[test]
    fn killed_below_threshold() {
        let survives = |capacity, swappable| {
            let mut cache = Android::new(TwoList::new(100, capacity), zram(swappable, 40));
            cyclic(&mut cache, 3);
            cache.survives()
        };
        // Thirty chunks are below forty; with thirty compressed chunks there are fifty.
        assert!(!survives(30, 0) && survives(30, 30) && survives(50, 0));
        // Without pressure nothing is killed.
        let mut cache = Android::new(TwoList::new(20, 30), zram(0, 40));
        cyclic(&mut cache, 3);
        assert!(cache.survives());
    }
}
