//! Hyperparameters of the forward pass of each model architecture.
//!
//! A layer computes, for the hidden state h of a token and x = RMSNorm(h):
//!
//! ```text
//! q, k, v = W_q x + b_q, W_k x + b_k, W_v x + b_v           biases if the file has them; always in qwen2
//! q, k = RMSNorm of each head                               qwen3
//! rotate each head of q and k by the token's position       crate::rope
//! h += N(W_o attention(q, K, V))                            K, V: this and earlier positions; N: RMSNorm, gemma2
//! x = RMSNorm(h);  h += N(W_down (f(W_gate x) * W_up x))    f = silu; gelu (tanh) in gemma and gemma2
//! ```
//!
//! After the last layer, logits = `W_output` RMSNorm(h). Gemma scales embeddings by `sqrt(embedding)`. Gemma 2 also
//! applies the soft cap `c tanh(x / c)` to attention scores and logits; its even layers have sliding-window attention.
//! Sources: Touvron et al. 2023; reports of Qwen, Gemma, Gemma 2 and InternLM 2; the GGUF specification for the keys.
//!
//! This module has the scalar parameters of the forward pass, and `crate::weights::tensors` has the tensors. The
//! forward pass is implemented twice: simply in [`crate::oracle`], and fast in [`crate::cpu`].

use hearth_profiles::gguf::{GgufError, Metadata};
use hearth_profiles::model::{Architecture, ModelShape};

use crate::error::ExecError;
use crate::rope::{Rope, check_positive, read_positive};

/// The activation function of the gate in the feed-forward block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GateActivation {
    /// SiLU (swish): `x sigmoid(x)`.
    Silu,
    /// GELU in the tanh approximation: `x/2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))`.
    Gelu,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Hyperparameters {
    /// The constant that RMSNorm adds to the mean square.
    pub rms_norm_epsilon: f32,
    pub rope: Rope,
    /// The factor by which input embeddings are multiplied, if any (Gemma).
    pub embedding_scale: Option<f32>,
    /// The factor by which the dot products of queries and keys are multiplied, usually `1 / sqrt(key_length)`.
    pub attention_scale: f32,
    /// The soft cap c of the attention scores, `c tanh(score / c)`.
    pub attention_softcap: Option<f32>,
    /// The soft cap c of the logits, `c tanh(logit / c)`.
    pub logit_softcap: Option<f32>,
    /// The sliding attention window of even layers, in positions, including the current position; `None` if these
    /// layers attend to all positions, as odd layers always do.
    pub sliding_window: Option<u32>,
    pub gate_activation: GateActivation,
}

// Values for Gemma 2 files that do not define them; the window is in positions.
// source: Gemma 2 technical report, section 2
const ATTENTION_SOFTCAP: f32 = 50.0;
const LOGIT_SOFTCAP: f32 = 30.0;
const WINDOW: u32 = 4096;
/// Number of layers of Gemma 2 27B, whose attention scale is `1 / sqrt(embedding / heads)` instead of `1 /
/// sqrt(key_length)`. Model files do not contain the scale, so the number of layers identifies this model.
/// source: Gemma 2 technical report, table 1, and its published configuration (`query_pre_attn_scalar`)
const GEMMA2_27B_LAYERS: u32 = 46;

