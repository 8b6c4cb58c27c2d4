//! Replays the logged accesses of a real reader on [`TwoListCache`], and compares the reads and refaults with Linux.
//!
//! `cyclic_reader --log` (`studies/src/bin/cyclic_reader`) logs the accesses of a reader and its helper thread to each
//! piece of a file, in order, and the counters of the kernel for each pass. The replay has no clock: a requested piece
//! has arrived when it is populated. See `docs/decisions/0011-populate-marks-accessed.md`.
//!
//!     cargo test -p hearth-sim --test it cyclic_rows -- --nocapture

use std::ops::Range;

use hearth_sim::page_cache::{Access, Chunk, FetchResult, PageCache, Readahead, TwoListCache};

const LOG: &str = include_str!("../data/cyclic_reader.log");
const CHUNKS_PER_MIB: u32 = 8;
const FILE_MIB: u32 = 640;
const PIECE_MIB: u32 = 2;
const PAGES_PER_CHUNK: u64 = 32;
/// Read-ahead window in chunks: 8 MiB, as set by `read_ahead_kb` 8192.
const READ_AHEAD: u32 = 8 * CHUNKS_PER_MIB;
/// Memory in chunks of the process, its page tables and the tree nodes of the page cache: 3.2 MiB were measured.
const PROCESS_CHUNKS: u32 = 26;

struct LoggedRow {
    name: &'static str,
    capacity: u32,
    kept_mib: u32,
    fadvise: bool,
    passes: Vec<LoggedPass>,
}

struct LoggedPass {
    bytes: u64,
    refaults: u64,
    /// Number of pages of kept pieces that were missing from memory.
    lost: u64,
    steps: Vec<(char, u32)>,
}

fn rows() -> Vec<LoggedRow> {
    let mut rows: Vec<LoggedRow> = Vec::new();
    for line in LOG.lines().filter(|line| !line.starts_with('#')) {
        if let Some(head) = line.strip_prefix("row ") {
            let parts: Vec<&'static str> = head.split("; ").collect();
            let number = |at: usize| parts[at].split(' ').nth(1).and_then(|word| word.parse().ok());
            let limit: u32 = number(1).expect("a limit in KiB");
            rows.push(LoggedRow {
                name: parts[0],
                capacity: limit / 1024 * CHUNKS_PER_MIB - PROCESS_CHUNKS,
                kept_mib: number(2).expect("a kept set in MiB"),
                fadvise: parts[3] == "fadvise",
                passes: Vec::new(),
            });
            continue;
        }
        let passes = &mut rows.last_mut().expect("a row comes first").passes;
        if let Some(counts) = line.strip_prefix("pass ") {
            let counts: Vec<u64> = counts.split(' ').filter_map(|word| word.parse().ok()).collect();
            let (bytes, refaults, lost) = (counts[0], counts[1], counts[2]);
            passes.push(LoggedPass { bytes, refaults, lost, steps: Vec::new() });
        } else {
            let steps = &mut passes.last_mut().expect("a pass comes first").steps;
            line.split(' ').for_each(|word| parse_steps(word, steps));
        }
    }
    rows
}

/// Parses a word of the log into steps: `t3-5` means that the pieces 3 to 5 are touched, one after another.
fn parse_steps(word: &str, steps: &mut Vec<(char, u32)>) {
    let what = word.chars().next().expect("no empty words");
    let range = &word[1..];
    let (first, last) = range.split_once('-').unwrap_or((range, range));
    let number = |text: &str| text.parse::<u32>().expect("the number of a piece");
    steps.extend((number(first)..=number(last)).map(|piece| (what, piece)));
}

/// The state of a replay: the page cache, its read-ahead and the chunks in flight.
struct Replay {
    cache: TwoListCache,
    readahead: Readahead,
    in_flight: Vec<Chunk>,
    lost: u64,
}

impl Replay {
    fn step(&mut self, row: &LoggedRow, what: char, piece: u32) {
        let chunks = piece * PIECE_MIB * CHUNKS_PER_MIB..(piece + 1) * PIECE_MIB * CHUNKS_PER_MIB;
        match what {
            'a' => self.request(chunks),
            'p' => self.touch(chunks, true),
            'k' => self.load(chunks),
            'r' if row.fadvise => chunks.for_each(|chunk| self.cache.discard(chunk)),
            'r' => chunks.for_each(|chunk| self.cache.release(chunk)),
            't' => {
                if keeps(row, piece) {
                    let missing = chunks.clone().filter(|&chunk| !self.cache.contains(chunk)).count() as u64;
                    self.lost += missing * PAGES_PER_CHUNK;
                    // The reader does the same when a piece of its kept set is missing.
                    if missing > 0 {
                        self.load(chunks.clone());
                    }
                }
                self.touch(chunks, false);
            }
            other => panic!("unknown step {other}"),
        }
    }

