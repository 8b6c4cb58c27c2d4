//! Layers of a model in GPU memory: upload, and forward passes over ranges of layers.
//!
//! The fused graph of the decoder ([`crate::graph`]) is assembled once for each requested range of layers and for
//! each phase; its nodes become kernel launches on the weights and caches of the layers. Intermediate tensors share
//! buffers ([`crate::memory`]); the hidden states stay in one buffer, to which each block adds its output.
//!
//! Not here: the fallback to the CPU when the device fails. That is [`crate::backend`].

mod assembly;
mod weights;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;

use hearth_kernels::Matrix;
use hearth_profiles::model::ModelShape;
use hearth_runtime::{BackendOptions, KvCacheOptions, Weights};

use crate::conversion::WeightConversion;
use crate::device::{Gpu, GpuBuffer, KernelParams, Launch};
use crate::error::GpuError;
use crate::graph::{FusionOptions, PassSize, decoder_graph, fuse};
use crate::kernels::matmul::{MatmulKernel, Phase, Tiling};
use crate::kernels::quantise::{self, Granularity};
use crate::kernels::{attention::AttentionKernel, rope::RopeKernel};
use crate::memory::greedy_by_size_improved;
use weights::{GpuLayer, OutputMatrix};

/// Maximum number of tokens in one batch. Longer prompts are split, because larger batches need more memory and are
/// hardly faster. source: assumed
const BATCH_TOKENS: u32 = 128;

/// The tiling and the conversion with which the weights of a model are uploaded to the GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UploadOptions {
    /// The weight layout, and the distribution of a matmul over threads.
    pub tiling: Tiling,
    pub conversion: WeightConversion,
}

impl From<Tiling> for UploadOptions {
    fn from(tiling: Tiling) -> UploadOptions {
        UploadOptions { tiling, conversion: WeightConversion::None }
    }
}

/// Layers of a model in GPU memory, with their KV caches.
#[derive(Debug)]
pub struct GpuLayers {
    gpu: Arc<Gpu>,
    model: Arc<Weights>,
    options: KvCacheOptions,
    tiling: Tiling,
    layers: BTreeMap<u32, GpuLayer>,
    output: Option<OutputMatrix>,
    buffers: Buffers,
    /// The steps of each range of layers whose kernels are compiled. The key is the start and the end of the range.
    ranges: BTreeMap<(u32, u32), StepsByBatchSize>,
}

/// The steps of a range of layers, for each batch size: an entry has the maximum number of tokens in a batch and the
/// steps for such batches. The entries are in ascending order; larger batches use the last entry.
type StepsByBatchSize = Vec<(u32, Vec<Step>)>;

#[derive(Debug)]
struct Buffers {
    params: GpuBuffer,
    /// The hidden states, [batch, embedding].
    hidden: GpuBuffer,
    /// The cosines and sines of each rotary embedding, [batch, pairs].
    angles: Vec<GpuBuffer>,
    /// The quantised inputs of a matmul: quants, scales and sums of quants.
    quantised: [GpuBuffer; 3],
    /// The buffers that intermediate tensors share, in descending order of size.
    objects: Vec<GpuBuffer>,
}

/// One kernel of a pass. If the kernel uses the cache, it has one launch for each sequence, otherwise a single launch.
#[derive(Debug)]
struct Step {
    grid: Grid,
    launches: Vec<Launch>,
}

/// The kernel of a step, which determines the number of workgroups of a launch.
#[derive(Debug, Clone, Copy)]
enum Grid {
    Norm,
    Quantise { length: u32, granularity: Granularity },
    Matmul(MatmulKernel),
    Rope(RopeKernel),
    Attention(AttentionKernel),
}

impl Grid {
    fn workgroup_count(&self, tokens: u32) -> [u32; 3] {
        match *self {
            Grid::Norm => [tokens, 1, 1],
            Grid::Quantise { length, granularity } => quantise::workgroup_count(length, granularity, tokens),
            Grid::Matmul(kernel) => kernel.workgroup_count(tokens),
            Grid::Rope(kernel) => kernel.workgroup_count(tokens),
            Grid::Attention(kernel) => kernel.workgroup_count(tokens),
        }
    }
}

