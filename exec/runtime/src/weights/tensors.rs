//! Checks the tensors of a model file that the forward pass uses.
//!
//! In all architectures a layer has two norms and seven matrices; some architectures also have biases, norms of the
//! heads of q and k, or norms after a block. Every required tensor must be present, inside its file, in a format with
//! kernels, and have the dimensions that follow from the metadata. A tensor that the pass would not use is an error
//! too, because the result would be wrong.
//!
//! Tensor names are those of `profiles::model::layout`, which defines the sizes of models without files.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};

use hearth_profiles::gguf::{GgufModel, TensorInfo};
use hearth_profiles::model::{Architecture, ModelShape};
use memmap2::Mmap;

use crate::error::ExecError;
use crate::weights::Extent;
use hearth_kernels::KernelFormat;

/// A checked tensor in the mapped files.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Tensor {
    pub(crate) format: KernelFormat,
    /// Number of elements in a row.
    pub(crate) length: usize,
    pub(crate) rows: usize,
    pub(crate) extent: Extent,
}

/// The tensors of a layer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LayerTensors {
    pub(crate) attention_norm: Tensor,
    pub(crate) query: Tensor,
    pub(crate) key: Tensor,
    pub(crate) value: Tensor,
    pub(crate) attention_output: Tensor,
    pub(crate) feed_forward_norm: Tensor,
    pub(crate) gate: Tensor,
    pub(crate) up: Tensor,
    pub(crate) down: Tensor,
    pub(crate) biases: Biases,
    /// The norm of each query head, [key_length].
    pub(crate) query_norm: Option<Tensor>,
    /// The norm of each key head, [key_length].
    pub(crate) key_norm: Option<Tensor>,
    /// The norm of the attention output, before the residual connection, [embedding].
    pub(crate) post_attention_norm: Option<Tensor>,
    /// The norm of the feed-forward output, before the residual connection, [embedding].
    pub(crate) post_feed_forward_norm: Option<Tensor>,
}

/// The biases that are added to the matmul outputs of a layer, each [rows of its matrix].
#[derive(Debug, Clone, Copy)]
pub(crate) struct Biases {
    pub(crate) query: Option<Tensor>,
    pub(crate) key: Option<Tensor>,
    pub(crate) value: Option<Tensor>,
    pub(crate) attention_output: Option<Tensor>,
    pub(crate) gate: Option<Tensor>,
    pub(crate) up: Option<Tensor>,
    pub(crate) down: Option<Tensor>,
}

impl LayerTensors {
    /// Returns the matrices in the order of use.
    pub(crate) fn matrices(&self) -> [Tensor; 7] {
        [self.query, self.key, self.value, self.attention_output, self.gate, self.up, self.down]
    }

    /// Returns the norms and biases.
    pub(crate) fn vectors(&self) -> impl Iterator<Item = Tensor> + use<> {
        let Biases { query, key, value, attention_output, gate, up, down } = self.biases;
        let some = [query, key, value, attention_output, gate, up, down];
        let norms = [self.query_norm, self.key_norm, self.post_attention_norm, self.post_feed_forward_norm];
        let own = [self.attention_norm, self.feed_forward_norm];
        own.into_iter().chain(some.into_iter().flatten()).chain(norms.into_iter().flatten())
    }

    /// Returns all tensors.
    pub(crate) fn all(&self) -> impl Iterator<Item = Tensor> + use<> {
        self.matrices().into_iter().chain(self.vectors())
    }
}

/// The tensors of a file by name, for checking.
pub(crate) struct Table<'a> {
    by_name: BTreeMap<&'a str, &'a TensorInfo>,
    maps: &'a [Mmap],
    architecture: Architecture,
    /// The names of the tensors that the forward pass uses.
    used: RefCell<BTreeSet<&'a str>>,
}

