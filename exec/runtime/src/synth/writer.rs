//! Writes a synthetic model file of any size with constant memory use.
//!
//! Threads take chunks of a fixed number of weights in file order. Each thread fills a buffer and writes it at the
//! offset of the chunk, with its own file handle. The random stream of a chunk is `ChaCha8` with a key from (seed,
//! tensor name) and the index of the chunk as the stream number, so the bytes depend neither on the thread nor on
//! the order. The file is removed if an error occurs.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Seek, SeekFrom, Write};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::thread;

use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

use super::blocks;
use super::header::SynthPlan;
use super::{SynthError, SynthOptions};

/// Number of weights in a chunk, a whole number of blocks in every format. The bytes of a synthetic model depend on
/// this number, so it must not be changed.
const CHUNK_WEIGHTS: u64 = 1 << 20;

/// A part of a tensor that is written at once.
#[derive(Debug, Clone, Copy)]
struct Chunk {
    tensor: usize,
    /// The index of the chunk in the tensor.
    number: u64,
    offset: u64,
    bytes: u64,
}

pub(super) fn write_model(
    options: &SynthOptions,
    plan: &SynthPlan,
    path: &Path,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<(), SynthError> {
    let failed = |verb| move |source| SynthError::Io { verb, path: path.to_owned(), source };
    let mut file = File::create(path).map_err(failed("create"))?;
    let mut fill = || {
        file.write_all(&plan.layout.header)?;
        // Padding between tensors is never written, so that it reads as zeros.
        file.set_len(plan.layout.file_bytes)?;
        write_weights(options, plan, path, progress)
    };
    fill().map_err(|error| {
        let _ = fs::remove_file(path);
        failed("write")(error)
    })
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
                if let Err(error) = write_chunks(options.seed, plan, path, chunks, next, &sender) {
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
            let (offset, bytes) = (tensor.offset + start, size.min(tensor.bytes.0 - start));
            chunks.push(Chunk { tensor: index, number, offset, bytes });
        }
    }
    chunks
}

/// Writes chunks on one thread until no chunk is left or the receiver of the written byte counts is closed.
fn write_chunks(
    seed: u64,
    plan: &SynthPlan,
    path: &Path,
    chunks: &[Chunk],
    next: &AtomicUsize,
    written: &mpsc::Sender<io::Result<u64>>,
) -> io::Result<()> {
    let mut file = OpenOptions::new().write(true).open(path)?;
    let (mut buffer, mut scratch) = (Vec::new(), Vec::new());
    loop {
        let at = next.fetch_add(1, Ordering::Relaxed);
        let Some(chunk) = chunks.get(at) else { return Ok(()) };
        let tensor = &plan.layout.tensors[chunk.tensor];
        buffer.resize(chunk.bytes as usize, 0);
        let mut rng = random_stream(seed, &tensor.name, chunk.number);
        let distribution = plan.distributions[chunk.tensor];
        blocks::fill_blocks(tensor.format, distribution, &mut rng, &mut buffer, &mut scratch);
        file.seek(SeekFrom::Start(chunk.offset))?;
        file.write_all(&buffer)?;
        if written.send(Ok(chunk.bytes)).is_err() {
            return Ok(());
        }
    }
}

/// Returns the random stream of the chunk with the index `chunk` of the tensor `name`.
///
/// The key of the random generator is the seed, followed by three FNV-1a hashes of the name with different start
/// values, so that two names do not have the same key by accident.
fn random_stream(seed: u64, name: &str, chunk: u64) -> ChaCha8Rng {
    let mut key = [0; 32];
    key[..8].copy_from_slice(&seed.to_le_bytes());
    for (lane, out) in key[8..].as_chunks_mut::<8>().0.iter_mut().enumerate() {
        let start = 0xcbf2_9ce4_8422_2325 ^ lane as u64;
        let hash =
            name.bytes().fold(start, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
        *out = hash.to_le_bytes();
    }
    let mut rng = ChaCha8Rng::from_seed(key);
    rng.set_stream(chunk);
    rng
}

#[cfg(test)]
mod tests {
    use hearth_profiles::Format;

    use super::*;
    use crate::synth::blocks::Distribution;

    #[test]
    fn chunks_and_names_have_different_streams() {
        let make = |name, seed, chunk| {
            let distribution = Distribution { mean: 0.0, standard_deviation: 0.01 };
            let (mut rng, mut buffer) = (random_stream(seed, name, chunk), vec![0; 34 * 4]);
            blocks::fill_blocks(Format::Q8_0, distribution, &mut rng, &mut buffer, &mut Vec::new());
            buffer
        };
        let first = make("blk.0.ffn_up.weight", 1, 0);
        assert_eq!(first, make("blk.0.ffn_up.weight", 1, 0));
        assert_ne!(first, make("blk.0.ffn_up.weight", 1, 1));
        assert_ne!(first, make("blk.0.ffn_up.weight", 2, 0));
        assert_ne!(first, make("blk.1.ffn_up.weight", 1, 0));
    }
}
