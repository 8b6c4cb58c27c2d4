//! Passes over the file: bytes read in each, with and without a kept set.
//!
//! The reader sums piece after piece of the file in a cycle. In mode `managed` some pieces are *kept*: loaded once
//! before the first pass and spread evenly. The others are *streamed*: a helper asks for them (`WILLNEED`, a number of
//! bytes in flight), waits for each (`MADV_POPULATE_READ`) and stays within a buffer; behind the reader they are
//! dropped. `ahead` has the helper but keeps and drops nothing; `behind` is `managed` with nothing kept; `plain` has
//! page faults only.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};
use hearth_studies::cgroups::{
    Cgroups, Counters, Failure, MIB, advise, checksum, drop_from_cache, map_cold, missing,
};

#[derive(Clone, Copy, PartialEq, Debug, ValueEnum)]
pub enum Mode {
    /// Only demand faults read.
    Plain,
    /// A helper populates up to a buffer ahead.
    Ahead,
    /// A helper populates what is not kept, and it is dropped behind the reader.
    Managed,
}

/// The system call that drops a piece.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum DropMethod {
    /// `MADV_PAGEOUT`.
    PageOut,
    /// `MADV_DONTNEED`, which unmaps, and `POSIX_FADV_DONTNEED`, which frees what is not mapped.
    ZapAndFadvise,
}

impl DropMethod {
    pub fn drop(self, file: &File, map: &[u8], piece: &[u8]) {
        match self {
            Self::PageOut => {
                advise(piece, libc::MADV_PAGEOUT);
            }
            Self::ZapAndFadvise => {
                advise(piece, libc::MADV_DONTNEED);
                drop_from_cache(file, piece.as_ptr() as usize - map.as_ptr() as usize, piece.len());
            }
        }
    }
}

/// Reads a piece as the helper does: the bytes by `WILLNEED`, which reads exactly these, then the mapping.
pub fn load(piece: &[u8]) {
    advise(piece, libc::MADV_WILLNEED);
    advise(piece, libc::MADV_POPULATE_READ);
}

