//! Page cache of macOS for weights that Metal does not hold.
//!
//! xnu, osfmk/vm/vm_pageout.c and vm_resident.c. Pages read ahead are on a *speculative* queue, which is evicted first,
//! oldest first; a page used from there becomes active. Pages that a fault needs are active at once. The active queue is
//! shortened from its old end when it is longer than the inactive one, which clears `used`; an inactive page that was
//! used meanwhile becomes active again, any other is evicted. Files keep a minimum of memory, and memory of other programs
//! is compressed: both are in the capacity ([`super::for_device`]).
//!
//! Not checked against a machine. Not here: dirty pages, swap files, what others do with their memory.

use super::Chunk;
use super::listed::{Listed, Pages, Rules};

const SPECULATIVE: usize = 0;
const INACTIVE: usize = 1;
const ACTIVE: usize = 2;

#[derive(Debug, Clone)]
pub struct Queues {
    floor: u32,
}

pub type Macos = Listed<Queues>;

impl Macos {
    /// An empty cache for a share of `share` chunks, whose capacity is at least `floor`.
    pub fn new(share: u32, capacity: u32, floor: u32) -> Self {
        Self::with_rules(Queues { floor }, 3, share, capacity)
    }
}

impl Rules for Queues {
    fn entrance(&mut self, _chunk: Chunk, awaited: bool) -> usize {
        if awaited { ACTIVE } else { SPECULATIVE }
    }

    fn used(&mut self, pages: &mut Pages, chunk: Chunk) {
        if pages.list_of(chunk) == Some(SPECULATIVE) {
            pages.put(chunk, ACTIVE);
        }
    }

    fn victim(&mut self, pages: &mut Pages) -> Option<Chunk> {
        if pages.all_locked() {
            return None;
        }
        if let Some(chunk) = pages.oldest_idle(SPECULATIVE) {
            return Some(chunk);
        }
        // Nothing is used meanwhile, so every scan clears one `used`, until some scan finds none.
        loop {
            while pages.len(ACTIVE) > pages.len(INACTIVE) {
                let oldest = pages.oldest(ACTIVE)?;
                pages.look(oldest);
                pages.put(oldest, INACTIVE);
            }
            for _ in 0..pages.len(INACTIVE) {
                let Some(chunk) = pages.oldest_idle(INACTIVE) else { break };
                if !pages.look(chunk) {
                    return Some(chunk);
                }
                pages.put(chunk, ACTIVE);
            }
            if pages.oldest_idle(INACTIVE).is_none() && pages.len(ACTIVE) <= pages.len(INACTIVE) {
                // Everything inactive is in flight.
                return pages.oldest_idle(ACTIVE);
            }
        }
    }

    fn floor(&self) -> u32 {
        self.floor
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::cyclic;
    use super::super::{Access, Fetch, PageCache};
    use super::*;

    fn ahead(cache: &mut dyn PageCache, chunk: Chunk) {
        assert_eq!(cache.prefetch(chunk), Fetch::Started);
        cache.arrived(chunk);
    }

    #[test]
    fn speculative_pages_go_first_unless_used() {
        let mut cache = Macos::new(8, 4, 0);
        (0..4).for_each(|chunk| ahead(&mut cache, chunk));
        // 0 is oldest but used, so active; 1 is the oldest speculative one.
        assert_eq!(cache.access(0), Access::Hit);
        ahead(&mut cache, 4);
        ahead(&mut cache, 5);
        assert_eq!((0..6).filter(|&chunk| cache.holds(chunk)).collect::<Vec<_>>(), [0, 3, 4, 5]);
    }

    #[test]
    fn others_leave_files_their_floor() {
        // 0.15 of 100 chunks of memory.
        let mut cache = Macos::new(100, 60, 15);
        cyclic(&mut cache, 1);
        cache.set_capacity(5);
        assert_eq!((cache.capacity(), cache.resident()), (15, 15));
    }
}
