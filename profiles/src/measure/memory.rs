//! Reads the memory of this machine and the memory limits of this process's control groups.
//!
//! The values are those of `/proc/meminfo` or, if lower, of the process's control group or one of its parent groups:
//! `memory.max` and `memory.current` in cgroup v2, `memory.limit_in_bytes` and `memory.usage_in_bytes` in cgroup v1.
//! Reclaimable page cache of a group counts as available, as in the kernel's `MemAvailable`.

use std::fs;
use std::path::Path;

use super::cgroup::{self, CgroupVersion};
use crate::device::{Memory, PageCachePolicy};
use crate::document_values::Sourced;
use crate::units::Bytes;

/// Memory limit and memory usage of a control group, in bytes.
struct Group {
    limit: u64,
    usage: u64,
    /// Reclaimable page cache of the group, in bytes.
    cache: u64,
}

/// Returns the total memory: the installed memory, or the lowest limit of a control group if that limit is lower.
pub fn total_memory() -> Bytes {
    let machine = meminfo("MemTotal:").unwrap_or(0);
    Bytes(groups().iter().map(|group| group.limit).fold(machine, u64::min))
}

/// Returns the memory that is available without swapping, including reclaimable page cache.
pub fn available_memory() -> Bytes {
    let machine = meminfo("MemAvailable:").unwrap_or(0);
    let free = |group: &Group| (group.limit + group.cache).saturating_sub(group.usage).min(group.limit);
    Bytes(groups().iter().map(free).fold(machine, u64::min))
}

/// Measures the memory that this process can use, and determines the kernel's page-cache policy.
pub fn measure_memory() -> Memory {
    let limited = groups().iter().any(|group| Some(group.limit) < meminfo("MemTotal:"));
    let origin = if limited {
        "read from the control group's limit and /proc/meminfo"
    } else {
        "read from /proc/meminfo"
    };
    let total = total_memory();
    // Under a limit, swapping out other programs frees nothing.
    let swap = |name: &str, origin: &str| {
        (!limited).then(|| Sourced::new(Bytes(meminfo(name).unwrap_or(0)), origin))
    };
    Memory {
        total_memory: Sourced::new(total, origin),
        available_memory: Sourced::new(available_memory().min(total), origin),
        can_swap: swap("Inactive(anon):", "read from /proc/meminfo: inactive anonymous pages"),
        swap_available: swap("SwapFree:", "read from /proc/meminfo"),
        page_cache: if has_mglru() { PageCachePolicy::MgLru } else { PageCachePolicy::TwoList },
        reclaim_parameters: None,
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
    let folders = cgroup::cgroup_folders(Path::new("/"), "memory").into_iter();
    folders.filter_map(|(version, folder)| group(version, &folder)).collect()
}

/// Reads the limit and the usage of a control group. Returns `None` for a group without a limit.
fn group(version: CgroupVersion, folder: &Path) -> Option<Group> {
    let (limit, usage, cache) = match version {
        CgroupVersion::One => {
            ("memory.limit_in_bytes", "memory.usage_in_bytes", ["total_inactive_file", "total_active_file"])
        }
        CgroupVersion::Two => ("memory.max", "memory.current", ["inactive_file", "active_file"]),
    };
    let read = |name: &str| fs::read_to_string(folder.join(name)).ok();
    let number = |name: &str| read(name)?.trim().parse().ok();
    let (limit, usage) = (number(limit)?, number(usage)?);
    let cached = |line: &str| {
        let (_, value) = line.split_once(' ').filter(|(name, _)| cache.contains(name))?;
        value.parse::<u64>().ok()
    };
    let cache = read("memory.stat").unwrap_or_default().lines().filter_map(cached).sum();
    Some(Group { limit, usage, cache })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn available_memory_is_at_most_total() {
        assert!(available_memory() <= total_memory());
        assert!(total_memory() > Bytes::from_mib(16), "every machine that runs this test has more");
    }

    #[test]
    fn group_of_each_version_is_read() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| fs::write(folder.path().join(name), text).unwrap();
        write("memory.max", "1000\n");
        write("memory.current", "800\n");
        write("memory.stat", "anon 300\ninactive_file 400\nactive_file 100\n");
        let read = group(CgroupVersion::Two, folder.path()).unwrap();
        assert_eq!((read.limit, read.usage, read.cache), (1000, 800, 500));
        write("memory.max", "max\n");
        assert!(group(CgroupVersion::Two, folder.path()).is_none(), "no limit");
        write("memory.limit_in_bytes", "2000\n");
        write("memory.usage_in_bytes", "900\n");
        write("memory.stat", "total_inactive_file 100\ntotal_active_file 50\ninactive_file 7\n");
        let read = group(CgroupVersion::One, folder.path()).unwrap();
        assert_eq!((read.limit, read.usage, read.cache), (2000, 900, 150));
    }
}
