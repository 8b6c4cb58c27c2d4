//! Read-ahead: decides which chunks are read together with a missing chunk.
//!
//! As in mm/readahead.c and `do_sync_mmap_readahead` of mm/filemap.c of Linux, for a mapping without advice. A miss
//! reads one window around the missing chunk: half of the window lies before the chunk, and a marker is set a quarter
//! of the window before its end. Touching the marked chunk starts the read of the next window without waiting, with the
//! marker at its first chunk, so a sequential reader always has one window in flight, which overlaps computing with
//! reading. Chunks are read in ascending order; chunks in memory are skipped.
//!
//! Deviation: in the kernel each page can have a marker; here only the last marker is kept.

use super::{Chunk, FetchResult, PageCache};

/// The read-ahead state of one open file (`struct file_ra_state`), in chunks.
#[derive(Debug)]
pub struct Readahead {
    /// Length of the read-ahead window in chunks; one `MADV_WILLNEED` call reads at most one window.
    pub window_chunks: u32,
    start: u32,
    size: u32,
    marker: Option<Chunk>,
}

impl Readahead {
    /// Creates the state with a read-ahead window of `window_chunks` chunks, at least one.
    pub fn new(window_chunks: u32) -> Self {
        Self { window_chunks: window_chunks.max(1), start: 0, size: 0, marker: None }
    }

    /// Handles an access to a missing chunk: appends the chunks to read to `reads`. Returns false if no memory is free.
    pub fn on_miss(&mut self, cache: &mut dyn PageCache, chunk: Chunk, reads: &mut Vec<Chunk>) -> bool {
        self.start = chunk.saturating_sub(self.window_chunks / 2);
        self.size = self.window_chunks;
        self.fetch(cache, self.start + self.size - (self.window_chunks / 4).max(1), reads);
        // With one chunk per window, or no free memory for the chunks before it, the chunk may still be missing.
        match cache.prefetch_now(chunk) {
            FetchResult::Started => reads.push(chunk),
            FetchResult::Present => {}
            FetchResult::NoMemory | FetchResult::Retry => return false,
        }
        true
    }

    /// Handles an access to a chunk in memory: if the chunk has the marker, appends the next window to `reads`.
    #[inline]
    pub fn on_hit(&mut self, cache: &mut dyn PageCache, chunk: Chunk, reads: &mut Vec<Chunk>) {
        if self.marker == Some(chunk) {
            self.start += self.size;
            self.size = self.window_chunks;
            self.fetch(cache, self.start, reads);
        }
    }

    fn fetch(&mut self, cache: &mut dyn PageCache, mark: Chunk, reads: &mut Vec<Chunk>) {
        self.marker = None;
        for chunk in self.start..(self.start + self.size).min(cache.file_chunks()) {
            match cache.prefetch_now(chunk) {
                FetchResult::Started => {
                    reads.push(chunk);
                    // A page that was in memory gets no marker: sequential read-ahead ends there, until the next miss.
                    if chunk == mark {
                        self.marker = Some(mark);
                    }
                }
                FetchResult::Present => {}
                // The kernel drops the rest of the window, without an error.
                FetchResult::NoMemory | FetchResult::Retry => return,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Access, PaperPageCache};
    use super::*;

    fn scan(range: std::ops::Range<u32>) -> Vec<(Chunk, Vec<Chunk>)> {
        let (mut cache, mut readahead) = (PaperPageCache::new(40, 40), Readahead::new(8));
        let mut steps = Vec::new();
        for chunk in range {
            let mut reads = Vec::new();
            match cache.access(chunk) {
                Access::Absent => assert!(readahead.on_miss(&mut cache, chunk, &mut reads)),
                Access::Hit | Access::InFlight => readahead.on_hit(&mut cache, chunk, &mut reads),
            }
            for &read in &reads {
                cache.on_arrival(read);
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
