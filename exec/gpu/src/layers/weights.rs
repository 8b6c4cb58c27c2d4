//! The weights and caches of one layer in GPU memory, and the output matrix.

use hearth_profiles::model::ModelShape;
use hearth_runtime::hyperparameters::Hyperparameters;
use hearth_runtime::{CacheOptions, Weights};

use super::UploadOptions;
use crate::device::{Gpu, Launch, Params, Tensor};
use crate::error::GpuError;
use crate::graph::{self, Norm};
use crate::kernels::Variant;
use crate::kernels::matmul::{MatmulKernel, Phase};
use crate::kernels::norm::NormKernel;
use crate::kernels::rotate::AttentionShape;
use crate::matrix::GpuMatrix;
use crate::virtual_tensor::{Storage, WeightOrder};

#[derive(Debug)]
pub(super) struct GpuLayer {
    /// The matrices in the order of `crate::graph::LayerMatrix`.
    pub(super) matrices: Vec<GpuMatrix>,
    pub(super) biases: Vec<Option<Tensor>>,
    attention_norm: Tensor,
    feed_forward_norm: Tensor,
    query_norm: Option<Tensor>,
    key_norm: Option<Tensor>,
    post_attention_norm: Option<Tensor>,
    post_feed_forward_norm: Option<Tensor>,
    /// The key cache and the value cache of each sequence.
    pub(super) caches: Vec<[Tensor; 2]>,
}

/// Checks that the kernels support the dimensions of a model.
pub(super) fn check(shape: &ModelShape, parameters: &Hyperparameters) -> Result<(), GpuError> {
    let need = "a multiple of 4";
    for (what, found) in [
        ("the width of hidden rows", shape.embedding),
        ("the head dimension of keys", shape.key_length),
        ("the head dimension of values", shape.value_length),
        ("the width of the feed-forward block", shape.feed_forward),
    ] {
        if !found.is_multiple_of(4) || found == 0 {
            return Err(GpuError::Dimension { what, found: found as usize, need });
        }
    }
    if shape.kv_heads == 0 || !shape.heads.is_multiple_of(shape.kv_heads) {
        let found = shape.heads as usize;
        return Err(GpuError::Dimension {
            what: "the number of query heads",
            found,
            need: "a multiple of the number of key heads",
        });
    }
    if parameters.rope.frequencies.len() * 2 > shape.key_length as usize {
        let found = parameters.rope.frequencies.len();
        return Err(GpuError::Dimension {
            what: "the number of rotated pairs",
            found,
            need: "at most half the head dimension",
        });
    }
    Ok(())
}

/// Returns the attention dimensions of a model.
pub(super) fn attention_shape(shape: &ModelShape, options: CacheOptions) -> AttentionShape {
    AttentionShape {
        heads: shape.heads,
        kv_heads: shape.kv_heads,
        key_length: shape.key_length,
        value_length: shape.value_length,
        context: options.context,
        format: options.format,
        order: WeightOrder::Interleaved,
    }
}

/// Returns a norm of the hidden rows, without a residual addition.
pub(super) fn plain_norm(gpu: &Gpu, model: &Weights) -> NormKernel {
    NormKernel {
        width: model.shape().embedding,
        epsilon: model.hyperparameters().epsilon,
        adds_change: false,
        normalises_change: false,
        normalises_hidden: true,
        hidden: Storage::Linear,
        storage: Storage::Linear,
        variant: Variant::of(gpu.capabilities()),
    }
}

