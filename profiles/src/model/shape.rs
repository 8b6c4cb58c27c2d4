//! Dimensions of a model, which determine the sizes of tensors, KV cache and activations.
//!
//! A shape is read from the metadata of a file (`gguf::GgufModel::shape`) or from a `model/1` document. Every shape
//! passes [`ModelShape::check`], so that products of dimensions cannot overflow.
//!
//! Not here: formats and bytes of tensors (`model::profile`), and constants of the arithmetic (epsilon, rope base,
//! soft caps), which only the executor needs.

use super::architecture::{Architecture, QueryKeyNorm};
use crate::format::Format;
use crate::units::{Bytes, Flops, Layers};

/// The dimensions of a decoder-only transformer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelShape {
    pub architecture: Architecture,
    /// Number of transformer layers (L of the prima.cpp paper).
    pub layers: Layers,
    /// Width of the residual stream, in elements.
    pub embedding_length: u32,
    /// Width of the feed-forward block, in elements.
    pub feed_forward_length: u32,
    /// Number of query heads.
    pub heads: u32,
    /// Number of key and value heads (`h_k` and `h_v` of the prima.cpp paper).
    pub kv_heads: u32,
    /// Head dimension of Q and K (`e_k` of the prima.cpp paper).
    pub key_length: u32,
    /// Head dimension of V (`e_v` of the prima.cpp paper).
    pub value_length: u32,
    /// Number of tokens in the vocabulary (V of the prima.cpp paper).
    pub vocab_size: u32,
    /// Whether the output head uses the tensor of the input embedding.
    pub has_tied_embeddings: bool,
    /// Maximum context length that the model was trained for, in tokens.
    pub context_length: u32,
}

/// The error for an invalid dimension, or for a quantisation that does not fit the dimensions.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{what}")]
pub struct ModelShapeError {
    /// The key of the invalid value in a `model/1` document.
    pub field: &'static str,
    pub what: String,
}

impl ModelShape {
    /// Checks that no dimension is zero or so large that products could overflow.
    pub fn check(&self) -> Result<(), ModelShapeError> {
        for (field, found, limit) in [
            ("layers", self.layers.0, 1 << 12),
            ("embedding", self.embedding_length, 1 << 18),
            ("feed_forward", self.feed_forward_length, 1 << 20),
            ("heads", self.heads, 1 << 12),
            ("kv_heads", self.kv_heads, 1 << 12),
            ("key_length", self.key_length, 1 << 14),
            ("value_length", self.value_length, 1 << 14),
            ("vocabulary", self.vocab_size, 1 << 22),
            ("context_length", self.context_length, 1 << 27),
        ] {
            if found == 0 || found > limit {
                let what = format!("`{field}` is {found}: it must be from 1 to {limit}");
                return Err(ModelShapeError { field, what });
            }
        }
        let (heads, kv_heads) = (self.heads, self.kv_heads);
        if !heads.is_multiple_of(kv_heads) {
            let what = format!(
                "`heads` is {heads}, which is not a multiple of `kv_heads` ({kv_heads}): every KV head must \
                 have the same number of query heads"
            );
            return Err(ModelShapeError { field: "kv_heads", what });
        }
        Ok(())
    }

    /// Returns the width of the Q projection (the number of rows of `attn_q`): `heads * key_length`.
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

    /// Returns the number of weights in the norm of Q and in the norm of K; `None` if the architecture has no such
    /// norms.
    pub fn query_key_norm_lengths(&self) -> Option<[u64; 2]> {
        self.architecture.spec().query_key_norm.map(|norm| match norm {
            QueryKeyNorm::Heads => [u64::from(self.key_length); 2],
            QueryKeyNorm::Rows => [self.query_width(), self.key_width()],
        })
    }

    /// Returns the size of the KV cache of one layer for `context` tokens, with elements in `format`:
    /// `kv_heads * (key_length + value_length) * context`, times the size of a block, divided by its number of
    /// elements.
    pub fn kv_bytes_per_layer(&self, context: u32, format: Format) -> Bytes {
        let elements = (self.key_width() + self.value_width()) * u64::from(context);
        Bytes((elements * format.block_bytes()).div_ceil(format.block_len()))
    }

    /// Checks that the keys and the values of a head are whole blocks of the format of a KV cache.
    pub fn check_kv_format(&self, format: Format) -> Result<(), ModelShapeError> {
        let lengths = [("key_length", self.key_length), ("value_length", self.value_length)];
        let block = format.block_len();
        match lengths.into_iter().find(|(_, length)| !u64::from(*length).is_multiple_of(block)) {
            None => Ok(()),
            Some((field, length)) => {
                let what = format!(
                    "a KV cache in {format} needs heads whose length is a multiple of {block}, but `{field}` is {length}"
                );
                Err(ModelShapeError { field, what })
            }
        }
    }

    /// Returns the operations of attention in one layer for one token that attends to `kv_length` tokens, including
    /// itself: a dot product with each key, a softmax with about 5 operations per score, and a weighted sum of the
    /// values. The projections are not included, because they are matrices of weights.
    pub fn attention_flops_per_layer(&self, kv_length: u32) -> Flops {
        let per_score = 2 * u64::from(self.key_length) + 2 * u64::from(self.value_length) + 5;
        Flops((u64::from(self.heads) * u64::from(kv_length) * per_score) as f64)
    }

    /// Returns the size of the activations of one token that devices send to each other: the residual stream in f32.
    pub fn hidden_state_bytes(&self) -> Bytes {
        Bytes(4 * u64::from(self.embedding_length))
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn llama_8b() -> ModelShape {
        ModelShape {
            architecture: Architecture::Llama,
            layers: Layers(32),
            embedding_length: 4096,
            feed_forward_length: 14336,
            heads: 32,
            kv_heads: 8,
            key_length: 128,
            value_length: 128,
            vocab_size: 128_256,
            has_tied_embeddings: false,
            context_length: 8192,
        }
    }

    #[test]
    fn kv_cache_and_activations_of_llama_8b() {
        // 8 heads of dimension 128, keys and values, 2 bytes per element, 1024 tokens: 2 * 8 * 128 * 2 * 1024 = 4
        // MiB.
        assert_eq!(llama_8b().kv_bytes_per_layer(1024, Format::F16), Bytes::from_mib(4));
        // 34 bytes for 32 elements instead of 64.
        assert_eq!(llama_8b().kv_bytes_per_layer(1024, Format::Q8_0), Bytes((4 << 20) * 34 / 64));
        assert_eq!(llama_8b().hidden_state_bytes(), Bytes(16384));
        // 32 heads, 10 keys: 32 * 10 * (256 + 256 + 5).
        assert_eq!(llama_8b().attention_flops_per_layer(10), Flops(165_440.0));
    }

    #[test]
    fn invalid_dimensions_are_refused() {
        assert_eq!(llama_8b().check(), Ok(()));
        for (shape, field, what) in [
            (ModelShape { embedding_length: 0, ..llama_8b() }, "embedding", "`embedding` is 0: it must be"),
            (ModelShape { layers: Layers(u32::MAX), ..llama_8b() }, "layers", "`layers` is 4294967295"),
            (
                ModelShape { kv_heads: 5, ..llama_8b() },
                "kv_heads",
                "`heads` is 32, which is not a multiple of `kv_heads` (5)",
            ),
        ] {
            let error = shape.check().unwrap_err();
            assert!(error.field == field && error.what.starts_with(what), "{error}");
        }
    }
}