/// Returns the size in bytes of all intermediate tensors, which need GPU memory in addition to weights and cache.
pub fn compute_buffer_bytes(shape: &ModelShape) -> u64 {
    let tokens = u64::from(BATCH_TOKENS);
    let size = PassSize { layers: 1, tokens, context_length: 0, element_bytes: size_of::<f32>() as u64 };
    let (_, records) = fuse(decoder_graph(shape, size), FusionOptions::ALL).usage_records();
    let length = max_input_length(shape);
    // Quants, scales and sums of quantised inputs.
    greedy_by_size_improved(&records).total_size() + tokens * (length + length / 8 + length / 4)
}

/// Returns the maximum length of an input row of a matmul in a layer.
fn max_input_length(shape: &ModelShape) -> u64 {
    u64::from(shape.embedding_length.max(shape.feed_forward_length)).max(shape.attention().output_width())
}

impl GpuLayers {
    /// Uploads the layers that `backend` assigns to the GPU, and allocates their KV caches.
    pub fn new(gpu: Arc<Gpu>, backend: &BackendOptions, upload: UploadOptions) -> Result<Self, GpuError> {
        let (model, options, output) =
            (backend.weights.clone(), backend.kv_cache_options, backend.output_on_gpu);
        let architecture = model.shape().architecture;
        if !architecture.spec().has_gpu_kernels || model.shape().experts.is_some() {
            return Err(GpuError::UnsupportedArchitecture { architecture });
        }
        weights::check_dimensions(model.shape(), model.hyperparameters())?;
        if !options.format.is_supported_on_gpus() {
            return Err(GpuError::UnsupportedKvFormat { format: options.format.format() });
        }
        let layers: BTreeSet<u32> = backend.gpu_layers.iter().cloned().flatten().collect();
        let stored = |matrix: Matrix<'_>| matrix.rows as u64 * matrix.row_bytes() as u64;
        let in_layers = layers.iter().flat_map(|&layer| model.layer_weights(layer).matrices).flatten();
        let total = in_layers.chain(output.then(|| model.output_weights().1)).map(stored).sum();
        let mut done = 0;
        let mut report = |bytes: u64| {
            done += bytes;
            backend.progress.report(done, total);
        };
        let layers = layers
            .into_iter()
            .map(|layer| Ok((layer, GpuLayer::upload(&gpu, &model, layer, options, upload, &mut report)?)));
        let layers = layers.collect::<Result<_, GpuError>>()?;
        let output = output.then(|| OutputMatrix::upload(&gpu, &model, upload, &mut report)).transpose()?;
        let buffers = Buffers::new(&gpu, &model)?;
        let tiling = upload.tiling;
        Ok(GpuLayers { gpu, model, options, tiling, layers, output, buffers, ranges: BTreeMap::new() })
    }

    /// Compiles the kernels for a forward pass over a range of layers, unless they are already compiled.
    pub fn compile_kernels(&mut self, layers: Range<u32>) -> Result<(), GpuError> {
        let key = (layers.start, layers.end);
        if !self.ranges.contains_key(&key) {
            let mut launches = vec![(1, self.steps(&layers, Phase::Decode, self.tiling)?)];
            for tiling in self.tiling.batch_size_variants() {
                launches.push((tiling.tokens_per_tile(), self.steps(&layers, Phase::Prefill, tiling)?));
            }
            self.ranges.insert(key, launches);
        }
        Ok(())
    }

