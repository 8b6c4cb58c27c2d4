//! References to models, and the processor and data formats of a computation.
//!
//! Not here: shapes and sizes (`hearth_profiles::model`).

use hearth_profiles::document::DocumentError;
use hearth_profiles::model::{ModelShape, ModelShapeError};
use hearth_profiles::{Bytes, Format};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::hub_model::{self, HubModelName};

/// A reference to a model: a shipped model, a model document, a GGUF file or a model on a hub.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[serde(expecting = "`{profile: llama-70b}`, a shipped model or a model document, or `{file: model.gguf}`")]
pub struct ModelRef {
    /// The name of a shipped model, such as `llama-70b`, or the path of a `model/1` document.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub profile: Option<String>,
    /// The path of a GGUF file, or a model on Hugging Face: `hf:OWNER/REPO:QUANT`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file: Option<String>,
}

impl ModelRef {
    /// Checks that either `profile` or `file` is set, and that the name of a model on a hub is valid. `place` is the
    /// key of the reference in the document.
    pub(crate) fn validate(&self, place: &str) -> Result<(), DocumentError> {
        if let Some(name) = self.file.as_deref().filter(|file| hub_model::is_hub_model_name(file)) {
            let invalid = |error| format!("`{place}.file`: {error}; {}", hub_model::NAME_HINT);
            name.parse::<HubModelName>().map_err(|error| DocumentError::invalid_document(invalid(error)))?;
        }
        if self.profile.is_some() != self.file.is_some() {
            return Ok(());
        }
        Err(DocumentError::invalid_document(format!("`{place}` needs either `profile` or `file`, not both")))
    }
}

/// The processor of a computation.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Processor {
    /// The CPU, with weights from the memory-mapped model file.
    #[default]
    Cpu,
    /// The GPU, with weights in GPU memory.
    Gpu,
}

/// The element format of the KV cache.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum KvFormat {
    /// Two bytes per element.
    #[default]
    F16,
    /// Four bytes per element.
    F32,
    /// Blocks of 32 elements with 8 bits each and a scale, as in GGUF files. GPUs do not support this format.
    Q8_0,
    /// Blocks of 32 elements with 4 bits each and a scale, as in GGUF files. GPUs do not support this format.
    Q4_0,
}

impl KvFormat {
    /// Returns the format of the elements as a format of tensors.
    pub fn format(self) -> Format {
        match self {
            KvFormat::F16 => Format::F16,
            KvFormat::F32 => Format::F32,
            KvFormat::Q8_0 => Format::Q8_0,
            KvFormat::Q4_0 => Format::Q4_0,
        }
    }

    /// Returns whether the layers on a GPU can have a KV cache in this format.
    pub fn is_supported_on_gpus(self) -> bool {
        matches!(self, KvFormat::F16 | KvFormat::F32)
    }
}

/// The element format of activations in messages between devices.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum ActivationFormat {
    /// Two bytes per element. Activations are rounded after every layer, so that results do not depend on the plan.
    F16,
    /// Four bytes per element, without rounding.
    #[default]
    F32,
}

/// Checks that the keys and values that devices send to each other are not rounded more than in the KV cache of the
/// device that computes them, because results would depend on the plan. Only some models have such keys and values.
pub fn check_kv_sharing(
    shape: &ModelShape,
    activations: ActivationFormat,
    kv_cache: KvFormat,
) -> Result<(), ModelShapeError> {
    let is_rounded = activations == ActivationFormat::F16 && kv_cache != KvFormat::F16;
    if shape.shared_kv.is_none() || !is_rounded {
        return Ok(());
    }
    let what = format!(
        "later layers of the model use keys and values of earlier layers, which activations in f16 would round more than \
         a KV cache in {}: use `activations: f32` or `kv_cache: f16`",
        kv_cache.format()
    );
    Err(ModelShapeError { field: "activations", what })
}

impl ActivationFormat {
    /// Returns the size in bytes of the activations of one token in a message.
    pub fn bytes_per_token(self, shape: &ModelShape) -> Bytes {
        let wide = Bytes(4 * shape.activation_length());
        match self {
            ActivationFormat::F16 => Bytes(wide.0 / 2),
            ActivationFormat::F32 => wide,
        }
    }
}
