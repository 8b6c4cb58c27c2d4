//! Partially fetched model files, which contain only some layers.
//!
//! The model file is sparse and has its full length; missing chunks read as zeros. Next to the model file, the manifest
//! `FILE.chunks` has 32 bytes for each chunk of 1 MiB: the SHA-256 of the chunk if it is present, otherwise zeros. A
//! chunk is written before its manifest entry, so that an interrupted fetch can be resumed. When a fetch is resumed,
//! the chunks in the file are checked against their entries.
//!
//! A computation with missing weights would give wrong results without an error. Therefore a file with an incomplete
//! manifest is opened only for the layers that are present (`Weights::open_fetched`), never as a complete model.
//!
//! Not here: the transfer of chunks (`hearth_ring`).

use std::collections::BTreeSet;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

/// The size of a chunk in bytes. Its transfer takes a few milliseconds in a home network, and the manifest of a model
/// of 40 GiB has 1.3 MB.
/// source: assumed
pub const CHUNK_BYTES: u64 = 1 << 20;

/// The SHA-256 of a chunk.
pub type ChunkHash = [u8; 32];

/// The manifest entry of a missing chunk; no data with this hash is known.
const MISSING_HASH: ChunkHash = [0; 32];

/// A model file that may contain only some of its chunks.
#[derive(Debug)]
pub struct FetchedFile {
    file: File,
    manifest: File,
    length: u64,
    hashes: Vec<ChunkHash>,
}

pub fn sha256(bytes: &[u8]) -> ChunkHash {
    Sha256::digest(bytes).into()
}

fn manifest_of(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".chunks");
    name.into()
}

/// Returns whether the file at `path` has a manifest in which chunks are missing.
pub fn is_partial(path: &Path) -> bool {
    let manifest = manifest_of(path);
    let is_missing = |entry: &[u8]| *entry == MISSING_HASH || entry.len() < MISSING_HASH.len();
    let has_missing =
        |entries: Vec<u8>| entries.is_empty() || entries.chunks(MISSING_HASH.len()).any(is_missing);
    // If the manifest cannot be read, any chunk may be missing.
    manifest.exists() && std::fs::read(manifest).map_or(true, has_missing)
}

