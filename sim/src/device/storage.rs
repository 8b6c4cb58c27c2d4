//! What happens between a thread that touches its weights and the disk under them?
//!
//! The three parts that only make sense together: the page cache decides what is there, read-ahead decides
//! what is read with a miss, the disk decides when it arrives. One of these stands in every simulated device;
//! the reader (a computation) and the helper (prefetch) both go through it, share the read-ahead state of the
//! one open file and compete for the disk.
//!
//! Costs of the kernel itself, measured on Linux 6.18 and stated in [`KernelCosts`]: `WILLNEED` returns before
//! its reads arrive, after allocating and charging every page, so its pages hold memory while in flight; every
//! look at a page in search of a victim takes time as well, which the thread that allocates spends.
//!
//! Not here: who touches what and when.

use hearth_core::compute_cost::PAGE_DISCARD_COST;
use hearth_core::compute_cost::PAGE_INSERT_COST;
use hearth_core::compute_cost::PAGE_SCAN_COST;
use hearth_profiles::{Bytes, BytesPerSecond, Seconds};

use crate::engine::Nanos;
use crate::page_cache::{Access, CHUNK_BYTES, Chunk, Counters, Fetch, PageCache, Policy, Readahead};
use crate::resource::{Disk, DiskSpeed, Flow};

/// Who found no room tries again no sooner than this: something must arrive first, and disks need that long.
pub const NO_ROOM_PAUSE: Nanos = 100_000;

/// From the arrival of a page to the moment at which the thread that waits for it maps it. Until then the page is
/// neither young nor referenced, so reclaim may take it. Measured: half an exchange of two short messages over
/// loopback, which is one waking, took 23.5 us on the machine of the page cache's measurements.
pub const WAKE: Nanos = 23_500;

/// The name of a read that has no place in the cache.
pub const ASIDE: Chunk = Chunk::MAX;

/// What memory management costs the thread that causes it.
#[derive(Debug, Clone, Copy)]
pub struct KernelCosts {
    /// Allocating, charging and queueing one chunk that is read ahead.
    pub insert: Seconds,
    /// One look at a chunk in search of a victim.
    pub look: Seconds,
    /// Unmapping and freeing one chunk by `MADV_PAGEOUT`: 120 ms for 400 MiB.
    pub release: Seconds,
    /// Unmapping and freeing one chunk by `MADV_DONTNEED` and `POSIX_FADV_DONTNEED`, or one that was used and is
    /// evicted: measured, 0.09 to 0.10 ms for 1 MiB more than one that was not used.
    pub discard: Seconds,
}

impl KernelCosts {
    /// The measured costs, for chunks of a size.
    pub fn measured(chunk: Bytes) -> Self {
        let of = |(time, bytes): (Seconds, Bytes)| Seconds(time.0 * chunk.as_f64() / bytes.as_f64());
        let release = of((Seconds(0.12), Bytes::mib(400)));
        Self {
            insert: of(PAGE_INSERT_COST),
            look: of(PAGE_SCAN_COST),
            release,
            discard: of(PAGE_DISCARD_COST),
        }
    }

    /// The same where a thread turns pages over at another rate.
    fn turned_over(self, chunk: Bytes, rate: BytesPerSecond) -> Self {
        let share = (chunk / rate).0 / (self.insert + self.discard).0;
        Self { insert: self.insert * share, discard: self.discard * share, ..self }
    }
}

/// What a touch led to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Touch {
    /// The chunk is there.
    Ready,
    /// It is being read: wait until [`Storage::arrived`] names it.
    Waits,
    /// There is no room for it yet: [`Storage::retry`] after [`Storage::toil`].
    NoRoom,
}

/// Page cache, read-ahead and disk of one device.
#[derive(Debug, Clone)]
pub struct Storage {
    cache: Policy,
    readahead: Readahead,
    disk: Disk<Chunk>,
    /// The bandwidth that all flows have together when nobody else reads.
    bandwidth: BytesPerSecond,
    chunk: Bytes,
    costs: KernelCosts,
    /// Kept to be reused: the reads of one touch.
    reads: Vec<Chunk>,
    /// The counters when the kernel's work was last accounted for.
    accounted: Counters,
    /// Work that has been accounted for, and that no thread has spent yet.
    owed: Seconds,
    /// After so long without a touch the system takes back what it had kept.
    unwired_after: Option<Nanos>,
    /// When something was last touched.
    touched: Nanos,
}

