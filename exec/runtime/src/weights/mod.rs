//! The memory-mapped weights of a model.
//!
//! The files of a model are memory-mapped: a page is read from disk when a kernel first touches it, or earlier if its
//! [`Extent`] is prefetched. [`Weights::open`] checks every tensor that the forward pass uses
//! (`crate::weights::tensors`); after that, using the weights cannot fail, unless another program changes a file
//! ([`Weights::check_unchanged`]).
//!
//! Not here: when pages are prefetched and evicted ([`crate::residency`]).

pub mod digest_cache;
pub mod digests;
mod mapped_file;
pub mod packed;
pub(crate) mod tensors;

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use crate::error::ExecError;
use crate::fetched_file::is_partial;
use crate::hyperparameters::Hyperparameters;
use crate::pages;
use crate::rope::rotated_dimensions;
use crate::weights::mapped_file::MappedFile;
pub(crate) use crate::weights::tensors::RopeFactors;
use crate::weights::tensors::{LayerTensors, Tensor, TensorTable};
use hearth_core::schedule::ModelPart;
use hearth_kernels::matmul::Matrix;
use hearth_profiles::gguf::GgufModel;
use hearth_profiles::measure::direct::PageBuffer;
use hearth_profiles::measure::mapping::FileMapping;
use hearth_profiles::model::ModelShape;

/// A contiguous range of bytes in a model file or in the file with its packed weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Extent {
    /// The index of the file among the files of the model, of which packed weights are the last, counted from 0.
    pub file_index: usize,
    /// The offset of the range in the file, in bytes.
    pub offset: u64,
    /// The length of the range in bytes.
    pub length: u64,
}

/// A model whose files are memory-mapped and whose tensors have been checked.
#[derive(Debug)]
pub struct Weights {
    model: GgufModel,
    shape: ModelShape,
    hyperparameters: Hyperparameters,
    files: Vec<MappedFile>,
    layers: Vec<LayerTensors>,
    embedding: Tensor,
    per_layer_inputs: Option<PerLayerInputTable<Tensor, Tensor>>,
    output: OutputTensors,
    /// The packed matrices by their extents in the model files; none if packed weights are not used.
    packed: BTreeMap<Extent, Tensor>,
    /// The available layers if only some layers of the model were fetched; `None` if the model is complete.
    fetched_layers: Option<BTreeSet<u32>>,
}

/// The weights of a layer. Matrices and biases are in the order query, key, value, attention output, gate, up, down. In
/// a gated delta net, the first four are those of its queries, keys, values and output. In a layer with experts, the
/// last three are those of the block that all tokens share.
#[derive(Debug, Clone, Copy)]
pub struct LayerParameters<M, V> {
    /// The weight matrices, `[rows, columns]` each. The one of values is missing if values are keys, those of keys and
    /// values are missing if the layer uses those of an earlier layer, and the last three if the layer has experts and no
    /// shared block.
    pub matrices: [Option<M>; 7],
    /// The other weights of a gated delta net; `None` in a layer with attention.
    pub delta_net: Option<DeltaNetParameters<M, V>>,
    /// The router and the experts; `None` in a layer with a dense feed-forward block.
    pub experts: Option<ExpertParameters<M, V>>,
    /// The biases that are added to the outputs of the matrices, if any, `[rows]` each.
    pub biases: [Option<V>; 7],
    /// The weights of the norm before attention, if any, `[embedding]`.
    pub attention_norm: Option<V>,
    /// The weights of the norm before the feed-forward block, if any, `[embedding]`.
    pub feed_forward_norm: Option<V>,
    /// The weights of the norm of each query head, `[key_length]`, or of all query heads, `[heads * key_length]`, if
    /// any.
    pub query_norm: Option<V>,
    /// The weights of the norm of each key head, `[key_length]`, or of all key heads, `[kv_heads * key_length]`, if
    /// any.
    pub key_norm: Option<V>,
    /// The sinks of the query heads, if any, `[heads]`.
    pub attention_sinks: Option<V>,
    /// The weights of the norm of the attention output, before the residual connection, if any, `[embedding]`.
    pub post_attention_norm: Option<V>,
    /// The weights of the norm of the feed-forward output, before the residual connection, if any, `[embedding]`.
    pub post_feed_forward_norm: Option<V>,
    /// The weights with which the input of the layer is added to the hidden state, if the token has such an input.
    pub per_layer_input: Option<PerLayerInputParameters<M, V>>,
    /// The factor of the hidden state after the layer, if any, `[1]`.
    pub output_scale: Option<V>,
}

