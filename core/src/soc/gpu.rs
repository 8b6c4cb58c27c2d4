//! The time that a SoC's GPU needs for a matrix multiplication.
//!
//! HeteroLLM paper, section 3.1: its speed is the same for every shape, bound by arithmetic or by the bus,
//!
//! ```text
//! T = max(2 S i o / F_g, (weights + 2 S (i + o)) / B_g) + t_async
//! ```
//!
//! with activations of two bytes and the cost of submitting a kernel behind another. An empty queue is part of
//! waiting ([`super::sync`]).

use hearth_profiles::device::Soc;

use super::matmul::Matmul;

/// Bytes of an activation in FP16.
const ACTIVATION: f64 = 2.0;

/// A GPU that computes with weights of some number of bits.
#[derive(Debug, Clone, Copy)]
pub struct Gpu {
    speed: f64,
    bandwidth: f64,
    submission: f64,
    /// Bytes of a weight.
    pub weight: f64,
}

impl Gpu {
    /// The GPU of a SoC for weights of `bits`.
    pub fn new(soc: &Soc, weight_bits: f64) -> Self {
        Self {
            speed: soc.gpu.matmul.value.0,
            bandwidth: soc.bus.one.value.0,
            submission: soc.gpu.submission.value.0,
            weight: weight_bits / 8.0,
        }
    }

    /// Seconds for a product with `tokens`; 0 for an empty one.
    pub fn product(&self, matmul: Matmul, tokens: u64) -> f64 {
        if matmul.outputs == 0 || tokens == 0 {
            return 0.0;
        }
        let (tokens, sides) = (tokens as f64, matmul.inputs as f64 + matmul.outputs as f64);
        let bytes = self.weight * matmul.weights() + ACTIVATION * tokens * sides;
        self.kernel(2.0 * tokens * matmul.weights(), bytes)
    }

    /// Seconds for a kernel.
    pub fn kernel(&self, flops: f64, bytes: f64) -> f64 {
        (flops / self.speed).max(bytes / self.bandwidth) + self.submission
    }

    /// Seconds for a product in decoding: what its arithmetic or its weights take. The published closed form counts no
    /// submission there, as the queue never runs empty.
    pub fn streamed(&self, matmul: Matmul, tokens: u64) -> f64 {
        (2.0 * tokens as f64 * matmul.weights() / self.speed).max(self.read(self.weight * matmul.weights()))
    }

    /// Seconds per weight when `tokens` tokens are decoded at once.
    pub fn seconds_per_weight(&self, tokens: u64) -> f64 {
        (2.0 * tokens as f64 / self.speed).max(self.weight / self.bandwidth)
    }

    /// Seconds for bytes over the bus, alone.
    pub fn read(&self, bytes: f64) -> f64 {
        bytes / self.bandwidth
    }
}
