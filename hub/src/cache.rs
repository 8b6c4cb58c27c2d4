//! The shared cache of models, with the folders of Python's `huggingface_hub`.
//!
//! ```text
//! models--OWNER--REPO/
//!     blobs/SHA256                    a file, named by its digest
//!     blobs/SHA256.incomplete         the beginning of a file
//!     snapshots/COMMIT/PATH           a relative link to the blob of a file
//!     refs/main                       the commit of the branch
//! .locks/models--OWNER--REPO/SHA256.lock    locked (flock) by the process that downloads the file
//! ```

use std::fs::{self, File, TryLockError};
use std::io::{self, Read, Write};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::SystemTime;

use hearth_schema::hub_model::Repository;

use crate::listing::{RemoteFile, is_safe_path};

/// Maximum depth of folders in a snapshot that are searched. source: assumed; repositories have one level of folders
const MAX_DEPTH: usize = 4;

/// The folders of one repository in the cache.
#[derive(Debug)]
pub(crate) struct RepositoryCache {
    folder: PathBuf,
    lock_folder: PathBuf,
}

impl RepositoryCache {
    pub(crate) fn new(cache: &Path, repository: &Repository) -> RepositoryCache {
        let name = format!("models--{}--{}", repository.owner, repository.name);
        RepositoryCache { folder: cache.join(&name), lock_folder: cache.join(".locks").join(name) }
    }

    pub(crate) fn blob_folder(&self) -> PathBuf {
        self.folder.join("blobs")
    }

    pub(crate) fn blob_path(&self, file: &RemoteFile) -> PathBuf {
        self.blob_folder().join(&file.sha256)
    }

    pub(crate) fn partial_path(&self, file: &RemoteFile) -> PathBuf {
        self.blob_folder().join(format!("{}.incomplete", file.sha256))
    }

    pub(crate) fn snapshot_path(&self, commit: &str, path: &str) -> PathBuf {
        self.folder.join("snapshots").join(commit).join(path)
    }

    /// Returns whether a file is complete, by its size. Its digest was compared when it was downloaded.
    pub(crate) fn has_blob(&self, file: &RemoteFile) -> bool {
        has_size(&self.blob_path(file), file.bytes)
    }

    /// Returns whether a file can be used without a download.
    pub(crate) fn has_file(&self, commit: &str, file: &RemoteFile) -> bool {
        self.has_blob(file) || has_size(&self.snapshot_path(commit, &file.path), file.bytes)
    }

    /// Returns the size of the beginning of a file that an earlier download left.
    pub(crate) fn partial_bytes(&self, file: &RemoteFile) -> u64 {
        fs::metadata(self.partial_path(file)).map_or(0, |metadata| metadata.len())
    }

    /// Opens the lock of a file. The kernel releases it when the process ends.
    pub(crate) fn open_lock(&self, file: &RemoteFile) -> io::Result<FileLock> {
        fs::create_dir_all(&self.lock_folder)?;
        let path = self.lock_folder.join(format!("{}.lock", file.sha256));
        Ok(FileLock(File::options().write(true).create(true).truncate(false).open(path)?))
    }

    /// Links a blob into the snapshot of a commit, and returns the path of the link.
    pub(crate) fn link(&self, commit: &str, file: &RemoteFile) -> io::Result<PathBuf> {
        let path = self.snapshot_path(commit, &file.path);
        if has_size(&path, file.bytes) {
            return Ok(path);
        }
        let depth = file.path.split('/').count() + 1;
        let target = PathBuf::from("../".repeat(depth)).join("blobs").join(&file.sha256);
        replace(&path, |temporary| symlink(&target, temporary))?;
        Ok(path)
    }

    /// Records the commit of the branch `main`.
    pub(crate) fn set_main(&self, commit: &str) -> io::Result<()> {
        replace(&self.folder.join("refs/main"), |temporary| {
            File::create_new(temporary)?.write_all(commit.as_bytes())
        })
    }

