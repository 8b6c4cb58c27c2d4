//! The time that an NPU needs for a matrix multiplication.
//!
//! HeteroLLM paper, section 3.2. A systolic array holds a tile of one matrix while the rows of the other stream
//! through it. `M` is the number of streamed rows, `N` their width, and `K` the number of stationary columns, all
//! padded to the tile size of the array. `F0` is the speed of streaming and `lambda` the relative cost of loading the
//! array. The time `t` is:
//!
//! ```text
//! t(M, N, K) = 2 M N K / F0 * (1 + lambda N / M)
//! ```
//!
//! The formula has the three effects of the paper: stages (padding), order (the weights or the activations are
//! streamed), and shape (a stationary matrix that is large relative to the stream is loaded repeatedly). The NPU's
//! compiler chooses the faster order. No matmul takes less time than loading its weights from memory.
//!
//! Not here: the sizes of NPU graphs ([`super::graphs`]), and measured times ([`super::matmul_times`]).

use hearth_profiles::device::soc::{MemoryBandwidths, SocNpu};

use super::matmul::Matmul;
use super::matmul_times::MatmulTimeTable;

#[derive(Debug, Clone)]
pub struct NpuLatencyModel<'a> {
    array: &'a SocNpu,
    /// Memory bandwidth of the NPU alone, in bytes per second.
    bandwidth: f64,
    measured: Option<MatmulTimeTable>,
}

impl<'a> NpuLatencyModel<'a> {
    pub fn new(npu: &'a SocNpu, bandwidths: &MemoryBandwidths) -> Self {
        let measured =
            npu.matmul_profile.as_ref().map(|profiled| MatmulTimeTable::new(profiled, npu.tile_size.value));
        Self { array: npu, bandwidth: bandwidths.single_processor.value.0, measured }
    }

    /// Returns the seconds to stream `rows` rows of width `inner` through an array with `columns` stationary columns.
    pub fn stream_seconds(&self, rows: u64, inner: u64, columns: u64) -> f64 {
        let (rows, inner, columns) = (self.padded(rows), self.padded(inner), self.padded(columns));
        let speed = self.array.matmul.value.0;
        2.0 * rows * inner * columns / speed * (1.0 + self.array.order_penalty.value * inner / rows)
    }

    /// Returns the seconds for a matmul with `tokens` tokens: from the table of measured times if the profile has such
    /// a table, else by the formula in the faster order.
    pub fn matmul_seconds(&self, matmul: Matmul, tokens: u64) -> f64 {
        if matmul.outputs == 0 || tokens == 0 {
            return 0.0;
        }
        if let Some(measured) = &self.measured {
            return measured.matmul_seconds(matmul, tokens);
        }
        let weights_stream = self.stream_seconds(matmul.outputs, matmul.inputs, tokens);
        let tokens_stream = self.stream_seconds(tokens, matmul.inputs, matmul.outputs);
        let load = self.array.bits_per_weight.value / 8.0 * matmul.weight_count() / self.bandwidth;
        weights_stream.min(tokens_stream).max(load)
    }

    /// Rounds a dimension up to whole tiles.
    fn padded(&self, size: u64) -> f64 {
        let tile = u64::from(self.array.tile_size.value.max(1));
        (size.div_ceil(tile) * tile) as f64
    }
}

#[cfg(test)]
mod tests {
    use hearth_profiles::device::{Soc, shipped_profile};

    use super::*;

    fn soc() -> Soc {
        shipped_profile("snapdragon-8-gen-3").unwrap().soc.unwrap()
    }

    fn npu(soc: &Soc) -> NpuLatencyModel<'_> {
        NpuLatencyModel::new(soc.npu.as_ref().unwrap(), &soc.memory_bandwidths)
    }

    #[test]
    fn time_grows_in_steps_of_a_tile() {
        // Compute-bound: the arithmetic of 32 tokens takes 2.8 ms, loading the 14336 x 4096 weights 2.7 ms.
        let soc = soc();
        let time = |tokens| npu(&soc).matmul_seconds(Matmul { inputs: 14336, outputs: 4096 }, tokens);
        assert_eq!((time(1), time(33)), (time(32), time(64)));
        assert!(time(33) > 1.9 * time(32));
    }

    #[test]
    fn order_of_the_published_matmul_makes_a_factor_of_six() {
        let soc = soc();
        let time = |rows, columns| npu(&soc).stream_seconds(rows, 4096, columns);
        let ratio = time(1024, 14336) / time(14336, 1024);
        assert!((ratio - 6.0).abs() < 1e-3, "{ratio}");
    }

    #[test]
    fn matmul_uses_the_faster_order_and_is_bound_by_loading_weights() {
        // 2 * 256 * 4096 * 4096 / 11.64e12 * 3.188 = 2.353 ms.
        let (soc, square) = (soc(), Matmul { inputs: 4096, outputs: 4096 });
        let time = npu(&soc).matmul_seconds(square, 256);
        assert!((time - 2.3526e-3).abs() < 1e-7, "{time}");
        // 2 bytes * 4096 * 4096 / 43.3e9 = 0.775 ms; the arithmetic of 32 tokens takes 0.294 ms.
        assert!((npu(&soc).matmul_seconds(square, 32) - 0.77493e-3).abs() < 1e-7);
        assert_eq!(npu(&soc).matmul_seconds(square.with_outputs(0), 32), 0.0);
    }
}
