//! Scratch file for measuring a disk.
//!
//! Its size is bounded by the effort, by a tenth of the free space and by the time for writing it. It contains
//! incompressible numbers, and is flushed. On Unix its name is removed as soon as it is open, so that nothing is left
//! behind however the process ends.

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use super::MeasureError;
use super::sampling::{Effort, now};
use crate::units::Bytes;

const PIECE: usize = 1 << 20;

/// The least size, however slow the disk.
const MIN_BYTES: u64 = 1 << 20;

/// An open scratch file.
#[derive(Debug)]
pub(super) struct Scratch {
    pub(super) path: PathBuf,
    /// Two descriptions of the same file, so that advice on one does not change the other.
    pub(super) files: [File; 2],
    pub(super) length: u64,
}

impl Scratch {
    pub(super) fn create(folder: &Path, effort: &Effort) -> Result<Scratch, MeasureError> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let path = folder.join(format!(".hearth-measure-{}-{number}", std::process::id()));
        let mut options = OpenOptions::new();
        options.write(true).create_new(true);
        let mut writer = options.open(&path).map_err(MeasureError::file("create", &path))?;
        // From here on the name is removed, on leaving this function at the latest.
        let _name = Name(path.clone());
        let open = || File::open(&path).map_err(MeasureError::file("open", &path));
        let files = [open()?, open()?];
        let most = effort.file.0.min(free_space(folder).0 / 10).max(MIN_BYTES);
        let length = fill(&mut writer, most, effort.limit.0).map_err(MeasureError::file("write", &path))?;
        writer.sync_all().map_err(MeasureError::file("flush", &path))?;
        Ok(Scratch { path, files, length })
    }
}

/// Removes the name when dropped. On Unix the open file remains usable; elsewhere a file in use cannot be removed, and
/// stays until it is closed.
struct Name(PathBuf);

impl Drop for Name {
    fn drop(&mut self) {
        // Nothing better can be done if this fails.
        let _ = fs::remove_file(&self.0);
    }
}

/// Writes up to `most` bytes within about `seconds`.
fn fill(writer: &mut File, most: u64, seconds: f64) -> std::io::Result<u64> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut piece = vec![0u8; PIECE];
    let (begun, mut length) = (now(), 0);
    while length < most && (length < MIN_BYTES || now() - begun < seconds) {
        for word in piece.as_chunks_mut::<8>().0 {
            // xorshift64: all pieces differ, and no disk compresses them.
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            *word = state.to_le_bytes();
        }
        let count = PIECE.min((most - length) as usize);
        writer.write_all(&piece[..count])?;
        length += count as u64;
    }
    Ok(length)
}

/// The space that a user may still write in a folder; unlimited where the system does not tell.
fn free_space(folder: &Path) -> Bytes {
    #[cfg(unix)]
    {
        use std::os::unix::ffi::OsStrExt;
        let Ok(name) = std::ffi::CString::new(folder.as_os_str().as_bytes()) else { return Bytes(0) };
        let mut answer = std::mem::MaybeUninit::<libc::statvfs>::uninit();
        // SAFETY: `name` ends in a zero byte and lives across the call; `answer` has room for the structure.
        if unsafe { libc::statvfs(name.as_ptr(), answer.as_mut_ptr()) } != 0 {
            return Bytes(0);
        }
        // SAFETY: the call succeeded, so it filled the structure.
        let answer = unsafe { answer.assume_init() };
        // The fields' types differ between systems.
        #[allow(clippy::unnecessary_cast, clippy::useless_conversion)]
        let bytes = (answer.f_bavail as u64).saturating_mul(answer.f_frsize as u64);
        Bytes(bytes)
    }
    #[cfg(not(unix))]
    {
        let _ = folder;
        Bytes(u64::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scratch_file_leaves_no_name() {
        let folder = tempfile::tempdir().unwrap();
        let scratch = Scratch::create(folder.path(), &Effort::token()).unwrap();
        assert!(scratch.length >= MIN_BYTES && scratch.length <= Effort::token().file.0);
        assert_eq!(scratch.files[0].metadata().unwrap().len(), scratch.length);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
        let error = Scratch::create(&folder.path().join("nowhere"), &Effort::token()).unwrap_err();
        assert!(error.to_string().starts_with("cannot create `"), "{error}");
    }
}
