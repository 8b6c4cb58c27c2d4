//! Creates the scratch file for measuring a disk.
//!
//! The size of the file is limited by [`MeasurementOptions`], by a tenth of the free space and by the time for writing.
//! The content is incompressible and flushed to disk. On Unix, the file is unlinked before it is written, so that
//! nothing remains on disk when the process ends for any reason.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use super::MeasurementError;
use super::sampling::{MeasurementOptions, monotonic_seconds};
use crate::units::Bytes;

const PIECE_BYTES: usize = 1 << 20;

/// Minimum size of the scratch file in bytes, even on a slow disk.
const MIN_BYTES: u64 = 1 << 20;

#[derive(Debug)]
pub(super) struct ScratchFile {
    pub(super) path: PathBuf,
    /// Two open file descriptions of the scratch file, so that `posix_fadvise` on one does not change the other.
    pub(super) files: [File; 2],
    pub(super) length: u64,
}

impl ScratchFile {
    pub(super) fn create(folder: &Path, options: &MeasurementOptions) -> Result<Self, MeasurementError> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let path = folder.join(format!(".hearth-measure-{}-{number}", std::process::id()));
        let mut open_options = OpenOptions::new();
        open_options.write(true).create_new(true);
        let mut writer = open_options.open(&path).map_err(MeasurementError::for_file("create", &path))?;
        let unlink = UnlinkOnDrop(path.clone());
        let open = || File::open(&path).map_err(MeasurementError::for_file("open", &path));
        let files = [open()?, open()?];
        drop(unlink);
        let max_bytes =
            options.max_file_size.0.min(free_space(folder).unwrap_or(Bytes(0)).0 / 10).max(MIN_BYTES);
        let length = write_random_bytes(&mut writer, max_bytes, options.time_limit.0)
            .map_err(MeasurementError::for_file("write", &path))?;
        writer.sync_all().map_err(MeasurementError::for_file("flush", &path))?;
        Ok(ScratchFile { path, files, length })
    }
}

/// A guard that unlinks a file when dropped. On Unix, an open file remains usable until it is closed.
struct UnlinkOnDrop(PathBuf);

impl Drop for UnlinkOnDrop {
    fn drop(&mut self) {
        // A failure cannot be handled here.
        let _ = fs::remove_file(&self.0);
    }
}

/// Writes random bytes for about `seconds` seconds, but at most `max_bytes`. Returns the number of bytes written.
fn write_random_bytes(writer: &mut File, max_bytes: u64, seconds: f64) -> io::Result<u64> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut piece = vec![0u8; PIECE_BYTES];
    let (begun, mut length) = (monotonic_seconds(), 0);
    while length < max_bytes && (length < MIN_BYTES || monotonic_seconds() - begun < seconds) {
        for word in piece.as_chunks_mut::<8>().0 {
            // xorshift64: all pieces differ, and no disk compresses them.
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            *word = state.to_le_bytes();
        }
        let count = PIECE_BYTES.min((max_bytes - length) as usize);
        writer.write_all(&piece[..count])?;
        length += count as u64;
    }
    Ok(length)
}

/// Returns the free space for unprivileged users on the disk of a folder; on systems other than Unix, `u64::MAX` bytes.
pub fn free_space(folder: &Path) -> io::Result<Bytes> {
    #[cfg(unix)]
    {
        let stats = rustix::fs::statvfs(folder)?;
        Ok(Bytes(stats.f_bavail.saturating_mul(stats.f_frsize)))
    }
    #[cfg(not(unix))]
    {
        let _ = folder;
        Ok(Bytes(u64::MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scratch_file_is_unlinked() {
        let (folder, options) = (tempfile::tempdir().unwrap(), MeasurementOptions::minimal());
        let scratch = ScratchFile::create(folder.path(), &options).unwrap();
        assert!((MIN_BYTES..=options.max_file_size.0).contains(&scratch.length));
        assert_eq!(scratch.files[0].metadata().unwrap().len(), scratch.length);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
        let error = ScratchFile::create(&folder.path().join("nowhere"), &options).unwrap_err();
        assert!(error.to_string().starts_with("cannot create `"), "{error}");
    }
}
