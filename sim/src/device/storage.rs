//! Storage of a device: page cache, read-ahead and disk together.
//!
//! The page cache decides which chunks are in memory, read-ahead decides which chunks are read with a missing chunk,
//! and the disk determines when these chunks arrive. The computation and the helper thread both use one storage: they
//! share the read-ahead state of one open file and compete for the disk.
//!
//! The CPU times of the kernel were measured on Linux 6.18 ([`MemoryManagementCosts`]). `WILLNEED` returns before its
//! reads are complete, but after allocating and charging every page, so these pages occupy memory while in flight.
//! The thread that allocates memory also scans pages for reclaim (direct reclaim).

use hearth_core::compute_cost::{PAGE_DISCARD_COST, PAGE_INSERT_COST, PAGE_SCAN_COST};
use hearth_profiles::{Bytes, BytesPerSecond, Seconds};

use crate::engine::Nanos;
use crate::page_cache::{Access, Chunk, ChunkCounts, FetchResult, PageCache, Readahead};
use crate::resource::{DiskSim, DiskSpeed, ReadKind};

/// Pause in nanoseconds before a touch that found no free memory is repeated: about the time of a read.
pub const NO_MEMORY_RETRY_DELAY: Nanos = 100_000;

/// Nanoseconds from the arrival of a page until the waiting thread maps the page. Until then the page is neither young
/// nor referenced, so reclaim may evict it. Measured on the machine of `docs/studies/linux-page-cache`: half of a round
/// trip of short messages over loopback, which is one wake-up of a thread, took 23.5 us.
pub const WAKE_LATENCY: Nanos = 23_500;

/// The chunk number that stands for a read that bypasses the page cache.
pub const UNCACHED_READ: Chunk = Chunk::MAX;

/// CPU times of the kernel's memory management, which delay the thread for which the kernel works.
#[derive(Debug, Clone, Copy)]
pub struct MemoryManagementCosts {
    /// Time to allocate, charge and queue one chunk that is read ahead.
    insertion: Seconds,
    /// Time to scan one chunk for reclaim.
    scan: Seconds,
    /// Time to unmap and free one chunk by `MADV_PAGEOUT`: 120 ms were measured for 400 MiB.
    release: Seconds,
    /// Time to unmap and free one chunk by `MADV_DONTNEED` and `POSIX_FADV_DONTNEED`, or to evict a used chunk, which
    /// took 0.09 to 0.10 ms per MiB longer than evicting an unused chunk.
    discard: Seconds,
}

impl MemoryManagementCosts {
    fn measured(chunk: Bytes) -> Self {
        let of = |(time, bytes): (Seconds, Bytes)| Seconds(time.0 * chunk.as_f64() / bytes.as_f64());
        Self {
            insertion: of(PAGE_INSERT_COST),
            scan: of(PAGE_SCAN_COST),
            release: of((Seconds(0.12), Bytes::from_mib(400))),
            discard: of(PAGE_DISCARD_COST),
        }
    }

