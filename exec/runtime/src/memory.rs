//! The memory that this process may use, according to its control groups and the machine.
//!
//! Linux charges memory to control groups, and the limits of all parent groups apply too: the tightest limit determines
//! the available memory. With a limit, only the page cache of files (`inactive_file` and `active_file`) counts as
//! reclaimable, which is exact without swap. Without a limit, the `MemAvailable` of the machine is used, which includes
//! reclaimable page cache.
//!
//! With a limit, the memory pressure is the unreclaimable memory of the group. Without a limit, it is the decrease of
//! `MemAvailable` since [`MemoryWatch`] was started. On systems other than Linux these values are unknown.
//!
//! Not here: setting limits (`hearth_lab`), and the memory that a plan assumes (`hearth_profiles::measure::memory`).

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use hearth_profiles::measure::cgroup::{CgroupVersion, cgroup_folders};
use hearth_profiles::measure::mapping::page_bytes;

/// The memory statistics of a control group, which are read from its files in every call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CgroupMemory {
    version: CgroupVersion,
    folder: PathBuf,
}

impl CgroupMemory {
    pub fn new(version: CgroupVersion, folder: &Path) -> Self {
        Self { version, folder: folder.into() }
    }

    /// Returns the memory limit of the group in bytes, the lower of its hard and soft limits; page cache counts towards
    /// the limit. Returns `None` if the group is unlimited (a very large number in cgroup v1) or the limit cannot be
    /// read.
    pub fn limit_bytes(&self) -> Option<u64> {
        // Above `memory.high` the kernel reclaims memory and throttles the group, long before it kills a process.
        let limits = ["memory.max", "memory.high"].map(|name| self.by_version("memory.limit_in_bytes", name));
        let limits = limits.into_iter().filter_map(|name| self.number(name));
        limits.filter(|&limit| limit < i64::MAX as u64 & !0xffff).min()
    }

    /// Returns the bytes charged to the group and its descendants, including page cache.
    pub fn usage_bytes(&self) -> Option<u64> {
        self.number(self.by_version("memory.usage_in_bytes", "memory.current"))
    }

    /// Returns the bytes charged to the group and its descendants, except the page cache of files.
    pub fn unreclaimable_bytes(&self) -> Option<u64> {
        // The page cache is read before the total, so that memory charged in between counts as unreclaimable.
        let text = self.text("memory.stat")?;
        let bytes = |name| self.statistic(&text, name).unwrap_or(0);
        Some(self.usage_bytes()?.saturating_sub(bytes("inactive_file").saturating_add(bytes("active_file"))))
    }

    /// Returns the bytes of file pages that were reclaimed and then read again, since the group was created.
    pub fn refaulted_bytes(&self) -> Option<u64> {
        let text = self.text("memory.stat")?;
        // Kernels before 5.9 do not count files separately.
        let pages = self
            .statistic(&text, "workingset_refault_file")
            .or_else(|| self.statistic(&text, "workingset_refault"))?;
        Some(pages.saturating_mul(page_bytes() as u64))
    }

    /// Returns the number of processes that the kernel has killed because the group was out of memory.
    pub fn oom_kills(&self) -> Option<u64> {
        field(&self.text(self.by_version("memory.oom_control", "memory.events"))?, "oom_kill")
    }

    fn by_version<'a>(&self, one: &'a str, two: &'a str) -> &'a str {
        match self.version {
            CgroupVersion::One => one,
            CgroupVersion::Two => two,
        }
    }

    /// Returns the value `name` of `memory.stat` including descendant groups, which cgroup v1 reports as `total_NAME`.
    fn statistic(&self, text: &str, name: &str) -> Option<u64> {
        field(text, self.by_version(&format!("total_{name}"), name))
    }

    fn number(&self, name: &str) -> Option<u64> {
        self.text(name)?.trim().parse().ok()
    }

    fn text(&self, name: &str) -> Option<String> {
        fs::read_to_string(self.folder.join(name)).ok()
    }
}

/// A measurement of the page cache that this process can hold, and of the pages that were evicted too early.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MemoryReading {
    /// Bytes of page cache that the process can hold without evictions, if known.
    pub page_cache_available_bytes: Option<u64>,
    /// Total bytes of file pages that were evicted although in use and then read again, in the control group with the
    /// tightest limit; `None` without a limit.
    pub refaulted_bytes: Option<u64>,
    /// Bytes of this process in swap space, which are not in memory.
    pub swapped_bytes: u64,
}

/// Observes the memory of this process. The control groups of the process are found once, when the watch starts.
#[derive(Debug, Clone)]
pub struct MemoryWatch {
    /// The folder that contains `proc` and `sys`: `/`, or another folder in tests.
    root: PathBuf,
    /// The control group of the process, followed by the parent groups.
    groups: Vec<CgroupMemory>,
    /// `MemAvailable` at the start of the watch, in bytes.
    available_at_start: u64,
}

