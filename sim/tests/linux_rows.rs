//! Does the simulated Linux read what the real one reads?
//!
//! The windowed reader of `examples/windowed_reader.rs`, on the storage that every simulated device has, held
//! to the numbers measured on a real machine. See `docs/decisions/0003-two-list-lru.md`.
//!
//!     cargo test -p hearth-sim --test linux_rows -- --nocapture

use std::collections::VecDeque;
use std::ops::RangeInclusive;

use hearth_profiles::{Bytes, BytesPerSecond, Seconds};
use hearth_sim::engine::{Engine, Nanos, Timer};
use hearth_sim::page_cache::{Chunk, Fetch, Policy, TwoList};
use hearth_sim::resource::{DiskSpeed, Flow};
use hearth_sim::storage::{Storage, Touch, WAKE};

const CHUNK: Bytes = Bytes(128 << 10);
const CHUNKS_PER_MIB: u32 = 8;
/// `read_ahead_kb` 8192.
const READ_AHEAD: Bytes = Bytes::mib(8);
/// The reader sums 400 MiB in 45 ms.
const SUM_CHUNK: Nanos = 45_000_000 / (400 * CHUNKS_PER_MIB as u64);
/// The reading process, its page tables and kernel memory, which the cgroup counts as well: about 2 MiB for
/// `examples/windowed_reader`, and what its `--ballast-mib` adds.
const PROCESS_MIB: u32 = 3;

#[derive(Debug, Clone, Copy, PartialEq)]
enum Prefetch {
    None,
    Chunks,
    One,
    Populate,
}

#[derive(Debug, Clone, Copy)]
struct Setup {
    share_mib: u32,
    memory_mib: u32,
    process_mib: u32,
    disk_mbps: u32,
    others: Nanos,
    rounds: u32,
    prefetch: Prefetch,
    release: bool,
    /// Spread evenly in pieces of 1 MiB, and neither read ahead nor released.
    kept_mib: u32,
    /// Threads that sum one window together, each a contiguous part.
    threads: u32,
}

#[derive(Debug, Clone, Copy)]
enum Event {
    /// The other devices have done their part of the ring.
    OthersDone,
    /// A reader has summed its chunk.
    Summed(usize),
    /// A reader tries again to find room for what it needs.
    ReaderRetries(usize),
    /// What a reader waited for has arrived, and it runs again.
    Wakes(usize),
    /// The helper goes on.
    Helper,
    /// Something may have arrived.
    Disk,
}

/// A thread: its next chunk, the end of its part, whether it waits for the chunk.
#[derive(Clone)]
struct Reader {
    at: Chunk,
    end: Chunk,
    waits: bool,
    free_at: Nanos,
}

#[derive(Clone)]
struct World {
    setup: Setup,
    engine: Engine<Event>,
    storage: Storage,
    disk_timer: Timer,
    readers: Vec<Reader>,
    round: u32,
    /// Windows the helper has been asked for, the first being worked on.
    asked: VecDeque<(Chunk, Chunk)>,
    helper_waits: Option<Chunk>,
    /// (end, bytes read until then) of each token.
    tokens: Vec<(Nanos, u64)>,
}

impl World {
    fn new(setup: Setup) -> Self {
        let share = setup.share_mib * CHUNKS_PER_MIB;
        let capacity = match setup.memory_mib {
            0 => share,
            limit => (limit - setup.process_mib) * CHUNKS_PER_MIB,
        };
        let speed = DiskSpeed {
            bandwidth: BytesPerSecond(1500e6),
            fault: BytesPerSecond(744e6),
            explicit: BytesPerSecond(1438e6),
            throttle: Some(BytesPerSecond(f64::from(setup.disk_mbps) * 1e6)),
            latency: Seconds(0.0002),
        };
        let cache = Policy::TwoList(Box::new(TwoList::new(share, capacity)));
        let mut engine = Engine::new();
        let disk_timer = engine.timer();
        Self {
            setup,
            engine,
            storage: Storage::with_chunks(cache, READ_AHEAD, speed, CHUNK),
            disk_timer,
            readers: Vec::new(),
            round: 0,
            asked: VecDeque::new(),
            helper_waits: None,
            tokens: Vec::new(),
        }
    }

