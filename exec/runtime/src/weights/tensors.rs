//! Checks the tensors of a model file that the forward pass uses.
//!
//! In all architectures, a layer has seven matrices, of which some can be parts of one tensor, and norms before or
//! after the attention and feed-forward blocks; in some architectures, it also has biases, norms of queries and keys,
//! or the other weights of a gated delta net. Every required tensor must be inside its file and have the dimensions
//! that follow from the metadata. A tensor that the forward pass would not use is an error too.
//!
//! Tensor names are those of `hearth_profiles::model::layout`, which defines the sizes of models without files.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};

use crate::weights::mapped_file::MappedFile;
use hearth_kernels::Layout;
use hearth_profiles::Format;
use hearth_profiles::gguf::{GgufModel, TensorInfo};
use hearth_profiles::model::architecture::RopeFactorTensors;
use hearth_profiles::model::{Architecture, AttentionShape, DeltaNetShape, Experts, ModelShape, TokenMixer};

use super::{
    DeltaNetParameters, ExpertParameters, LayerParameters, PerLayerInputParameters, PerLayerInputTable,
};
use crate::{ExecError, Extent};

/// A tensor in the memory-mapped files, whose dimensions and extent have been checked.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Tensor {
    pub(crate) format: Format,
    /// Number of elements in a row.
    pub(crate) row_length: usize,
    pub(crate) rows: usize,
    pub(crate) layout: Layout,
    pub(crate) extent: Extent,
}

impl Tensor {
    /// Returns the matrices of which this tensor consists: the first has the first `counts[0]` rows, and so on.
    fn split_rows<const N: usize>(self, counts: [u64; N]) -> [Tensor; N] {
        let row_bytes = self.extent.length / (self.rows as u64).max(1);
        let mut offset = self.extent.offset;
        counts.map(|rows| {
            let extent = Extent { offset, length: rows * row_bytes, ..self.extent };
            offset += extent.length;
            Tensor { rows: rows as usize, extent, ..self }
        })
    }
}

/// The divisors of the rotary frequencies in a model file, one for each pair of rotated dimensions.
#[derive(Debug, Default)]
pub(crate) struct RopeFactors {
    /// The divisors, for short contexts if there are others for long ones.
    pub(crate) short: Option<Vec<f32>>,
    pub(crate) long: Option<Vec<f32>>,
}

pub(crate) type LayerTensors = LayerParameters<Tensor, Tensor>;

impl LayerTensors {
    /// Returns the norms and biases of the layer, and its other small tensors.
    pub(crate) fn vectors(&self) -> impl Iterator<Item = Tensor> + use<> {
        let norms = [self.query_norm, self.key_norm, self.post_attention_norm, self.post_feed_forward_norm];
        let net = self.delta_net.map(|net| [net.convolution, net.dt_bias, net.decay, net.norm]);
        let input_norm = self.per_layer_input.map(|input| input.norm);
        let own = [self.attention_norm, self.feed_forward_norm, input_norm, self.output_scale];
        let own = own.into_iter().chain(self.biases).chain(norms).chain([self.attention_sinks]).flatten();
        let biases = self.experts.and_then(|experts| experts.biases).into_iter().flatten();
        let shared_gate = self.experts.and_then(|experts| experts.shared_gate);
        own.chain(net.into_iter().flatten()).chain(biases).chain(shared_gate)
    }

    /// Replaces each matrix by the result of `replace`.
    pub(crate) fn map_matrices(self, replace: impl Fn(Tensor) -> Tensor) -> LayerTensors {
        LayerTensors {
            matrices: self.matrices.map(|matrix| matrix.map(&replace)),
            delta_net: self.delta_net.map(|net| net.map(&replace, |vector| vector)),
            experts: self.experts.map(|experts| experts.map(&replace, |vector| vector)),
            per_layer_input: self.per_layer_input.map(|input| PerLayerInputParameters {
                gate: replace(input.gate),
                projection: replace(input.projection),
                ..input
            }),
            ..self
        }
    }

    /// Returns the matrices of the layer, each with the number of equal parts that are used alone: the matrices of
    /// experts.
    pub(crate) fn matrices_with_parts(&self, expert_count: usize) -> impl Iterator<Item = (Tensor, usize)> {
        let experts = self.experts;
        self.matrices_in_order().map(move |matrix| {
            let parts = match experts {
                Some(experts) if experts.up.is_none() && experts.gate.extent == matrix.extent => {
                    2 * expert_count
                }
                Some(experts) if experts.matrices().any(|own| own.extent == matrix.extent) => expert_count,
                _ => 1,
            };
            (matrix, parts)
        })
    }

