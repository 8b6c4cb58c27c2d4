//! Memory that this process may still use, from control groups and the machine.
//!
//! Linux charges memory to control groups, and the limits of all groups above hold too: the tightest counts. Without
//! swap only the page cache of files (`inactive_file` and `active_file`) of a group can be reclaimed without killing a
//! process; the rest is unreclaimable here. Without a limit the machine's `MemAvailable` counts, which includes page
//! cache that can be reclaimed.
//!
//! The memory pressure of the model is the fall of `MemAvailable` since the run's start over `MemTotal`; inside a
//! limit, the group's unreclaimable bytes over the limit. On systems other than Linux all of it is unknown.
//!
//! Not here: setting limits (`hearth_lab`), and the memory that a plan assumes (`hearth_profiles::measure::memory`).

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use hearth_profiles::measure::control_group::{Version, folders_under};

use crate::pages::page_bytes;

/// What one control group says of its memory. Its files are read again for each answer, so that a limit that
/// changes is noticed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GroupMemory {
    version: Version,
    folder: PathBuf,
}

impl GroupMemory {
    pub fn new(version: Version, folder: &Path) -> Self {
        Self { version, folder: folder.into() }
    }

    /// Returns the most that it may use, page cache included; `None` without a limit. Version 1 writes a huge number
    /// then.
    pub fn limit(&self) -> Option<u64> {
        // Above `memory.high` the kernel reclaims and slows the group down, long before it kills.
        let limits = ["memory.max", "memory.high"].map(|name| self.by_version("memory.limit_in_bytes", name));
        let limits = limits.into_iter().filter_map(|name| self.number(name));
        limits.filter(|&limit| limit < i64::MAX as u64 & !0xffff).min()
    }

    /// Bytes charged to the group and its descendants, including page cache.
    pub fn usage(&self) -> Option<u64> {
        self.number(self.by_version("memory.usage_in_bytes", "memory.current"))
    }

    /// Bytes charged to it, except page cache of files.
    pub fn unreclaimable(&self) -> Option<u64> {
        // The parts are read before the whole: what is charged in between counts as unreclaimable, never the
        // other way round.
        let text = self.text("memory.stat")?;
        let cache: u64 = ["inactive_file", "active_file"]
            .map(|name| self.statistic(&text, name).unwrap_or(0))
            .iter()
            .fold(0, |sum, bytes| sum.saturating_add(*bytes));
        Some(self.usage()?.saturating_sub(cache))
    }

    /// Bytes of files that were reclaimed while still in use and read again, since the group was made.
    pub fn refaults(&self) -> Option<u64> {
        let text = self.text("memory.stat")?;
        // Kernels before 5.9 do not tell files from the rest.
        let pages = self
            .statistic(&text, "workingset_refault_file")
            .or_else(|| self.statistic(&text, "workingset_refault"))?;
        Some(pages.saturating_mul(page_bytes() as u64))
    }

    /// Returns the number of processes that were killed in the group because it was out of memory.
    pub fn oom_kills(&self) -> Option<u64> {
        field(&self.text(self.by_version("memory.oom_control", "memory.events"))?, "oom_kill")
    }

    fn by_version(&self, one: &'static str, two: &'static str) -> &'static str {
        match self.version {
            Version::One => one,
            Version::Two => two,
        }
    }

    /// A number of `memory.stat`, with the groups below: version 1 has them under names of their own.
    fn statistic(&self, text: &str, name: &str) -> Option<u64> {
        match self.version {
            Version::One => field(text, &format!("total_{name}")),
            Version::Two => field(text, name),
        }
    }

    fn number(&self, name: &str) -> Option<u64> {
        self.text(name)?.trim().parse().ok()
    }

    fn text(&self, name: &str) -> Option<String> {
        fs::read_to_string(self.folder.join(name)).ok()
    }
}