impl GpuLayer {
    pub(super) fn upload(
        gpu: &Gpu,
        model: &Weights,
        layer: u32,
        options: CacheOptions,
        upload: UploadOptions,
        report: &mut dyn FnMut(u64),
    ) -> Result<GpuLayer, GpuError> {
        let own = model.layer_weights(layer);
        let vector = |values: &[f32]| gpu.upload("a norm or a bias", values);
        let optional = |values: Option<&[f32]>| values.map(vector).transpose();
        let heads = attention_shape(model.shape(), options);
        let cache = |bytes| gpu.zeros("the key-value cache", bytes);
        let caches = (0..options.sequences.max(1)).map(|_| {
            let [keys, values] = heads.cache_bytes()?;
            Ok([cache(keys)?, cache(values)?])
        });
        Ok(GpuLayer {
            matrices: own
                .matrices
                .into_iter()
                .zip(graph::LayerMatrix::ALL)
                .map(|(matrix, role)| {
                    GpuMatrix::upload_converted(
                        gpu,
                        matrix,
                        upload.conversion.layer_format(role),
                        upload.tiling,
                        report,
                    )
                })
                .collect::<Result<_, _>>()?,
            biases: own.biases.into_iter().map(optional).collect::<Result<_, _>>()?,
            attention_norm: vector(own.attention_norm)?,
            feed_forward_norm: vector(own.feed_forward_norm)?,
            query_norm: optional(own.query_norm)?,
            key_norm: optional(own.key_norm)?,
            post_attention_norm: optional(own.post_attention_norm)?,
            post_feed_forward_norm: optional(own.post_feed_forward_norm)?,
            caches: caches.collect::<Result<_, GpuError>>()?,
        })
    }

    /// Returns the weights of a norm, if the layer has this norm.
    pub(super) fn norm(&self, norm: Norm) -> Option<&Tensor> {
        match norm {
            Norm::Attention => Some(&self.attention_norm),
            Norm::FeedForward => Some(&self.feed_forward_norm),
            Norm::QueryHeads => self.query_norm.as_ref(),
            Norm::KeyHeads => self.key_norm.as_ref(),
            Norm::PostAttention => self.post_attention_norm.as_ref(),
            Norm::PostFeedForward => self.post_feed_forward_norm.as_ref(),
            Norm::Output => None,
        }
    }

    pub(super) fn weight_bytes(&self) -> u64 {
        let norms = [&self.attention_norm, &self.feed_forward_norm].into_iter();
        let optional =
            [&self.query_norm, &self.key_norm, &self.post_attention_norm, &self.post_feed_forward_norm];
        let vectors = norms.chain(optional.into_iter().flatten()).chain(self.biases.iter().flatten());
        self.matrices.iter().map(GpuMatrix::bytes).sum::<u64>() + vectors.map(Tensor::bytes).sum::<u64>()
    }

    pub(super) fn cache_bytes(&self) -> u64 {
        self.caches.iter().flatten().map(Tensor::bytes).sum()
    }
}

/// The output matrix, which computes the logits, and the norm before it.
#[derive(Debug)]
pub(super) struct OutputMatrix {
    matrix: GpuMatrix,
    params: Tensor,
    /// [embedding]
    hidden: Tensor,
    /// [vocabulary]
    logits: Tensor,
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
        let width = matrix.length;
        let UploadOptions { tiling, conversion } = upload;
        let matrix = GpuMatrix::upload_converted(gpu, matrix, conversion.output_format(), tiling, report)?;
        let bias = bias.map(|bias| gpu.upload("a bias", bias)).transpose()?;
        let norm = gpu.upload("a norm", norm)?;
        let params = gpu.params()?;
        gpu.write(&params, &[Params::pass(1, 0)])?;
        let [hidden, x] =
            [gpu.zeros("a hidden row", width as u64 * 4)?, gpu.zeros("a row", width as u64 * 4)?];
        let logits = gpu.zeros("logits", u64::from(matrix.rows) * 4)?;
        let norm_text = plain_norm(gpu, model).kernel();
        let mut launches = vec![gpu.launch("norm", &norm_text, &[&params, &hidden, &norm, &x], [1, 1, 1])?];
        for part in &matrix.parts {
            let kernel = MatmulKernel {
                phase: Phase::Decode,
                rows: part.rows,
                first_row: part.first_row,
                variant: Variant::of(gpu.capabilities()),
                has_bias: bias.is_some(),
                ..matrix.matmul_kernel()
            };
            let mut tensors = vec![&params, &part.texels];
            tensors.extend(&part.scales);
            tensors.extend([&x, &logits]);
            tensors.extend(&bias);
            launches.push(gpu.launch("logits", &kernel.kernel()?, &tensors, kernel.workgroup_count(1))?);
        }
        Ok(OutputMatrix { matrix, params, hidden, logits, launches, width })
    }

    /// Computes the logits [rows, vocabulary] one row at a time, because few rows are requested.
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

    pub(super) fn bytes(&self) -> u64 {
        self.matrix.bytes() + self.params.bytes() + self.hidden.bytes() + self.logits.bytes()
    }
}
