//! Reads the dimensions of a model from the metadata of its GGUF file.
//!
//! The keys are those of the GGUF specification, such as `<architecture>.block_count`. The vocabulary size is the
//! number of rows of `token_embd.weight`, because the tokenizer may list fewer tokens than the padded matrix has rows.
//! In a file without `output.weight`, the output head is tied to the input embedding.

use super::architecture::{Architecture, ExpertUse};
use super::experts::Experts;
use super::shape::ModelShape;
use super::token_mixer::{AttentionShape, DeltaNetShape, Hybrid, SharedKv, TokenMixer};
use crate::gguf::{Array, GgufError, GgufModel, Value, layer_of_tensor};
use crate::units::Layers;

impl GgufModel {
    pub fn shape(&self) -> Result<ModelShape, GgufError> {
        let name = self.metadata.get_str("general.architecture")?;
        let name = name.ok_or_else(|| GgufError::MissingKey { key: "general.architecture".into() })?;
        let architecture: Architecture = name.parse().map_err(|_| GgufError::Architecture {
            found: name.to_owned(),
            known: Architecture::known_names(),
        })?;
        let keys = Keys { model: self, architecture };
        let embedding = keys.required("embedding_length")?;
        let heads = keys.required("attention.head_count")?;
        let head = embedding.checked_div(heads).unwrap_or(0);
        let layers = keys.required("block_count")?.saturating_sub(keys.draft_layers()?);
        let hybrid = keys.hybrid(layers, heads)?;
        let shared_kv = keys.shared_kv(layers)?;
        // The layer whose dimensions are those of all layers with full attention.
        let full = hybrid.map_or(0, |hybrid| hybrid.full_attention_interval.saturating_sub(1));
        let has_values = self.tensor(&format!("blk.{full}.attn_v.weight")).is_some();
        let shape = ModelShape {
            architecture,
            layers: Layers(layers),
            embedding_length: embedding,
            feed_forward_length: keys.feed_forward_length(layers, shared_kv)?,
            heads,
            kv_heads: keys.of_layer("attention.head_count_kv", full)?.unwrap_or(heads),
            key_length: keys.number("attention.key_length")?.unwrap_or(head),
            value_length: keys.number("attention.value_length")?.unwrap_or(head),
            values_are_keys: architecture.spec().has_local_dimensions && !has_values,
            hybrid,
            shared_kv,
            experts: keys.experts()?,
            per_layer_input_length: if architecture.spec().has_local_dimensions {
                keys.number("embedding_length_per_layer_input")?.unwrap_or(0)
            } else {
                0
            },
            vocab_size: vocab_size(self, embedding)?,
            has_tied_embeddings: self.tensor("output.weight").is_none(),
            context_length: keys.required("context_length")?,
        };
        shape.check().map_err(|error| GgufError::Shape { what: error.to_string() })?;
        Ok(shape)
    }

    /// Returns whether the forward pass does not use a tensor that files of the architecture can have: tensors of the
    /// layers after those of `shape`, which draft tokens, and keys and values of layers that use those of others.
    pub fn is_unused_tensor(&self, name: &str, shape: &ModelShape) -> bool {
        let Some(layer) = layer_of_tensor(name) else { return false };
        // `shape` has read the same key without an error.
        let drafts = Keys { model: self, architecture: shape.architecture }.draft_layers().unwrap_or(0);
        let is_key = ["attn_k.weight", "attn_v.weight", "attn_k_norm.weight"]
            .iter()
            .any(|key| name == format!("blk.{layer}.{key}"));
        let is_draft = (shape.layers.0..shape.layers.0.saturating_add(drafts)).contains(&layer);
        is_draft || (is_key && layer < shape.layers.0 && shape.kv_layer(layer) != layer)
    }
}

