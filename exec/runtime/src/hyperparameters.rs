//! Hyperparameters of the forward pass of each model architecture.
//!
//! A layer computes, for the hidden state h of a token and x = RMSNorm(h):
//!
//! ```text
//! q, k, v = W_q x + b_q, W_k x + b_k, W_v x + b_v           biases if the file has them; always in qwen2, gpt-oss
//! q, k = RMSNorm of each head, or of all heads              in some architectures
//! rotate each head of q and k by the token's position       crate::rope; not in all layers
//! h += r N(W_o (attention(q, K, V) * sigmoid(g)))           K, V: this and earlier positions; N: RMSNorm in some;
//!                                                           g = W_g x in qwen35(moe), with rows in W_q; else no gate
//! x = RMSNorm(h);  h += r N(W_down (f(W_gate x) * W_up x))  f = silu or gelu (tanh); r = 1 except in granite(moe)
//! h += N(W_2 (gelu(W_1 h) * i))                             i: the input of this layer, in Gemma 4 E2B and E4B
//! h = s h                                                   s: a constant of the layer, in gemma4
//! ```
//!
//! In Gemma 4 E2B and E4B, later layers use K and V of an earlier layer (`ModelShape::kv_layer`), and the inputs of all
//! layers are, with e = the scaled embedding of the token, `(RMSNorm(W e / sqrt(length of e)) + sqrt(length of i) t) /
//! sqrt(2)`, where t is a row of a table, and the norm is one for each layer.
//!
//! In gemma4, v is normalised too, without weights; if W_v is missing, v is k before its norm. In three of four layers
//! of qwen35 and qwen35moe, a gated delta net replaces attention. For each value head, with u = silu(convolution of
//! W_qkv x over tokens):
//!
//! ```text
//! q, k, v = u                                               q and k divided by their lengths
//! a = e^(A softplus(W_a x + d)), b = sigmoid(W_b x)         A < 0; one a and b for each head
//! S = a S;  S += b (v - S k) k^T                            the state S is zero before the first token
//! h += W_o (RMSNorm(S q / sqrt(length)) * silu(W_z x))
//! ```
//!
//! In mixtures, experts replace the feed-forward block: the router's scores are softmax(W_r x), and the block is the
//! sum of the outputs of the best experts, each multiplied by its score, which is divided by the sum of their scores
//! except in olmoe (`crate::experts`).
//!
//! Some mixtures add a block that all tokens share; in qwen35moe, it is multiplied by `sigmoid(w x)`.
//!
//! In gpt-oss, the attention output, the router and the experts have biases, and each head has a sink s, so that its
//! attention weights are `e^score / (e^s + sum of all e^score)`. With g = `W_gate x` of at most 7 and u = `W_up x` from
//! -7 to 7, f(g) u is `g sigmoid(1.702 g) (u + 1)`.
//!
//! In some architectures with N, x = h. After the last layer, logits = `W_output` RMSNorm(h). Some architectures scale
//! embeddings and logits, apply the soft cap `c tanh(x / c)` to attention scores and logits, or have layers that attend
//! to a sliding window. `hearth_profiles::model::architecture` says which ones, with sources; the keys are those of the
//! GGUF specification.
//!
//! This module has the scalar parameters of the forward pass, and `crate::weights::tensors` has the tensors. The
//! forward pass is implemented twice: simply in [`crate::oracle`], and fast in [`crate::cpu`].

use hearth_kernels::attention::ScoreOptions;
use hearth_profiles::gguf::{Array, GgufError, Metadata, Value};
use hearth_profiles::model::architecture::{LocalRope, SlidingWindow};
use hearth_profiles::model::{GateActivation, ModelShape, TokenMixer};

use crate::error::ExecError;
use crate::rope::{Rope, check_positive, read_positive, rotated_dimensions};
use crate::weights::RopeFactors;

