//! Reads the dimensions of a model from the metadata of its GGUF file.
//!
//! The keys are those of the GGUF specification, such as `<architecture>.block_count`. The vocabulary size is the
//! number of rows of `token_embd.weight`, because the tokenizer may list fewer tokens than the padded matrix has rows.
//! In a file without `output.weight`, the output head is tied to the input embedding.

use super::architecture::Architecture;
use super::shape::ModelShape;
use crate::gguf::{Array, GgufError, GgufModel, Value};
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
        let shape = ModelShape {
            architecture,
            layers: Layers(keys.required("block_count")?),
            embedding_length: embedding,
            feed_forward_length: keys.required("feed_forward_length")?,
            heads,
            kv_heads: keys.number("attention.head_count_kv")?.unwrap_or(heads),
            key_length: keys.number("attention.key_length")?.unwrap_or(head),
            value_length: keys.number("attention.value_length")?.unwrap_or(head),
            vocab_size: vocab_size(self, embedding)?,
            has_tied_embeddings: self.tensor("output.weight").is_none(),
            context_length: keys.required("context_length")?,
        };
        shape.check().map_err(|error| GgufError::Shape { what: error.to_string() })?;
        Ok(shape)
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
    fn required(&self, name: &str) -> Result<u32, GgufError> {
        let missing = || GgufError::MissingKey { key: format!("{}.{name}", self.architecture) };
        self.number(name)?.ok_or_else(missing)
    }

    /// Reads a dimension of the model. Some converters write an array with the same value for each layer.
    fn number(&self, name: &str) -> Result<Option<u32>, GgufError> {
        let key = format!("{}.{name}", self.architecture);
        let per_layer: Option<Vec<i64>> = match self.model.metadata.get(&key) {
            Some(Value::Array(Array::U32(items))) => Some(items.iter().map(|&item| item.into()).collect()),
            Some(Value::Array(Array::I32(items))) => Some(items.iter().map(|&item| item.into()).collect()),
            _ => None,
        };
        let Some(items) = per_layer else { return self.model.metadata.get_u32(&key) };
        let uneven =
            || GgufError::Shape { what: format!("key `{key}` does not have the same value for all layers") };
        let first = items.first().copied().ok_or_else(uneven)?;
        let is_uniform = items.iter().all(|&item| item == first);
        u32::try_from(first).ok().filter(|_| is_uniform).map(Some).ok_or_else(uneven)
    }
}
