//! Token mixers: the parts of layers in which tokens affect each other, with their dimensions.
//!
//! A mixer determines the size of a layer's memory of earlier tokens and its operations for a token. Planners, the memory
//! account, the simulator and the executor all ask it.

use super::shape::{ModelShape, ModelShapeError, check_ranges};
use crate::format::Format;
use crate::units::{Bytes, Flops};

/// Layers without full attention. Of each group of `full_attention_interval` layers, only the last has full attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Hybrid {
    pub full_attention_interval: u32,
    /// What the other layers of a group have instead.
    pub other: TokenMixer,
}

/// Layers that use the keys and values of earlier layers: those of the last earlier layer of the same kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SharedKv {
    /// Number of layers, at the end of the model.
    pub layers: u32,
    /// Width of the feed-forward block of these layers, in elements.
    pub feed_forward_length: u32,
}

/// The part of a layer in which tokens affect each other, with its dimensions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TokenMixer {
    Attention(AttentionShape),
    DeltaNet(DeltaNetShape),
}

/// The dimensions of attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttentionShape {
    /// Number of query heads.
    pub heads: u32,
    /// Number of key and value heads.
    pub kv_heads: u32,
    /// Head dimension of Q and K.
    pub key_length: u32,
    /// Head dimension of V.
    pub value_length: u32,
    /// Whether the values are the keys before their norm and rotary embedding, so that `attn_v` is missing.
    pub values_are_keys: bool,
}

/// The dimensions of a gated delta net (Yang et al. 2025, "Gated Delta Networks"): a layer with a state of fixed size,
/// a matrix for each value head, instead of the keys and values of all tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeltaNetShape {
    /// Number of query heads, and of key heads.
    pub key_heads: u32,
    /// Number of value heads, a multiple of `key_heads`.
    pub value_heads: u32,
    /// Dimension of all heads.
    pub head_length: u32,
    /// Number of tokens that the convolution of queries, keys and values covers.
    pub convolution_length: u32,
}

impl AttentionShape {
    /// Returns the width of the queries (without a gate, the number of rows of `attn_q`): `heads * key_length`.
    pub fn query_width(&self) -> u64 {
        u64::from(self.heads) * u64::from(self.key_length)
    }

    /// Returns the width of the K projection (the number of rows of `attn_k`): `kv_heads * key_length`.
    pub fn key_width(&self) -> u64 {
        u64::from(self.kv_heads) * u64::from(self.key_length)
    }

    /// Returns the width of the V projection (the number of rows of `attn_v`): `kv_heads * value_length`.
    pub fn value_width(&self) -> u64 {
        u64::from(self.kv_heads) * u64::from(self.value_length)
    }

    /// Returns the width of the attention output (the row length of `attn_output`): `heads * value_length`.
    pub fn output_width(&self) -> u64 {
        u64::from(self.heads) * u64::from(self.value_length)
    }
}

impl DeltaNetShape {
    /// Returns the width of the queries, and of the keys: `key_heads * head_length`.
    pub fn key_width(&self) -> u64 {
        u64::from(self.key_heads) * u64::from(self.head_length)
    }

    /// Returns the width of the values, of their gate and of the output: `value_heads * head_length`.
    pub fn value_width(&self) -> u64 {
        u64::from(self.value_heads) * u64::from(self.head_length)
    }

    /// Returns the number of queries, keys and values of a token, which the convolution mixes over time.
    pub fn channels(&self) -> u64 {
        2 * self.key_width() + self.value_width()
    }

    /// Returns the number of elements of the state: the matrices of all value heads.
    pub fn state_elements(&self) -> u64 {
        self.value_width() * u64::from(self.head_length)
    }

    /// Returns the number of earlier queries, keys and values that the convolution needs.
    pub fn history_elements(&self) -> u64 {
        self.channels() * u64::from(self.convolution_length - 1)
    }
}

impl TokenMixer {
    /// Returns whether the layer has a state that cannot be truncated to fewer tokens.
    pub fn is_recurrent(&self) -> bool {
        matches!(self, Self::DeltaNet(_))
    }

