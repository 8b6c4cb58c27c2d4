//! Direct reads: parts of a file are read into buffers, past the page cache.
//!
//! Pages of the page cache are allocated, mapped and freed again for each read. With `O_DIRECT`, the disk writes into a
//! buffer that is used again and again. It transfers whole pages, so a range is widened to them. File systems without it
//! are read through the page cache, whose pages are dropped afterwards.

use std::fs::File;
use std::io;
use std::ops::{Deref, Range};

use memmap2::{MmapMut, MmapOptions};

use super::mapping::{advise_random, drop_cached_pages, page_bytes};

/// Whole pages of memory, and the range of a file in them that was read last.
#[derive(Debug)]
pub struct PageBuffer {
    pages: MmapMut,
    /// The place of the file's range in the pages.
    filled: Range<usize>,
}

impl PageBuffer {
    /// Allocates a buffer of `size` bytes, whose pages the system provides when they are used first.
    pub fn new(size: usize) -> io::Result<Self> {
        Ok(Self { pages: MmapMut::map_anon(size)?, filled: 0..0 })
    }

    /// Allocates a buffer of `size` bytes, whose pages the system provides now. Systems other than Linux provide them when
    /// they are used first.
    pub fn populated(size: usize) -> io::Result<Self> {
        Ok(Self { pages: MmapOptions::new().len(size).populate().map_anon()?, filled: 0..0 })
    }

    /// Returns the size of a buffer for any range of `length` bytes, which may begin and end inside of pages.
    pub fn size_for_range(length: usize) -> usize {
        length.next_multiple_of(page_bytes()) + page_bytes()
    }

    /// Returns the size of the buffer in bytes.
    pub fn size(&self) -> usize {
        self.pages.len()
    }
}

impl Deref for PageBuffer {
    type Target = [u8];

    /// Returns the range that was read last.
    fn deref(&self) -> &[u8] {
        &self.pages[self.filled.clone()]
    }
}

/// A file whose parts are read past the page cache.
#[derive(Debug)]
pub struct DirectFile {
    /// `None` if the file system cannot do it.
    direct: Option<File>,
    cached: File,
}

impl DirectFile {
    pub fn new(file: &File) -> io::Result<Self> {
        let direct = reopen(file);
        if direct.is_none() {
            // Without the advice, the system would also read what follows the range.
            advise_random(file);
        }
        Ok(Self { direct, cached: file.try_clone()? })
    }

    /// Returns whether the file is read past the page cache.
    pub fn is_direct(&self) -> bool {
        self.direct.is_some()
    }

    /// Reads a range of the file into a buffer that was made for its length.
    pub fn read(&self, range: &Range<u64>, buffer: &mut PageBuffer) -> io::Result<()> {
        let page = page_bytes() as u64;
        let pages = range.start / page * page..range.end.next_multiple_of(page);
        let skipped = (range.start - pages.start) as usize;
        let filled = skipped..skipped + (range.end - range.start) as usize;
        buffer.filled = 0..0;
        let bytes = buffer.pages.get_mut(..(pages.end - pages.start) as usize);
        let bytes = bytes.ok_or(io::ErrorKind::InvalidInput)?;
        let direct = self.direct.as_ref();
        let is_read = direct.is_some_and(|file| read_pages(file, pages.start, bytes, filled.end).is_ok());
        if !is_read {
            let result = read_pages(&self.cached, pages.start, bytes, filled.end);
            drop_cached_pages(&self.cached, &pages);
            result?;
        }
        buffer.filled = filled;
        Ok(())
    }
}

/// Opens the same file again, even if its path has another file now. Returns `None` if its file system cannot read past
/// the page cache.
#[cfg(any(target_os = "android", target_os = "linux"))]
fn reopen(file: &File) -> Option<File> {
    use std::os::fd::AsRawFd;

    use rustix::fs::{Mode, OFlags, open};
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::DIRECT;
    open(path, flags, Mode::empty()).ok().map(File::from)
}

#[cfg(not(any(target_os = "android", target_os = "linux")))]
fn reopen(_: &File) -> Option<File> {
    None
}

/// Fills a buffer from `offset` on, at least the first `needed` bytes: the last page of a file is shorter.
#[cfg(unix)]
fn read_pages(file: &File, offset: u64, buffer: &mut [u8], needed: usize) -> io::Result<()> {
    use std::os::unix::fs::FileExt;
    let mut filled = 0;
    while filled < needed {
        match file.read_at(&mut buffer[filled..], offset + filled as u64) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => filled += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

#[cfg(not(unix))]
fn read_pages(_: &File, _: u64, _: &mut [u8], _: usize) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}

#[cfg(test)]
#[cfg(unix)]
mod tests {
    use super::*;

    #[test]
    fn any_range_is_read() {
        let content: Vec<u8> = (0..100_000u32).map(|at| (at % 251) as u8).collect();
        // On a disk and, on most systems, in memory.
        for folder in [tempfile::tempdir_in("."), tempfile::tempdir()] {
            let folder = folder.expect("a folder");
            let path = folder.path().join("weights");
            std::fs::write(&path, &content).expect("written");
            let file = DirectFile::new(&File::open(&path).expect("a file")).expect("opened again");
            std::fs::remove_file(&path).expect("removed");
            let mut buffer = PageBuffer::new(PageBuffer::size_for_range(content.len())).expect("memory");
            for range in [0..1, 0..4096, 1..4097, 5000..70_000, 99_999..100_000, 0..100_000] {
                file.read(&(range.start as u64..range.end as u64), &mut buffer).expect("bytes");
                assert_eq!(buffer[..], content[range]);
            }
        }
    }

    #[test]
    fn range_beyond_the_file_or_the_buffer_is_an_error() {
        let length = 4 * page_bytes() as u64 + 10;
        let file = tempfile::tempfile_in(".").expect("a file");
        file.set_len(length).expect("longer");
        let file = DirectFile::new(&file).expect("opened again");
        let mut buffer = PageBuffer::populated(PageBuffer::size_for_range(1001)).expect("memory");
        file.read(&(length - 1001..length), &mut buffer).expect("bytes");
        assert_eq!(buffer.len(), 1001);
        let error = file.read(&(length - 1000..length + 1), &mut buffer).expect_err("beyond the file");
        assert_eq!((error.kind(), buffer.len()), (io::ErrorKind::UnexpectedEof, 0));
        let error = file.read(&(0..length), &mut buffer).expect_err("beyond the buffer");
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
    }
}