impl MemoryWatch {
    /// Returns the watch of this process; the first call starts it.
    pub fn shared() -> &'static Self {
        static SHARED: OnceLock<MemoryWatch> = OnceLock::new();
        SHARED.get_or_init(|| Self::under(Path::new("/")))
    }

    /// Starts a watch that reads the folders `proc` and `sys` in the folder `root`.
    fn under(root: &Path) -> Self {
        let groups = cgroup_folders(root, "memory")
            .iter()
            .map(|(version, folder)| CgroupMemory::new(*version, folder))
            .filter(|group| group.text("memory.stat").is_some())
            .collect();
        let mut watch = Self { root: root.into(), groups, available_at_start: 0 };
        watch.available_at_start = watch.machine("MemAvailable:").unwrap_or(0);
        watch
    }

    /// Returns the bytes of page cache that this process can hold without memory pressure: the machine's `MemAvailable`
    /// or, if smaller, the limit of a control group minus its unreclaimable bytes.
    ///
    /// The result includes the page cache that the process already holds. Without limits it is an upper bound,
    /// because the page cache of other programs counts as available.
    pub fn page_cache_available_bytes(&self) -> Option<u64> {
        let left = |(group, limit): (&CgroupMemory, u64)| {
            // If the usage of a group is unknown, its whole limit counts as available.
            limit.saturating_sub(group.unreclaimable_bytes().unwrap_or(0))
        };
        self.limited().map(left).chain(self.machine("MemAvailable:")).min()
    }

    /// Returns the memory in bytes that this process can have: the page cache that it can hold, and its anonymous memory.
    pub fn available_bytes(&self) -> Option<u64> {
        Some(self.page_cache_available_bytes()?.saturating_add(self.anonymous_bytes().unwrap_or(0)))
    }

    pub fn measure(&self) -> MemoryReading {
        MemoryReading {
            page_cache_available_bytes: self.page_cache_available_bytes(),
            refaulted_bytes: self.tightest().and_then(|(group, _)| group.refaulted_bytes()),
            swapped_bytes: self.kibibytes("proc/self/status", "VmSwap:").unwrap_or(0),
        }
    }

    /// Returns the unreclaimable bytes of the control group with the tightest limit; without a limit, the anonymous
    /// memory of this process.
    pub fn unreclaimable_bytes(&self) -> u64 {
        let group = self.tightest().and_then(|(group, _)| group.unreclaimable_bytes());
        group.or_else(|| self.anonymous_bytes()).unwrap_or(0)
    }

    fn anonymous_bytes(&self) -> Option<u64> {
        self.kibibytes("proc/self/status", "RssAnon:")
    }

    /// Returns the resident memory of this process in bytes, including pages of mapped files.
    pub fn resident_bytes(&self) -> Option<u64> {
        self.kibibytes("proc/self/status", "VmRSS:")
    }

    /// Returns the total bytes of file pages that were reclaimed although in use and then read again, in the control
    /// group of this process since the group was created.
    pub fn refaulted_bytes(&self) -> Option<u64> {
        self.groups.first()?.refaulted_bytes()
    }

    /// Returns the bytes that count as memory pressure: with a limit, the unreclaimable bytes of its control group;
    /// without a limit, the decrease of the machine's `MemAvailable` since the start of the watch, which other programs
    /// can also cause.
    pub fn pressure_bytes(&self) -> u64 {
        if self.tightest().is_some() {
            return self.unreclaimable_bytes();
        }
        self.machine("MemAvailable:").map_or(0, |available| self.available_at_start.saturating_sub(available))
    }

    /// Returns the control group with the tightest limit, and the limit in bytes, if it is below the total memory.
    fn tightest(&self) -> Option<(&CgroupMemory, u64)> {
        let total = self.machine("MemTotal:").unwrap_or(u64::MAX);
        self.limited().filter(|&(_, limit)| limit < total).min_by_key(|&(_, limit)| limit)
    }

    fn limited(&self) -> impl Iterator<Item = (&CgroupMemory, u64)> {
        self.groups.iter().filter_map(|group| Some((group, group.limit_bytes()?)))
    }

    fn machine(&self, name: &str) -> Option<u64> {
        self.kibibytes("proc/meminfo", name)
    }

    /// Returns the value in bytes of the line that starts with `name` in a file of `proc`, such as `MemTotal:  5 kB`.
    fn kibibytes(&self, file: &str, name: &str) -> Option<u64> {
        let text = fs::read_to_string(self.root.join(file)).ok()?;
        field(&text, name)?.checked_mul(1024)
    }
}

