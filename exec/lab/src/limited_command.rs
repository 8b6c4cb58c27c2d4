//! Runs a command within the limits of a device and measures the resources that it uses.
//!
//! The command runs in a new control group, whose counters this process samples. A second process in the same group
//! can allocate memory for some time (a [`MemoryHog`]), to measure the command under memory pressure.

use std::path::{Path, PathBuf};
use std::process::{Child, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use hearth_profiles::Bytes;
use serde::Serialize;

use super::copies::{drop_page_cache, resident_bytes};
use super::process::{command_in_group, kill, read_all, spawn};
use super::{Cgroup, CgroupHierarchy, DeviceLimits, LabError};
use hearth_runtime::clock::monotonic_nanos;

const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// A program that runs beside the command and allocates memory for `duration`, or until its standard input is closed.
#[derive(Debug, Clone, PartialEq)]
pub struct MemoryHog {
    /// The path of the program, whose `main` must first pass its arguments to [`MemoryHog::run_if_requested`].
    pub program: PathBuf,
    pub memory: Bytes,
    /// Time from the start of the program to the allocation.
    pub delay: Duration,
    /// Time from the allocation to the release of the memory.
    pub duration: Duration,
}

/// The first argument that makes a program run as a [`MemoryHog`].
const MEMORY_HOG_FLAG: &str = "--be-a-hog";

impl MemoryHog {
    /// Returns the arguments of the program, which must first pass them to [`MemoryHog::run_if_requested`].
    pub fn arguments(&self) -> [String; 4] {
        let millis = |time: Duration| time.as_millis().to_string();
        [MEMORY_HOG_FLAG.into(), self.memory.0.to_string(), millis(self.delay), millis(self.duration)]
    }

    /// Allocates and frees the memory if `arguments` are those of a memory hog. Returns false for other arguments.
    pub fn run_if_requested(arguments: &[String]) -> bool {
        let [first, numbers @ ..] = arguments else { return false };
        let numbers: Vec<u64> = numbers.iter().map_while(|number| number.parse().ok()).collect();
        let (MEMORY_HOG_FLAG, [bytes, delay, duration]) = (&first[..], &numbers[..]) else { return false };
        // The parent has the other end of standard input, which is closed when the parent exits.
        let (closed_tx, closed_rx) = mpsc::channel::<()>();
        std::thread::spawn(move || {
            let _closed_tx = closed_tx;
            std::io::copy(&mut std::io::stdin(), &mut std::io::sink())
        });
        let timeout = Err(RecvTimeoutError::Timeout);
        let wait = |ms: u64| closed_rx.recv_timeout(Duration::from_millis(ms)) == timeout;
        if wait(*delay) {
            // Written, not only reserved, so that every page is charged.
            let memory = vec![1u8; usize::try_from(*bytes).unwrap_or(0)];
            wait(*duration);
            std::hint::black_box(&memory);
        }
        true
    }
}

/// A program whose threads keep CPU cores busy until its standard input is closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CpuHog {
    pub threads: u32,
}

/// The first argument that makes a program run as a [`CpuHog`].
const CPU_HOG_FLAG: &str = "--be-busy";

impl CpuHog {
    /// Returns the arguments of the program, which must first pass them to [`CpuHog::run_if_requested`].
    pub fn arguments(self) -> [String; 2] {
        [CPU_HOG_FLAG.into(), self.threads.to_string()]
    }

    /// Keeps the threads busy if `arguments` are those of a CPU hog. Returns false for other arguments.
    pub fn run_if_requested(arguments: &[String]) -> bool {
        let [first, threads] = arguments else { return false };
        let (CPU_HOG_FLAG, Ok(threads)) = (first.as_str(), threads.parse::<u32>()) else { return false };
        let stop = AtomicBool::new(false);
        let spin = || {
            while !stop.load(Ordering::Relaxed) {
                std::hint::spin_loop();
            }
        };
        std::thread::scope(|scope| {
            let mut started = (0..threads).map(|_| std::thread::Builder::new().spawn_scoped(scope, spin));
            let all_started = started.all(|thread| thread.is_ok());
            if all_started {
                let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
            }
            stop.store(true, Ordering::Relaxed);
            assert!(all_started, "cannot start {threads} threads");
        });
        true
    }
}

/// The limits and conditions under which a command runs.
#[derive(Debug, Clone)]
pub struct CommandRunner {
    pub limits: DeviceLimits,
    /// Files that are dropped from the page cache before the command starts. The limited disk is the disk of the first
    /// file or, without files, of the current folder.
    pub cold_files: Vec<PathBuf>,
    pub memory_hog: Option<MemoryHog>,
    /// Maximum duration of the command, after which it is killed.
    pub timeout: Duration,
}

#[derive(Debug, Clone, Serialize)]
pub struct CommandUsage {
    #[serde(rename = "seconds")]
    pub duration_seconds: f64,
    /// Bytes of the cold files in the page cache when the command started, although they had just been dropped.
    #[serde(rename = "resident_before")]
    pub resident_bytes_before: u64,
    /// Bytes that the command read from the disk, as counted by the disk throttle; `None` without a disk limit.
    pub bytes_read: Option<u64>,
    /// Maximum of the sampled unreclaimable memory of the control group, in bytes.
    #[serde(rename = "peak_unreclaimable")]
    pub peak_unreclaimable_bytes: u64,
    /// Bytes of file pages that were reclaimed from the page cache and read again.
    #[serde(rename = "refaults")]
    pub refaulted_bytes: u64,
    /// Number of processes that the kernel killed because the memory limit was exceeded.
    pub oom_kills: u64,
    /// The standard output of the command; empty if it was not captured.
    #[serde(skip)]
    pub stdout: String,
    /// The exit status of the command; `None` if the command was killed after its timeout.
    #[serde(skip)]
    pub status: Option<ExitStatus>,
}

