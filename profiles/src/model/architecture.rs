//! The supported model architectures, described by data.
//!
//! All of them are decoder-only transformers whose layers consist of an attention block and a feed-forward block
//! (`hearth_runtime::hyperparameters` has the equations). An [`ArchitectureSpec`] says in which parts they differ. The
//! list of tensors, the forward passes on CPU and GPU, and synthetic models are derived from it; no other code asks for
//! a certain architecture. To add an architecture, add a variant of [`Architecture`] and its entry in [`SPECS`]. A part
//! that no other architecture has also needs a field, and its equations in the forward passes.
//!
//! Models of some architectures can be planned and simulated, but not run ([`ArchitectureSpec::is_runnable`]). Planners
//! assume that GPUs compute mixtures of experts; hearth computes them on CPUs only.

use std::fmt;
use std::str::FromStr;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The supported model architectures, named as in GGUF (`general.architecture`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Architecture {
    /// Llama 1, 2, 3 and 3.x, Mistral, `SmolLM` 2, and other models with the same architecture.
    Llama,
    /// Qwen 2, Qwen 2.5 and `QwQ`: biases on Q, K and V.
    Qwen2,
    /// Qwen 3: Q and K are normalised for each head.
    Qwen3,
    /// Gemma: scaled embeddings, `GeGLU`, tied output head.
    Gemma,
    /// Gemma 2: Gemma with an additional norm after each block, soft caps, and sliding windows in every other layer.
    Gemma2,
    /// Gemma 3: Gemma 2 with norms of Q and K instead of soft caps, and sliding windows with their own rotary embedding
    /// in five of six layers.
    Gemma3,
    /// `InternLM` 2.
    InternLm2,
    /// `SmolLM` 3: Llama without rotary embedding in every fourth layer.
    SmolLm3,
    /// Phi 3, Phi 3.5, Phi 4 and Phi 4 mini: fused projections, and factors of rotary frequencies for long contexts.
    Phi3,
    /// Granite 3 and dense Granite 4: Llama with constant factors of embeddings, block outputs, scores and logits.
    Granite,
    /// OLMo 2 and 3: norms after blocks instead of before, and norms of whole rows of Q and K.
    Olmo2,
    /// Gemma 4: Gemma 3 with normalised values, unscaled attention, other heads in layers with full attention, and
    /// scaled layer outputs.
    Gemma4,
    /// Qwen 3.5 and 3.6: gated delta nets in three of four layers, and gated attention in the others.
    Qwen35,
    /// Mixtures of Qwen 3: experts instead of the feed-forward block.
    Qwen3Moe,
    /// Mixtures of Qwen 3.5 and 3.6: experts and a shared block.
    Qwen35Moe,
    /// gpt-oss: a mixture with biases, attention sinks, and a sliding window in every other layer.
    #[serde(rename = "gpt-oss")]
    GptOss,
    /// MiniMax M2: a mixture with norms of whole rows of Q and K.
    #[serde(rename = "minimax-m2")]
    MiniMaxM2,
    /// Llama 4: a mixture with one expert and a shared block for each token.
    Llama4,
    /// OLMoE: a mixture with norms of whole rows of Q and K.
    Olmoe,
    /// Mixtures of Granite 3.
    GraniteMoe,
}

/// Whether models of an architecture are mixtures of experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExpertUse {
    Never,
    Sometimes,
    Always,
}

/// The dimensions of a head that the rotary embedding rotates together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PairLayout {
    /// Pair i is the dimensions 2i and 2i + 1 ("NORM" in llama.cpp).
    Interleaved,
    /// Pair i is the dimensions i and i + d/2, of d rotated dimensions ("NEOX" in llama.cpp).
    Halves,
}

/// The parts of Q and K that are normalised before the rotary embedding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QueryKeyNorm {
    /// Each head, with the same weights for all heads.
    Heads,
    /// All heads of a token together.
    Rows,
}

/// The activation function of the gate in the feed-forward block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GateActivation {
    /// SiLU (swish): `x sigmoid(x)`.
    Silu,
    /// GELU in the tanh approximation: `x/2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))`.
    Gelu,
    /// Clamped SwiGLU: `x sigmoid(1.702 x)` with x at most 7, and the result of the up projection, from -7 to 7, plus 1.
    ClampedSwiglu,
}