#[derive(Debug, Clone, PartialEq)]
pub struct Hyperparameters {
    /// The constant that RMSNorm adds to the mean square.
    pub rms_norm_epsilon: f32,
    /// The different rotary embeddings of the layers, which have equal layouts and, except in Gemma 4, equal numbers of
    /// pairs.
    pub ropes: Vec<Rope>,
    layers: Vec<LayerHyperparameters>,
    /// The context length above which each layer has the rotary embedding that follows its own in `ropes`, if any.
    max_short_context: Option<u32>,
    /// The factor by which input embeddings are multiplied, if any (Gemma, Granite).
    pub embedding_scale: Option<f32>,
    /// The factor by which the output of a block is multiplied before it is added to the hidden state, if any.
    pub residual_scale: Option<f32>,
    /// The factor by which the dot products of queries and keys are multiplied, usually `1 / sqrt(key_length)`.
    pub attention_scale: f32,
    /// The soft cap c of the attention scores, `c tanh(score / c)`.
    pub attention_softcap: Option<f32>,
    /// The factor by which the logits are multiplied, if any.
    pub logit_scale: Option<f32>,
    /// The soft cap c of the logits, `c tanh(logit / c)`.
    pub logit_softcap: Option<f32>,
    pub gate_activation: GateActivation,
}

/// The hyperparameters in which layers differ.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct LayerHyperparameters {
    /// The window in positions, including the current position; `None` if the layer attends to all positions.
    attention_window: Option<u32>,
    /// The index of the layer's rotary embedding.
    rope_index: usize,
}

impl Hyperparameters {
    /// Reads the hyperparameters from the metadata of a model file.
    pub(crate) fn read(
        metadata: &Metadata,
        shape: &ModelShape,
        factors: &RopeFactors,
    ) -> Result<Hyperparameters, ExecError> {
        let key = |name: &str| format!("{}.{name}", shape.architecture);
        let epsilon_key = key("attention.layer_norm_rms_epsilon");
        let epsilon = metadata.get_f32(&epsilon_key)?;
        let epsilon = epsilon.ok_or_else(|| GgufError::MissingKey { key: epsilon_key.clone() })?;
        check_positive(&epsilon_key, epsilon)?;
        let spec = shape.architecture.spec();
        let is_scaled_by_width = spec.layers_with_scale_by_width == Some(shape.layers.0);
        let divisor =
            if is_scaled_by_width { shape.embedding_length / shape.heads } else { shape.key_length };
        let [attention_softcap, logit_softcap] = match spec.soft_caps {
            None => [None, None],
            Some(caps) => [
                cap(metadata, &key("attn_logit_softcapping"), caps.default_attention)?,
                cap(metadata, &key("final_logit_softcapping"), caps.default_logits)?,
            ],
        };
        let rope = |factors: Option<&Vec<f32>>| Rope::read(metadata, shape, factors.map(Vec::as_slice));
        let (mut ropes, layers) = layers(metadata, shape, rope(factors.short.as_ref())?)?;
        let mut max_short_context = None;
        if factors.long.is_some() {
            // `rope_index` counts on it: in architectures with such factors, all layers have one rotary embedding.
            assert_eq!(ropes.len(), 1, "factors for long contexts beside several rotary embeddings");
            ropes.push(rope(factors.long.as_ref())?);
            let trained = metadata.get_u32(&key("rope.scaling.original_context_length"))?;
            max_short_context = Some(trained.unwrap_or(shape.context_length));
        }
        let scale = |name: &str| {
            let found = if spec.has_scale_factors { metadata.get_f32(&key(name))? } else { None };
            // source: llama.cpp, where 0 means that there is no factor
            let found = found.filter(|&scale| scale != 0.0);
            found.map_or(Ok(()), |scale| check_positive(&key(name), scale)).map(|()| found)
        };
        let embedding_scale = spec.scales_embeddings.then(|| (shape.embedding_length as f32).sqrt());
        Ok(Hyperparameters {
            rms_norm_epsilon: epsilon,
            ropes,
            layers,
            max_short_context,
            embedding_scale: embedding_scale.or(scale("embedding_scale")?),
            residual_scale: scale("residual_scale")?,
            attention_scale: scale("attention.scale")?
                .or(spec.attention_scale)
                .unwrap_or(1.0 / (divisor as f32).sqrt()),
            attention_softcap,
            logit_scale: scale("logit_scale")?.map(|divisor| 1.0 / divisor),
            logit_softcap,
            gate_activation: spec.gate_activation,
        })
    }

    /// Returns the attention window of `layer` in positions, including the current one; `None` means all positions.
    pub fn attention_window(&self, layer: u32) -> Option<u32> {
        self.layers[layer as usize].attention_window
    }