impl CommandRunner {
    /// Runs a program until it exits. Captures its standard output if `capture` is true; otherwise passes it on.
    pub fn run(&self, program: &Path, arguments: &[String], capture: bool) -> Result<CommandUsage, LabError> {
        let groups = CgroupHierarchy::find(Path::new("/sys/fs/cgroup"))?;
        groups.remove_stale_groups();
        let disk = self.cold_files.first().map_or(Path::new("."), PathBuf::as_path);
        for file in &self.cold_files {
            drop_page_cache(file)?;
        }
        let resident_before = self.cold_files.iter().map(|file| resident_bytes(file)).sum();
        let group = groups.create_group(0, disk, self.limits)?;
        let mut command = command_in_group(Some(&group), program, arguments);
        command.stdin(Stdio::null()).stdout(if capture { Stdio::piped() } else { Stdio::inherit() });
        let start = monotonic_nanos();
        let mut process = spawn(&mut command, &program.display().to_string())?;
        let output = process.stdout.take().map(read_all);
        let mut hog = self.memory_hog.as_ref().map(|hog| {
            let mut command = command_in_group(Some(&group), &hog.program, &hog.arguments());
            spawn(command.stdin(Stdio::piped()), &hog.program.display().to_string())
        });
        let (status, peak) = watch(&mut process, &group, start + self.timeout.as_nanos() as u64);
        let seconds = (monotonic_nanos() - start) as f64 * 1e-9;
        if let Some(Ok(hog)) = &mut hog {
            kill(hog);
        }
        let memory = group.memory();
        let usage = CommandUsage {
            duration_seconds: seconds,
            resident_bytes_before: resident_before,
            bytes_read: self.limits.disk_read.and_then(|_| group.throttle_counter().bytes_read()),
            peak_unreclaimable_bytes: peak,
            refaulted_bytes: memory.refaulted_bytes().unwrap_or(0),
            oom_kills: memory.oom_kills().unwrap_or(0),
            stdout: output.and_then(|thread| thread.join().ok()).unwrap_or_default(),
            status,
        };
        hog.transpose()?;
        Ok(usage)
    }
}

/// Samples the memory of a group until the process exits or is killed at `deadline`, in nanoseconds on this process's
/// clock. Returns the exit status (`None` if killed) and the maximum of the unreclaimable bytes.
fn watch(process: &mut Child, group: &Cgroup, deadline: u64) -> (Option<ExitStatus>, u64) {
    let mut peak = 0;
    loop {
        peak = peak.max(group.memory().unreclaimable_bytes().unwrap_or(0));
        match process.try_wait() {
            Ok(None) if monotonic_nanos() < deadline => std::thread::sleep(POLL_INTERVAL),
            Ok(Some(status)) => return (Some(status), peak),
            _ => {
                kill(process);
                return (None, peak);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hogs_run_only_with_their_arguments() {
        for (arguments, is_memory_hog) in [
            ("", false),
            ("--memory-mib 5 0 0", false),
            ("--be-a-hog 5 soon 0", false),
            ("--be-a-hog 5000 0 0", true),
            ("--be-a-hog 1", false),
            ("--be-busy", false),
            ("--be-busy many", false),
            ("--be-busy 1 2", false),
        ] {
            let words: Vec<String> = arguments.split_whitespace().map(String::from).collect();
            assert_eq!(MemoryHog::run_if_requested(&words), is_memory_hog, "{arguments}");
            assert!(!CpuHog::run_if_requested(&words), "{arguments}");
        }
        assert_eq!(CpuHog { threads: 3 }.arguments(), ["--be-busy", "3"]);
    }

    #[test]
    fn command_is_measured_within_its_limits() {
        let folder = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let file = folder.path().join("file");
        std::fs::write(&file, vec![7u8; 3 << 20]).unwrap();
        let disk_read = Some(hearth_profiles::BytesPerSecond(100e6));
        let limits = DeviceLimits { memory: Some(Bytes::from_mib(64)), disk_read, cpus: None };
        let (files, deadline) = (vec![file.clone()], Duration::from_secs(30));
        let limited = CommandRunner { limits, cold_files: files, memory_hog: None, timeout: deadline };
        let skip = |why: String| eprintln!("SKIPPED command_is_measured_within_its_limits: {why}");
        let usage = match limited.run(Path::new("/bin/cat"), &[file.display().to_string()], true) {
            Ok(usage) => usage,
            Err(error) => return skip(error.to_string()),
        };
        assert!(usage.status.is_some_and(|status| status.success()), "{usage:?}");
        assert_eq!(usage.stdout.len(), 3 << 20);
        if usage.resident_bytes_before > 0 || usage.bytes_read == Some(0) {
            return skip("this folder is not on a disk".into());
        }
        let read = usage.bytes_read.unwrap();
        // The bytes may include those of the program itself.
        assert!((3 << 20..16 << 20).contains(&read), "{read} bytes");
    }
}
