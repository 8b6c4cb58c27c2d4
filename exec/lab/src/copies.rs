//! Copies of the model, one for each device, which are initially not in the page cache.
//!
//! The system call for copies lets them share blocks on disk if the file system supports this, but the page cache
//! treats copies as separate files.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, Error};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use hearth_profiles::measure::mapping::{FileMapping, drop_cached_pages};
use rustix::process::{Pid, Signal, kill_process};

use super::{LabError, PREFIX, has_exited, owner};

/// The copies of a model's files, one for each device. They are deleted when this value is dropped.
#[derive(Debug)]
pub struct ModelCopies {
    folder: PathBuf,
    files: Vec<PathBuf>,
    /// The files that were copied.
    sources: Vec<PathBuf>,
}

impl ModelCopies {
    /// Copies the files of a model to `scratch` for each device in `names`. Also removes the copies of exited labs.
    pub fn create(scratch: &Path, files: &[PathBuf], names: &[String]) -> Result<ModelCopies, LabError> {
        for entry in fs::read_dir(scratch).into_iter().flatten().flatten() {
            if owner(&entry.file_name()).is_some_and(has_exited) {
                remove_copies_folder(&entry.path());
            }
        }
        // Removes its folder if a copy fails.
        let mut copies =
            ModelCopies { folder: copies_folder(scratch), files: Vec::new(), sources: files.to_vec() };
        for index in 0..names.len() {
            let own = copies.folder.join(index.to_string());
            let path = own.display().to_string();
            let failed = |error: Error| LabError::Copy { path: path.clone(), why: error.to_string() };
            fs::create_dir_all(&own).map_err(failed)?;
            let mut first = None;
            for file in files {
                let copy = own.join(file.file_name().unwrap_or_default());
                fs::copy(file, &copy).map_err(failed)?;
                first.get_or_insert(copy);
            }
            copies.files.extend(first);
        }
        copies.drop_page_cache()?;
        files.iter().try_for_each(|file| drop_page_cache(file))?;
        Ok(copies)
    }

    /// Returns the path of the first file of a device's copy of the model.
    pub fn first_file(&self, device: usize) -> &Path {
        &self.files[device]
    }

    /// Writes all copies to disk and drops them from the page cache, so that devices start cold.
    pub fn drop_page_cache(&self) -> Result<(), LabError> {
        (0..self.files.len())
            .flat_map(|device| self.files_of(device))
            .try_for_each(|file| drop_page_cache(&file))
    }

    /// Reads the sources once, so that free memory is filled with files that the system evicts first, as on a computer
    /// in use. The host of a virtual machine takes free memory away, and its next use would cost more than the disk.
    pub fn fill_memory(&self) -> Result<(), LabError> {
        // Pages that were used more often than those of the copies would be evicted after them.
        self.sources.iter().try_for_each(|file| drop_page_cache(file))?;
        self.sources.iter().try_for_each(|file| read_once(file))
    }

    /// Returns the number of bytes of a device's copy of the model that are in the page cache.
    pub fn resident_bytes(&self, device: usize) -> u64 {
        self.files_of(device).iter().map(|file| resident_bytes(file)).sum()
    }

    fn files_of(&self, device: usize) -> Vec<PathBuf> {
        let folder = self.files[device].parent().and_then(|folder| fs::read_dir(folder).ok());
        folder.into_iter().flatten().flatten().map(|entry| entry.path()).collect()
    }
}

/// Writes a file to disk and drops it from the page cache. Pages that a process has mapped and accessed remain.
pub fn drop_page_cache(path: &Path) -> Result<(), LabError> {
    let failed = |error: Error| LabError::Cache { path: path.display().to_string(), why: error.to_string() };
    let file = File::open(path).map_err(failed)?;
    file.sync_all().map_err(failed)?;
    let length = file.metadata().map_err(failed)?.len();
    drop_cached_pages(&file, &(0..length));
    Ok(())
}

/// Reads a file into the page cache.
fn read_once(path: &Path) -> Result<(), LabError> {
    let failed = |error: Error| LabError::Cache { path: path.display().to_string(), why: error.to_string() };
    let mut file = File::open(path).map_err(failed)?;
    io::copy(&mut file, &mut io::sink()).map_err(failed)?;
    Ok(())
}

/// Returns the number of bytes of a file that are in the page cache; 0 if the file cannot be opened.
pub fn resident_bytes(path: &Path) -> u64 {
    let Ok(file) = File::open(path) else { return 0 };
    FileMapping::new(&file).map_or(0, |mapping| hearth_runtime::pages::resident_bytes(&mapping))
}

/// Returns the folder under `scratch` in which this process stores its copies of the model.
pub fn copies_folder(scratch: &Path) -> PathBuf {
    scratch.join(format!("{PREFIX}{}", std::process::id()))
}

/// Removes a folder of model copies and kills the processes that use the copies, for an exit without destructors.
pub fn remove_copies_folder(folder: &Path) {
    kill_users(folder);
    let _ = fs::remove_dir_all(folder);
}

/// Kills the processes of this program that have a file of a folder in their arguments. The process of a device
/// normally exits with the lab, but not if the process is frozen or hangs.
fn kill_users(folder: &Path) {
    // The program may have been built again since the process started.
    let program = |process: &str| {
        let path = fs::read_link(process).ok()?;
        Some(path.file_name()?.to_string_lossy().trim_end_matches(" (deleted)").to_owned())
    };
    let own = program("/proc/self/exe");
    for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let number = entry.file_name().to_str().and_then(|name| name.parse::<i32>().ok());
        let Some(number) = number else { continue };
        let arguments = fs::read(entry.path().join("cmdline")).unwrap_or_default();
        let mut arguments = arguments.split(|&byte| byte == 0).map(OsStr::from_bytes);
        let uses = arguments.any(|argument| Path::new(argument).starts_with(folder));
        if uses && number > 1 && own.is_some() && program(&format!("/proc/{number}/exe")) == own {
            // A process that has exited meanwhile is no error.
            let _ = Pid::from_raw(number).map(|pid| kill_process(pid, Signal::KILL));
        }
    }
}

impl Drop for ModelCopies {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.folder);
    }
}
