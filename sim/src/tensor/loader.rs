//! Block loader: reads the blocks of a sliding window from disk into memory.
//!
//! TPI-LLM's memory scheduler loads blocks in the order of use. With memory for tau blocks, it loads block b as soon as
//! block b - 1 is loaded and block b - tau is released (prima.cpp paper, section 2: it "loads model layers on demand
//! and hides disk loading with prefetching"):
//!
//! ```text
//! loaded(b) = max(loaded(b - 1), released(b - tau)) + bytes(b) / s_disk
//! ```
//!
//! `s_disk` is the disk read rate. A block is released after its use, so all terms are known when it is loaded.

use std::collections::VecDeque;
use std::ops::Range;

use hearth_profiles::{Bytes, BytesPerSecond};

use crate::engine::Nanos;

#[derive(Debug, Clone)]
pub struct BlockLoader {
    /// The times at which the last `window` blocks were released, the earliest time first.
    released: VecDeque<Nanos>,
    window: usize,
    loaded: Nanos,
    disk_rate: BytesPerSecond,
    pub bytes_read: Bytes,
}

impl BlockLoader {
    /// Creates a loader that starts at time zero and has memory for `window` blocks.
    pub fn new(window: usize, disk_rate: BytesPerSecond) -> Self {
        let window = window.max(1);
        Self { released: VecDeque::new(), window, loaded: 0, disk_rate, bytes_read: Bytes::ZERO }
    }

    /// Loads the next block, of `bytes` bytes. Returns the start and the end of the read.
    pub fn load_block(&mut self, bytes: Bytes) -> Range<Nanos> {
        let is_full = self.released.len() >= self.window;
        let freed = if is_full { self.released.pop_front().unwrap_or(0) } else { 0 };
        let start = self.loaded.max(freed);
        self.loaded = start.saturating_add((bytes / self.disk_rate).to_nanos());
        self.bytes_read += bytes;
        start..self.loaded
    }

    pub fn release_block(&mut self, now: Nanos) {
        self.released.push_back(now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Nanos = 1_000_000;

    /// Uses `count` blocks, each with 10 ms of reading and `compute` ms of computing. Returns their end times in ms.
    fn used(window: usize, compute: Nanos, count: usize) -> Vec<Nanos> {
        let mut loader = BlockLoader::new(window, BytesPerSecond(1e6));
        let mut now = 0;
        let each = |_| {
            let loading = loader.load_block(Bytes(10_000));
            now = now.max(loading.end) + compute * MS;
            loader.release_block(now);
            now / MS
        };
        (0..count).map(each).collect()
    }

    #[test]
    fn window_of_two_overlaps() {
        assert_eq!(used(1, 4, 3), [14, 28, 42], "a window of one alternates");
        assert_eq!(used(2, 4, 4), [14, 24, 34, 44], "reading takes longer: a block is loaded every 10 ms");
        assert_eq!(used(2, 30, 4), [40, 70, 100, 130], "computing takes longer: the next block is in memory");
    }

    #[test]
    fn block_waits_for_a_released_block() {
        let mut loader = BlockLoader::new(2, BytesPerSecond(1e6));
        for _ in 0..2 {
            loader.load_block(Bytes(10_000));
            loader.release_block(50 * MS);
        }
        assert_eq!(loader.load_block(Bytes(10_000)), 50 * MS..60 * MS);
        assert_eq!(loader.bytes_read, Bytes(30_000));
    }
}
