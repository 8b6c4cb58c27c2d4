//! `model/1` documents: descriptions of models that need no model file.
//!
//! A document has the dimensions of a model, their source, and the quantisation. With a document, a model can be
//! planned, simulated, or generated with random weights.
//!
//! ```
//! use hearth_profiles::Document;
//! use hearth_profiles::model::ModelDocument;
//!
//! let text = hearth_profiles::model::shipped_yaml("llama-8b").unwrap();
//! let document = ModelDocument::from_yaml(text).unwrap();
//! assert_eq!(document.to_profile().unwrap().total_bytes().to_string(), "4.58 GiB");
//! ```

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::architecture::Architecture;
use super::experts::Experts;
use super::profile::ModelProfile;
use super::quant::{Quant, UnknownQuant};
use super::shape::{ModelShape, ModelShapeError};
use super::token_mixer::{AttentionShape, DeltaNetShape, Hybrid, SharedKv, TokenMixer};
use crate::document::{Document, DocumentError};
use crate::units::Layers;

/// A `model/1` document.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ModelDocument {
    /// Schema of the document: `model/1`.
    pub schema: String,
    /// Name of the model.
    pub name: String,
    /// Source of the dimensions, such as the name of a published model.
    pub source: String,
    /// Architecture of the model, such as `llama`.
    pub architecture: Architecture,
    /// Number of transformer layers, such as `32 layers`.
    pub layers: Layers,
    /// Width of the residual stream, in elements.
    #[serde(rename = "embedding")]
    pub embedding_length: u32,
    /// Width of the feed-forward block, in elements.
    #[serde(rename = "feed_forward")]
    pub feed_forward_length: u32,
    /// Number of query heads.
    pub heads: u32,
    /// Number of key and value heads.
    pub kv_heads: u32,
    /// Head dimension of queries and keys; `embedding / heads` if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key_length: Option<u32>,
    /// Head dimension of values; `embedding / heads` if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub value_length: Option<u32>,
    /// Whether the values of full attention are its keys before their norm and rotary embedding.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub values_are_keys: bool,
    /// Of each group of this many layers, only the last has the attention described above, if not all layers have it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub full_attention_interval: Option<u32>,
    /// The attention of the other layers of a group.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub local_attention: Option<LocalAttention>,
    /// The gated delta net that the other layers of a group have instead of attention.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub delta_net: Option<DeltaNet>,
    /// The layers at the end of the model that use the keys and values of earlier layers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shared_kv: Option<SharedKvLayers>,
    /// The experts of a mixture of experts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub experts: Option<ExpertLayers>,
    /// Number of elements of the input that a token has for each layer, besides its embedding; 0 if absent.
    #[serde(rename = "per_layer_input", default, skip_serializing_if = "is_zero")]
    pub per_layer_input_length: u32,
    /// Number of tokens in the vocabulary.
    #[serde(rename = "vocabulary")]
    pub vocab_size: u32,
    /// Whether the output head uses the tensor of the input embedding.
    #[serde(rename = "tied_embeddings")]
    pub has_tied_embeddings: bool,
    /// Maximum context length, in tokens.
    pub context_length: u32,
    /// Quantisation: the weight format of all matrices, such as `q8_0`, or a mix of formats, such as `q4_k_m`.
    pub quant: String,
    /// Licence of the weights, such as `Apache-2.0`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub license: Option<String>,
    /// Month of publication, such as `2025-04`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub released: Option<String>,
    /// A repository of the model hub with files of the model, such as `Qwen/Qwen3-8B-GGUF`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub repository: Option<String>,
}

/// Feed-forward blocks that consist of experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ExpertLayers {
    /// Number of experts of a layer.
    pub count: u32,
    /// Number of experts that a token uses.
    pub used: u32,
    /// Width of one expert, in elements.
    #[serde(rename = "feed_forward")]
    pub feed_forward_length: u32,
    /// Width of the block that every token uses besides its experts, in elements; 0 if absent.
    #[serde(rename = "shared_feed_forward", default, skip_serializing_if = "is_zero")]
    pub shared_feed_forward_length: u32,
    /// Number of layers at the beginning of the model that have a dense block instead of experts; 0 if absent.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub dense_layers: u32,
}

/// Layers that use the keys and values of the last earlier layer of the same kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SharedKvLayers {
    /// Number of layers.
    pub layers: u32,
    /// Width of the feed-forward block of these layers, in elements.
    #[serde(rename = "feed_forward")]
    pub feed_forward_length: u32,
}

#[allow(clippy::trivially_copy_pass_by_ref)] // the signature that serde needs
fn is_zero(value: &u32) -> bool {
    *value == 0
}

/// The attention of layers with a sliding window, with the number of query heads of the other layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct LocalAttention {
    /// Number of key and value heads.
    pub kv_heads: u32,
    /// Head dimension of queries and keys.
    pub key_length: u32,
    /// Head dimension of values.
    pub value_length: u32,
}

/// A gated delta net.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct DeltaNet {
    /// Number of query heads, and of key heads.
    pub key_heads: u32,
    /// Number of value heads, a multiple of `key_heads`.
    pub value_heads: u32,
    /// Dimension of all heads.
    pub head_length: u32,
    /// Number of tokens that the convolution covers.
    pub convolution_length: u32,
}

