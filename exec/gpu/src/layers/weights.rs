//! Weights and KV caches of one layer in GPU memory, and the output matrix.

use std::collections::BTreeMap;

use hearth_profiles::model::ModelShape;
use hearth_profiles::model::architecture::QueryKeyNorm;
use hearth_runtime::hyperparameters::Hyperparameters;
use hearth_runtime::{KvCacheOptions, Weights};

use super::UploadOptions;
use crate::device::{Gpu, GpuBuffer, KernelParams, Launch};
use crate::error::GpuError;
use crate::graph::{LayerMatrix, Norm};
use crate::kernels::matmul::MatmulKernel;
use crate::kernels::norm::NormKernel;
use crate::kernels::rope::AttentionShape;
use crate::matrix::GpuMatrix;
use crate::virtual_tensor::WeightOrder;

#[derive(Debug)]
pub(super) struct GpuLayer {
    /// The weight matrices, in the order of [`LayerMatrix::ALL`].
    pub(super) matrices: Vec<GpuMatrix>,
    pub(super) biases: Vec<Option<GpuBuffer>>,
    /// The weights of each norm that the layer has.
    pub(super) norms: BTreeMap<Norm, GpuBuffer>,
    /// The key cache and the value cache of each sequence, by the index of the sequence.
    pub(super) caches: Vec<[GpuBuffer; 2]>,
}

/// Returns an error if the kernels do not support the dimensions of a model.
pub(super) fn check_dimensions(shape: &ModelShape, parameters: &Hyperparameters) -> Result<(), GpuError> {
    let whole_slices = |length: u32| length.is_multiple_of(4) && length > 0;
    let (slices, groups) = ("a multiple of 4", "a multiple of the number of key heads");
    let half = "at most half the head dimension";
    let heads_fit = shape.kv_heads > 0 && shape.heads.is_multiple_of(shape.kv_heads);
    let (pairs, inner) = (parameters.ropes[0].frequencies.len() as u32, shape.feed_forward_length);
    for (what, found, is_supported, need) in [
        ("the width of hidden states", shape.embedding_length, whole_slices(shape.embedding_length), slices),
        ("the head dimension of keys", shape.key_length, whole_slices(shape.key_length), slices),
        ("the head dimension of values", shape.value_length, whole_slices(shape.value_length), slices),
        ("the width of the feed-forward block", inner, whole_slices(inner), slices),
        ("the number of query heads", shape.heads, heads_fit, groups),
        ("the number of rotated pairs", pairs, 2 * pairs <= shape.key_length, half),
    ] {
        if !is_supported {
            return Err(GpuError::UnsupportedDimension { what, found: found as usize, need });
        }
    }
    Ok(())
}

/// Returns the dimensions of attention in a model, and the format and layout of its KV cache.
pub(super) fn attention_shape(shape: &ModelShape, options: KvCacheOptions) -> AttentionShape {
    AttentionShape {
        heads: shape.heads,
        kv_heads: shape.kv_heads,
        key_length: shape.key_length,
        value_length: shape.value_length,
        context_length: options.context,
        format: options.format,
        cache_order: WeightOrder::Interleaved,
    }
}

/// Returns the kernel of a norm of the hidden states, without a residual addition.
pub(super) fn plain_norm_kernel(gpu: &Gpu, model: &Weights) -> NormKernel {
    NormKernel {
        width: model.shape().embedding_length,
        epsilon: model.hyperparameters().rms_norm_epsilon,
        adds_residual: false,
        residual_scale: model.hyperparameters().residual_scale,
        has_post_norm: false,
        normalises_hidden: true,
        capabilities: gpu.capabilities(),
    }
}

