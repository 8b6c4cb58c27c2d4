//! Measures reads from a file with a cold page cache.
//!
//! A [`ColdFile`] is read in windows of at most a quarter of the available memory. Each window is dropped from the page
//! cache after it was read, so that a small memory does not fill up and the next sample reads from disk again. Only the
//! reads are timed.
//!
//! Each sample continues where the previous sample stopped, or at the start of the file if its end was reached, because
//! the system has already read ahead the beginning of the next sample. Before the first sample, half a sample is read
//! and not counted, which also uses up the burst of a throttle's token bucket.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use super::MeasurementError;
use super::direct::{DirectFile, PageBuffer};
#[cfg(target_os = "linux")]
use super::mapping::Advice;
use super::mapping::{self, FileMapping, PAGE_SIZE};
use super::memory;
#[cfg(target_os = "linux")]
use super::sampling::thread_cpu_time;
use super::sampling::{MeasurementOptions, Samples, monotonic_seconds};
use crate::units::Bytes;

const READ_BYTES: usize = 1 << 20;

/// Size in bytes of the chunk that a thread reads at a time: the size of the executor's chunk of weight rows.
const CHUNK_BYTES: u64 = 32 << 10;

/// Size in bytes of the range of one `MADV_POPULATE_READ` call, as in the executor.
const POPULATE_BYTES: usize = 2 << 20;

/// Size in bytes of a piece of weights that is streamed as a unit, as in the executor.
const PIECE_BYTES: usize = 1 << 20;
/// Maximum total size in bytes of the pieces that are requested ahead of use, as in the executor.
const MAX_PREFETCHED_BYTES: usize = 4 << 20;

/// Maximum fraction of the pages of a file range that are in the page cache when the range counts as dropped.
const MAX_RESIDENT: f64 = 0.1;

/// A file that is read with a cold page cache.
#[derive(Debug)]
pub(super) struct ColdFile {
    path: PathBuf,
    file: File,
    /// Another file descriptor of the same file, without read-ahead, for random reads.
    random: File,
    /// Size of the file in bytes, rounded down to whole pages.
    length: u64,
    /// Maximum number of bytes that are read before their pages are dropped from the page cache.
    window: u64,
    /// Offset in the file at which the next read begins.
    position: u64,
}

impl ColdFile {
    /// Creates a cold file from two file descriptors of one file. Windows have at most `max_window` bytes.
    pub(super) fn new(path: &Path, files: [File; 2], length: u64, max_window: u64) -> ColdFile {
        let [file, random] = files;
        mapping::advise_random(&random);
        let page = PAGE_SIZE as u64;
        let window = max_window.min(memory::available_memory().0 / 4).min(length).max(page) / page * page;
        ColdFile { path: path.to_owned(), file, random, length: length / page * page, window, position: 0 }
    }

    /// Returns whether the kernel drops the file's pages from the page cache; a mapping by another process prevents
    /// this.
    pub(super) fn can_drop_cache(&mut self) -> Result<bool, MeasurementError> {
        let window = self.window();
        mapping::drop_cached_pages(&self.file, &window);
        let cached = mapping::cached_fraction(&self.file, &window);
        Ok(cached.map_err(MeasurementError::for_file("count cached pages of", &self.path))? <= MAX_RESIDENT)
    }

    fn window(&self) -> Range<u64> {
        self.position..(self.position + self.window).min(self.length)
    }

    /// Measures the bytes per second that `read` reads. `read` receives a file, a file range that is not in the page
    /// cache and the time at which to stop, and returns the number of bytes that it read from the start of the range.
    pub(super) fn read_rate(
        &mut self,
        options: &MeasurementOptions,
        mut read: impl FnMut(&File, Range<u64>, f64) -> io::Result<u64>,
    ) -> Result<Samples, MeasurementError> {
        mapping::drop_cached_pages(&self.file, &(0..self.length));
        self.sample(options.disk_sample_time.0 / 2.0, &mut read)?;
        self.samples(options, |file| file.sample(options.disk_sample_time.0, &mut read))
    }

    /// Takes samples until the sample count or the time limit of `options` is reached.
    fn samples(
        &mut self,
        options: &MeasurementOptions,
        mut sample: impl FnMut(&mut Self) -> Result<f64, MeasurementError>,
    ) -> Result<Samples, MeasurementError> {
        let (begun, mut values) = (monotonic_seconds(), Vec::with_capacity(options.sample_count));
        while values.len() < options.sample_count
            && (values.is_empty() || monotonic_seconds() - begun < options.time_limit.0)
        {
            values.push(sample(self)?);
        }
        Ok(Samples::new(values))
    }

