//! How much of a device's weights is in memory?
//!
//! `mincore` tells for each page of a mapping whether it is in the page cache. On Linux since 5.0 only the
//! file's owner gets a true answer; others see every page as present.
//!
//! Elsewhere than Linux nothing is known, and 0 is told.

use hearth_schema::schedule::Part;

use crate::prefetch::extents;
use crate::weights::Weights;

/// Bytes of a part's weights that are in memory, in whole pages.
pub fn resident_bytes(weights: &Weights, part: &Part) -> u64 {
    extents(weights, part).into_iter().filter_map(|extent| weights.bytes(extent)).map(resident).sum()
}

#[cfg(target_os = "linux")]
fn resident(region: &[u8]) -> u64 {
    const PAGE: usize = 4096;
    let begin = region.as_ptr() as usize & !(PAGE - 1);
    let length = region.as_ptr() as usize + region.len() - begin;
    let mut pages = vec![0u8; length.div_ceil(PAGE)];
    // SAFETY: the range lies in a live mapping, whose start is page-aligned, and the vector has a byte for each
    // of its pages.
    let result = unsafe { libc::mincore(begin as *mut libc::c_void, length, pages.as_mut_ptr()) };
    if result != 0 {
        return 0;
    }
    (pages.iter().filter(|&&page| page & 1 == 1).count() * PAGE).min(region.len()) as u64
}

#[cfg(not(target_os = "linux"))]
fn resident(_region: &[u8]) -> u64 {
    0
}