impl Storage {
    /// A device's storage, in chunks of the usual size, with the kernel's read-ahead window.
    pub fn new(cache: Policy, read_ahead: Bytes, speed: DiskSpeed) -> Self {
        Self::with_chunks(cache, read_ahead, speed, Bytes(CHUNK_BYTES))
    }

    /// The same with another size of chunk, in which the cache must have been measured too.
    pub fn with_chunks(cache: Policy, read_ahead: Bytes, speed: DiskSpeed, chunk: Bytes) -> Self {
        let window = (read_ahead.0 / chunk.0.max(1)) as u32;
        Self {
            cache,
            readahead: Readahead::new(window),
            disk: Disk::new(speed),
            bandwidth: speed.bandwidth,
            chunk,
            costs: KernelCosts::measured(chunk),
            reads: Vec::new(),
            accounted: Counters::default(),
            owed: Seconds(0.0),
            unwired_after: None,
            touched: 0,
        }
    }

    /// The same on a device that gives up what has been idle for so long.
    #[must_use]
    pub fn unwired_after(mut self, idle: Option<Seconds>) -> Self {
        self.unwired_after = idle.map(Seconds::to_nanos);
        self
    }

    /// The same on a device whose kernel brings pages in and gives them up at this rate, if that is known.
    #[must_use]
    pub fn turned_over_at(mut self, rate: Option<BytesPerSecond>) -> Self {
        if let Some(rate) = rate {
            self.costs = self.costs.turned_over(self.chunk, rate);
        }
        self
    }

    fn wake_up(&mut self, now: Nanos) {
        if self.unwired_after.is_some_and(|after| now - self.touched >= after) {
            self.at_others_expense(|cache| cache.idled());
        }
        self.touched = now;
    }

    /// A thread reads a chunk through its mapping; as [`Flow::Prefetch`] it populates the mapping.
    pub fn touch(&mut self, now: Nanos, chunk: Chunk, flow: Flow) -> Touch {
        self.wake_up(now);
        let cache = self.cache.cache();
        let found = match flow {
            Flow::Fault => cache.access(chunk),
            Flow::Prefetch => cache.populate(chunk),
        };
        let touch = match found {
            Access::Hit => Touch::Ready,
            Access::InFlight => Touch::Waits,
            Access::Absent if self.readahead.miss(cache, chunk, &mut self.reads) => Touch::Waits,
            Access::Absent => Touch::NoRoom,
        };
        if found != Access::Absent {
            self.readahead.hit(cache, chunk, &mut self.reads);
        }
        self.submit(now, flow);
        touch
    }

    /// A thread reads a chunk through a mapping advised of random access: nothing is read around it.
    pub fn touch_exactly(&mut self, now: Nanos, chunk: Chunk, flow: Flow) -> Touch {
        self.wake_up(now);
        let cache = self.cache.cache();
        let found = match flow {
            Flow::Fault => cache.access(chunk),
            Flow::Prefetch => cache.populate(chunk),
        };
        match found {
            Access::Hit => Touch::Ready,
            Access::InFlight | Access::Absent => self.retry(now, chunk, flow),
        }
    }

    /// A thread that waited for a chunk runs again, [`WAKE`] after the arrival. False if it must touch it anew.
    pub fn resume(&mut self, chunk: Chunk) -> bool {
        self.cache.cache().resume(chunk)
    }

    /// A thread faults some pages in that are too few to count in the cache; they arrive as [`ASIDE`].
    pub fn read_aside(&mut self, now: Nanos, bytes: Bytes) -> Touch {
        self.disk.submit(now, Flow::Fault, ASIDE, bytes);
        Touch::Waits
    }

