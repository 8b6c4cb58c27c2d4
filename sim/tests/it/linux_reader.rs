//! Simulated reader: does what `studies/src/bin/windowed_reader.rs` does, on the storage of a simulated device.

use std::collections::VecDeque;

use hearth_profiles::{Bytes, BytesPerSecond, Seconds};
use hearth_sim::device::storage::{Storage, TouchResult, WAKE_LATENCY};
use hearth_sim::engine::{Engine, Nanos, Timer};
use hearth_sim::page_cache::{Chunk, FetchResult, TwoListCache};
use hearth_sim::resource::{DiskSpeed, ReadKind};

const CHUNK: Bytes = Bytes(128 << 10);
const CHUNKS_PER_MIB: u32 = 8;
/// Read-ahead window of the kernel, as set by `read_ahead_kb` 8192.
const READ_AHEAD: Bytes = Bytes::from_mib(8);
/// Nanoseconds to sum the words of a chunk. For 400 MiB, 45 ms were measured.
const SUM_CHUNK: Nanos = 45_000_000 / (400 * CHUNKS_PER_MIB as u64);
/// Memory in MiB of the reading process without the file: about 2 MiB, plus the `--ballast-mib` of `windowed_reader`.
pub const PROCESS_MIB: u32 = 3;

#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Prefetch {
    None,
    /// Prefetch with one `MADV_WILLNEED` call for each chunk.
    Chunks,
    /// Prefetch with one `MADV_WILLNEED` call for the whole window.
    One,
    /// Prefetch with `MADV_POPULATE_READ`.
    Populate,
}

#[derive(Debug, Clone, Copy)]
pub struct Setup {
    pub share_mib: u32,
    /// Memory limit of the cgroup in MiB; 0 for no limit.
    pub memory_mib: u32,
    pub process_mib: u32,
    pub disk_mbps: u32,
    /// Nanoseconds that the other devices of the ring compute for a token.
    pub others: Nanos,
    pub rounds: u32,
    pub prefetch: Prefetch,
    pub release: bool,
    /// Size in MiB of the kept part of the share: pieces of 1 MiB, evenly distributed, neither prefetched nor released.
    pub kept_mib: u32,
    /// Number of threads that sum one window together; each thread sums a contiguous part.
    pub threads: u32,
}

#[derive(Debug, Clone, Copy)]
enum Event {
    OthersDone,
    Summed(usize),
    ReaderRetries(usize),
    /// The reader with this index runs again after the arrival of the chunk that it waited for.
    ReaderWakes(usize),
    Helper,
    Disk,
}

/// A reader thread: its next chunk, the end of its part of the window, and whether the thread waits for the chunk.
struct Reader {
    at: Chunk,
    end: Chunk,
    waits: bool,
    /// The time at which the kernel's work for the thread's page fault ends.
    free_at: Nanos,
}

struct ReaderSim {
    setup: Setup,
    engine: Engine<Event>,
    storage: Storage,
    disk_timer: Timer,
    readers: Vec<Reader>,
    round: u32,
    /// The windows requested from the helper thread: first chunk to read, and end. The first window is in progress.
    requested: VecDeque<(Chunk, Chunk)>,
    helper_waits: Option<Chunk>,
    /// For each token, the time of its end and the bytes read until then.
    tokens: Vec<(Nanos, u64)>,
}

impl ReaderSim {
    fn new(setup: Setup) -> Self {
        let share = setup.share_mib * CHUNKS_PER_MIB;
        let capacity = match setup.memory_mib {
            0 => share,
            limit => (limit - setup.process_mib) * CHUNKS_PER_MIB,
        };
        let speed = DiskSpeed {
            bandwidth: BytesPerSecond(1500e6),
            fault_read_rate: BytesPerSecond(744e6),
            prefetch_rate: BytesPerSecond(1438e6),
            throttle_rate: Some(BytesPerSecond(f64::from(setup.disk_mbps) * 1e6)),
            latency: Seconds(0.0002),
            piece_latency: Seconds(0.0),
        };
        let cache = Box::new(TwoListCache::new(share, capacity));
        let mut engine = Engine::new();
        let disk_timer = engine.new_timer();
        Self {
            setup,
            engine,
            storage: Storage::new(cache, READ_AHEAD, speed, CHUNK),
            disk_timer,
            readers: Vec::new(),
            round: 0,
            requested: VecDeque::new(),
            helper_waits: None,
            tokens: Vec::new(),
        }
    }

