//! Measures the disk reads of a device that reads a window of layers in every round, with this machine's page cache.
//!
//! The results are the measured rows of the simulator's test `linux_rows`. A file stands in for the weights of the
//! device. For every token and round, the reader sleeps while the other devices would compute, then sums every word of
//! its window (about 45 ms for 400 MiB). After that a helper thread prefetches the next window. A memory cgroup (v1)
//! limits the page cache, and a blkio throttle limits the disk. The program prints medians per token: time, bytes read
//! from the disk, major faults, refaults and activated bytes. The program needs root.
//!
//! ```text
//! cargo run --release -p hearth-studies --bin windowed_reader -- --table
//! cargo run --release -p hearth-studies --bin windowed_reader -- --memory-mib 305 --rounds 2 --prefetch chunks
//! ```
//!
//! Not here: a model of the page cache (`hearth_sim::page_cache`).
#![allow(clippy::disallowed_methods, reason = "a physical experiment measures time")]

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use clap::{Args, Parser, ValueEnum};
use hearth_profiles::measure::mapping::Advice;
use hearth_studies::cgroups::{
    CgroupCounters, CgroupLimits, Cgroups, MIB, PAGE_SIZE, WeightFile, advise, checksum, is_kept, map_cold,
    median, page_residency, require_cgroup_access,
};
use hearth_studies::{StudyError, run_study};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};
use serde::{Deserialize, Serialize};

/// Default read-ahead window of the kernel, in bytes. One `WILLNEED` call reads at most one read-ahead window.
const CHUNK: usize = 128 << 10;
const RESULT: &str = "result ";

/// How the helper thread prefetches the next window.
#[derive(Clone, Copy, PartialEq, Debug, ValueEnum, Serialize, Deserialize)]
enum Prefetch {
    /// Do not prefetch: only page faults read the file.
    None,
    /// Call `MADV_WILLNEED` for each 128 KiB of the window.
    Chunks,
    /// Call `MADV_WILLNEED` once for the whole window.
    One,
    /// Call `MADV_POPULATE_READ` once for the whole window.
    Populate,
}

#[derive(Parser)]
struct Arguments {
    /// Measure the rows of the simulator's test `linux_rows`.
    #[arg(long)]
    table: bool,
    /// Create the file in this folder.
    #[arg(long, default_value_os_t = std::env::temp_dir())]
    directory: PathBuf,
    /// Internal: run as a child process, with the experiment as JSON and the path of the file.
    #[arg(long, num_args = 2)]
    child: Vec<String>,
    #[command(flatten)]
    experiment: Experiment,
}

#[derive(Args, Clone, Debug, Serialize, Deserialize)]
struct Experiment {
    #[arg(skip = "custom")]
    name: String,
    /// Set the size of the weights of the device, in MiB.
    #[arg(long, default_value_t = 400)]
    share_mib: usize,
    /// Set the memory limit in MiB; 0 means no limit.
    #[arg(long, default_value_t = 305)]
    memory_mib: usize,
    /// Limit disk reads to this rate in MB/s; 0 means no limit.
    #[arg(long, default_value_t = 400)]
    disk_mbps: u64,
    /// Sleep this many seconds per token, the time in which the other devices would compute.
    #[arg(long, default_value_t = 1.3)]
    others_s: f64,
    /// Divide the weights into this number of windows, one for each round.
    #[arg(long, default_value_t = 1)]
    rounds: usize,
    /// Select how the next window is prefetched.
    #[arg(long, value_enum, default_value_t = Prefetch::None)]
    prefetch: Prefetch,
    /// Evict each window with `MADV_PAGEOUT` after its use, except its kept pieces.
    #[arg(long = "release-behind")]
    release: bool,
    /// Keep pieces of this total size in MiB, spread evenly, which are neither evicted nor prefetched.
    #[arg(long, default_value_t = 0)]
    kept_mib: usize,
    /// Read all windows this many times, once for each token.
    #[arg(long, default_value_t = 6)]
    tokens: usize,
    /// Repeat each experiment this many times.
    #[arg(long, default_value_t = 3)]
    repeats: usize,
    /// Read the weights once before the first token, in pieces of 1 MiB in random order. A run without this reads them in
    /// the order of use.
    #[arg(long)]
    shuffled_first: bool,
    /// Allocate this much additional anonymous memory in the reader, in MiB.
    #[arg(long, default_value_t = 0)]
    ballast_mib: usize,
    /// Sum each window with this many threads.
    #[arg(long, default_value_t = 1)]
    threads: usize,
    /// Print a line for each round.
    #[arg(long)]
    verbose: bool,
}