    /// Returns the matrices of the layer in the order of use.
    pub(crate) fn matrices_in_order(&self) -> impl Iterator<Item = Tensor> + use<> {
        let [query, key, value, output, gate, up, down] = self.matrices;
        let net = self.delta_net.map(|net| [net.gate, net.beta, net.alpha]);
        let input = self.per_layer_input.map(|input| [input.gate, input.projection]);
        let projections = [query, key, value].into_iter().flatten().chain(net.into_iter().flatten());
        let router = self.experts.map(|experts| experts.router);
        let experts = self.experts.into_iter().flat_map(ExpertParameters::matrices);
        let rest = [output, router, gate, up, down].into_iter().flatten().chain(experts);
        projections.chain(rest).chain(input.into_iter().flatten())
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
        let embedding = u64::from(shape.embedding_length);
        let spec = shape.architecture.spec();
        // In this order, so that the first defect of a file is reported.
        let attention_norm = norm_if(spec.has_pre_norms, "attn_norm", embedding)?;
        let mixer = shape.mixer(layer);
        let [query_norm, key_norm] = match &mixer {
            TokenMixer::Attention(attention) => shape.query_key_norm_lengths(attention),
            TokenMixer::DeltaNet(_) => None,
        }
        .map_or([None; 2], |both| both.map(Some));
        let ([query, key, value, output], delta_net) = match mixer {
            TokenMixer::Attention(attention) => (self.attention_matrices(layer, shape, &attention)?, None),
            TokenMixer::DeltaNet(net) => {
                let widths = [net.key_width(), net.key_width(), net.value_width()];
                let [query, key, value] = matrix("attn_qkv", embedding, net.channels())?.split_rows(widths);
                let output = matrix("ssm_out", net.value_width(), embedding)?;
                let net = self.delta_net(layer, embedding, &net)?;
                ([query, key, value, output].map(Some), Some(net))
            }
        };
        let feed_forward_norm = norm_if(spec.has_pre_norms, spec.feed_forward_norm, embedding)?;
        let mixture = shape.layer_experts(layer);
        let experts = mixture.map(|experts| self.experts(layer, embedding, experts)).transpose()?;
        let [gate, up, down] = match mixture {
            Some(experts) => self.shared_block(layer, embedding, experts)?,
            None => self.dense_block(layer, shape)?.map(Some),
        };
        let matrices = [query, key, value, output, gate, up, down];
        let has_keys = matrices[1].is_some();
        let per_layer_input =
            (shape.per_layer_input_length > 0).then(|| self.per_layer_input(layer, shape)).transpose()?;
        let scale = format!("blk.{layer}.layer_output_scale.weight");
        let has_scale = spec.has_layer_scale && self.find(&scale).is_some();
        Ok(LayerTensors {
            matrices,
            biases: self.biases(layer, &matrices, experts.is_some())?,
            delta_net,
            experts,
            output_scale: has_scale.then(|| self.vector(&scale, 1)).transpose()?,
            attention_norm,
            feed_forward_norm,
            query_norm: query_norm.map(|length| norm("attn_q_norm", length)).transpose()?,
            attention_sinks: spec
                .has_attention_sinks
                .then(|| self.vector(&name("attn_sinks"), u64::from(shape.heads)))
                .transpose()?,
            key_norm: key_norm.filter(|_| has_keys).map(|length| norm("attn_k_norm", length)).transpose()?,
            per_layer_input,
            post_attention_norm: norm_if(spec.has_post_norms, "post_attention_norm", embedding)?,
            post_feed_forward_norm: norm_if(spec.has_post_norms, "post_ffw_norm", embedding)?,
        })
    }

    /// Returns the matrices of the gate, the up and the down projection of a dense feed-forward block.
    fn dense_block(&self, layer: u32, shape: &ModelShape) -> Result<[Tensor; 3], ExecError> {
        let matrix = |at: &str, length, rows| self.matrix(&format!("blk.{layer}.{at}.weight"), length, rows);
        let embedding = u64::from(shape.embedding_length);
        let width = u64::from(shape.layer_feed_forward_length(layer));
        let [gate, up] = if shape.architecture.spec().has_fused_projections {
            matrix("ffn_up", embedding, 2 * width)?.split_rows([width; 2])
        } else {
            [matrix("ffn_gate", embedding, width)?, matrix("ffn_up", embedding, width)?]
        };
        Ok([gate, up, matrix("ffn_down", width, embedding)?])
    }