fn vocab_size(model: &GgufModel, embedding: u32) -> Result<u32, GgufError> {
    let name = "token_embd.weight";
    let tensor = model.tensor(name).ok_or_else(|| GgufError::MissingTensor { tensor: name.into() })?;
    if tensor.dims[0] != u64::from(embedding) || tensor.dims.len() != 2 {
        let what =
            format!("`{name}` has dimensions {:?}, but the embedding length is {embedding}", tensor.dims);
        return Err(GgufError::Shape { what });
    }
    u32::try_from(tensor.dims[1])
        .map_err(|_| GgufError::Shape { what: format!("`{name}` has too many rows, {}", tensor.dims[1]) })
}

struct Keys<'a> {
    model: &'a GgufModel,
    architecture: Architecture,
}

impl Keys<'_> {
    /// Reads the layers that use the keys and values of earlier layers, if any.
    fn shared_kv(&self, layers: u32) -> Result<Option<SharedKv>, GgufError> {
        let has_own = self.architecture.spec().has_local_dimensions;
        let found = if has_own { self.number("attention.shared_kv_layers")? } else { None };
        let Some(shared) = found.filter(|shared| *shared > 0) else { return Ok(None) };
        let feed_forward = self.of_layer("feed_forward_length", layers.saturating_sub(1))?;
        let missing = || GgufError::MissingKey { key: self.key("feed_forward_length") };
        Ok(Some(SharedKv { layers: shared, feed_forward_length: feed_forward.ok_or_else(missing)? }))
    }

    /// Reads the experts of a mixture, if the file has any.
    fn experts(&self) -> Result<Option<Experts>, GgufError> {
        if self.architecture.spec().experts == ExpertUse::Never {
            return Ok(None);
        }
        let Some(count) = self.number("expert_count")?.filter(|count| *count > 0) else { return Ok(None) };
        let own = self.number("expert_feed_forward_length")?;
        Ok(Some(Experts {
            count,
            used: self.required("expert_used_count")?,
            feed_forward_length: own.map_or_else(|| self.required("feed_forward_length"), Ok)?,
            shared_feed_forward_length: self.number("expert_shared_feed_forward_length")?.unwrap_or(0),
            dense_layers: self.number("leading_dense_block_count")?.unwrap_or(0),
        }))
    }

    /// Returns the number of layers after the others that draft tokens (multi-token prediction).
    fn draft_layers(&self) -> Result<u32, GgufError> {
        let has_drafts = self.architecture.spec().has_draft_layers;
        Ok(if has_drafts { self.number("nextn_predict_layers")?.unwrap_or(0) } else { 0 })
    }

    /// Reads the layers without full attention, if any.
    fn hybrid(&self, layers: u32, heads: u32) -> Result<Option<Hybrid>, GgufError> {
        let spec = self.architecture.spec();
        if let Some(default) = spec.default_attention_interval {
            let interval = self.number("full_attention_interval")?.unwrap_or(default);
            let net = DeltaNetShape {
                key_heads: self.required("ssm.group_count")?,
                value_heads: self.required("ssm.time_step_rank")?,
                head_length: self.required("ssm.state_size")?,
                convolution_length: self.required("ssm.conv_kernel")?,
            };
            let (width, found) = (net.value_width(), self.required("ssm.inner_size")?);
            if width != u64::from(found) {
                let what = format!(
                    "key `{spec}.ssm.inner_size` is {found}, but the value heads have {width}",
                    spec = spec.name
                );
                return Err(GgufError::Shape { what });
            }
            self.check_interval("attention.recurrent_layers", interval, layers)?;
            return Ok(Some(Hybrid { full_attention_interval: interval, other: TokenMixer::DeltaNet(net) }));
        }
        if !spec.has_local_dimensions {
            return Ok(None);
        }
        let pattern = "attention.sliding_window_pattern";
        let Some(Value::Array(Array::Bool(is_local))) = self.model.metadata.get(&self.key(pattern)) else {
            let what = format!("key `{}` must be an array of booleans", self.key(pattern));
            return Err(GgufError::Shape { what });
        };
        let interval = is_local.iter().position(|is_local| !is_local).map_or(0, |full| full as u32 + 1);
        self.check_interval(pattern, interval, layers)?;
        let local = AttentionShape {
            heads,
            kv_heads: self.of_layer("attention.head_count_kv", 0)?.unwrap_or(heads),
            key_length: self.required("attention.key_length_swa")?,
            value_length: self.required("attention.value_length_swa")?,
            values_are_keys: false,
        };
        Ok(Some(Hybrid { full_attention_interval: interval, other: TokenMixer::Attention(local) }))
    }

    /// Checks that the array `name`, if the file has it, is true for all layers but the last of each group of
    /// `interval`.
    fn check_interval(&self, name: &str, interval: u32, layers: u32) -> Result<(), GgufError> {
        let Some(Value::Array(Array::Bool(found))) = self.model.metadata.get(&self.key(name)) else {
            return Ok(());
        };
        let is_last = |layer: u32| (layer + 1).is_multiple_of(interval);
        let expected = (0..layers).map(|layer| !is_last(layer));
        if interval > 0 && found.len() >= layers as usize && expected.zip(found).all(|(a, b)| a == *b) {
            return Ok(());
        }
        let what = format!("key `{}` does not describe groups of equal layers", self.key(name));
        Err(GgufError::Shape { what })
    }

    /// Reads the width of the feed-forward block of the layers that have keys and values of their own. Checks that the
    /// layers of both kinds are alike.
    fn feed_forward_length(&self, layers: u32, shared_kv: Option<SharedKv>) -> Result<u32, GgufError> {
        let name = "feed_forward_length";
        let (Some(shared), Some(items)) = (shared_kv, self.array(name)) else {
            // Files of mixtures can have only the width of the experts.
            let own = if self.experts()?.is_some() { "expert_feed_forward_length" } else { name };
            return self.number(name)?.map_or_else(|| self.required(own), Ok);
        };
        let own = layers.saturating_sub(shared.layers) as usize;
        let first = items.first().copied().unwrap_or(0);
        let expected = (0..layers as usize)
            .map(|layer| if layer < own { first } else { i64::from(shared.feed_forward_length) });
        let what = format!("key `{}` does not have equal values for equal layers", self.key(name));
        let is_valid = items.iter().copied().eq(expected);
        u32::try_from(first).ok().filter(|_| is_valid).ok_or(GgufError::Shape { what })
    }

    fn key(&self, name: &str) -> String {
        format!("{}.{name}", self.architecture)
    }

    /// Reads a dimension of the layer with the index `layer`, from an array with a value for each layer or a value for
    /// all layers.
    fn of_layer(&self, name: &str, layer: u32) -> Result<Option<u32>, GgufError> {
        match self.array(name) {
            Some(items) if self.architecture.spec().has_local_dimensions => {
                let item = items.get(layer as usize).and_then(|item| u32::try_from(*item).ok());
                let missing = || GgufError::Shape {
                    what: format!("key `{}` has no value for layer {layer}", self.key(name)),
                };
                item.map(Some).ok_or_else(missing)
            }
            _ => self.number(name),
        }
    }

    fn array(&self, name: &str) -> Option<Vec<i64>> {
        match self.model.metadata.get(&self.key(name)) {
            Some(Value::Array(Array::U32(items))) => Some(items.iter().map(|&item| item.into()).collect()),
            Some(Value::Array(Array::I32(items))) => Some(items.iter().map(|&item| item.into()).collect()),
            _ => None,
        }
    }

    fn required(&self, name: &str) -> Result<u32, GgufError> {
        let missing = || GgufError::MissingKey { key: self.key(name) };
        self.number(name)?.ok_or_else(missing)
    }

    /// Reads a dimension of the model. Some converters write an array with the same value for each layer.
    fn number(&self, name: &str) -> Result<Option<u32>, GgufError> {
        let key = self.key(name);
        let Some(items) = self.array(name) else { return self.model.metadata.get_u32(&key) };
        let uneven =
            || GgufError::Shape { what: format!("key `{key}` does not have the same value for all layers") };
        let first = items.first().copied().ok_or_else(uneven)?;
        let is_uniform = items.iter().all(|&item| item == first);
        u32::try_from(first).ok().filter(|_| is_uniform).map(Some).ok_or_else(uneven)
    }
}