/// A measurement of the page cache that a process may hold.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MemoryReading {
    /// Bytes that can be held without anything being evicted, if known.
    pub page_cache: Option<u64>,
    /// Bytes of files that had been evicted while in use and were read again, in the group whose limit is the tightest;
    /// `None` without a limit.
    pub refaulted: Option<u64>,
}

/// The memory of this process: its groups, found once, and the machine.
#[derive(Debug, Clone)]
pub struct MemoryWatch {
    /// The folder used as `/`.
    root: PathBuf,
    /// The process's own group first, then those above it.
    groups: Vec<GroupMemory>,
    /// Memory that was available when the watch began.
    available_at_start: u64,
}

impl MemoryWatch {
    /// Watches this process; the fall of available memory counts from now.
    pub fn of_this_process() -> Self {
        Self::under(Path::new("/"))
    }

    /// The watch that the whole process shares. It begins when this is first called.
    pub fn shared() -> &'static Self {
        static SHARED: OnceLock<MemoryWatch> = OnceLock::new();
        SHARED.get_or_init(Self::of_this_process)
    }

    /// Watches with another folder in place of `/`.
    pub fn under(root: &Path) -> Self {
        let groups = folders_under(root, "memory")
            .iter()
            .map(|(version, folder)| GroupMemory::new(*version, folder))
            .filter(|group| group.text("memory.stat").is_some())
            .collect();
        let mut watch = Self { root: root.into(), groups, available_at_start: 0 };
        watch.available_at_start = watch.machine("MemAvailable:").unwrap_or(0);
        watch
    }

    /// Bytes of page cache that this process could hold without anyone being reclaimed or killed: the least of
    /// what its limits leave beside the unreclaimable bytes of their groups, and of the machine's `MemAvailable`.
    ///
    /// What the process already holds in page cache is part of the answer, not on top of it. On a machine
    /// without limits that makes it an upper bound: other programs' page cache is counted as free to take.
    pub fn page_cache_available(&self) -> Option<u64> {
        let left = |(group, limit): (&GroupMemory, u64)| {
            // A group that does not tell its usage is taken at its limit.
            limit.saturating_sub(group.unreclaimable().unwrap_or(0))
        };
        self.limited().map(left).chain(self.machine("MemAvailable:")).min()
    }

    /// Measures the memory.
    pub fn reading(&self) -> MemoryReading {
        MemoryReading {
            page_cache: self.page_cache_available(),
            refaulted: self.tightest().and_then(|(group, _)| group.refaults()),
        }
    }

    /// Returns the tightest limit, if there is one below the memory of the machine.
    pub fn limit(&self) -> Option<u64> {
        self.tightest().map(|(_, limit)| limit)
    }

    /// Bytes of the group with the tightest limit, except page cache of files. Without a limit, this process's own
    /// anonymous memory.
    pub fn unreclaimable(&self) -> u64 {
        let group = self.tightest().and_then(|(group, _)| group.unreclaimable());
        group.or_else(|| self.kibibytes("proc/self/status", "RssAnon:")).unwrap_or(0)
    }

    /// Bytes of this process that are in memory, pages of mapped files included.
    pub fn resident(&self) -> Option<u64> {
        self.kibibytes("proc/self/status", "VmRSS:")
    }

    /// Bytes of files that the process's own group had to read again because they had been reclaimed, since
    /// the group was made.
    pub fn refaults(&self) -> Option<u64> {
        self.groups.first()?.refaults()
    }

    /// Bytes by which the model presses on memory: the unreclaimable bytes inside a limit; elsewhere the fall
    /// of the machine's `MemAvailable` since the watch began, to which other programs contribute.
    pub fn pressing(&self) -> u64 {
        match self.tightest() {
            Some(_) => self.unreclaimable(),
            None => self
                .machine("MemAvailable:")
                .map_or(0, |available| self.available_at_start.saturating_sub(available)),
        }
    }

    /// The same as a share of the limit, or of the machine's memory.
    pub fn pressure(&self) -> f64 {
        let whole = self.limit().or_else(|| self.machine("MemTotal:")).unwrap_or(0);
        self.pressing() as f64 / whole.max(1) as f64
    }

    fn tightest(&self) -> Option<(&GroupMemory, u64)> {
        let total = self.machine("MemTotal:").unwrap_or(u64::MAX);
        self.limited().filter(|&(_, limit)| limit < total).min_by_key(|&(_, limit)| limit)
    }

    fn limited(&self) -> impl Iterator<Item = (&GroupMemory, u64)> {
        self.groups.iter().filter_map(|group| Some((group, group.limit()?)))
    }

    fn machine(&self, name: &str) -> Option<u64> {
        self.kibibytes("proc/meminfo", name)
    }

    /// A line such as `MemTotal:  5 kB`, in bytes.
    fn kibibytes(&self, file: &str, name: &str) -> Option<u64> {
        let text = fs::read_to_string(self.root.join(file)).ok()?;
        field(&text, name)?.checked_mul(1024)
    }
}