impl ModelDocument {
    /// Returns the layers without full attention, if any.
    fn hybrid(&self) -> Result<Option<Hybrid>, ModelShapeError> {
        let heads = self.heads;
        let local = self.local_attention.map(|LocalAttention { kv_heads, key_length, value_length }| {
            let values_are_keys = false;
            TokenMixer::Attention(AttentionShape {
                heads,
                kv_heads,
                key_length,
                value_length,
                values_are_keys,
            })
        });
        let delta = self.delta_net.map(|net| {
            let DeltaNet { key_heads, value_heads, head_length, convolution_length } = net;
            TokenMixer::DeltaNet(DeltaNetShape { key_heads, value_heads, head_length, convolution_length })
        });
        match (self.full_attention_interval, local, delta) {
            (None, None, None) => Ok(None),
            (Some(full_attention_interval), Some(other), None)
            | (Some(full_attention_interval), None, Some(other)) => {
                Ok(Some(Hybrid { full_attention_interval, other }))
            }
            _ => {
                let what = "`full_attention_interval` needs either `local_attention` or `delta_net`, and they need it";
                Err(ModelShapeError { field: "full_attention_interval", what: what.into() })
            }
        }
    }

    pub fn to_shape(&self) -> ModelShape {
        let head = self.embedding_length.checked_div(self.heads).unwrap_or(0);
        ModelShape {
            architecture: self.architecture,
            layers: self.layers,
            embedding_length: self.embedding_length,
            feed_forward_length: self.feed_forward_length,
            heads: self.heads,
            kv_heads: self.kv_heads,
            key_length: self.key_length.unwrap_or(head),
            value_length: self.value_length.unwrap_or(head),
            values_are_keys: self.values_are_keys,
            // `to_profile` reports an error.
            hybrid: self.hybrid().unwrap_or_default(),
            shared_kv: self.shared_kv.map(|SharedKvLayers { layers, feed_forward_length }| SharedKv {
                layers,
                feed_forward_length,
            }),
            experts: self.experts.map(|layers| Experts {
                count: layers.count,
                used: layers.used,
                feed_forward_length: layers.feed_forward_length,
                shared_feed_forward_length: layers.shared_feed_forward_length,
                dense_layers: layers.dense_layers,
            }),
            per_layer_input_length: self.per_layer_input_length,
            vocab_size: self.vocab_size,
            has_tied_embeddings: self.has_tied_embeddings,
            context_length: self.context_length,
        }
    }

    /// Returns the profile of the model. Never fails for a document that [`Document::from_yaml`] returned.
    pub fn to_profile(&self) -> Result<ModelProfile, DocumentError> {
        for (field, text) in [("name", &self.name), ("source", &self.source)] {
            if text.trim().is_empty() {
                let what = format!("`{field}` is empty: give the model a {field}");
                return Err(DocumentError::invalid_value(field, what));
            }
        }
        let invalid = |error: ModelShapeError| DocumentError::invalid_value(error.field, error.what);
        self.hybrid().and_then(|_| self.to_shape().check()).map_err(invalid)?;
        let quant: Quant = self
            .quant
            .parse()
            .map_err(|error: UnknownQuant| DocumentError::invalid_value("quant", error.to_string()))?;
        ModelProfile::from_shape(&self.name, self.to_shape(), quant).map_err(invalid)
    }
}

impl Document for ModelDocument {
    const SCHEMA: &'static str = "model/1";

    fn validate(&self) -> Result<(), DocumentError> {
        self.to_profile().map(|_| ())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::shape::tests::llama_8b;

    fn good() -> &'static str {
        crate::model::shipped_yaml("llama-8b").unwrap()
    }

    fn check(replace: &str, with: &str, what: &str, line: usize) {
        let text = good().replace(replace, with);
        let error = ModelDocument::from_yaml(&text).unwrap_err();
        assert!(error.message().contains(what), "{error}");
        assert_eq!(error.location().map(|at| at.0), Some(line), "{error}");
        assert!(error.to_string().contains(&format!("(line {line}, column ")), "{error}");
    }

    #[test]
    fn document_gives_profile() {
        let document = ModelDocument::from_yaml(good()).unwrap();
        assert_eq!(document.to_shape(), llama_8b());
        assert_eq!(document.to_profile().unwrap().quant, "q4_k_m");
        assert_eq!(ModelDocument::from_yaml(&document.to_yaml()).unwrap(), document);
    }

    #[test]
    fn errors_name_line_and_column() {
        check("kv_heads: 8", "kv_headz: 8", "unknown field `kv_headz`", 15);
        check("heads: 32\n", "heads: many\n", "invalid type", 14);
        check("layers: 32 layers", "layers: 32", "with its unit", 11);
        check("quant: q4_k_m", "quant: q4_k_m\nquant: q8_0", "duplicate key `quant`", 20);
        check("architecture: llama", "architecture: bert", "unknown variant `bert`", 10);
        check("embedding: 4096", "embedding: 0", "`embedding` is 0", 12);
        check("kv_heads: 8", "kv_heads: 5", "not a multiple", 15);
        check("quant: q4_k_m", "quant: q4", "`q4` is not a quantisation", 19);
        check("schema: model/1", "schema: model/2", "must be `schema: model/1`", 2);
        check("feed_forward: 14336", "feed_forward: 14336 # odd\nembedding: 4096", "duplicate key", 14);
    }

    #[test]
    fn missing_field_is_named() {
        let error = ModelDocument::from_yaml(&good().replace("vocabulary: 128256\n", "")).unwrap_err();
        assert!(error.message().contains("missing field `vocabulary`"), "{error}");
    }
}