fn main() -> ExitCode {
    run_study(|_| run(Arguments::parse()))
}

fn run(Arguments { table, directory, child, experiment }: Arguments) -> Result<(), StudyError> {
    if let [experiment, file] = &child[..] {
        return read_windows(&serde_json::from_str(experiment)?, Path::new(file));
    }
    require_cgroup_access()?;
    let file = WeightFile::create(&directory, experiment.share_mib)?;
    println!(
        "| experiment | memory MiB | TPOT s | read / share | major faults | refaults MiB | activated MiB |\n\
         |---|---|---|---|---|---|---|"
    );
    let rows = if table { spec_rows(&experiment) } else { vec![experiment] };
    for row in rows {
        for _ in 0..row.repeats {
            measure(&row, &file)?;
        }
    }
    Ok(())
}

/// Returns the experiments of `--table`. The test `linux_rows` compares the simulator with their results.
fn spec_rows(base: &Experiment) -> Vec<Experiment> {
    let windowed = |name: &str, rounds, memory_mib, prefetch| Experiment {
        name: name.into(),
        rounds,
        memory_mib,
        prefetch,
        ..base.clone()
    };
    let cyclic = |memory| Experiment { others_s: 0.0, ..windowed("cyclic", 1, memory, base.prefetch) };
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

/// Runs one experiment in a new child process, so that its cgroups are empty at the start, and prints a table row.
fn measure(experiment: &Experiment, file: &WeightFile) -> Result<(), StudyError> {
    let (memory_bytes, disk_mb_per_s) = (experiment.memory_mib * MIB, experiment.disk_mbps);
    let limits = CgroupLimits { memory_bytes, disk_mb_per_s, cpu_quota: None };
    let arguments = ["--child".into(), serde_json::to_string(experiment)?, file.path_text.clone()];
    let text = Cgroups::run_child(limits, &file.path, &arguments)?;
    let row = text.lines().find_map(|line| line.strip_prefix(RESULT));
    for line in text.lines().filter(|line| !line.starts_with(RESULT)) {
        println!("  {line}");
    }
    let row = row.ok_or("the reader printed no result")?;
    println!("| {} | {} | {row} |", experiment.name, experiment.memory_mib);
    Ok(())
}

/// Runs as the child process: reads the windows in its cgroups, and prints medians over the tokens after the first two.
fn read_windows(experiment: &Experiment, file: &Path) -> Result<(), StudyError> {
    let groups = Cgroups::join()?;
    let file = File::open(file)?;
    let map = map_cold(&file)?;
    let ballast = vec![1u8; experiment.ballast_mib * MIB];
    let (kind, window) = (experiment.prefetch, experiment.share_mib * MIB / experiment.rounds);
    // The parts of each window that are not kept, as offsets and lengths. Without kept pieces a window is one part.
    let streamed: Vec<Vec<(usize, usize)>> =
        (0..experiment.rounds).map(|round| streamed(experiment, round * window, window)).collect();
    let helper = spawn_helper(map, kind, streamed.clone(), experiment.verbose);
    let others = Duration::from_secs_f64(experiment.others_s / experiment.rounds as f64);
    let (mut tokens, mut sum) = (Vec::new(), 0u64);
    if experiment.shuffled_first {
        let mut pieces: Vec<&[u8]> = map.chunks(MIB).collect();
        let mut random = ChaCha8Rng::seed_from_u64(1);
        for last in (1..pieces.len()).rev() {
            pieces.swap(last, random.next_u32() as usize % (last + 1));
        }
        sum = pieces.into_iter().map(checksum).fold(sum, u64::wrapping_add);
    }
    for token in 0..experiment.tokens {
        let (start, before) = (Instant::now(), CgroupCounters::read(&groups)?);
        for (round, behind) in streamed.iter().enumerate() {
            std::thread::sleep(others);
            let offset = round * window;
            let (begin, count) = (Instant::now(), CgroupCounters::read(&groups)?);
            let residency_map = if experiment.verbose { residency_map(map, window) } else { String::new() };
            sum = sum.wrapping_add(parallel_checksum(&map[offset..offset + window], experiment.threads));
            let length = begin.elapsed();
            if experiment.release {
                for &(at, length) in behind {
                    advise(&map[at..at + length], Advice::PageOut);
                }
            }
            if kind != Prefetch::None {
                helper.send((round + 1) % experiment.rounds)?;
            }
            if experiment.verbose {
                let delta = CgroupCounters::read(&groups)?.since(&count);
                println!(
                    "token {token} round {round}: {residency_map} {length:.3?}, read {} MiB, {} faults, active {} MiB",
                    delta.bytes_read / MIB as u64,
                    delta.major_faults,
                    delta.active_file_bytes / MIB as u64,
                );
            }
        }
        tokens.push((start.elapsed().as_secs_f64(), CgroupCounters::read(&groups)?.since(&before)));
    }
    let settled = &tokens[2.min(tokens.len() - 1)..];
    let median = |of: fn(&(f64, CgroupCounters)) -> f64| median(settled.iter().map(of).collect());
    let share = (experiment.share_mib * MIB) as f64;
    println!(
        "{RESULT}{:.3} | {:.2} | {} | {:.0} | {:.0}",
        median(|t| t.0),
        median(|t| t.1.bytes_read as f64) / share,
        median(|t| t.1.major_faults as f64),
        median(|t| t.1.refaulted_pages as f64) * PAGE_SIZE as f64 / MIB as f64,
        median(|t| t.1.active_file_bytes as f64) / MIB as f64,
    );
    std::hint::black_box((sum, ballast));
    Ok(())
}

/// Starts the helper thread, which prefetches the windows whose indices it receives.
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
        Prefetch::Chunks => window.chunks(CHUNK).for_each(|piece| advise(piece, Advice::WillNeed)),
        Prefetch::One => advise(window, Advice::WillNeed),
        Prefetch::Populate => advise(window, Advice::PopulateRead),
    }
}

