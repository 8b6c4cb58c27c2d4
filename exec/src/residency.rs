//! How much of a device's weights is in memory?
//!
//! `mincore` tells for each page of a mapping whether it is in the page cache. On Linux since 5.0 only the
//! file's owner gets a true answer; others see every page as present.
//!
//! Elsewhere than Linux nothing is known, and 0 is told.

use hearth_schema::schedule::Part;

use crate::weights::Weights;

/// Bytes of a part's weights that are in memory, in whole pages.
pub fn resident_bytes(weights: &Weights, part: &Part) -> u64 {
    weights.part_extents(part).into_iter().filter_map(|extent| weights.bytes(extent)).map(resident).sum()
}

/// The system's page, in bytes: 4096 on most machines, 16384 on some.
#[cfg(target_os = "linux")]
pub fn page_bytes() -> usize {
    static PAGE: std::sync::OnceLock<usize> = std::sync::OnceLock::new();
    *PAGE.get_or_init(|| {
        // SAFETY: the call takes a number and touches no memory of this process.
        let bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
        usize::try_from(bytes).ok().filter(|bytes| bytes.is_power_of_two()).unwrap_or(4096)
    })
}

/// Bytes of a mapped region that are in memory.
#[cfg(target_os = "linux")]
pub fn resident(region: &[u8]) -> u64 {
    let page = page_bytes();
    let begin = region.as_ptr() as usize & !(page - 1);
    let length = region.as_ptr() as usize + region.len() - begin;
    let mut pages = vec![0u8; length.div_ceil(page)];
    // SAFETY: the range lies in a live mapping, whose start is page-aligned, and the vector has a byte for each
    // of its pages.
    let result = unsafe { libc::mincore(begin as *mut libc::c_void, length, pages.as_mut_ptr()) };
    if result != 0 {
        return 0;
    }
    let absent = pages.iter().filter(|&&state| state & 1 == 0).count() * page;
    region.len().saturating_sub(absent) as u64
}

/// Bytes of a mapped region that are in memory.
#[cfg(not(target_os = "linux"))]
pub fn resident(_region: &[u8]) -> u64 {
    0
}
