//! How fast does a phone's GPU read a prompt and generate, by two numbers of the GPU?
//!
//! A roofline over a whole pass, for the kernels of the ML Drift paper. With F operations and BW bytes a second, L layers,
//! h_q query heads of d_h numbers, and the weights of attention, feed-forward block and embedding:
//!
//! ```text
//! prefill  P / max((2 (attn + ffn) P + 2 emb + 4 L h_q d_h P^2) / F, W / BW)    tokens a second, prompt of P
//! decode   BW / (W + KV(position))                                              tokens a second
//! W        q8: attn + ffn + emb bytes; 8/4/4: attn + (ffn + emb) / 2             KV in half precision
//! ```
//!
//! Scores are counted for all pairs of positions: convolution kernels compute the masked half too. Where one matrix is
//! embedding and output, or only the output's matters, `emb` is counted once.
//!
//! Not here: launches, synchronisation and other processors. A device document's `gpu` and the ring's simulator have
//! those; this says what is left when they cost nothing.

use hearth_profiles::model::ModelShape;
use hearth_profiles::{Bytes, BytesPerSecond, Flops, FlopsPerSecond};

/// How weights are stored. ML Drift paper, section 4.2: with a scale for each channel, which is not counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Weights {
    /// Eight bits everywhere.
    Q8,
    /// Eight bits in attention, four in the feed-forward block and the embedding.
    Mixed,
}

/// What a GPU reaches.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MobileGpu {
    /// Arithmetic: F.
    pub compute: FlopsPerSecond,
    /// Reading weights and cache: BW.
    pub bandwidth: BytesPerSecond,
}

/// A measured pair of speeds of one model, in tokens a second.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Measured {
    /// How its weights were stored.
    pub weights: Weights,
    /// Reading the prompt.
    pub prefill: f64,
    /// Generating.
    pub decode: f64,
}

/// Numbers of a model's matrices.
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

/// W: bytes of the weights that a token reads.
pub fn weight_bytes(shape: &ModelShape, weights: Weights) -> f64 {
    let Counts { attention, feed_forward, embedding } = counts(shape);
    match weights {
        Weights::Q8 => attention + feed_forward + embedding,
        Weights::Mixed => attention + 0.5 * (feed_forward + embedding),
    }
}

/// Operations of reading a prompt.
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
    /// The GPU that reaches these speeds on average, with a prompt of `prompt` tokens and a mean position of `position` in
    /// decoding: geometric means, as the speeds are ratios. Nothing without a measurement.
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

    /// Tokens a second of a prompt of so many.
    pub fn prefill(&self, shape: &ModelShape, weights: Weights, prompt: u32) -> f64 {
        let work = prefill_work(shape, prompt).0 / self.compute.0;
        let reading = weight_bytes(shape, weights) / self.bandwidth.0;
        f64::from(prompt) / work.max(reading)
    }

    /// Tokens a second at a position.
    pub fn decode(&self, shape: &ModelShape, weights: Weights, position: u32) -> f64 {
        self.bandwidth.0 / (weight_bytes(shape, weights) + cache_bytes(shape, position))
    }
}