/// The weights of a feed-forward block that consists of experts. The matrices of all experts are one below the other.
#[derive(Debug, Clone, Copy)]
pub struct ExpertParameters<M, V> {
    /// The matrix of the router, `[experts, embedding]`.
    pub router: M,
    /// The matrices of the gates, `[experts * width, embedding]`, or if `up` is `None`, for each expert those of gate and
    /// up projection, `[experts * 2 * width, embedding]`.
    pub gate: M,
    /// The matrices of the up projections, `[experts * width, embedding]`.
    pub up: Option<M>,
    /// The matrices of the down projections, `[experts * embedding, width]`.
    pub down: M,
    /// The biases of the four results above, in their order and with an element for each row; `None` if there are none.
    pub biases: Option<[V; 4]>,
    /// The weights of the gate of the shared block, if it has one, `[embedding]`.
    pub shared_gate: Option<V>,
}

impl<M, V> ExpertParameters<M, V> {
    /// Returns the matrices of the experts, without that of the router.
    fn matrices(self) -> impl Iterator<Item = M> {
        [Some(self.gate), self.up, Some(self.down)].into_iter().flatten()
    }

    /// Converts the matrices with `matrix` and the biases with `vector`.
    fn map<N, W>(self, matrix: impl Fn(M) -> N, vector: impl Fn(V) -> W) -> ExpertParameters<N, W> {
        ExpertParameters {
            shared_gate: self.shared_gate.map(&vector),
            router: matrix(self.router),
            gate: matrix(self.gate),
            up: self.up.map(&matrix),
            down: matrix(self.down),
            biases: self.biases.map(|biases| biases.map(vector)),
        }
    }
}

impl<M: Copy, V> ExpertParameters<M, V> {
    /// Returns the matrices that have the gate and the up projection of an expert of `width` rows, each with its first row.
    pub(crate) fn gate_and_up(&self, expert: usize, width: usize) -> [(M, usize); 2] {
        match self.up {
            Some(up) => [self.gate, up].map(|matrix| (matrix, expert * width)),
            None => [2 * expert, 2 * expert + 1].map(|index| (self.gate, index * width)),
        }
    }
}

impl<'a> ExpertWeights<'a> {
    /// Returns the matrices of the gate, up and down projections of an expert, of `width` rows for the first two.
    /// `in_memory` has them in buffers, in the order of [`Weights::expert_extents`]; with `None`, those in the mapped
    /// files are returned.
    pub(crate) fn of_expert(
        &self,
        expert: usize,
        width: usize,
        in_memory: Option<&'a [Arc<PageBuffer>]>,
    ) -> [Matrix<'a>; 3] {
        let with = |matrix: Matrix<'a>, bytes: &'a PageBuffer| {
            let rows = bytes.len().checked_div(matrix.row_bytes()).unwrap_or(0);
            Matrix { rows, bytes, ..matrix }
        };
        let (own, index) = match (self.up, in_memory) {
            (Some(up), Some([gate, own_up, down])) => {
                let (gate, down) = (with(self.gate, gate), with(self.down, down));
                (Self { gate, up: Some(with(up, own_up)), down, ..*self }, 0)
            }
            (None, Some([gate, down])) => {
                (Self { gate: with(self.gate, gate), down: with(self.down, down), ..*self }, 0)
            }
            _ => (*self, expert),
        };
        let [gate, up] = own.gate_and_up(index, width).map(|(matrix, first)| matrix.slice(first, width));
        let rows = self.down.rows / (self.router.rows).max(1);
        [gate, up, own.down.slice(index * rows, rows)]
    }
}

