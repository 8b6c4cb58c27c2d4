//! Dimensions of a model, which determine the sizes of tensors, KV cache and activations.
//!
//! A shape is read from the metadata of a file (`gguf::GgufModel::shape`) or from a `model/1` document. Every shape
//! passes [`ModelShape::check`], so that products of dimensions cannot overflow.
//!
//! Not here: formats and bytes of tensors (`model::profile`), and constants of the arithmetic (epsilon, rope base,
//! soft caps), which only the executor needs.

use std::collections::BTreeSet;

use super::architecture::{Architecture, ExpertUse, QueryKeyNorm};
use super::experts::Experts;
use super::token_mixer::{AttentionShape, DeltaNetShape, Hybrid, SharedKv, TokenMixer};
use crate::format::Format;
use crate::units::{Bytes, Layers};

/// The dimensions of a decoder-only transformer. Heads and their lengths are those of layers with full attention.
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
    /// Whether the values of full attention are its keys before their norm and rotary embedding.
    pub values_are_keys: bool,
    /// The layers without full attention, if they have other dimensions; `None` if all layers are alike.
    pub hybrid: Option<Hybrid>,
    /// The layers at the end that use keys and values of earlier layers, if any.
    pub shared_kv: Option<SharedKv>,
    /// The experts of the feed-forward blocks; `None` if the model is dense.
    pub experts: Option<Experts>,
    /// Number of elements of the input that a token has for each layer, besides its embedding; 0 if it has none.
    pub per_layer_input_length: u32,
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
        check_ranges(&[
            ("layers", self.layers.0, 1 << 12),
            ("embedding", self.embedding_length, 1 << 18),
            ("feed_forward", self.feed_forward_length, 1 << 20),
            ("heads", self.heads, 1 << 12),
            ("kv_heads", self.kv_heads, 1 << 12),
            ("key_length", self.key_length, 1 << 14),
            ("value_length", self.value_length, 1 << 14),
            ("vocabulary", self.vocab_size, 1 << 22),
            ("context_length", self.context_length, 1 << 27),
            ("per_layer_input", self.per_layer_input_length.max(1), 1 << 16),
        ])?;
        let (heads, kv_heads) = (self.heads, self.kv_heads);
        if !heads.is_multiple_of(kv_heads) {
            let what = format!(
                "`heads` is {heads}, which is not a multiple of `kv_heads` ({kv_heads}): every KV head must \
                 have the same number of query heads"
            );
            return Err(ModelShapeError { field: "kv_heads", what });
        }
        if self.values_are_keys && self.key_length != self.value_length {
            let (key, value) = (self.key_length, self.value_length);
            let what = format!("`value_length` is {value}, but the values are keys, whose length is {key}");
            return Err(ModelShapeError { field: "value_length", what });
        }
        self.check_parts()?;
        self.hybrid.map_or(Ok(()), |hybrid| hybrid.check(self))?;
        self.experts.map_or(Ok(()), |experts| experts.check(self))?;
        self.shared_kv.map_or(Ok(()), |shared| shared.check(self))
    }

    /// Checks that the model has the parts of its architecture, and no others.
    fn check_parts(&self) -> Result<(), ModelShapeError> {
        let (spec, other) = (self.architecture.spec(), self.hybrid.map(|hybrid| hybrid.other));
        let has_local_attention = matches!(other, Some(TokenMixer::Attention(_)));
        let has_delta_net = self.is_recurrent();
        let sharing = [
            ("values_are_keys", self.values_are_keys),
            ("shared_kv", self.shared_kv.is_some()),
            ("per_layer_input", self.per_layer_input_length > 0),
        ];
        let has_experts = match spec.experts {
            ExpertUse::Never => Some(false),
            ExpertUse::Sometimes => None,
            ExpertUse::Always => Some(true),
        };
        let parts = [
            ("experts", self.experts.is_some(), has_experts),
            ("local_attention", has_local_attention, Some(spec.has_local_dimensions)),
            ("delta_net", has_delta_net, Some(spec.default_attention_interval.is_some())),
        ];
        let optional =
            sharing.map(|(field, has)| (field, has, (!spec.has_local_dimensions).then_some(false)));
        let is_wrong = |(_, has, must): &&(_, bool, Option<bool>)| must.is_some_and(|must| must != *has);
        if let Some((field, has, _)) = parts.iter().chain(&optional).find(is_wrong) {
            let verb = if *has { "have no" } else { "need" };
            let what = format!("{} models {verb} `{field}`", self.architecture);
            return Err(ModelShapeError { field, what });
        }
        if spec.has_attention_gate && self.key_length != self.value_length {
            let (key, value) = (self.key_length, self.value_length);
            let what =
                format!("`value_length` is {value}, but the gate of a head has its `key_length`, {key}");
            return Err(ModelShapeError { field: "value_length", what });
        }
        Ok(())
    }

    /// Checks that a model of this shape can be run, not only planned and simulated.
    pub fn check_runnable(&self) -> Result<(), ModelShapeError> {
        let spec = self.architecture.spec();
        let (field, what) = match self.experts {
            _ if !spec.is_runnable => ("architecture", format!("{} models", self.architecture)),
            Some(_) if !spec.runs_experts => ("experts", format!("mixtures of {}", self.architecture)),
            _ => return Ok(()),
        };
        let what = format!("{what} can be planned and simulated, but not yet run");
        Err(ModelShapeError { field, what })
    }

    /// Returns the dimensions of full attention.
    pub fn attention(&self) -> AttentionShape {
        AttentionShape {
            heads: self.heads,
            kv_heads: self.kv_heads,
            key_length: self.key_length,
            value_length: self.value_length,
            values_are_keys: self.values_are_keys,
        }
    }

    /// Returns this shape with experts if models of the architecture always have some: eight, of which a token uses
    /// two.
    #[must_use]
    pub fn with_default_experts(self) -> ModelShape {
        let spec = self.architecture.spec();
        let needs_experts = spec.experts == ExpertUse::Always;
        let experts = Experts {
            count: 8,
            used: 2,
            feed_forward_length: self.feed_forward_length,
            shared_feed_forward_length: if spec.has_shared_block_gate { self.feed_forward_length } else { 0 },
            dense_layers: 0,
        };
        ModelShape { experts: self.experts.or(needs_experts.then_some(experts)), ..self }
    }

    /// Returns this shape with the layers without full attention that the architecture has, in the proportions of
    /// published models: for Gemma 4 those of 31B, for Qwen 3.5 those of 27B except that all heads are twice as many.
    #[must_use]
    pub fn with_default_hybrid(self) -> ModelShape {
        let (spec, half) = (self.architecture.spec(), (self.key_length / 2).max(1));
        let other = if spec.default_attention_interval.is_some() {
            Some(TokenMixer::DeltaNet(DeltaNetShape {
                key_heads: self.heads,
                value_heads: self.heads.saturating_mul(2),
                head_length: half,
                convolution_length: 4,
            }))
        } else if spec.has_local_dimensions {
            let kv_heads = if self.heads.is_multiple_of(4) { self.heads / 2 } else { self.heads };
            let (heads, lengths) = (self.heads, half);
            let (key_length, value_length, values_are_keys) = (lengths, lengths, false);
            Some(TokenMixer::Attention(AttentionShape {
                heads,
                kv_heads,
                key_length,
                value_length,
                values_are_keys,
            }))
        } else {
            None
        };
        let interval = spec.default_attention_interval.or(spec.sliding_window.map(|window| window.period));
        let full_attention_interval = interval.unwrap_or(1).min(self.layers.0.max(1));
        let hybrid = other.map(|other| Hybrid { full_attention_interval, other });
        ModelShape { values_are_keys: spec.has_local_dimensions, hybrid, ..self }
    }

    /// Returns whether all layers have the same dimensions, and none has experts.
    pub fn has_equal_layers(&self) -> bool {
        self.hybrid.is_none() && self.shared_kv.is_none() && self.experts.is_none()
    }

    /// Returns whether the layer with the index `layer` has full attention; in models whose layers are alike, all have.
    pub fn has_full_attention(&self, layer: u32) -> bool {
        let interval = self.hybrid.map_or(1, |hybrid| hybrid.full_attention_interval);
        (layer + 1).is_multiple_of(interval)
    }

    /// Returns the token mixer of the layer with the index `layer`.
    pub fn mixer(&self, layer: u32) -> TokenMixer {
        let other = self.hybrid.filter(|_| !self.has_full_attention(layer));
        other.map_or(TokenMixer::Attention(self.attention()), |hybrid| hybrid.other)
    }

    /// Returns the token mixers of all layers.
    pub fn mixers(&self) -> impl Iterator<Item = TokenMixer> {
        (0..self.layers.0).map(|layer| self.mixer(layer))
    }

    /// Returns the experts of the layer with the index `layer`; `None` if it has a dense feed-forward block.
    pub fn layer_experts(&self, layer: u32) -> Option<Experts> {
        self.experts.filter(|experts| layer >= experts.dense_layers)
    }

    /// Returns the width of the dense feed-forward block of the layer with the index `layer`, in elements.
    pub fn layer_feed_forward_length(&self, layer: u32) -> u32 {
        let shared = self.shared_kv.filter(|shared| layer >= self.layers.0.saturating_sub(shared.layers));
        shared.map_or(self.feed_forward_length, |shared| shared.feed_forward_length)
    }

    /// Returns the size of the hidden state and of the feed-forward activations of a token in the layer with the index
    /// `layer`, in f32.
    pub fn layer_activation_bytes(&self, layer: u32) -> Bytes {
        let feed_forward = match self.layer_experts(layer) {
            Some(experts) => experts.used * experts.feed_forward_length + experts.shared_feed_forward_length,
            None => self.layer_feed_forward_length(layer),
        };
        Bytes(4 * (u64::from(self.embedding_length) + u64::from(feed_forward)))
    }

    /// Returns the largest width of a dense feed-forward block, in elements.
    pub fn largest_feed_forward_length(&self) -> u32 {
        let shared_block = self.experts.map_or(0, |experts| experts.shared_feed_forward_length);
        let of_shared_kv = self.shared_kv.map_or(0, |shared| shared.feed_forward_length);
        self.feed_forward_length.max(of_shared_kv).max(shared_block)
    }

    /// Returns the index of the layer whose keys and values the layer with the index `layer` uses: its own, or that of
    /// the last layer of the same kind before all layers that share.
    pub fn kv_layer(&self, layer: u32) -> u32 {
        let Some(shared) = self.shared_kv else { return layer };
        let own = self.layers.0.saturating_sub(shared.layers);
        let is_source = |source: &u32| self.mixer(*source) == self.mixer(layer);
        if layer < own { layer } else { (0..own).rev().find(is_source).unwrap_or(layer) }
    }

    /// Returns the layers whose keys and values later layers use, in ascending order.
    pub fn shared_kv_layers(&self) -> Vec<u32> {
        if self.shared_kv.is_none() {
            return Vec::new();
        }
        let mut sources: Vec<u32> = (0..self.layers.0)
            .filter_map(|layer| Some(self.kv_layer(layer)).filter(|from| *from != layer))
            .collect();
        sources.sort_unstable();
        sources.dedup();
        sources
    }

    /// Returns the number of elements that devices send to each other for a token: the hidden state, the inputs of all
    /// layers, and the keys and values that later layers use.
    pub fn activation_length(&self) -> u64 {
        let shared = self.shared_kv_layers().into_iter().map(|layer| match self.mixer(layer) {
            TokenMixer::Attention(shape) => shape.key_width() + shape.value_width(),
            TokenMixer::DeltaNet(_) => 0,
        });
        let inputs = u64::from(self.layers.0) * u64::from(self.per_layer_input_length);
        u64::from(self.embedding_length) + inputs + shared.sum::<u64>()
    }

    /// Returns whether a layer has a state that cannot be truncated to fewer tokens.
    pub fn is_recurrent(&self) -> bool {
        self.hybrid.is_some_and(|hybrid| hybrid.other.is_recurrent())
    }

    /// Returns the largest attention of the model in each dimension.
    pub fn largest_attention(&self) -> AttentionShape {
        let full = self.attention();
        match self.hybrid.map(|hybrid| hybrid.other) {
            Some(TokenMixer::Attention(other)) => AttentionShape {
                heads: full.heads.max(other.heads),
                kv_heads: full.kv_heads.max(other.kv_heads),
                key_length: full.key_length.max(other.key_length),
                value_length: full.value_length.max(other.value_length),
                values_are_keys: full.values_are_keys,
            },
            _ => full,
        }
    }

    /// Returns the number of weights in the norms of Q and K of a layer with the attention `shape`; `None` if the
    /// architecture has no such norms.
    pub fn query_key_norm_lengths(&self, shape: &AttentionShape) -> Option<[u64; 2]> {
        self.architecture.spec().query_key_norm.map(|norm| match norm {
            QueryKeyNorm::Heads => [u64::from(shape.key_length); 2],
            QueryKeyNorm::Rows => [shape.query_width(), shape.key_width()],
        })
    }

    /// Returns the size of the keys and values that a layer adds to the KV cache for `tokens` tokens: none if it uses
    /// those of another layer, or updates a state in place.
    pub fn new_cache_bytes(&self, layer: u32, tokens: u32, format: Format) -> Bytes {
        match self.mixer(layer) {
            mixer @ TokenMixer::Attention(_) if self.kv_layer(layer) == layer => {
                mixer.cache_bytes(tokens, format)
            }
            _ => Bytes::ZERO,
        }
    }

    /// Returns the size of the KV cache of all layers for `context` tokens, with elements in `format`.
    pub fn cache_bytes(&self, context: u32, format: Format) -> Bytes {
        self.layers_cache_bytes(0..self.layers.0, context, format)
    }

    /// Returns the size of the KV cache of a device with the layers `layers` for `context` tokens, with elements in
    /// `format`. Several layers may use the same keys and values, which the device stores once.
    pub fn layers_cache_bytes(
        &self,
        layers: impl IntoIterator<Item = u32>,
        context: u32,
        format: Format,
    ) -> Bytes {
        let stored: BTreeSet<u32> = layers.into_iter().map(|layer| self.kv_layer(layer)).collect();
        let bytes = stored.into_iter().map(|layer| self.mixer(layer).cache_bytes(context, format).0);
        Bytes(bytes.fold(0, u64::saturating_add))
    }

    /// Checks that the keys and the values of a head are whole blocks of the format of a KV cache.
    pub fn check_kv_format(&self, format: Format) -> Result<(), ModelShapeError> {
        let other = match self.hybrid.map(|hybrid| hybrid.other) {
            Some(TokenMixer::Attention(other)) => other,
            _ => self.attention(),
        };
        let lengths = [self.attention(), other]
            .map(|shape| [("key_length", shape.key_length), ("value_length", shape.value_length)]);
        let block = format.block_len();
        match lengths.into_iter().flatten().find(|(_, length)| !u64::from(*length).is_multiple_of(block)) {
            None => Ok(()),
            Some((field, length)) => {
                let what = format!(
                    "a KV cache in {format} needs heads whose length is a multiple of {block}, but `{field}` is {length}"
                );
                Err(ModelShapeError { field, what })
            }
        }
    }

    /// Returns the size of the hidden state of one token in f32.
    pub fn hidden_state_bytes(&self) -> Bytes {
        Bytes(4 * u64::from(self.embedding_length))
    }
}

