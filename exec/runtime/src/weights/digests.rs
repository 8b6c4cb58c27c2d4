//! SHA-256 digests of the weights of each layer, and of the tensors outside the layers.
//!
//! The digest of a part of the model covers its tensors in file order. Of each tensor it covers the name, the size and
//! all bytes, so that no tensor can take the place of another. The bytes between tensors are not covered, because no
//! computation uses them; the headers of the files are covered by the model digest (`hearth_profiles::model`).
//!
//! The digest of a layer also covers the small tensor with the RoPE factors, which every device needs for its layers.
//!
//! The bytes are read from the open files in chunks, not through the mapping, so that they do not count as memory of
//! this process. Both read the same pages of the page cache.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use hearth_profiles::gguf::{GgufError, GgufModel, TensorInfo, layer_of_tensor};
use hearth_schema::plan::WeightDigests;
use sha2::{Digest, Sha256};

use super::digest_cache::{CacheSession, DigestCache};
use super::{Extent, Weights};
use crate::error::ExecError;

/// The number of bytes that a thread reads at once.
/// source: assumed; so large that a hard disk reads for longer than it seeks
const CHUNK_BYTES: usize = 1 << 20;

/// The tensor with the RoPE factors, which is outside the layers but which every layer uses.
const ROPE_FACTORS: &str = "rope_freqs.weight";

/// A part of the weights that has a digest of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum WeightPart {
    /// All tensors outside the layers. It comes first, because it is usually the largest part.
    OutsideLayers,
    /// The tensors of a layer, which is counted from 0.
    Layer(u32),
}

impl WeightPart {
    /// Returns the digest of this part in a plan; `None` if the model has no such layer.
    pub fn digest_in(self, digests: &WeightDigests) -> Option<&str> {
        match self {
            WeightPart::OutsideLayers => Some(&digests.outside_layers),
            WeightPart::Layer(layer) => digests.layers.get(layer as usize).map(String::as_str),
        }
    }

    fn contains(self, tensor: &str) -> bool {
        match (self, layer_of_tensor(tensor)) {
            (WeightPart::OutsideLayers, layer) => layer.is_none(),
            (WeightPart::Layer(own), Some(layer)) => own == layer,
            (WeightPart::Layer(_), None) => tensor == ROPE_FACTORS,
        }
    }
}

/// Receives the number of bytes that were hashed so far, which never decreases, and the number of bytes to hash. Returns
/// whether to continue; if not, the result is [`ExecError::HashingStopped`].
pub type OnHashProgress<'a> = &'a (dyn Fn(u64, u64) -> bool + Sync);

impl Weights {
    /// Hashes all parts of the model, which must be complete, with `threads` threads, and adds the digests to the
    /// cache. The cache is not read, because other devices rely on the result.
    pub fn compute_digests(
        &self,
        threads: usize,
        cache: Option<&DigestCache>,
        on_progress: OnHashProgress<'_>,
    ) -> Result<WeightDigests, ExecError> {
        let layers = (0..self.shape.layers.0).map(WeightPart::Layer);
        let parts: Vec<_> = std::iter::once(WeightPart::OutsideLayers).chain(layers).collect();
        let session = cache.and_then(|cache| cache.begin(self));
        let mut digests = self.hash_and_store(&parts, threads, session.as_ref(), on_progress)?;
        let outside_layers = digests.remove(&WeightPart::OutsideLayers).unwrap_or_default();
        Ok(WeightDigests { layers: digests.into_values().collect(), outside_layers })
    }

    /// Returns the paths of the files that have tensors of `part`.
    pub fn files_of_part(&self, part: WeightPart) -> Vec<&Path> {
        let own = self.model.tensors.iter().filter(|tensor| part.contains(&tensor.name));
        let files: BTreeSet<usize> = own.map(|tensor| tensor.file_index).collect();
        files.into_iter().filter_map(|file| Some(self.model.file_paths.get(file)?.as_path())).collect()
    }

    /// Returns the parts among `parts` whose weights differ from the `expected` digests, in order. Parts that the cache
    /// has are not hashed again, unless their cached digest differs too: the cache may be damaged.
    pub fn find_damaged_parts(
        &self,
        parts: &[WeightPart],
        expected: &WeightDigests,
        threads: usize,
        cache: Option<&DigestCache>,
        on_progress: OnHashProgress<'_>,
    ) -> Result<Vec<WeightPart>, ExecError> {
        let session = cache.and_then(|cache| cache.begin(self));
        let cached = session.as_ref().map_or_else(BTreeMap::new, |session| session.digests(parts));
        let differs = |part: &WeightPart, digests: &BTreeMap<WeightPart, String>| {
            digests.get(part).map(String::as_str) != part.digest_in(expected)
        };
        let unknown: Vec<_> = parts.iter().copied().filter(|part| differs(part, &cached)).collect();
        let is_in = |part: WeightPart, source: Extent| {
            self.model.tensors.iter().any(|tensor| {
                tensor.file_index == source.file_index
                    && (tensor.offset..tensor.end_offset()).contains(&source.offset)
                    && part.contains(&tensor.name)
            })
        };
        // Those that differ are not hashed, so that the cache does not have their digests.
        let (packed, changed): (Vec<_>, Vec<_>) =
            unknown.iter().partition(|&&part| self.is_packed_correctly(|source| is_in(part, source)));
        let computed = self.hash_and_store(&packed, threads, session.as_ref(), on_progress)?;
        Ok(unknown.into_iter().filter(|part| changed.contains(part) || differs(part, &computed)).collect())
    }