/// Sliding-window attention. Of each group of `period` layers, only the last attends to all positions.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SlidingWindow {
    pub period: u32,
    /// The window in positions, including the current one, if the model file has none; `None` if such a file has no
    /// layers with a window.
    pub default_window: Option<u32>,
    pub rope: LocalRope,
}

/// The rotary frequencies of layers with a sliding window.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum LocalRope {
    /// The frequencies of the other layers.
    Same,
    /// The base of the other layers, but without factors and scaling.
    Unscaled,
    /// A base of their own, without factors and scaling; the value if the model file has none.
    Base(f32),
}

/// The tensors with divisors of the rotary frequencies that model files can have, one divisor for each pair of
/// dimensions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RopeFactorTensors {
    /// One tensor (Llama 3.1).
    Single,
    /// Two tensors, for short and for long contexts (Phi 3).
    ShortAndLong,
}

/// The soft caps c of attention scores and logits, `c tanh(x / c)`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SoftCaps {
    /// The caps if the model file has none; `None` if such a file has no cap.
    pub default_attention: Option<f32>,
    pub default_logits: Option<f32>,
}

/// What distinguishes an architecture from Llama.
#[derive(Debug, Clone, Copy, PartialEq)]
#[allow(clippy::struct_excessive_bools)] // the parts are independent of each other
pub struct ArchitectureSpec {
    pub architecture: Architecture,
    /// The name in GGUF files and documents, which is also the prefix of GGUF keys.
    pub name: &'static str,
    pub pair_layout: PairLayout,
    pub gate_activation: GateActivation,
    /// Whether Q, K and V always have biases.
    pub has_projection_biases: bool,
    /// Whether the tensors of Q, K and V are one, and those of the gate and the up projection.
    pub has_fused_projections: bool,
    pub query_key_norm: Option<QueryKeyNorm>,
    /// Whether each query head has a sink: a score of the softmax that has no value.
    pub has_attention_sinks: bool,
    /// Whether the attention output, the router and the experts have biases.
    pub has_output_and_expert_biases: bool,
    /// Whether each head of V is normalised, without weights.
    pub has_value_norm: bool,
    /// Whether the attention output is multiplied by the sigmoid of a gate. The rows of the gate of each head follow
    /// those of its query.
    pub has_attention_gate: bool,
    /// Whether the input of each block is normalised.
    pub has_pre_norms: bool,
    /// Whether the output of each block is normalised before it is added to the hidden state.
    pub has_post_norms: bool,
    /// The name of the norm before the feed-forward block, without `blk.N.`.
    pub feed_forward_norm: &'static str,
    /// Whether the output of a layer can be multiplied by a constant.
    pub has_layer_scale: bool,
    /// Whether the file has constant factors of embeddings, block outputs and attention scores, and a divisor of
    /// logits.
    pub has_scale_factors: bool,
    /// Whether embeddings are multiplied by `sqrt(embedding_length)`.
    pub scales_embeddings: bool,
    /// Whether the output matrix is always the embedding table.
    pub always_ties_embeddings: bool,
    pub soft_caps: Option<SoftCaps>,
    pub sliding_window: Option<SlidingWindow>,
    /// Whether layers with a sliding window have dimensions of their own, and others can use their keys as values.
    pub has_local_dimensions: bool,
    /// Every n-th layer has attention, and all others have a gated delta net; the value if the model file has none.
    pub default_attention_interval: Option<u32>,
    /// The factor of attention scores, if it does not depend on dimensions.
    pub attention_scale: Option<f32>,
    /// Every n-th layer has no rotary embedding.
    pub no_rope_period: Option<u32>,
    /// The number of layers of the model whose attention scale is `1 / sqrt(embedding_length / heads)` instead of `1 /
    /// sqrt(key_length)`. Model files do not have the scale, so the number of layers identifies this model.
    pub layers_with_scale_by_width: Option<u32>,
    pub rope_factors: Option<RopeFactorTensors>,
    /// Whether files can have layers after the others that draft tokens, which are not used.
    pub has_draft_layers: bool,
    pub experts: ExpertUse,
    /// Whether the weights of the experts that compute a token are divided by their sum.
    pub normalises_expert_weights: bool,
    /// Whether the output of the block that all tokens of a mixture share is multiplied by the sigmoid of a gate, one
    /// number for each token.
    pub has_shared_block_gate: bool,
    /// Whether dense models of the architecture can be run, or mixtures if it has no dense models.
    pub is_runnable: bool,
    /// Whether mixtures of the architecture can be run.
    pub runs_experts: bool,
    /// Whether the GPU backend computes layers of the architecture; for mixtures, whether planners assume it.
    pub has_gpu_kernels: bool,
    /// Whether synthetic models have a BPE tokenizer instead of `SentencePiece`; for Llama, the tokenizer of Llama 1
    /// and 2.
    pub has_bpe_tokenizer: bool,
}

