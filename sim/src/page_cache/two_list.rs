//! Page cache of classic Linux: an active and an inactive list, in a full memory cgroup.
//!
//! As in mm/vmscan.c, mm/workingset.c and mm/memcontrol.c, for clean file pages of one mapping:
//!
//! - **Two lists.** New pages, read by a fault or ahead, go to the head of the inactive list. Reclaim scans its tail.
//! - **Second chance.** A page whose mapping was used since the last scan (young) is not evicted: it is marked
//!   `referenced` instead of young, and moves to the head again. A page that is young *and* referenced becomes
//!   active. A page that was read ahead and not touched yet has neither mark and is evicted at once.
//! - **Populated.** `MADV_POPULATE_READ` maps each page and calls `folio_mark_accessed` for it (mm/gup.c,
//!   `FOLL_TOUCH`): it is young and referenced at once, so it becomes active in the next scan, or when it is
//!   populated a second time.
//! - **Locked while in flight.** A page in flight cannot be evicted: reclaim moves it to the head and continues.
//! - **Scan pressure.** One attempt scans 1/4096 of the list, then 1/2048, ... then all of it, and stops when it
//!   has freed 32 pages. So the first attempt after a window of layers was computed ages *all* pages of that window
//!   before it frees any page. That takes many milliseconds, in which reads arrive.
//! - **Shadows.** The kernel stores the age at which a page was evicted. If the page is read again within a
//!   distance no longer than the active list, it becomes active at once.
//! - **Balance.** The active list shrinks from its tail after activations by refault, or when it is longer than the
//!   inactive list (in a cache of less than 1 GiB; in a larger one, than sqrt(10 x GiB) times the inactive list).
//! - **Between arrival and use.** A page that has arrived is neither young nor referenced until the thread that
//!   waited for it runs and maps it, so it may be evicted before that.
//!
//! `docs/decisions/0003-two-list-lru.md` states what follows from these rules.
//!
//! Deviation: reclaim balances the lists with the current statistics, not with those of up to two seconds ago, see
//! `docs/decisions/0011-populate-marks-accessed.md`. A scan of a chunk represents scans of all its pages. The refault
//! distance ignores swappable anonymous memory.
//!
//! Not here: anonymous pages and swap, dirty pages, several mappings of one page, global reclaim by kswapd.

use super::lists::{ChunkList, ListLinks};
use super::{Access, Chunk, ChunkCounts, FetchResult, PageCache, ZramConfig};

/// Initial priority of reclaim. A scan at priority p covers 1/2^p of a list; the last scan, at priority 0, covers all.
const FIRST_PRIORITY: u32 = 12;
/// Maximum reclaim attempts of an allocation; the kernel drains its per-CPU charges before the second attempt.
const MAX_ATTEMPTS: u32 = 2;
/// Maximum number of chunks scanned in one call. Then the caller lets time pass, in which reads in flight may arrive.
const MAX_SCANS_AT_ONCE: u32 = 32;

/// The page cache of classic Linux, with an active and an inactive list.
#[derive(Debug)]
pub struct TwoListCache {
    capacity: u32,
    /// The capacity in chunks before zram has compressed any memory.
    base_capacity: u32,
    zram: Option<ZramConfig>,
    /// Whether the low memory killer has ended the process.
    killed: bool,
    chunks: Vec<Page>,
    links: ListLinks,
    inactive: ChunkList,
    active: ChunkList,
    /// Number of evictions and activations so far (`nonresident_age` in Linux).
    age: u64,
    /// Maximum ratio of the active list to the inactive one.
    inactive_ratio: u32,
    refault_activations: u64,
    /// Value of `refault_activations` after the last reclaim.
    seen_activations: u64,
    scan: Option<Scan>,
    counters: ChunkCounts,
}

