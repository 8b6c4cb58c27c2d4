//! Reads the memory of this machine and the limits of this process's control groups.
//!
//! The values are those of `/proc/meminfo`, or the limit of a control group if it is lower: `memory.max` and
//! `memory.current` in version 2, `memory.limit_in_bytes` and `memory.usage_in_bytes` in version 1, of the process's
//! group and all its parents. Reclaimable page cache of a group counts as available, as in the kernel's
//! `MemAvailable`.

use std::fs;
use std::path::{Path, PathBuf};

use super::control_group::{self, Version};
use crate::device::{Memory, PageCachePolicy};
use crate::units::Bytes;
use crate::values::Sourced;

/// Memory limit and usage of a control group, in bytes.
struct Group {
    limit: u64,
    usage: u64,
    /// Reclaimable page cache of the group.
    cache: u64,
}

/// Returns the total memory: the installed memory or the lowest limit.
pub fn total() -> Bytes {
    let machine = meminfo("MemTotal:").unwrap_or(0);
    Bytes(groups().iter().map(|group| group.limit).fold(machine, u64::min))
}

/// Returns the memory that is available without swapping, including reclaimable page cache.
pub fn available() -> Bytes {
    let machine = meminfo("MemAvailable:").unwrap_or(0);
    let free = |group: &Group| (group.limit + group.cache).saturating_sub(group.usage).min(group.limit);
    Bytes(groups().iter().map(free).fold(machine, u64::min))
}

/// Returns the free swap space.
pub fn swap_available() -> Bytes {
    Bytes(meminfo("SwapFree:").unwrap_or(0))
}

/// Returns the memory of other programs that could be swapped out: inactive anonymous pages.
pub fn swappable() -> Bytes {
    Bytes(meminfo("Inactive(anon):").unwrap_or(0))
}

/// Measures the memory that this process can use, and the page-cache policy.
pub fn measure_memory() -> Memory {
    let limited = groups().iter().any(|group| Some(group.limit) < meminfo("MemTotal:"));
    let origin = if limited {
        "read from the control group's limit and /proc/meminfo"
    } else {
        "read from /proc/meminfo"
    };
    let total = total();
    Memory {
        total: Sourced::new(total, origin),
        available: Sourced::new(available().min(total), origin),
        // Under a limit, swapping out other programs frees nothing.
        can_swap: (!limited)
            .then(|| Sourced::new(swappable(), "read from /proc/meminfo: inactive anonymous pages")),
        swap_available: (!limited).then(|| Sourced::new(swap_available(), "read from /proc/meminfo")),
        page_cache: if has_mglru() { PageCachePolicy::MgLru } else { PageCachePolicy::TwoList },
        reclaim: None,
    }
}

/// Returns whether the kernel uses multi-generational LRU (MGLRU).
pub fn has_mglru() -> bool {
    // The file contains a hexadecimal bit mask, whose lowest bit is the main switch.
    let text = fs::read_to_string("/sys/kernel/mm/lru_gen/enabled").unwrap_or_default();
    u32::from_str_radix(text.trim().trim_start_matches("0x"), 16).is_ok_and(|mask| mask & 1 == 1)
}

fn meminfo(name: &str) -> Option<u64> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    line.split_ascii_whitespace().next()?.parse::<u64>().ok().map(|kib| kib * 1024)
}

fn groups() -> Vec<Group> {
    let read = |(version, folder): (Version, PathBuf)| match version {
        Version::One => version_1(&folder),
        Version::Two => version_2(&folder),
    };
    control_group::folders("memory").into_iter().filter_map(read).collect()
}

fn number(path: &Path) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

fn statistic(path: &Path, names: &[&str]) -> u64 {
    let text = fs::read_to_string(path).unwrap_or_default();
    let value = |line: &str| {
        let (name, value) = line.split_once(' ')?;
        names.contains(&name).then(|| value.parse::<u64>().ok()).flatten()
    };
    text.lines().filter_map(value).sum()
}

fn version_2(group: &Path) -> Option<Group> {
    let limit = number(&group.join("memory.max"))?;
    let usage = number(&group.join("memory.current"))?;
    let cache = statistic(&group.join("memory.stat"), &["inactive_file", "active_file"]);
    Some(Group { limit, usage, cache })
}

fn version_1(group: &Path) -> Option<Group> {
    let limit = number(&group.join("memory.limit_in_bytes"))?;
    let usage = number(&group.join("memory.usage_in_bytes"))?;
    let cache = statistic(&group.join("memory.stat"), &["total_inactive_file", "total_active_file"]);
    Some(Group { limit, usage, cache })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn available_memory_is_at_most_total() {
        assert!(available() <= total());
        assert!(total() > Bytes::mib(16), "every machine that runs this test has more");
    }

    #[test]
    fn group_of_each_version_is_read() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| fs::write(folder.path().join(name), text).unwrap();
        write("memory.max", "1000\n");
        write("memory.current", "800\n");
        write("memory.stat", "anon 300\ninactive_file 400\nactive_file 100\n");
        let group = version_2(folder.path()).unwrap();
        assert_eq!((group.limit, group.usage, group.cache), (1000, 800, 500));
        write("memory.max", "max\n");
        assert!(version_2(folder.path()).is_none(), "no limit");
        write("memory.limit_in_bytes", "2000\n");
        write("memory.usage_in_bytes", "900\n");
        write("memory.stat", "total_inactive_file 100\ntotal_active_file 50\ninactive_file 7\n");
        let group = version_1(folder.path()).unwrap();
        assert_eq!((group.limit, group.usage, group.cache), (2000, 900, 150));
    }
}