/// The weights with which the input of a layer is added to the hidden state.
#[derive(Debug, Clone, Copy)]
pub struct PerLayerInputParameters<M, V> {
    /// The matrix of the input's gate, `[per-layer input, embedding]`.
    pub gate: M,
    /// The matrix that converts the gated input, `[embedding, per-layer input]`.
    pub projection: M,
    /// The weights of the norm of the result, `[embedding]`.
    pub norm: V,
}

/// The weights from which the per-layer inputs of all layers are computed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PerLayerInputTable<M, V> {
    /// The per-layer inputs of all layers for each token, `[vocabulary, layers * per-layer input]`.
    pub(crate) table: M,
    /// The matrix that computes another part of these inputs from the embedding, `[layers * per-layer input,
    /// embedding]`.
    pub(crate) projection: M,
    /// The weights of the norm of this part, `[per-layer input]`.
    pub(crate) norm: V,
}

/// The weights of a gated delta net, except the matrices that attention has too.
#[derive(Debug, Clone, Copy)]
pub struct DeltaNetParameters<M, V> {
    /// The matrix of the output's gate, `[value width, embedding]`.
    pub gate: M,
    /// The matrix of beta, which determines the write strengths, `[value heads, embedding]`.
    pub beta: M,
    /// The matrix of the time steps, which determine the decays, `[value heads, embedding]`.
    pub alpha: M,
    /// The biases of the time steps, `[value heads]`.
    pub dt_bias: V,
    /// The factors of the time steps, which are negative, `[value heads]`.
    pub decay: V,
    /// The kernels of the convolution of queries, keys and values, `[channels, convolution length]`.
    pub convolution: V,
    /// The weights of the norm of the output of each head, `[head length]`.
    pub norm: V,
}

impl<M, V> DeltaNetParameters<M, V> {
    /// Converts the matrices with `matrix` and the vectors with `vector`.
    fn map<N, W>(self, matrix: impl Fn(M) -> N, vector: impl Fn(V) -> W) -> DeltaNetParameters<N, W> {
        DeltaNetParameters {
            gate: matrix(self.gate),
            beta: matrix(self.beta),
            alpha: matrix(self.alpha),
            dt_bias: vector(self.dt_bias),
            decay: vector(self.decay),
            convolution: vector(self.convolution),
            norm: vector(self.norm),
        }
    }
}

/// The weights of a layer in the memory-mapped files.
pub type LayerWeights<'a> = LayerParameters<Matrix<'a>, &'a [f32]>;

/// The weights of the experts of a layer in the memory-mapped files.
pub(crate) type ExpertWeights<'a> = ExpertParameters<Matrix<'a>, &'a [f32]>;

/// The tensors of the output layer, which converts hidden states to logits.
#[derive(Debug)]
struct OutputTensors {
    norm: Tensor,
    matrix: Tensor,
    bias: Option<Tensor>,
}

impl Weights {
    /// Memory-maps the model at `path`, which can be any file of a split model, and checks its tensors.
    pub fn open(path: impl AsRef<Path>) -> Result<Weights, ExecError> {
        let model = GgufModel::open(path)?;
        match model.file_paths.iter().find(|file| is_partial(file)) {
            Some(file) => Err(ExecError::Partial { path: file.clone() }),
            None => Weights::of(model, None),
        }
    }

    /// Memory-maps a model of which only the layers `layers` were fetched. The other layers must not be used.
    pub fn open_fetched(path: &Path, layers: BTreeSet<u32>) -> Result<Weights, ExecError> {
        Weights::of(GgufModel::open(path)?, Some(layers))
    }

    /// Returns whether the weights of all layers in `layers` are available.
    pub fn has_layers(&self, mut layers: Range<u32>) -> bool {
        let fetched = self.fetched_layers.as_ref();
        fetched.is_none_or(|fetched| layers.all(|layer| fetched.contains(&layer)))
    }

    /// Returns whether the model is complete, that is, not partially fetched.
    pub fn is_complete(&self) -> bool {
        self.fetched_layers.is_none()
    }