    /// Returns the matrices of the gate, the up and the down projection of the block that all tokens of a mixture share,
    /// if there is one.
    fn shared_block(
        &self,
        layer: u32,
        embedding: u64,
        experts: Experts,
    ) -> Result<[Option<Tensor>; 3], ExecError> {
        let width = u64::from(experts.shared_feed_forward_length);
        if width == 0 {
            return Ok([None; 3]);
        }
        let matrix = |at: &str, length, rows| self.matrix(&format!("blk.{layer}.{at}.weight"), length, rows);
        Ok([
            Some(matrix("ffn_gate_shexp", embedding, width)?),
            Some(matrix("ffn_up_shexp", embedding, width)?),
            Some(matrix("ffn_down_shexp", width, embedding)?),
        ])
    }

    fn experts(
        &self,
        layer: u32,
        embedding: u64,
        experts: Experts,
    ) -> Result<ExpertParameters<Tensor, Tensor>, ExecError> {
        let name = |name: &str| format!("blk.{layer}.{name}.weight");
        let (count, width) = (u64::from(experts.count), u64::from(experts.feed_forward_length));
        let bias = |name: &str, dims: &[u64]| self.f32_tensor(&format!("blk.{layer}.{name}.bias"), dims);
        let biases = || -> Result<_, ExecError> {
            Ok([
                bias("ffn_gate_inp", &[count])?,
                bias("ffn_gate_exps", &[width, count])?,
                bias("ffn_up_exps", &[width, count])?,
                bias("ffn_down_exps", &[embedding, count])?,
            ])
        };
        let spec = self.architecture.spec();
        let has_gate = spec.has_shared_block_gate && experts.shared_feed_forward_length > 0;
        let fused = name("ffn_gate_up_exps");
        let (gate, up) = if self.find(&fused).is_some() && !spec.has_output_and_expert_biases {
            (self.checked(&fused, &[embedding, 2 * width, count])?, None)
        } else {
            let own = |at: &str| self.checked(&name(at), &[embedding, width, count]);
            (own("ffn_gate_exps")?, Some(own("ffn_up_exps")?))
        };
        Ok(ExpertParameters {
            router: self.matrix(&name("ffn_gate_inp"), embedding, count)?,
            gate,
            up,
            down: self.checked(&name("ffn_down_exps"), &[width, embedding, count])?,
            biases: spec.has_output_and_expert_biases.then(biases).transpose()?,
            shared_gate: has_gate.then(|| self.vector(&name("ffn_gate_inp_shexp"), embedding)).transpose()?,
        })
    }

    fn per_layer_input(
        &self,
        layer: u32,
        shape: &ModelShape,
    ) -> Result<PerLayerInputParameters<Tensor, Tensor>, ExecError> {
        let name = |name: &str| format!("blk.{layer}.{name}.weight");
        let (embedding, length) =
            (u64::from(shape.embedding_length), u64::from(shape.per_layer_input_length));
        Ok(PerLayerInputParameters {
            gate: self.matrix(&name("inp_gate"), embedding, length)?,
            projection: self.matrix(&name("proj"), length, embedding)?,
            norm: self.vector(&name("post_norm"), embedding)?,
        })
    }

    /// Returns the tensors from which the per-layer inputs are computed, if the model has such inputs.
    pub(crate) fn per_layer_inputs(
        &self,
        shape: &ModelShape,
    ) -> Result<Option<PerLayerInputTable<Tensor, Tensor>>, ExecError> {
        let length = u64::from(shape.per_layer_input_length);
        if length == 0 {
            return Ok(None);
        }
        let (embedding, all) = (u64::from(shape.embedding_length), u64::from(shape.layers.0) * length);
        Ok(Some(PerLayerInputTable {
            table: self.matrix("per_layer_token_embd.weight", all, u64::from(shape.vocab_size))?,
            projection: self.matrix("per_layer_model_proj.weight", embedding, all)?,
            norm: self.vector("per_layer_proj_norm.weight", length)?,
        }))
    }

    /// Returns the matrices of queries, keys, values and output, as far as the layer has them.
    fn attention_matrices(
        &self,
        layer: u32,
        shape: &ModelShape,
        attention: &AttentionShape,
    ) -> Result<[Option<Tensor>; 4], ExecError> {
        let (spec, embedding) = (shape.architecture.spec(), u64::from(shape.embedding_length));
        let matrix = |at: &str, length, rows| self.matrix(&format!("blk.{layer}.{at}.weight"), length, rows);
        let widths = [attention.query_width(), attention.key_width(), attention.value_width()];
        let [query, key, value] = if spec.has_fused_projections {
            matrix("attn_qkv", embedding, widths.iter().sum())?.split_rows(widths).map(Some)
        } else {
            let [query, key, value] = widths;
            let has_keys = shape.kv_layer(layer) == layer;
            let with_gate = if spec.has_attention_gate { 2 * query } else { query };
            let matrix_if = |has: bool, at: &str, rows| has.then(|| matrix(at, embedding, rows)).transpose();
            [
                Some(matrix("attn_q", embedding, with_gate)?),
                matrix_if(has_keys, "attn_k", key)?,
                matrix_if(has_keys && !attention.values_are_keys, "attn_v", value)?,
            ]
        };
        Ok([query, key, value, Some(matrix("attn_output", attention.output_width(), embedding)?)])
    }

