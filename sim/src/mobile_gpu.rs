//! Roofline model of a phone's GPU: prefill and decode speed from two numbers.
//!
//! It covers a whole pass, for the kernels of the ML Drift paper. With F operations and BW bytes per second, L layers,
//! h_q query heads of d_h numbers, and the weights of attention, feed-forward block and embedding:
//!
//! ```text
//! prefill  P / max((2 (attn + ffn) P + 2 emb + 4 L h_q d_h P^2) / F, W / BW)    tokens per second, prompt of P
//! decode   BW / (W + KV(position))                                              tokens per second
//! W        q8: attn + ffn + emb bytes; 8/4/4: attn + (ffn + emb) / 2             KV in half precision
//! ```
//!
//! Scores are counted for all pairs of positions: convolution kernels compute the masked half too. `emb` is counted
//! once, also where one matrix is embedding and output.
//!
//! Not here: launches, synchronisation and other processors, which the ring's simulator has.

use hearth_profiles::model::ModelShape;
use hearth_profiles::{Bytes, BytesPerSecond, Flops, FlopsPerSecond};

/// The weight format. ML Drift paper, section 4.2; the scale of each channel is not counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Weights {
    /// Eight bits everywhere.
    Q8,
    /// Eight bits in attention, four in the feed-forward block and the embedding.
    Mixed,
}

/// The peak rates of a GPU.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MobileGpu {
    /// Arithmetic: F.
    pub compute: FlopsPerSecond,
    /// Reading weights and cache: BW.
    pub bandwidth: BytesPerSecond,
}

/// Measured speeds of one model, in tokens a second.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Measured {
    pub weights: Weights,
    pub prefill: f64,
    pub decode: f64,
}

/// Numbers of weights.
struct Counts {
    attention: f64,
    feed_forward: f64,
    embedding: f64,
}

fn counts(shape: &ModelShape) -> Counts {
    let (layers, wide) = (f64::from(shape.layers.0), f64::from(shape.embedding));
    let mixed = f64::from(shape.heads) * f64::from(shape.value_length);
    let rows = (shape.query_width() + shape.key_width() + shape.value_width()) as f64;
    Counts {
        attention: layers * wide * (rows + mixed),
        feed_forward: layers * 3.0 * wide * f64::from(shape.feed_forward),
        embedding: f64::from(shape.vocabulary) * wide,
    }
}

/// W: bytes of weights read for a token.
pub fn weight_bytes(shape: &ModelShape, weights: Weights) -> f64 {
    let Counts { attention, feed_forward, embedding } = counts(shape);
    match weights {
        Weights::Q8 => attention + feed_forward + embedding,
        Weights::Mixed => attention + 0.5 * (feed_forward + embedding),
    }
}

/// Operations of processing a prompt.
pub fn prefill_work(shape: &ModelShape, prompt: u32) -> Flops {
    let Counts { attention, feed_forward, embedding } = counts(shape);
    let (layers, prompt) = (f64::from(shape.layers.0), f64::from(prompt));
    let scores = 4.0 * layers * shape.query_width() as f64 * prompt * prompt;
    Flops(2.0 * (attention + feed_forward) * prompt + 2.0 * embedding + scores)
}

fn cache_bytes(shape: &ModelShape, position: u32) -> f64 {
    let layer = shape.kv_bytes_per_layer(position, Bytes(2));
    layer.as_f64() * f64::from(shape.layers.0)
}

impl MobileGpu {
    /// Fits a GPU to measured speeds, with a prompt of `prompt` tokens and a mean position of `position` in decoding:
    /// geometric means, as the speeds are ratios. `None` without a measurement.
    pub fn fitted(
        shape: &ModelShape,
        measured: &[Measured],
        prompt: u32,
        position: u32,
    ) -> Option<MobileGpu> {
        let mean = |of: &dyn Fn(&Measured) -> f64| {
            let logarithms: f64 = measured.iter().map(|one| of(one).ln()).sum();
            Some((logarithms / measured.len() as f64).exp()).filter(|mean| mean.is_finite())
        };
        let compute = |one: &Measured| prefill_work(shape, prompt).0 * one.prefill / f64::from(prompt);
        let bytes = |one: &Measured| weight_bytes(shape, one.weights) + cache_bytes(shape, position);
        Some(MobileGpu {
            compute: FlopsPerSecond(mean(&compute)?),
            bandwidth: BytesPerSecond(mean(&|one| bytes(one) * one.decode)?),
        })
    }

    /// Tokens per second of processing a prompt.
    pub fn prefill(&self, shape: &ModelShape, weights: Weights, prompt: u32) -> f64 {
        let work = prefill_work(shape, prompt).0 / self.compute.0;
        let reading = weight_bytes(shape, weights) / self.bandwidth.0;
        f64::from(prompt) / work.max(reading)
    }

    /// Tokens per second of decoding at a position.
    pub fn decode(&self, shape: &ModelShape, weights: Weights, position: u32) -> f64 {
        self.bandwidth.0 / (weight_bytes(shape, weights) + cache_bytes(shape, position))
    }
}