impl<'a> Table<'a> {
    pub(crate) fn new(model: &'a GgufModel, maps: &'a [Mmap], architecture: Architecture) -> Table<'a> {
        let by_name = model.tensors.iter().map(|tensor| (tensor.name.as_str(), tensor)).collect();
        Table { by_name, maps, architecture, used: RefCell::default() }
    }

    pub(crate) fn find(&self, name: &str) -> Option<&'a TensorInfo> {
        self.by_name.get(name).copied()
    }

    pub(crate) fn layer(&self, layer: u32, shape: &ModelShape) -> Result<LayerTensors, ExecError> {
        let name = |name: &str| format!("blk.{layer}.{name}.weight");
        let matrix = |at: &str, length, rows| self.matrix(&name(at), length, rows);
        let norm = |at: &str, length| self.vector(&name(at), length);
        let norm_if = |expected: bool, at: &str, length| expected.then(|| norm(at, length)).transpose();
        let (wide, inner) = (u64::from(shape.embedding), u64::from(shape.feed_forward));
        let (query, key, value) = (shape.query_width(), shape.key_width(), shape.value_width());
        let mixed = u64::from(shape.heads) * u64::from(shape.value_length);
        let of_heads = shape.architecture == Architecture::Qwen3;
        let after = shape.architecture == Architecture::Gemma2;
        let head = u64::from(shape.key_length);
        Ok(LayerTensors {
            attention_norm: norm("attn_norm", wide)?,
            query: matrix("attn_q", wide, query)?,
            key: matrix("attn_k", wide, key)?,
            value: matrix("attn_v", wide, value)?,
            attention_output: matrix("attn_output", mixed, wide)?,
            feed_forward_norm: norm("ffn_norm", wide)?,
            gate: matrix("ffn_gate", wide, inner)?,
            up: matrix("ffn_up", wide, inner)?,
            down: matrix("ffn_down", inner, wide)?,
            biases: self.biases(layer, shape)?,
            query_norm: norm_if(of_heads, "attn_q_norm", head)?,
            key_norm: norm_if(of_heads, "attn_k_norm", head)?,
            post_attention_norm: norm_if(after, "post_attention_norm", wide)?,
            post_feed_forward_norm: norm_if(after, "post_ffw_norm", wide)?,
        })
    }

    fn biases(&self, layer: u32, shape: &ModelShape) -> Result<Biases, ExecError> {
        let (wide, inner) = (u64::from(shape.embedding), u64::from(shape.feed_forward));
        let bias = |name: &str, length| self.optional_vector(&format!("blk.{layer}.{name}.bias"), length);
        // Every published model of the architecture has these three; a file without them is incomplete.
        let own = |name: &str, length| match shape.architecture {
            Architecture::Qwen2 => self.vector(&format!("blk.{layer}.{name}.bias"), length).map(Some),
            _ => bias(name, length),
        };
        Ok(Biases {
            query: own("attn_q", shape.query_width())?,
            key: own("attn_k", shape.key_width())?,
            value: own("attn_v", shape.value_width())?,
            attention_output: bias("attn_output", wide)?,
            gate: bias("ffn_gate", inner)?,
            up: bias("ffn_up", inner)?,
            down: bias("ffn_down", wide)?,
        })
    }

    /// Returns a matrix of `rows` rows after checking it.
    pub(crate) fn matrix(&self, name: &str, length: u64, rows: u64) -> Result<Tensor, ExecError> {
        self.checked(name, &[length, rows])
    }

    pub(crate) fn optional_vector(&self, name: &str, length: u64) -> Result<Option<Tensor>, ExecError> {
        self.find(name).map(|_| self.vector(name, length)).transpose()
    }

    /// Returns a vector after checking it; it must be F32.
    pub(crate) fn vector(&self, name: &str, length: u64) -> Result<Tensor, ExecError> {
        let tensor = self.checked(name, &[length])?;
        if tensor.format != KernelFormat::F32 {
            return Err(ExecError::NotF32 { tensor: name.into(), format: tensor.format.format() });
        }
        let offset = tensor.extent.offset;
        if !offset.is_multiple_of(4) {
            let problem = "which is not a multiple of 4";
            return Err(ExecError::TensorOffset { tensor: name.into(), offset, problem });
        }
        Ok(tensor)
    }

    fn checked(&self, name: &str, dims: &[u64]) -> Result<Tensor, ExecError> {
        let missing = || ExecError::MissingTensor { tensor: name.into() };
        let info = self.find(name).ok_or_else(missing)?;
        let unknown = || ExecError::Format { tensor: name.into(), format: info.format };
        let format = KernelFormat::of(info.format).ok_or_else(unknown)?;
        let [length, rows @ ..] = dims else { unreachable!("a tensor has a row length") };
        let rows: u64 = rows.iter().product();
        let bytes = format.format().row_bytes(*length).and_then(|row| row.0.checked_mul(rows));
        if info.dims != dims || bytes != Some(info.bytes.0) {
            let (found, expected) = (info.dims.clone(), dims.to_vec());
            return Err(ExecError::Dimensions { tensor: name.into(), found, expected });
        }
        let extent = Extent { part: info.part, offset: info.offset, length: info.bytes.0 };
        let end = extent.offset.checked_add(extent.length);
        let file = self.maps.get(extent.part).map_or(0, |map| map.len() as u64);
        if end.is_none_or(|end| end > file) {
            let problem = "so that it ends after the end of the file";
            return Err(ExecError::TensorOffset { tensor: name.into(), offset: extent.offset, problem });
        }
        self.used.borrow_mut().insert(&info.name);
        Ok(Tensor { format, length: *length as usize, rows: rows as usize, extent })
    }

    /// Returns the factors of the rotary frequencies (Llama 3.1), one for each pair of the `rotated` dimensions, or
    /// `None` if the file has none.
    pub(crate) fn rope_factors(&self, rotated: u32) -> Result<Option<Vec<f32>>, ExecError> {
        let name = "rope_freqs.weight";
        if self.find(name).is_none() {
            return Ok(None);
        }
        // llama.cpp's converter writes one factor for each rotated pair.
        let extent = self.vector(name, u64::from(rotated / 2))?.extent;
        let bytes = &self.maps[extent.part][extent.offset as usize..][..extent.length as usize];
        let factors: Vec<f32> = bytemuck::cast_slice(bytes).to_vec();
        match factors.iter().position(|factor| !(factor.is_finite() && *factor > 0.0)) {
            Some(at) => Err(ExecError::RopeFactor { pair: at, found: factors[at] }),
            None => Ok(Some(factors)),
        }
    }

    /// Fails if the file has a tensor that the forward pass does not use.
    pub(crate) fn check_all_used(&self) -> Result<(), ExecError> {
        let used = self.used.borrow();
        match self.by_name.keys().find(|name| !used.contains(*name)) {
            Some(name) => Err(ExecError::UnexpectedTensor {
                tensor: (*name).into(),
                architecture: self.architecture.to_string(),
            }),
            None => Ok(()),
        }
    }
}
