//! How does each device get its own copy of the model, none of it in memory?
//!
//! Copies share blocks on disk where the file system can (the system's copy call tries that first); each
//! is a file of its own to the page cache. They are removed when this is dropped.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use super::{LabError, PREFIX, is_gone, owner};

/// Private copies of a model, in a folder of their own.
#[derive(Debug)]
pub struct Copies {
    folder: PathBuf,
    files: Vec<PathBuf>,
}

impl Copies {
    /// Copies `model` once for each name into a new folder under `scratch`. A split model's parts all go.
    pub fn make(scratch: &Path, parts: &[PathBuf], names: &[String]) -> Result<Copies, LabError> {
        sweep(scratch);
        let folder = folder(scratch);
        let mut copies = Copies { folder: folder.clone(), files: Vec::new() };
        for (index, _) in names.iter().enumerate() {
            let own = folder.join(index.to_string());
            let failed = |error: std::io::Error| LabError::Copy {
                path: own.display().to_string(),
                why: error.to_string(),
            };
            fs::create_dir_all(&own).map_err(failed)?;
            let mut first = None;
            for part in parts {
                let copy = own.join(part.file_name().unwrap_or_default());
                fs::copy(part, &copy).map_err(failed)?;
                first.get_or_insert(copy);
            }
            copies.files.extend(first);
        }
        copies.drop_cache()?;
        Ok(copies)
    }

    /// The first part of the copy of the device at a place.
    pub fn file(&self, place: usize) -> &Path {
        &self.files[place]
    }

    /// Writes everything out and asks the system to forget it, so that devices start cold.
    pub fn drop_cache(&self) -> Result<(), LabError> {
        for entry in
            self.files.iter().filter_map(|file| fs::read_dir(file.parent()?).ok()).flatten().flatten()
        {
            let path = entry.path();
            let failed = |error: std::io::Error| LabError::Copy {
                path: path.display().to_string(),
                why: error.to_string(),
            };
            let file = File::open(&path).map_err(failed)?;
            file.sync_all().map_err(failed)?;
            forget(&file);
        }
        Ok(())
    }
}

/// Where this process keeps its copies under `scratch`.
pub fn folder(scratch: &Path) -> PathBuf {
    scratch.join(format!("{PREFIX}{}", std::process::id()))
}

/// Removes the copies of labs whose process is gone.
fn sweep(scratch: &Path) {
    for entry in fs::read_dir(scratch).into_iter().flatten().flatten() {
        if owner(&entry.file_name()).is_some_and(is_gone) {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

impl Drop for Copies {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.folder);
    }
}

#[cfg(target_os = "linux")]
fn forget(file: &File) {
    use std::os::fd::AsRawFd;
    // SAFETY: the descriptor is open for the length of the call, which touches no memory of this process.
    unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) };
}

#[cfg(not(target_os = "linux"))]
fn forget(_file: &File) {}
