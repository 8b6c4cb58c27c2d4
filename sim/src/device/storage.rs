//! Storage of a device: page cache, read-ahead and disk together.
//!
//! The page cache decides what is in memory, read-ahead decides what is read with a miss, the disk decides when it
//! arrives. The computation and the helper thread both use one storage: they share the read-ahead state of the one open
//! file and compete for the disk.
//!
//! The costs of the kernel itself are measured on Linux 6.18 and stated in [`KernelCosts`]: `WILLNEED` returns before
//! its reads arrive, after allocating and charging every page, so its pages hold memory while in flight; scanning a
//! page for reclaim takes time of the thread that allocates.

use hearth_core::compute_cost::{PAGE_DISCARD_COST, PAGE_INSERT_COST, PAGE_SCAN_COST};
use hearth_profiles::{Bytes, BytesPerSecond, Seconds};

use crate::engine::Nanos;
use crate::page_cache::{Access, CHUNK_BYTES, Chunk, Counters, Fetch, PageCache, Readahead};
use crate::resource::{Disk, DiskSpeed, Flow};

/// The pause before a touch that found no room is tried again. Something must arrive first, and disks need this long.
pub const NO_ROOM_PAUSE: Nanos = 100_000;

/// From the arrival of a page to the moment at which the waiting thread maps it. Until then the page is neither young
/// nor referenced, so reclaim may take it. Measured: half an exchange of two short messages over loopback, which is one
/// wake-up, took 23.5 us on the machine of the page cache's measurements.
pub const WAKE_LATENCY: Nanos = 23_500;

/// The tag of a read that bypasses the page cache.
pub const UNCACHED: Chunk = Chunk::MAX;

/// Costs of memory management for the thread that causes it.
#[derive(Debug, Clone, Copy)]
pub struct KernelCosts {
    /// Allocating, charging and queueing one chunk that is read ahead.
    pub insert: Seconds,
    /// Scanning one chunk for reclaim.
    pub scan: Seconds,
    /// Unmapping and freeing one chunk by `MADV_PAGEOUT`: 120 ms for 400 MiB.
    pub release: Seconds,
    /// Unmapping and freeing one chunk by `MADV_DONTNEED` and `POSIX_FADV_DONTNEED`, or one that was used and is
    /// evicted: measured, 0.09 to 0.10 ms for 1 MiB more than one that was not used.
    pub discard: Seconds,
}

impl KernelCosts {
    /// The measured costs for chunks of a size.
    pub fn measured(chunk: Bytes) -> Self {
        let of = |(time, bytes): (Seconds, Bytes)| Seconds(time.0 * chunk.as_f64() / bytes.as_f64());
        let release = of((Seconds(0.12), Bytes::mib(400)));
        Self {
            insert: of(PAGE_INSERT_COST),
            scan: of(PAGE_SCAN_COST),
            release,
            discard: of(PAGE_DISCARD_COST),
        }
    }

    /// The costs where a thread allocates and discards pages at another rate.
    fn with_turnover(self, chunk: Bytes, rate: BytesPerSecond) -> Self {
        let share = (chunk / rate).0 / (self.insert + self.discard).0;
        Self { insert: self.insert * share, discard: self.discard * share, ..self }
    }
}

/// The result of a touch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Touch {
    /// The chunk is in memory.
    Ready,
    /// The chunk is being read: wait until [`Storage::arrived`] returns it.
    Pending,
    /// There is no room for it yet: [`Storage::retry`] after [`Storage::take_kernel_time`].
    NoRoom,
}

/// Page cache, read-ahead and disk of one device.
#[derive(Debug, Clone)]
pub struct Storage {
    cache: Box<dyn PageCache>,
    readahead: Readahead,
    disk: Disk<Chunk>,
    /// The total bandwidth of all flows when no other program reads.
    bandwidth: BytesPerSecond,
    chunk: Bytes,
    costs: KernelCosts,
    /// Buffer for the reads of one touch.
    reads: Vec<Chunk>,
    /// The counters when the kernel's work was last charged.
    charged: Counters,
    /// Work that is charged but not yet spent by a thread.
    unspent: Seconds,
    /// The idle time after which the system takes back wired memory.
    unwire_after: Option<Nanos>,
    /// The time of the last touch.
    last_touch: Nanos,
}