    fn hash_and_store(
        &self,
        parts: &[WeightPart],
        threads: usize,
        session: Option<&CacheSession<'_>>,
        on_progress: OnHashProgress<'_>,
    ) -> Result<BTreeMap<WeightPart, String>, ExecError> {
        if parts.is_empty() {
            return Ok(BTreeMap::new());
        }
        let files: Vec<&File> = self.files().collect();
        let (digests, ended) = hash_parts(&self.model, &files, parts, threads, on_progress);
        self.check_unchanged()?;
        // Also after a stop, so that the next attempt need not begin again.
        if let Some(session) = session {
            session.store(self, &digests);
        }
        ended.map(|()| digests)
    }
}

/// Hashes each of the `parts` on one of `threads` threads. Returns the digests of the parts that were hashed, and the first
/// error.
fn hash_parts(
    model: &GgufModel,
    files: &[&File],
    parts: &[WeightPart],
    threads: usize,
    on_progress: OnHashProgress<'_>,
) -> (BTreeMap<WeightPart, String>, Result<(), ExecError>) {
    let tensors = |part: WeightPart| model.tensors.iter().filter(move |tensor| part.contains(&tensor.name));
    let total: u64 = parts.iter().flat_map(|&part| tensors(part)).map(|tensor| tensor.bytes.0).sum();
    let (next, done, has_ended) = (AtomicUsize::new(0), Mutex::new(0), AtomicBool::new(false));
    let results = Mutex::new(Vec::new());
    let hash_part = |part, buffer: &mut [u8]| {
        let mut hash = Sha256::new();
        for tensor in tensors(part) {
            let is_complete = feed(&mut hash, tensor, files[tensor.file_index], buffer, &mut |bytes| {
                let mut done = done.lock().expect("no thread panicked");
                *done += bytes;
                !has_ended.load(Ordering::Relaxed) && on_progress(*done, total)
            });
            let path = || model.file_paths[tensor.file_index].clone();
            if !is_complete.map_err(|source| GgufError::Read { path: path(), source })? {
                return Err(ExecError::HashingStopped);
            }
        }
        Ok(format!("sha256:{:x}", hash.finalize()))
    };
    let work = || {
        let mut buffer = vec![0; CHUNK_BYTES];
        while let Some(&part) = parts.get(next.fetch_add(1, Ordering::Relaxed)) {
            let digest = hash_part(part, &mut buffer);
            let failed = digest.is_err();
            results.lock().expect("no thread panicked").push(digest.map(|digest| (part, digest)));
            if failed {
                has_ended.store(true, Ordering::Relaxed);
                return;
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..threads.clamp(1, parts.len().max(1)) {
            scope.spawn(work);
        }
        work();
    });
    let (mut digests, mut ended) = (BTreeMap::new(), Ok(()));
    for result in results.into_inner().expect("no thread panicked") {
        match result {
            Ok((part, digest)) => drop(digests.insert(part, digest)),
            // The first error is the cause; threads that stopped because of it follow.
            Err(error) => ended = ended.and(Err(error)),
        }
    }
    (digests, ended)
}

/// Feeds the name, the size and the bytes of a tensor to a hash. After each chunk, `on_chunk` receives its length, and
/// returns whether to continue. Returns whether all bytes were fed.
fn feed(
    hash: &mut Sha256,
    tensor: &TensorInfo,
    file: &File,
    buffer: &mut [u8],
    on_chunk: &mut dyn FnMut(u64) -> bool,
) -> io::Result<bool> {
    for length in [tensor.name.len() as u64, tensor.bytes.0] {
        hash.update(length.to_le_bytes());
    }
    hash.update(&tensor.name);
    let (mut offset, mut left) = (tensor.offset, tensor.bytes.0);
    while left > 0 {
        let chunk = &mut buffer[..left.min(CHUNK_BYTES as u64) as usize];
        read_exact_at(file, chunk, offset)?;
        hash.update(&*chunk);
        let length = chunk.len() as u64;
        (offset, left) = (offset + length, left - length);
        if !on_chunk(length) {
            return Ok(false);
        }
    }
    Ok(true)
}

#[cfg(unix)]
fn read_exact_at(file: &File, buffer: &mut [u8], offset: u64) -> io::Result<()> {
    std::os::unix::fs::FileExt::read_exact_at(file, buffer, offset)
}

#[cfg(windows)]
fn read_exact_at(file: &File, mut buffer: &mut [u8], mut offset: u64) -> io::Result<()> {
    while !buffer.is_empty() {
        let count = std::os::windows::fs::FileExt::seek_read(file, buffer, offset)?;
        if count == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        (buffer, offset) = (&mut buffer[count..], offset + count as u64);
    }
    Ok(())
}
