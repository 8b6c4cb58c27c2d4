//! Timing of cold reads from a file.
//!
//! A [`ColdFile`] is read window after window; each is dropped from the page cache at once, so that a small memory
//! never fills and the next round is cold again. A window is at most a quarter of the available memory. Only the reads
//! are timed.
//!
//! Reading continues where it stopped, from sample to sample and from the end of the file to its start: what the system
//! read ahead at the end of one sample is the beginning of the next. Half a sample is read before the first without
//! counting, which also uses up the burst of a throttle's token bucket.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use super::MeasureError;
use super::mapping::{self, PAGE};
use super::memory;
use super::sampling::{Effort, Samples, now};

/// Bytes of one explicit read.
const READ: usize = 1 << 20;

/// Bytes that a compute thread takes at a time: the executor's chunk of weight rows.
const CHUNK: u64 = 32 << 10;

/// Bytes of one call of `MADV_POPULATE_READ`; the same as the executor's.
const POPULATE: usize = 2 << 20;

/// Bytes of a streamed piece, and of the pieces requested before the first is awaited; the same as the executor's.
const PIECE: usize = 1 << 20;
const PREFETCHED: usize = 4 << 20;

/// The largest share of a range in the page cache after it was dropped.
const COLD: f64 = 0.1;

#[derive(Debug)]
pub(super) struct ColdFile {
    path: PathBuf,
    file: File,
    /// Another file descriptor, for random reads.
    jumping: File,
    length: u64,
    window: u64,
    position: u64,
}

impl ColdFile {
    /// Takes two file descriptors of one file. `most` limits the bytes in memory at a time.
    pub(super) fn new(path: &Path, files: [File; 2], length: u64, most: u64) -> ColdFile {
        let [file, jumping] = files;
        mapping::expect_jumps(&jumping);
        let page = PAGE as u64;
        let window = most.min(memory::available().0 / 4).min(length).max(page) / page * page;
        ColdFile { path: path.to_owned(), file, jumping, length: length / page * page, window, position: 0 }
    }

    /// Whether its pages can be dropped, which another process with a mapping prevents.
    pub(super) fn can_be_cold(&mut self) -> Result<bool, MeasureError> {
        let window = self.window();
        mapping::drop_cache(&self.file, &window);
        let resident = mapping::resident(&self.file, &window);
        Ok(resident.map_err(MeasureError::file("look at the cached pages of", &self.path))? <= COLD)
    }

    /// The next range to read, at most.
    fn window(&self) -> Range<u64> {
        self.position..(self.position + self.window).min(self.length)
    }

    /// The bytes per second of `read`, which gets a file, a cold range of it and the time to stop at, and returns how
    /// many bytes from the start of the range it read.
    pub(super) fn rate(
        &mut self,
        effort: &Effort,
        mut read: impl FnMut(&File, Range<u64>, f64) -> io::Result<u64>,
    ) -> Result<Samples, MeasureError> {
        mapping::drop_cache(&self.file, &(0..self.length));
        self.sample(effort.disk_sample.0 / 2.0, &mut read)?;
        self.samples(effort, |file| file.sample(effort.disk_sample.0, &mut read))
    }

    /// Takes samples until there are enough, or the time limit is over.
    fn samples(
        &mut self,
        effort: &Effort,
        mut sample: impl FnMut(&mut Self) -> Result<f64, MeasureError>,
    ) -> Result<Samples, MeasureError> {
        let (begun, mut values) = (now(), Vec::with_capacity(effort.samples));
        while values.len() < effort.samples && (values.is_empty() || now() - begun < effort.limit.0) {
            values.push(sample(self)?);
        }
        Ok(Samples::new(values))
    }

    /// Reads cold windows for `seconds` of reading time.
    fn sample(
        &mut self,
        seconds: f64,
        read: &mut impl FnMut(&File, Range<u64>, f64) -> io::Result<u64>,
    ) -> Result<f64, MeasureError> {
        let (mut bytes, mut time) = (0, 0.0);
        loop {
            let window = self.window();
            let begun = now();
            let done = read(&self.file, window.clone(), begun + seconds - time);
            time += now() - begun;
            let done = done.map_err(MeasureError::file("read", &self.path))?.max(PAGE as u64);
            bytes += done;
            let end = window.end.min(window.start + done / PAGE as u64 * PAGE as u64);
            mapping::drop_cache(&self.file, &(window.start..end));
            self.position = if end >= self.length { 0 } else { end };
            if time >= seconds {
                return Ok(bytes as f64 / time);
            }
        }
    }

    /// Bytes for each second of processor time of a streaming thread. Waiting for the disk does not count.
    pub(super) fn turnover(&mut self, effort: &Effort) -> Result<Samples, MeasureError> {
        mapping::drop_cache(&self.file, &(0..self.length));
        let samples = self.samples(effort, |cold| {
            let (mut bytes, mut busy) = (0, 0.0);
            let until = now() + effort.disk_sample.0;
            while bytes == 0 || now() < until {
                let window = cold.window();
                let streamed = by_streaming(&cold.file, &window, until);
                let (done, seconds) = streamed.map_err(MeasureError::file("stream", &cold.path))?;
                mapping::drop_cache(&cold.file, &window);
                cold.position = if window.start + done >= cold.length { 0 } else { window.start + done };
                bytes += done;
                busy += seconds;
            }
            Ok(bytes as f64 / busy.max(1e-9))
        });
        mapping::drop_cache(&self.file, &(0..self.length));
        samples
    }

