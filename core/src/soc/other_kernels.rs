//! The cost of the kernels of a layer other than its matrix multiplications.
//!
//! Two norms, the rotary embedding of queries and keys, the attention scores, their softmax, the weighted sum of the
//! values, two residual additions and the activation of the feed-forward block: nine kernels on the GPU in FP16, each
//! bound by its arithmetic or its memory traffic. Attention is not masked: each token of a prompt computes all scores
//! of the prompt.
//!
//! Not here: decoding, where only the cached keys and values are counted ([`super::decode`]).

use hearth_profiles::model::ModelShape;

use super::gpu::Gpu;

/// Times of the kernels of a layer other than matmuls, in seconds, in the order of execution.
#[derive(Debug, Clone, PartialEq)]
pub struct OtherKernels {
    /// The norm before the attention block.
    pub attention_norm: Vec<f64>,
    /// Rotary embedding, scores, softmax, weighted values.
    pub attention: Vec<f64>,
    /// The residual addition and the norm between attention and feed-forward block.
    pub residual_and_norm: Vec<f64>,
    /// `silu(gate) * up`.
    pub activation: Vec<f64>,
    /// The residual addition after the feed-forward block.
    pub last_residual: Vec<f64>,
}

impl OtherKernels {
    /// Computes the times for `tokens` tokens that attend to `context` positions.
    pub fn new(gpu: &Gpu, shape: &ModelShape, tokens: u64, context: u64) -> Self {
        let (count, seen) = (tokens as f64, context as f64);
        let width = f64::from(shape.embedding);
        let (heads, key) = (f64::from(shape.heads), f64::from(shape.key_length));
        let value = f64::from(shape.value_length);
        let keys = f64::from(shape.kv_heads);
        let moved = |bytes: f64| gpu.kernel_time(0.0, bytes);
        let scores =
            |length: f64| gpu.kernel_time(2.0 * heads * length * count * seen, 2.0 * heads * count * seen);
        let (norm, add) = (moved(4.0 * count * width), moved(6.0 * count * width));
        Self {
            attention_norm: vec![norm],
            attention: vec![
                moved(4.0 * count * (heads + keys) * key),
                scores(key),
                moved(4.0 * heads * count * seen),
                scores(value),
            ],
            residual_and_norm: vec![add, norm],
            activation: vec![moved(6.0 * count * f64::from(shape.feed_forward))],
            last_residual: vec![add],
        }
    }
}
