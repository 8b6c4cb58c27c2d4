//! Passes of the cyclic reader: measures the bytes that each pass over the file reads, with and without a kept set.
//!
//! The reader sums one piece of the file after another, in a cycle. In mode `managed`, some evenly spread pieces are
//! *kept*: they are loaded once before the first pass. The other pieces are *streamed*: a helper thread requests them
//! with `WILLNEED`, with a limited number of bytes in flight, waits for each with `MADV_POPULATE_READ`, and uses no
//! more memory than a buffer. The reader drops a streamed piece after its use. In mode `ahead` there is a helper
//! thread, but no piece is kept or dropped; experiments named `behind` are `managed` without kept pieces; in mode
//! `plain` only page faults read the file.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};
use hearth_profiles::measure::mapping::{Advice, FileMapping};
use hearth_studies::StudyError;
use hearth_studies::cgroups::{
    CgroupCounters, Cgroups, MIB, advise, checksum, drop_from_cache, is_kept, map_cold, missing_page_count,
    unmap,
};

/// How a pass reads the file.
#[derive(Clone, Copy, PartialEq, Debug, ValueEnum)]
pub enum ReadMode {
    /// Only page faults read the file.
    Plain,
    /// A helper thread reads ahead, up to the size of the buffer.
    Ahead,
    /// A helper thread reads ahead the pieces that are not kept; they are dropped after their use.
    Managed,
}

/// The system calls with which a piece is dropped from memory.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum DropMethod {
    /// `MADV_PAGEOUT`.
    PageOut,
    /// `MADV_DONTNEED`, which unmaps pages, then `POSIX_FADV_DONTNEED`, which frees unmapped pages.
    UnmapAndFadvise,
}

impl DropMethod {
    /// Drops `piece`, a part of the mapping `map` of `file`.
    pub fn drop_piece(self, file: &File, map: &FileMapping, piece: &[u8]) {
        match self {
            Self::PageOut => advise(piece, Advice::PageOut),
            Self::UnmapAndFadvise => {
                unmap(map, piece);
                drop_from_cache(file, piece.as_ptr() as usize - map.as_ptr() as usize, piece.len());
            }
        }
    }
}

/// Loads a piece as the helper thread does: reads its bytes with `WILLNEED`, then maps them with `MADV_POPULATE_READ`.
pub fn load_into_memory(piece: &[u8]) {
    advise(piece, Advice::WillNeed);
    advise(piece, Advice::PopulateRead);
}

