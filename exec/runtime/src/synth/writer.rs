//! Writes a model of any size with constant memory.
//!
//! Threads take chunks of a fixed number of weights in file order. Each thread fills a buffer and writes it at the
//! offset of the chunk, with its own file handle. The random stream of a chunk is `ChaCha8` with a key from (seed,
//! tensor name) and the index of the chunk as stream number, so that the bytes depend neither on the thread nor on
//! the order. The file has a temporary name until it is complete, and is removed if an error occurs.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::thread;

use hearth_profiles::Format;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

use super::blocks::{self, Distribution};
use super::header::SynthPlan;
use super::{SynthError, SynthOptions};

/// Number of weights in a chunk, a whole number of blocks in every format. The bytes of a model depend on it, so it
/// must not be changed.
const CHUNK_WEIGHTS: u64 = 1 << 20;

/// A part of a tensor that is written at once.
#[derive(Debug, Clone, Copy)]
struct Chunk {
    /// The index of the tensor.
    tensor: usize,
    /// The index of the chunk in the tensor.
    number: u64,
    offset: u64,
    bytes: u64,
}

/// The unfinished file, which is removed on drop unless `finished` is set.
struct PartialFile {
    path: PathBuf,
    finished: bool,
}

impl Drop for PartialFile {
    fn drop(&mut self) {
        if !self.finished {
            let _ = fs::remove_file(&self.path);
        }
    }
}

pub(super) fn write(
    options: &SynthOptions,
    plan: &SynthPlan,
    path: &Path,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<(), SynthError> {
    let mut partial = PartialFile { path: partial_path(path), finished: false };
    let failed = |verb| {
        let path = partial.path.clone();
        move |source| SynthError::Io { verb, path, source }
    };
    let mut file = File::create(&partial.path).map_err(failed("create"))?;
    file.write_all(&plan.layout.header).map_err(failed("write"))?;
    // Padding between tensors is never written, so that it reads as zeros.
    file.set_len(plan.layout.file_bytes).map_err(failed("enlarge"))?;
    drop(file);
    write_weights(options, plan, &partial.path, progress).map_err(failed("write"))?;
    fs::rename(&partial.path, path).map_err(|source| {
        let path = path.to_owned();
        SynthError::Io { verb: "rename the finished file to", path, source }
    })?;
    partial.finished = true;
    Ok(())
}

/// Returns the temporary path of a model until it is complete: in the same folder, with a name that contains the
/// process id.
pub fn partial_path(path: &Path) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(format!(".{}.partial", std::process::id()));
    path.with_file_name(name)
}

fn write_weights(
    options: &SynthOptions,
    plan: &SynthPlan,
    path: &Path,
    progress: &mut dyn FnMut(u64, u64),
) -> io::Result<()> {
    let chunks = chunks(plan);
    let total: u64 = chunks.iter().map(|chunk| chunk.bytes).sum();
    let next = AtomicUsize::new(0);
    let (sender, receiver) = mpsc::channel::<io::Result<u64>>();
    thread::scope(|scope| {
        for _ in 0..options.threads.clamp(1, 64) {
            let (sender, chunks, next) = (sender.clone(), &chunks, &next);
            scope.spawn(move || {
                let end = write_chunks(options.seed, plan, path, chunks, next, &|bytes| {
                    sender.send(Ok(bytes)).is_ok()
                });
                if let Err(error) = end {
                    // The other threads stop too.
                    next.store(chunks.len(), Ordering::Relaxed);
                    let _ = sender.send(Err(error));
                }
            });
        }
        drop(sender);
        let mut done = 0;
        for report in receiver {
            done += report?;
            progress(done, total);
        }
        Ok(())
    })
}

fn chunks(plan: &SynthPlan) -> Vec<Chunk> {
    let mut chunks = Vec::new();
    for (index, tensor) in plan.layout.tensors.iter().enumerate() {
        let size = CHUNK_WEIGHTS / tensor.format.block_len() * tensor.format.block_bytes();
        for number in 0..tensor.bytes.0.div_ceil(size) {
            let start = number * size;
            chunks.push(Chunk {
                tensor: index,
                number,
                offset: tensor.offset + start,
                bytes: size.min(tensor.bytes.0 - start),
            });
        }
    }
    chunks
}

/// Writes chunks on one thread until none is left or `written` returns false.
fn write_chunks(
    seed: u64,
    plan: &SynthPlan,
    path: &Path,
    chunks: &[Chunk],
    next: &AtomicUsize,
    written: &dyn Fn(u64) -> bool,
) -> io::Result<()> {
    let mut file = OpenOptions::new().write(true).open(path)?;
    let (mut buffer, mut scratch) = (Vec::new(), Vec::new());
    loop {
        let at = next.fetch_add(1, Ordering::Relaxed);
        let Some(chunk) = chunks.get(at) else { return Ok(()) };
        let tensor = &plan.layout.tensors[chunk.tensor];
        buffer.resize(chunk.bytes as usize, 0);
        let source = TensorSource {
            seed,
            name: &tensor.name,
            format: tensor.format,
            distribution: plan.distributions[chunk.tensor],
        };
        source.fill(chunk.number, &mut buffer, &mut scratch);
        file.seek(SeekFrom::Start(chunk.offset))?;
        file.write_all(&buffer)?;
        if !written(chunk.bytes) {
            return Ok(());
        }
    }
}

/// The inputs that determine the bytes of a tensor.
struct TensorSource<'a> {
    seed: u64,
    name: &'a str,
    format: Format,
    distribution: Distribution,
}

impl TensorSource<'_> {
    /// Fills `buffer` with a chunk of the tensor.
    fn fill(&self, chunk: u64, buffer: &mut [u8], scratch: &mut Vec<u8>) {
        let mut rng = ChaCha8Rng::from_seed(key(self.seed, self.name));
        rng.set_stream(chunk);
        blocks::fill(self.format, self.distribution, &mut rng, buffer, scratch);
    }
}

/// Returns the key of a tensor's random streams: the seed, and three FNV-1a hashes of the name with different start
/// values, so that two names do not have the same key by accident.
fn key(seed: u64, name: &str) -> [u8; 32] {
    let mut key = [0; 32];
    key[..8].copy_from_slice(&seed.to_le_bytes());
    for (lane, out) in key[8..].as_chunks_mut::<8>().0.iter_mut().enumerate() {
        let start = 0xcbf2_9ce4_8422_2325 ^ lane as u64;
        let hash =
            name.bytes().fold(start, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
        *out = hash.to_le_bytes();
    }
    key
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_and_names_have_different_streams() {
        let make = |name, seed, chunk| {
            let distribution = Distribution { mean: 0.0, deviation: 0.01 };
            let source = TensorSource { seed, name, format: Format::Q8_0, distribution };
            let mut buffer = vec![0; 34 * 4];
            source.fill(chunk, &mut buffer, &mut Vec::new());
            buffer
        };
        let first = make("blk.0.ffn_up.weight", 1, 0);
        assert_eq!(first, make("blk.0.ffn_up.weight", 1, 0));
        assert_ne!(first, make("blk.0.ffn_up.weight", 1, 1));
        assert_ne!(first, make("blk.0.ffn_up.weight", 2, 0));
        assert_ne!(first, make("blk.1.ffn_up.weight", 1, 0));
    }

    #[test]
    fn the_unfinished_file_is_in_the_same_folder() {
        let path = partial_path(Path::new("folder/model.gguf"));
        assert_eq!(path.parent(), Some(Path::new("folder")));
        assert!(path.to_string_lossy().ends_with(".partial"));
    }
}