    /// Returns the index in [`Self::ropes`] of the rotary embedding of `layer` with a KV cache for `context` positions.
    pub fn rope_index(&self, layer: u32, context: u32) -> usize {
        let is_long = self.max_short_context.is_some_and(|max| context > max);
        self.layers[layer as usize].rope_index + usize::from(is_long)
    }

    /// Returns what is applied to attention scores, without the sinks of the heads.
    pub(crate) fn score_options(&self) -> ScoreOptions {
        ScoreOptions { scale: self.attention_scale, softcap: self.attention_softcap, sink: None }
    }

    /// Returns the first position to which the token at `position` attends in `layer`.
    pub(crate) fn first_attended_position(&self, layer: u32, position: usize) -> usize {
        self.attention_window(layer).map_or(0, |window| (position + 1).saturating_sub(window as usize))
    }
}

/// Reads a soft cap. In some files, a cap of 0 means that there is none.
fn cap(metadata: &Metadata, key: &str, default: Option<f32>) -> Result<Option<f32>, ExecError> {
    match (metadata.get_f32(key)?, default) {
        (None, default) => Ok(default),
        (Some(0.0), None) => Ok(None),
        (Some(cap), _) => check_positive(key, cap).map(|()| Some(cap)),
    }
}

/// Returns the rotary embeddings of a model, of which `rope` is the one of layers without a window, and the
/// hyperparameters of each layer.
fn layers(
    metadata: &Metadata,
    shape: &ModelShape,
    rope: Rope,
) -> Result<(Vec<Rope>, Vec<LayerHyperparameters>), ExecError> {
    let (spec, count) = (shape.architecture.spec(), shape.layers.0);
    let mut all = vec![LayerHyperparameters { attention_window: None, rope_index: 0 }; count as usize];
    let mut ropes = vec![rope];
    if let Some(sliding) = spec.sliding_window {
        let (window, is_local) = windows(metadata, shape, sliding)?;
        let base = match sliding.rope {
            LocalRope::Same => None,
            LocalRope::Unscaled => Some(Rope::base(metadata, shape)?),
            LocalRope::Base(base) => Some(base),
        };
        if window.is_some()
            && let Some(base) = base
        {
            let base = read_positive(metadata, &format!("{}.rope.freq_base_swa", spec.name), base)?;
            let pairs = match shape.hybrid.map(|hybrid| hybrid.other) {
                Some(TokenMixer::Attention(local)) => {
                    rotated_dimensions(metadata, shape, "dimension_count_swa", local.key_length)? / 2
                }
                _ => ropes[0].frequencies.len() as u32,
            };
            ropes.push(ropes[0].with_base(base, pairs));
        }
        for layer in all.iter_mut().zip(is_local).filter_map(|(layer, is_local)| is_local.then_some(layer)) {
            *layer = LayerHyperparameters { attention_window: window, rope_index: ropes.len() - 1 };
        }
    }
    if let Some(period) = spec.no_rope_period {
        ropes.push(ropes[0].without_rotation());
        for layer in all.iter_mut().skip(period as usize - 1).step_by(period as usize) {
            layer.rope_index = ropes.len() - 1;
        }
    }
    Ok((ropes, all))
}

/// Returns the sliding window in positions, and which layers have it.
fn windows(
    metadata: &Metadata,
    shape: &ModelShape,
    sliding: SlidingWindow,
) -> Result<(Option<u32>, Vec<bool>), ExecError> {
    let key = |name: &str| format!("{}.attention.{name}", shape.architecture);
    let (window_key, pattern_key) = (key("sliding_window"), key("sliding_window_pattern"));
    let count = shape.layers.0;
    let invalid = |key: &str, found: String, hint| ExecError::Metadata { key: key.into(), found, hint };
    let found = metadata.get_u32(&window_key)?.or(sliding.default_window);
    let has_local = shape.hybrid.is_some_and(|hybrid| matches!(hybrid.other, TokenMixer::Attention(_)));
    let Some(window) = found else {
        return if has_local {
            Err(GgufError::MissingKey { key: window_key }.into())
        } else {
            Ok((None, vec![false; count as usize]))
        };
    };
    if window == 0 {
        let hint = "the window must be at least 1; convert the model again";
        return Err(invalid(&window_key, window.to_string(), hint));
    }
    if has_local {
        // The layers with a window are those that have the dimensions of local attention.
        return Ok((Some(window), (0..count).map(|layer| !shape.has_full_attention(layer)).collect()));
    }
    // Some converters write whether each layer has a window, others the number of layers in a group.
    if let Some(Value::Array(Array::Bool(is_local))) = metadata.get(&pattern_key) {
        if is_local.len() != count as usize {
            let hint = "there must be a value for each layer; convert the model again";
            return Err(invalid(&pattern_key, format!("an array of {}", is_local.len()), hint));
        }
        return Ok((Some(window), is_local.clone()));
    }
    let period = metadata.get_u32(&pattern_key)?.unwrap_or(sliding.period);
    if period == 0 {
        let hint = "it must be at least 1; convert the model again";
        return Err(invalid(&pattern_key, period.to_string(), hint));
    }
    Ok((Some(window), (0..count).map(|layer| layer % period + 1 < period).collect()))
}

