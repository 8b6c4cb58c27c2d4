//! The pages of a memory-mapped file in memory: query, read ahead, evict.
//!
//! All residency policies use these functions. `mincore` reports for each page of a mapping whether it is in the page
//! cache, but only to the owner of the file; other users see all pages as present. When a region is read, it is widened
//! to whole pages. When a region is evicted, it is narrowed to whole pages, because other data may use the rest of a
//! page.
//!
//! On systems other than Linux these functions do nothing and report no resident pages.
//!
//! Not here: the system calls, which are in [`hearth_profiles::measure::mapping`].

use std::fs::File;
use std::ops::Range;

use hearth_profiles::measure::mapping::{
    Advice, FileMapping, advise, drop_cached_pages, page_bytes, page_residency,
};

/// Returns the number of bytes of a memory-mapped region that are in memory.
pub fn resident_bytes(region: &[u8]) -> u64 {
    let Ok(pages) = page_residency(region) else { return 0 };
    let absent = pages.iter().filter(|&&is_resident| !is_resident).count() * page_bytes();
    region.len().saturating_sub(absent) as u64
}

/// Returns whether [`resident_bytes`] is reliable for a memory-mapped file: since Linux 5.0, only the owner of the file
/// gets the real state.
pub fn is_residency_reported(file: &File) -> bool {
    #[cfg(any(target_os = "android", target_os = "linux"))]
    {
        use std::os::unix::fs::MetadataExt;
        let user = rustix::process::geteuid();
        user.is_root() || file.metadata().is_ok_and(|metadata| metadata.uid() == user.as_raw())
    }
    #[cfg(not(any(target_os = "android", target_os = "linux")))]
    {
        let _ = file;
        false
    }
}

/// Starts to read the pages of a memory-mapped region, without waiting. Returns the number of bytes for which this
/// succeeded.
pub(crate) fn read_ahead(region: &[u8]) -> u64 {
    // A call reads at most one read-ahead window; 128 KiB is the smallest common window.
    const WINDOW: usize = 128 << 10;
    // All windows but the first start at a page.
    let first = (WINDOW - region.as_ptr() as usize % page_bytes()).min(region.len());
    let windows = [&region[..first]].into_iter().chain(region[first..].chunks(WINDOW));
    windows
        .take_while(|window| advise(window, Advice::WillNeed).is_ok())
        .map(|window| window.len() as u64)
        .sum()
}

/// Reads the pages of a memory-mapped region and waits for them. Returns the number of bytes for which this succeeded.
pub fn populate(region: &[u8]) -> u64 {
    advise(region, Advice::PopulateRead).map_or(0, |()| region.len() as u64)
}

/// Returns the number of online CPUs; 1 if it is unknown, as on systems other than Linux. Linux caches memory charges
/// for each CPU and control group.
pub fn cpu_count() -> u32 {
    let list = std::fs::read_to_string("/sys/devices/system/cpu/online").ok();
    list.and_then(|list| count_of_list(&list)).unwrap_or(1).max(1)
}

/// Returns the number of elements of a list of ranges such as `0-3,8`.
fn count_of_list(list: &str) -> Option<u32> {
    let count = |range: &str| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        (last.parse::<u32>().ok()?).checked_sub(first.parse().ok()?)?.checked_add(1)
    };
    list.trim().split(',').map(count).sum()
}

/// Evicts the whole pages inside a range of a memory-mapped file, so that the system does not have to reclaim other
/// pages.
///
/// The pages are unmapped first, because mapped pages are not dropped. `MADV_PAGEOUT` does the same in one system call,
/// but it costs more than twice as much, fails for files of other owners, and causes refaults to be counted when the
/// pages are read again.
pub(crate) fn evict(mapping: &FileMapping, file: &File, range: &Range<u64>) {
    let page = page_bytes() as u64;
    let inside = range.start.next_multiple_of(page)..range.end / page * page;
    if inside.is_empty() || range.end > mapping.len() as u64 {
        return;
    }
    // If it fails, the pages stay in memory, as any page may.
    let _ = mapping.unmap_pages(inside.start as usize..inside.end as usize);
    drop_cached_pages(file, &inside);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpus_of_a_list_are_counted() {
        assert_eq!(count_of_list("0\n"), Some(1));
        assert_eq!(count_of_list("0-3,8,10-11\n"), Some(7));
        assert_eq!(count_of_list("3-0"), None);
        assert_eq!(count_of_list(""), None);
        assert!(cpu_count() >= 1);
    }
}
