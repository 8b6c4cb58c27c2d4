//! The gain of each layout of weights over the naive one, on this machine's GPU.
//!
//! ML Drift paper, section 3.1: up to 20 %. Products of one token and of 64 with each layout, at the best of the candidates
//! that `hearth gpu --tune` tries. Times of a software driver say what they say of the processor under it.

use hearth_gpu::kernels::product::Tiling;
use hearth_gpu::matrix::GpuMatrix;
use hearth_gpu::measure::product_launches;
use hearth_gpu::tuning::candidates;
use hearth_gpu::virtual_tensor::WeightOrder;
use hearth_gpu::{Gpu, GpuError, Mask};
use hearth_kernels::{KernelFormat, Matrix};
use hearth_runtime::clock::wall_nanos;

/// Rows and inputs. source: assumed, the shape of a model of 1 to 3 billion weights
const SIDE: usize = 2048;
/// The shortest of so many times counts.
const REPEATS: usize = 5;

/// Seconds of a product of so many tokens.
fn seconds(gpu: &Gpu, matrix: Matrix<'_>, tokens: u32, tiling: Tiling) -> Result<f64, GpuError> {
    let weights = GpuMatrix::upload(gpu, matrix, tiling)?;
    let launches = product_launches(gpu, &weights, tokens)?;
    let mut best = f64::INFINITY;
    for _ in 0..REPEATS {
        let begin = wall_nanos();
        gpu.submit(&launches)?;
        gpu.finished()?;
        best = best.min(wall_nanos().saturating_sub(begin) as f64 * 1e-9);
    }
    Ok(best)
}

fn main() -> Result<(), GpuError> {
    let gpu = match Gpu::open(Mask::default()) {
        Err(GpuError::NoAdapter) => {
            println!("no GPU that Vulkan, Metal or DX12 can reach");
            return Ok(());
        }
        opened => opened?,
    };
    println!("{} ({})", gpu.facts().name, gpu.facts().driver);
    println!("{:6} {:>6} {:>12} {:>12} {:>8}", "", "tokens", "naive, us", "best, us", "gain");
    for format in [KernelFormat::Q8_0, KernelFormat::Q4K, KernelFormat::F16] {
        let row = format.row_bytes(SIDE).unwrap_or(0);
        let bytes: Vec<u8> =
            (0..SIDE * row).map(|at| (at.wrapping_mul(2_654_435_761) >> 9) as u8 & 0x3f).collect();
        let matrix = Matrix { format, length: SIDE, rows: SIDE, bytes: &bytes };
        for tokens in [1, 64] {
            let mut best = [f64::INFINITY; 2];
            for tiling in candidates(gpu.capabilities()) {
                let of = &mut best[usize::from(tiling.order == WeightOrder::Interleaved)];
                *of = of.min(seconds(&gpu, matrix, tokens, tiling)?);
            }
            let [naive, other] = best;
            println!(
                "{:6} {tokens:6} {:12.1} {:12.1} {:+7.1} %",
                format.to_string(),
                naive * 1e6,
                other * 1e6,
                (naive / other - 1.0) * 100.0
            );
        }
    }
    Ok(())
}
