//! The time that an NPU needs for a matrix multiplication.
//!
//! HeteroLLM paper, section 3.2. An array of processing elements holds a tile of one matrix while the rows of the
//! other stream through it. For `M` streamed rows of `N` numbers and `K` held columns, all padded to the array,
//!
//! ```text
//! t(M, N, K) = 2 M N K / F0 * (1 + lambda N / M)
//! ```
//!
//! which has the three effects of the paper: stages (padding), order (streaming the weights or the activations), and
//! shape (a held matrix that is large beside the stream is loaded again and again). The compiler takes the faster
//! order. No product is faster than its weights come over the bus.
//!
//! Not here: the sizes of its graphs ([`super::graphs`]), and measured times ([`super::profiled`]).

use hearth_profiles::device::soc::{Bus, SocNpu};

use super::matmul::Matmul;
use super::profiled::Measured;

/// An NPU and its way to memory.
#[derive(Debug, Clone)]
pub struct Npu<'a> {
    array: &'a SocNpu,
    /// Bytes per second.
    bandwidth: f64,
    measured: Option<Measured>,
}

impl<'a> Npu<'a> {
    /// The NPU of a SoC.
    pub fn new(npu: &'a SocNpu, bus: &Bus) -> Self {
        let measured = npu.profiled.as_ref().map(|profiled| Measured::new(profiled, npu.tile.value));
        Self { array: npu, bandwidth: bus.one.value.0, measured }
    }

    /// Seconds for streaming `rows` rows of `inner` numbers past `held` columns.
    pub fn streaming(&self, rows: u64, inner: u64, held: u64) -> f64 {
        let (rows, inner, held) = (self.padded(rows), self.padded(inner), self.padded(held));
        let speed = self.array.matmul.value.0;
        2.0 * rows * inner * held / speed * (1.0 + self.array.order_penalty.value * inner / rows)
    }

    /// Seconds for a product with `tokens` in the faster order, or the measured time.
    pub fn product(&self, matmul: Matmul, tokens: u64) -> f64 {
        if matmul.outputs == 0 || tokens == 0 {
            return 0.0;
        }
        if let Some(measured) = &self.measured {
            return measured.time(matmul, tokens);
        }
        let weights_stream = self.streaming(matmul.outputs, matmul.inputs, tokens);
        let tokens_stream = self.streaming(tokens, matmul.inputs, matmul.outputs);
        weights_stream.min(tokens_stream).max(self.reading(matmul))
    }

    /// Seconds until its weights have come over the bus.
    fn reading(&self, matmul: Matmul) -> f64 {
        self.array.weight_bits.value / 8.0 * matmul.weights() / self.bandwidth
    }

    /// Rounds a side up to whole tiles.
    fn padded(&self, side: u64) -> f64 {
        let tile = u64::from(self.array.tile.value.max(1));
        (side.div_ceil(tile) * tile) as f64
    }
}

#[cfg(test)]
mod tests {
    use hearth_profiles::device::shipped;

    use super::*;

    fn with(check: impl Fn(&Npu)) {
        let device = shipped("snapdragon-8-gen-3").unwrap();
        let soc = device.soc.unwrap();
        check(&Npu::new(soc.npu.as_ref().unwrap(), &soc.bus));
    }

    #[test]
    fn times_come_in_stages() {
        with(|npu| {
            // Compute-bound: 32 rows of 14336 x 4096 take 2.8 ms, their weights 2.7.
            let down = Matmul { inputs: 14336, outputs: 4096 };
            assert_eq!(npu.product(down, 1), npu.product(down, 32));
            assert_eq!(npu.product(down, 33), npu.product(down, 64));
            assert!(npu.product(down, 33) > 1.9 * npu.product(down, 32));
        });
    }

    #[test]
    fn the_order_of_the_papers_product_makes_six() {
        with(|npu| {
            let ratio = npu.streaming(1024, 4096, 14336) / npu.streaming(14336, 4096, 1024);
            assert!((ratio - 6.0).abs() < 1e-3, "{ratio}");
        });
    }

    #[test]
    fn a_product_takes_the_faster_order_and_no_less_than_its_weights_take_to_come() {
        with(|npu| {
            // 2 * 256 * 4096 * 4096 / 11.64e12 * 3.188 = 2.353 ms.
            let square = Matmul { inputs: 4096, outputs: 4096 };
            assert!((npu.product(square, 256) - 2.3526e-3).abs() < 1e-7, "{}", npu.product(square, 256));
            // 2 bytes * 4096 * 4096 / 43.3e9 = 0.775 ms, though 32 tokens compute in 0.294.
            assert!((npu.product(square, 32) - 0.77493e-3).abs() < 1e-7);
            assert_eq!(npu.product(square.with_outputs(0), 32), 0.0);
        });
    }
}