#[derive(Debug, Clone, Copy, Default)]
#[allow(clippy::struct_excessive_bools, reason = "they are the kernel's page flags")]
struct Page {
    state: ListState,
    /// Whether a thread has used the page through the mapping since the last scan.
    young: bool,
    /// Whether a scan found the page young.
    referenced: bool,
    /// Whether the page has been used since it was read.
    mapped: bool,
    /// Whether a thread that populates the mapping waits for this page.
    populated: bool,
    /// Whether the page is being read. Then it cannot be evicted.
    locked: bool,
    /// The cache's `age` when the page was evicted.
    shadow: Option<u64>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum ListState {
    #[default]
    Absent,
    Inactive,
    Active,
}

#[derive(Debug, Clone, Copy, Default)]
struct Scan {
    attempt: u32,
    /// Whether active pages are deactivated even if the active list is short.
    force: bool,
    /// Whether refaults have activated pages since the last reclaim attempt.
    refaulted: bool,
    priority: u32,
    /// Pages of each list that remain to be scanned at this priority.
    active: u32,
    inactive: u32,
    scanned: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Reclaim {
    Freed,
    Nothing,
    /// The scan is not finished: call again later.
    Again,
}

impl Scan {
    fn new(cache: &TwoListCache) -> Self {
        let refaulted = cache.refault_activations != cache.seen_activations;
        let mut scan = Self { attempt: 1, refaulted, priority: FIRST_PRIORITY, ..Self::default() };
        scan.set_scan_counts(cache);
        scan
    }

    /// Begins the scan at the next priority of reclaim. Returns false if no priority remains.
    fn enter_next_priority(&mut self, cache: &TwoListCache) -> bool {
        if self.priority > 0 {
            self.priority -= 1;
        } else if !self.force && cache.active.len() > 0 {
            // Nothing found while active pages were spared: reclaim them too.
            (self.force, self.priority) = (true, FIRST_PRIORITY);
        } else if self.attempt < MAX_ATTEMPTS {
            (self.attempt, self.force, self.priority) = (self.attempt + 1, false, FIRST_PRIORITY);
        } else {
            return false;
        }
        self.set_scan_counts(cache);
        true
    }

    fn set_scan_counts(&mut self, cache: &TwoListCache) {
        let low = cache.inactive.len() * cache.inactive_ratio < cache.active.len();
        let deactivate = self.force || self.refaulted || low;
        self.active = if deactivate { cache.active.len() >> self.priority } else { 0 };
        self.inactive = cache.inactive.len() >> self.priority;
    }
}

impl TwoListCache {
    pub fn new(file_chunks: u32, capacity: u32) -> Self {
        Self {
            capacity,
            base_capacity: capacity,
            zram: None,
            killed: false,
            chunks: vec![Page::default(); file_chunks as usize],
            links: ListLinks::new(file_chunks),
            inactive: ChunkList::new(),
            active: ChunkList::new(),
            age: 0,
            inactive_ratio: 1,
            seen_activations: 0,
            refault_activations: 0,
            scan: None,
            counters: ChunkCounts::default(),
        }
    }

    /// Sets the maximum ratio of the active to the inactive list, as Linux does for a page cache of this size in GiB.
    #[must_use]
    pub fn with_inactive_ratio_for_size(mut self, gibibytes: u64) -> Self {
        self.inactive_ratio = if gibibytes == 0 { 1 } else { (10 * gibibytes).isqrt() as u32 };
        self
    }

    /// Adds zram and the low memory killer of Android.
    #[must_use]
    pub fn with_zram(mut self, zram: ZramConfig) -> Self {
        self.zram = Some(zram);
        self
    }

    fn update_capacity(&mut self) {
        let freed = self.zram.map_or(0, |zram| zram.freed_chunks(&self.counters));
        self.capacity = (u64::from(self.base_capacity) + freed).min(u64::from(u32::MAX)) as u32;
        let locked = self.chunks.iter().filter(|page| page.locked).count() as u32;
        while self.resident_chunks() > self.capacity.max(locked) {
            self.reclaim();
        }
    }

    /// Frees memory for one chunk (`try_charge`).
    fn free_for_one(&mut self) -> Reclaim {
        while self.resident_chunks() >= self.capacity {
            match self.reclaim() {
                Reclaim::Freed => {}
                other => return other,
            }
        }
        Reclaim::Freed
    }

    /// Runs up to [`MAX_SCANS_AT_ONCE`] scans of `try_to_free_mem_cgroup_pages`, until one chunk is freed or nothing
    /// can be freed.
    fn reclaim(&mut self) -> Reclaim {
        let mut scan = self.scan.take().unwrap_or_else(|| Scan::new(self));
        let result = loop {
            if scan.active > 0 {
                scan.active -= 1;
                self.deactivate_oldest();
            } else if scan.inactive > 0 {
                scan.inactive -= 1;
                if self.scan_oldest() {
                    break Reclaim::Freed;
                }
            } else if !scan.enter_next_priority(self) {
                break Reclaim::Nothing;
            }
            scan.scanned += 1;
            if scan.scanned == MAX_SCANS_AT_ONCE {
                scan.scanned = 0;
                self.scan = Some(scan);
                return Reclaim::Again;
            }
        };
        self.seen_activations = self.refault_activations;
        result
    }