    /// Runs a range of layers on the hidden states `hidden` [tokens, embedding] of a sequence, in place. The first row
    /// has the position `first`, and the following rows have the following positions.
    pub fn forward(
        &mut self,
        sequence: u32,
        layers: Range<u32>,
        hidden: &mut [f32],
        first: u32,
    ) -> Result<(), GpuError> {
        let key = (layers.start, layers.end);
        self.compile_kernels(layers)?;
        let steps = &self.ranges[&key];
        let embedding = self.model.shape().embedding_length as usize;
        let ropes = &self.model.hyperparameters().ropes;
        let mut angles = vec![[0.0f32; 2]; BATCH_TOKENS as usize * ropes[0].frequencies.len()];
        let mut position = first;
        for batch in hidden.chunks_mut(BATCH_TOKENS as usize * embedding) {
            let tokens = (batch.len() / embedding) as u32;
            for (rope, buffer) in ropes.iter().zip(&self.buffers.angles) {
                let angles = &mut angles[..tokens as usize * rope.frequencies.len()];
                for (position, angles) in (position..).zip(angles.chunks_exact_mut(rope.frequencies.len())) {
                    rope.write_cosines_and_sines(position, angles);
                }
                self.gpu.write(buffer, angles)?;
            }
            self.gpu.write(&self.buffers.params, &[KernelParams::for_pass(tokens, position)])?;
            self.gpu.write(&self.buffers.hidden, batch)?;
            let fitting = steps.iter().find(|(max, _)| tokens <= *max).or(steps.last());
            let launches: Vec<Launch> = fitting
                .iter()
                .flat_map(|(_, steps)| steps)
                .map(|step| {
                    let own = (sequence as usize).min(step.launches.len() - 1);
                    step.launches[own].with_workgroups(step.grid.workgroup_count(tokens))
                })
                .collect();
            self.gpu.submit(&launches)?;
            self.gpu.read_into(&self.buffers.hidden, batch)?;
            position += tokens;
        }
        Ok(())
    }

    /// Returns the logits [rows, vocabulary] of hidden states; `None` if the output matrix is not on the GPU.
    pub fn logits(&mut self, hidden: &[f32]) -> Option<Result<Vec<f32>, GpuError>> {
        let mut logits = self.output.as_ref()?.logits(&self.gpu, hidden);
        let parameters = self.model.hyperparameters();
        if let (Ok(logits), Some(factor)) = (&mut logits, parameters.logit_scale) {
            for logit in logits {
                *logit *= factor;
            }
        }
        if let (Ok(logits), Some(cap)) = (&mut logits, parameters.logit_softcap) {
            for logit in logits {
                *logit = cap * (*logit / cap).tanh();
            }
        }
        Some(logits)
    }

    /// Returns the size in bytes of the weights in GPU memory, and that of the KV caches.
    pub fn weight_and_cache_bytes(&self) -> [u64; 2] {
        let of = |bytes: fn(&GpuLayer) -> u64| self.layers.values().map(bytes).sum::<u64>();
        let output = self.output.as_ref().map_or(0, OutputMatrix::memory_bytes);
        [of(GpuLayer::weight_bytes) + output, of(GpuLayer::kv_cache_bytes)]
    }
}

impl Buffers {
    fn new(gpu: &Gpu, model: &Weights) -> Result<Buffers, GpuError> {
        let shape = model.shape();
        let batch = u64::from(BATCH_TOKENS);
        let ropes = model.hyperparameters().ropes.iter();
        let angles = ropes.map(|rope| gpu.allocate("angles", batch * rope.frequencies.len() as u64 * 8));
        let max_length = max_input_length(shape);
        Ok(Buffers {
            params: gpu.create_params_buffer()?,
            hidden: gpu.allocate("hidden states", batch * u64::from(shape.embedding_length) * 4)?,
            angles: angles.collect::<Result<_, _>>()?,
            quantised: [
                gpu.allocate("quantised inputs", batch * max_length)?,
                gpu.allocate("scales of inputs", batch * max_length / 32 * 4)?,
                gpu.allocate("sums of inputs", batch * max_length / 16 * 4)?,
            ],
            objects: Vec::new(),
        })
    }

    /// Enlarges the shared buffers so that buffer i has at least `sizes[i]` bytes. `sizes` is in descending order.
    fn reserve_objects(&mut self, gpu: &Gpu, sizes: &[u64]) -> Result<(), GpuError> {
        for (at, &size) in sizes.iter().enumerate() {
            match self.objects.get(at) {
                Some(object) if object.size_bytes() >= size => {}
                Some(_) => self.objects[at] = gpu.allocate("intermediate tensors", size)?,
                None => self.objects.push(gpu.allocate("intermediate tensors", size)?),
            }
        }
        Ok(())
    }
}