    fn delta_net(
        &self,
        layer: u32,
        embedding: u64,
        net: &DeltaNetShape,
    ) -> Result<DeltaNetParameters<Tensor, Tensor>, ExecError> {
        let name = |name: &str| format!("blk.{layer}.{name}");
        let (heads, length) = (u64::from(net.value_heads), u64::from(net.convolution_length));
        Ok(DeltaNetParameters {
            gate: self.matrix(&name("attn_gate.weight"), embedding, net.value_width())?,
            beta: self.matrix(&name("ssm_beta.weight"), embedding, heads)?,
            alpha: self.matrix(&name("ssm_alpha.weight"), embedding, heads)?,
            dt_bias: self.vector(&name("ssm_dt.bias"), heads)?,
            decay: self.vector(&name("ssm_a"), heads)?,
            convolution: self.f32_tensor(&name("ssm_conv1d.weight"), &[length, net.channels()])?,
            norm: self.vector(&name("ssm_norm.weight"), u64::from(net.head_length))?,
        })
    }

    /// Returns the biases of the seven matrices of a layer, if any, each with one element for every row of its matrix.
    fn biases(
        &self,
        layer: u32,
        matrices: &[Option<Tensor>; 7],
        has_experts: bool,
    ) -> Result<[Option<Tensor>; 7], ExecError> {
        let names = ["attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"];
        let mut biases = [None; 7];
        for (index, name) in names.into_iter().enumerate() {
            // Those of a shared block have other names.
            let Some(matrix) = matrices[index].filter(|_| index < 4 || !has_experts) else { continue };
            let (name, length) = (format!("blk.{layer}.{name}.bias"), matrix.rows as u64);
            let spec = self.architecture.spec();
            let required = (spec.has_projection_biases && index < 3)
                || (spec.has_output_and_expert_biases && index == 3);
            // The forward pass adds biases of queries, keys and values only in plain attention.
            let is_plain = spec.has_plain_attention() || index > 3;
            let expected = required || (is_plain && self.find(&name).is_some());
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
        self.f32_tensor(name, &[length])
    }

    fn f32_tensor(&self, name: &str, dims: &[u64]) -> Result<Tensor, ExecError> {
        let tensor = self.checked(name, dims)?;
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
        // A converter may write a vector as a matrix of one row.
        let significant =
            |dims: &[u64]| dims.iter().rposition(|&length| length != 1).map_or(0, |last| last + 1);
        let has_dims = info.dims[..significant(&info.dims)] == dims[..significant(dims)];
        if !has_dims || bytes != Some(info.bytes.0) {
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
        Ok(Tensor {
            format: info.format,
            row_length: *length as usize,
            rows: rows as usize,
            layout: Layout::Rows,
            extent,
        })
    }

    /// Returns the divisors of the rotary frequencies in the file: one list (Llama 3.1), or lists for short and long
    /// contexts (Phi 3).
    pub(crate) fn rope_factors(&self, rotated_dimensions: u32) -> Result<RopeFactors, ExecError> {
        let read = |name| self.rope_factor_list(name, rotated_dimensions);
        Ok(match self.architecture.spec().rope_factors {
            Some(RopeFactorTensors::Single) => RopeFactors { short: read("rope_freqs.weight")?, long: None },
            Some(RopeFactorTensors::ShortAndLong) => RopeFactors {
                short: read("rope_factors_short.weight")?,
                long: read("rope_factors_long.weight")?,
            },
            None => RopeFactors::default(),
        })
    }

    fn rope_factor_list(&self, name: &str, rotated_dimensions: u32) -> Result<Option<Vec<f32>>, ExecError> {
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
    pub(crate) fn check_all_used(&self, model: &GgufModel, shape: &ModelShape) -> Result<(), ExecError> {
        let used = self.used.borrow();
        let is_unused = |name: &&&str| !used.contains(**name) && !model.is_unused_tensor(name, shape);
        let Some(name) = self.by_name.keys().find(is_unused) else { return Ok(()) };
        let problem = format!("is not part of the {} architecture", self.architecture);
        let hint = "models with adapters or other additions are not supported; use a model without them";
        Err(rejected(name, problem, hint))
    }
}

fn rejected(tensor: &str, problem: impl Into<String>, hint: &'static str) -> ExecError {
    ExecError::Tensor { tensor: tensor.into(), problem: problem.into(), hint }
}