    /// Reads windows that are not in the page cache for `seconds` seconds, and returns the bytes per second.
    fn sample(
        &mut self,
        seconds: f64,
        read: &mut impl FnMut(&File, Range<u64>, f64) -> io::Result<u64>,
    ) -> Result<f64, MeasurementError> {
        let (mut bytes, mut time) = (0, 0.0);
        loop {
            let window = self.window();
            let begun = monotonic_seconds();
            let done = read(&self.file, window.clone(), begun + seconds - time);
            time += monotonic_seconds() - begun;
            let done = done.map_err(MeasurementError::for_file("read", &self.path))?.max(PAGE_SIZE as u64);
            bytes += done;
            let end = window.end.min(window.start + done / PAGE_SIZE as u64 * PAGE_SIZE as u64);
            mapping::drop_cached_pages(&self.file, &(window.start..end));
            self.position = if end >= self.length { 0 } else { end };
            if time >= seconds {
                return Ok(bytes as f64 / time);
            }
        }
    }

    /// Measures how many bytes a thread streams per second of its CPU time. Waiting for the disk does not count.
    pub(super) fn stream_rate(&mut self, options: &MeasurementOptions) -> Result<Samples, MeasurementError> {
        mapping::drop_cached_pages(&self.file, &(0..self.length));
        let samples = self.samples(options, |cold| {
            let (mut bytes, mut busy) = (0, 0.0);
            let until = monotonic_seconds() + options.disk_sample_time.0;
            while bytes == 0 || monotonic_seconds() < until {
                let window = cold.window();
                let streamed = read_by_streaming(&cold.file, &window, until);
                let (done, seconds) = streamed.map_err(MeasurementError::for_file("stream", &cold.path))?;
                mapping::drop_cached_pages(&cold.file, &window);
                cold.position = if window.start + done >= cold.length { 0 } else { window.start + done };
                bytes += done;
                busy += seconds;
            }
            Ok(bytes as f64 / busy.max(1e-9))
        });
        mapping::drop_cached_pages(&self.file, &(0..self.length));
        samples
    }

    /// Measures the time in seconds of reads of 4 KiB from disk, at positions all over the file.
    pub(super) fn random_read_times(
        &mut self,
        options: &MeasurementOptions,
    ) -> Result<Samples, MeasurementError> {
        let mut buffer = [0; PAGE_SIZE];
        self.scattered_times(options, PAGE_SIZE as u64, |cold, range| {
            read_at(&cold.random, range.start, &mut buffer)
        })
    }

    /// Measures the time in seconds of reading pieces of [`PIECE_BYTES`] past the page cache, as the executor reads
    /// experts, at positions all over the file. Returns the size of the pieces and the times.
    pub(super) fn random_piece_times(
        &mut self,
        options: &MeasurementOptions,
    ) -> Result<(Bytes, Samples), MeasurementError> {
        let bytes = (PIECE_BYTES as u64).min(self.length);
        let failed = MeasurementError::for_file("read", &self.path);
        let opened = DirectFile::new(&self.file)
            .and_then(|file| Ok((file, PageBuffer::populated(PageBuffer::size_for_range(bytes as usize))?)));
        let (file, mut buffer) = opened.map_err(failed)?;
        if !file.is_direct() {
            let failed = MeasurementError::for_file("read", &self.path);
            return Err(failed(io::ErrorKind::Unsupported.into()));
        }
        let times = self.scattered_times(options, bytes, |_, range| file.read(&range, &mut buffer))?;
        Ok((Bytes(bytes), times))
    }

    /// Measures the time in seconds that `read` takes for ranges of `bytes` bytes, which are not in the page cache, at
    /// positions all over the file.
    fn scattered_times(
        &mut self,
        options: &MeasurementOptions,
        bytes: u64,
        mut read: impl FnMut(&Self, Range<u64>) -> io::Result<()>,
    ) -> Result<Samples, MeasurementError> {
        mapping::drop_cached_pages(&self.file, &(0..self.length));
        let ranges = self.length / bytes;
        let mut times = Vec::new();
        let (begun, mut index) = (monotonic_seconds(), 0u64);
        // A stride near the golden ratio reads distant ranges, each once.
        let stride = ((ranges as f64 * 0.618) as u64 | 1).max(1);
        while (times.len() as u64) < ranges.min(4000)
            && (times.is_empty() || monotonic_seconds() - begun < options.time_limit.0)
        {
            index = (index + stride) % ranges;
            let start = monotonic_seconds();
            read(self, index * bytes..(index + 1) * bytes)
                .map_err(MeasurementError::for_file("read", &self.path))?;
            times.push(monotonic_seconds() - start);
            if monotonic_seconds() - begun >= options.disk_sample_time.0 * options.sample_count as f64 / 2.0 {
                break;
            }
        }
        mapping::drop_cached_pages(&self.file, &(0..self.length));
        Ok(Samples::new(times))
    }
}

