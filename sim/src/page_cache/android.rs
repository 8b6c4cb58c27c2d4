//! Page cache of Android: classic Linux with zram and the low memory killer.
//!
//! A [`TwoList`] whose capacity grows under pressure: for each evicted chunk of file pages the kernel compresses some
//! anonymous memory of other applications into zram (vm.swappiness), until none is left. A chunk that is compressed
//! to a fraction `p` of its size frees 1 - p. The low memory killer ends the run if there is pressure, nothing is
//! left to compress, and the page cache is below its threshold (lmkd, `ro.lmk.*`; formerly
//! drivers/staging/android/lowmemorykiller.c, `minfree`).
//!
//! Not checked against a machine. Not here: applications that are killed to free memory, pages that are read back
//! from zram.

use super::{Access, Chunk, Counters, Fetch, PageCache, TwoList};

const PER_MILLE: u64 = 1000;

/// Parameters of zram and of the low memory killer.
#[derive(Debug, Clone, Copy)]
pub struct ZramConfig {
    /// Chunks of compressible anonymous memory.
    pub swappable_chunks: u32,
    /// Thousandths of a chunk compressed for each evicted chunk.
    pub swapped_per_eviction: u32,
    /// Compressed size in thousandths of the original size.
    pub compressed_size: u32,
    /// Page-cache size in chunks below which the process is killed under memory pressure.
    pub kill_threshold: u32,
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
    /// Creates an empty cache, with nothing compressed.
    pub fn new(lists: TwoList, zram: ZramConfig) -> Self {
        Self { base: lists.capacity(), lists, zram, killed: false }
    }

    /// Returns the anonymous memory compressed so far, in thousandths of a chunk.
    fn compressed_thousandths(&self) -> u64 {
        let evicted = self.lists.counters().evicted - self.evicted_on_request();
        let max = u64::from(self.zram.swappable_chunks) * PER_MILLE;
        (evicted * u64::from(self.zram.swapped_per_eviction)).min(max)
    }

    /// Returns the number of chunks evicted on request, not under memory pressure.
    fn evicted_on_request(&self) -> u64 {
        let counted = self.lists.counters();
        counted.released + counted.discarded
    }

    fn update_capacity(&mut self) {
        let left = PER_MILLE.saturating_sub(u64::from(self.zram.compressed_size));
        let gain = self.compressed_thousandths() * left / PER_MILLE / PER_MILLE;
        let capacity = u64::from(self.base) + gain;
        self.lists.set_capacity(capacity.min(u64::from(u32::MAX)) as u32);
    }
}

impl PageCache for Android {
    fn clone_boxed(&self) -> Box<dyn PageCache> {
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
            let exhausted =
                self.compressed_thousandths() == u64::from(self.zram.swappable_chunks) * PER_MILLE;
            self.killed |= exhausted && self.lists.capacity() < self.zram.kill_threshold;
            self.update_capacity();
        }
        fetch
    }

    fn on_arrival(&mut self, chunk: Chunk) {
        self.lists.on_arrival(chunk);
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

    fn resident_chunks(&self) -> u32 {
        self.lists.resident_chunks()
    }

    fn share_chunks(&self) -> u32 {
        self.lists.share_chunks()
    }

    fn holds(&self, chunk: Chunk) -> bool {
        self.lists.holds(chunk)
    }

    fn counters(&self) -> Counters {
        self.lists.counters()
    }

    fn is_alive(&self) -> bool {
        !self.killed
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::cyclic;
    use super::*;

    fn zram(swappable_chunks: u32, kill_threshold: u32) -> ZramConfig {
        ZramConfig { swappable_chunks, swapped_per_eviction: 1000, compressed_size: 333, kill_threshold }
    }

    #[test]
    fn compression_frees_memory() {
        // 100 chunks, of which 80 fit. Compressing thirty chunks frees 30 x 0.667 = 20, so that all fit.
        let mut cache = Android::new(TwoList::new(100, 80), zram(30, 0));
        cyclic(&mut cache, 1);
        // In the first round e evictions satisfy 100 = 80 + 0.667 e + e, so e = 12, and twelve compressed chunks
        // freed 8.
        assert_eq!((cache.counters().evicted, cache.capacity()), (12, 88));
        assert_eq!(cyclic(&mut cache, 4), 0);
        assert_eq!(cache.capacity(), 100);
    }

    #[test]
    fn without_swappable_memory_equals_two_list() {
        let mut cache = Android::new(TwoList::new(100, 80), zram(0, 0));
        assert_eq!(cyclic(&mut cache, 5), 100);
        assert!(cache.is_alive());
    }

    #[test]
    fn killed_below_threshold() {
        let is_alive = |capacity, swappable| {
            let mut cache = Android::new(TwoList::new(100, capacity), zram(swappable, 40));
            cyclic(&mut cache, 3);
            cache.is_alive()
        };
        // A capacity of thirty chunks is below forty; compressing thirty chunks raises it to fifty.
        assert!(!is_alive(30, 0) && is_alive(30, 30) && is_alive(50, 0));
        // Without pressure nothing is killed.
        let mut cache = Android::new(TwoList::new(20, 30), zram(0, 40));
        cyclic(&mut cache, 3);
        assert!(cache.is_alive());
    }
}
