//! Checks the tensors of a model file that the forward pass uses.
//!
//! In all architectures, a layer has two norms and seven matrices; in some architectures, it also has biases, norms of
//! the query and key heads, or norms after the attention and feed-forward blocks. Every required tensor must be inside
//! its file and have the dimensions that follow from the metadata. A tensor that the forward pass would not use is an
//! error too.
//!
//! Tensor names are those of `hearth_profiles::model::layout`, which defines the sizes of models without files.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};

use crate::weights::mapped_file::MappedFile;
use hearth_profiles::Format;
use hearth_profiles::gguf::{GgufModel, TensorInfo};
use hearth_profiles::model::{Architecture, ModelShape};

use super::LayerParameters;
use crate::{ExecError, Extent};

/// A tensor in the memory-mapped files, whose dimensions and extent have been checked.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Tensor {
    pub(crate) format: Format,
    /// Number of elements in a row.
    pub(crate) row_length: usize,
    pub(crate) rows: usize,
    pub(crate) extent: Extent,
}

pub(crate) type LayerTensors = LayerParameters<Tensor, Tensor>;

impl LayerTensors {
    /// Returns the norms and biases of the layer.
    pub(crate) fn vectors(&self) -> impl Iterator<Item = Tensor> + use<> {
        let norms = [self.query_norm, self.key_norm, self.post_attention_norm, self.post_feed_forward_norm];
        let required = [Some(self.attention_norm), Some(self.feed_forward_norm)];
        required.into_iter().chain(self.biases).chain(norms).flatten()
    }
}

/// The tensors of a model file by name. A tensor is checked when it is looked up.
pub(crate) struct TensorTable<'a> {
    by_name: BTreeMap<&'a str, &'a TensorInfo>,
    files: &'a [MappedFile],
    architecture: Architecture,
    /// The names of the tensors that the forward pass uses.
    used: RefCell<BTreeSet<&'a str>>,
}

