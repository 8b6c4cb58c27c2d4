//! The time that a SoC's GPU needs for a matrix multiplication.
//!
//! HeteroLLM paper, section 3.1: the speed is the same for every shape, bound by arithmetic or by memory bandwidth.
//!
//! ```text
//! T = max(2 S i o / F_g, (weights + 2 S (i + o)) / B_g) + t_async
//! ```
//!
//! T is the time of the matmul; S, i and o are the numbers of tokens, inputs and outputs; `weights` is the size of the
//! weights in bytes. `F_g` and `B_g` are the GPU's operation rate and bandwidth. Each activation has two bytes, and
//! `t_async` is the time to submit a kernel to a queue that is not empty. The cost of an empty queue is part of
//! synchronisation ([`super::sync`]).

use hearth_profiles::device::Soc;

use super::matmul::Matmul;

const ACTIVATION_BYTES: f64 = 2.0;

/// The latency model of a SoC's GPU, for weights of a fixed number of bits.
#[derive(Debug, Clone, Copy)]
pub struct GpuLatencyModel {
    speed: f64,
    bandwidth: f64,
    submission: f64,
    pub bytes_per_weight: f64,
}

impl GpuLatencyModel {
    /// Creates the model of a SoC's GPU for weights of `weight_bits` bits.
    pub fn new(soc: &Soc, weight_bits: f64) -> Self {
        Self {
            speed: soc.gpu.matmul.value.0,
            bandwidth: soc.memory_bandwidths.single_processor.value.0,
            submission: soc.gpu.submission.value.0,
            bytes_per_weight: weight_bits / 8.0,
        }
    }

    /// Returns the seconds for a matmul with `tokens` tokens; 0 if the matmul has no outputs or no tokens.
    pub fn matmul_seconds(&self, matmul: Matmul, tokens: u64) -> f64 {
        if matmul.outputs == 0 || tokens == 0 {
            return 0.0;
        }
        let (tokens, sides) = (tokens as f64, matmul.inputs as f64 + matmul.outputs as f64);
        let bytes = self.bytes_per_weight * matmul.weight_count() + ACTIVATION_BYTES * tokens * sides;
        self.kernel_seconds(2.0 * tokens * matmul.weight_count(), bytes)
    }

    /// Returns the seconds for a kernel with `flops` operations and `bytes` bytes of memory traffic.
    pub fn kernel_seconds(&self, flops: f64, bytes: f64) -> f64 {
        (flops / self.speed).max(bytes / self.bandwidth) + self.submission
    }

    /// Returns the seconds for a matmul in decoding: the longer of its arithmetic and the reading of its weights.
    /// Submission takes no additional time, because the queue never runs empty (HeteroLLM paper).
    pub fn decode_matmul_seconds(&self, matmul: Matmul, tokens: u64) -> f64 {
        let weights = matmul.weight_count();
        (2.0 * tokens as f64 * weights / self.speed).max(self.read_seconds(self.bytes_per_weight * weights))
    }

    /// Returns the seconds per weight of a matmul in decoding, for a batch of `tokens` tokens.
    pub fn seconds_per_weight(&self, tokens: u64) -> f64 {
        (2.0 * tokens as f64 / self.speed).max(self.bytes_per_weight / self.bandwidth)
    }

    /// Returns the seconds to read `bytes` bytes from memory while no other processor uses the memory bus.
    pub fn read_seconds(&self, bytes: f64) -> f64 {
        bytes / self.bandwidth
    }
}
