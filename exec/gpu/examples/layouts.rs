//! Measures how much faster matmuls are with the interleaved weight layout than with the naive one, on this GPU.
//!
//! ML Drift paper, section 3.1, reports up to 20 %. For matmuls with one token and with 64 tokens, this example prints
//! the time of the fastest tiling in each layout, among the candidates that `hearth gpu --tune` tries. With a software
//! driver, the times only describe the CPU.

use hearth_gpu::measure::random_weights;
use hearth_gpu::tuning::{candidate_tilings, measure_matmul_seconds};
use hearth_gpu::virtual_tensor::WeightOrder;
use hearth_gpu::{CapabilityMask, Gpu, GpuError};
use hearth_kernels::{Layout, Matrix};
use hearth_profiles::Format;

/// Rows and columns of the weight matrix. source: assumed, the shape of a model of 1 to 3 billion weights
const MATRIX_SIDE: usize = 2048;

fn main() -> Result<(), GpuError> {
    let gpu = match Gpu::open(CapabilityMask::default()) {
        Err(GpuError::NoAdapter) => {
            println!("no GPU with a Vulkan, Metal or DX12 driver was found; install a driver");
            return Ok(());
        }
        opened => opened?,
    };
    println!("{} ({})", gpu.info().name, gpu.info().driver);
    println!("{:6} {:>6} {:>12} {:>12} {:>8}", "", "tokens", "naive, us", "best, us", "gain");
    for format in [Format::Q8_0, Format::Q4K, Format::F16] {
        let bytes = random_weights(format, MATRIX_SIDE);
        let matrix = Matrix {
            format,
            row_length: MATRIX_SIDE,
            rows: MATRIX_SIDE,
            layout: Layout::Rows,
            bytes: &bytes,
        };
        for tokens in [1, 64] {
            let mut best = [f64::INFINITY; 2];
            for tiling in candidate_tilings(gpu.capabilities()) {
                let of = &mut best[usize::from(tiling.weight_order == WeightOrder::Interleaved)];
                *of = of.min(measure_matmul_seconds(&gpu, matrix, tiling, tokens)?);
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