#[cfg(test)]
mod tests {
    use hearth_profiles::model::Architecture;
    use hearth_profiles::units::Layers;

    use super::*;
    use crate::rope::tests::{metadata_with, shape};

    const EPSILON: (&str, Value) = ("attention.layer_norm_rms_epsilon", Value::F32(1e-5));

    #[test]
    fn epsilon_is_required() {
        assert!(
            Hyperparameters::read(&metadata_with("llama", &[]), &shape(), &RopeFactors::default()).is_err()
        );
        let zero = metadata_with("llama", &[("attention.layer_norm_rms_epsilon", Value::F32(0.0))]);
        assert!(Hyperparameters::read(&zero, &shape(), &RopeFactors::default()).is_err());
        let plain =
            Hyperparameters::read(&metadata_with("llama", &[EPSILON]), &shape(), &RopeFactors::default())
                .unwrap();
        assert_eq!(
            (plain.attention_scale, plain.attention_window(0), plain.logit_softcap),
            (0.5, None, None)
        );
        assert_eq!(plain.first_attended_position(0, 1000), 0);
    }

    #[test]
    fn even_layers_of_gemma_2_attend_to_a_window() {
        let keys = metadata_with("gemma2", &[EPSILON, ("attention.sliding_window", Value::U32(3))]);
        let gemma = ModelShape { architecture: Architecture::Gemma2, layers: Layers(2), ..shape() };
        let numbers = Hyperparameters::read(&keys, &gemma, &RopeFactors::default()).unwrap();
        let first = |layer| [0, 2, 3, 10].map(|position| numbers.first_attended_position(layer, position));
        assert_eq!((first(0), first(1)), ([0, 0, 1, 8], [0; 4]));
        assert_eq!((numbers.attention_softcap, numbers.logit_softcap), (Some(50.0), Some(30.0)));
        assert_eq!(numbers.embedding_scale, Some(8f32.sqrt()));
        let large = ModelShape { layers: Layers(46), embedding_length: 32, ..gemma.clone() };
        assert_eq!(
            Hyperparameters::read(&keys, &large, &RopeFactors::default()).unwrap().attention_scale,
            0.25
        );
        let none = metadata_with("gemma2", &[EPSILON, ("attention.sliding_window", Value::U32(0))]);
        assert!(Hyperparameters::read(&none, &gemma, &RopeFactors::default()).is_err());
    }

    #[test]
    fn five_of_six_layers_of_gemma_3_have_a_window_and_a_rotary_embedding_of_their_own() {
        let gemma = ModelShape { architecture: Architecture::Gemma3, layers: Layers(7), ..shape() };
        let base = ("rope.freq_base", Value::F32(1e6));
        let window = ("attention.sliding_window", Value::U32(3));
        let read = |more: &[(&str, Value)]| {
            let keys = metadata_with("gemma3", &[&[EPSILON, base.clone()], more].concat());
            Hyperparameters::read(&keys, &gemma, &RopeFactors::default())
        };
        let windows = |parameters: &Hyperparameters| -> Vec<bool> {
            (0..7).map(|layer| parameters.attention_window(layer).is_some()).collect()
        };
        let parameters = read(std::slice::from_ref(&window)).unwrap();
        assert_eq!(windows(&parameters), [true, true, true, true, true, false, true]);
        assert_eq!([0, 5, 6].map(|layer| parameters.rope_index(layer, 16)), [1, 0, 1]);
        // The second pair of two, with the bases 10^6 and 10^4.
        let second = |index: usize| parameters.ropes[index].frequencies[1];
        assert!((second(0) - 1e-3).abs() < 1e-12 && (second(1) - 1e-2).abs() < 1e-12);
        assert_eq!((parameters.attention_softcap, parameters.logit_softcap), (None, None));
        // Without a window, all layers are equal.
        let plain = read(&[]).unwrap();
        assert!(plain.ropes.len() == 1 && windows(&plain) == [false; 7]);
        let pattern = |value| ("attention.sliding_window_pattern", value);
        let given = vec![true, false, true, true, true, true, false];
        let each = read(&[window.clone(), pattern(Value::Array(Array::Bool(given.clone())))]).unwrap();
        assert_eq!(windows(&each), given);
        for wrong in [Value::U32(0), Value::Array(Array::Bool(vec![true]))] {
            assert!(read(&[window.clone(), pattern(wrong)]).is_err());
        }
    }