/// Returns the number that follows `name` in the line of `text` whose first word is `name`.
fn field(text: &str, name: &str) -> Option<u64> {
    text.lines().find_map(|line| {
        let mut words = line.split_ascii_whitespace();
        (words.next() == Some(name)).then(|| words.next()?.parse().ok()).flatten()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree(files: &[(&str, &str)]) -> tempfile::TempDir {
        let tree = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let path = tree.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        tree
    }

    fn limit(watch: &MemoryWatch) -> Option<u64> {
        watch.tightest().map(|(_, limit)| limit)
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
        assert_eq!(limit(&watch), Some(500_000));
        // 400000 used, of which 300000 are page cache: 100000 cannot be reclaimed.
        assert_eq!(watch.unreclaimable_bytes(), 100_000);
        assert_eq!(watch.page_cache_available_bytes(), Some(400_000));
        assert_eq!(watch.pressure_bytes(), 100_000);
        assert_eq!(watch.refaulted_bytes(), Some(3 * page_bytes() as u64), "of the process's own group");
        assert_eq!(watch.groups[0].oom_kills(), Some(2));
        // Another limit, that of the group itself, leaves less memory.
        let group = tree.path().join("sys/fs/cgroup/a");
        fs::write(group.join("b/memory.max"), "300000\n").unwrap();
        assert_eq!((limit(&watch), watch.page_cache_available_bytes()), (Some(300_000), Some(200_000)));
        // The limit of the parent group can leave less memory although it is larger.
        fs::write(group.join("b/memory.current"), "0\n").unwrap();
        fs::write(group.join("memory.current"), "650000\n").unwrap();
        assert_eq!((limit(&watch), watch.page_cache_available_bytes()), (Some(300_000), Some(150_000)));
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
        assert_eq!((limit(&watch), watch.unreclaimable_bytes()), (Some(600_000), 150_000));
        assert_eq!(watch.page_cache_available_bytes(), Some(450_000));
        assert_eq!(watch.refaulted_bytes(), Some(2 * page_bytes() as u64));
        assert_eq!(watch.groups[0].oom_kills(), Some(1));
    }

    #[test]
    fn without_a_limit_the_memory_of_the_machine_counts() {
        let tree = tree(&[
            MACHINE,
            STATUS,
            ("proc/self/cgroup", "0::/\n"),
            ("sys/fs/cgroup/memory.max", "2000000\n"),
            ("sys/fs/cgroup/memory.stat", "anon 5\n"),
        ]);
        let watch = MemoryWatch::under(tree.path());
        // 2000000 bytes are more than the machine has.
        assert_eq!((limit(&watch), watch.unreclaimable_bytes()), (None, 30 << 10));
        assert_eq!((watch.page_cache_available_bytes(), watch.pressure_bytes()), (Some(800 << 10), 0));
        let meminfo = "MemTotal: 1000 kB\nMemAvailable: 550 kB\n";
        fs::write(tree.path().join(MACHINE.0), meminfo).unwrap();
        assert_eq!(watch.pressure_bytes(), 250 << 10);
    }

    #[test]
    fn missing_and_malformed_files_are_unknown() {
        let empty = tempfile::tempdir().unwrap();
        let watch = MemoryWatch::under(empty.path());
        let unknown = (None, None, None);
        assert_eq!((watch.page_cache_available_bytes(), limit(&watch), watch.refaulted_bytes()), unknown);
        assert_eq!((watch.unreclaimable_bytes(), watch.pressure_bytes()), (0, 0));
        let tree = tree(&[
            ("proc/meminfo", "MemTotal: many kB\nMemAvailable: 18446744073709551615 kB\nMemTotal"),
            ("proc/self/cgroup", "::::\n0::\n4:memory\n0::/../../etc\n"),
            ("sys/fs/cgroup/memory.max", "-5\n"),
            ("sys/fs/cgroup/memory.current", "5"),
            ("sys/fs/cgroup/memory.stat", "inactive_file\nactive_file 18446744073709551615\n"),
        ]);
        let watch = MemoryWatch::under(tree.path());
        assert_eq!((watch.page_cache_available_bytes(), limit(&watch), watch.refaulted_bytes()), unknown);
        assert_eq!(watch.groups[0].unreclaimable_bytes(), Some(0));
        fs::write(tree.path().join("sys/fs/cgroup/memory.max"), "70").unwrap();
        assert_eq!((limit(&watch), watch.page_cache_available_bytes()), (Some(70), Some(70)));
        assert_eq!(watch.unreclaimable_bytes(), 0);
    }

    #[test]
    fn this_process_has_available_memory() {
        if !Path::new("/proc/meminfo").exists() {
            eprintln!("SKIPPED this_process_has_available_memory: there is no /proc/meminfo");
            return;
        }
        let watch = MemoryWatch::under(Path::new("/"));
        assert!(watch.page_cache_available_bytes().is_some_and(|bytes| bytes > 0));
        assert!(Some(watch.pressure_bytes()) <= limit(&watch).or(watch.machine("MemTotal:")));
    }
}