impl Hyperparameters {
    /// Reads the hyperparameters from the metadata of a model file. `factors` are the divisors of the rotary
    /// frequencies, one for each pair of dimensions.
    pub(crate) fn read(
        metadata: &Metadata,
        shape: &ModelShape,
        factors: Option<&[f32]>,
    ) -> Result<Hyperparameters, ExecError> {
        let key = |name: &str| format!("{}.{name}", shape.architecture);
        let epsilon_key = key("attention.layer_norm_rms_epsilon");
        let epsilon = metadata.get_f32(&epsilon_key)?;
        let epsilon = epsilon.ok_or_else(|| GgufError::MissingKey { key: epsilon_key.clone() })?;
        check_positive(&epsilon_key, epsilon)?;
        let gemma = matches!(shape.architecture, Architecture::Gemma | Architecture::Gemma2);
        let second = shape.architecture == Architecture::Gemma2;
        let is_27b = second && shape.layers.0 == GEMMA2_27B_LAYERS;
        let divisor = if is_27b { shape.embedding_length / shape.heads } else { shape.key_length };
        let cap = |name, default| second.then(|| read_positive(metadata, &key(name), default)).transpose();
        Ok(Hyperparameters {
            rms_norm_epsilon: epsilon,
            rope: Rope::read(metadata, shape, factors)?,
            embedding_scale: gemma.then(|| (shape.embedding_length as f32).sqrt()),
            attention_scale: 1.0 / (divisor as f32).sqrt(),
            attention_softcap: cap("attn_logit_softcapping", ATTENTION_SOFTCAP)?,
            logit_softcap: cap("final_logit_softcapping", LOGIT_SOFTCAP)?,
            sliding_window: if second { window(metadata, &key("attention.sliding_window"))? } else { None },
            gate_activation: if gemma { GateActivation::Gelu } else { GateActivation::Silu },
        })
    }

    /// Returns the attention window of `layer` in positions, including the current one; `None` means all positions.
    pub fn attention_window(&self, layer: u32) -> Option<u32> {
        self.sliding_window.filter(|_| layer.is_multiple_of(2))
    }

    /// Returns the first position to which the token at `position` attends in `layer`.
    pub(crate) fn first_attended_position(&self, layer: u32, position: usize) -> usize {
        self.attention_window(layer).map_or(0, |window| (position + 1).saturating_sub(window as usize))
    }
}

fn window(metadata: &Metadata, key: &str) -> Result<Option<u32>, ExecError> {
    let window = metadata.get_u32(key)?.unwrap_or(WINDOW);
    if window == 0 {
        let hint = "the window must be at least 1; convert the model again";
        return Err(ExecError::Metadata { key: key.into(), found: window.to_string(), hint });
    }
    Ok(Some(window))
}

#[cfg(test)]
mod tests {
    use hearth_profiles::gguf::Value;
    use hearth_profiles::units::Layers;

    use super::*;
    use crate::rope::tests::{metadata_with, shape};

    const EPSILON: (&str, Value) = ("attention.layer_norm_rms_epsilon", Value::F32(1e-5));

    #[test]
    fn epsilon_is_required() {
        assert!(Hyperparameters::read(&metadata_with("llama", &[]), &shape(), None).is_err());
        let zero = metadata_with("llama", &[("attention.layer_norm_rms_epsilon", Value::F32(0.0))]);
        assert!(Hyperparameters::read(&zero, &shape(), None).is_err());
        let plain = Hyperparameters::read(&metadata_with("llama", &[EPSILON]), &shape(), None).unwrap();
        assert_eq!((plain.attention_scale, plain.sliding_window, plain.logit_softcap), (0.5, None, None));
        assert_eq!(plain.first_attended_position(0, 1000), 0);
    }

    #[test]
    fn even_layers_of_gemma_2_attend_to_a_window() {
        let keys = metadata_with("gemma2", &[EPSILON, ("attention.sliding_window", Value::U32(3))]);
        let gemma = ModelShape { architecture: Architecture::Gemma2, ..shape() };
        let numbers = Hyperparameters::read(&keys, &gemma, None).unwrap();
        let first = |layer| [0, 2, 3, 10].map(|position| numbers.first_attended_position(layer, position));
        assert_eq!((first(0), first(1)), ([0, 0, 1, 8], [0; 4]));
        assert_eq!((numbers.attention_softcap, numbers.logit_softcap), (Some(50.0), Some(30.0)));
        assert_eq!(numbers.embedding_scale, Some(8f32.sqrt()));
        let large = ModelShape { layers: Layers(46), embedding_length: 32, ..gemma.clone() };
        assert_eq!(Hyperparameters::read(&keys, &large, None).unwrap().attention_scale, 0.25);
        let none = metadata_with("gemma2", &[EPSILON, ("attention.sliding_window", Value::U32(0))]);
        assert!(Hyperparameters::read(&none, &gemma, None).is_err());
    }
}