/// The number after a name at the start of a line.
fn field(text: &str, name: &str) -> Option<u64> {
    text.lines().find_map(|line| {
        let mut words = line.split_ascii_whitespace();
        (words.next() == Some(name)).then(|| words.next()?.parse().ok()).flatten()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A tree of files, each with its text.
    fn tree(files: &[(&str, &str)]) -> tempfile::TempDir {
        let tree = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let path = tree.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        tree
    }

    const MACHINE: (&str, &str) =
        ("proc/meminfo", "MemTotal: 1000 kB\nMemFree: 1 kB\nMemAvailable:   800 kB\n");
    const STATUS: (&str, &str) = ("proc/self/status", "VmRSS:\t90 kB\nRssAnon:\t   30 kB\n");

    #[test]
    fn version_two_counts_every_limit_above() {
        let tree = tree(&[
            MACHINE,
            STATUS,
            ("proc/self/cgroup", "0::/a/b\n"),
            ("sys/fs/cgroup/a/b/memory.max", "max\n"),
            ("sys/fs/cgroup/a/b/memory.current", "100000\n"),
            ("sys/fs/cgroup/a/b/memory.stat", "anon 5\nworkingset_refault_file 3\n"),
            ("sys/fs/cgroup/a/b/memory.events", "oom 4\noom_kill 2\n"),
            ("sys/fs/cgroup/a/memory.max", "500000\n"),
            ("sys/fs/cgroup/a/memory.current", "400000\n"),
            (
                "sys/fs/cgroup/a/memory.stat",
                "anon 5\ninactive_file 250000\nactive_file 50000\nworkingset_refault_file 9\n",
            ),
            ("sys/fs/cgroup/memory.stat", "anon 5\n"),
        ]);
        let watch = MemoryWatch::under(tree.path());
        assert_eq!(watch.limit(), Some(500_000));
        // 400000 used, of which 300000 are page cache: 100000 cannot be reclaimed.
        assert_eq!(watch.unreclaimable(), 100_000);
        assert_eq!(watch.page_cache_available(), Some(400_000));
        assert_eq!(watch.pressure(), 0.2);
        assert_eq!(watch.refaults(), Some(3 * page_bytes() as u64), "of the process's own group");
        assert_eq!(watch.groups[0].oom_kills(), Some(2));
        // A second limit, of the group itself, with less room in it.
        let own = |name: &str, text: &str| {
            fs::write(tree.path().join("sys/fs/cgroup/a/b").join(name), text).unwrap();
        };
        own("memory.max", "300000\n");
        assert_eq!((watch.limit(), watch.page_cache_available()), (Some(300_000), Some(200_000)));
        // A limit of the group above can leave less, although it is wider.
        own("memory.current", "0\n");
        fs::write(tree.path().join("sys/fs/cgroup/a/memory.current"), "650000\n").unwrap();
        assert_eq!((watch.limit(), watch.page_cache_available()), (Some(300_000), Some(150_000)));
    }

    #[test]
    fn version_one_is_read_with_the_groups_below() {
        let tree = tree(&[
            MACHINE,
            ("proc/self/cgroup", "4:memory:/lab\n1:name=systemd:/\n0::/\n"),
            ("proc/self/mountinfo", "35 31 0:32 / /cg/memory rw - cgroup cgroup rw,memory\n"),
            ("cg/memory/memory.limit_in_bytes", "9223372036854771712\n"),
            ("cg/memory/memory.stat", "cache 1\n"),
            ("cg/memory/lab/memory.limit_in_bytes", "600000\n"),
            ("cg/memory/lab/memory.usage_in_bytes", "590000\n"),
            (
                "cg/memory/lab/memory.stat",
                "inactive_file 1\nactive_file 1\nworkingset_refault_file 7\ntotal_inactive_file 400000\n\
                 total_active_file 40000\ntotal_workingset_refault_file 2\n",
            ),
            ("cg/memory/lab/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n"),
        ]);
        let watch = MemoryWatch::under(tree.path());
        assert_eq!((watch.limit(), watch.unreclaimable()), (Some(600_000), 150_000));
        assert_eq!(watch.page_cache_available(), Some(450_000));
        assert_eq!(watch.refaults(), Some(2 * page_bytes() as u64));
        assert_eq!(watch.groups[0].oom_kills(), Some(1));
    }

    #[test]
    fn without_a_limit_the_machine_tells() {
        let tree = tree(&[
            MACHINE,
            STATUS,
            ("proc/self/cgroup", "0::/\n"),
            ("sys/fs/cgroup/memory.max", "2000000\n"),
            ("sys/fs/cgroup/memory.stat", "anon 5\n"),
        ]);
        let watch = MemoryWatch::under(tree.path());
        // 2000000 bytes are more than the machine has.
        assert_eq!((watch.limit(), watch.unreclaimable()), (None, 30 << 10));
        assert_eq!((watch.page_cache_available(), watch.pressing()), (Some(800 << 10), 0));
        let meminfo = "MemTotal: 1000 kB\nMemAvailable: 550 kB\n";
        fs::write(tree.path().join(MACHINE.0), meminfo).unwrap();
        assert_eq!((watch.pressing(), watch.pressure()), (250 << 10, 0.25));
    }

    #[test]
    fn missing_and_odd_files_say_nothing() {
        let empty = tempfile::tempdir().unwrap();
        let watch = MemoryWatch::under(empty.path());
        assert_eq!((watch.page_cache_available(), watch.limit(), watch.refaults()), (None, None, None));
        assert_eq!((watch.unreclaimable(), watch.pressing(), watch.pressure()), (0, 0, 0.0));
        let tree = tree(&[
            ("proc/meminfo", "MemTotal: many kB\nMemAvailable: 18446744073709551615 kB\nMemTotal"),
            ("proc/self/cgroup", "::::\n0::\n4:memory\n0::/../../etc\n"),
            ("sys/fs/cgroup/memory.max", "-5\n"),
            ("sys/fs/cgroup/memory.current", "5"),
            ("sys/fs/cgroup/memory.stat", "inactive_file\nactive_file 18446744073709551615\n"),
        ]);
        let watch = MemoryWatch::under(tree.path());
        assert_eq!((watch.page_cache_available(), watch.limit(), watch.refaults()), (None, None, None));
        assert_eq!(watch.groups[0].unreclaimable(), Some(0));
        fs::write(tree.path().join("sys/fs/cgroup/memory.max"), "70").unwrap();
        assert_eq!(
            (watch.limit(), watch.page_cache_available(), watch.unreclaimable()),
            (Some(70), Some(70), 0)
        );
    }

    #[test]
    fn this_process_has_room() {
        if !Path::new("/proc/meminfo").exists() {
            eprintln!("SKIPPED this_process_has_room: there is no /proc/meminfo here");
            return;
        }
        let watch = MemoryWatch::of_this_process();
        assert!(watch.page_cache_available().is_some_and(|room| room > 0));
        assert!((0.0..=1.0).contains(&watch.pressure()));
    }
}