    /// Returns the size of a layer's memory of `context` tokens: for attention the KV cache, with elements in `format`,
    /// `(key width + value width) * context` times the size of a block, divided by its number of elements; for a
    /// delta net its state in f32, which does not depend on the context.
    pub fn cache_bytes(&self, context: u32, format: Format) -> Bytes {
        match self {
            Self::Attention(shape) => {
                let elements = (shape.key_width() + shape.value_width()) * u64::from(context);
                Bytes((elements * format.block_bytes()).div_ceil(format.block_len()))
            }
            Self::DeltaNet(shape) => Bytes(4 * (shape.state_elements() + shape.history_elements())),
        }
    }

    /// Returns the operations for one token that attends to `kv_length` tokens, including itself, without the
    /// projections, which are matrices of weights. Attention computes a dot product with each key, a softmax with about
    /// 5 operations per score, and a weighted sum of the values. A delta net decays its state, multiplies it by the key
    /// and the query, and adds an outer product, which are 7 operations per element.
    pub fn flops(&self, kv_length: u32) -> Flops {
        Flops(match self {
            Self::Attention(shape) => {
                let per_score = 2 * u64::from(shape.key_length) + 2 * u64::from(shape.value_length) + 5;
                (u64::from(shape.heads) * u64::from(kv_length) * per_score) as f64
            }
            Self::DeltaNet(shape) => (7 * shape.state_elements()) as f64,
        })
    }
}

impl SharedKv {
    /// Checks that each of these layers has an earlier layer of its kind, which has keys and values of its own.
    pub(super) fn check(self, model: &ModelShape) -> Result<(), ModelShapeError> {
        check_ranges(&[
            ("shared_kv_layers", self.layers, model.layers.0 - 1),
            ("shared_feed_forward", self.feed_forward_length, 1 << 20),
        ])?;
        let own = model.layers.0 - self.layers;
        match (own..model.layers.0).find(|&layer| model.kv_layer(layer) == layer || model.is_recurrent()) {
            None => Ok(()),
            Some(layer) => {
                let what = format!(
                    "layer {layer} should use the keys and values of an earlier layer of its kind, but there is none"
                );
                Err(ModelShapeError { field: "shared_kv_layers", what })
            }
        }
    }
}

impl Hybrid {
    /// Checks the dimensions of the layers without full attention.
    pub(super) fn check(&self, model: &ModelShape) -> Result<(), ModelShapeError> {
        let interval = ("full_attention_interval", self.full_attention_interval, 1 << 12);
        let ranges = match self.other {
            TokenMixer::Attention(shape) => vec![
                interval,
                ("heads", shape.heads, 1 << 12),
                ("kv_heads", shape.kv_heads, 1 << 12),
                ("key_length", shape.key_length, 1 << 14),
                ("value_length", shape.value_length, 1 << 14),
            ],
            TokenMixer::DeltaNet(shape) => vec![
                interval,
                ("key_heads", shape.key_heads, 1 << 12),
                ("value_heads", shape.value_heads, 1 << 12),
                ("head_length", shape.head_length, 1 << 12),
                ("convolution_length", shape.convolution_length, 64),
            ],
        };
        check_ranges(&ranges)?;
        let (field, of, heads, groups) = match self.other {
            TokenMixer::Attention(shape) => ("kv_heads", "heads", shape.heads, shape.kv_heads),
            TokenMixer::DeltaNet(shape) => ("key_heads", "value_heads", shape.value_heads, shape.key_heads),
        };
        if !heads.is_multiple_of(groups) {
            let what = format!("`{of}` is {heads}, which is not a multiple of `{field}` ({groups})");
            return Err(ModelShapeError { field, what });
        }
        if self.full_attention_interval > model.layers.0 {
            let (found, layers) = (self.full_attention_interval, model.layers);
            let what = format!("`full_attention_interval` is {found}, but the model has only {layers}");
            return Err(ModelShapeError { field: "full_attention_interval", what });
        }
        Ok(())
    }
}
