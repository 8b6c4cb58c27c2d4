//! Cgroups of a child process: limits and resource counters, with the cgroup v1 controllers memory, blkio and cpu.
//!
//! This module also creates a file that stands in for the weights of a device, and calls `madvise` on the mapping of
//! the file. All cgroups and files are removed at the end, also after Ctrl-C.
//!
//! Not here: the measured work. Each study has its own reader or busy loop.

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::str::FromStr;
use std::time::Duration;

use hearth_profiles::measure::mapping::{self, Advice, FileMapping, drop_cached_pages};

use crate::StudyError;

pub const MIB: usize = 1 << 20;
pub const PAGE_SIZE: usize = 4096;
/// The environment variable that passes the name of the cgroups to a child process.
const GROUPS: &str = "HEARTH_GROUPS";
const ROOT: &str = "/sys/fs/cgroup";

pub fn parse_number<T: FromStr>(text: &str) -> Result<T, StudyError> {
    text.parse().map_err(|_| format!("`{text}` is not a valid number").into())
}

/// Returns an error if this process cannot create the cgroups of the studies.
pub fn require_cgroup_access() -> Result<(), StudyError> {
    let has = |path: &str| Path::new(ROOT).join(path).exists();
    if !rustix::process::geteuid().is_root() {
        return Err("this study creates cgroups, which needs root; run it as root".into());
    }
    if !has("memory/memory.stat") || !has("blkio/cgroup.procs") || !has("cpu/cpu.cfs_quota_us") {
        return Err("cgroup v1 controllers are missing; mount memory, blkio and cpu in /sys/fs/cgroup".into());
    }
    if !has("blkio/blkio.throttle.read_bps_device") {
        return Err("the kernel has no blkio throttling; enable CONFIG_BLK_DEV_THROTTLING".into());
    }
    Ok(())
}

/// A file that stands in for the weights of a device. The file is removed when this value is dropped.
pub struct WeightFile {
    pub path: PathBuf,
    /// The path as text, for a command-line argument.
    pub path_text: String,
}

impl WeightFile {
    /// Creates a file of `mib` MiB, without holes.
    pub fn create(directory: &Path, mib: usize) -> Result<Self, StudyError> {
        let path = directory.join(format!("hearth-share-{}.bin", std::process::id()));
        let name = path.to_str().ok_or("the folder's path is not UTF-8; use a different folder")?.to_owned();
        let file = Self { path, path_text: name };
        let mut out = OpenOptions::new().write(true).create_new(true).open(&file.path)?;
        let mut block = vec![0u8; MIB];
        for piece in 0..mib {
            block.iter_mut().enumerate().for_each(|(at, byte)| *byte = (at ^ piece) as u8);
            out.write_all(&block)?;
        }
        out.sync_all()?;
        Ok(file)
    }
}

impl Drop for WeightFile {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

/// The resource limits of a child process; zero or `None` means no limit.
#[derive(Clone, Copy, Default, Debug)]
pub struct CgroupLimits {
    pub memory_bytes: usize,
    /// Maximum rate of disk reads in MB/s.
    pub disk_mb_per_s: u64,
    /// Quota and period of the CFS bandwidth control, in microseconds.
    pub cpu_quota: Option<(u64, u64)>,
}

/// The cgroups of one experiment. They are removed when this value is dropped.
pub struct Cgroups {
    name: String,
}

impl Cgroups {
    fn create(limits: CgroupLimits, file: &Path) -> Result<Self, StudyError> {
        let groups = Self { name: format!("hearth-experiment-{}", std::process::id()) };
        for group in groups.all() {
            fs::create_dir(&group)?;
        }
        if limits.memory_bytes > 0 {
            let limit = groups.folder("memory").join("memory.limit_in_bytes");
            fs::write(limit, limits.memory_bytes.to_string())?;
        }
        if limits.disk_mb_per_s > 0 {
            let rule = format!("{} {}", whole_disk(file)?, limits.disk_mb_per_s * 1_000_000);
            fs::write(groups.folder("blkio").join("blkio.throttle.read_bps_device"), rule)?;
        }
        if let Some((quota, period)) = limits.cpu_quota {
            fs::write(groups.folder("cpu").join("cpu.cfs_period_us"), period.to_string())?;
            fs::write(groups.folder("cpu").join("cpu.cfs_quota_us"), quota.to_string())?;
        }
        // The maximum value, so that other programs slow the experiment down as little as possible.
        fs::write(groups.folder("cpu").join("cpu.shares"), "262144")?;
        Ok(groups)
    }

