//! Model profile: bytes and floating-point operations of each layer, of the input embedding and of the output head.
//!
//! A profile is made from the header of a file ([`ModelProfile::from_gguf`]) or from a shape and a quantisation
//! ([`ModelProfile::from_shape`]), so that planning for a 70B model needs no download of 40 GB. With mixed
//! quantisation the layers differ, so each layer has its own [`TensorGroup`].

use std::collections::BTreeMap;

use super::digest;
use super::experts::is_of_experts;
use super::layout::{self, TensorKind, TensorSpec};
use super::quant::{Quant, file_type_name};
use super::shape::{ModelShape, ModelShapeError};
use super::tensor_group::{FormatTotals, TensorGroup, tensor_flops};
use crate::format::Format;
use crate::gguf::{GgufError, GgufModel, TensorInfo, layer_of_tensor};
use crate::units::{Bytes, Flops};

/// The bytes and the floating-point operations of a model, for planners and the simulator.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelProfile {
    pub name: String,
    pub shape: ModelShape,
    /// Name of the quantisation: a format such as `q8_0`, or a mix of formats such as `q4_k_m`.
    pub quant: String,
    /// The bytes and operations of each layer, in the order of the layers. The length is `shape.layers`.
    pub layers: Vec<TensorGroup>,
    /// The input embedding, with the bytes of the whole matrix and no operations: a token reads one row only.
    pub input_embedding: TensorGroup,
    /// The output norm and the output head. A tied embedding is counted here and in `input_embedding`.
    pub output_head: TensorGroup,
    /// The table of per-layer inputs, of which a token reads one row; empty in models without them.
    pub per_layer_table: TensorGroup,
    /// The projection of embeddings to per-layer inputs and its norm, which the head device uses for every token.
    pub per_layer_projection: TensorGroup,
    /// Small tensors that every layer uses, such as RoPE factors. Every device has a copy of them.
    pub shared_tensors: TensorGroup,
    /// Digest of the model: 64 hex digits after `sha256:` for a file, or after `shape:` for a model without a file.
    pub digest: String,
    /// Number of weights. A tied embedding is counted once.
    pub parameters: u64,
    /// Number of weights that a token uses: all of a dense model.
    pub active_parameters: u64,
}

/// Result of comparing a model with the digest in a plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DigestMatch {
    /// The plan was made from exactly this model.
    Same,
    /// The plan was made for a model of this shape and quantisation, whose tensor sizes may differ slightly.
    SameShape,
    /// The plan was made for a different model.
    Different,
}

impl ModelProfile {
    /// Creates the profile of a model without a file. `quant` determines the format of every tensor. Fails if the shape
    /// is invalid, or if a row of a tensor is not a whole number of blocks of its format.
    pub fn from_shape(name: &str, shape: ModelShape, quant: Quant) -> Result<ModelProfile, ModelShapeError> {
        shape.check()?;
        let mut profile = ModelProfile::empty(name.to_owned(), shape, quant.to_string());
        for tensor in layout::tensor_specs(&profile.shape) {
            let invalid = |what: String| ModelShapeError { field: "quant", what };
            let format =
                quant.tensor_format(&tensor, &profile.shape).map_err(|error| invalid(error.to_string()))?;
            let bytes = format.row_bytes(tensor.element_count());
            let bytes = bytes.ok_or_else(|| invalid(format!("`{}` has too many weights", tensor.name)))?;
            profile.add(&tensor.name, tensor.layer_index, tensor.element_count(), format, bytes);
        }
        profile.digest = profile.shape_digest();
        Ok(profile)
    }

    /// Creates the profile of a model file from its header, and reads the first bytes of every tensor for the digest.
    pub fn from_gguf(model: &GgufModel) -> Result<ModelProfile, GgufError> {
        let shape = model.shape()?;
        check_complete(model, &shape)?;
        let mut profile = ModelProfile::empty(name(model)?, shape, quant_name(model)?);
        for tensor in &model.tensors {
            if model.is_unused_tensor(&tensor.name, &profile.shape) {
                continue;
            }
            let layer = layer_of(&tensor.name, &profile.shape)?;
            profile.add(&tensor.name, layer, tensor.element_count(), tensor.format, tensor.bytes);
        }
        profile.digest = digest::gguf_digest(model)?;
        Ok(profile)
    }

    fn empty(name: String, shape: ModelShape, quant: String) -> ModelProfile {
        let layers = vec![TensorGroup::default(); shape.layers.0 as usize];
        ModelProfile {
            name,
            shape,
            quant,
            layers,
            input_embedding: TensorGroup::default(),
            output_head: TensorGroup::default(),
            per_layer_table: TensorGroup::default(),
            per_layer_projection: TensorGroup::default(),
            shared_tensors: TensorGroup::default(),
            digest: String::new(),
            parameters: 0,
            active_parameters: 0,
        }
    }

