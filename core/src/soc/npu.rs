//! The time that an NPU needs for a matrix multiplication.
//!
//! HeteroLLM paper, section 3.2. A systolic array holds a tile of one matrix while the rows of the other stream
//! through it. `M` is the number of streamed rows, `N` their width, and `K` the number of stationary columns, all
//! padded to the tile size of the array:
//!
//! ```text
//! t(M, N, K) = 2 M N K / F0 * (1 + lambda N / M)
//! ```
//!
//! This has the three effects of the paper: stages (padding), order (the weights or the activations are streamed),
//! and shape (a stationary matrix that is large relative to the stream is loaded repeatedly). The compiler chooses
//! the faster order. No matmul takes less time than loading its weights over the bus.
//!
//! Not here: the sizes of its graphs ([`super::graphs`]), and measured times ([`super::profiled`]).

use hearth_profiles::device::soc::{Bus, SocNpu};

use super::matmul::Matmul;
use super::profiled::MeasuredTimes;

/// An NPU and its memory bandwidth.
#[derive(Debug, Clone)]
pub struct Npu<'a> {
    array: &'a SocNpu,
    /// Memory bandwidth of the NPU alone, in bytes per second.
    bandwidth: f64,
    measured: Option<MeasuredTimes>,
}

impl<'a> Npu<'a> {
    pub fn new(npu: &'a SocNpu, bus: &Bus) -> Self {
        let measured = npu.profiled.as_ref().map(|profiled| MeasuredTimes::new(profiled, npu.tile.value));
        Self { array: npu, bandwidth: bus.single_processor.value.0, measured }
    }

    /// Returns the seconds to stream `rows` rows of width `inner` through an array with `columns` stationary columns.
    pub fn stream_time(&self, rows: u64, inner: u64, columns: u64) -> f64 {
        let (rows, inner, columns) = (self.padded(rows), self.padded(inner), self.padded(columns));
        let speed = self.array.matmul.value.0;
        2.0 * rows * inner * columns / speed * (1.0 + self.array.order_penalty.value * inner / rows)
    }

    /// Returns the seconds for a matmul with `tokens` tokens: from the table of measured times if the profile has
    /// one, else by the formula in the faster order.
    pub fn matmul_time(&self, matmul: Matmul, tokens: u64) -> f64 {
        if matmul.outputs == 0 || tokens == 0 {
            return 0.0;
        }
        if let Some(measured) = &self.measured {
            return measured.matmul_time(matmul, tokens);
        }
        let weights_stream = self.stream_time(matmul.outputs, matmul.inputs, tokens);
        let tokens_stream = self.stream_time(tokens, matmul.inputs, matmul.outputs);
        weights_stream.min(tokens_stream).max(self.weight_load_time(matmul))
    }

    /// Returns the seconds to load the weights over the bus.
    fn weight_load_time(&self, matmul: Matmul) -> f64 {
        self.array.weight_bits.value / 8.0 * matmul.weight_count() / self.bandwidth
    }

    /// Rounds a dimension up to whole tiles.
    fn padded(&self, size: u64) -> f64 {
        let tile = u64::from(self.array.tile.value.max(1));
        (size.div_ceil(tile) * tile) as f64
    }
}

#[cfg(test)]
mod tests {
    use hearth_profiles::device::shipped;

    use super::*;

    fn with_npu(check: impl Fn(&Npu)) {
        let device = shipped("snapdragon-8-gen-3").unwrap();
        let soc = device.soc.unwrap();
        check(&Npu::new(soc.npu.as_ref().unwrap(), &soc.bus));
    }

    #[test]
    fn time_grows_in_steps_of_a_tile() {
        with_npu(|npu| {
            // Compute-bound: the arithmetic of 32 tokens takes 2.8 ms, loading the 14336 x 4096 weights 2.7 ms.
            let down = Matmul { inputs: 14336, outputs: 4096 };
            assert_eq!(npu.matmul_time(down, 1), npu.matmul_time(down, 32));
            assert_eq!(npu.matmul_time(down, 33), npu.matmul_time(down, 64));
            assert!(npu.matmul_time(down, 33) > 1.9 * npu.matmul_time(down, 32));
        });
    }

    #[test]
    fn order_of_the_published_matmul_makes_a_factor_of_six() {
        with_npu(|npu| {
            let ratio = npu.stream_time(1024, 4096, 14336) / npu.stream_time(14336, 4096, 1024);
            assert!((ratio - 6.0).abs() < 1e-3, "{ratio}");
        });
    }

    #[test]
    fn matmul_uses_the_faster_order_and_is_bound_by_loading_weights() {
        with_npu(|npu| {
            // 2 * 256 * 4096 * 4096 / 11.64e12 * 3.188 = 2.353 ms.
            let square = Matmul { inputs: 4096, outputs: 4096 };
            let time = npu.matmul_time(square, 256);
            assert!((time - 2.3526e-3).abs() < 1e-7, "{time}");
            // 2 bytes * 4096 * 4096 / 43.3e9 = 0.775 ms; the arithmetic of 32 tokens takes 0.294 ms.
            assert!((npu.matmul_time(square, 32) - 0.77493e-3).abs() < 1e-7);
            assert_eq!(npu.matmul_time(square.with_outputs(0), 32), 0.0);
        });
    }
}