impl GpuLayer {
    pub(super) fn upload(
        gpu: &Gpu,
        model: &Weights,
        layer: u32,
        options: KvCacheOptions,
        upload: UploadOptions,
        report: &mut dyn FnMut(u64),
    ) -> Result<GpuLayer, GpuError> {
        let own = model.layer_weights(layer);
        let vector = |values: &[f32]| gpu.upload("a norm or a bias", values);
        let heads = attention_shape(model.shape(), options);
        let cache = |bytes| gpu.allocate("the KV cache", bytes);
        let caches = (0..options.sequences.max(1)).map(|_| {
            let [keys, values] = heads.kv_cache_bytes()?;
            Ok([cache(keys)?, cache(values)?])
        });
        let matrices =
            own.matrices.into_iter().zip(LayerMatrix::ALL).filter_map(|(matrix, role)| Some((matrix?, role)));
        let matrices = matrices.map(|(matrix, role)| {
            let format = upload.conversion.layer_format(role);
            GpuMatrix::upload_converted(gpu, matrix, format, upload.tiling, report)
        });
        // Without these norms, no weights are uploaded for them.
        let query_key_norm = model.shape().architecture.spec().query_key_norm.unwrap_or(QueryKeyNorm::Heads);
        let [query_norm, key_norm] = Norm::of_queries_and_keys(query_key_norm);
        let norms = [
            (Norm::Attention, own.attention_norm),
            (Norm::FeedForward, own.feed_forward_norm),
            (query_norm, own.query_norm),
            (key_norm, own.key_norm),
            (Norm::PostAttention, own.post_attention_norm),
            (Norm::PostFeedForward, own.post_feed_forward_norm),
        ];
        let norms = norms.into_iter().filter_map(|(norm, weights)| Some((norm, weights?)));
        let norms = norms.map(|(norm, weights)| Ok((norm, vector(weights)?)));
        let biases = own.biases.into_iter().map(|bias| bias.map(vector).transpose());
        Ok(GpuLayer {
            matrices: matrices.collect::<Result<_, _>>()?,
            biases: biases.collect::<Result<_, _>>()?,
            norms: norms.collect::<Result<_, GpuError>>()?,
            caches: caches.collect::<Result<_, GpuError>>()?,
        })
    }

    pub(super) fn weight_bytes(&self) -> u64 {
        let vectors = self.norms.values().chain(self.biases.iter().flatten());
        self.matrices.iter().map(GpuMatrix::memory_bytes).sum::<u64>()
            + vectors.map(GpuBuffer::size_bytes).sum::<u64>()
    }

    pub(super) fn kv_cache_bytes(&self) -> u64 {
        self.caches.iter().flatten().map(GpuBuffer::size_bytes).sum()
    }
}

/// The output matrix, which computes the logits, and the norm of its input.
#[derive(Debug)]
pub(super) struct OutputMatrix {
    matrix: GpuMatrix,
    params: GpuBuffer,
    /// The hidden state of one position, [embedding].
    hidden: GpuBuffer,
    /// The logits of one position, [vocabulary].
    logits: GpuBuffer,
    launches: Vec<Launch>,
    width: usize,
}

impl OutputMatrix {
    pub(super) fn upload(
        gpu: &Gpu,
        model: &Weights,
        upload: UploadOptions,
        report: &mut dyn FnMut(u64),
    ) -> Result<OutputMatrix, GpuError> {
        let (norm, matrix, bias) = model.output_weights();
        let width = matrix.row_length;
        let UploadOptions { tiling, conversion } = upload;
        let matrix = GpuMatrix::upload_converted(gpu, matrix, conversion.output_format(), tiling, report)?;
        let bias = bias.map(|bias| gpu.upload("a bias", bias)).transpose()?;
        let norm = gpu.upload("a norm", norm)?;
        let params = gpu.create_params_buffer()?;
        gpu.write(&params, &[KernelParams::for_pass(1, 0)])?;
        let row = || gpu.allocate("a hidden state", width as u64 * 4);
        let (hidden, x) = (row()?, row()?);
        let logits = gpu.allocate("logits", u64::from(matrix.rows) * 4)?;
        let norm_text = plain_norm_kernel(gpu, model).wgsl_source();
        let bound = [&params, &hidden, &norm, &x];
        let mut launches = vec![gpu.prepare_launch("norm", &norm_text, &bound, [1, 1, 1])?];
        let kernel = MatmulKernel { has_bias: bias.is_some(), ..matrix.matmul_kernel(gpu, 0, matrix.rows) };
        let others: Vec<&GpuBuffer> = [&x, &logits].into_iter().chain(&bias).collect();
        let matmuls = matrix.part_launches(gpu, "logits", kernel, &params, &others, 1)?;
        launches.extend(matmuls.into_iter().map(|(_, launch)| launch));
        Ok(OutputMatrix { matrix, params, hidden, logits, launches, width })
    }

    /// Computes the logits [rows, vocabulary] of hidden states, one row at a time: a pass requests only a few.
    pub(super) fn logits(&self, gpu: &Gpu, hidden: &[f32]) -> Result<Vec<f32>, GpuError> {
        let rows = self.matrix.rows as usize;
        let mut all = vec![0.0; hidden.len() / self.width * rows];
        for (row, logits) in hidden.chunks_exact(self.width).zip(all.chunks_exact_mut(rows)) {
            gpu.write(&self.hidden, row)?;
            gpu.submit(&self.launches)?;
            gpu.read_into(&self.logits, logits)?;
        }
        Ok(all)
    }

    pub(super) fn memory_bytes(&self) -> u64 {
        self.matrix.memory_bytes()
            + self.params.size_bytes()
            + self.hidden.size_bytes()
            + self.logits.size_bytes()
    }
}
