//! Memory pressure on Android: zram, and the low memory killer.
//!
//! The capacity of a [`super::TwoListCache`] grows under pressure: for each evicted chunk of file pages the kernel
//! compresses some anonymous memory of other applications into zram (vm.swappiness), until none is left. Compressing a
//! chunk to a fraction p of its size frees a fraction 1 - p. The low memory killer ends the run if there is memory
//! pressure, nothing is left to compress, and the page cache is smaller than a threshold (lmkd, `ro.lmk.*`; formerly
//! drivers/staging/android/lowmemorykiller.c, `minfree`).
//!
//! Not validated on a machine. Not here: killing applications to free memory, and reading pages back from zram.

use super::ChunkCounts;

const PER_MILLE: u64 = 1000;

#[derive(Debug, Clone, Copy)]
pub struct ZramConfig {
    /// Number of chunks of anonymous memory that can be compressed.
    pub swappable_chunks: u32,
    /// Anonymous memory compressed for each evicted chunk of file pages, in thousandths of a chunk.
    pub swapped_per_eviction_permille: u32,
    /// Compressed size in thousandths of the original size.
    pub compressed_permille: u32,
    /// Page-cache size in chunks below which the process is killed under memory pressure.
    pub kill_threshold_chunks: u32,
}

impl ZramConfig {
    /// Returns the anonymous memory compressed so far, in thousandths of a chunk.
    fn compressed_thousandths(&self, counters: &ChunkCounts) -> u64 {
        // Chunks evicted on request are not evicted under memory pressure.
        let evicted = counters.evicted - counters.released - counters.discarded;
        (evicted * u64::from(self.swapped_per_eviction_permille))
            .min(u64::from(self.swappable_chunks) * PER_MILLE)
    }

    /// Whether no anonymous memory is left to compress.
    pub fn is_exhausted(&self, counters: &ChunkCounts) -> bool {
        self.compressed_thousandths(counters) == u64::from(self.swappable_chunks) * PER_MILLE
    }

    /// Returns the number of chunks that compression has freed so far.
    pub fn freed_chunks(&self, counters: &ChunkCounts) -> u64 {
        let left = PER_MILLE.saturating_sub(u64::from(self.compressed_permille));
        self.compressed_thousandths(counters) * left / PER_MILLE / PER_MILLE
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{read_cyclically, zram_config};
    use super::super::{PageCache, TwoListCache};

    fn android(file_chunks: u32, capacity: u32, swappable_chunks: u32, kill_threshold: u32) -> TwoListCache {
        let zram = zram_config(swappable_chunks, 1000, kill_threshold);
        TwoListCache::new(file_chunks, capacity).with_zram(zram)
    }

    #[test]
    fn compression_frees_memory() {
        // 100 chunks, of which 80 fit. Compressing thirty chunks frees 30 x 0.667 = 20, so that all fit.
        let mut cache = android(100, 80, 30, 0);
        read_cyclically(&mut cache, 1);
        // In the first round e evictions satisfy 100 = 80 + 0.667 e + e, so e = 12: twelve compressed chunks freed 8.
        assert_eq!((cache.counters().evicted, cache.capacity()), (12, 88));
        assert_eq!(read_cyclically(&mut cache, 4), 0);
        assert_eq!(cache.capacity(), 100);
    }

    #[test]
    fn killed_below_threshold() {
        let is_alive = |capacity, swappable| {
            let mut cache = android(100, capacity, swappable, 40);
            read_cyclically(&mut cache, 3);
            cache.is_process_alive()
        };
        // A capacity of thirty chunks is below forty; compressing thirty chunks raises it to fifty.
        assert!(!is_alive(30, 0) && is_alive(30, 30) && is_alive(50, 0));
        // Without pressure nothing is killed.
        let mut cache = android(20, 30, 0, 40);
        read_cyclically(&mut cache, 3);
        assert!(cache.is_process_alive());
    }
}