impl Storage {
    /// A device's storage in chunks of the default size, with the kernel's read-ahead window.
    pub fn new(cache: Box<dyn PageCache>, read_ahead: Bytes, speed: DiskSpeed) -> Self {
        Self::with_chunks(cache, read_ahead, speed, Bytes(CHUNK_BYTES))
    }

    /// A device's storage in chunks of another size, with which the cache must have been created too.
    pub fn with_chunks(cache: Box<dyn PageCache>, read_ahead: Bytes, speed: DiskSpeed, chunk: Bytes) -> Self {
        let window = (read_ahead.0 / chunk.0.max(1)) as u32;
        Self {
            cache,
            readahead: Readahead::new(window),
            disk: Disk::new(speed),
            bandwidth: speed.bandwidth,
            chunk,
            costs: KernelCosts::measured(chunk),
            reads: Vec::new(),
            charged: Counters::default(),
            unspent: Seconds(0.0),
            unwire_after: None,
            last_touch: 0,
        }
    }

    /// Sets the idle time after which the device unwires its memory.
    #[must_use]
    pub fn with_unwire_after(mut self, idle: Option<Seconds>) -> Self {
        self.unwire_after = idle.map(Seconds::to_nanos);
        self
    }

    /// Sets the rate at which the kernel of the device brings pages into the page cache and evicts them, if it is
    /// known.
    #[must_use]
    pub fn with_turnover(mut self, rate: Option<BytesPerSecond>) -> Self {
        if let Some(rate) = rate {
            self.costs = self.costs.with_turnover(self.chunk, rate);
        }
        self
    }

    fn note_touch(&mut self, now: Nanos) {
        if self.unwire_after.is_some_and(|after| now - self.last_touch >= after) {
            self.uncharged(|cache| cache.on_idle());
        }
        self.last_touch = now;
    }

    /// Reads a chunk through the mapping; as [`Flow::Prefetch`] it populates the mapping.
    pub fn touch(&mut self, now: Nanos, chunk: Chunk, flow: Flow) -> Touch {
        self.note_touch(now);
        let cache = self.cache.as_mut();
        let found = access(cache, chunk, flow);
        let touch = match found {
            Access::Hit => Touch::Ready,
            Access::InFlight => Touch::Pending,
            Access::Absent if self.readahead.miss(cache, chunk, &mut self.reads) => Touch::Pending,
            Access::Absent => Touch::NoRoom,
        };
        if found != Access::Absent {
            self.readahead.hit(cache, chunk, &mut self.reads);
        }
        self.submit(now, flow);
        touch
    }

    /// Reads a chunk through a mapping advised of random access: nothing is read around it.
    pub fn touch_exactly(&mut self, now: Nanos, chunk: Chunk, flow: Flow) -> Touch {
        self.note_touch(now);
        match access(self.cache.as_mut(), chunk, flow) {
            Access::Hit => Touch::Ready,
            Access::InFlight | Access::Absent => self.retry(now, chunk, flow),
        }
    }

    /// Continues a thread that waited for a chunk, [`WAKE_LATENCY`] after the arrival. Returns false if it must touch
    /// it again.
    pub fn resume(&mut self, chunk: Chunk) -> bool {
        self.cache.resume(chunk)
    }

    /// Faults in some pages that are too few to count in the cache; they arrive as [`UNCACHED`].
    pub fn read_uncached(&mut self, now: Nanos, bytes: Bytes) -> Touch {
        self.disk.submit(now, Flow::Fault, UNCACHED, bytes);
        Touch::Pending
    }

    /// Repeats a touch that found no room, this time without reading around it.
    pub fn retry(&mut self, now: Nanos, chunk: Chunk, flow: Flow) -> Touch {
        let cache = self.cache.as_mut();
        // Another thread may have fetched it meanwhile.
        if cache.holds(chunk) {
            access(cache, chunk, flow);
            return Touch::Ready;
        }
        match cache.prefetch_now(chunk) {
            Fetch::Started => self.disk.submit(now, flow, chunk, self.chunk),
            Fetch::Present => {}
            Fetch::NoRoom | Fetch::Again => return Touch::NoRoom,
        }
        Touch::Pending
    }

