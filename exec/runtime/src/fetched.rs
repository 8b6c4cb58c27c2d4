//! A model file of which only some layers were fetched.
//!
//! A sparse file of the model's length, whose missing parts read as zeros, and beside it the manifest `FILE.chunks`: 32
//! bytes for each chunk of a MiB, the SHA-256 of the chunk if it is here and zeros if not. A chunk is written before
//! its entry, so that a fetch that was cut off continues where it was; what is in the file is checked against its entry
//! when a fetch begins again. Zeros would compute without complaint, so that a file with a manifest that is not full is
//! opened only for the layers that are here (`Weights::open_fetched`), never as a model.
//!
//! Not here: where chunks come from (`hearth_ring`).

use std::collections::BTreeSet;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

/// Bytes of a chunk: a few milliseconds of a home network, and a manifest of 1.3 MB for a model of 40 GB.
/// source: assumed
pub const CHUNK: u64 = 1 << 20;

pub type Hash = [u8; 32];

/// The entry of a missing chunk; no chunk is known to have this hash.
const MISSING_HASH: Hash = [0; 32];

/// A model file of which some chunks were fetched.
#[derive(Debug)]
pub struct FetchedFile {
    file: File,
    manifest: File,
    length: u64,
    hashes: Vec<Hash>,
}

pub fn hash(bytes: &[u8]) -> Hash {
    Sha256::digest(bytes).into()
}

fn manifest_of(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".chunks");
    name.into()
}

/// Whether chunks of a file are missing.
pub fn is_partial(path: &Path) -> bool {
    // A manifest that cannot be read vouches for nothing.
    manifest_of(path).exists()
        && std::fs::read(manifest_of(path)).map_or(true, |entries| {
            entries.is_empty()
                || entries
                    .chunks(MISSING_HASH.len())
                    .any(|entry| *entry == MISSING_HASH || entry.len() < MISSING_HASH.len())
        })
}

impl FetchedFile {
    /// Opens the file at a path, or creates it with this length.
    pub fn open(path: &Path, length: u64) -> io::Result<FetchedFile> {
        let open =
            |path: &Path| OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path);
        let (file, mut manifest) = (open(path)?, open(&manifest_of(path))?);
        let count = length.div_ceil(CHUNK) as usize;
        let mut entries = Vec::new();
        (&mut manifest).take((count * MISSING_HASH.len()) as u64 + 1).read_to_end(&mut entries)?;
        let fits = entries.len() == count * MISSING_HASH.len() && file.metadata()?.len() == length;
        if !fits {
            // Another file, or one that was hardly begun: nothing of it is vouched for.
            entries = vec![0; count * MISSING_HASH.len()];
            manifest.set_len(0)?;
            manifest.seek(SeekFrom::Start(0))?;
            manifest.write_all(&entries)?;
            file.set_len(length)?;
        }
        let hashes = entries
            .chunks_exact(MISSING_HASH.len())
            .map(|entry| entry.try_into().unwrap_or(MISSING_HASH))
            .collect();
        Ok(FetchedFile { file, manifest, length, hashes })
    }

    /// Returns the chunks of these bytes that are missing or damaged.
    pub fn missing(&mut self, ranges: &[Range<u64>]) -> io::Result<Vec<u64>> {
        let wanted: BTreeSet<u64> = ranges
            .iter()
            .filter(|range| !range.is_empty())
            .flat_map(|range| range.start / CHUNK..range.end.min(self.length).div_ceil(CHUNK))
            .collect();
        let mut missing = Vec::new();
        for chunk in wanted {
            let Some(&expected) = self.hashes.get(chunk as usize) else { continue };
            if expected == MISSING_HASH || hash(&self.read(chunk)?) != expected {
                missing.push(chunk);
            }
        }
        Ok(missing)
    }

    /// Writes a chunk. Returns false if it does not have the expected hash or length.
    pub fn write(&mut self, chunk: u64, bytes: &[u8], expected: Hash) -> io::Result<bool> {
        let at = chunk.saturating_mul(CHUNK);
        let length = self.length.saturating_sub(at).min(CHUNK);
        let fits =
            length > 0 && bytes.len() as u64 == length && hash(bytes) == expected && expected != MISSING_HASH;
        let Some(entry) = self.hashes.get_mut(chunk as usize).filter(|_| fits) else { return Ok(false) };
        self.file.seek(SeekFrom::Start(at))?;
        self.file.write_all(bytes)?;
        *entry = expected;
        self.manifest.seek(SeekFrom::Start(chunk * MISSING_HASH.len() as u64))?;
        self.manifest.write_all(&expected)?;
        Ok(true)
    }

    fn read(&mut self, chunk: u64) -> io::Result<Vec<u8>> {
        let at = chunk * CHUNK;
        let mut bytes = vec![0; self.length.saturating_sub(at).min(CHUNK) as usize];
        self.file.seek(SeekFrom::Start(at))?;
        self.file.read_exact(&mut bytes)?;
        Ok(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cut_fetch_goes_on_where_it_was_and_damage_is_fetched_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.gguf");
        let whole: Vec<u8> = (0..CHUNK * 2 + 100).map(|at| (at * 7 % 251) as u8).collect();
        let chunk = |index: u64| {
            let from = (index * CHUNK) as usize;
            &whole[from..whole.len().min(from + CHUNK as usize)]
        };
        let length = whole.len() as u64;
        let all = 0..length;
        let mut file = FetchedFile::open(&path, length).unwrap();
        assert_eq!(file.missing(std::slice::from_ref(&all)).unwrap(), [0, 1, 2]);
        assert_eq!(file.missing(&[CHUNK - 1..CHUNK + 1, 5..5]).unwrap(), [0, 1]);
        assert!(!file.write(0, chunk(1), hash(chunk(0))).unwrap(), "not what its hash says");
        assert!(!file.write(2, chunk(1), hash(chunk(1))).unwrap(), "longer than the last chunk");
        assert!(!file.write(9, &[], hash(&[])).unwrap(), "beyond the end");
        assert!(file.write(2, chunk(2), hash(chunk(2))).unwrap());
        assert!(file.write(0, chunk(0), hash(chunk(0))).unwrap());
        drop(file);
        assert!(is_partial(&path));
        let mut file = FetchedFile::open(&path, length).unwrap();
        assert_eq!(file.missing(std::slice::from_ref(&all)).unwrap(), [1], "what was there is there");
        assert!(file.write(1, chunk(1), hash(chunk(1))).unwrap());
        drop(file);
        assert!(!is_partial(&path), "all is here");
        assert_eq!(std::fs::read(&path).unwrap(), whole);
        // A flipped byte is found, and another length begins again.
        let mut bytes = whole.clone();
        bytes[5] ^= 1;
        std::fs::write(&path, &bytes).unwrap();
        assert_eq!(
            FetchedFile::open(&path, length).unwrap().missing(std::slice::from_ref(&all)).unwrap(),
            [0]
        );
        assert_eq!(FetchedFile::open(&path, CHUNK).unwrap().missing(&[all]).unwrap(), [0]);
        assert!(is_partial(&path) && !is_partial(&folder.path().join("other")));
    }
}
