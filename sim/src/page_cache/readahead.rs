//! Read-ahead: which chunks are read together with a missing one.
//!
//! mm/readahead.c and `do_sync_mmap_readahead` of mm/filemap.c, for a mapping without advice. A miss reads around: one
//! window, half of it before the missing place, with a marker a quarter before its end. Touching the marked chunk
//! starts the next window without waiting, with the marker at its front, so that a sequential reader always has one
//! window in flight. So faulting through a file overlaps computing with reading, it reads some MiB beyond the end of a
//! layer window, and one `WILLNEED`, which is cut to one window, helps little. Reading is in ascending order; present
//! chunks are skipped.
//!
//! Deviation: the kernel keeps a marker in every page; here only the last one set is kept.

use super::{Chunk, Fetch, PageCache};

/// The read-ahead state of one open file (`struct file_ra_state`), in chunks.
#[derive(Debug, Clone)]
pub struct Readahead {
    window: u32,
    start: u32,
    size: u32,
    marker: Option<Chunk>,
}

impl Readahead {
    /// `window` is the device's read-ahead in chunks, at least one.
    pub fn new(window: u32) -> Self {
        Self { window: window.max(1), start: 0, size: 0, marker: None }
    }

    /// The length of a window in chunks.
    pub fn window(&self) -> u32 {
        self.window
    }

    /// Handles a miss: puts the chunks to read into `reads`. Returns false if the chunk itself found no room.
    pub fn miss(&mut self, cache: &mut dyn PageCache, chunk: Chunk, reads: &mut Vec<Chunk>) -> bool {
        self.start = chunk.saturating_sub(self.window / 2);
        self.size = self.window;
        self.fetch(cache, self.start + self.size - (self.window / 4).max(1), reads);
        // With one chunk per window, or no room for the chunks before it, the chunk may still be missing.
        match cache.prefetch_now(chunk) {
            Fetch::Started => reads.push(chunk),
            Fetch::Present => {}
            Fetch::NoRoom | Fetch::Again => return false,
        }
        true
    }

    /// Handles a hit: if the chunk has the marker, puts the next window into `reads`.
    #[inline]
    pub fn hit(&mut self, cache: &mut dyn PageCache, chunk: Chunk, reads: &mut Vec<Chunk>) {
        if self.marker == Some(chunk) {
            self.start += self.size;
            self.size = self.window;
            self.fetch(cache, self.start, reads);
        }
    }

    fn fetch(&mut self, cache: &mut dyn PageCache, mark: Chunk, reads: &mut Vec<Chunk>) {
        self.marker = None;
        for chunk in self.start..(self.start + self.size).min(cache.share()) {
            match cache.prefetch_now(chunk) {
                Fetch::Started => {
                    reads.push(chunk);
                    // A marked page that was there before keeps no mark: the stream ends at the next hole.
                    if chunk == mark {
                        self.marker = Some(mark);
                    }
                }
                Fetch::Present => {}
                // The kernel drops the rest of the window, without an error.
                Fetch::NoRoom | Fetch::Again => return,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Access, PaperLinear};
    use super::*;

    /// Touches `range` in order; returns the reads of each step.
    fn scan(range: std::ops::Range<u32>) -> Vec<(Chunk, Vec<Chunk>)> {
        let (mut cache, mut readahead) = (PaperLinear::new(40, 40), Readahead::new(8));
        let mut steps = Vec::new();
        for chunk in range {
            let mut reads = Vec::new();
            match cache.access(chunk) {
                Access::Absent => assert!(readahead.miss(&mut cache, chunk, &mut reads)),
                Access::Hit | Access::InFlight => readahead.hit(&mut cache, chunk, &mut reads),
            }
            for &read in &reads {
                cache.arrived(read);
            }
            if !reads.is_empty() {
                steps.push((chunk, reads));
            }
        }
        steps
    }

    #[test]
    fn sequential_stream_misses_once() {
        let window = |start: u32| (start..start + 8).collect::<Vec<_>>();
        // A miss at 12 reads 8..16 and marks 14; 14 reads 16..24 and marks 16; 16 reads 24..32.
        assert_eq!(scan(12..18), [(12, window(8)), (14, window(16)), (16, window(24))]);
    }

    #[test]
    fn window_ends_with_the_file() {
        assert_eq!(scan(0..1), [(0, (0..8).collect::<Vec<_>>())]);
        assert_eq!(scan(38..40), [(38, (34..40).collect::<Vec<_>>())]);
    }
}