impl FetchedFile {
    /// Opens a model file of `length` bytes and its manifest, or creates them if they do not exist. All chunks of a new
    /// file are missing.
    pub fn open(path: &Path, length: u64) -> io::Result<FetchedFile> {
        let open =
            |path: &Path| OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path);
        let (file, mut manifest) = (open(path)?, open(&manifest_of(path))?);
        let count = length.div_ceil(CHUNK_BYTES) as usize;
        let mut entries = Vec::new();
        (&mut manifest).take((count * MISSING_HASH.len()) as u64 + 1).read_to_end(&mut entries)?;
        let fits = entries.len() == count * MISSING_HASH.len() && file.metadata()?.len() == length;
        if !fits {
            // This is a different file, or its creation was interrupted: all chunks count as missing.
            entries = vec![0; count * MISSING_HASH.len()];
            manifest.set_len(0)?;
            manifest.seek(SeekFrom::Start(0))?;
            manifest.write_all(&entries)?;
            file.set_len(length)?;
        }
        Ok(FetchedFile { file, manifest, length, hashes: entries.as_chunks().0.to_vec() })
    }

    /// Returns the indices of the chunks that overlap the byte ranges `ranges` and are missing or damaged.
    pub fn find_missing_chunks(&mut self, ranges: &[Range<u64>]) -> io::Result<Vec<u64>> {
        let wanted: BTreeSet<u64> = ranges
            .iter()
            .filter(|range| !range.is_empty())
            .flat_map(|range| range.start / CHUNK_BYTES..range.end.min(self.length).div_ceil(CHUNK_BYTES))
            .collect();
        let mut missing = Vec::new();
        for chunk in wanted {
            let Some(&expected) = self.hashes.get(chunk as usize) else { continue };
            if expected == MISSING_HASH || sha256(&self.read(chunk)?) != expected {
                missing.push(chunk);
            }
        }
        Ok(missing)
    }

    /// Writes the chunk with the index `chunk`. Returns false, without writing, if `bytes` does not have the hash
    /// `expected` and the length of the chunk.
    pub fn write_chunk(&mut self, chunk: u64, bytes: &[u8], expected: ChunkHash) -> io::Result<bool> {
        let at = chunk.saturating_mul(CHUNK_BYTES);
        let length = self.length.saturating_sub(at).min(CHUNK_BYTES);
        let fits = length > 0
            && bytes.len() as u64 == length
            && sha256(bytes) == expected
            && expected != MISSING_HASH;
        let Some(entry) = self.hashes.get_mut(chunk as usize).filter(|_| fits) else { return Ok(false) };
        self.file.seek(SeekFrom::Start(at))?;
        self.file.write_all(bytes)?;
        *entry = expected;
        self.manifest.seek(SeekFrom::Start(chunk * MISSING_HASH.len() as u64))?;
        self.manifest.write_all(&expected)?;
        Ok(true)
    }

    fn read(&mut self, chunk: u64) -> io::Result<Vec<u8>> {
        let at = chunk * CHUNK_BYTES;
        let mut bytes = vec![0; self.length.saturating_sub(at).min(CHUNK_BYTES) as usize];
        self.file.seek(SeekFrom::Start(at))?;
        self.file.read_exact(&mut bytes)?;
        Ok(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interrupted_fetch_is_resumed_and_damaged_chunks_are_missing() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.gguf");
        let whole: Vec<u8> = (0..CHUNK_BYTES * 2 + 100).map(|at| (at * 7 % 251) as u8).collect();
        let chunk = |index: u64| {
            let from = (index * CHUNK_BYTES) as usize;
            &whole[from..whole.len().min(from + CHUNK_BYTES as usize)]
        };
        let length = whole.len() as u64;
        let missing =
            |file: &mut FetchedFile| file.find_missing_chunks(std::slice::from_ref(&(0..length))).unwrap();
        let mut file = FetchedFile::open(&path, length).unwrap();
        assert_eq!(missing(&mut file), [0, 1, 2]);
        assert_eq!(file.find_missing_chunks(&[CHUNK_BYTES - 1..CHUNK_BYTES + 1, 5..5]).unwrap(), [0, 1]);
        assert!(!file.write_chunk(0, chunk(1), sha256(chunk(0))).unwrap(), "the hash is wrong");
        assert!(!file.write_chunk(2, chunk(1), sha256(chunk(1))).unwrap(), "longer than the last chunk");
        assert!(!file.write_chunk(9, &[], sha256(&[])).unwrap(), "beyond the end");
        assert!(file.write_chunk(2, chunk(2), sha256(chunk(2))).unwrap());
        assert!(file.write_chunk(0, chunk(0), sha256(chunk(0))).unwrap());
        drop(file);
        assert!(is_partial(&path));
        let mut file = FetchedFile::open(&path, length).unwrap();
        assert_eq!(missing(&mut file), [1], "the written chunks are kept");
        assert!(file.write_chunk(1, chunk(1), sha256(chunk(1))).unwrap());
        drop(file);
        assert!(!is_partial(&path), "all chunks are present");
        assert_eq!(std::fs::read(&path).unwrap(), whole);
        // A changed byte is detected, and a file of another length starts again.
        let mut bytes = whole.clone();
        bytes[5] ^= 1;
        std::fs::write(&path, &bytes).unwrap();
        assert_eq!(missing(&mut FetchedFile::open(&path, length).unwrap()), [0]);
        assert_eq!(missing(&mut FetchedFile::open(&path, CHUNK_BYTES).unwrap()), [0]);
        assert!(is_partial(&path) && !is_partial(&folder.path().join("other")));
    }
}
