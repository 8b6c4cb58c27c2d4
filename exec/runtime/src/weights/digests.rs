//! SHA-256 digests of the weights of each layer, and of the tensors outside the layers.
//!
//! The digest of a part of the model covers its tensors in file order. Of each tensor it covers the name, the size and
//! all bytes, so that no tensor can take the place of another. The bytes between tensors are not covered, because no
//! computation uses them; the headers of the files are covered by the model digest (`hearth_profiles::model`).
//!
//! The digest of a layer also covers the small tensor with the RoPE factors, which every device needs for its layers.
//!
//! If a device uses packed weights, it compares them with the model files too ([`super::packed`]).
//!
//! The bytes are read from the open files in chunks, not through the mapping, so that they do not count as memory of
//! this process. Both read the same pages of the page cache.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use hearth_profiles::gguf::{GgufError, TensorInfo, layer_of_tensor};
use hearth_schema::plan::WeightDigests;
use sha2::{Digest, Sha256};

use super::Weights;
use super::digest_cache::{CacheSession, DigestCache};
use super::packed::PackedPart;
use crate::error::ExecError;

/// The number of bytes that a thread reads at once.
/// source: assumed; so large that a hard disk reads for longer than it seeks
pub(super) const CHUNK_BYTES: usize = 1 << 20;

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
        // The cache of a model with packed weights says that both are right, which is not checked here.
        let session = cache.filter(|_| !self.uses_packed()).and_then(|cache| cache.begin(self));
        let mut digests = self.hash_and_store(&parts, threads, session.as_ref(), false, on_progress)?;
        let outside_layers = digests.remove(&WeightPart::OutsideLayers).unwrap_or_default();
        Ok(WeightDigests { layers: digests.into_values().collect(), outside_layers })
    }

    /// Returns the paths of the files that have tensors of `part`.
    pub fn files_of_part(&self, part: WeightPart) -> Vec<&Path> {
        let own = self.model.tensors.iter().filter(|tensor| part.contains(&tensor.name));
        let of_tensor = |tensor: &TensorInfo| {
            let packed = self.packed_parts(tensor).map(|packed| packed.tensor.extent.file_index);
            packed.chain([tensor.file_index]).collect::<Vec<_>>()
        };
        let files: BTreeSet<usize> = own.flat_map(of_tensor).collect();
        files.into_iter().filter_map(|file| Some(self.files.get(file)?.path())).collect()
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
        let computed = self.hash_and_store(&unknown, threads, session.as_ref(), true, on_progress)?;
        Ok(unknown.into_iter().filter(|part| differs(part, &computed)).collect())
    }

    /// Hashes `parts`. With `with_packed`, parts whose packed weights differ from the model are left out.
    fn hash_and_store(
        &self,
        parts: &[WeightPart],
        threads: usize,
        session: Option<&CacheSession<'_>>,
        with_packed: bool,
        on_progress: OnHashProgress<'_>,
    ) -> Result<BTreeMap<WeightPart, String>, ExecError> {
        if parts.is_empty() {
            return Ok(BTreeMap::new());
        }
        let (digests, ended) = self.hash_parts(parts, threads, with_packed, on_progress);
        self.check_unchanged()?;
        // Also after a stop, so that the next attempt need not begin again.
        if let Some(session) = session {
            session.store(self, &digests);
        }
        ended.map(|()| digests)
    }
}

impl Weights {
    /// Hashes each of the `parts` on one of `threads` threads. Returns the digests of the parts that were hashed, without
    /// those whose packed weights differ if `with_packed` is set, and the first error.
    fn hash_parts(
        &self,
        parts: &[WeightPart],
        threads: usize,
        with_packed: bool,
        on_progress: OnHashProgress<'_>,
    ) -> (BTreeMap<WeightPart, String>, Result<(), ExecError>) {
        let files: Vec<&File> = self.files().collect();
        let tensors =
            |part: WeightPart| self.model.tensors.iter().filter(move |tensor| part.contains(&tensor.name));
        let packed = |part| {
            let sources = tensors(part).filter(|_| with_packed).flat_map(|tensor| self.packed_parts(tensor));
            sources.collect::<Vec<PackedPart>>()
        };
        let bytes_of = |part| {
            let packed: u64 = packed(part).iter().map(|packed| packed.source.length).sum();
            packed + tensors(part).map(|tensor| tensor.bytes.0).sum::<u64>()
        };
        let total: u64 = parts.iter().map(|&part| bytes_of(part)).sum();
        let (next, done, has_ended) = (AtomicUsize::new(0), Mutex::new(0), AtomicBool::new(false));
        let results = Mutex::new(Vec::new());
        let on_chunk = |bytes: u64| {
            let mut done = done.lock().expect("no thread panicked");
            *done += bytes;
            !has_ended.load(Ordering::Relaxed) && on_progress(*done, total)
        };
        let hash_part = |part, buffer: &mut [u8]| {
            let path = |file_index: usize| self.files[file_index].path().to_owned();
            let mut hash = Sha256::new();
            for tensor in tensors(part) {
                let is_complete =
                    feed(&mut hash, tensor, files[tensor.file_index], buffer, &mut |bytes| on_chunk(bytes));
                let read = |source| GgufError::Read { path: path(tensor.file_index), source };
                if !is_complete.map_err(read)? {
                    return Err(ExecError::HashingStopped);
                }
            }
            for packed in packed(part) {
                let is_equal = packed.is_equal(&files, &mut |bytes| on_chunk(bytes));
                let read = |source| GgufError::Read { path: path(packed.tensor.extent.file_index), source };
                if !is_equal.map_err(read)?.ok_or(ExecError::HashingStopped)? {
                    return Ok(None);
                }
            }
            Ok(Some(format!("sha256:{:x}", hash.finalize())))
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
                Ok((part, digest)) => digests.extend(digest.map(|digest| (part, digest))),
                // The first error is the cause; threads that stopped because of it follow.
                Err(error) => ended = ended.and(Err(error)),
            }
        }
        (digests, ended)
    }
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
pub(super) fn read_exact_at(file: &File, buffer: &mut [u8], offset: u64) -> io::Result<()> {
    std::os::unix::fs::FileExt::read_exact_at(file, buffer, offset)
}

#[cfg(windows)]
pub(super) fn read_exact_at(file: &File, mut buffer: &mut [u8], mut offset: u64) -> io::Result<()> {
    while !buffer.is_empty() {
        let count = std::os::windows::fs::FileExt::seek_read(file, buffer, offset)?;
        if count == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        (buffer, offset) = (&mut buffer[count..], offset + count as u64);
    }
    Ok(())
}