    #[test]
    fn every_fourth_layer_of_smollm_3_is_not_rotated() {
        let smollm = ModelShape { architecture: Architecture::SmolLm3, layers: Layers(8), ..shape() };
        let parameters =
            Hyperparameters::read(&metadata_with("smollm3", &[EPSILON]), &smollm, &RopeFactors::default())
                .unwrap();
        let indices: Vec<usize> = (0..8).map(|layer| parameters.rope_index(layer, 16)).collect();
        assert_eq!(indices, [0, 0, 0, 1, 0, 0, 0, 1]);
        let mut angles = [[7.0; 2]; 2];
        parameters.ropes[1].write_cosines_and_sines(1000, &mut angles);
        assert_eq!(angles, [[1.0, 0.0]; 2]);
    }

    #[test]
    fn factors_of_phi_3_depend_on_the_context() {
        let phi = ModelShape { architecture: Architecture::Phi3, ..shape() };
        let trained = ("rope.scaling.original_context_length", Value::U32(8));
        let factors = RopeFactors { short: Some(vec![1.0, 2.0]), long: Some(vec![1.0, 4.0]) };
        let parameters =
            Hyperparameters::read(&metadata_with("phi3", &[EPSILON, trained]), &phi, &factors).unwrap();
        assert_eq!([8, 9].map(|context| parameters.rope_index(0, context)), [0, 1]);
        // The second pair of two: 10000^(-2/4) / 2 and / 4.
        assert_eq!([0, 1].map(|index| parameters.ropes[index].frequencies[1]), [0.005, 0.0025]);
    }

    #[test]
    fn granite_has_scale_factors() {
        let granite = ModelShape { architecture: Architecture::Granite, ..shape() };
        let keys = |scale: f32| {
            let names = ["embedding_scale", "residual_scale", "attention.scale", "logit_scale"];
            let keys: Vec<(&str, Value)> = names.map(|name| (name, Value::F32(scale))).to_vec();
            let metadata = metadata_with("granite", &[&[EPSILON], &keys[..]].concat());
            Hyperparameters::read(&metadata, &granite, &RopeFactors::default())
        };
        let of = |parameters: Hyperparameters| {
            let Hyperparameters { embedding_scale, residual_scale, attention_scale, logit_scale, .. } =
                parameters;
            (embedding_scale, residual_scale, attention_scale, logit_scale)
        };
        assert_eq!(of(keys(4.0).unwrap()), (Some(4.0), Some(4.0), 4.0, Some(0.25)));
        assert_eq!(of(keys(0.0).unwrap()), (None, None, 0.5, None));
        assert!(keys(-1.0).is_err());
    }

    #[test]
    fn layers_of_olmo_3_with_a_window_have_unscaled_frequencies() {
        let olmo = ModelShape { architecture: Architecture::Olmo2, layers: Layers(4), ..shape() };
        let keys = [
            EPSILON,
            ("attention.sliding_window", Value::U32(3)),
            ("rope.freq_base", Value::F32(100.0)),
            ("rope.scaling.factor", Value::F32(2.0)),
        ];
        let parameters =
            Hyperparameters::read(&metadata_with("olmo2", &keys), &olmo, &RopeFactors::default()).unwrap();
        assert_eq!([0, 3].map(|layer| parameters.rope_index(layer, 16)), [1, 0]);
        assert_eq!([0, 1].map(|index| parameters.ropes[index].frequencies[1]), [0.05, 0.1]);
    }
}