    /// Requests a chunk without waiting for it, as `WILLNEED` does. On [`Fetch::NoRoom`] the kernel drops the request
    /// silently; after [`Fetch::Again`], request it again when [`Storage::take_kernel_time`] is spent.
    pub fn prefetch(&mut self, now: Nanos, chunk: Chunk) -> Fetch {
        let fetch = self.cache.prefetch(chunk);
        if fetch == Fetch::Started {
            self.disk.submit(now, Flow::Prefetch, chunk, self.chunk);
        }
        fetch
    }

    /// Takes the kernel's work since the last call, which the thread that touched or prefetched must spend.
    pub fn take_kernel_time(&mut self) -> Seconds {
        let unspent = std::mem::replace(&mut self.unspent, Seconds(0.0));
        unspent + self.charge()
    }

    /// Takes memory of this device; another program's thread does the work of making room.
    fn uncharged(&mut self, take: impl FnOnce(&mut dyn PageCache)) {
        let unspent = self.charge();
        self.unspent += unspent;
        take(self.cache.as_mut());
        self.charge();
    }

    /// The work since the last call.
    fn charge(&mut self) -> Seconds {
        let (now, last) = (self.cache.counters(), self.charged);
        self.charged = now;
        let cost = |each: Seconds, now: u64, last: u64| each * (now - last) as f64;
        cost(self.costs.insert, now.fetched, last.fetched)
            + cost(self.costs.scan, now.scanned, last.scanned)
            + cost(self.costs.release, now.released, last.released)
            + cost(self.costs.discard, now.discarded + now.unmapped, last.discarded + last.unmapped)
    }

    /// Takes one chunk whose read has ended by `now`.
    pub fn arrived(&mut self, now: Nanos) -> Option<Chunk> {
        let (_, chunk, _) = self.disk.arrived(now)?;
        if chunk != UNCACHED {
            self.cache.arrived(chunk);
        }
        Some(chunk)
    }

    /// When to call [`Storage::arrived`] next; changes with every call.
    pub fn next_end(&self) -> Option<Nanos> {
        self.disk.next_end()
    }

    /// Evicts a chunk, as `MADV_PAGEOUT` does.
    pub fn release(&mut self, chunk: Chunk) {
        self.cache.release(chunk);
    }

    /// Evicts a chunk by unmapping it and `POSIX_FADV_DONTNEED`: its return is no refault.
    pub fn discard(&mut self, chunk: Chunk) {
        self.cache.discard(chunk);
    }

    pub fn cache(&self) -> &dyn PageCache {
        self.cache.as_ref()
    }

    pub fn cache_mut(&mut self) -> &mut dyn PageCache {
        self.cache.as_mut()
    }

    /// Sets the part of the disk bandwidth that other programs leave.
    pub fn set_disk_left(&mut self, now: Nanos, left: f64) {
        self.disk.set_bandwidth(now, BytesPerSecond(self.bandwidth.0 * left));
    }

    /// Sets the capacity of the page cache.
    pub fn set_room(&mut self, chunks: u32) {
        if self.cache.capacity() != chunks {
            self.uncharged(|cache| cache.set_capacity(chunks));
        }
    }

    /// Bytes that the disk has delivered.
    pub fn delivered(&self) -> Bytes {
        self.disk.delivered()
    }

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

fn access(cache: &mut dyn PageCache, chunk: Chunk, flow: Flow) -> Access {
    match flow {
        Flow::Fault => cache.access(chunk),
        Flow::Prefetch => cache.populate(chunk),
    }
}

/// Storage with a two-list cache for unit tests, on a disk that reads a piece a millisecond.
#[cfg(test)]
pub(crate) fn test_storage(share: Chunk, capacity: u32, piece: Bytes) -> Storage {
    let rate = BytesPerSecond(piece.as_f64() * 1e3);
    let speed =
        DiskSpeed { bandwidth: rate, fault: rate, explicit: rate, throttle: None, latency: Seconds(0.0) };
    let cache = Box::new(crate::page_cache::TwoList::new(share, capacity));
    Storage::with_chunks(cache, piece, speed, piece)
}