    /// Runs a step of `shrink_active_list`: deactivates the oldest page, whether it is young or not.
    fn deactivate_oldest(&mut self) {
        let Some(chunk) = self.active.oldest() else { return };
        self.counters.scanned += 1;
        self.active.remove(&mut self.links, chunk);
        self.inactive.push_newest(&mut self.links, chunk);
        let page = &mut self.chunks[chunk as usize];
        page.state = ListState::Inactive;
        page.young = false;
    }

    /// Runs a step of `shrink_inactive_list`. Returns whether the oldest chunk was evicted.
    fn scan_oldest(&mut self) -> bool {
        let Some(chunk) = self.inactive.oldest() else { return false };
        self.counters.scanned += 1;
        let page = &mut self.chunks[chunk as usize];
        let young = !page.locked && std::mem::take(&mut page.young);
        if page.locked || (young && !page.referenced) {
            page.referenced |= young;
            self.inactive.move_to_head(&mut self.links, chunk);
            false
        } else if young {
            self.inactive.remove(&mut self.links, chunk);
            self.activate(chunk);
            false
        } else {
            self.counters.unmapped += u64::from(page.mapped);
            self.evict(chunk);
            true
        }
    }

    /// Marks a page as referenced the first time, and activates it the second time (`folio_mark_accessed`).
    fn mark_accessed(&mut self, chunk: Chunk) {
        let page = &mut self.chunks[chunk as usize];
        if !std::mem::replace(&mut page.referenced, true) || page.state != ListState::Inactive {
            return;
        }
        page.referenced = false;
        self.inactive.remove(&mut self.links, chunk);
        self.activate(chunk);
    }

    /// Adds a chunk that is on no list to the active list.
    fn activate(&mut self, chunk: Chunk) {
        self.chunks[chunk as usize].state = ListState::Active;
        self.active.push_newest(&mut self.links, chunk);
        self.age += 1;
        self.counters.activated += 1;
    }

    fn evict(&mut self, chunk: Chunk) {
        let page = &mut self.chunks[chunk as usize];
        match page.state {
            ListState::Inactive => self.inactive.remove(&mut self.links, chunk),
            ListState::Active => self.active.remove(&mut self.links, chunk),
            ListState::Absent => return,
        }
        *page = Page { shadow: Some(self.age), ..Page::default() };
        self.age += 1;
        self.counters.evicted += 1;
    }
}

impl PageCache for TwoListCache {
    fn access(&mut self, chunk: Chunk) -> Access {
        if self.resume(chunk) {
            Access::Hit
        } else if self.chunks[chunk as usize].locked {
            Access::InFlight
        } else {
            Access::Absent
        }
    }

    fn populate(&mut self, chunk: Chunk) -> Access {
        let found = self.access(chunk);
        if found == Access::Hit {
            self.mark_accessed(chunk);
        } else {
            self.chunks[chunk as usize].populated = true;
        }
        found
    }

    fn prefetch(&mut self, chunk: Chunk) -> FetchResult {
        if self.chunks[chunk as usize].state != ListState::Absent {
            return FetchResult::Present;
        }
        let evicted = self.counters.evicted;
        let reclaimed = self.free_for_one();
        if let Some(zram) = self.zram.filter(|_| self.counters.evicted > evicted) {
            // The eviction has compressed memory of other programs, or the process is killed.
            self.killed |= zram.is_exhausted(&self.counters) && self.capacity < zram.kill_threshold_chunks;
            self.update_capacity();
        }
        match reclaimed {
            Reclaim::Freed => {}
            Reclaim::Nothing => return FetchResult::NoMemory,
            Reclaim::Again => return FetchResult::Retry,
        }
        self.counters.fetched += 1;
        let page = &mut self.chunks[chunk as usize];
        page.locked = true;
        let shadow = page.shadow.take();
        self.counters.refaults += u64::from(shadow.is_some());
        let working_set = u64::from(self.active.len());
        if shadow.is_some_and(|shadow| self.age - shadow <= working_set) {
            self.refault_activations += 1;
            self.activate(chunk);
        } else {
            page.state = ListState::Inactive;
            self.inactive.push_newest(&mut self.links, chunk);
        }
        FetchResult::Started
    }

