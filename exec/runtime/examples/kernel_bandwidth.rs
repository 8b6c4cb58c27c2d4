//! Measures the bandwidth of matrix-vector products in each weight format, compared with only reading the weights.
//!
//!     cargo run --release -p hearth-runtime --example kernel_bandwidth -- [MiB of weights]
//!
//! The example uses one thread. The weights are random blocks in one contiguous buffer, which is much larger than the
//! CPU's caches and is read from start to end. For each format, the example prints the bytes of weights that
//! scalar and SIMD kernels process per second, and the ratio of this rate to the rate of only summing the same bytes.
//! The two measurements alternate. Times are the CPU time of the thread, because the machine may be shared; the best of
//! several passes counts.

use std::error::Error;
use std::sync::Arc;

use hearth_kernels::InstructionSet;
use hearth_profiles::Format;
use hearth_profiles::measure::Kernels;
use hearth_runtime::clock::thread_cpu_nanos;
use hearth_runtime::profile::CpuKernels;
use hearth_runtime::{Cpu, ThreadPool, ThreadPoolOptions};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// Number of weights in a row.
const COLUMNS: usize = 2048;

/// Number of passes over the weights; the fastest pass counts.
const PASSES: usize = 5;

/// The scalar kernels multiply only 1/16 of the weights, because they are slow.
const SCALAR_DIVISOR: usize = 16;

/// The value of every byte of float weights and of `MXFP4` blocks. With this value, no f32, f16 or bf16 number and no
/// power of two is subnormal; arithmetic with subnormal numbers is slow.
const FLOAT_BYTE: u8 = 0x1c;

/// Returns the rate of `work`, which processes `bytes` bytes, in GB per second of CPU time.
fn speed(bytes: usize, work: impl FnOnce()) -> f64 {
    let start = thread_cpu_nanos();
    work();
    bytes as f64 / (thread_cpu_nanos() - start).max(1) as f64
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

/// Returns CPU kernels on one thread, with the given instruction set or, without one, the fastest.
fn kernels(instructions: Option<InstructionSet>) -> Result<CpuKernels, Box<dyn Error>> {
    let pool = ThreadPool::new(ThreadPoolOptions { threads: 1, pin_workers: false, spin_ns: 0 })?;
    let mut cpu = Cpu::new(Arc::new(pool));
    cpu.instruction_set = instructions.unwrap_or(cpu.instruction_set);
    Ok(CpuKernels::new(cpu))
}

fn main() -> Result<(), Box<dyn Error>> {
    let mebibytes = std::env::args().nth(1).map_or(Ok(512), |text| text.parse::<usize>())?.max(1);
    let mut random = vec![0u8; mebibytes << 20];
    ChaCha8Rng::seed_from_u64(1).fill_bytes(&mut random);
    let plain = vec![FLOAT_BYTE; mebibytes << 20];
    let (mut oracle, mut fast) = (kernels(Some(InstructionSet::SCALAR))?, kernels(None)?);
    println!("{mebibytes} MiB of weights, rows of {COLUMNS}; {}", fast.description());
    println!("| format | bits a weight | scalar GB/s | / reading | SIMD GB/s | / reading | reading GB/s |");
    println!("| --- | --- | --- | --- | --- | --- | --- |");
    for &format in Format::ALL {
        let has_float_bytes = format.block_len() == 1 || format == Format::Mxfp4;
        let weights = if has_float_bytes { &plain } else { &random };
        let row = format.row_bytes(COLUMNS as u64).ok_or("a row has a partial block")?.0 as usize;
        let whole = &weights[..weights.len() / row * row];
        let part = &whole[..whole.len() / row / SCALAR_DIVISOR * row];
        let (mut reading, mut slow, mut simd) = (0.0f64, 0.0f64, 0.0f64);
        // The first pass fills buffers and is not counted.
        for pass in 0..=PASSES {
            let read = speed(whole.len(), || read(whole));
            let matvec = speed(whole.len(), || fast.multiply(format, COLUMNS, whole, 1, 1));
            let counts = if pass == 0 { 0.0 } else { 1.0 };
            (reading, simd) = (reading.max(counts * read), simd.max(counts * matvec));
        }
        for _ in 0..2 {
            slow = slow.max(speed(part.len(), || oracle.multiply(format, COLUMNS, part, 1, 1)));
        }
        let (bits, slow_share, simd_share) = (format.bits_per_weight(), slow / reading, simd / reading);
        print!("| {format} | {bits:.2} | {slow:.2} | {slow_share:.2} ");
        println!("| {simd:.2} | {simd_share:.2} | {reading:.2} |");
    }
    Ok(())
}