impl<'a> TensorTable<'a> {
    pub(crate) fn new(
        model: &'a GgufModel,
        files: &'a [MappedFile],
        architecture: Architecture,
    ) -> TensorTable<'a> {
        let by_name = model.tensors.iter().map(|tensor| (tensor.name.as_str(), tensor)).collect();
        TensorTable { by_name, files, architecture, used: RefCell::default() }
    }

    pub(crate) fn find(&self, name: &str) -> Option<&'a TensorInfo> {
        self.by_name.get(name).copied()
    }

    pub(crate) fn layer_tensors(&self, layer: u32, shape: &ModelShape) -> Result<LayerTensors, ExecError> {
        let name = |name: &str| format!("blk.{layer}.{name}.weight");
        let matrix = |at: &str, length, rows| self.matrix(&name(at), length, rows);
        let norm = |at: &str, length| self.vector(&name(at), length);
        let norm_if = |expected: bool, at: &str, length| expected.then(|| norm(at, length)).transpose();
        let (embedding, feed_forward) =
            (u64::from(shape.embedding_length), u64::from(shape.feed_forward_length));
        let heads_width = u64::from(shape.heads) * u64::from(shape.value_length);
        let spec = shape.architecture.spec();
        let key_length = u64::from(shape.key_length);
        // In this order, so that the first defect of a file is reported.
        let attention_norm = norm("attn_norm", embedding)?;
        let query = matrix("attn_q", embedding, shape.query_width())?;
        let key = matrix("attn_k", embedding, shape.key_width())?;
        let value = matrix("attn_v", embedding, shape.value_width())?;
        let attention_output = matrix("attn_output", heads_width, embedding)?;
        let feed_forward_norm = norm("ffn_norm", embedding)?;
        let gate = matrix("ffn_gate", embedding, feed_forward)?;
        let up = matrix("ffn_up", embedding, feed_forward)?;
        let down = matrix("ffn_down", feed_forward, embedding)?;
        let matrices = [query, key, value, attention_output, gate, up, down];
        Ok(LayerTensors {
            matrices,
            biases: self.biases(layer, &matrices)?,
            attention_norm,
            feed_forward_norm,
            query_norm: norm_if(spec.has_head_norms, "attn_q_norm", key_length)?,
            key_norm: norm_if(spec.has_head_norms, "attn_k_norm", key_length)?,
            post_attention_norm: norm_if(spec.has_post_norms, "post_attention_norm", embedding)?,
            post_feed_forward_norm: norm_if(spec.has_post_norms, "post_ffw_norm", embedding)?,
        })
    }

    /// Returns the biases of the seven matrices of a layer, if any, each with one element for every row of its matrix.
    fn biases(&self, layer: u32, matrices: &[Tensor; 7]) -> Result<[Option<Tensor>; 7], ExecError> {
        let names = ["attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"];
        let mut biases = [None; 7];
        for (index, name) in names.into_iter().enumerate() {
            let (name, length) = (format!("blk.{layer}.{name}.bias"), matrices[index].rows as u64);
            let required = self.architecture.spec().has_projection_biases && index < 3;
            let expected = required || self.find(&name).is_some();
            biases[index] = expected.then(|| self.vector(&name, length)).transpose()?;
        }
        Ok(biases)
    }

    /// Returns the matrix `name` after checking that it has `rows` rows of `length` elements.
    pub(crate) fn matrix(&self, name: &str, length: u64, rows: u64) -> Result<Tensor, ExecError> {
        self.checked(name, &[length, rows])
    }

    pub(crate) fn optional_vector(&self, name: &str, length: u64) -> Result<Option<Tensor>, ExecError> {
        self.find(name).map(|_| self.vector(name, length)).transpose()
    }

    /// Returns the vector `name` after checking that it has `length` elements in F32.
    pub(crate) fn vector(&self, name: &str, length: u64) -> Result<Tensor, ExecError> {
        let tensor = self.checked(name, &[length])?;
        if tensor.format != Format::F32 {
            let problem = format!("has type {}, but must be f32", tensor.format);
            return Err(rejected(name, problem, "convert the model again"));
        }
        let offset = tensor.extent.offset;
        if !offset.is_multiple_of(4) {
            let problem = format!("is at byte {offset}, which is not a multiple of 4");
            return Err(rejected(name, problem, "download the model again"));
        }
        Ok(tensor)
    }

    fn checked(&self, name: &str, dims: &[u64]) -> Result<Tensor, ExecError> {
        let incomplete = "the conversion is incomplete; convert or download the model again";
        let info = self.find(name).ok_or_else(|| rejected(name, "is missing", incomplete))?;
        let [length, rows @ ..] = dims else { unreachable!("a tensor has a row length") };
        let rows: u64 = rows.iter().product();
        let bytes = info.format.row_bytes(*length).and_then(|row| row.0.checked_mul(rows));
        if info.dims != dims || bytes != Some(info.bytes.0) {
            let problem = format!("has dimensions {:?}, but the metadata require {dims:?}", info.dims);
            return Err(rejected(name, problem, "convert or download the model again"));
        }
        let extent = Extent { file_index: info.file_index, offset: info.offset, length: info.bytes.0 };
        let end = extent.offset.checked_add(extent.length);
        let file = self.files.get(extent.file_index).map_or(0, |file| file.mapping().len() as u64);
        if end.is_none_or(|end| end > file) {
            let problem = format!("begins at byte {} and ends after the end of the file", extent.offset);
            return Err(rejected(name, problem, "download the model again"));
        }
        self.used.borrow_mut().insert(&info.name);
        Ok(Tensor { format: info.format, row_length: *length as usize, rows: rows as usize, extent })
    }

    /// Returns the divisors of the rotary frequencies (Llama 3.1), one for each pair of rotated dimensions, or `None`
    /// if the file has no such tensor.
    pub(crate) fn rope_factors(&self, rotated_dimensions: u32) -> Result<Option<Vec<f32>>, ExecError> {
        let name = "rope_freqs.weight";
        if self.find(name).is_none() {
            return Ok(None);
        }
        // llama.cpp's converter writes one factor for each rotated pair.
        let extent = self.vector(name, u64::from(rotated_dimensions / 2))?.extent;
        let bytes =
            &self.files[extent.file_index].mapping()[extent.offset as usize..][..extent.length as usize];
        let factors: Vec<f32> = bytemuck::cast_slice(bytes).to_vec();
        if let Some(pair) = factors.iter().position(|factor| !(factor.is_finite() && *factor > 0.0)) {
            let found = factors[pair];
            let problem = format!("has {found} as factor {pair}, but factors must be positive and finite");
            return Err(rejected(name, problem, "convert or download the model again"));
        }
        Ok(Some(factors))
    }

    /// Fails if the file has a tensor that the forward pass does not use.
    pub(crate) fn check_all_used(&self) -> Result<(), ExecError> {
        let used = self.used.borrow();
        let Some(name) = self.by_name.keys().find(|name| !used.contains(*name)) else { return Ok(()) };
        let problem = format!("is not part of the {} architecture", self.architecture);
        let hint = "models with experts or adapters are not supported; use a model without them";
        Err(rejected(name, problem, hint))
    }
}

fn rejected(tensor: &str, problem: impl Into<String>, hint: &'static str) -> ExecError {
    ExecError::Tensor { tensor: tensor.into(), problem: problem.into(), hint }
}