    fn request(&mut self, chunks: Range<Chunk>) {
        for chunk in chunks {
            // A request that finds no free memory is dropped.
            if self.cache.prefetch_now(chunk) == FetchResult::Started {
                self.in_flight.push(chunk);
            }
        }
    }

    fn load(&mut self, chunks: Range<Chunk>) {
        self.request(chunks.clone());
        self.touch(chunks, true);
    }

    fn touch(&mut self, chunks: Range<Chunk>, populates: bool) {
        for chunk in chunks {
            self.arrive(chunk);
            let mut reads = Vec::new();
            let found = if populates { self.cache.populate(chunk) } else { self.cache.access(chunk) };
            match found {
                Access::Absent => assert!(self.readahead.on_miss(&mut self.cache, chunk, &mut reads)),
                Access::Hit | Access::InFlight => self.readahead.on_hit(&mut self.cache, chunk, &mut reads),
            }
            self.in_flight.extend(reads);
            if self.arrive(chunk) {
                self.cache.resume(chunk);
            }
        }
    }

    /// Completes the reads of a chunk and of all chunks requested earlier. Returns whether the chunk was in flight.
    fn arrive(&mut self, chunk: Chunk) -> bool {
        let Some(at) = self.in_flight.iter().position(|&read| read == chunk) else { return false };
        self.in_flight.drain(..=at).for_each(|read| self.cache.on_arrival(read));
        true
    }
}

/// Whether a piece is in the kept set of a row; the kept set is spread evenly over the file.
fn keeps(row: &LoggedRow, piece: u32) -> bool {
    let (pieces, kept) = (FILE_MIB / PIECE_MIB, row.kept_mib / PIECE_MIB);
    (piece + 1) * kept / pieces > piece * kept / pieces
}

#[test]
fn replay_matches_measured_reads_and_refaults() {
    let mut wrong = Vec::new();
    println!("| row | pass | read MiB | replayed | refaults MiB | replayed | lost MiB | replayed |");
    println!("|---|---|---|---|---|---|---|---|");
    for row in rows() {
        let share = FILE_MIB * CHUNKS_PER_MIB;
        let mut replay = Replay {
            cache: TwoListCache::new(share, row.capacity),
            readahead: Readahead::new(READ_AHEAD),
            in_flight: Vec::new(),
            lost: 0,
        };
        for (at, pass) in row.passes.iter().enumerate() {
            let (before, lost) = (replay.cache.counters(), replay.lost);
            pass.steps.iter().for_each(|&(what, piece)| replay.step(&row, what, piece));
            let now = replay.cache.counters();
            let mut fetched = now.fetched - before.fetched;
            if at == 0 {
                // The log does not count what is loaded before the first pass.
                fetched -= pass.steps.iter().filter(|step| step.0 == 'k').count() as u64
                    * u64::from(PIECE_MIB * CHUNKS_PER_MIB);
            }
            let of_chunks = |chunks: u64| chunks as f64 / f64::from(CHUNKS_PER_MIB);
            let of_pages = |pages: u64| pages as f64 / 256.0;
            let pairs = [
                (pass.bytes as f64 / f64::from(1 << 20), of_chunks(fetched)),
                (of_pages(pass.refaults), of_chunks(now.refaults - before.refaults)),
                (of_pages(pass.lost), of_pages(replay.lost - lost)),
            ];
            let cells = pairs.map(|(machine, replayed)| format!("{machine:.0} | {replayed:.0}"));
            println!("| {} | {at} | {} |", row.name, cells.join(" | "));
            // The first pass fills the cache; the tolerance of 16 MiB is for reads that were in flight.
            if at > 0
                && pairs.iter().any(|(machine, replayed)| (machine - replayed).abs() > 16.0 + 0.15 * machine)
            {
                wrong.push(format!("{} pass {at}", row.name));
            }
        }
    }
    assert!(wrong.is_empty(), "more than 15 % off: {}", wrong.join(", "));
}
