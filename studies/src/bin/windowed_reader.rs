//! Measures what the page cache of this kernel reads for a device that owns a window of layers.
//!
//! The measured rows of the simulator's test `linux_rows`. A file stands for a device's share of the weights. For every
//! token and every round the reader sleeps while the other devices would compute, then sums every word of its window
//! (about 45 ms for 400 MiB); right after that a helper thread prefetches the next window. A memory cgroup (v1) limits
//! the page cache and a blkio throttle limits the disk. The program prints for each token: the time, the bytes that the
//! disk delivered, major faults, refaults. It needs root.
//!
//! ```text
//! cargo run --release -p hearth-studies --bin windowed_reader -- --table
//! cargo run --release -p hearth-studies --bin windowed_reader -- --memory-mib 305 --rounds 2 --prefetch chunks
//! ```
//!
//! Not here: a model of the kernel. That is `hearth_sim::page_cache`.
#![allow(clippy::disallowed_methods, reason = "a physical experiment measures time")]

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use clap::{Args, Parser, ValueEnum};
use hearth_studies::cgroups::{
    Cgroups, Counters, Failure, Limits, MIB, PAGE, ShareFile, advise, checksum, map_cold, median,
    require_root, resident,
};
use hearth_studies::run_study;
use serde::{Deserialize, Serialize};

/// The largest read-ahead of the default kernel settings; `WILLNEED` in these pieces is always honoured.
const CHUNK: usize = 128 << 10;
/// The unit of keeping and releasing.
const PIECE: usize = MIB;
const RESULT: &str = "result ";

#[derive(Clone, Copy, PartialEq, Debug, ValueEnum, Serialize, Deserialize)]
enum Prefetch {
    /// Only demand faults read.
    None,
    /// `MADV_WILLNEED` in 128 KiB pieces.
    Chunks,
    /// One `MADV_WILLNEED` for the window.
    One,
    /// One `MADV_POPULATE_READ` for the window.
    Populate,
}

#[derive(Parser)]
struct Arguments {
    #[arg(long)]
    table: bool,
    #[arg(long, default_value_os_t = std::env::temp_dir())]
    directory: PathBuf,
    /// The experiment of a child as JSON, and its file.
    #[arg(long, num_args = 2)]
    child: Vec<String>,
    #[command(flatten)]
    experiment: Experiment,
}

#[derive(Args, Clone, Debug, Serialize, Deserialize)]
struct Experiment {
    #[arg(skip = "custom")]
    name: String,
    #[arg(long, default_value_t = 400)]
    share_mib: usize,
    /// Zero: no limit.
    #[arg(long, default_value_t = 305)]
    memory_mib: usize,
    /// Zero: no throttle.
    #[arg(long, default_value_t = 400)]
    disk_mbps: u64,
    #[arg(long, default_value_t = 1.3)]
    others_s: f64,
    #[arg(long, default_value_t = 1)]
    rounds: usize,
    #[arg(long, value_enum, default_value_t = Prefetch::None)]
    prefetch: Prefetch,
    /// `MADV_PAGEOUT` of the window just used, but for what is kept.
    #[arg(long = "release-behind")]
    release: bool,
    /// Spread evenly over the share, in pieces, and never given up nor read ahead.
    #[arg(long, default_value_t = 0)]
    kept_mib: usize,
    #[arg(long, default_value_t = 6)]
    tokens: usize,
    #[arg(long, default_value_t = 3)]
    repeats: usize,
    /// Anonymous memory that the reading process holds beside its pages of the file.
    #[arg(long, default_value_t = 0)]
    ballast_mib: usize,
    /// Threads that sum one window together.
    #[arg(long, default_value_t = 1)]
    threads: usize,
    /// Print one line a round.
    #[arg(long)]
    verbose: bool,
}

fn main() -> ExitCode {
    run_study(|_| run(Arguments::parse()))
}

fn run(Arguments { table, directory, child, experiment }: Arguments) -> Result<(), Failure> {
    if let [experiment, file] = &child[..] {
        return read_windows(&serde_json::from_str(experiment)?, Path::new(file));
    }
    require_root()?;
    let file = ShareFile::create(&directory, experiment.share_mib)?;
    println!(
        "| experiment | memory MiB | TPOT s | read / share | major faults | refaults MiB | activated MiB |\n\
         |---|---|---|---|---|---|---|"
    );
    let rows = if table { spec_rows(&experiment) } else { vec![experiment] };
    for row in rows {
        for _ in 0..row.repeats {
            measure(&row, &file.path)?;
        }
    }
    Ok(())
}