    fn of(model: GgufModel, fetched_layers: Option<BTreeSet<u32>>) -> Result<Weights, ExecError> {
        let shape = model.shape()?;
        shape.check_runnable()?;
        let files =
            model.file_paths.iter().map(|file| MappedFile::open(file)).collect::<Result<Vec<_>, _>>()?;
        let table = TensorTable::new(&model, &files, shape.architecture);
        let (width, vocabulary) = (u64::from(shape.embedding_length), u64::from(shape.vocab_size));
        let layers =
            (0..shape.layers.0).map(|at| table.layer_tensors(at, &shape)).collect::<Result<_, _>>()?;
        let embedding = table.matrix("token_embd.weight", width, vocabulary)?;
        let per_layer_inputs = table.per_layer_inputs(&shape)?;
        let output = match table.find("output.weight") {
            Some(_) => table.matrix("output.weight", width, vocabulary)?,
            None => embedding,
        };
        let output_norm = table.vector("output_norm.weight", width)?;
        let output_bias = table.optional_vector("output.bias", vocabulary)?;
        let rotated = rotated_dimensions(&model.metadata, &shape, "dimension_count", shape.key_length)?;
        let factors = table.rope_factors(rotated)?;
        table.check_all_used(&model, &shape)?;
        let hyperparameters = Hyperparameters::read(&model.metadata, &shape, &factors)?;
        let output = OutputTensors { norm: output_norm, matrix: output, bias: output_bias };
        Ok(Weights {
            model,
            shape,
            hyperparameters,
            files,
            layers,
            embedding,
            per_layer_inputs,
            output,
            packed: BTreeMap::new(),
            fetched_layers,
        })
    }

    /// Returns the GGUF header of the model: its metadata and tensor table.
    pub fn model(&self) -> &GgufModel {
        &self.model
    }

    pub fn shape(&self) -> &ModelShape {
        &self.shape
    }

    pub fn hyperparameters(&self) -> &Hyperparameters {
        &self.hyperparameters
    }

    /// Returns the paths of the files, indexed by [`Extent::file_index`]: those of the model, and that of the packed
    /// weights if they are used.
    pub fn file_paths(&self) -> impl Iterator<Item = &Path> {
        self.files.iter().map(MappedFile::path)
    }

    /// Returns the extents of the tables of which each token reads one row: the input embedding and, in some models,
    /// the per-layer inputs.
    pub fn embedding_extents(&self) -> Vec<Extent> {
        merged([self.embedding].into_iter().chain(self.per_layer_inputs.map(|inputs| inputs.table)))
    }

    /// Returns the tables of which each token reads one row and nothing else. With tied embeddings, the embedding table
    /// is not one of them, because it is also the output matrix, which is read sequentially.
    fn row_tables(&self) -> impl Iterator<Item = Tensor> {
        let embedding = Some(self.embedding).filter(|table| table.extent != self.output.matrix.extent);
        embedding.into_iter().chain(self.per_layer_inputs.map(|inputs| inputs.table))
    }

    /// Returns the extents of the tables of which each token reads one row and nothing else.
    pub fn row_table_extents(&self) -> impl Iterator<Item = Extent> {
        self.row_tables().map(|table| table.extent)
    }

    /// Returns the extents of the rows of `tokens` in the tables of which a token reads nothing but a row.
    pub fn embedding_row_extents<'a>(&'a self, tokens: &'a [u32]) -> impl Iterator<Item = Extent> + 'a {
        self.row_tables().flat_map(move |Tensor { extent: table, rows, .. }| {
            let length = table.length / rows.max(1) as u64;
            let offsets = tokens.iter().map(move |&token| table.offset + u64::from(token) * length);
            offsets.map(move |offset| Extent { offset, length, ..table })
        })
    }

    /// Returns two lists for a part of the model: its matrices, in the order of use, and its norms and biases. Layers
    /// that the model does not have are skipped.
    fn part_tensors(&self, part: &ModelPart) -> [Vec<Tensor>; 2] {
        match part {
            ModelPart::Layers(layers) => {
                let own = || layers.clone().filter_map(|layer| self.layers.get(layer as usize));
                let vectors = own().flat_map(LayerTensors::vectors).collect();
                [own().flat_map(LayerTensors::matrices_in_order).collect(), vectors]
            }
            ModelPart::Output => {
                let OutputTensors { norm, matrix, bias } = self.output;
                [vec![matrix], [Some(norm), bias].into_iter().flatten().collect()]
            }
        }
    }