/// A piece and its number in the file.
type Piece = (usize, &'static [u8]);

/// The log of operations on pieces, in order: `k` kept piece loaded, `a` requested with `WILLNEED`, `p` populated,
/// `t` touched by the reader, `r` dropped.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<(char, usize)>>>);

impl Log {
    fn add(&self, what: char, piece: usize) {
        if let Ok(mut done) = self.0.lock() {
            done.push((what, piece));
        }
    }

    /// Returns the operations since the last call; `t3-7` is five touches.
    fn take(&self) -> String {
        let done = self.0.lock().map(|mut done| std::mem::take(&mut *done)).unwrap_or_default();
        let runs = done.chunk_by(|(what, piece), next| (*what, piece + 1) == *next);
        let words: Vec<String> = runs
            .map(|run| match run {
                [(what, piece)] => format!("{what}{piece}"),
                _ => format!("{}{}-{}", run[0].0, run[0].1, run[run.len() - 1].1),
            })
            .collect();
        words.join(" ")
    }
}

/// The options of one experiment.
#[derive(Args, Clone, Debug)]
pub struct Passes {
    #[arg(long, default_value_t = 640)]
    pub file_mib: usize,
    #[arg(long, default_value_t = 324 << 10)]
    pub limit_kib: usize,
    #[arg(long, value_enum, default_value_t = Mode::Managed)]
    pub mode: Mode,
    #[arg(long, default_value_t = 312)]
    pub kept_mib: usize,
    #[arg(long, default_value_t = 8 << 10)]
    pub buffer_kib: usize,
    /// The part of the buffer that may be requested and not have arrived.
    #[arg(long, default_value_t = 4 << 10)]
    pub flight_kib: usize,
    #[arg(long, default_value_t = 1024)]
    pub piece_kib: usize,
    #[arg(long)]
    pub random: bool,
    /// Drop by `MADV_DONTNEED` and `POSIX_FADV_DONTNEED`, not by `MADV_PAGEOUT`.
    #[arg(long)]
    pub fadvise: bool,
    /// The helper drops what was used, not the reader.
    #[arg(long)]
    pub helper_drops: bool,
    #[arg(long = "passes", default_value_t = 6)]
    pub count: usize,
    /// The file to which the log of operations is appended for replay.
    #[arg(long)]
    pub log: Option<PathBuf>,
}

impl Passes {
    fn drop_method(&self) -> DropMethod {
        if self.fadvise { DropMethod::ZapAndFadvise } else { DropMethod::PageOut }
    }

    /// The options that make these passes.
    pub fn arguments(&self) -> Vec<String> {
        let mut words = vec!["--mode".into(), format!("{:?}", self.mode).to_lowercase()];
        for (word, value) in [
            ("--file-mib", self.file_mib),
            ("--limit-kib", self.limit_kib),
            ("--kept-mib", self.kept_mib),
            ("--buffer-kib", self.buffer_kib),
            ("--flight-kib", self.flight_kib),
            ("--piece-kib", self.piece_kib),
            ("--passes", self.count),
        ] {
            words.extend([word.into(), value.to_string()]);
        }
        let flags =
            [("--random", self.random), ("--fadvise", self.fadvise), ("--helper-drops", self.helper_drops)];
        if let Some(log) = &self.log {
            words.extend(["--log".into(), log.display().to_string()]);
        }
        words.extend(flags.iter().filter(|flag| flag.1).map(|flag| flag.0.into()));
        words
    }

    /// Returns whether a piece is kept; kept pieces are spread evenly through the file.
    fn keeps(&self, piece: usize) -> bool {
        let pieces = self.file_mib * 1024 / self.piece_kib;
        let kept = self.kept_mib * 1024 / self.piece_kib;
        self.mode == Mode::Managed && (piece + 1) * kept / pieces > piece * kept / pieces
    }

    /// The child: makes the passes, prints a line for each.
    pub fn run(&self, groups: &Cgroups, path: &Path) -> Result<(), Failure> {
        let file = File::open(path)?;
        let map: &'static [u8] = map_cold(&file)?;
        if self.random {
            advise(map, libc::MADV_RANDOM);
        }
        let pieces: Vec<&'static [u8]> = map.chunks(self.piece_kib << 10).collect();
        let kept: Vec<bool> = (0..pieces.len()).map(|at| self.keeps(at)).collect();
        let mut streamed = Vec::new();
        let log = Log::default();
        for (at, piece) in pieces.iter().enumerate() {
            if kept[at] {
                load(piece);
                log.add('k', at);
            } else {
                streamed.push((at, *piece));
            }
        }
        let must = streamed.len() * (self.piece_kib << 10);
        let handle = file.try_clone()?;
        let helper = (self.mode != Mode::Plain).then(|| self.helper(streamed, map, handle, log.clone()));
        let mut lines = Vec::new();
        for pass in 0..self.count {
            let (begin, before) = (Instant::now(), Counters::read(groups)?);
            let (lost, dropping) = self.pass(&file, map, &pieces, &kept, helper.as_ref(), &log)?;
            let now = Counters::read(groups)?;
            let count = now.since(&before);
            println!(
                "pass {pass} {:.3} {} {} {lost} {} {:.3} {} {:.2} {:.2} {}",
                begin.elapsed().as_secs_f64(),
                count.bytes,
                must,
                count.refaults,
                dropping.as_secs_f64(),
                count.limit_hits,
                now.used as f64 / MIB as f64,
                now.kernel as f64 / MIB as f64,
                now.active / MIB as u64,
            );
            lines.push(format!("pass {} {} {lost} {}", count.bytes, count.refaults, log.take()));
        }
        if let Some(path) = &self.log {
            let mut out = OpenOptions::new().create(true).append(true).open(path)?;
            writeln!(out, "row {}\n{}", self.arguments().join(" "), lines.join("\n"))?;
        }
        Ok(())
    }

    /// Reads the file once; returns pages of the kept set that were missing, and the time spent dropping.
    fn pass(
        &self,
        file: &File,
        map: &[u8],
        pieces: &[&'static [u8]],
        kept: &[bool],
        helper: Option<&Helper>,
        log: &Log,
    ) -> Result<(usize, Duration), Failure> {
        let (mut lost, mut dropping) = (0, Duration::ZERO);
        for (at, (piece, kept)) in pieces.iter().zip(kept).enumerate() {
            if *kept {
                let gone = missing(piece);
                lost += gone;
                // Page faults would read around it and overrun the buffer.
                if gone > 0 {
                    load(piece);
                }
            } else if let Some(helper) = helper {
                helper.ready.recv()?;
            }
            std::hint::black_box(checksum(piece));
            log.add('t', at);
            if let (false, Some(helper)) = (*kept, helper) {
                let start = Instant::now();
                if self.mode == Mode::Managed && !self.helper_drops {
                    self.drop_method().drop(file, map, piece);
                    log.add('r', at);
                }
                dropping += start.elapsed();
                helper.done.send((at, piece))?;
            }
        }
        Ok((lost, dropping))
    }

    /// Starts the thread that reads ahead.
    fn helper(&self, streamed: Vec<Piece>, map: &'static [u8], file: File, log: Log) -> Helper {
        let (ready_to, ready) = mpsc::channel();
        let (done, done_from) = mpsc::channel::<Piece>();
        let buffer = (self.buffer_kib / self.piece_kib).max(1);
        let flight = (self.flight_kib / self.piece_kib).max(1);
        let (drops, way) = (self.helper_drops && self.mode == Mode::Managed, self.drop_method());
        std::thread::spawn(move || {
            let (mut asked, mut there, mut given_up) = (0, 0, 0);
            loop {
                let waits = there == asked && asked >= given_up + buffer;
                let mut used: Vec<_> = done_from.try_iter().collect();
                if waits && used.is_empty() {
                    let Ok(piece) = done_from.recv() else { return };
                    used.push(piece);
                }
                given_up += used.len();
                if drops {
                    for (at, piece) in used {
                        way.drop(&file, map, piece);
                        log.add('r', at);
                    }
                }
                while asked < (given_up + buffer).min(there + flight) {
                    let (at, piece) = streamed[asked % streamed.len()];
                    advise(piece, libc::MADV_WILLNEED);
                    log.add('a', at);
                    asked += 1;
                }
                if there < asked {
                    let (at, piece) = streamed[there % streamed.len()];
                    advise(piece, libc::MADV_POPULATE_READ);
                    log.add('p', at);
                    there += 1;
                    if ready_to.send(()).is_err() {
                        return;
                    }
                }
            }
        });
        Helper { ready, done }
    }
}

/// The reader's ends of the channels to the helper.
struct Helper {
    /// Receives a message for each streamed piece that is loaded, in order.
    ready: mpsc::Receiver<()>,
    /// Sends each piece that the reader has used.
    done: mpsc::Sender<Piece>,
}
