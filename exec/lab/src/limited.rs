//! Runs any command inside a device's limits and measures what it uses.
//!
//! The command runs in a group of its own while this process looks at the group's counters. A second process
//! of the same group can take memory for a while (a [`MemoryHog`]), to see what the command does under pressure.
//!
//! Not here: what is printed, and what is compared with what.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use hearth_profiles::Bytes;
use serde::Serialize;

use super::copies::{drop_cache, resident_bytes};
use super::process::command_in_group;
use super::{DeviceLimits, Group, Groups, LabError};
use hearth_runtime::clock::wall_nanos;

/// The interval between two readings of the counters.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Another program of the same device that takes memory, holds it, and frees it, at the latest when its standard input
/// ends.
#[derive(Debug, Clone, PartialEq)]
pub struct MemoryHog {
    /// A program that calls [`MemoryHog::run_if_asked`] with its arguments first of all.
    pub program: PathBuf,
    /// Bytes to take.
    pub memory: Bytes,
    /// Delay after the start of the command.
    pub after: Duration,
    /// Time that the memory is held.
    pub hold: Duration,
}

/// The first argument of a hog.
pub const HOG: &str = "--be-a-hog";

impl MemoryHog {
    /// Returns the arguments that its program is started with.
    pub fn arguments(&self) -> [String; 4] {
        let millis = |time: Duration| time.as_millis().to_string();
        [HOG.into(), self.memory.0.to_string(), millis(self.after), millis(self.hold)]
    }

    /// Takes the memory if the arguments are those of a memory hog. Returns whether they were.
    pub fn run_if_asked(arguments: &[String]) -> bool {
        let [first, numbers @ ..] = arguments else { return false };
        let numbers: Vec<u64> = numbers.iter().map_while(|number| number.parse().ok()).collect();
        let (HOG, &[bytes, after, hold]) = (first.as_str(), numbers.as_slice()) else { return false };
        // The parent holds the other end of standard input; it is gone when the input ends.
        let (ended, is_over) = mpsc::channel::<()>();
        std::thread::spawn(move || {
            let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
            drop(ended);
        });
        let wait =
            |time: u64| is_over.recv_timeout(Duration::from_millis(time)) == Err(RecvTimeoutError::Timeout);
        if wait(after) {
            // Written, not only reserved, so that every page is charged.
            let held = vec![1u8; usize::try_from(bytes).unwrap_or(0)];
            wait(hold);
            std::hint::black_box(&held);
        }
        true
    }
}

/// Another program of the same device that computes until its standard input ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CpuHog {
    /// Number of threads.
    pub threads: u32,
}

/// The first argument of a busy program.
pub const BUSY: &str = "--be-busy";

impl CpuHog {
    /// The arguments of its program, which must first call [`CpuHog::run_if_asked`] with them.
    pub fn arguments(self) -> [String; 2] {
        [BUSY.into(), self.threads.to_string()]
    }

    /// Computes if the arguments are those of a CPU hog. Returns whether they were.
    pub fn run_if_asked(arguments: &[String]) -> bool {
        let [first, threads] = arguments else { return false };
        let (BUSY, Ok(threads)) = (first.as_str(), threads.parse::<u32>()) else { return false };
        let ended = std::sync::Arc::new(AtomicBool::new(false));
        let spinners: Vec<_> = (0..threads)
            .map(|_| {
                let ended = ended.clone();
                std::thread::spawn(move || {
                    while !ended.load(Ordering::Relaxed) {
                        std::hint::spin_loop();
                    }
                })
            })
            .collect();
        let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
        ended.store(true, Ordering::Relaxed);
        for spinner in spinners {
            let _ = spinner.join();
        }
        true
    }
}

/// The limits and surroundings of a command.
#[derive(Debug, Clone)]
pub struct LimitedCommand {
    /// The limits of the command.
    pub limits: DeviceLimits,
    /// Files that it must read from disk; the first tells which disk is limited, else the current folder.
    pub files: Vec<PathBuf>,
    /// Another program in the same group.
    pub hog: Option<MemoryHog>,
    /// Time after which the command is killed.
    pub deadline: Duration,
}

/// The resources that a command used.
#[derive(Debug, Clone, Serialize)]
pub struct CommandUsage {
    /// Seconds from its start to its end.
    pub seconds: f64,
    /// Bytes of its files that were in memory when it started, although they had been dropped.
    pub resident_before: u64,
    /// Bytes read from the disk, by the throttle's counter; absent without a throttle, which then counts none.
    pub bytes_read: Option<u64>,
    /// The observed maximum of its memory that the kernel could not reclaim.
    pub peak_unreclaimable: u64,
    /// Bytes of files that had to be read again.
    pub refaults: u64,
    /// Processes killed because memory ran out.
    pub oom_kills: u64,
    /// Its standard output, if requested.
    #[serde(skip)]
    pub output: String,
    /// How it ended; `None` when the deadline ended it.
    #[serde(skip)]
    pub status: Option<ExitStatus>,
}

