//! The model of a document: which one it is, on which processor it runs, and in which formats.
//!
//! Not here: shapes and sizes (`hearth_profiles::model`).

use hearth_profiles::Bytes;
use hearth_profiles::document::DocumentError;
use hearth_profiles::model::ModelShape;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A model by shipped name, by document or by file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(
    deny_unknown_fields,
    expecting = "`{profile: llama-70b}`, a shipped model or a model document, or `{file: model.gguf}`"
)]
pub struct ModelRef {
    /// A shipped model, such as `llama-70b`, or the path of a `model/1` document.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub profile: Option<String>,
    /// The path of a GGUF file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file: Option<String>,
}

impl ModelRef {
    /// Checks that it says one thing. `place` is its key.
    pub(crate) fn validate(&self, place: &str) -> Result<(), DocumentError> {
        if self.profile.is_some() == self.file.is_some() {
            return Err(DocumentError::invalid(format!("`{place}` needs one of `profile` and `file`")));
        }
        Ok(())
    }
}

/// Where layers are computed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Processor {
    /// The CPU, from the mapped file.
    #[default]
    Cpu,
    /// The GPU, from its own memory.
    Gpu,
}

/// How a key or value is stored.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum KvFormat {
    /// Two bytes an element.
    #[default]
    F16,
    /// Four bytes an element.
    F32,
}

impl KvFormat {
    /// Bytes of an element.
    pub fn element_bytes(self) -> u64 {
        match self {
            KvFormat::F16 => 2,
            KvFormat::F32 => 4,
        }
    }
}

/// How activations travel from device to device.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum ActivationFormat {
    /// Two bytes a number. Activations are rounded after every layer, so that no split changes a bit.
    F16,
    /// Four bytes a number, as computed.
    #[default]
    F32,
}

impl ActivationFormat {
    /// Whether this is the default, which documents leave out.
    #[allow(clippy::trivially_copy_pass_by_ref)] // serde's signature
    pub fn is_default(&self) -> bool {
        *self == ActivationFormat::F32
    }

    /// Bytes that travel from device to device for one token.
    pub fn bytes(self, shape: &ModelShape) -> Bytes {
        let wide = shape.activation_bytes();
        match self {
            ActivationFormat::F16 => Bytes(wide.0 / 2),
            ActivationFormat::F32 => wide,
        }
    }
}
