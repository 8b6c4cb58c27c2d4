//! Roofline model of a phone's GPU: prefill and decode speed from its arithmetic rate and its bandwidth.
//!
//! The model covers a whole pass with the kernels of the ML Drift paper. With F operations and BW bytes per second, L
//! layers, h_q query heads of dimension d_h, and the weight counts `attn` of attention, `ffn` of the feed-forward
//! blocks and `emb` of the embedding:
//!
//! ```text
//! prefill  P / max((2 (attn + ffn) P + 2 emb + 4 L h_q d_h P^2) / F, W / BW)    tokens per second, P prompt tokens
//! decode   BW / (W + KV(position))                                              tokens per second
//! W        bytes of weights: attn + ffn + emb for q8, attn + (ffn + emb) / 2 for 8/4/4
//! KV       bytes of keys and values up to the position, in half precision
//! ```
//!
//! Attention scores are counted for all pairs of positions: convolution kernels compute the masked half too. `emb` is
//! counted once, even if one matrix is both embedding and output.
//!
//! Not here: kernel launches, synchronisation, and the CPU and NPU, which the simulation of a phone includes.

use hearth_profiles::model::ModelShape;
use hearth_profiles::{BytesPerSecond, Flops, FlopsPerSecond, Format};

/// Weight format of the ML Drift paper (section 4.2). Its byte counts do not include the scales of the channels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WeightFormat {
    Q8,
    /// Eight bits in attention, four bits in the feed-forward block and the embedding (8/4/4).
    Mixed,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MobileGpu {
    /// Arithmetic rate: F in the equations of this module.
    pub arithmetic_rate: FlopsPerSecond,
    /// Bandwidth of reading weights and KV cache: BW in the equations of this module.
    pub bandwidth: BytesPerSecond,
}

/// Measured prefill and decode speed of one model in one weight format.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MeasuredSpeeds {
    pub weight_format: WeightFormat,
    pub prefill_tokens_per_second: f64,
    pub decode_tokens_per_second: f64,
}

/// Returns the numbers of weights in attention, in the feed-forward blocks and in the embedding.
fn weight_counts(shape: &ModelShape) -> [f64; 3] {
    let (layers, wide) = (f64::from(shape.layers.0), f64::from(shape.embedding_length));
    let attention = shape.attention();
    let rows = (attention.query_width() + attention.key_width() + attention.value_width()) as f64;
    let feed_forward = layers * 3.0 * wide * f64::from(shape.feed_forward_length);
    [
        layers * wide * (rows + attention.output_width() as f64),
        feed_forward,
        f64::from(shape.vocab_size) * wide,
    ]
}

/// Returns the bytes of weights that a GPU reads for a token: W in the equations of this module.
pub fn weight_bytes(shape: &ModelShape, weights: WeightFormat) -> f64 {
    let [attention, feed_forward, embedding] = weight_counts(shape);
    match weights {
        WeightFormat::Q8 => attention + feed_forward + embedding,
        WeightFormat::Mixed => attention + 0.5 * (feed_forward + embedding),
    }
}

/// Returns the floating-point operations to process a prompt of `prompt_tokens` tokens.
pub fn prefill_flops(shape: &ModelShape, prompt_tokens: u32) -> Flops {
    let [attention, feed_forward, embedding] = weight_counts(shape);
    let (layers, prompt) = (f64::from(shape.layers.0), f64::from(prompt_tokens));
    let scores = 4.0 * layers * shape.attention().query_width() as f64 * prompt * prompt;
    Flops(2.0 * (attention + feed_forward) * prompt + 2.0 * embedding + scores)
}

fn cache_bytes(shape: &ModelShape, position: u32) -> f64 {
    shape.cache_bytes(position, Format::F16).as_f64()
}

impl MobileGpu {
    /// Fits the rates of a GPU to speeds that were measured with a prompt of `prompt_tokens`, and with the mean
    /// position `position` in decoding. Both rates are geometric means over `measured`; `None` if it is empty.
    pub fn fit(
        shape: &ModelShape,
        measured: &[MeasuredSpeeds],
        prompt_tokens: u32,
        position: u32,
    ) -> Option<MobileGpu> {
        let mean = |of: &dyn Fn(&MeasuredSpeeds) -> f64| {
            let logarithms: f64 = measured.iter().map(|one| of(one).ln()).sum();
            Some((logarithms / measured.len() as f64).exp()).filter(|mean| mean.is_finite())
        };
        let compute = |one: &MeasuredSpeeds| {
            prefill_flops(shape, prompt_tokens).0 * one.prefill_tokens_per_second / f64::from(prompt_tokens)
        };
        let bytes =
            |one: &MeasuredSpeeds| weight_bytes(shape, one.weight_format) + cache_bytes(shape, position);
        Some(MobileGpu {
            arithmetic_rate: FlopsPerSecond(mean(&compute)?),
            bandwidth: BytesPerSecond(mean(&|one| bytes(one) * one.decode_tokens_per_second)?),
        })
    }

    /// Returns the prefill speed for a prompt of `tokens` tokens.
    pub fn prefill_tokens_per_second(&self, shape: &ModelShape, weights: WeightFormat, tokens: u32) -> f64 {
        let work = prefill_flops(shape, tokens).0 / self.arithmetic_rate.0;
        let reading = weight_bytes(shape, weights) / self.bandwidth.0;
        f64::from(tokens) / work.max(reading)
    }

    /// Returns the decode speed in tokens per second for a token that attends to `position` positions.
    pub fn decode_tokens_per_second(&self, shape: &ModelShape, weights: WeightFormat, position: u32) -> f64 {
        self.bandwidth.0 / (weight_bytes(shape, weights) + cache_bytes(shape, position))
    }
}

#[cfg(test)]
mod tests {
    use hearth_profiles::model::shipped_profile;

    use super::WeightFormat::{Mixed, Q8};
    use super::*;

    const GPU: MobileGpu =
        MobileGpu { arithmetic_rate: FlopsPerSecond(5e12), bandwidth: BytesPerSecond(60e9) };

    #[test]
    fn short_prompts_are_bandwidth_bound_long_ones_compute_bound() {
        let shape = shipped_profile("llama-8b").expect("shipped").shape;
        // A prompt of one token takes W / BW, as decoding without a cache does.
        let one = GPU.prefill_tokens_per_second(&shape, Q8, 1);
        assert!((one / GPU.decode_tokens_per_second(&shape, Q8, 0) - 1.0).abs() < 1e-9);
        assert!(GPU.prefill_tokens_per_second(&shape, Mixed, 1) > one * 1.5);
        let long = |weights| GPU.prefill_tokens_per_second(&shape, weights, 1024);
        assert_eq!(long(Q8), long(Mixed));
    }

    #[test]
    fn fit_inverts_predictions() {
        let shape = shipped_profile("llama-8b").expect("shipped").shape;
        let measured = [Q8, Mixed].map(|weights| MeasuredSpeeds {
            weight_format: weights,
            prefill_tokens_per_second: GPU.prefill_tokens_per_second(&shape, weights, 1024),
            decode_tokens_per_second: GPU.decode_tokens_per_second(&shape, weights, 1152),
        });
        let found = MobileGpu::fit(&shape, &measured, 1024, 1152).expect("measurements");
        assert!((found.arithmetic_rate.0 / GPU.arithmetic_rate.0 - 1.0).abs() < 1e-9, "{found:?}");
        assert!((found.bandwidth.0 / GPU.bandwidth.0 - 1.0).abs() < 1e-9, "{found:?}");
        assert_eq!(MobileGpu::fit(&shape, &[], 1024, 1152), None);
    }
}
