//! Bandwidth of each format's matrix-vector product beside plain reading of the weights.
//!
//!     cargo run --release -p hearth-runtime --example kernel_bandwidth -- [MiB of weights]
//!
//! One thread. The weights lie in memory as a model's do, in one run of random blocks that is walked from end to
//! end, so that no near cache has them. For each format and each instruction set: bytes of weights per second, and
//! that as a ratio to adding up the same bytes, measured alternately. Time is the thread's processor time, because
//! the machine may be shared; the best of the passes counts.

use std::error::Error;
use std::sync::Arc;

use hearth_kernels::{InstructionSet, KernelFormat};
use hearth_profiles::measure::Kernels;
use hearth_runtime::clock::thread_cpu_nanos;
use hearth_runtime::profile::CpuKernels;
use hearth_runtime::{Cpu, Pool, PoolOptions};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// Weights in a row.
const COLUMNS: usize = 2048;

/// Passes over the weights; the best one counts.
const PASSES: usize = 5;

/// The oracle is slow: it gets only one part in this many of the weights.
const ORACLE_SHARE: usize = 16;

/// Every byte of plain numbers: as f32, f16 and bf16 an ordinary one, neither zero nor subnormal.
const ORDINARY: u8 = 0x1c;

/// Bytes per second of thread time, in GB/s.
fn speed(bytes: usize, work: impl FnOnce()) -> f64 {
    let start = thread_cpu_nanos();
    work();
    bytes as f64 / (thread_cpu_nanos() - start).max(1) as f64
}

/// Adds up the words: the least arithmetic that reads every byte.
fn read(bytes: &[u8]) {
    let mut sums = [0u64; 16];
    for line in bytes.as_chunks::<128>().0 {
        for (sum, word) in sums.iter_mut().zip(line.as_chunks::<8>().0) {
            *sum = sum.wrapping_add(u64::from_ne_bytes(*word));
        }
    }
    std::hint::black_box(sums);
}

fn kernels(instructions: Option<InstructionSet>) -> Result<CpuKernels, Box<dyn Error>> {
    let pool = Pool::new(PoolOptions { threads: 1, pin: false, spin_ns: 0 })?;
    let mut cpu = Cpu::new(Arc::new(pool));
    cpu.instructions = instructions.unwrap_or(cpu.instructions);
    Ok(CpuKernels::new(cpu))
}

fn main() -> Result<(), Box<dyn Error>> {
    let mebibytes = std::env::args().nth(1).map_or(Ok(512), |text| text.parse::<usize>())?.max(1);
    let mut random = vec![0u8; mebibytes << 20];
    ChaCha8Rng::seed_from_u64(1).fill_bytes(&mut random);
    let plain = vec![ORDINARY; mebibytes << 20];
    let (mut oracle, mut fast) = (kernels(Some(InstructionSet::SCALAR))?, kernels(None)?);
    println!("{mebibytes} MiB of weights, rows of {COLUMNS}; {}", fast.name());
    println!("| format | bits a weight | scalar GB/s | / reading | SIMD GB/s | / reading | reading GB/s |");
    println!("| --- | --- | --- | --- | --- | --- | --- |");
    for format in KernelFormat::ALL {
        let weights = if format.format().block_len() == 1 { &plain } else { &random };
        let row = format.row_bytes(COLUMNS).ok_or("a row is whole blocks")?;
        let whole = &weights[..weights.len() / row * row];
        let part = &whole[..whole.len() / row / ORACLE_SHARE * row];
        let (mut reading, mut slow, mut simd) = (0.0f64, 0.0f64, 0.0f64);
        // The first pass fills buffers and is not counted.
        for pass in 0..=PASSES {
            let read = speed(whole.len(), || read(whole));
            let product = speed(whole.len(), || fast.multiply(format.format(), COLUMNS, whole, 1, 1));
            let counts = if pass == 0 { 0.0 } else { 1.0 };
            (reading, simd) = (reading.max(counts * read), simd.max(counts * product));
        }
        for _ in 0..2 {
            slow = slow.max(speed(part.len(), || oracle.multiply(format.format(), COLUMNS, part, 1, 1)));
        }
        println!(
            "| {format} | {:.2} | {slow:.2} | {:.2} | {simd:.2} | {:.2} | {reading:.2} |",
            format.format().bits_per_weight(),
            slow / reading,
            simd / reading
        );
    }
    Ok(())
}
