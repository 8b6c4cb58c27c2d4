//! The check that a disk has room for a file.
//!
//! It runs before the first byte is written: a 40 GB model that fails at 39 GB costs minutes and fills the disk in the
//! meantime. It uses `statvfs` on Unix; on other systems the write itself fails.

use std::path::Path;

use hearth_profiles::Bytes;

use super::SynthError;

/// Left free for others.
const MARGIN: Bytes = Bytes::mib(64);

/// Refuses a file of `need` bytes where the disk of `path` has less.
pub(super) fn check(path: &Path, need: Bytes) -> Result<(), SynthError> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let available = available(folder).map_err(|source| SynthError::Io {
        verb: "measure the disk of",
        path: path.to_owned(),
        source,
    })?;
    match available {
        Some(available) if available.0 < need.0.saturating_add(MARGIN.0) => {
            Err(SynthError::Space { path: path.to_owned(), need, available })
        }
        _ => Ok(()),
    }
}

/// What an ordinary user may still write; `None` where the system is not asked.
#[cfg(unix)]
fn available(folder: &Path) -> std::io::Result<Option<Bytes>> {
    use std::ffi::CString;
    use std::os::unix::ffi::OsStrExt;

    let name = CString::new(folder.as_os_str().as_bytes())?;
    let mut answer = std::mem::MaybeUninit::<libc::statvfs>::uninit();
    // SAFETY: `name` ends in a zero byte and lives across the call; `answer` has room for the structure.
    let failed = unsafe { libc::statvfs(name.as_ptr(), answer.as_mut_ptr()) } != 0;
    if failed {
        return Err(std::io::Error::last_os_error());
    }
    // SAFETY: the call succeeded, so it filled the structure.
    let answer = unsafe { answer.assume_init() };
    // The fields' types differ between systems.
    #[allow(clippy::unnecessary_cast, clippy::useless_conversion)]
    let bytes = (answer.f_bavail as u64).saturating_mul(answer.f_frsize as u64);
    Ok(Some(Bytes(bytes)))
}

#[cfg(not(unix))]
fn available(_folder: &Path) -> std::io::Result<Option<Bytes>> {
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_larger_than_any_disk_is_refused() {
        assert!(check(Path::new("model.gguf"), Bytes(1)).is_ok());
        if cfg!(unix) {
            let error = check(Path::new("model.gguf"), Bytes(1 << 60)).unwrap_err();
            assert!(matches!(error, SynthError::Space { .. }), "{error}");
        }
    }
}
