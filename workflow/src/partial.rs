//! Partial files and folders: content under a temporary name in the folder of its target, until it is complete.
//!
//! The name of a partial file or folder is `.NAME.hearth-PID-NUMBER.part`. Its writer holds a lock on it, which the
//! kernel releases when the writer ends for any reason. The first partial file that a process creates in a folder
//! removes those in the folder that nobody has locked. The process ID alone does not tell whether a writer is alive: a
//! later process can have the same ID, and a writer in another container has an ID of another namespace.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};

/// Maximum number of characters of the target's name in the name of a partial file, so that the latter is no longer
/// than the 255 bytes that file systems allow.
const MAX_NAME_LEN: usize = 50;

/// A partial file or folder. It is removed on drop unless it was renamed.
#[derive(Debug)]
pub(crate) struct Partial {
    path: PathBuf,
    /// The file, or the opened folder, with the lock.
    file: File,
}

impl Partial {
    /// Creates a partial file in `folder` for a file called `name`.
    pub(crate) fn new_file(folder: &Path, name: &OsStr) -> io::Result<Partial> {
        Self::create(folder, name, |path| File::create_new(path))
    }

    /// Creates a partial folder in `folder` for a folder called `name`.
    pub(crate) fn new_folder(folder: &Path, name: &OsStr) -> io::Result<Partial> {
        Self::create(folder, name, |path| fs::create_dir(path).and_then(|()| File::open(path)))
    }

    fn create(
        folder: &Path,
        name: &OsStr,
        create: impl Fn(&Path) -> io::Result<File>,
    ) -> io::Result<Partial> {
        static NEXT_NUMBER: AtomicU32 = AtomicU32::new(0);
        remove_abandoned(folder);
        let name: String = name.to_string_lossy().chars().take(MAX_NAME_LEN).collect();
        loop {
            let number = NEXT_NUMBER.fetch_add(1, Ordering::Relaxed);
            let path = folder.join(format!(".{name}.hearth-{}-{number}.part", std::process::id()));
            let file = match create(&path) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => continue,
                // Another process has removed the folder before it was locked.
                Err(error) if error.kind() == io::ErrorKind::NotFound && folder.is_dir() => continue,
                created => created?,
            };
            // Until it is locked, another process may believe that it is abandoned, and remove it.
            if !matches!(file.try_lock(), Err(TryLockError::WouldBlock)) && path.exists() {
                return Ok(Partial { path, file });
            }
        }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn file(&mut self) -> &mut File {
        &mut self.file
    }

    /// Writes the file to disk and renames it to `target`, which is in the same folder.
    pub(crate) fn rename_to(self, target: &Path) -> io::Result<()> {
        self.file.sync_all()?;
        fs::rename(&self.path, target)?;
        target.parent().map(sync_folder);
        Ok(())
    }
}

impl Drop for Partial {
    fn drop(&mut self) {
        remove(&self.path);
    }
}

/// Writes the names of the files in a folder to disk. A failure is ignored: some systems and file systems cannot open
/// or write a folder, and the files themselves are on disk.
pub(crate) fn sync_folder(folder: &Path) {
    let _ = File::open(folder).and_then(|folder| folder.sync_all());
}

/// Removes a partial file or folder. A failure leaves it to the next run.
pub(crate) fn remove(path: &Path) {
    let _ = fs::remove_file(path).or_else(|_| fs::remove_dir_all(path));
}

/// Removes the partial files and folders in `folder` whose writers have ended, once in each process.
pub(crate) fn remove_abandoned(folder: &Path) {
    static DONE: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());
    if !DONE.lock().unwrap_or_else(PoisonError::into_inner).insert(folder.to_path_buf()) {
        return;
    }
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        // Symbolic links are neither followed nor removed.
        let is_ours = entry.file_type().is_ok_and(|kind| kind.is_file() || kind.is_dir())
            && is_partial_name(&entry.file_name());
        // The file stays open, and so locked, until it is removed.
        if let Some(file) = is_ours.then(|| File::open(entry.path()).ok()).flatten()
            && file.try_lock().is_ok()
        {
            remove(&entry.path());
        }
    }
}

fn is_partial_name(name: &OsStr) -> bool {
    let is_number = |text: &str| text.parse::<u32>().is_ok_and(|number| number.to_string() == text);
    let parts = || {
        let (name, owner) =
            name.to_str()?.strip_prefix('.')?.strip_suffix(".part")?.rsplit_once(".hearth-")?;
        let (process, number) = owner.split_once('-')?;
        Some(!name.is_empty() && is_number(process) && is_number(number))
    };
    parts() == Some(true)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    fn names(folder: &Path) -> BTreeSet<String> {
        let entries = fs::read_dir(folder).unwrap().flatten();
        entries.map(|entry| entry.file_name().into_string().unwrap()).collect()
    }

    #[test]
    fn only_abandoned_partial_files_are_removed() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        // One has the ID of this process, as after a restart of a container.
        let own = format!(".plan.yaml.hearth-{}-7.part", std::process::id());
        for abandoned in [own.as_str(), ".a.hearth-4194304-0.part"] {
            fs::write(path(abandoned), "half").unwrap();
        }
        fs::create_dir_all(path(".report.hearth-4194304-1.part/figures")).unwrap();
        let other_names = [
            "plan.yaml",
            ".a.1.part",
            ".hearth-1-1.part",
            ".a.hearth-1.part",
            ".a.hearth-01-1.part",
            ".a.hearth-1--1.part",
            ".a.hearth-1-1.part.bak",
            "a.hearth-1-1.part",
        ];
        for name in other_names {
            fs::write(path(name), "kept").unwrap();
        }
        symlink(path("plan.yaml"), path(".link.hearth-1-1.part")).unwrap();
        let alive = File::create(path(".alive.hearth-4194304-2.part")).unwrap();
        alive.lock().unwrap();

        let partial = Partial::new_file(folder.path(), OsStr::new("new")).unwrap();
        let new = partial.path().file_name().unwrap().to_str().unwrap().to_owned();
        let mut expected: BTreeSet<String> = other_names.map(str::to_owned).into();
        expected.extend([".link.hearth-1-1.part".into(), ".alive.hearth-4194304-2.part".into(), new.clone()]);
        assert_eq!(names(folder.path()), expected);
        drop(partial);
        expected.remove(&new);
        assert_eq!(names(folder.path()), expected, "a partial file is removed on drop");
    }

    #[test]
    fn names_of_any_length_and_bytes_have_partial_names() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["x".repeat(255), "ä".repeat(127), "日".repeat(85)] {
            let partial = Partial::new_file(folder.path(), OsStr::new(&name)).unwrap();
            assert!(is_partial_name(partial.path().file_name().unwrap()));
            partial.rename_to(&folder.path().join(name)).unwrap();
        }
        assert_eq!(names(folder.path()).len(), 3);
    }
}
