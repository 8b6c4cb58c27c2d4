//! What does the page cache of *this* kernel read for a device that owns a window of layers?
//!
//! The physical twin of the simulator's `tests/linux_rows.rs`. A file stands for a device's share of the
//! weights. For every token and every round the reader sleeps while "the others compute", then sums every
//! word of its window (about 45 ms for 400 MiB); right after that a helper thread prefetches the next window.
//! A memory cgroup (v1) limits the page cache and a blkio throttle limits the disk. Printed per token: the
//! time, the bytes that the disk delivered, major faults, refaults.
//!
//!     cargo run --release -p hearth-sim --example windowed_reader -- --table
//!     cargo run --release -p hearth-sim --example windowed_reader -- --memory-mib 305 --rounds 2 --prefetch chunks
//!
//! Not here: any model of why. That is `hearth_sim::page_cache`.
#![allow(clippy::disallowed_methods, reason = "a physical experiment measures time")]

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::str::FromStr;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use memmap2::Mmap;

const MIB: usize = 1 << 20;
const PAGE: usize = 4096;
/// The biggest read-ahead of the usual kernel settings: `WILLNEED` in these pieces is always honoured.
const CHUNK: usize = 128 << 10;
const RESULT: &str = "result ";

type Failure = Box<dyn std::error::Error>;

#[derive(Clone, Copy, PartialEq, Debug)]
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