    /// Returns the costs of a thread that reads chunks into the page cache and evicts them at the given rate.
    pub(super) fn with_page_cache_throughput(self, chunk: Bytes, rate: BytesPerSecond) -> Self {
        let factor = (chunk / rate).0 / (self.insertion + self.discard).0;
        Self { insertion: self.insertion * factor, discard: self.discard * factor, ..self }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TouchResult {
    Ready,
    /// The chunk is being read: wait until [`Storage::pop_completed`] returns the chunk.
    Pending,
    /// No memory is free for the chunk yet: call [`Storage::retry_touch`] after [`Storage::take_kernel_time`].
    NoMemory,
}

#[derive(Debug)]
pub struct Storage {
    pub cache: Box<dyn PageCache>,
    pub readahead: Readahead,
    disk: DiskSim<Chunk>,
    pub chunk_size: Bytes,
    pub(super) costs: MemoryManagementCosts,
    /// Buffer for the chunks to read after one touch, kept to reuse its allocation.
    reads: Vec<Chunk>,
    /// The page cache's counters when kernel time was last charged to a thread.
    charged: ChunkCounts,
    /// Kernel time that is charged to a thread but not spent by the thread yet.
    unspent: Seconds,
    /// The first chunk of experts, if the kernel's read-ahead window is so small that they are read without the chunks
    /// around them.
    pub(super) first_expert_chunk: Chunk,
    /// Idle time after which the system unwires the weights that Metal has wired; `None` if it never does.
    pub(super) unwire_after: Option<Nanos>,
    last_touch: Nanos,
}

impl Storage {
    /// Creates the storage of a device whose kernel has the read-ahead window `read_ahead` and never unwires weights.
    pub fn new(cache: Box<dyn PageCache>, read_ahead: Bytes, speed: DiskSpeed, chunk_size: Bytes) -> Self {
        let window = (read_ahead.0 / chunk_size.0.max(1)) as u32;
        Self {
            cache,
            readahead: Readahead::new(window),
            disk: DiskSim::new(speed),
            chunk_size,
            costs: MemoryManagementCosts::measured(chunk_size),
            reads: Vec::new(),
            charged: ChunkCounts::default(),
            unspent: Seconds(0.0),
            first_expert_chunk: Chunk::MAX,
            unwire_after: None,
            last_touch: 0,
        }
    }

    fn note_touch(&mut self, now: Nanos) {
        if self.unwire_after.is_some_and(|after| now - self.last_touch >= after) {
            self.uncharged(|cache| cache.on_idle());
        }
        self.last_touch = now;
    }

    /// Touches a chunk of the mapping: by a page fault with [`ReadKind::Fault`], or by populating the mapping with
    /// [`ReadKind::Prefetch`]. A missing chunk is read together with the chunks around it.
    pub fn touch(&mut self, now: Nanos, chunk: Chunk, flow: ReadKind) -> TouchResult {
        if chunk >= self.first_expert_chunk && chunk != UNCACHED_READ {
            return self.touch_without_readahead(now, chunk, flow);
        }
        self.note_touch(now);
        let cache = self.cache.as_mut();
        let found = access(cache, chunk, flow);
        let touch = match found {
            Access::Hit => TouchResult::Ready,
            Access::InFlight => TouchResult::Pending,
            Access::Absent if self.readahead.on_miss(cache, chunk, &mut self.reads) => TouchResult::Pending,
            Access::Absent => TouchResult::NoMemory,
        };
        if found != Access::Absent {
            self.readahead.on_hit(cache, chunk, &mut self.reads);
        }
        self.submit(now, flow);
        touch
    }

    /// Touches a chunk of a mapping with the advice `MADV_RANDOM`: if the chunk is missing, only this chunk is read.
    pub fn touch_without_readahead(&mut self, now: Nanos, chunk: Chunk, flow: ReadKind) -> TouchResult {
        self.note_touch(now);
        match access(self.cache.as_mut(), chunk, flow) {
            Access::Hit => TouchResult::Ready,
            Access::InFlight | Access::Absent => self.retry_touch(now, chunk, flow),
        }
    }

    /// Reads a few pages that bypass the page cache. [`Storage::pop_completed`] then returns [`UNCACHED_READ`].
    pub fn read_uncached(&mut self, now: Nanos, bytes: Bytes) -> TouchResult {
        self.disk.submit(now, ReadKind::Fault, UNCACHED_READ, bytes);
        TouchResult::Pending
    }

    /// Repeats a touch that found no free memory, this time without reading around the chunk.
    pub fn retry_touch(&mut self, now: Nanos, chunk: Chunk, flow: ReadKind) -> TouchResult {
        let cache = self.cache.as_mut();
        // Another thread may have fetched the chunk meanwhile.
        if cache.contains(chunk) {
            access(cache, chunk, flow);
            return TouchResult::Ready;
        }
        match cache.prefetch_now(chunk) {
            FetchResult::Started => self.disk.submit(now, flow, chunk, self.chunk_size),
            FetchResult::Present => {}
            FetchResult::NoMemory | FetchResult::Retry => return TouchResult::NoMemory,
        }
        TouchResult::Pending
    }

    /// Requests a chunk without waiting for its arrival, as `WILLNEED` does. [`FetchResult::NoMemory`] means that the
    /// kernel drops the request. [`FetchResult::Retry`] means to repeat it after [`Storage::take_kernel_time`].
    pub fn prefetch(&mut self, now: Nanos, chunk: Chunk, kind: ReadKind) -> FetchResult {
        let fetch = self.cache.prefetch(chunk);
        if fetch == FetchResult::Started {
            self.disk.submit(now, kind, chunk, self.chunk_size);
        }
        fetch
    }

    /// Returns the kernel time since the last call. It delays the thread that touched or prefetched chunks.
    pub fn take_kernel_time(&mut self) -> Seconds {
        let unspent = std::mem::replace(&mut self.unspent, Seconds(0.0));
        unspent + self.charge()
    }

    /// Changes the page cache without charging kernel time to a thread, because another program causes the change.
    fn uncharged(&mut self, change: impl FnOnce(&mut dyn PageCache)) {
        let unspent = self.charge();
        self.unspent += unspent;
        change(self.cache.as_mut());
        self.charge();
    }

    fn charge(&mut self) -> Seconds {
        let (now, last) = (self.cache.counters(), self.charged);
        self.charged = now;
        let cost = |each: Seconds, now: u64, last: u64| each * (now - last) as f64;
        cost(self.costs.insertion, now.fetched, last.fetched)
            + cost(self.costs.scan, now.scanned, last.scanned)
            + cost(self.costs.release, now.released, last.released)
            + cost(self.costs.discard, now.discarded + now.unmapped, last.discarded + last.unmapped)
    }

    /// Removes and returns one chunk whose read is complete by `now`.
    pub fn pop_completed(&mut self, now: Nanos) -> Option<Chunk> {
        let chunk = self.disk.pop_completed(now)?;
        if chunk != UNCACHED_READ {
            self.cache.on_arrival(chunk);
        }
        Some(chunk)
    }

    /// Returns the time at which to call [`Storage::pop_completed`] next. Any other call may change this time.
    pub fn next_event_time(&self) -> Option<Nanos> {
        self.disk.next_event_time()
    }

    /// Sets the fraction of the disk bandwidth that other programs leave available.
    pub fn set_available_disk_fraction(&mut self, now: Nanos, fraction: f64) {
        self.disk.set_available_fraction(now, fraction);
    }

    pub fn set_cache_capacity(&mut self, chunks: u32) {
        if self.cache.capacity() != chunks {
            self.uncharged(|cache| cache.set_capacity(chunks));
        }
    }

    pub fn bytes_read(&self) -> Bytes {
        Bytes(self.disk.bytes_read)
    }

    fn submit(&mut self, now: Nanos, flow: ReadKind) {
        for chunk in self.reads.drain(..) {
            self.disk.submit(now, flow, chunk, self.chunk_size);
        }
    }
}

fn access(cache: &mut dyn PageCache, chunk: Chunk, flow: ReadKind) -> Access {
    match flow {
        ReadKind::Fault => cache.access(chunk),
        ReadKind::Prefetch | ReadKind::Piece => cache.populate(chunk),
    }
}
