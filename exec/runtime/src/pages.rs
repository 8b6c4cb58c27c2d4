//! System calls on the pages of a memory-mapped file: query, read ahead, evict.
//!
//! All residency policies use these functions. `mincore` reports for each page of a mapping whether it is in the page
//! cache, but only to the owner of the file; other users see all pages as present. When a region is read, it is widened
//! to whole pages. When a region is evicted, it is narrowed to whole pages, because other data may use the rest of a
//! page.
//!
//! On systems other than Linux these functions do nothing and report no resident pages.

use std::fs::File;

use hearth_profiles::measure::drop_cached_pages;

/// Returns the page size of the system in bytes: 4096 on most machines, 16384 on some.
#[cfg(any(target_os = "android", target_os = "linux"))]
pub fn page_bytes() -> usize {
    // SAFETY: the call takes a number and touches no memory of this process.
    let bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(bytes).ok().filter(|bytes| bytes.is_power_of_two()).unwrap_or(4096)
}

#[cfg(not(any(target_os = "android", target_os = "linux")))]
pub fn page_bytes() -> usize {
    4096
}

/// Returns the number of bytes of a memory-mapped region that are in memory.
#[cfg(any(target_os = "android", target_os = "linux"))]
pub fn resident_bytes(region: &[u8]) -> u64 {
    let page = page_bytes();
    let begin = region.as_ptr() as usize & !(page - 1);
    let length = region.as_ptr() as usize + region.len() - begin;
    let mut pages = vec![0u8; length.div_ceil(page)];
    // SAFETY: the range is in a live mapping, whose start is page-aligned, and the vector has a byte for each of its
    // pages.
    let result = unsafe { libc::mincore(begin as *mut libc::c_void, length, pages.as_mut_ptr()) };
    if result != 0 {
        return 0;
    }
    let absent = pages.iter().filter(|&&state| state & 1 == 0).count() * page;
    region.len().saturating_sub(absent) as u64
}

#[cfg(not(any(target_os = "android", target_os = "linux")))]
pub fn resident_bytes(_region: &[u8]) -> u64 {
    0
}

/// Returns whether [`resident_bytes`] is reliable for a memory-mapped file: since Linux 5.0, only the owner of the file
/// gets the real state.
pub fn is_residency_reported(file: &File) -> bool {
    #[cfg(any(target_os = "android", target_os = "linux"))]
    {
        use std::os::unix::fs::MetadataExt;
        // SAFETY: the call has no preconditions and touches no memory of this process.
        let user = unsafe { libc::geteuid() };
        user == 0 || file.metadata().is_ok_and(|metadata| metadata.uid() == user)
    }
    #[cfg(not(any(target_os = "android", target_os = "linux")))]
    {
        let _ = file;
        false
    }
}

/// Reads the pages of a memory-mapped region and waits for them. Returns the number of bytes for which this succeeded.
pub fn populate(region: &[u8]) -> u64 {
    advise(region, Advice::PopulateRead)
}

/// Returns the number of online CPUs; 1 on systems other than Linux. Linux caches memory charges for each CPU and
/// control group.
pub fn cpu_count() -> u32 {
    #[cfg(any(target_os = "android", target_os = "linux"))]
    {
        // SAFETY: the call takes a number and touches no memory of this process.
        let online = unsafe { libc::sysconf(libc::_SC_NPROCESSORS_ONLN) };
        u32::try_from(online).unwrap_or(1).max(1)
    }
    #[cfg(not(any(target_os = "android", target_os = "linux")))]
    1
}

/// Evicts the whole pages inside a region of a memory-mapped file, so that the system does not have to reclaim other
/// pages. `offset` is the offset of the region in the file, in bytes.
///
/// The pages are unmapped first, because mapped pages are not dropped. `MADV_PAGEOUT` does the same in one system call,
/// but it costs more than twice as much, fails for files of other owners, and causes refaults to be counted when the
/// pages are read again.
pub fn evict(region: &[u8], file: &File, offset: u64) {
    let page = page_bytes() as u64;
    let (begin, end) = (offset.next_multiple_of(page), (offset + region.len() as u64) / page * page);
    let Some(inside) = region.get((begin - offset) as usize..).filter(|_| begin < end) else { return };
    advise(&inside[..(end - begin) as usize], Advice::DontNeed);
    drop_cached_pages(file, &(begin..end));
}

/// The advice argument of the system call `madvise`.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Advice {
    /// Start to read the pages of the region, without waiting.
    WillNeed,
    /// Start to read the pages of the region in one call, which the kernel shortens to one read-ahead window.
    WillNeedUnsplit,
    /// Read the pages of the region and map them. Kernels before 5.14 do not have this advice; then pages are read when
    /// they are touched.
    PopulateRead,
    /// Expect random access: a page fault then reads one page, without read-ahead.
    Random,
    /// Expect normal access: undoes [`Advice::Random`].
    Normal,
    /// Unmap the pages of the region.
    DontNeed,
}

/// Advises the kernel about a region, widened to whole pages. Returns the number of bytes for which this succeeded.
#[cfg(any(target_os = "android", target_os = "linux"))]
pub(crate) fn advise(region: &[u8], advice: Advice) -> u64 {
    let (advice, step) = match advice {
        // A call reads at most one read-ahead window; 128 KiB is the smallest common window.
        Advice::WillNeed => (libc::MADV_WILLNEED, 128 << 10),
        Advice::WillNeedUnsplit => (libc::MADV_WILLNEED, usize::MAX),
        Advice::PopulateRead => (libc::MADV_POPULATE_READ, usize::MAX),
        Advice::Random => (libc::MADV_RANDOM, usize::MAX),
        Advice::Normal => (libc::MADV_NORMAL, usize::MAX),
        Advice::DontNeed => (libc::MADV_DONTNEED, usize::MAX),
    };
    let begin = region.as_ptr() as usize;
    let (mut at, end) = (begin & !(page_bytes() - 1), begin + region.len());
    while at < end {
        let length = step.min(end - at);
        // SAFETY: the range is in a live read-only file mapping; its first page may start earlier, in the same
        // mapping, whose start is page-aligned. No advice changes the contents of the mapping: unmapped pages are
        // read from the file again.
        let result = unsafe { libc::madvise(at as *mut libc::c_void, length, advice) };
        if result != 0 {
            break;
        }
        at += length;
    }
    at.saturating_sub(begin).min(region.len()) as u64
}

#[cfg(not(any(target_os = "android", target_os = "linux")))]
pub(crate) fn advise(_region: &[u8], _advice: Advice) -> u64 {
    0
}
