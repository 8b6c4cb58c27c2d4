//! Page cache of macOS for weights that the GPU uses through Metal.
//!
//! prima.cpp paper, Eq. 16. Weights that the GPU uses are *wired* up to the recommended working set: none are evicted. A
//! larger share is read again completely for every token; here this follows from least-recently-used eviction. After an
//! idle time of about a second the weights are unwired and become ordinary memory, which other programs may take.
//!
//! Not checked against a machine.

use super::Chunk;
use super::listed::{Listed, Pages, Rules};

#[derive(Debug, Clone)]
pub struct Wired {
    ordinary: u32,
}

pub type MacosMetal = Listed<Wired>;

impl MacosMetal {
    /// An empty cache: `wired` chunks may be wired, `ordinary` of them stay when idle.
    pub fn new(share: u32, wired: u32, ordinary: u32) -> Self {
        Self::with_rules(Wired { ordinary }, 1, share, wired)
    }
}

impl Rules for Wired {
    fn entrance(&mut self, _chunk: Chunk, _awaited: bool) -> usize {
        0
    }

    fn used(&mut self, pages: &mut Pages, chunk: Chunk) {
        pages.put(chunk, 0);
    }

    fn victim(&mut self, pages: &mut Pages) -> Option<Chunk> {
        pages.oldest_idle(0)
    }

    fn after_idle(&self) -> Option<u32> {
        Some(self.ordinary)
    }
}

#[cfg(test)]
mod tests {
    use super::super::PageCache;
    use super::super::tests::cyclic;
    use super::*;

    #[test]
    fn a_share_of_one_chunk_too_many_is_read_whole_with_metal() {
        // The paper: all of it or nothing.
        assert_eq!(cyclic(&mut MacosMetal::new(100, 100, 40), 4), 0);
        assert_eq!(cyclic(&mut MacosMetal::new(100, 99, 40), 4), 100);
    }

    #[test]
    fn what_is_idle_is_unwired_and_taken() {
        let mut cache = MacosMetal::new(100, 100, 40);
        cyclic(&mut cache, 1);
        cache.idled();
        assert_eq!(cache.resident(), 40);
        // The last forty used are there, and one round brings the other sixty back.
        assert_eq!((cyclic(&mut cache, 1), cyclic(&mut cache, 1)), (60, 0));
    }
}
