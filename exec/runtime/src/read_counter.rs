//! A counter of the bytes that a process or thread has read from disk.

use std::fs::File;

/// A file in `/proc` that stays open, because it is read before and after every compute step.
#[derive(Debug)]
pub(crate) struct ProcFile(Option<File>);

impl ProcFile {
    pub(crate) fn open(path: &str) -> Self {
        Self(File::open(path).ok())
    }

    /// Returns the number that `parse` finds in the first 256 bytes of the file, or 0 if it finds no number.
    #[cfg(unix)]
    pub(crate) fn read_number(&self, parse: impl Fn(&str) -> Option<u64>) -> u64 {
        use std::os::unix::fs::FileExt;
        let mut text = [0u8; 256];
        let length = self.0.as_ref().and_then(|file| file.read_at(&mut text, 0).ok());
        length.and_then(|length| parse(std::str::from_utf8(&text[..length]).ok()?)).unwrap_or(0)
    }

    #[cfg(not(unix))]
    pub(crate) fn read_number(&self, _: impl Fn(&str) -> Option<u64>) -> u64 {
        0
    }
}

/// Counts the bytes that a process or thread has read from disk (`/proc/self/io`); always 0 without `/proc`.
#[derive(Debug)]
pub struct ReadCounter(ProcFile);

impl ReadCounter {
    pub fn for_current_process() -> Self {
        Self(ProcFile::open("/proc/self/io"))
    }

    pub fn for_current_thread() -> Self {
        Self(ProcFile::open("/proc/thread-self/io"))
    }

    /// Returns the number of bytes read from disk since the process or thread started.
    pub fn bytes_read(&self) -> u64 {
        let line =
            |text: &str| text.lines().find_map(|line| line.strip_prefix("read_bytes:")?.trim().parse().ok());
        self.0.read_number(line)
    }
}