/// Reads a file range with read calls from front to back, until [`monotonic_seconds`] is `until`. Returns the number of
/// bytes read.
pub(super) fn read_sequentially(file: &File, range: Range<u64>, until: f64) -> io::Result<u64> {
    let mut buffer = vec![0; READ_BYTES];
    let mut at = range.start;
    while at < range.end {
        let count = buffer.len().min((range.end - at) as usize);
        read_at(file, at, &mut buffer[..count])?;
        at += count as u64;
        if monotonic_seconds() >= until {
            break;
        }
    }
    Ok(at - range.start)
}

/// Touches the mapped pages of a file range from front to back with several threads that share a counter, as the
/// executor's threads do with the rows of a matrix. Returns the number of bytes read until [`monotonic_seconds`] is
/// `until`.
pub(super) fn read_by_faults(threads: usize, file: &File, range: &Range<u64>, until: f64) -> io::Result<u64> {
    let map = FileMapping::of_range(file, range)?;
    let next = AtomicU64::new(0);
    let touch = || {
        let mut done = 0;
        loop {
            let start = next.fetch_add(CHUNK_BYTES, Ordering::Relaxed);
            if start >= map.len() as u64 || monotonic_seconds() >= until {
                return done;
            }
            let chunk = &map[start as usize..map.len().min((start + CHUNK_BYTES) as usize)];
            for page in chunk.chunks(PAGE_SIZE) {
                std::hint::black_box(page[0]);
            }
            done += chunk.len() as u64;
        }
    };
    Ok(thread::scope(|scope| {
        let others: Vec<_> = (1..threads).map(|_| scope.spawn(touch)).collect();
        let own = touch();
        own + others.into_iter().map(|other| other.join().unwrap_or(0)).sum::<u64>()
    }))
}

/// Populates the mapping of a file range piece by piece on one thread, as the executor's prefetcher does. Returns the
/// number of bytes read until [`monotonic_seconds`] is `until`.
#[cfg(target_os = "linux")]
pub(super) fn read_by_populating(file: &File, range: &Range<u64>, until: f64) -> io::Result<u64> {
    let map = FileMapping::of_range(file, range)?;
    let mut at = 0;
    while at < map.len() {
        let count = POPULATE_BYTES.min(map.len() - at);
        mapping::advise(&map[at..at + count], Advice::PopulateRead)?;
        at += count;
        if monotonic_seconds() >= until {
            break;
        }
    }
    Ok(at as u64)
}

/// Returns an error: only Linux has a call that populates a mapping.
#[cfg(not(target_os = "linux"))]
pub(super) fn read_by_populating(_: &File, _: &Range<u64>, _: f64) -> io::Result<u64> {
    let _ = POPULATE_BYTES;
    Err(io::ErrorKind::Unsupported.into())
}

/// Streams a file range on one thread until [`monotonic_seconds`] is `until`, as the executor does. Returns the number
/// of bytes read and the CPU time of the thread in seconds.
#[cfg(target_os = "linux")]
fn read_by_streaming(file: &File, range: &Range<u64>, until: f64) -> io::Result<(u64, f64)> {
    let map = FileMapping::of_range(file, range)?;
    let piece = |at: usize| at..map.len().min(at + PIECE_BYTES);
    let begun = thread_cpu_time()?;
    let (mut requested, mut done) = (0, 0);
    while done < map.len() {
        while requested < map.len() && requested - done < MAX_PREFETCHED_BYTES {
            let own = piece(requested);
            mapping::advise(&map[own.clone()], Advice::WillNeed)?;
            requested = own.end;
        }
        let own = piece(done);
        mapping::advise(&map[own.clone()], Advice::PopulateRead)?;
        map.unmap_pages(own.clone())?;
        mapping::drop_cached_pages(file, &(range.start + own.start as u64..range.start + own.end as u64));
        done = own.end;
        if monotonic_seconds() >= until {
            break;
        }
    }
    Ok((done as u64, thread_cpu_time()?.saturating_sub(begun).as_secs_f64()))
}

/// Returns an error: only Linux can discard single pages of a mapping.
#[cfg(not(target_os = "linux"))]
fn read_by_streaming(_: &File, _: &Range<u64>, _: f64) -> io::Result<(u64, f64)> {
    let _ = (PIECE_BYTES, MAX_PREFETCHED_BYTES);
    Err(io::ErrorKind::Unsupported.into())
}

#[cfg(unix)]
fn read_at(file: &File, at: u64, buffer: &mut [u8]) -> io::Result<()> {
    std::os::unix::fs::FileExt::read_exact_at(file, buffer, at)
}

#[cfg(not(unix))]
fn read_at(mut file: &File, at: u64, buffer: &mut [u8]) -> io::Result<()> {
    use std::io::{Read, Seek, SeekFrom};
    file.seek(SeekFrom::Start(at))?;
    file.read_exact(buffer)
}