    fn on_arrival(&mut self, chunk: Chunk) {
        let page = &mut self.chunks[chunk as usize];
        page.locked = false;
        if std::mem::take(&mut page.populated) {
            (page.young, page.mapped) = (true, true);
            self.mark_accessed(chunk);
        }
    }

    fn resume(&mut self, chunk: Chunk) -> bool {
        let held = self.contains(chunk);
        let page = &mut self.chunks[chunk as usize];
        page.young |= held;
        page.mapped |= held;
        held
    }

    fn release(&mut self, chunk: Chunk) {
        if self.contains(chunk) {
            self.counters.released += 1;
            self.evict(chunk);
        }
    }

    fn discard(&mut self, chunk: Chunk) {
        let (age, released) = (self.age, self.counters.released);
        self.release(chunk);
        self.counters.discarded += self.counters.released - released;
        self.counters.released = released;
        if self.chunks[chunk as usize].state == ListState::Absent {
            // Invalidation is not reclaim: it leaves no shadow, and the age does not change.
            self.chunks[chunk as usize].shadow = None;
            self.age = age;
        }
    }

    fn set_capacity(&mut self, chunks: u32) {
        self.base_capacity = chunks;
        self.update_capacity();
    }

    fn is_process_alive(&self) -> bool {
        !self.killed
    }

    fn capacity(&self) -> u32 {
        self.capacity
    }

    fn resident_chunks(&self) -> u32 {
        self.inactive.len() + self.active.len()
    }

    fn file_chunks(&self) -> u32 {
        self.chunks.len() as u32
    }

    fn contains(&self, chunk: Chunk) -> bool {
        let page = &self.chunks[chunk as usize];
        page.state != ListState::Absent && !page.locked
    }

    fn counters(&self) -> ChunkCounts {
        self.counters
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{prefetch_chunk, read_chunk};
    use super::*;

    #[test]
    fn used_pages_outlive_prefetched_pages() {
        let mut cache = TwoListCache::new(8, 4);
        (0..2).for_each(|chunk| read_chunk(&mut cache, chunk));
        (2..4).for_each(|chunk| prefetch_chunk(&mut cache, chunk));
        // 0 and 1 are older but young: they move to the head again, and 2 is then the oldest.
        prefetch_chunk(&mut cache, 4);
        assert!(cache.contains(0) && cache.contains(1) && !cache.contains(2));
    }

    #[test]
    fn in_flight_pages_are_not_evicted() {
        let mut cache = TwoListCache::new(4, 2);
        assert_eq!(cache.prefetch(0), FetchResult::Started);
        assert_eq!(cache.prefetch(1), FetchResult::Started);
        assert_eq!(cache.prefetch(2), FetchResult::NoMemory);
        cache.on_arrival(1);
        assert_eq!(cache.prefetch(2), FetchResult::Started);
        assert!(!cache.contains(1));
    }

    #[test]
    fn use_between_scans_activates() {
        let mut cache = TwoListCache::new(8, 3);
        (0..3).for_each(|chunk| read_chunk(&mut cache, chunk));
        // Ages 0, 1, 2 and evicts 0; 1 is used again, so the next scan finds it young and referenced.
        prefetch_chunk(&mut cache, 3);
        assert_eq!(cache.access(1), Access::Hit);
        prefetch_chunk(&mut cache, 4);
        assert_eq!((cache.active.len(), cache.counters().activated), (1, 1));
        assert!(cache.contains(1) && !cache.contains(2));
    }

    #[test]
    fn refault_within_active_list_activates() {
        let mut cache = TwoListCache::new(8, 4);
        (0..4).for_each(|chunk| read_chunk(&mut cache, chunk));
        prefetch_chunk(&mut cache, 4);
        (1..3).for_each(|chunk| assert_eq!(cache.access(chunk), Access::Hit));
        // 1 and 2 become active, 3 is evicted. Reading it again evicts 4: distance 2, active list 2.
        prefetch_chunk(&mut cache, 5);
        assert!(cache.active.len() == 2 && !cache.contains(3));
        read_chunk(&mut cache, 3);
        assert_eq!((cache.active.len(), cache.counters().refaults), (3, 1));
    }
}
