//! Which weights does Metal keep on macOS?
//!
//! prima.cpp paper, Eq. 16. Weights that the GPU uses are *wired* up to the recommended working set: nothing is taken.
//! With a larger share the whole share is read again for every token; here that follows from evicting what was used
//! longest ago. What has been idle for about a second is unwired, and is ordinary memory then, which others take.
//!
//! No machine here checks these rules. Not here: when it has been idle, which the storage says.

use super::Chunk;
use super::listed::{Listed, Pages, Rules};

/// The set that the GPU has wired.
#[derive(Debug, Clone)]
pub struct Wired {
    ordinary: u32,
}

/// macOS with Metal.
pub type MacosMetal = Listed<Wired>;

impl MacosMetal {
    /// Nothing of a share is in memory yet. `wired` chunks may be; `ordinary` of them stay when idle.
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
