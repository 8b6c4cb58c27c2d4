//! Memory mappings: buffers that behave like a model's weights, mapped files, and the state of their pages.
//!
//! The weights of a model are in mapped files with pages of 4 KiB. The buffer in place of the weights is an anonymous
//! mapping without huge pages, so that address translation costs the same. All its bytes have one value. As
//! f32, f16 and bf16, and as scales of every block format, these bytes are normal numbers, because subnormal numbers
//! would slow down the arithmetic.

use std::fs::File;
use std::io;
#[cfg(any(target_os = "android", target_os = "linux"))]
use std::num::NonZeroU64;
use std::ops::{Deref, Range};

use memmap2::{Mmap, MmapMut, MmapOptions};

use super::{MeasurementError, memory};
use crate::units::Bytes;

const FILL: u8 = 0x1c;

/// Divisor of the available memory that gives the maximum size of a buffer.
const MEMORY_DIVISOR: u64 = 2;

/// Page size in bytes. On systems with larger pages, this smaller value does no harm.
pub(super) const PAGE_SIZE: usize = 4096;

/// A buffer that is used in place of a model's weights.
#[derive(Debug)]
pub struct WeightBuffer {
    map: MmapMut,
}

impl WeightBuffer {
    /// Allocates a buffer of `wanted` bytes, but at most half of the available memory and at least 1 MiB.
    pub fn new(wanted: Bytes) -> Result<WeightBuffer, MeasurementError> {
        let bytes = Bytes(wanted.0.min(memory::available_memory().0 / MEMORY_DIVISOR).max(1 << 20));
        let failed = |source| MeasurementError::Memory { bytes, source };
        let mut map = MmapMut::map_anon(bytes.0 as usize).map_err(failed)?;
        #[cfg(target_os = "linux")]
        // The call fails only on kernels without huge pages, where it is not needed.
        let _ = map.advise(memmap2::Advice::NoHugePage);
        map.fill(FILL);
        Ok(WeightBuffer { map })
    }

    pub fn as_bytes(&self) -> &[u8] {
        &self.map
    }

    pub fn size(&self) -> Bytes {
        Bytes(self.map.len() as u64)
    }
}

/// A read-only, shared mapping of a file, or of a part of it.
///
/// Its bytes must only be used as numbers, for which any value is valid, because another program may change the file.
/// If another program truncates the file, reading the lost pages ends the process with SIGBUS, unless the process
/// handles this signal.
#[derive(Debug)]
pub struct FileMapping(Mmap);

impl FileMapping {
    /// Maps a whole file.
    pub fn new(file: &File) -> io::Result<FileMapping> {
        FileMapping::with_options(&MmapOptions::new(), file)
    }

    /// Maps a range of a file.
    pub(super) fn of_range(file: &File, range: &Range<u64>) -> io::Result<FileMapping> {
        let mut options = MmapOptions::new();
        FileMapping::with_options(options.offset(range.start).len((range.end - range.start) as usize), file)
    }

    fn with_options(options: &MmapOptions, file: &File) -> io::Result<FileMapping> {
        // SAFETY: the mapping is read-only, and its bytes are used only as numbers, for which any value is valid. If
        // the file becomes shorter, the system sends a signal and does not return wrong bytes.
        unsafe { options.map(file) }.map(FileMapping)
    }

    /// Unmaps the pages of a range of the mapping, in bytes, widened to whole pages. They stay in the page cache, and the
    /// next access maps them again. Does nothing on systems other than Linux.
    pub fn unmap_pages(&self, range: Range<usize>) -> io::Result<()> {
        let (start, length) = (range.start, range.len());
        if self.get(range).is_none() {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        #[cfg(any(target_os = "android", target_os = "linux"))]
        {
            // SAFETY: the range is inside the mapping, which is shared, read-only and of a file, so the next access
            // reads the bytes of the file again.
            unsafe { self.0.unchecked_advise_range(memmap2::UncheckedAdvice::DontNeed, start, length) }
        }
        #[cfg(not(any(target_os = "android", target_os = "linux")))]
        {
            let _ = (start, length);
            Ok(())
        }
    }
}

impl Deref for FileMapping {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.0
    }
}

/// Returns the page size of the system in bytes: 4096 on most machines, 16384 on some.
pub fn page_bytes() -> usize {
    #[cfg(unix)]
    {
        rustix::param::page_size()
    }
    #[cfg(not(unix))]
    {
        PAGE_SIZE
    }
}

/// Returns for each page of a memory-mapped region, widened to whole pages, whether it is in memory. On systems other
/// than Linux, all pages count as absent.
pub fn page_residency(region: &[u8]) -> io::Result<Vec<bool>> {
    let (begin, length) = whole_pages(region);
    let count = length.div_ceil(page_bytes());
    #[cfg(any(target_os = "android", target_os = "linux"))]
    {
        let mut pages = vec![0u8; count];
        // SAFETY: the range starts at a page, and `pages` has a byte for each of its pages. The call reads none of the
        // memory of the range.
        let result = unsafe { libc::mincore(begin.cast_mut().cast(), length, pages.as_mut_ptr()) };
        if result != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(pages.into_iter().map(|page| page & 1 == 1).collect())
    }
    #[cfg(not(any(target_os = "android", target_os = "linux")))]
    {
        let _ = begin;
        Ok(vec![false; count])
    }
}

/// Advice for the kernel on how a memory-mapped region will be used. None of it changes the contents of the region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Advice {
    /// Start to read the pages of the region, at most one read-ahead window, without waiting.
    WillNeed,
    /// Read the pages of the region and map them. Kernels before 5.14 do not have this advice; then pages are read when
    /// they are touched.
    PopulateRead,
    /// Expect random access: a page fault then reads one page, without read-ahead.
    Random,
    /// Expect normal access: undoes [`Advice::Random`].
    Normal,
    /// Unmap the pages of the region and drop them from the page cache. This fails for files of other owners.
    PageOut,
}