const LLAMA: ArchitectureSpec = ArchitectureSpec {
    architecture: Architecture::Llama,
    name: "llama",
    pair_layout: PairLayout::Interleaved,
    gate_activation: GateActivation::Silu,
    has_projection_biases: false,
    has_fused_projections: false,
    query_key_norm: None,
    has_attention_sinks: false,
    has_output_and_expert_biases: false,
    has_value_norm: false,
    has_attention_gate: false,
    has_pre_norms: true,
    has_post_norms: false,
    feed_forward_norm: "ffn_norm",
    has_layer_scale: false,
    has_scale_factors: false,
    scales_embeddings: false,
    always_ties_embeddings: false,
    soft_caps: None,
    sliding_window: None,
    has_local_dimensions: false,
    default_attention_interval: None,
    attention_scale: None,
    no_rope_period: None,
    layers_with_scale_by_width: None,
    rope_factors: Some(RopeFactorTensors::Single),
    has_draft_layers: false,
    experts: ExpertUse::Sometimes,
    normalises_expert_weights: true,
    has_shared_block_gate: false,
    is_runnable: true,
    runs_experts: true,
    has_gpu_kernels: true,
    has_bpe_tokenizer: false,
};

const QWEN_3: ArchitectureSpec = ArchitectureSpec {
    architecture: Architecture::Qwen3,
    name: "qwen3",
    has_projection_biases: false,
    query_key_norm: Some(QueryKeyNorm::Heads),
    ..QWEN_2
};

const QWEN_3_5: ArchitectureSpec = ArchitectureSpec {
    architecture: Architecture::Qwen35,
    name: "qwen35",
    has_attention_gate: true,
    feed_forward_norm: "post_attention_norm",
    default_attention_interval: Some(4),
    has_draft_layers: true,
    has_gpu_kernels: false,
    ..QWEN_3
};

/// What mixtures of experts have in common.
const MIXTURE: ArchitectureSpec =
    ArchitectureSpec { experts: ExpertUse::Always, rope_factors: None, has_bpe_tokenizer: true, ..LLAMA };

const QWEN_2: ArchitectureSpec = ArchitectureSpec {
    architecture: Architecture::Qwen2,
    name: "qwen2",
    pair_layout: PairLayout::Halves,
    has_projection_biases: true,
    rope_factors: None,
    experts: ExpertUse::Never,
    has_bpe_tokenizer: true,
    ..LLAMA
};

const GEMMA: ArchitectureSpec = ArchitectureSpec {
    architecture: Architecture::Gemma,
    name: "gemma",
    pair_layout: PairLayout::Halves,
    gate_activation: GateActivation::Gelu,
    scales_embeddings: true,
    always_ties_embeddings: true,
    rope_factors: None,
    experts: ExpertUse::Never,
    ..LLAMA
};

const GEMMA_3: ArchitectureSpec = ArchitectureSpec {
    architecture: Architecture::Gemma3,
    name: "gemma3",
    query_key_norm: Some(QueryKeyNorm::Heads),
    has_post_norms: true,
    soft_caps: Some(SoftCaps { default_attention: None, default_logits: None }),
    sliding_window: Some(SlidingWindow { period: 6, default_window: None, rope: LocalRope::Base(10_000.0) }),
    layers_with_scale_by_width: Some(62), // 27B
    ..GEMMA
};