    /// Moves this process into the cgroups of [`Cgroups::run_child`]. The parent process removes these cgroups.
    pub fn join() -> Result<std::mem::ManuallyDrop<Self>, StudyError> {
        // SAFETY: restoring the default action installs no handler and accesses no memory of this process.
        unsafe { libc::signal(libc::SIGINT, libc::SIG_DFL) };
        let groups = Self { name: std::env::var(GROUPS).map_err(|_| "`--child` is internal; omit it")? };
        for group in groups.all() {
            fs::write(group.join("cgroup.procs"), std::process::id().to_string())?;
        }
        Ok(std::mem::ManuallyDrop::new(groups))
    }

    /// Runs this program in new cgroups and returns its output. The disk limit applies to the disk that stores `file`.
    pub fn run_child(limits: CgroupLimits, file: &Path, arguments: &[String]) -> Result<String, StudyError> {
        let groups = Self::create(limits, file)?;
        // Ctrl-C must end the child but not this process, which removes the cgroups.
        // SAFETY: ignoring a signal installs no handler and accesses no memory of this process.
        unsafe { libc::signal(libc::SIGINT, libc::SIG_IGN) };
        let mut command = Command::new(std::env::current_exe()?);
        let output = command.args(arguments).env(GROUPS, &groups.name).stderr(Stdio::inherit()).output()?;
        if !output.status.success() {
            return Err(format!("the child process of the study failed: {}", output.status).into());
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    fn all(&self) -> [PathBuf; 3] {
        ["memory", "blkio", "cpu"].map(|controller| self.folder(controller))
    }

    fn folder(&self, controller: &str) -> PathBuf {
        Path::new(ROOT).join(controller).join(&self.name)
    }
}

impl Drop for Cgroups {
    fn drop(&mut self) {
        for group in self.all() {
            // The child has exited, but the kernel may release its memory a moment later.
            for _ in 0..50 {
                if fs::remove_dir(&group).is_ok() {
                    break;
                }
                std::thread::sleep(Duration::from_millis(20));
            }
        }
    }
}

/// Returns the device number (`major:minor`) of the disk that stores a file. A throttle applies to a whole disk.
fn whole_disk(file: &Path) -> Result<String, StudyError> {
    let device = fs::metadata(file)?.dev();
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    let node = format!("/sys/dev/block/{major}:{minor}");
    let partition = Path::new(&node).join("partition").exists();
    let source = if partition { format!("{node}/../dev") } else { format!("{node}/dev") };
    Ok(fs::read_to_string(&source).map_err(|e| format!("{source}: {e}"))?.trim().to_string())
}

/// Maps a file and drops its cached pages, because a page is charged to the process that reads it from disk.
pub fn map_cold(file: &File) -> Result<&'static FileMapping, StudyError> {
    let map = FileMapping::new(file)?;
    drop_from_cache(file, 0, map.len());
    Ok(Box::leak(Box::new(map)))
}

/// Drops the unmapped pages of a range of a file from the page cache, with `POSIX_FADV_DONTNEED`.
pub fn drop_from_cache(file: &File, offset: usize, length: usize) {
    drop_cached_pages(file, &(offset as u64..(offset + length) as u64));
}

/// Calls `madvise` for a part of a mapping. Errors are ignored.
pub fn advise(piece: &[u8], advice: Advice) {
    let _ = mapping::advise(piece, advice);
}

/// Unmaps the pages of a part of a mapping, with `MADV_DONTNEED`. Errors are ignored.
pub fn unmap(map: &FileMapping, piece: &[u8]) {
    let offset = piece.as_ptr() as usize - map.as_ptr() as usize;
    let _ = map.unmap_pages(offset..offset + piece.len());
}

/// Advises the kernel of the order in which a mapping will be accessed: `MADV_RANDOM` or `MADV_NORMAL`.
pub fn advise_access_pattern(map: &[u8], random: bool) {
    advise(map, if random { Advice::Random } else { Advice::Normal });
}

/// Returns whether the piece with the index `piece` is kept if `kept` of `pieces` pieces, evenly spread, are kept.
pub fn is_kept(piece: usize, kept: usize, pieces: usize) -> bool {
    (piece + 1) * kept / pieces > piece * kept / pieces
}

/// Returns for each page of a part of a mapping whether the page is in the page cache.
pub fn page_residency(piece: &[u8]) -> Vec<bool> {
    mapping::page_residency(piece).expect("the piece is mapped")
}

/// Returns the number of pages of a part of a mapping that are not in the page cache.
pub fn missing_page_count(piece: &[u8]) -> usize {
    page_residency(piece).into_iter().filter(|resident| !resident).count()
}

/// Returns the wrapping sum of all 64-bit words of `bytes`, so that every page is read.
pub fn checksum(bytes: &[u8]) -> u64 {
    let (words, _) = bytes.as_chunks::<8>();
    words.iter().fold(0, |sum, word| sum.wrapping_add(u64::from_le_bytes(*word)))
}

/// Returns the median of the values (the upper median of an even number of values); NaN without values.
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

/// The resource counters of the cgroups since their creation.
#[derive(Clone, Copy, Default, Debug)]
pub struct CgroupCounters {
    /// Number of bytes read from the limited disk.
    pub bytes_read: u64,
    pub major_faults: u64,
    /// Number of pages that were reclaimed and read again.
    pub refaulted_pages: u64,
    /// Current bytes of file pages on the kernel's active LRU list.
    pub active_file_bytes: u64,
    /// Number of times that the memory limit was hit.
    pub memory_limit_hits: u64,
    /// Current bytes of memory charged to the cgroup.
    pub memory_usage_bytes: u64,
    /// Current bytes of kernel memory, such as page tables; included in `memory_usage_bytes`.
    pub kernel_memory_bytes: u64,
}

impl CgroupCounters {
    pub fn read(groups: &Cgroups) -> Result<Self, StudyError> {
        let stat = fs::read_to_string(groups.folder("memory").join("memory.stat"))?;
        let of = |key: &str| {
            let line = stat.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(' '));
            line.and_then(|value| value.parse::<u64>().ok()).unwrap_or(0)
        };
        let single = |file: &str| -> Result<u64, StudyError> {
            parse_number(fs::read_to_string(groups.folder("memory").join(file))?.trim())
        };
        let served = fs::read_to_string(groups.folder("blkio").join("blkio.throttle.io_service_bytes"))?;
        let read = served.lines().filter(|line| line.contains(" Read "));
        Ok(Self {
            bytes_read: read.filter_map(|line| line.rsplit(' ').next()?.parse::<u64>().ok()).sum(),
            major_faults: of("pgmajfault"),
            refaulted_pages: of("workingset_refault_file"),
            active_file_bytes: of("active_file"),
            memory_limit_hits: single("memory.failcnt")?,
            memory_usage_bytes: single("memory.usage_in_bytes")?,
            kernel_memory_bytes: single("memory.kmem.usage_in_bytes").unwrap_or(0),
        })
    }

    /// Returns the difference to the counters `before`. Fields that are current values, not totals, are unchanged.
    #[must_use]
    pub fn since(&self, before: &Self) -> Self {
        Self {
            bytes_read: self.bytes_read - before.bytes_read,
            major_faults: self.major_faults - before.major_faults,
            refaulted_pages: self.refaulted_pages - before.refaulted_pages,
            memory_limit_hits: self.memory_limit_hits - before.memory_limit_hits,
            ..*self
        }
    }
}
