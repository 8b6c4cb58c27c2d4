//! The digest cache: digests of weights by the identity of the model files, so that an unchanged file is hashed once.
//!
//! The cache has digests that were computed, not results of comparisons. A digest is valid for the files with the same
//! path, size, inode, device, and times of the last change of content and of status. A file whose content changed
//! within the last seconds is not cached, because its next change might get the same time.
//!
//! The cache is a JSON file that only its user can read. It is replaced atomically, and a file that cannot be read
//! counts as empty. Of two processes that write at the same time, one may lose its entry, which is then computed again.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use super::Weights;
use super::digests::WeightPart;
use crate::clock::system_time;

/// The largest step in which a file system counts the time of a change. source: the 2 s of FAT
const TIME_GRANULARITY: Duration = Duration::from_secs(2);
/// Maximum number of models in the cache; the oldest entries are dropped. source: assumed, more than a device runs
const MAX_MODELS: usize = 64;
/// Maximum size of the cache in bytes. source: assumed; [`MAX_MODELS`] models of 200 layers, 80 bytes each, take 1 MB
const MAX_CACHE_BYTES: u64 = 4 << 20;
const VERSION: u32 = 1;

/// The number of the next temporary file of this process, whose threads may write at the same time.
static WRITES: AtomicU32 = AtomicU32::new(0);

/// The identity of the content of a model file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileIdentity {
    /// The path without symbolic links.
    path: String,
    bytes: u64,
    inode: u64,
    device: u64,
    /// The time of the last change of the content, in seconds and nanoseconds since 1970.
    modified: (i64, i64),
    /// The time of the last change of the status. Unlike `modified`, a program cannot set it.
    status_changed: (i64, i64),
}

#[derive(Debug, Default, Serialize, Deserialize)]
struct CacheFile {
    version: u32,
    /// In the order of their last change.
    models: Vec<CachedModel>,
}

#[derive(Debug, Serialize, Deserialize)]
struct CachedModel {
    files: Vec<FileIdentity>,
    /// The digest of each layer, and of the tensors outside the layers.
    digests: BTreeMap<String, String>,
}

/// A file with digests of weights.
#[derive(Debug, Clone)]
pub struct DigestCache {
    path: PathBuf,
}

/// A use of the cache for one model, begun before the model is hashed.
pub(super) struct CacheSession<'a> {
    cache: &'a DigestCache,
    identities: Vec<FileIdentity>,
    start: SystemTime,
}

impl DigestCache {
    /// Creates a cache in the file `path`, which need not exist.
    pub fn new(path: PathBuf) -> DigestCache {
        DigestCache { path }
    }

    /// Begins to use the cache for a model; `None` if its files cannot be identified.
    pub(super) fn begin(&self, weights: &Weights) -> Option<CacheSession<'_>> {
        Some(CacheSession { cache: self, identities: identities(weights)?, start: system_time() })
    }

    fn read(&self) -> CacheFile {
        let read = || -> io::Result<CacheFile> {
            let mut text = Vec::new();
            File::open(&self.path)?.take(MAX_CACHE_BYTES + 1).read_to_end(&mut text)?;
            Ok(serde_json::from_slice(&text)?)
        };
        read().ok().filter(|file| file.version == VERSION).unwrap_or_default()
    }

    /// Replaces the file. The oldest models are dropped until it is small enough.
    fn write(&self, mut models: Vec<CachedModel>) -> io::Result<()> {
        models.drain(..models.len().saturating_sub(MAX_MODELS));
        let mut file = CacheFile { version: VERSION, models };
        let mut text = serde_json::to_vec(&file)?;
        while text.len() as u64 > MAX_CACHE_BYTES {
            file.models.remove(0);
            text = serde_json::to_vec(&file)?;
        }
        if let Some(folder) = self.path.parent() {
            create_private_folder(folder)?;
        }
        let suffix = format!(".{}-{}", std::process::id(), WRITES.fetch_add(1, Ordering::Relaxed));
        let mut temporary = self.path.clone().into_os_string();
        temporary.push(suffix);
        let temporary = PathBuf::from(temporary);
        let written = create_private_file(&temporary)
            .and_then(|mut file| file.write_all(&text))
            .and_then(|()| fs::rename(&temporary, &self.path));
        if written.is_err() {
            let _ = fs::remove_file(&temporary);
        }
        written
    }
}

impl CacheSession<'_> {
    /// Returns the cached digests of the parts `parts`.
    pub(super) fn digests(&self, parts: &[WeightPart]) -> BTreeMap<WeightPart, String> {
        let models = self.cache.read().models;
        let Some(mut model) = models.into_iter().find(|model| model.files == self.identities) else {
            return BTreeMap::new();
        };
        let digest = |&part: &WeightPart| Some((part, model.digests.remove(&part_name(part))?));
        parts.iter().filter_map(digest).collect()
    }

    /// Adds digests to the cache, unless a file has changed since the session began or shortly before. A cache that
    /// cannot be written is not an error: the weights are hashed again the next time.
    pub(super) fn store(&self, weights: &Weights, digests: &BTreeMap<WeightPart, String>) {
        let is_settled = |file: &FileIdentity| {
            let modified = UNIX_EPOCH + Duration::new(file.modified.0.max(0) as u64, file.modified.1 as u32);
            modified + TIME_GRANULARITY <= self.start
        };
        if digests.is_empty()
            || !self.identities.iter().all(is_settled)
            || identities(weights).as_ref() != Some(&self.identities)
        {
            return;
        }
        let mut models = self.cache.read().models;
        let known = models.iter().position(|model| model.files == self.identities);
        let known = known.map_or_else(BTreeMap::new, |index| models.remove(index).digests);
        // The digests of earlier contents of the same files are useless.
        models.retain(|model| {
            !model.files.iter().any(|file| self.identities.iter().any(|own| own.path == file.path))
        });
        let new = digests.iter().map(|(&part, digest)| (part_name(part), digest.clone()));
        let digests = known.into_iter().chain(new).collect();
        models.push(CachedModel { files: self.identities.clone(), digests });
        let _ = self.cache.write(models);
    }
}

fn part_name(part: WeightPart) -> String {
    match part {
        WeightPart::OutsideLayers => "outside_layers".into(),
        WeightPart::Layer(layer) => layer.to_string(),
    }
}

/// Returns the identities of the open files of a model; `None` if a file has none.
fn identities(weights: &Weights) -> Option<Vec<FileIdentity>> {
    weights.files().zip(weights.file_paths()).map(|(file, path)| identity(file, path)).collect()
}

#[cfg(unix)]
fn identity(file: &File, path: &Path) -> Option<FileIdentity> {
    use std::os::unix::fs::MetadataExt;
    // The open file counts, because the path may lead to another file by now.
    let metadata = file.metadata().ok()?;
    Some(FileIdentity {
        path: path.canonicalize().ok()?.to_str()?.to_owned(),
        bytes: metadata.len(),
        inode: metadata.ino(),
        device: metadata.dev(),
        modified: (metadata.mtime(), metadata.mtime_nsec()),
        status_changed: (metadata.ctime(), metadata.ctime_nsec()),
    })
}

/// Other systems have no such numbers in the standard library, so nothing is cached.
#[cfg(not(unix))]
fn identity(_: &File, _: &Path) -> Option<FileIdentity> {
    None
}

fn create_private_folder(path: &Path) -> io::Result<()> {
    let mut builder = fs::DirBuilder::new();
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.recursive(true).create(path)
}

fn create_private_file(path: &Path) -> io::Result<File> {
    let mut options = File::options();
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    options.write(true).create_new(true).open(path)
}
