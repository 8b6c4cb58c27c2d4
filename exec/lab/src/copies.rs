//! A copy of the model for each device, with no page of it in memory.
//!
//! Copies share blocks on disk where the file system can (the system's copy call tries that first); each
//! is a file of its own to the page cache. They are removed when this is dropped.

use std::fs::{self, File};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use hearth_profiles::measure;

use super::{LabError, PREFIX, is_gone, owner};

/// Private copies of a model, in a folder of their own.
#[derive(Debug)]
pub struct ModelCopies {
    folder: PathBuf,
    files: Vec<PathBuf>,
}

impl ModelCopies {
    /// Copies `model` once for each name into a new folder under `scratch`. A split model's parts all go.
    pub fn make(scratch: &Path, parts: &[PathBuf], names: &[String]) -> Result<ModelCopies, LabError> {
        sweep(scratch);
        let folder = folder(scratch);
        let mut copies = ModelCopies { folder: folder.clone(), files: Vec::new() };
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
        (0..self.files.len()).flat_map(|place| self.parts(place)).try_for_each(|part| drop_cache(&part))
    }

    /// Bytes of the copy of the device at a place that are in memory: none, if it starts cold.
    pub fn resident_bytes(&self, place: usize) -> u64 {
        self.parts(place).iter().map(|part| resident_bytes(part)).sum()
    }

    fn parts(&self, place: usize) -> Vec<PathBuf> {
        let folder = self.files[place].parent().and_then(|folder| fs::read_dir(folder).ok());
        folder.into_iter().flatten().flatten().map(|entry| entry.path()).collect()
    }
}

/// Writes a file out and asks the system to forget it. Pages that a process has mapped and touched stay.
pub fn drop_cache(path: &Path) -> Result<(), LabError> {
    let failed =
        |error: std::io::Error| LabError::Cache { path: path.display().to_string(), why: error.to_string() };
    let file = File::open(path).map_err(failed)?;
    file.sync_all().map_err(failed)?;
    let length = file.metadata().map_err(failed)?.len();
    measure::drop_cache(&file, &(0..length));
    Ok(())
}

/// Bytes of a file that are in memory; 0 where it cannot be opened.
pub fn resident_bytes(path: &Path) -> u64 {
    let Ok(file) = File::open(path) else { return 0 };
    // SAFETY: the mapping is only asked about, never read, so that a change of the file does no harm.
    unsafe { memmap2::Mmap::map(&file) }.map_or(0, |map| hearth_runtime::pages::resident(&map))
}

/// The folder under `scratch` for this process's copies.
pub fn folder(scratch: &Path) -> PathBuf {
    scratch.join(format!("{PREFIX}{}", std::process::id()))
}

/// Removes the copies of labs whose process is gone, and ends the processes that still use them.
fn sweep(scratch: &Path) {
    for entry in fs::read_dir(scratch).into_iter().flatten().flatten() {
        if owner(&entry.file_name()).is_some_and(is_gone) {
            remove(&entry.path());
        }
    }
}

/// Removes a folder of copies, and ends the processes that use them: for an end that runs no destructors.
pub fn remove(folder: &Path) {
    end_users(folder);
    let _ = fs::remove_dir_all(folder);
}

/// Ends the processes of this program that were started with a file of a folder. A device ends when its lab
/// does; one that was stopped, or hangs, does not.
fn end_users(folder: &Path) {
    let program = |process: &str| {
        let name = fs::read_link(process).ok()?.file_name()?.to_string_lossy().into_owned();
        // Of one that was built again since.
        Some(name.trim_end_matches(" (deleted)").to_owned())
    };
    let own = program("/proc/self/exe");
    for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Some(number) = entry.file_name().to_str().and_then(|name| name.parse::<i32>().ok()) else {
            continue;
        };
        let arguments = fs::read(entry.path().join("cmdline")).unwrap_or_default();
        let uses = arguments
            .split(|&byte| byte == 0)
            .any(|argument| Path::new(std::ffi::OsStr::from_bytes(argument)).starts_with(folder));
        if uses && number > 1 && own.is_some() && program(&format!("/proc/{number}/exe")) == own {
            // SAFETY: kill takes two numbers and touches no memory of this process.
            unsafe { libc::kill(number, libc::SIGKILL) };
        }
    }
}

impl Drop for ModelCopies {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.folder);
    }
}