    /// Returns the extents of all weights in a part of the model, with adjacent tensors merged. With tied embeddings,
    /// the output layer includes the input embedding table, unless it is packed.
    pub fn part_extents(&self, part: &ModelPart) -> Vec<Extent> {
        merged(self.part_tensors(part).concat())
    }

    /// Returns the extents of the matrices of a part of the model, in the order of use.
    pub fn matrix_extents(&self, part: &ModelPart) -> Vec<Extent> {
        let [matrices, _] = self.part_tensors(part);
        matrices.iter().map(|tensor| tensor.extent).collect()
    }

    /// Returns the extents of the matrices of a part of the model that every token uses, in the order of use: all except
    /// those of experts.
    pub fn shared_matrix_extents(&self, part: &ModelPart) -> Vec<Extent> {
        let of_experts: BTreeSet<Extent> = match part {
            ModelPart::Layers(layers) => {
                let own = layers.clone().filter_map(|layer| self.layers.get(layer as usize)?.experts);
                own.flat_map(ExpertParameters::matrices).map(|tensor| tensor.extent).collect()
            }
            ModelPart::Output => BTreeSet::new(),
        };
        self.matrix_extents(part).into_iter().filter(|extent| !of_experts.contains(extent)).collect()
    }

    /// Returns the extents of the matrices of an expert; none if the layer has no experts.
    pub fn expert_extents(&self, layer: u32, expert: u32) -> impl Iterator<Item = Extent> + use<> {
        let count = self.shape.experts.map_or(1, |experts| u64::from(experts.count));
        let experts = self.layers.get(layer as usize).and_then(|layer| layer.experts);
        experts.into_iter().flat_map(ExpertParameters::matrices).map(move |Tensor { extent: all, .. }| {
            let length = all.length / count;
            Extent { offset: all.offset + u64::from(expert) * length, length, ..all }
        })
    }

    /// Returns the bytes of one expert of a layer; 0 if the layer has no experts.
    pub fn expert_bytes(&self, layer: u32) -> u64 {
        self.expert_extents(layer, 0).map(|extent| extent.length).sum()
    }

    /// Returns the extents of the norms and biases of a part of the model.
    pub fn vector_extents(&self, part: &ModelPart) -> Vec<Extent> {
        let [_, vectors] = self.part_tensors(part);
        vectors.iter().map(|tensor| tensor.extent).collect()
    }

    /// Returns the bytes of experts that a token does not use; 0 for a dense model.
    pub fn unused_expert_bytes(&self) -> u64 {
        let Some(shape) = self.shape.experts else { return 0 };
        let bytes: u64 = (0..self.layers.len() as u32).map(|layer| self.expert_bytes(layer)).sum();
        bytes * u64::from(shape.count - shape.used)
    }

    /// Returns the size of the weights in a part of the model, in bytes.
    pub fn part_bytes(&self, part: &ModelPart) -> u64 {
        self.part_extents(part).iter().map(|extent| extent.length).sum()
    }

    /// Returns the memory-mapped bytes of an extent, or `None` if the extent is not inside its file.
    pub fn mapped_bytes(&self, extent: Extent) -> Option<&[u8]> {
        let start = usize::try_from(extent.offset).ok()?;
        let end = start.checked_add(usize::try_from(extent.length).ok()?)?;
        self.files.get(extent.file_index)?.mapping().get(start..end)
    }

    /// Evicts the whole pages of an extent from memory. Does nothing if the extent is not inside its file.
    pub fn evict(&self, extent: Extent) {
        if let Some(file) = self.files.get(extent.file_index) {
            pages::evict(file.mapping(), file.file(), &(extent.offset..extent.offset + extent.length));
        }
    }

    /// Returns the files, indexed by [`Extent::file_index`].
    pub fn files(&self) -> impl Iterator<Item = &File> {
        self.files.iter().map(MappedFile::file)
    }

    /// Fails if the content of a model file has changed since the model was opened. A result of a computation must not
    /// be used before this check, because unreadable weights are computed as zeros.
    pub fn check_unchanged(&self) -> Result<(), ExecError> {
        // Layers that are fetched later are written to the same file.
        let may_grow = self.fetched_layers.is_some();
        self.files.iter().try_for_each(|file| file.check(may_grow))
    }

