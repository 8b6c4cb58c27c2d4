//! The gain of each layout of weights over the naive one, on this machine's GPU.
//!
//! ML Drift paper, section 3.1: up to 20 %. Products of one token and of 64 with each layout, at the best of the
//! candidates that `hearth gpu --tune` tries. Times of a software driver say what they say of the processor under it.

use hearth_gpu::measure::arbitrary_weights;
use hearth_gpu::tuning::{candidates, product_seconds};
use hearth_gpu::virtual_tensor::WeightOrder;
use hearth_gpu::{CapabilityMask, Gpu, GpuError};
use hearth_kernels::{KernelFormat, Matrix};

/// Rows and inputs. source: assumed, the shape of a model of 1 to 3 billion weights
const SIDE: usize = 2048;
fn main() -> Result<(), GpuError> {
    let gpu = match Gpu::open(CapabilityMask::default()) {
        Err(GpuError::NoAdapter) => {
            println!("no GPU that Vulkan, Metal or DX12 can reach");
            return Ok(());
        }
        opened => opened?,
    };
    println!("{} ({})", gpu.facts().name, gpu.facts().driver);
    println!("{:6} {:>6} {:>12} {:>12} {:>8}", "", "tokens", "naive, us", "best, us", "gain");
    for format in [KernelFormat::Q8_0, KernelFormat::Q4K, KernelFormat::F16] {
        let bytes = arbitrary_weights(format, SIDE);
        let matrix = Matrix { format, length: SIDE, rows: SIDE, bytes: &bytes };
        for tokens in [1, 64] {
            let mut best = [f64::INFINITY; 2];
            for tiling in candidates(gpu.capabilities()) {
                let of = &mut best[usize::from(tiling.order == WeightOrder::Interleaved)];
                *of = of.min(product_seconds(&gpu, matrix, tiling, tokens)?);
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