/// Checks that each value is from 1 to its limit.
pub(super) fn check_ranges(values: &[(&'static str, u32, u32)]) -> Result<(), ModelShapeError> {
    match values.iter().find(|(_, found, limit)| !(1..=*limit).contains(found)) {
        None => Ok(()),
        Some((field, found, limit)) => {
            let what = format!("`{field}` is {found}: it must be from 1 to {limit}");
            Err(ModelShapeError { field, what })
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::units::Flops;

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
            values_are_keys: false,
            hybrid: None,
            shared_kv: None,
            experts: None,
            per_layer_input_length: 0,
            vocab_size: 128_256,
            has_tied_embeddings: false,
            context_length: 8192,
        }
    }

    #[test]
    fn kv_cache_and_activations_of_llama_8b() {
        // 8 heads of dimension 128, keys and values, 2 bytes per element, 1024 tokens: 2 * 8 * 128 * 2 * 1024 = 4
        // MiB.
        let mixer = llama_8b().mixer(0);
        assert_eq!(mixer.cache_bytes(1024, Format::F16), Bytes::from_mib(4));
        assert_eq!(llama_8b().cache_bytes(1024, Format::F16), Bytes::from_mib(4 * 32));
        // 34 bytes for 32 elements instead of 64.
        assert_eq!(mixer.cache_bytes(1024, Format::Q8_0), Bytes((4 << 20) * 34 / 64));
        assert_eq!(llama_8b().hidden_state_bytes(), Bytes(16384));
        assert_eq!(llama_8b().layer_activation_bytes(3), Bytes(4 * (4096 + 14336)));
        let experts = Experts {
            count: 64,
            used: 8,
            feed_forward_length: 768,
            shared_feed_forward_length: 512,
            dense_layers: 1,
        };
        let mixture = ModelShape { experts: Some(experts), ..llama_8b() };
        assert_eq!(mixture.layer_activation_bytes(0), llama_8b().layer_activation_bytes(0), "dense");
        assert_eq!(mixture.layer_activation_bytes(1), Bytes(4 * (4096 + 8 * 768 + 512)));
        // 32 heads, 10 keys: 32 * 10 * (256 + 256 + 5).
        assert_eq!(mixer.flops(10), Flops(165_440.0));
    }

    #[test]
    fn state_of_a_delta_net_does_not_grow() {
        let delta = DeltaNetShape { key_heads: 2, value_heads: 4, head_length: 8, convolution_length: 4 };
        let hybrid = Hybrid { full_attention_interval: 4, other: TokenMixer::DeltaNet(delta) };
        let architecture = Architecture::Qwen35;
        let shape = ModelShape { architecture, hybrid: Some(hybrid), ..llama_8b() };
        assert_eq!(shape.check(), Ok(()));
        let full = TokenMixer::Attention(shape.attention());
        assert_eq!(
            [0, 2, 3, 4, 31].map(|layer| shape.mixer(layer) == full),
            [false, false, true, false, true]
        );
        // Four matrices of 8 by 8, and three tokens with 2 * 16 + 32 channels, in f32.
        for context in [1, 1000] {
            assert_eq!(shape.mixer(0).cache_bytes(context, Format::F16), Bytes(4 * (256 + 3 * 64)));
        }
        assert_eq!(shape.mixer(0).flops(10), Flops(7.0 * 256.0));
        for (changed, field) in [
            (Hybrid { full_attention_interval: 0, ..hybrid }, "full_attention_interval"),
            (Hybrid { full_attention_interval: 33, ..hybrid }, "full_attention_interval"),
            (
                Hybrid { other: TokenMixer::DeltaNet(DeltaNetShape { value_heads: 3, ..delta }), ..hybrid },
                "key_heads",
            ),
        ] {
            let error = ModelShape { hybrid: Some(changed), ..shape.clone() }.check().unwrap_err();
            assert_eq!(error.field, field, "{error}");
        }
        for (changed, field) in [
            (ModelShape { hybrid: None, ..shape.clone() }, "delta_net"),
            (ModelShape { architecture: Architecture::Llama, ..shape.clone() }, "delta_net"),
            (ModelShape { values_are_keys: true, ..shape.clone() }, "values_are_keys"),
            (ModelShape { value_length: 64, ..shape }, "value_length"),
            (ModelShape { per_layer_input_length: 8, ..llama_8b() }, "per_layer_input"),
        ] {
            let error = changed.check().unwrap_err();
            assert_eq!(error.field, field, "{error}");
        }
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