#[derive(Clone, Debug)]
struct Experiment {
    name: String,
    share_mib: usize,
    /// Zero: no limit.
    memory_mib: usize,
    /// Zero: no throttle.
    disk_mbps: u64,
    others_s: f64,
    rounds: usize,
    prefetch: Prefetch,
    /// `MADV_PAGEOUT` of the window just used.
    release: bool,
    tokens: usize,
    repeats: usize,
    /// Anonymous memory that the reading process holds beside its pages of the file.
    ballast_mib: usize,
    /// Threads that sum one window together.
    threads: usize,
    /// Print one line a round.
    verbose: bool,
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match run(&arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("windowed_reader: {failure}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &[String]) -> Result<(), Failure> {
    let mut experiment = Experiment {
        name: "custom".into(),
        share_mib: 400,
        memory_mib: 305,
        disk_mbps: 400,
        others_s: 1.3,
        rounds: 1,
        prefetch: Prefetch::None,
        release: false,
        tokens: 6,
        repeats: 3,
        ballast_mib: 0,
        threads: 1,
        verbose: false,
    };
    let mut directory = std::env::temp_dir();
    let (mut table, mut child) = (false, None);
    let mut words = arguments.iter();
    while let Some(word) = words.next() {
        let mut value = || words.next().ok_or_else(|| format!("{word} needs a value"));
        match word.as_str() {
            "--table" => table = true,
            "--release-behind" => experiment.release = true,
            "--verbose" => experiment.verbose = true,
            "--child" => child = Some(PathBuf::from(value()?)),
            "--directory" => directory = PathBuf::from(value()?),
            "--share-mib" => experiment.share_mib = number(value()?)?,
            "--memory-mib" => experiment.memory_mib = number(value()?)?,
            "--disk-mbps" => experiment.disk_mbps = number(value()?)?,
            "--others-s" => experiment.others_s = number(value()?)?,
            "--rounds" => experiment.rounds = number(value()?)?,
            "--tokens" => experiment.tokens = number(value()?)?,
            "--ballast-mib" => experiment.ballast_mib = number(value()?)?,
            "--threads" => experiment.threads = number(value()?)?,
            "--repeats" => experiment.repeats = number(value()?)?,
            "--prefetch" => experiment.prefetch = value()?.parse()?,
            other => return Err(format!("unknown option {other}; see the head of this example").into()),
        }
    }
    if let Some(file) = child {
        return read_windows(&experiment, &file);
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

fn number<T: FromStr>(text: &str) -> Result<T, Failure> {
    text.parse().map_err(|_| format!("`{text}` is not a number that fits here").into())
}

impl FromStr for Prefetch {
    type Err = Failure;
    fn from_str(text: &str) -> Result<Self, Failure> {
        match text {
            "none" => Ok(Self::None),
            "chunks" => Ok(Self::Chunks),
            "one" => Ok(Self::One),
            "populate" => Ok(Self::Populate),
            other => Err(format!("prefetch is none, chunks, one or populate, not {other}").into()),
        }
    }
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
    let mut rows: Vec<_> = [385, 365, 305, 205].map(cyclic).into();
    rows.extend([
        windowed("no limit", 1, 0, Prefetch::None),
        windowed("k=1 none", 1, 305, Prefetch::None),
        windowed("k=1 chunks", 1, 305, Prefetch::Chunks),
        windowed("k=2 chunks", 2, 305, Prefetch::Chunks),
        windowed("k=2 chunks", 2, 205, Prefetch::Chunks),
        Experiment { release: true, ..windowed("k=2 chunks, release", 2, 305, Prefetch::Chunks) },
        windowed("k=4 chunks", 4, 305, Prefetch::Chunks),
        windowed("k=4 one call", 4, 305, Prefetch::One),
        windowed("k=4 populate", 4, 305, Prefetch::Populate),
    ]);
    rows
}

fn require_root() -> Result<(), Failure> {
    // SAFETY: geteuid has no preconditions.
    let user = unsafe { libc::geteuid() };
    let has = |path: &str| Path::new(path).exists();
    if user != 0 {
        return Err("needs root, to create the two cgroups".into());
    }
    if !has("/sys/fs/cgroup/memory/memory.stat") || !has("/sys/fs/cgroup/blkio/cgroup.procs") {
        return Err("needs cgroup v1 controllers memory and blkio at /sys/fs/cgroup".into());
    }
    if !has("/sys/fs/cgroup/blkio/blkio.throttle.read_bps_device") {
        return Err("needs a kernel with blkio throttling (CONFIG_BLK_DEV_THROTTLING)".into());
    }
    Ok(())
}

/// The file that stands for the share; removed at the end.
struct ShareFile {
    path: PathBuf,
}

impl ShareFile {
    fn create(directory: &Path, share_mib: usize) -> Result<Self, Failure> {
        let file = Self { path: directory.join(format!("hearth-share-{}.bin", std::process::id())) };
        let mut out = OpenOptions::new().write(true).create_new(true).open(&file.path)?;
        let mut block = vec![0u8; MIB];
        for piece in 0..share_mib {
            block.iter_mut().enumerate().for_each(|(at, byte)| *byte = (at ^ piece) as u8);
            out.write_all(&block)?;
        }
        out.sync_all()?;
        Ok(file)
    }
}

impl Drop for ShareFile {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

/// Two cgroups of one experiment; removed when dropped, whatever happened.
struct Cgroups {
    memory: PathBuf,
    blkio: PathBuf,
}

impl Cgroups {
    fn create(experiment: &Experiment, file: &Path) -> Result<Self, Failure> {
        let name = format!("hearth-windowed-{}", std::process::id());
        let groups = Self {
            memory: Path::new("/sys/fs/cgroup/memory").join(&name),
            blkio: Path::new("/sys/fs/cgroup/blkio").join(&name),
        };
        fs::create_dir(&groups.memory)?;
        fs::create_dir(&groups.blkio)?;
        if experiment.memory_mib > 0 {
            let limit = experiment.memory_mib * MIB;
            fs::write(groups.memory.join("memory.limit_in_bytes"), limit.to_string())?;
        }
        if experiment.disk_mbps > 0 {
            let rule = format!("{} {}", whole_disk(file)?, experiment.disk_mbps * 1_000_000);
            fs::write(groups.blkio.join("blkio.throttle.read_bps_device"), rule)?;
        }
        Ok(groups)
    }
}

impl Drop for Cgroups {
    fn drop(&mut self) {
        for group in [&self.memory, &self.blkio] {
            // The child has been waited for, but its last charge may be a moment behind.
            for _ in 0..50 {
                if fs::remove_dir(group).is_ok() {
                    break;
                }
                std::thread::sleep(Duration::from_millis(20));
            }
        }
    }
}

/// `major:minor` of the disk that holds a file: throttles know disks, not partitions.
fn whole_disk(file: &Path) -> Result<String, Failure> {
    let device = fs::metadata(file)?.dev();
    let (major, minor) = (libc::major(device), libc::minor(device));
    let node = format!("/sys/dev/block/{major}:{minor}");
    let partition = Path::new(&node).join("partition").exists();
    let source = if partition { format!("{node}/../dev") } else { format!("{node}/dev") };
    Ok(fs::read_to_string(&source).map_err(|e| format!("{source}: {e}"))?.trim().to_string())
}

/// Runs one experiment in a child of its own, so that the groups start empty, and prints its row.
fn measure(experiment: &Experiment, file: &Path) -> Result<(), Failure> {
    let groups = Cgroups::create(experiment, file)?;
    // Ctrl-C must end the child and leave us alive to remove the groups.
    // SAFETY: ignoring a signal installs no handler and touches no memory of ours.
    unsafe { libc::signal(libc::SIGINT, libc::SIG_IGN) };
    let mut command = Command::new(std::env::current_exe()?);
    command
        .args(["--child", file.to_str().ok_or("the directory's name is not UTF-8")?])
        .args(["--share-mib", &experiment.share_mib.to_string()])
        .args(["--memory-mib", &experiment.memory_mib.to_string()])
        .args(["--others-s", &experiment.others_s.to_string()])
        .args(["--rounds", &experiment.rounds.to_string()])
        .args(["--ballast-mib", &experiment.ballast_mib.to_string()])
        .args(["--threads", &experiment.threads.to_string()])
        .args(["--tokens", &experiment.tokens.to_string()])
        .args(["--prefetch", &format!("{:?}", experiment.prefetch).to_lowercase()])
        .env("HEARTH_MEMORY_GROUP", &groups.memory)
        .env("HEARTH_BLKIO_GROUP", &groups.blkio)
        .stderr(Stdio::inherit());
    if experiment.release {
        command.arg("--release-behind");
    }
    if experiment.verbose {
        command.arg("--verbose");
    }
    let output = command.output()?;
    let text = String::from_utf8_lossy(&output.stdout);
    let row = text.lines().find_map(|line| line.strip_prefix(RESULT));
    for line in text.lines().filter(|line| !line.starts_with(RESULT)) {
        println!("  {line}");
    }
    let row = row.ok_or_else(|| format!("the reader ended early: {}", output.status))?;
    println!("| {} | {} | {row} |", experiment.name, experiment.memory_mib);
    Ok(())
}

/// The child: joins the groups, reads the windows, prints medians over the tokens after the first two.
fn read_windows(experiment: &Experiment, file: &Path) -> Result<(), Failure> {
    // SAFETY: restores the default action; see `measure`.
    unsafe { libc::signal(libc::SIGINT, libc::SIG_DFL) };
    let groups = Cgroups {
        memory: std::env::var_os("HEARTH_MEMORY_GROUP").ok_or("run me without --child")?.into(),
        blkio: std::env::var_os("HEARTH_BLKIO_GROUP").ok_or("run me without --child")?.into(),
    };
    // The parent removes the groups; this process still sits in them.
    let groups = std::mem::ManuallyDrop::new(groups);
    let file = File::open(file)?;
    // Pages left in the cache are charged to whoever read them first: start from none.
    // SAFETY: a valid descriptor, and the advice has no effect on memory.
    unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) };
    for group in [&groups.memory, &groups.blkio] {
        fs::write(group.join("cgroup.procs"), std::process::id().to_string())?;
    }
    // SAFETY: the file is ours and nobody writes to it while it is mapped.
    let map = unsafe { Mmap::map(&file)? };
    let map: &'static Mmap = Box::leak(Box::new(map));
    let ballast = vec![1u8; experiment.ballast_mib * MIB];
    let (send, receive) = mpsc::channel::<(usize, usize)>();
    let (kind, verbose) = (experiment.prefetch, experiment.verbose);
    std::thread::spawn(move || {
        for (offset, length) in receive {
            let begin = Instant::now();
            prefetch(kind, &map[offset..offset + length]);
            if verbose {
                println!(
                    "        prefetch of window at {} MiB returned after {:.3?}",
                    offset / MIB,
                    begin.elapsed()
                );
            }
        }
    });
    let window = experiment.share_mib * MIB / experiment.rounds;
    let others = Duration::from_secs_f64(experiment.others_s / experiment.rounds as f64);
    let (mut tokens, mut sum) = (Vec::new(), 0u64);
    for token in 0..experiment.tokens {
        let (start, before) = (Instant::now(), Counters::read(&groups)?);
        for round in 0..experiment.rounds {
            std::thread::sleep(others);
            let offset = round * window;
            let (begin, count) = (Instant::now(), Counters::read(&groups)?);
            let picture = if experiment.verbose { residency(map, window) } else { String::new() };
            sum = sum.wrapping_add(checksum_together(&map[offset..offset + window], experiment.threads));
            let length = begin.elapsed();
            if experiment.release {
                advise(&map[offset..offset + window], libc::MADV_PAGEOUT);
            }
            if kind != Prefetch::None {
                send.send(((round + 1) % experiment.rounds * window, window))?;
            }
            if experiment.verbose {
                let delta = Counters::read(&groups)?.minus(&count);
                println!(
                    "token {token} round {round}: {picture} {length:.3?}, read {} MiB, {} faults, active {} MiB",
                    delta.bytes / MIB as u64,
                    delta.major_faults,
                    delta.active / MIB as u64,
                );
            }
        }
        tokens.push((start.elapsed().as_secs_f64(), Counters::read(&groups)?.minus(&before)));
    }
    let settled = &tokens[2.min(tokens.len() - 1)..];
    let median = |of: fn(&(f64, Counters)) -> f64| {
        let mut values: Vec<f64> = settled.iter().map(of).collect();
        values.sort_by(f64::total_cmp);
        values[values.len() / 2]
    };
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

fn prefetch(kind: Prefetch, window: &[u8]) {
    match kind {
        Prefetch::None => {}
        Prefetch::Chunks => window.chunks(CHUNK).for_each(|piece| advise(piece, libc::MADV_WILLNEED)),
        Prefetch::One => advise(window, libc::MADV_WILLNEED),
        Prefetch::Populate => advise(window, libc::MADV_POPULATE_READ),
    }
}

fn advise(piece: &[u8], advice: i32) {
    // SAFETY: the range is part of a live mapping and page aligned (windows are whole MiB); none of the
    // advices used changes what the mapping holds.
    unsafe { libc::madvise(piece.as_ptr().cast_mut().cast(), piece.len(), advice) };
}

/// Tenths of each 8 MiB in the page cache, windows parted by `|`.
fn residency(map: &[u8], window: usize) -> String {
    let mut pages = vec![0u8; map.len().div_ceil(PAGE)];
    // SAFETY: the range is mapped and page aligned, and `pages` has a byte for each of its pages.
    unsafe { libc::mincore(map.as_ptr().cast_mut().cast(), map.len(), pages.as_mut_ptr()) };
    let cell = |pages: &[u8]| match pages.iter().filter(|&&page| page & 1 == 1).count() * 10 / pages.len() {
        0 => '.',
        10 => '#',
        tenths => char::from(b'0' + tenths as u8),
    };
    let windows = pages.chunks(window / PAGE);
    windows.map(|window| window.chunks(2048).map(cell).collect::<String>() + "|").collect()
}

/// Each thread takes one contiguous part, as rows of a matrix are split.
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

fn checksum(window: &[u8]) -> u64 {
    window.chunks_exact(8).fold(0, |sum, word| {
        sum.wrapping_add(u64::from_le_bytes(word.try_into().expect("chunks of eight bytes")))
    })
}

#[derive(Clone, Copy, Default)]
struct Counters {
    bytes: u64,
    major_faults: u64,
    /// Pages.
    refaults: u64,
    /// Bytes on the active list, not a difference.
    active: u64,
}

impl Counters {
    fn read(groups: &Cgroups) -> Result<Self, Failure> {
        let stat = fs::read_to_string(groups.memory.join("memory.stat"))?;
        let of = |key: &str| {
            let line = stat.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(' '));
            line.and_then(|value| value.parse::<u64>().ok()).unwrap_or(0)
        };
        let served = fs::read_to_string(groups.blkio.join("blkio.throttle.io_service_bytes"))?;
        let read = served.lines().filter(|line| line.contains(" Read "));
        Ok(Self {
            bytes: read.filter_map(|line| line.rsplit(' ').next()?.parse::<u64>().ok()).sum(),
            major_faults: of("pgmajfault"),
            refaults: of("workingset_refault_file"),
            active: of("active_file"),
        })
    }

    fn minus(&self, before: &Self) -> Self {
        Self {
            bytes: self.bytes - before.bytes,
            major_faults: self.major_faults - before.major_faults,
            refaults: self.refaults - before.refaults,
            active: self.active,
        }
    }
}