/// Advises the kernel about a memory-mapped region, widened to whole pages. Fails on systems other than Linux.
pub fn advise(region: &[u8], advice: Advice) -> io::Result<()> {
    #[cfg(any(target_os = "android", target_os = "linux"))]
    {
        use rustix::mm;
        let advice = match advice {
            Advice::WillNeed => mm::Advice::WillNeed,
            Advice::PopulateRead => mm::Advice::LinuxPopulateRead,
            Advice::Random => mm::Advice::Random,
            Advice::Normal => mm::Advice::Normal,
            Advice::PageOut => mm::Advice::LinuxPageOut,
        };
        let (begin, length) = whole_pages(region);
        // SAFETY: the range starts at a page, in the same mapping as the region, and no advice changes the contents.
        Ok(unsafe { mm::madvise(begin.cast_mut().cast(), length, advice) }?)
    }
    #[cfg(not(any(target_os = "android", target_os = "linux")))]
    {
        let _ = (region, advice);
        Err(io::ErrorKind::Unsupported.into())
    }
}

/// Gives the whole pages of a region of the heap back to the system, which provides zeroed or old pages at the next
/// write. The contents of the region are undefined afterwards, but initialised.
pub fn release_pages(region: &mut [u8]) {
    #[cfg(any(target_os = "android", target_os = "linux"))]
    {
        use rustix::mm;
        let start = region.as_ptr() as usize;
        let (begin, end) =
            (start.next_multiple_of(page_bytes()), (start + region.len()) & !(page_bytes() - 1));
        if begin < end {
            let pages = region.as_mut_ptr().wrapping_add(begin - start);
            // SAFETY: the pages belong to the region, to which this function has the only reference. Afterwards they
            // read as zeroes (private anonymous memory), which is a valid value of every byte.
            let _ = unsafe { mm::madvise(pages.cast(), end - begin, mm::Advice::LinuxDontNeed) };
        }
    }
    #[cfg(not(any(target_os = "android", target_os = "linux")))]
    let _ = region;
}

/// Asks the system to provide memory for a region page by page, not as huge pages.
pub fn keep_small_pages(region: &[u8]) {
    #[cfg(any(target_os = "android", target_os = "linux"))]
    {
        use rustix::mm;
        let (begin, length) = whole_pages(region);
        // SAFETY: the advice does not change the contents. Systems without huge pages do not know it.
        let _ = unsafe { mm::madvise(begin.cast_mut().cast(), length, mm::Advice::LinuxNoHugepage) };
    }
    #[cfg(not(any(target_os = "android", target_os = "linux")))]
    let _ = region;
}

/// Returns the start of the page in which a region starts, and the length from there to the end of the region.
fn whole_pages(region: &[u8]) -> (*const u8, usize) {
    let before = region.as_ptr() as usize & (page_bytes() - 1);
    (region.as_ptr().wrapping_sub(before), before + region.len())
}

/// Asks the kernel to drop the clean pages of a file range from the page cache. Mapped pages remain: unmap them first.
pub fn drop_cached_pages(file: &File, range: &Range<u64>) {
    #[cfg(any(target_os = "android", target_os = "linux"))]
    if let Some(length) = NonZeroU64::new(range.end - range.start) {
        // The advice is a hint; a file that is not on a disk keeps its pages.
        let _ = rustix::fs::fadvise(file, range.start, Some(length), rustix::fs::Advice::DontNeed);
    }
    #[cfg(not(any(target_os = "android", target_os = "linux")))]
    let _ = (file, range);
}

/// Tells the kernel that reads of an open file are random, so that the kernel reads nothing ahead.
pub(super) fn advise_random(file: &File) {
    #[cfg(any(target_os = "android", target_os = "linux"))]
    let _ = rustix::fs::fadvise(file, 0, None, rustix::fs::Advice::Random);
    #[cfg(not(any(target_os = "android", target_os = "linux")))]
    let _ = file;
}

/// Returns the fraction (0 to 1) of a file range that is in the page cache.
pub(super) fn cached_fraction(file: &File, range: &Range<u64>) -> io::Result<f64> {
    let pages = page_residency(&FileMapping::of_range(file, range)?)?;
    let count = pages.iter().filter(|&&is_resident| is_resident).count();
    Ok(count as f64 / pages.len().max(1) as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffer_contains_normal_numbers() {
        let buffer = WeightBuffer::new(Bytes::from_mib(2)).unwrap();
        assert_eq!(buffer.size(), Bytes::from_mib(2));
        let four: [u8; 4] = buffer.as_bytes()[..4].try_into().unwrap();
        assert!(f32::from_le_bytes(four).is_normal());
        assert!(half::f16::from_le_bytes([FILL, FILL]).is_normal());
    }

    #[cfg(any(target_os = "android", target_os = "linux"))]
    #[test]
    fn synced_file_can_be_dropped_from_cache() {
        let mut file = tempfile::tempfile_in(".").unwrap();
        io::Write::write_all(&mut file, &vec![1; 64 << 10]).unwrap();
        file.sync_all().unwrap();
        let all = 0..64 << 10;
        assert!(cached_fraction(&file, &all).unwrap() > 0.9);
        drop_cached_pages(&file, &all);
        // File systems in memory, such as tmpfs, keep all pages; those on a disk keep none.
        let left = cached_fraction(&file, &all).unwrap();
        assert!(left == 0.0 || left == 1.0, "{left}");
    }
}