type Piece = (usize, &'static [u8]);

/// The log of the operations on pieces: `k` for a kept piece that is loaded, `a` for a piece that is requested with
/// `WILLNEED`, `p` for populated, `t` for read by the reader, `r` for dropped.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<(char, usize)>>>);

impl Log {
    fn add(&self, what: char, piece: usize) {
        if let Ok(mut done) = self.0.lock() {
            done.push((what, piece));
        }
    }

    /// Removes and returns all logged operations. Consecutive pieces are abbreviated: `t3-7` means `t3 t4 t5 t6 t7`.
    fn take(&self) -> String {
        let done = self.0.lock().map(|mut done| std::mem::take(&mut *done)).unwrap_or_default();
        let runs = done.chunk_by(|(what, piece), next| (*what, piece + 1) == *next);
        let words = runs.map(|run| match run {
            [(what, piece)] => format!("{what}{piece}"),
            _ => format!("{}{}-{}", run[0].0, run[0].1, run[run.len() - 1].1),
        });
        words.collect::<Vec<_>>().join(" ")
    }
}

#[derive(Args, Clone, Debug)]
pub struct PassOptions {
    /// Set the size of the file in MiB.
    #[arg(long, default_value_t = 640)]
    pub file_mib: usize,
    /// Set the memory limit in KiB.
    #[arg(long = "limit-kib", default_value_t = 324 << 10)]
    pub memory_limit_kib: usize,
    /// Select how a pass reads the file.
    #[arg(long, value_enum, default_value_t = ReadMode::Managed)]
    pub mode: ReadMode,
    /// Set the size of the kept set in MiB.
    #[arg(long, default_value_t = 312)]
    pub kept_mib: usize,
    /// Set the size of the stream buffer in KiB.
    #[arg(id = "buffer_kib", long = "buffer-kib", default_value_t = 8 << 10)]
    pub stream_buffer_kib: usize,
    /// Limit the pieces that are requested but not yet read to this total size in KiB.
    #[arg(long = "flight-kib", default_value_t = 4 << 10)]
    pub max_in_flight_kib: usize,
    /// Set the size of a piece in KiB.
    #[arg(long, default_value_t = 1024)]
    pub piece_kib: usize,
    /// Advise the mapping with `MADV_RANDOM`.
    #[arg(id = "random", long = "random")]
    pub madvise_random: bool,
    /// Drop with `MADV_DONTNEED` and `POSIX_FADV_DONTNEED` instead of `MADV_PAGEOUT`.
    #[arg(id = "fadvise", long = "fadvise")]
    pub drops_with_fadvise: bool,
    /// Drop used pieces in the helper thread instead of the reader.
    #[arg(id = "helper_drops", long = "helper-drops")]
    pub helper_drops_pieces: bool,
    /// Read the file this many times.
    #[arg(long = "passes", default_value_t = 6)]
    pub pass_count: usize,
    /// Append the log of operations on pieces to this file.
    #[arg(id = "log", long = "log")]
    pub log_path: Option<PathBuf>,
}

impl PassOptions {
    fn drop_method(&self) -> DropMethod {
        if self.drops_with_fadvise { DropMethod::UnmapAndFadvise } else { DropMethod::PageOut }
    }

    /// Returns the command-line arguments of these options.
    pub fn to_arguments(&self) -> Vec<String> {
        let mut words = vec!["--mode".into(), format!("{:?}", self.mode).to_lowercase()];
        for (word, value) in [
            ("--file-mib", self.file_mib),
            ("--limit-kib", self.memory_limit_kib),
            ("--kept-mib", self.kept_mib),
            ("--buffer-kib", self.stream_buffer_kib),
            ("--flight-kib", self.max_in_flight_kib),
            ("--piece-kib", self.piece_kib),
            ("--passes", self.pass_count),
        ] {
            words.extend([word.into(), value.to_string()]);
        }
        if let Some(log) = &self.log_path {
            words.extend(["--log".into(), log.display().to_string()]);
        }
        let flags = [
            ("--random", self.madvise_random),
            ("--fadvise", self.drops_with_fadvise),
            ("--helper-drops", self.helper_drops_pieces),
        ];
        words.extend(flags.iter().filter(|flag| flag.1).map(|flag| flag.0.into()));
        words
    }

    fn keeps(&self, piece: usize) -> bool {
        let pieces = self.file_mib * 1024 / self.piece_kib;
        let kept = self.kept_mib * 1024 / self.piece_kib;
        self.mode == ReadMode::Managed && is_kept(piece, kept, pieces)
    }

    /// Runs as the child process: makes the passes over the file and prints a line for each pass.
    pub fn run_passes(&self, groups: &Cgroups, path: &Path) -> Result<(), StudyError> {
        let file = File::open(path)?;
        let map = map_cold(&file)?;
        if self.madvise_random {
            advise(map, Advice::Random);
        }
        let pieces: Vec<&'static [u8]> = map.chunks(self.piece_kib << 10).collect();
        let kept: Vec<bool> = (0..pieces.len()).map(|at| self.keeps(at)).collect();
        let log = Log::default();
        let (kept_pieces, streamed): (Vec<Piece>, Vec<Piece>) =
            pieces.iter().copied().enumerate().partition(|&(at, _)| kept[at]);
        for (at, piece) in kept_pieces {
            load_into_memory(piece);
            log.add('k', at);
        }
        let must = streamed.len() * (self.piece_kib << 10);
        let handle = file.try_clone()?;
        let helper = (self.mode != ReadMode::Plain).then(|| self.helper(streamed, map, handle, log.clone()));
        let mut lines = Vec::new();
        for pass in 0..self.pass_count {
            let (begin, before) = (Instant::now(), CgroupCounters::read(groups)?);
            let (lost, dropping) = self.pass(&file, map, &pieces, &kept, helper.as_ref(), &log)?;
            let now = CgroupCounters::read(groups)?;
            let count = now.since(&before);
            println!(
                "pass {pass} {:.3} {} {} {lost} {} {:.3} {} {:.2} {:.2} {}",
                begin.elapsed().as_secs_f64(),
                count.bytes_read,
                must,
                count.refaulted_pages,
                dropping.as_secs_f64(),
                count.memory_limit_hits,
                now.memory_usage_bytes as f64 / MIB as f64,
                now.kernel_memory_bytes as f64 / MIB as f64,
                now.active_file_bytes / MIB as u64,
            );
            lines.push(format!("pass {} {} {lost} {}", count.bytes_read, count.refaulted_pages, log.take()));
        }
        if let Some(path) = &self.log_path {
            let mut out = OpenOptions::new().create(true).append(true).open(path)?;
            writeln!(out, "row {}\n{}", self.to_arguments().join(" "), lines.join("\n"))?;
        }
        Ok(())
    }

    /// Reads the file once. Returns the number of pages of kept pieces that were evicted, and the time to drop pieces.
    fn pass(
        &self,
        file: &File,
        map: &FileMapping,
        pieces: &[&'static [u8]],
        kept: &[bool],
        helper: Option<&Helper>,
        log: &Log,
    ) -> Result<(usize, Duration), StudyError> {
        let (mut lost, mut dropping) = (0, Duration::ZERO);
        for (at, (piece, kept)) in pieces.iter().zip(kept).enumerate() {
            if *kept {
                let evicted = missing_page_count(piece);
                lost += evicted;
                // Page faults would read neighbouring pages too and exceed the buffer.
                if evicted > 0 {
                    load_into_memory(piece);
                }
            } else if let Some(helper) = helper {
                helper.loaded_rx.recv()?;
            }
            std::hint::black_box(checksum(piece));
            log.add('t', at);
            if let (false, Some(helper)) = (*kept, helper) {
                let start = Instant::now();
                if self.mode == ReadMode::Managed && !self.helper_drops_pieces {
                    self.drop_method().drop_piece(file, map, piece);
                    log.add('r', at);
                }
                dropping += start.elapsed();
                helper.used_tx.send((at, piece))?;
            }
        }
        Ok((lost, dropping))
    }

    /// Starts the helper thread, which repeatedly loads the streamed pieces in order.
    fn helper(&self, streamed: Vec<Piece>, map: &'static FileMapping, file: File, log: Log) -> Helper {
        let (loaded_tx, loaded_rx) = mpsc::channel();
        let (used_tx, used_rx) = mpsc::channel::<Piece>();
        let buffer = (self.stream_buffer_kib / self.piece_kib).max(1);
        let flight = (self.max_in_flight_kib / self.piece_kib).max(1);
        let (drops, method) =
            (self.helper_drops_pieces && self.mode == ReadMode::Managed, self.drop_method());
        std::thread::spawn(move || {
            let (mut requested, mut loaded, mut released) = (0, 0, 0);
            loop {
                let waits = loaded == requested && requested >= released + buffer;
                let mut used: Vec<_> = used_rx.try_iter().collect();
                if waits && used.is_empty() {
                    let Ok(piece) = used_rx.recv() else { return };
                    used.push(piece);
                }
                released += used.len();
                if drops {
                    for (at, piece) in used {
                        method.drop_piece(&file, map, piece);
                        log.add('r', at);
                    }
                }
                while requested < (released + buffer).min(loaded + flight) {
                    let (at, piece) = streamed[requested % streamed.len()];
                    advise(piece, Advice::WillNeed);
                    log.add('a', at);
                    requested += 1;
                }
                if loaded < requested {
                    let (at, piece) = streamed[loaded % streamed.len()];
                    advise(piece, Advice::PopulateRead);
                    log.add('p', at);
                    loaded += 1;
                    if loaded_tx.send(()).is_err() {
                        return;
                    }
                }
            }
        });
        Helper { loaded_rx, used_tx }
    }
}

struct Helper {
    /// Receives a message when the next streamed piece is loaded.
    loaded_rx: mpsc::Receiver<()>,
    /// Sends the pieces that the reader has used to the helper thread.
    used_tx: mpsc::Sender<Piece>,
}