/// The supported architectures. Sources: Touvron et al. 2023 (Llama); the reports of Qwen 2 and 3, Gemma, Gemma 2
/// (section 2 and table 1), Gemma 3 (section 2), `InternLM` 2, Phi 3, Granite 3 and OLMo 2; the model card of gpt-oss;
/// Yang et al. 2025 (gated delta nets of Qwen 3.5); the published configurations of all models (for example
/// `query_pre_attn_scalar`, `sliding_window_pattern`, `no_rope_layers`).
pub const SPECS: &[ArchitectureSpec] = &[
    LLAMA,
    QWEN_2,
    QWEN_3,
    GEMMA,
    ArchitectureSpec {
        architecture: Architecture::Gemma2,
        name: "gemma2",
        has_post_norms: true,
        soft_caps: Some(SoftCaps { default_attention: Some(50.0), default_logits: Some(30.0) }),
        sliding_window: Some(SlidingWindow { period: 2, default_window: Some(4096), rope: LocalRope::Same }),
        layers_with_scale_by_width: Some(46), // 27B
        ..GEMMA
    },
    GEMMA_3,
    ArchitectureSpec {
        architecture: Architecture::InternLm2,
        name: "internlm2",
        experts: ExpertUse::Never,
        rope_factors: None,
        ..LLAMA
    },
    ArchitectureSpec {
        architecture: Architecture::SmolLm3,
        name: "smollm3",
        experts: ExpertUse::Never,
        no_rope_period: Some(4),
        rope_factors: None,
        has_bpe_tokenizer: true,
        ..LLAMA
    },
    // Deviation: the sliding window of Phi 3 mini and medium, 2047 positions, is not used, as in llama.cpp.
    ArchitectureSpec {
        architecture: Architecture::Phi3,
        name: "phi3",
        experts: ExpertUse::Never,
        pair_layout: PairLayout::Halves,
        has_fused_projections: true,
        rope_factors: Some(RopeFactorTensors::ShortAndLong),
        ..LLAMA
    },
    ArchitectureSpec {
        architecture: Architecture::Granite,
        name: "granite",
        experts: ExpertUse::Never,
        has_scale_factors: true,
        rope_factors: None,
        has_bpe_tokenizer: true,
        ..LLAMA
    },
    ArchitectureSpec {
        architecture: Architecture::Olmo2,
        name: "olmo2",
        experts: ExpertUse::Never,
        pair_layout: PairLayout::Halves,
        query_key_norm: Some(QueryKeyNorm::Rows),
        has_pre_norms: false,
        has_post_norms: true,
        sliding_window: Some(SlidingWindow { period: 4, default_window: None, rope: LocalRope::Unscaled }),
        rope_factors: None,
        has_bpe_tokenizer: true,
        ..LLAMA
    },
    ArchitectureSpec {
        architecture: Architecture::Gemma4,
        name: "gemma4",
        has_value_norm: true,
        has_layer_scale: true,
        has_local_dimensions: true,
        soft_caps: Some(SoftCaps { default_attention: None, default_logits: Some(30.0) }),
        attention_scale: Some(1.0),
        layers_with_scale_by_width: None,
        rope_factors: Some(RopeFactorTensors::Single),
        experts: ExpertUse::Sometimes,
        runs_experts: false,
        has_gpu_kernels: false,
        ..GEMMA_3
    },
    QWEN_3_5,
    ArchitectureSpec {
        architecture: Architecture::Qwen3Moe,
        name: "qwen3moe",
        experts: ExpertUse::Always,
        ..QWEN_3
    },
    ArchitectureSpec {
        architecture: Architecture::Qwen35Moe,
        name: "qwen35moe",
        experts: ExpertUse::Always,
        has_shared_block_gate: true,
        has_gpu_kernels: true,
        ..QWEN_3_5
    },
    ArchitectureSpec {
        architecture: Architecture::GptOss,
        name: "gpt-oss",
        pair_layout: PairLayout::Halves,
        gate_activation: GateActivation::ClampedSwiglu,
        has_projection_biases: true,
        has_attention_sinks: true,
        has_output_and_expert_biases: true,
        feed_forward_norm: "post_attention_norm",
        sliding_window: Some(SlidingWindow { period: 2, default_window: Some(128), rope: LocalRope::Same }),
        ..MIXTURE
    },
    ArchitectureSpec {
        architecture: Architecture::MiniMaxM2,
        name: "minimax-m2",
        pair_layout: PairLayout::Halves,
        query_key_norm: Some(QueryKeyNorm::Rows),
        is_runnable: false,
        runs_experts: false,
        ..MIXTURE
    },
    ArchitectureSpec {
        architecture: Architecture::Llama4,
        name: "llama4",
        is_runnable: false,
        runs_experts: false,
        ..MIXTURE
    },
    ArchitectureSpec {
        architecture: Architecture::Olmoe,
        name: "olmoe",
        pair_layout: PairLayout::Halves,
        query_key_norm: Some(QueryKeyNorm::Rows),
        normalises_expert_weights: false,
        ..MIXTURE
    },
    ArchitectureSpec {
        architecture: Architecture::GraniteMoe,
        name: "granitemoe",
        has_scale_factors: true,
        ..MIXTURE
    },
];