/// The rows of the table of measurements that the simulator is held to.
fn spec_rows(base: &Experiment) -> Vec<Experiment> {
    let cyclic = |memory_mib| Experiment {
        name: "cyclic".into(),
        memory_mib,
        others_s: 0.0,
        rounds: 1,
        ..base.clone()
    };
    let windowed = |name: &str, rounds, memory_mib, prefetch| Experiment {
        name: name.into(),
        rounds,
        memory_mib,
        prefetch,
        ..base.clone()
    };
    let released = |name: &str, rounds, kept_mib| Experiment {
        release: true,
        kept_mib,
        ..windowed(name, rounds, 305, Prefetch::Chunks)
    };
    let mut rows: Vec<_> = [385, 365, 305, 205].map(cyclic).into();
    rows.extend([
        windowed("no limit", 1, 0, Prefetch::None),
        windowed("k=1 none", 1, 305, Prefetch::None),
        windowed("k=1 chunks", 1, 305, Prefetch::Chunks),
        windowed("k=2 chunks", 2, 305, Prefetch::Chunks),
        windowed("k=2 chunks", 2, 205, Prefetch::Chunks),
        released("k=2 chunks, release", 2, 0),
        released("k=4 managed, 200 MiB kept", 4, 200),
        released("k=16 managed, 250 MiB kept", 16, 250),
        windowed("k=4 chunks", 4, 305, Prefetch::Chunks),
        windowed("k=4 one call", 4, 305, Prefetch::One),
        windowed("k=4 populate", 4, 305, Prefetch::Populate),
    ]);
    rows
}

/// Whether a piece of the share is kept: they are spread evenly.
fn keeps(experiment: &Experiment, piece: usize) -> bool {
    let (pieces, kept) = (experiment.share_mib * MIB / PIECE, experiment.kept_mib * MIB / PIECE);
    (piece + 1) * kept / pieces > piece * kept / pieces
}

/// Runs one experiment in a child of its own, so that the groups start empty, and prints its row.
fn measure(experiment: &Experiment, file: &Path) -> Result<(), Failure> {
    let limits =
        Limits { memory: experiment.memory_mib * MIB, disk_mbps: experiment.disk_mbps, ..Limits::default() };
    let groups = Cgroups::create(limits, file)?;
    let path = file.to_str().ok_or("the directory's name is not UTF-8")?;
    let text = groups.run(&["--child".into(), serde_json::to_string(experiment)?, path.into()])?;
    let row = text.lines().find_map(|line| line.strip_prefix(RESULT));
    for line in text.lines().filter(|line| !line.starts_with(RESULT)) {
        println!("  {line}");
    }
    let row = row.ok_or("the reader printed no result")?;
    println!("| {} | {} | {row} |", experiment.name, experiment.memory_mib);
    Ok(())
}

