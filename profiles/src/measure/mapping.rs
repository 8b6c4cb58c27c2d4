//! Memory mappings: buffers that behave like a model's weights, mapped files, and pages in the page cache.
//!
//! The weights of a model are in mapped files with pages of 4 KiB. The buffer in place of the weights is an anonymous
//! mapping without huge pages, so that address translation costs the same. Every byte of the buffer is [`FILL`]. As
//! f32, f16 and bf16, and as scales of every block format, these bytes are normal numbers, because subnormal numbers
//! would slow down the arithmetic.

use std::fs::File;
use std::io;
use std::ops::Range;

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

/// Maps a file range for reading, as the executor does: shared, and without advice.
pub(super) fn map_file_range(file: &File, range: &Range<u64>) -> io::Result<Mmap> {
    let mut options = MmapOptions::new();
    options.offset(range.start).len((range.end - range.start) as usize);
    // SAFETY: the bytes are only read as numbers, for which any value is valid. Nothing may truncate the file in the
    // meantime; if something does, the system ends the process and does not return wrong bytes.
    unsafe { options.map(file) }
}

/// Asks the kernel to drop the clean pages of a file range from the page cache. Mapped pages remain: unmap them first.
pub fn drop_cached_pages(file: &File, range: &Range<u64>) {
    #[cfg(any(target_os = "android", target_os = "linux"))]
    {
        use std::os::fd::AsRawFd;
        let (offset, length) = (range.start as libc::off_t, (range.end - range.start) as libc::off_t);
        // SAFETY: the call gets numbers and an open file, and accesses no memory of this process.
        unsafe { libc::posix_fadvise(file.as_raw_fd(), offset, length, libc::POSIX_FADV_DONTNEED) };
    }
    #[cfg(not(any(target_os = "android", target_os = "linux")))]
    let _ = (file, range);
}

/// Tells the kernel that reads of an open file are random, so that the kernel reads nothing ahead.
pub(super) fn advise_random(file: &File) {
    #[cfg(any(target_os = "android", target_os = "linux"))]
    {
        use std::os::fd::AsRawFd;
        // SAFETY: as in `drop_cached_pages`.
        unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_RANDOM) };
    }
    #[cfg(not(any(target_os = "android", target_os = "linux")))]
    let _ = file;
}

/// Returns the fraction (0 to 1) of a file range that is in the page cache.
pub(super) fn cached_fraction(file: &File, range: &Range<u64>) -> io::Result<f64> {
    let map = map_file_range(file, range)?;
    #[cfg(any(target_os = "android", target_os = "linux"))]
    {
        // SAFETY: the call gets a number and accesses no memory of this process.
        let page =
            usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(PAGE_SIZE).max(PAGE_SIZE);
        let mut pages = vec![0u8; map.len().div_ceil(page)];
        // SAFETY: the mapping is live, and `pages` has a byte for each of its pages, of 16 KiB on some ARM systems.
        let failed = unsafe { libc::mincore(map.as_ptr() as *mut _, map.len(), pages.as_mut_ptr()) } != 0;
        if failed {
            return Err(io::Error::last_os_error());
        }
        let count = pages.iter().filter(|&&page| page & 1 == 1).count();
        Ok(count as f64 / pages.len().max(1) as f64)
    }
    #[cfg(not(any(target_os = "android", target_os = "linux")))]
    {
        drop(map);
        Ok(0.0)
    }
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