impl ArchitectureSpec {
    /// Returns whether all layers have attention without a gate, whose values are a projection of their own.
    pub fn has_plain_attention(&self) -> bool {
        !self.has_attention_gate && !self.has_local_dimensions && self.default_attention_interval.is_none()
    }
}

impl Architecture {
    /// Returns all architectures.
    pub fn all() -> impl Iterator<Item = Architecture> {
        SPECS.iter().map(|spec| spec.architecture)
    }

    /// Returns the architectures whose models can be run.
    pub fn all_runnable() -> impl Iterator<Item = Architecture> {
        SPECS.iter().filter(|spec| spec.is_runnable).map(|spec| spec.architecture)
    }

    /// Returns the architectures whose layers the GPU backend computes.
    pub fn all_with_gpu_kernels() -> impl Iterator<Item = Architecture> {
        let has_kernels = |architecture: &Architecture| {
            let spec = architecture.spec();
            spec.has_gpu_kernels && spec.experts != ExpertUse::Always
        };
        Architecture::all_runnable().filter(has_kernels)
    }

    pub fn spec(self) -> &'static ArchitectureSpec {
        SPECS.iter().find(|spec| spec.architecture == self).expect("every architecture has an entry")
    }

    /// Returns the name of the architecture in GGUF files and documents, which is also the prefix of GGUF keys.
    pub fn name(self) -> &'static str {
        self.spec().name
    }

    pub(crate) fn known_names() -> String {
        SPECS.iter().map(|spec| spec.name).collect::<Vec<_>>().join(", ")
    }
}

impl fmt::Display for Architecture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("architecture `{0}` is not supported: use one of {known}", known = Architecture::known_names())]
pub struct UnknownArchitecture(pub String);

impl FromStr for Architecture {
    type Err = UnknownArchitecture;
    fn from_str(text: &str) -> Result<Self, UnknownArchitecture> {
        let found = SPECS.iter().find(|spec| spec.name == text);
        found.map(|spec| spec.architecture).ok_or_else(|| UnknownArchitecture(text.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_gguf_and_of_documents() {
        for architecture in Architecture::all() {
            assert_eq!(architecture.name().parse(), Ok(architecture));
            let text = serde_yaml::to_string(&architecture).expect("a string");
            assert_eq!(text.trim(), architecture.name());
        }
        assert!("bert".parse::<Architecture>().is_err());
    }

    #[test]
    fn every_architecture_has_one_entry() {
        let schema = schemars::schema_for!(Architecture);
        let text = serde_yaml::to_string(&schema).expect("a schema");
        for architecture in Architecture::all() {
            assert_eq!(SPECS.iter().filter(|spec| spec.architecture == architecture).count(), 1);
        }
        // Each variant has a documentation comment and so an entry of its own in the schema.
        assert_eq!(text.matches("const: ").count(), SPECS.len(), "{text}");
    }
}