    fn run(mut self, tokens: usize) -> Vec<(Nanos, u64)> {
        self.engine.after(self.setup.others / u64::from(self.setup.rounds), Event::OthersDone);
        while self.tokens.len() < tokens {
            match self.engine.next_event().expect("the reader never ends by itself") {
                Event::OthersDone => self.begin_window(),
                Event::Summed(reader) => {
                    self.readers[reader].at += 1;
                    self.read(reader);
                }
                Event::ReaderRetries(reader) => {
                    let touch = self.storage.retry(self.engine.now(), self.readers[reader].at, Flow::Fault);
                    self.touched(reader, touch);
                }
                Event::Wakes(reader) => {
                    if self.storage.resume(self.readers[reader].at) {
                        self.touched(reader, Touch::Ready);
                    } else {
                        self.read(reader);
                    }
                }
                Event::Helper => self.help(),
                Event::Disk => self.arrivals(),
            }
            if let Some(at) = self.storage.next_end() {
                self.engine.set(self.disk_timer, at, Event::Disk);
            }
        }
        self.tokens
    }

    fn keeps(&self, chunk: Chunk) -> bool {
        let (piece, share, kept) = (chunk / CHUNKS_PER_MIB, self.setup.share_mib, self.setup.kept_mib);
        (piece + 1) * kept / share > piece * kept / share
    }

    fn window(&self, round: u32) -> (Chunk, Chunk) {
        let chunks = self.setup.share_mib * CHUNKS_PER_MIB / self.setup.rounds;
        (round * chunks, (round + 1) * chunks)
    }