    fn add(&mut self, name: &str, layer: Option<u32>, elements: u64, format: Format, bytes: Bytes) {
        let flops = tensor_flops(name, elements, &self.shape);
        self.count_parameters(name, elements);
        match (layer, name) {
            (Some(layer), _) => {
                let expert_bytes = if is_of_experts(name) { bytes } else { Bytes::ZERO };
                self.layers[layer as usize].add_totals(format, FormatTotals { bytes, expert_bytes, flops });
            }
            (None, "token_embd.weight") => {
                self.input_embedding.add(format, bytes, Flops(0.0));
                if self.shape.has_tied_embeddings {
                    self.output_head.add(format, bytes, flops);
                }
            }
            (None, "per_layer_token_embd.weight") => self.per_layer_table.add(format, bytes, Flops(0.0)),
            (None, _) if name.starts_with("per_layer_") => {
                self.per_layer_projection.add(format, bytes, flops);
            }
            (None, _) if name.starts_with("output") => self.output_head.add(format, bytes, flops),
            (None, _) => self.shared_tensors.add(format, bytes, Flops(0.0)),
        }
    }

    fn count_parameters(&mut self, name: &str, elements: u64) {
        self.parameters += elements;
        self.active_parameters += match self.shape.experts {
            Some(experts) if is_of_experts(name) => {
                elements / u64::from(experts.count) * u64::from(experts.used)
            }
            _ => elements,
        };
    }

    /// Returns the size of the weights of the layer with index `layer`, from 0.
    pub fn layer_bytes(&self, layer: u32) -> Bytes {
        self.layers[layer as usize].bytes()
    }

    /// Returns the mean bytes (b of the prima.cpp paper) and the mean operations (`f_q`) of a layer, by format q.
    pub fn mean_layer(&self) -> TensorGroup {
        TensorGroup::mean(&self.layers)
    }

    /// Returns the mean size of a layer's weights (b of the prima.cpp paper), rounded to the nearest byte.
    pub fn mean_layer_bytes(&self) -> Bytes {
        let count = self.layers.len().max(1) as u64;
        Bytes((self.all_layers_bytes().0 + count / 2) / count)
    }

    pub fn max_layer_bytes(&self) -> Bytes {
        self.layers.iter().map(TensorGroup::bytes).max().unwrap_or_default()
    }

    pub fn all_layers_bytes(&self) -> Bytes {
        self.layers.iter().map(TensorGroup::bytes).sum()
    }

    /// Returns the size of the whole input embedding (`b_i` of the prima.cpp paper).
    pub fn input_embedding_bytes(&self) -> Bytes {
        self.input_embedding.bytes()
    }

    /// Returns the size of the rows that a token reads of the input embedding (`b_i / V` of the prima.cpp paper) and of
    /// the table of per-layer inputs.
    pub fn embedding_row_bytes(&self) -> Bytes {
        let tables = self.input_embedding.bytes() + self.per_layer_table.bytes();
        Bytes(tables.0 / u64::from(self.shape.vocab_size))
    }

    /// Returns the size of the output norm and the output head (`b_o` of the prima.cpp paper).
    pub fn output_head_bytes(&self) -> Bytes {
        self.output_head.bytes()
    }

    /// Returns the size of all weights. A tied embedding is counted once.
    pub fn total_bytes(&self) -> Bytes {
        let tied = if self.shape.has_tied_embeddings { self.input_embedding.bytes() } else { Bytes::ZERO };
        self.all_layers_bytes()
            + self.input_embedding.bytes()
            + self.output_head.bytes()
            + self.shared_tensors.bytes()
            + self.per_layer_table.bytes()
            + self.per_layer_projection.bytes()
            - tied
    }

    /// Returns the digest of shape and quantisation. A model's GGUF file and its `model/1` document have the same one.
    pub fn shape_digest(&self) -> String {
        digest::shape_digest(&self.shape, &self.quant)
    }

    /// Compares the digests of this model with the digest in a plan.
    pub fn match_digest(&self, digest: &str) -> DigestMatch {
        if self.digest == digest {
            DigestMatch::Same
        } else if self.shape_digest() == digest {
            DigestMatch::SameShape
        } else {
            DigestMatch::Different
        }
    }
}

fn name(model: &GgufModel) -> Result<String, GgufError> {
    if let Some(name) = model.metadata.get_str("general.name")? {
        return Ok(name.to_owned());
    }
    let stem = model.file_paths.first().and_then(|path| path.file_stem());
    Ok(stem.map_or_else(|| "model".to_owned(), |stem| stem.to_string_lossy().into_owned()))
}

/// Returns the layer index N in the name of a tensor (`blk.N.`), or `None` for a tensor outside the layers.
fn layer_of(name: &str, shape: &ModelShape) -> Result<Option<u32>, GgufError> {
    if !name.starts_with("blk.") {
        return Ok(None);
    }
    let outside =
        || GgufError::Shape { what: format!("tensor `{name}` is in none of the model's {}", shape.layers) };
    layer_of_tensor(name).filter(|layer| *layer < shape.layers.0).map(Some).ok_or_else(outside)
}