/// The child: joins the groups, reads the windows, prints medians over the tokens after the first two.
fn read_windows(experiment: &Experiment, file: &Path) -> Result<(), Failure> {
    let groups = Cgroups::join()?;
    let file = File::open(file)?;
    let map = map_cold(&file)?;
    let ballast = vec![1u8; experiment.ballast_mib * MIB];
    let (kind, window) = (experiment.prefetch, experiment.share_mib * MIB / experiment.rounds);
    // What of a window is not kept, as offsets and lengths. Without a kept set it is one range.
    let streamed: Vec<Vec<(usize, usize)>> =
        (0..experiment.rounds).map(|round| streamed(experiment, round * window, window)).collect();
    let helper = spawn_helper(map, kind, streamed.clone(), experiment.verbose);
    let others = Duration::from_secs_f64(experiment.others_s / experiment.rounds as f64);
    let (mut tokens, mut sum) = (Vec::new(), 0u64);
    for token in 0..experiment.tokens {
        let (start, before) = (Instant::now(), Counters::read(&groups)?);
        for (round, behind) in streamed.iter().enumerate() {
            std::thread::sleep(others);
            let offset = round * window;
            let (begin, count) = (Instant::now(), Counters::read(&groups)?);
            let picture = if experiment.verbose { residency(map, window) } else { String::new() };
            sum = sum.wrapping_add(checksum_together(&map[offset..offset + window], experiment.threads));
            let length = begin.elapsed();
            if experiment.release {
                for &(at, length) in behind {
                    advise(&map[at..at + length], libc::MADV_PAGEOUT);
                }
            }
            if kind != Prefetch::None {
                helper.send((round + 1) % experiment.rounds)?;
            }
            if experiment.verbose {
                let delta = Counters::read(&groups)?.since(&count);
                println!(
                    "token {token} round {round}: {picture} {length:.3?}, read {} MiB, {} faults, active {} MiB",
                    delta.bytes / MIB as u64,
                    delta.major_faults,
                    delta.active / MIB as u64,
                );
            }
        }
        tokens.push((start.elapsed().as_secs_f64(), Counters::read(&groups)?.since(&before)));
    }
    let settled = &tokens[2.min(tokens.len() - 1)..];
    let median = |of: fn(&(f64, Counters)) -> f64| median(settled.iter().map(of).collect());
    let share = (experiment.share_mib * MIB) as f64;
    println!(
        "{RESULT}{:.3} | {:.2} | {} | {:.0} | {:.0}",
        median(|t| t.0),
        median(|t| t.1.bytes as f64) / share,
        median(|t| t.1.major_faults as f64),
        median(|t| t.1.refaults as f64) * PAGE as f64 / MIB as f64,
        median(|t| t.1.active as f64) / MIB as f64,
    );
    std::hint::black_box((sum, ballast));
    Ok(())
}

/// Starts the thread that reads ahead; it is sent the numbers of windows.
fn spawn_helper(
    map: &'static [u8],
    kind: Prefetch,
    windows: Vec<Vec<(usize, usize)>>,
    verbose: bool,
) -> mpsc::Sender<usize> {
    let (send, receive) = mpsc::channel();
    std::thread::spawn(move || {
        for round in receive {
            let begin = Instant::now();
            for &(at, length) in &windows[round] {
                prefetch(kind, &map[at..at + length]);
            }
            if verbose {
                println!("        prefetch of window {round} returned after {:.3?}", begin.elapsed());
            }
        }
    });
    send
}

fn prefetch(kind: Prefetch, window: &[u8]) {
    match kind {
        Prefetch::None => {}
        Prefetch::Chunks => {
            for piece in window.chunks(CHUNK) {
                advise(piece, libc::MADV_WILLNEED);
            }
        }
        Prefetch::One => {
            advise(window, libc::MADV_WILLNEED);
        }
        Prefetch::Populate => {
            advise(window, libc::MADV_POPULATE_READ);
        }
    }
}

/// The parts of a window that are not kept, neighbours joined.
fn streamed(experiment: &Experiment, start: usize, length: usize) -> Vec<(usize, usize)> {
    let mut parts: Vec<(usize, usize)> = Vec::new();
    let mut at = start;
    while at < start + length {
        let end = (at / PIECE * PIECE + PIECE).min(start + length);
        if !keeps(experiment, at / PIECE) {
            match parts.last_mut() {
                Some((from, length)) if *from + *length == at => *length += end - at,
                _ => parts.push((at, end - at)),
            }
        }
        at = end;
    }
    parts
}

/// Tenths of each 8 MiB in the page cache, windows parted by `|`.
fn residency(map: &[u8], window: usize) -> String {
    let pages = resident(map);
    let cell = |pages: &[bool]| match pages.iter().filter(|&&held| held).count() * 10 / pages.len() {
        0 => '.',
        10 => '#',
        tenths => char::from(b'0' + tenths as u8),
    };
    let windows = pages.chunks(window / PAGE);
    windows.map(|window| window.chunks(2048).map(cell).collect::<String>() + "|").collect()
}

/// Sums a window with several threads, one contiguous part each, as rows of a matrix are split.
fn checksum_together(window: &[u8], threads: usize) -> u64 {
    if threads <= 1 {
        return checksum(window);
    }
    let part = (window.len() / threads).next_multiple_of(PAGE);
    std::thread::scope(|scope| {
        let workers: Vec<_> = window.chunks(part).map(|part| scope.spawn(|| checksum(part))).collect();
        workers
            .into_iter()
            .map(|worker| worker.join().expect("a checksum cannot fail"))
            .fold(0, u64::wrapping_add)
    })
}