    fn run(mut self, tokens: usize) -> Vec<(Nanos, u64)> {
        self.engine.schedule_after(self.setup.others / u64::from(self.setup.rounds), Event::OthersDone);
        while self.tokens.len() < tokens {
            match self.engine.next_event().expect("the reader has no end of its own") {
                Event::OthersDone => self.begin_window(),
                Event::Summed(reader) => {
                    self.readers[reader].at += 1;
                    self.read(reader);
                }
                Event::ReaderRetries(reader) => {
                    let touch =
                        self.storage.retry_touch(self.engine.now(), self.readers[reader].at, ReadKind::Fault);
                    self.touched(reader, touch);
                }
                Event::ReaderWakes(reader) => {
                    if self.storage.cache.resume(self.readers[reader].at) {
                        self.touched(reader, TouchResult::Ready);
                    } else {
                        self.read(reader);
                    }
                }
                Event::Helper => self.help(),
                Event::Disk => self.on_disk(),
            }
            if let Some(at) = self.storage.next_event_time() {
                self.engine.set_timer(self.disk_timer, at, Event::Disk);
            }
        }
        self.tokens
    }

    fn keeps(&self, chunk: Chunk) -> bool {
        let (piece, share, kept) = (chunk / CHUNKS_PER_MIB, self.setup.share_mib, self.setup.kept_mib);
        (piece + 1) * kept / share > piece * kept / share
    }

    /// Returns the first chunk of the window of a round, and the chunk after the last chunk of the window.
    fn window(&self, round: u32) -> (Chunk, Chunk) {
        let chunks = self.setup.share_mib * CHUNKS_PER_MIB / self.setup.rounds;
        (round * chunks, (round + 1) * chunks)
    }

    /// Returns the time that the last system call spent in the kernel, at least a microsecond.
    fn kernel_time(&mut self) -> Nanos {
        self.storage.take_kernel_time().to_nanos().max(1000)
    }

    fn begin_window(&mut self) {
        let (start, end) = self.window(self.round);
        let part = (end - start).div_ceil(self.setup.threads);
        let reader = |at| Reader { at, end: (at + part).min(end), waits: false, free_at: 0 };
        self.readers = (start..end).step_by(part as usize).map(reader).collect();
        for reader in 0..self.readers.len() {
            self.read(reader);
        }
    }

    fn read(&mut self, reader: usize) {
        let Reader { at, end, .. } = self.readers[reader];
        if at < end {
            let touch = self.storage.touch(self.engine.now(), at, ReadKind::Fault);
            return self.touched(reader, touch);
        }
        if self.readers.iter().all(|reader| reader.at == reader.end) {
            self.end_window();
        }
    }

    fn touched(&mut self, reader: usize, touch: TouchResult) {
        let (now, kernel_time) = (self.engine.now(), self.kernel_time());
        match touch {
            TouchResult::Ready => {
                let begins = (now + kernel_time).max(self.readers[reader].free_at);
                self.readers[reader].free_at = 0;
                self.engine.schedule_at(begins + SUM_CHUNK, Event::Summed(reader));
            }
            TouchResult::Pending => {
                self.readers[reader].waits = true;
                // The kernel's work for this fault is done while the disk reads.
                self.readers[reader].free_at = now + kernel_time;
            }
            TouchResult::NoMemory => self.engine.schedule_after(kernel_time, Event::ReaderRetries(reader)),
        }
    }