/// Returns the name of a file's quantisation: the format of the matrices if all have the same format, otherwise the
/// name of `general.file_type`, otherwise the format with the most bytes followed by `-mixed`.
fn quant_name(model: &GgufModel) -> Result<String, GgufError> {
    let mut matrices = TensorGroup::default();
    // The kernels of convolutions are never quantised.
    let is_matrix =
        |tensor: &&TensorInfo| tensor.dims.len() > 1 && !tensor.name.ends_with("ssm_conv1d.weight");
    for tensor in model.tensors.iter().filter(is_matrix) {
        matrices.add(tensor.format, tensor.bytes, Flops(0.0));
    }
    let largest = matrices.totals_by_format().max_by_key(|(_, share)| share.bytes).map(|(format, _)| format);
    let largest = largest.map_or("none", Format::name);
    if matrices.totals_by_format().count() <= 1 {
        return Ok(largest.to_owned());
    }
    let named = model.metadata.get_u32("general.file_type")?.and_then(file_type_name);
    Ok(named.map_or_else(|| format!("{largest}-mixed"), str::to_owned))
}

/// Checks that a file has every tensor of the shape, with the expected dimensions. The biases of matrices and the
/// scales of layers are optional, and gates and up projections of experts may be in one tensor.
fn check_complete(model: &GgufModel, shape: &ModelShape) -> Result<(), GgufError> {
    let dims: BTreeMap<&String, &Vec<u64>> = model.tensors.iter().map(|it| (&it.name, &it.dims)).collect();
    for TensorSpec { name, dims: must, kind, .. } in layout::tensor_specs(shape) {
        let is_fused = || {
            let mut layer = ["ffn_gate_exps.weight", "ffn_up_exps.weight"]
                .iter()
                .filter_map(|end| name.strip_suffix(end));
            let fused = layer.next().and_then(|layer| dims.get(&format!("{layer}ffn_gate_up_exps.weight")));
            fused.is_some_and(|is| is[..] == [must[0], 2 * must[1], must[2]])
        };
        match dims.get(&name) {
            None if !matches!(kind, TensorKind::Bias | TensorKind::Scale) && !is_fused() => {
                return Err(GgufError::MissingTensor { tensor: name });
            }
            Some(&is) if *is != must => {
                let what =
                    format!("tensor `{name}` has dimensions {is:?}, but the metadata require {must:?}");
                return Err(GgufError::Shape { what });
            }
            _ => {}
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::shape::tests::llama_8b;

    #[test]
    fn llama_8b_in_q4_k_m() {
        let profile = ModelProfile::from_shape("8b", llama_8b(), Quant::Q4KM).unwrap();
        // Weights of a layer: 2 * 4096^2 (q, output) + 2 * 4096 * 1024 (k, v) + 3 * 4096 * 14336 = 218 103 808.
        // All but v and down in Q4_K: 155 189 248 / 256 * 144 = 87 293 952; v and down 62 914 560 / 256 = 245 760
        // blocks of 144 or 210 bytes; two norms of 4 * 4096 bytes.
        let light = 87_293_952 + 245_760 * 144 + 32_768;
        assert_eq!(profile.layer_bytes(4), Bytes(light));
        assert_eq!(profile.layer_bytes(0), Bytes(light + 245_760 * 66));
        assert_eq!(profile.mean_layer_bytes(), Bytes(light + 245_760 * 33));
        assert_eq!(profile.max_layer_bytes(), profile.layer_bytes(0));
        // 4096 / 256 * 144.
        assert_eq!(profile.embedding_row_bytes(), Bytes(2304));
        assert_eq!(profile.output_head_bytes(), Bytes(128_256 * 4096 / 256 * 210 + 16_384));
        assert_eq!(profile.mean_layer().flops(), Flops(2.0 * 218_103_808.0 + 2.0 * 16_384.0));
        assert_eq!(profile.input_embedding.flops(), Flops(0.0));
        assert!(profile.digest.starts_with("shape:"));
    }

    #[test]
    fn tied_head_is_counted_once() {
        let shape = ModelShape { has_tied_embeddings: true, ..llama_8b() };
        let tied = ModelProfile::from_shape("tied", shape, Quant::Pure(Format::F16)).unwrap();
        let apart = ModelProfile::from_shape("apart", llama_8b(), Quant::Pure(Format::F16)).unwrap();
        assert_eq!(tied.output_head_bytes(), apart.output_head_bytes());
        assert_eq!(tied.total_bytes() + tied.input_embedding_bytes(), apart.total_bytes());
        assert_eq!(tied.match_digest(&apart.digest), DigestMatch::Different);
        assert_eq!(tied.match_digest(&tied.digest.clone()), DigestMatch::Same);
    }
}
