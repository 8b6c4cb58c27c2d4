//! Checks that a disk has enough free space for a file.
//!
//! The check runs before the first byte is written, because otherwise a model of 40 GB could fail after minutes, when
//! the disk is full. It uses `statvfs` on Unix; on other systems the write itself fails.

use std::path::Path;

use hearth_profiles::Bytes;

use super::SynthError;

/// Free space that is left for other programs.
const MARGIN: Bytes = Bytes::mib(64);

/// Fails if the disk of `path` has less free space than `need` and [`MARGIN`].
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

/// Returns the free space for unprivileged users, or `None` on systems other than Unix.
#[cfg(unix)]
fn available(folder: &Path) -> std::io::Result<Option<Bytes>> {
    use std::ffi::CString;
    use std::os::unix::ffi::OsStrExt;

    let name = CString::new(folder.as_os_str().as_bytes())?;
    let mut answer = std::mem::MaybeUninit::<libc::statvfs>::uninit();
    // SAFETY: `name` ends with a zero byte and is valid during the call; `answer` has the size of the structure.
    let failed = unsafe { libc::statvfs(name.as_ptr(), answer.as_mut_ptr()) } != 0;
    if failed {
        return Err(std::io::Error::last_os_error());
    }
    // SAFETY: the call succeeded, so it filled the structure.
    let answer = unsafe { answer.assume_init() };
    // The types of the fields differ between systems.
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