    /// Returns the commits with downloaded files: first the one of the branch `main`, then the latest.
    pub(crate) fn commits(&self) -> Vec<String> {
        let mut main = String::new();
        let read = File::open(self.folder.join("refs/main"))
            .and_then(|file| file.take(64).read_to_string(&mut main));
        let main = if read.is_ok() { main.trim() } else { "" };
        let mut commits: Vec<(bool, SystemTime, String)> = Vec::new();
        for entry in fs::read_dir(self.folder.join("snapshots")).into_iter().flatten().flatten() {
            if let (Ok(name), Ok(metadata)) = (entry.file_name().into_string(), entry.metadata()) {
                let modified = metadata.modified().unwrap_or(SystemTime::UNIX_EPOCH);
                commits.push((name == main, modified, name));
            }
        }
        commits.sort();
        commits.into_iter().rev().map(|(_, _, name)| name).collect()
    }

    /// Returns the paths of the downloaded files of a commit.
    pub(crate) fn downloaded_paths(&self, commit: &str) -> Vec<String> {
        let (root, mut found) = (self.snapshot_path(commit, ""), Vec::new());
        let mut folders = vec![(root, String::new(), 0)];
        while let Some((folder, prefix, depth)) = folders.pop() {
            for entry in fs::read_dir(&folder).into_iter().flatten().flatten() {
                let Ok(name) = entry.file_name().into_string() else { continue };
                let path = format!("{prefix}{name}");
                // Follows links: a link to a missing blob is no file.
                match fs::metadata(entry.path()) {
                    Ok(metadata) if metadata.is_file() && is_safe_path(&path) => found.push(path),
                    Ok(metadata) if metadata.is_dir() && depth < MAX_DEPTH => {
                        folders.push((entry.path(), format!("{path}/"), depth + 1));
                    }
                    _ => {}
                }
            }
        }
        found.sort();
        found
    }
}

/// The lock of a file, which one process at a time can hold.
pub(crate) struct FileLock(File);

impl FileLock {
    /// Returns whether the lock is now held. A file system without locks counts as success: then two downloads of the
    /// same file can disturb each other, which the digest reveals.
    pub(crate) fn try_hold(&self) -> bool {
        !matches!(self.0.try_lock(), Err(TryLockError::WouldBlock))
    }
}

fn has_size(path: &Path, bytes: u64) -> bool {
    fs::metadata(path).is_ok_and(|metadata| metadata.is_file() && metadata.len() == bytes)
}

/// Creates a file or link under a temporary name and renames it to `path`, so that other processes never see a part.
fn replace(path: &Path, create: impl FnOnce(&Path) -> io::Result<()>) -> io::Result<()> {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    let folder = path.parent().unwrap_or(Path::new("."));
    fs::create_dir_all(folder)?;
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    let temporary = folder.join(format!(".hearth-{}-{number}.part", std::process::id()));
    let _ = fs::remove_file(&temporary);
    let renamed = create(&temporary).and_then(|()| fs::rename(&temporary, path));
    if renamed.is_err() {
        let _ = fs::remove_file(&temporary);
    }
    renamed
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_are_relative_and_found_again() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let repository = Repository { owner: "o".into(), name: "r".into() };
        let cache = RepositoryCache::new(&folder.path().join("first"), &repository);
        let file = |path: &str| RemoteFile { path: path.into(), bytes: 3, sha256: "a".repeat(64) };
        let (old, new) = ("1".repeat(40), "2".repeat(40));
        fs::create_dir_all(cache.blob_folder()).expect("a folder");
        fs::write(cache.blob_path(&file("")), "abc").expect("it is ours");
        let path = cache.link(&new, &file("sub/m.gguf")).expect("a link");
        assert_eq!(
            fs::read_link(&path).expect("a link").to_str().map(|it| it.starts_with("../../../blobs/")),
            Some(true)
        );
        assert_eq!(cache.link(&new, &file("sub/m.gguf")).expect("it exists"), path);
        cache.link(&old, &file("m.gguf")).expect("a link");
        cache.set_main(&new).expect("it is ours");
        cache.set_main(&new).expect("it can be written again");
        assert_eq!(cache.commits(), [new.clone(), old]);
        assert_eq!(cache.downloaded_paths(&new), ["sub/m.gguf"]);
        // A cache can be moved.
        fs::rename(folder.path().join("first"), folder.path().join("second")).expect("it is ours");
        let moved = RepositoryCache::new(&folder.path().join("second"), &repository);
        assert!(moved.has_file(&new, &file("sub/m.gguf")) && !cache.has_file(&new, &file("sub/m.gguf")));
        fs::remove_file(moved.blob_path(&file(""))).expect("it is ours");
        assert!(moved.downloaded_paths(&new).is_empty(), "a link to nothing is not a file");
    }
}