impl LimitedCommand {
    /// Runs a program to its end. Captures its output if `keep` is set; prints it otherwise.
    pub fn run(&self, program: &Path, arguments: &[String], keep: bool) -> Result<CommandUsage, LabError> {
        let groups = Groups::find(Path::new("/sys/fs/cgroup"))?;
        groups.remove_stale();
        let disk = self.files.first().map_or(Path::new("."), PathBuf::as_path);
        for file in &self.files {
            drop_cache(file)?;
        }
        let resident_before = self.files.iter().map(|file| resident_bytes(file)).sum();
        let group = groups.create(0, disk, self.limits)?;
        let mut command = command_in_group(Some(&group), program, arguments);
        command.stdin(Stdio::null()).stdout(if keep { Stdio::piped() } else { Stdio::inherit() });
        let start = wall_nanos();
        let mut process = started(&mut command, program)?;
        let output = process.stdout.take().map(|mut out| {
            std::thread::spawn(move || {
                let mut text = String::new();
                let _ = out.read_to_string(&mut text);
                text
            })
        });
        let mut hog = self.hog.as_ref().map(|hog| {
            let mut command = command_in_group(Some(&group), &hog.program, &hog.arguments());
            started(command.stdin(Stdio::piped()), &hog.program)
        });
        let (status, peak) = watch(&mut process, &group, start + self.deadline.as_nanos() as u64);
        let seconds = (wall_nanos() - start) as f64 * 1e-9;
        if let Some(Ok(hog)) = &mut hog {
            let _ = hog.kill();
            let _ = hog.wait();
        }
        let (memory, bytes_read) = (group.memory(), group.bytes_read());
        let usage = CommandUsage {
            seconds,
            resident_before,
            bytes_read: bytes_read.filter(|_| self.limits.disk_read.is_some()),
            peak_unreclaimable: peak,
            refaults: memory.refaults().unwrap_or(0),
            oom_kills: memory.oom_kills().unwrap_or(0),
            output: output.and_then(|thread| thread.join().ok()).unwrap_or_default(),
            status,
        };
        hog.transpose()?;
        Ok(usage)
    }
}

/// Polls the group until the process exits or the deadline passes.
fn watch(process: &mut std::process::Child, group: &Group, end: u64) -> (Option<ExitStatus>, u64) {
    let mut peak = 0;
    loop {
        peak = peak.max(group.memory().unreclaimable().unwrap_or(0));
        match process.try_wait() {
            Ok(None) if wall_nanos() < end => std::thread::sleep(POLL_INTERVAL),
            Ok(Some(status)) => return (Some(status), peak),
            _ => {
                let _ = process.kill();
                let _ = process.wait();
                return (None, peak);
            }
        }
    }
}

fn started(command: &mut Command, program: &Path) -> Result<std::process::Child, LabError> {
    command.spawn().map_err(|error| LabError::Process {
        name: program.display().to_string(),
        what: "does not start",
        why: error.to_string(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_hogs_arguments_make_a_hog() {
        let words = |text: &str| text.split(' ').map(String::from).collect::<Vec<_>>();
        assert!(!MemoryHog::run_if_asked(&words("--memory-mib 5 0 0")));
        assert!(!MemoryHog::run_if_asked(&words("--be-a-hog 5 soon 0")));
        assert!(!MemoryHog::run_if_asked(&[]));
        assert!(MemoryHog::run_if_asked(&words("--be-a-hog 5000 0 0")));
    }

    #[test]
    fn only_a_busy_programs_arguments_make_one() {
        let words = |text: &str| text.split(' ').map(String::from).collect::<Vec<_>>();
        for other in ["--be-busy", "--be-busy many", "--be-busy 1 2", "--be-a-hog 1"] {
            assert!(!CpuHog::run_if_asked(&words(other)), "{other}");
        }
        assert_eq!(CpuHog { threads: 3 }.arguments(), ["--be-busy", "3"]);
    }

    #[test]
    fn a_command_is_measured_inside_its_limits() {
        let folder = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let file = folder.path().join("file");
        std::fs::write(&file, vec![7u8; 3 << 20]).unwrap();
        let limits = DeviceLimits {
            memory: Some(Bytes::mib(64)),
            disk_read: Some(hearth_profiles::BytesPerSecond(100e6)),
            ..DeviceLimits::default()
        };
        let limited = LimitedCommand {
            limits,
            files: vec![file.clone()],
            hog: None,
            deadline: Duration::from_secs(30),
        };
        let run = limited.run(Path::new("/bin/cat"), &[file.display().to_string()], true);
        let usage = match run {
            Ok(usage) => usage,
            Err(error) => {
                eprintln!("SKIPPED a_command_is_measured_inside_its_limits: {error}");
                return;
            }
        };
        assert!(usage.status.is_some_and(|status| status.success()), "{usage:?}");
        assert_eq!(usage.output.len(), 3 << 20);
        if usage.resident_before > 0 || usage.bytes_read == Some(0) {
            eprintln!("SKIPPED a_command_is_measured_inside_its_limits: no disk is under this folder");
            return;
        }
        let read = usage.bytes_read.unwrap();
        // The program itself may be read as well.
        assert!((3 << 20..16 << 20).contains(&read), "{read} bytes");
    }
}