    /// Returns the mapping of each model file, indexed by [`Extent::file_index`].
    pub fn mappings(&self) -> impl Iterator<Item = &FileMapping> {
        self.files.iter().map(MappedFile::mapping)
    }

    /// Returns the weights of the layer with the index `layer`.
    ///
    /// # Panics
    /// If the model has no such layer.
    pub fn layer_weights(&self, layer: u32) -> LayerWeights<'_> {
        let tensors = &self.layers[layer as usize];
        let vector = |tensor: Option<Tensor>| tensor.map(|tensor| self.vector(tensor));
        LayerWeights {
            matrices: tensors.matrices.map(|tensor| tensor.map(|tensor| self.matrix(tensor))),
            delta_net: tensors
                .delta_net
                .map(|net| net.map(|tensor| self.matrix(tensor), |tensor| self.vector(tensor))),
            experts: tensors
                .experts
                .map(|experts| experts.map(|tensor| self.matrix(tensor), |tensor| self.vector(tensor))),
            biases: tensors.biases.map(vector),
            attention_norm: vector(tensors.attention_norm),
            feed_forward_norm: vector(tensors.feed_forward_norm),
            query_norm: vector(tensors.query_norm),
            key_norm: vector(tensors.key_norm),
            attention_sinks: vector(tensors.attention_sinks),
            post_attention_norm: vector(tensors.post_attention_norm),
            post_feed_forward_norm: vector(tensors.post_feed_forward_norm),
            per_layer_input: tensors.per_layer_input.map(|input| PerLayerInputParameters {
                gate: self.matrix(input.gate),
                projection: self.matrix(input.projection),
                norm: self.vector(input.norm),
            }),
            output_scale: vector(tensors.output_scale),
        }
    }

    /// Returns the weights of the output layer: its norm, its matrix and its bias, if any.
    pub fn output_weights(&self) -> (&[f32], Matrix<'_>, Option<&[f32]>) {
        let OutputTensors { norm, matrix, bias } = self.output;
        (self.vector(norm), self.matrix(matrix), bias.map(|bias| self.vector(bias)))
    }

    /// Returns the weights from which the per-layer inputs are computed, if the model has such inputs.
    pub(crate) fn per_layer_inputs(&self) -> Option<PerLayerInputTable<Matrix<'_>, &[f32]>> {
        self.per_layer_inputs.map(|PerLayerInputTable { table, projection, norm }| PerLayerInputTable {
            table: self.matrix(table),
            projection: self.matrix(projection),
            norm: self.vector(norm),
        })
    }

    pub(crate) fn embedding_matrix(&self) -> Matrix<'_> {
        self.matrix(self.embedding)
    }

    fn matrix(&self, tensor: Tensor) -> Matrix<'_> {
        let bytes = self.mapped_bytes(tensor.extent).expect("the tensor table was checked");
        let Tensor { format, row_length, rows, layout, .. } = tensor;
        Matrix { format, row_length, rows, layout, bytes }
    }

    fn vector(&self, tensor: Tensor) -> &[f32] {
        bytemuck::cast_slice(self.mapped_bytes(tensor.extent).expect("the tensor table was checked"))
    }
}

/// Returns the extents of `tensors` in file order. Two extents are merged if only alignment padding is between them.
fn merged(tensors: impl IntoIterator<Item = Tensor>) -> Vec<Extent> {
    let mut extents: Vec<Extent> = tensors.into_iter().map(|tensor| tensor.extent).collect();
    extents.sort_unstable();
    let mut joined: Vec<Extent> = Vec::new();
    for extent in extents {
        // Tensors are padded to the alignment of the file.
        let is_adjacent = |last: &&mut Extent| {
            last.file_index == extent.file_index
                && extent.offset.saturating_sub(last.offset + last.length) < 64
        };
        match joined.last_mut().filter(is_adjacent) {
            Some(last) => last.length = last.length.max(extent.offset + extent.length - last.offset),
            None => joined.push(extent),
        }
    }
    joined
}