/// Returns the parts of a window that are not kept, as offsets and lengths in bytes; adjacent parts are merged.
fn streamed(experiment: &Experiment, start: usize, length: usize) -> Vec<(usize, usize)> {
    let mut parts: Vec<(usize, usize)> = Vec::new();
    let mut at = start;
    while at < start + length {
        let end = (at / MIB * MIB + MIB).min(start + length);
        if !is_kept(at / MIB, experiment.kept_mib, experiment.share_mib) {
            match parts.last_mut() {
                Some((from, length)) if *from + *length == at => *length += end - at,
                _ => parts.push((at, end - at)),
            }
        }
        at = end;
    }
    parts
}

/// Draws a character for each 8 MiB of `map`: the tenths that are in memory (`.` for 0, `#` for 10). `|` ends a window.
fn residency_map(map: &[u8], window: usize) -> String {
    let pages = page_residency(map);
    let cell = |pages: &[bool]| match pages.iter().filter(|&&resident| resident).count() * 10 / pages.len() {
        0 => '.',
        10 => '#',
        tenths => char::from(b'0' + tenths as u8),
    };
    let windows = pages.chunks(window / PAGE_SIZE);
    windows.map(|window| window.chunks(2048).map(cell).collect::<String>() + "|").collect()
}

/// Sums a window with several threads. Each thread sums one contiguous part, like the rows of a matrix.
fn parallel_checksum(window: &[u8], threads: usize) -> u64 {
    if threads <= 1 {
        return checksum(window);
    }
    let part = (window.len() / threads).next_multiple_of(PAGE_SIZE);
    std::thread::scope(|scope| {
        let workers: Vec<_> = window.chunks(part).map(|part| scope.spawn(|| checksum(part))).collect();
        let sums = workers.into_iter().map(|worker| worker.join().expect("a checksum cannot fail"));
        sums.fold(0, u64::wrapping_add)
    })
}