    /// A thread whose touch found no room tries again, this time without reading around.
    pub fn retry(&mut self, now: Nanos, chunk: Chunk, flow: Flow) -> Touch {
        let cache = self.cache.cache();
        // Somebody else may have fetched it meanwhile.
        if cache.holds(chunk) {
            match flow {
                Flow::Fault => cache.access(chunk),
                Flow::Prefetch => cache.populate(chunk),
            };
            return Touch::Ready;
        }
        match cache.prefetch_now(chunk) {
            Fetch::Started => self.disk.submit(now, flow, chunk, self.chunk),
            Fetch::Present => {}
            Fetch::NoRoom | Fetch::Again => return Touch::NoRoom,
        }
        Touch::Waits
    }

    /// Asks for a chunk without waiting for it, as `WILLNEED` does. On [`Fetch::NoRoom`] the kernel drops the
    /// request without a word; after [`Fetch::Again`] ask again when the [`Storage::toil`] is done.
    pub fn prefetch(&mut self, now: Nanos, chunk: Chunk) -> Fetch {
        let fetch = self.cache.cache().prefetch(chunk);
        if fetch == Fetch::Started {
            self.disk.submit(now, Flow::Prefetch, chunk, self.chunk);
        }
        fetch
    }

    /// The kernel's work since the last call: what the thread that touched or prefetched spends on it.
    pub fn toil(&mut self) -> Seconds {
        let owed = std::mem::replace(&mut self.owed, Seconds(0.0));
        owed + self.account()
    }

    /// Whoever takes memory of this device makes the room, not a thread of its own.
    fn at_others_expense(&mut self, take: impl FnOnce(&mut dyn PageCache)) {
        let owed = self.account();
        self.owed += owed;
        take(self.cache.cache());
        self.account();
    }

    /// The work since the last account.
    fn account(&mut self) -> Seconds {
        let (now, last) = (self.cache.view().counters(), self.accounted);
        self.accounted = now;
        let cost = |each: Seconds, now: u64, last: u64| each * (now - last) as f64;
        cost(self.costs.insert, now.fetched, last.fetched)
            + cost(self.costs.look, now.looks, last.looks)
            + cost(self.costs.release, now.released, last.released)
            + cost(self.costs.discard, now.discarded + now.unmapped, last.discarded + last.unmapped)
    }

    /// Takes one chunk whose read has ended by `now`.
    pub fn arrived(&mut self, now: Nanos) -> Option<Chunk> {
        let (_, chunk, _) = self.disk.arrived(now)?;
        if chunk != ASIDE {
            self.cache.cache().arrived(chunk);
        }
        Some(chunk)
    }

    /// When to ask for arrivals next; ask again after every change.
    pub fn next_end(&self) -> Option<Nanos> {
        self.disk.next_end()
    }

    /// Gives up a chunk, as `MADV_PAGEOUT` does.
    pub fn release(&mut self, chunk: Chunk) {
        self.cache.cache().release(chunk);
    }

    /// Gives up a chunk by unmapping it and `POSIX_FADV_DONTNEED`: its return will be no refault.
    pub fn discard(&mut self, chunk: Chunk) {
        self.cache.cache().discard(chunk);
    }

    /// The page cache, to look at or to squeeze.
    pub fn cache(&mut self) -> &mut Policy {
        &mut self.cache
    }

    /// The page cache, to look at.
    pub fn view(&self) -> &Policy {
        &self.cache
    }

    /// Other programs leave so much of the disk from now on.
    pub fn set_disk_left(&mut self, now: Nanos, left: f64) {
        self.disk.set_bandwidth(now, BytesPerSecond(self.bandwidth.0 * left));
    }

    /// The page cache has room for so many chunks from now on.
    pub fn set_room(&mut self, chunks: u32) {
        if self.cache.view().capacity() != chunks {
            self.at_others_expense(|cache| cache.set_capacity(chunks));
        }
    }

    /// Bytes that the disk has delivered.
    pub fn delivered(&self) -> Bytes {
        self.disk.delivered()
    }

    /// The size of a chunk.
    pub fn chunk(&self) -> Bytes {
        self.chunk
    }

    /// The read-ahead window in chunks: what one `WILLNEED` call is cut to.
    pub fn window(&self) -> u32 {
        self.readahead.window()
    }

    fn submit(&mut self, now: Nanos, flow: Flow) {
        for chunk in self.reads.drain(..) {
            self.disk.submit(now, flow, chunk, self.chunk);
        }
    }
}
