//! How many multiplications a second does one thread do, of each format and for how many tokens at once?
//!
//!     cargo run --release -p hearth-exec --example product_speed -- [rows] [columns]

use std::error::Error;
use std::sync::Arc;

use hearth_exec::profile::CpuKernels;
use hearth_exec::{Cpu, Pool, PoolOptions};
use hearth_profiles::measure::Kernels;

/// Processor time of this thread, in nanoseconds.
fn thread_nanos() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the call fills the structure it is given.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let mut number = |default: usize| arguments.next().map_or(Ok(default), |text| text.parse());
    let (rows, columns) = (number(512)?, number(2048)?);
    let pool = Arc::new(Pool::new(PoolOptions { threads: 1, ..PoolOptions::default() })?);
    let mut kernels = CpuKernels::new(Cpu::new(pool));
    println!("G multiplications a second of processor time, {rows} rows of {columns}");
    let only = std::env::var("FORMAT").ok();
    let tokens_only: Option<usize> = std::env::var("TOKENS").ok().and_then(|t| t.parse().ok());
    for format in kernels.formats() {
        if only.as_ref().is_some_and(|only| *only != format.name()) {
            continue;
        }
        let bytes = format.row_bytes(columns as u64).ok_or("columns are not whole blocks")?.0 as usize;
        let weights: Vec<u8> = (0..rows * bytes).map(|at| (at % 59) as u8).collect();
        print!("{format:>8}");
        for tokens in [1, 4, 8, 16, 32, 64, 128, 512] {
            if tokens_only.is_some_and(|only| only != tokens) {
                continue;
            }
            let repeats = (256 / tokens).max(1);
            let mut best = 0.0f64;
            for _ in 0..if tokens_only.is_some() { 60 } else { 5 } {
                let start = thread_nanos();
                kernels.multiply(format, columns, &weights, tokens, repeats);
                let products = rows * columns * tokens * repeats;
                best = best.max(products as f64 / (thread_nanos() - start) as f64);
            }
            print!(" {tokens}: {best:.1}");
        }
        println!();
    }
    Ok(())
}