    /// What the kernel has just done for a thread, at least the microsecond of a call.
    fn toil(&mut self) -> Nanos {
        self.storage.toil().to_nanos().max(1000)
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

    /// A reader touches its next chunk.
    fn read(&mut self, reader: usize) {
        let Reader { at, end, .. } = self.readers[reader];
        if at < end {
            let touch = self.storage.touch(self.engine.now(), at, Flow::Fault);
            return self.touched(reader, touch);
        }
        if self.readers.iter().all(|reader| reader.at == reader.end) {
            self.end_window();
        }
    }

    fn touched(&mut self, reader: usize, touch: Touch) {
        let (now, toil) = (self.engine.now(), self.toil());
        match touch {
            Touch::Ready => {
                let begins = (now + toil).max(self.readers[reader].free_at);
                self.readers[reader].free_at = 0;
                self.engine.at(begins + SUM_CHUNK, Event::Summed(reader));
            }
            Touch::Waits => {
                self.readers[reader].waits = true;
                // The kernel's work for this fault is done while the disk reads.
                self.readers[reader].free_at = now + toil;
            }
            Touch::NoRoom => self.engine.after(toil, Event::ReaderRetries(reader)),
        }
    }

    fn end_window(&mut self) {
        let (start, end) = self.window(self.round);
        if self.setup.release {
            for chunk in start..end {
                if !self.keeps(chunk) {
                    self.storage.release(chunk);
                }
            }
        }
        let released = self.toil();
        self.round = (self.round + 1) % self.setup.rounds;
        if self.setup.prefetch != Prefetch::None {
            if self.asked.is_empty() {
                self.engine.after(0, Event::Helper);
            }
            self.asked.push_back(self.window(self.round));
        }
        if self.round == 0 {
            self.tokens.push((self.engine.now(), self.storage.delivered().0));
        }
        self.engine.after(released + self.setup.others / u64::from(self.setup.rounds), Event::OthersDone);
    }

    /// The helper works on the next chunk of the window asked for first.
    fn help(&mut self) {
        while self.asked.front().is_some_and(|&(start, end)| start < end && self.keeps(start)) {
            self.asked[0].0 += 1;
        }
        let (now, start) = (self.engine.now(), self.asked.front().map(|window| window.0));
        let Some(chunk) = start.filter(|&chunk| chunk < self.asked[0].1) else {
            if self.asked.pop_front().is_some() {
                self.engine.after(0, Event::Helper);
            }
            return;
        };
        if self.setup.prefetch == Prefetch::Populate {
            // `MADV_POPULATE_READ` touches as a reader does and computes nothing.
            match self.storage.touch(now, chunk, Flow::Prefetch) {
                Touch::Ready => self.helped(),
                Touch::Waits => self.helper_waits = Some(chunk),
                Touch::NoRoom => {
                    let toil = self.toil();
                    self.engine.after(toil, Event::Helper);
                }
            }
            return;
        }
        if self.storage.prefetch(now, chunk) == Fetch::Again {
            let toil = self.toil();
            self.engine.after(toil, Event::Helper);
            return;
        }
        // Otherwise it is done with: a request that finds no room is dropped.
        self.helped();
        let done = chunk + 1 - self.window(0).1 * (chunk / self.window(0).1);
        if self.setup.prefetch == Prefetch::One && done == self.storage.window() {
            self.asked[0].0 = self.asked[0].1;
        }
    }

    fn helped(&mut self) {
        self.asked[0].0 += 1;
        let toil = self.toil();
        self.engine.after(toil, Event::Helper);
    }

    fn arrivals(&mut self) {
        while let Some(chunk) = self.storage.arrived(self.engine.now()) {
            for (place, reader) in self.readers.iter_mut().enumerate() {
                if reader.waits && chunk == reader.at {
                    reader.waits = false;
                    self.engine.after(WAKE, Event::Wakes(place));
                }
            }
            if self.helper_waits == Some(chunk) {
                self.helper_waits = None;
                self.helped();
            }
        }
    }
}

/// Mean time and share multiple of a token, the first two left out.
fn simulate(setup: Setup) -> (f64, f64) {
    const WARM: usize = 2;
    const TOKENS: usize = 14;
    let ends = World::new(setup).run(TOKENS);
    let (first, last) = (ends[WARM - 1], ends[TOKENS - 1]);
    let tokens = (TOKENS - WARM) as f64;
    let share = f64::from(setup.share_mib) * f64::from(1 << 20);
    ((last.0 - first.0) as f64 * 1e-9 / tokens, (last.1 - first.1) as f64 / tokens / share)
}

struct Row {
    name: &'static str,
    setup: Setup,
    /// Measured ranges: seconds a token, multiples of the share read.
    seconds: RangeInclusive<f64>,
    read: RangeInclusive<f64>,
}

const BASE: Setup = Setup {
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

const fn windowed(rounds: u32, prefetch: Prefetch) -> Setup {
    Setup { rounds, prefetch, ..BASE }
}

/// The table that the simulator must reproduce, as published.
fn published() -> Vec<Row> {
    let chunks = |rounds| windowed(rounds, Prefetch::Chunks);
    let managed = |rounds, kept_mib| Setup { release: true, kept_mib, ..chunks(rounds) };
    let row = |name, setup, seconds, read| Row { name, setup, seconds, read };
    let mut rows: Vec<_> = [385, 365, 305, 205]
        .map(|memory_mib| row("cyclic", Setup { memory_mib, others: 0, ..BASE }, 1.05..=1.09, 1.0..=1.02))
        .into();
    rows.extend([
        row("no limit", Setup { memory_mib: 0, ..BASE }, 1.345..=1.345, 0.0..=0.0),
        row("k=1 none", BASE, 2.34..=2.34, 1.02..=1.02),
        row("k=1 chunks", chunks(1), 2.34..=2.34, 2.02..=2.02),
        row("k=2 chunks", chunks(2), 2.0..=2.1, 1.26..=1.58),
        // On an edge: two windows of 200 MiB and 205 MiB of memory. Below 5 MiB of process the machine reads
        // half of the share again, above all of it (see `measured`); the published row is one from above.
        row("k=2 chunks", Setup { memory_mib: 205, process_mib: 8, ..chunks(2) }, 2.22..=2.22, 2.0..=2.0),
        row("k=2 chunks, release", Setup { release: true, ..chunks(2) }, 1.5..=1.5, 1.0..=1.0),
        row("k=4 managed, 200 MiB kept", managed(4, 200), 1.42..=1.42, 0.50..=0.50),
        row("k=16 managed, 250 MiB kept", managed(16, 250), 1.41..=1.41, 0.38..=0.38),
        // On the same edge: three windows of 100 MiB and 305 MiB of memory; this one is from below.
        row("k=4 chunks", chunks(4), 1.4..=1.4, 1.01..=1.01),
    ]);
    rows
}

/// Measured with `examples/windowed_reader` on the machine of the decision's table.
fn measured() -> Vec<Row> {
    let chunks = |rounds| windowed(rounds, Prefetch::Chunks);
    let small = |setup| Setup { process_mib: 2, ..setup };
    let large = |setup| Setup { process_mib: 10, ..setup };
    let at_205 = |setup| Setup { memory_mib: 205, ..setup };
    let one = windowed(4, Prefetch::One);
    let row = |name, setup, seconds, read| Row { name, setup, seconds, read };
    vec![
        row("k=2 chunks, small", small(chunks(2)), 1.68..=1.86, 1.14..=1.36),
        row("k=2 chunks, large", large(chunks(2)), 1.71..=1.87, 1.18..=1.34),
        row("k=2 chunks, small", small(at_205(chunks(2))), 1.86..=1.88, 1.51..=1.52),
        row("k=2 chunks, large", large(at_205(chunks(2))), 1.96..=2.23, 1.64..=2.01),
        row("k=4 chunks, small", small(chunks(4)), 1.38..=1.50, 1.0..=1.01),
        row("k=4 chunks, large", large(chunks(4)), 1.79..=1.90, 1.48..=1.48),
        // Published with 3.08 s, which this machine needs at 200 MB/s, not at 400.
        row("k=4 one call", small(one), 2.20..=2.26, 1.0..=1.03),
        row("k=4 one call, 200 MB/s", small(Setup { disk_mbps: 200, ..one }), 3.19..=3.21, 1.0..=1.03),
        row(
            "k=1 chunks, others 0.2 s",
            small(Setup { others: 200_000_000, ..chunks(1) }),
            2.10..=2.10,
            2.0..=2.0,
        ),
        row(
            "k=1 chunks, others 0.6 s",
            small(Setup { others: 600_000_000, ..chunks(1) }),
            2.09..=2.10,
            1.96..=1.99,
        ),
        row("k=4 populate", small(windowed(4, Prefetch::Populate)), 1.355..=1.42, 0.82..=0.97),
    ]
}

#[test]
fn every_row_within_fifteen_per_cent() {
    let mut wrong = Vec::new();
    println!("| experiment | memory MiB | simulated s | measured s | simulated read | measured read |");
    println!("|---|---|---|---|---|---|");
    for Row { name, setup, seconds, read } in published().into_iter().chain(measured()) {
        let (time, bytes) = simulate(setup);
        println!("| {name} | {} | {time:.3} | {seconds:?} | {bytes:.2} | {read:?} |", setup.memory_mib);
        let near = |value: f64, range: &RangeInclusive<f64>| {
            (range.start() * 0.85 - 1e-9..=range.end() * 1.15 + 1e-9).contains(&value)
        };
        if !near(time, &seconds) || !near(bytes, &read) {
            wrong.push(format!("{name} at {} MiB", setup.memory_mib));
        }
    }
    assert!(wrong.is_empty(), "more than 15 % away: {}", wrong.join(", "));
}