    fn end_window(&mut self) {
        let (start, end) = self.window(self.round);
        if self.setup.release {
            for chunk in (start..end).filter(|&chunk| !self.keeps(chunk)).collect::<Vec<_>>() {
                self.storage.cache.release(chunk);
            }
        }
        let released = self.kernel_time();
        self.round = (self.round + 1) % self.setup.rounds;
        if self.setup.prefetch != Prefetch::None {
            if self.requested.is_empty() {
                self.engine.schedule_after(0, Event::Helper);
            }
            self.requested.push_back(self.window(self.round));
        }
        if self.round == 0 {
            self.tokens.push((self.engine.now(), self.storage.bytes_read().0));
        }
        let others = self.setup.others / u64::from(self.setup.rounds);
        self.engine.schedule_after(released + others, Event::OthersDone);
    }

    /// Runs the helper thread, which prefetches the next chunk of the first requested window.
    fn help(&mut self) {
        while self.requested.front().is_some_and(|&(start, end)| start < end && self.keeps(start)) {
            self.requested[0].0 += 1;
        }
        let (now, start) = (self.engine.now(), self.requested.front().map(|window| window.0));
        let Some(chunk) = start.filter(|&chunk| chunk < self.requested[0].1) else {
            if self.requested.pop_front().is_some() {
                self.engine.schedule_after(0, Event::Helper);
            }
            return;
        };
        if self.setup.prefetch == Prefetch::Populate {
            // `MADV_POPULATE_READ` touches as a reader does, but computes nothing.
            match self.storage.touch(now, chunk, ReadKind::Prefetch) {
                TouchResult::Ready => self.next_chunk(),
                TouchResult::Pending => self.helper_waits = Some(chunk),
                TouchResult::NoMemory => self.continue_helper(),
            }
            return;
        }
        if self.storage.prefetch(now, chunk, ReadKind::Prefetch) == FetchResult::Retry {
            return self.continue_helper();
        }
        // In all other cases the chunk is done: a request that finds no free memory is dropped.
        self.next_chunk();
        let done = chunk + 1 - self.window(0).1 * (chunk / self.window(0).1);
        if self.setup.prefetch == Prefetch::One && done == self.storage.readahead.window_chunks {
            self.requested[0].0 = self.requested[0].1;
        }
    }

    fn next_chunk(&mut self) {
        self.requested[0].0 += 1;
        self.continue_helper();
    }

    fn continue_helper(&mut self) {
        let kernel_time = self.kernel_time();
        self.engine.schedule_after(kernel_time, Event::Helper);
    }

    fn on_disk(&mut self) {
        while let Some(chunk) = self.storage.pop_completed(self.engine.now()) {
            for (place, reader) in self.readers.iter_mut().enumerate() {
                if reader.waits && chunk == reader.at {
                    reader.waits = false;
                    self.engine.schedule_after(WAKE_LATENCY, Event::ReaderWakes(place));
                }
            }
            if self.helper_waits == Some(chunk) {
                self.helper_waits = None;
                self.next_chunk();
            }
        }
    }
}

/// Returns the mean seconds and the mean bytes read, in multiples of the share, of the tokens after the first two.
pub fn simulate(setup: Setup) -> (f64, f64) {
    const WARM: usize = 2;
    const TOKENS: usize = 14;
    let ends = ReaderSim::new(setup).run(TOKENS);
    let (first, last) = (ends[WARM - 1], ends[TOKENS - 1]);
    let tokens = (TOKENS - WARM) as f64;
    let share = f64::from(setup.share_mib) * f64::from(1 << 20);
    ((last.0 - first.0) as f64 * 1e-9 / tokens, (last.1 - first.1) as f64 / tokens / share)
}

pub const BASE: Setup = Setup {
    share_mib: 400,
    memory_mib: 305,
    process_mib: PROCESS_MIB,
    disk_mbps: 400,
    others: 1_300_000_000,
    rounds: 1,
    prefetch: Prefetch::None,
    release: false,
    kept_mib: 0,
    threads: 1,
};

pub const fn windowed(rounds: u32, prefetch: Prefetch) -> Setup {
    Setup { rounds, prefetch, ..BASE }
}