    /// Seconds of single cold reads of 4 KiB all over the file.
    pub(super) fn jumps(&mut self, effort: &Effort) -> Result<Samples, MeasureError> {
        mapping::drop_cache(&self.file, &(0..self.length));
        let pages = self.length / PAGE as u64;
        let mut times = Vec::new();
        let (begun, mut page) = (now(), 0u64);
        let mut buffer = [0; PAGE];
        // A stride near the golden ratio visits distant pages, each once.
        let stride = ((pages as f64 * 0.618) as u64 | 1).max(1);
        while (times.len() as u64) < pages.min(4000) && (times.is_empty() || now() - begun < effort.limit.0) {
            page = (page + stride) % pages;
            let start = now();
            read_at(&self.jumping, page * PAGE as u64, &mut buffer)
                .map_err(MeasureError::file("read", &self.path))?;
            times.push(now() - start);
            if now() - begun >= effort.disk_sample.0 * effort.samples as f64 / 2.0 {
                break;
            }
        }
        mapping::drop_cache(&self.file, &(0..self.length));
        Ok(Samples::new(times))
    }
}

/// Reads explicitly, from front to back.
pub(super) fn sequentially(file: &File, range: Range<u64>, until: f64) -> io::Result<u64> {
    let mut buffer = vec![0; READ];
    let mut at = range.start;
    while at < range.end {
        let count = buffer.len().min((range.end - at) as usize);
        read_at(file, at, &mut buffer[..count])?;
        at += count as u64;
        if now() >= until {
            break;
        }
    }
    Ok(at - range.start)
}

/// Touches every page of a mapping from front to back with several threads that share a counter, as the executor's
/// threads do with the rows of a matrix.
pub(super) fn by_faults(threads: usize, file: &File, range: &Range<u64>, until: f64) -> io::Result<u64> {
    let map = mapping::map(file, range)?;
    let next = AtomicU64::new(0);
    let touch = || {
        let mut done = 0;
        loop {
            let start = next.fetch_add(CHUNK, Ordering::Relaxed);
            if start >= map.len() as u64 || now() >= until {
                return done;
            }
            let chunk = &map[start as usize..map.len().min((start + CHUNK) as usize)];
            for page in chunk.chunks(PAGE) {
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

/// Populates a mapping piece by piece on one thread, as the executor's prefetcher does.
#[cfg(target_os = "linux")]
pub(super) fn by_populating(file: &File, range: &Range<u64>, until: f64) -> io::Result<u64> {
    let map = mapping::map(file, range)?;
    let mut at = 0;
    while at < map.len() {
        let count = POPULATE.min(map.len() - at);
        map.advise_range(memmap2::Advice::PopulateRead, at, count)?;
        at += count;
        if now() >= until {
            break;
        }
    }
    Ok(at as u64)
}

/// Does nothing: other systems have no such call.
#[cfg(not(target_os = "linux"))]
pub(super) fn by_populating(_: &File, _: &Range<u64>, _: f64) -> io::Result<u64> {
    let _ = POPULATE;
    Err(io::ErrorKind::Unsupported.into())
}

/// Streams a part of a file on one thread, as the executor does. Returns the bytes, and the thread's processor time.
#[cfg(target_os = "linux")]
fn by_streaming(file: &File, range: &Range<u64>, until: f64) -> io::Result<(u64, f64)> {
    let map = mapping::map(file, range)?;
    let piece = |at: usize| at..map.len().min(at + PIECE);
    let begun = thread_seconds()?;
    let (mut asked, mut done) = (0, 0);
    while done < map.len() {
        while asked < map.len() && asked - done < PREFETCHED {
            let own = piece(asked);
            map.advise_range(memmap2::Advice::WillNeed, own.start, own.len())?;
            asked = own.end;
        }
        let own = piece(done);
        map.advise_range(memmap2::Advice::PopulateRead, own.start, own.len())?;
        // SAFETY: the mapping is of a file, read-only and shared: what is unmapped comes back from the file.
        unsafe { map.unchecked_advise_range(memmap2::UncheckedAdvice::DontNeed, own.start, own.len()) }?;
        mapping::drop_cache(file, &(range.start + own.start as u64..range.start + own.end as u64));
        done = own.end;
        if now() >= until {
            break;
        }
    }
    Ok((done as u64, thread_seconds()? - begun))
}

/// Other systems cannot discard single pages.
#[cfg(not(target_os = "linux"))]
fn by_streaming(_: &File, _: &Range<u64>, _: f64) -> io::Result<(u64, f64)> {
    let _ = (PIECE, PREFETCHED);
    Err(io::ErrorKind::Unsupported.into())
}

/// The processor time of this thread.
#[cfg(target_os = "linux")]
fn thread_seconds() -> io::Result<f64> {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the clock exists on Linux, and `time` is a valid place for the answer.
    if unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9)
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
