//! Measures the bandwidth of matrix-vector products in each weight format, compared with only reading the weights.
//!
//!     cargo run --release -p hearth-runtime --example kernel_bandwidth -- [MiB of weights] [threads] [packed]
//!
//! The weights are random blocks in one contiguous buffer, which is much larger than the CPU's caches and is read from
//! start to end. For each format, the example prints the bytes of weights that the kernel multiplies per second, the
//! bytes that a plain sum of the same weights reads per second, and their ratio. The two measurements alternate, the
//! best of several passes counts. The first column is the bound of the arithmetic: the same kernel with a small matrix
//! that stays in the cache of each core. With `packed`, weights are those that `hearth pack` writes.

use std::error::Error;
use std::sync::Arc;
use std::time::Instant;

use hearth_profiles::Format;
use hearth_profiles::measure::Kernels;
use hearth_runtime::profile::CpuKernels;
use hearth_runtime::{Cpu, ThreadPool, ThreadPoolOptions};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// Number of weights in a row.
const COLUMNS: usize = 2048;

/// Number of passes over the weights; the fastest pass counts.
const PASSES: usize = 7;

/// Size of the matrix that stays in the cache, in bytes for each thread.
const CACHED_BYTES: usize = 192 << 10;

/// The value of every byte of float weights and of `MXFP4` blocks. With this value, no f32, f16 or bf16 number and no
/// power of two is subnormal; arithmetic with subnormal numbers is slow.
const FLOAT_BYTE: u8 = 0x1c;

/// Returns the rate of `work`, which processes `bytes` bytes, in GB per second.
#[allow(clippy::disallowed_methods)] // this program measures
fn speed(bytes: usize, work: impl FnOnce()) -> f64 {
    let start = Instant::now();
    work();
    bytes as f64 / start.elapsed().as_nanos().max(1) as f64
}

/// Reads all bytes with minimal arithmetic: sums their 64-bit words.
fn read(bytes: &[u8]) {
    let mut sums = [0u64; 16];
    for line in bytes.as_chunks::<128>().0 {
        for (sum, word) in sums.iter_mut().zip(line.as_chunks::<8>().0) {
            *sum = sum.wrapping_add(u64::from_ne_bytes(*word));
        }
    }
    std::hint::black_box(sums);
}

/// Returns the bytes from the first cache line on, as files are mapped.
fn aligned(bytes: &[u8]) -> &[u8] {
    &bytes[bytes.as_ptr().align_offset(64)..]
}

fn main() -> Result<(), Box<dyn Error>> {
    let packed = std::env::args().any(|argument| argument == "packed");
    let numbers = std::env::args().skip(1).filter(|argument| argument != "packed");
    let arguments = numbers.map(|text| text.parse::<usize>()).collect::<Result<Vec<_>, _>>()?;
    let mebibytes = arguments.first().map_or(512, |&count| count.max(1));
    let threads = arguments.get(1).map_or(1, |&count| count.max(1));
    let mut random = vec![0u8; mebibytes << 20];
    ChaCha8Rng::seed_from_u64(1).fill_bytes(&mut random);
    let plain = vec![FLOAT_BYTE; mebibytes << 20];
    let options = ThreadPoolOptions { threads, pin_workers: threads > 1, ..ThreadPoolOptions::default() };
    let pool = Arc::new(ThreadPool::new(options)?);
    let mut kernels = CpuKernels::new(Cpu::new(Arc::clone(&pool))).with_packed_weights(packed);
    println!("{mebibytes} MiB of weights, rows of {COLUMNS}; {}", kernels.description());
    println!("| format | bits a weight | in cache GB/s | from memory GB/s | reading GB/s | / reading |");
    println!("| --- | --- | --- | --- | --- | --- |");
    for &format in Format::ALL {
        let has_float_bytes = format.block_len() == 1 || format == Format::Mxfp4;
        let weights = aligned(if has_float_bytes { &plain } else { &random });
        let row = format.row_bytes(COLUMNS as u64).ok_or("a row has a partial block")?.0 as usize;
        let whole = &weights[..weights.len() / (16 * row) * 16 * row];
        let small = &whole[..(CACHED_BYTES * threads).min(whole.len()) / (16 * row) * 16 * row];
        let repeats = 1 + (32 << 20) / small.len();
        let (mut cached, mut from_memory, mut reading) = (0.0f64, 0.0f64, 0.0f64);
        for _ in 0..PASSES {
            let rate = speed(repeats * small.len(), || kernels.multiply(format, COLUMNS, small, 1, repeats));
            cached = cached.max(rate);
            from_memory =
                from_memory.max(speed(whole.len(), || kernels.multiply(format, COLUMNS, whole, 1, 1)));
            let rate = speed(whole.len(), || {
                pool.for_each_chunk(whole.len(), whole.len().div_ceil(threads), |_, range| {
                    read(&whole[range]);
                });
            });
            reading = reading.max(rate);
        }
        let (bits, share) = (format.bits_per_weight(), from_memory / reading);
        println!("| {format} | {bits:.2} | {cached:.2} | {from_memory:.2} | {reading:.2} | {share:.2} |");
    }
    Ok(())
}
