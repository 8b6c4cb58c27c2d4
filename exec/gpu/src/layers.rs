//! Layers of a model on the GPU: runs a range of them as launches.
//!
//! The decoder's graph, fused ([`crate::graph`]), is walked once for each run of layers that is asked for and for each
//! stage; its nodes become launches on the layers' weights and caches. Intermediate tensors lie in shared objects
//! ([`crate::memory`]); the hidden rows stay in one buffer, to which blocks add.
//!
//! Not here: what happens when the device fails. That is [`crate::backend`].

mod assembly;
mod weights;

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use hearth_kernels::Matrix;
use hearth_profiles::model::ModelShape;
use hearth_runtime::{CacheOptions, Progress, Weights};

use crate::conversion::Conversion;
use crate::device::{Gpu, Launch, Params, Tensor};
use crate::error::GpuError;
use crate::graph::{Fusion, Numbers, decoder, fuse};
use crate::kernels::norm::NormKernel;
use crate::kernels::product::{Product, Stage, Tiling};
use crate::kernels::quantise::{self, Scaled};
use crate::kernels::{attention::AttentionKernel, rotate::RotateKernel};
use crate::memory::{Record, improved};
use weights::{GpuLayer, OutputMatrix};

/// Tokens that pass through the layers together; more take more memory and gain little.
/// source: assumed
const PART_TOKENS: u32 = 128;

/// Options of an upload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Upload {
    /// How threads share a product's work, and the layout that this asks for.
    pub tiling: Tiling,
    pub conversion: Conversion,
}

impl From<Tiling> for Upload {
    fn from(tiling: Tiling) -> Upload {
        Upload { tiling, conversion: Conversion::None }
    }
}

/// Layers in GPU memory.
#[derive(Debug)]
pub struct GpuLayers {
    gpu: Arc<Gpu>,
    model: Arc<Weights>,
    options: CacheOptions,
    tiling: Tiling,
    layers: BTreeMap<u32, GpuLayer>,
    output: Option<OutputMatrix>,
    buffers: Buffers,
    /// The assembled runs by first layer and end.
    runs: BTreeMap<(u32, u32), Runs>,
}

#[derive(Debug)]
struct Buffers {
    params: Tensor,
    /// [part, embedding]
    hidden: Tensor,
    /// [part, pairs], cosine and sine.
    angles: Tensor,
    /// Rounded inputs: codes, scales, sums.
    rounded: [Tensor; 3],
    /// Allocates objects of at least these sizes, the largest first.
    objects: Vec<Tensor>,
}

/// A run of layers in both stages.
#[derive(Debug)]
struct Runs {
    decode: Vec<Step>,
    /// Tilings by the largest number of tokens of a batch that they serve; the last serves all.
    prefill: Vec<(u32, Vec<Step>)>,
}

impl Runs {
    fn steps(&self, tokens: u32) -> &[Step] {
        if tokens == 1 {
            return &self.decode;
        }
        let fitting = self.prefill.iter().find(|(max, _)| tokens <= *max);
        fitting.or(self.prefill.last()).map_or(&self.decode, |(_, steps)| steps)
    }
}

/// A launch, of one or of each sequence.
#[derive(Debug)]
struct Step {
    grid: Grid,
    launches: Vec<Launch>,
}

/// How many groups a launch has.
#[derive(Debug, Clone, Copy)]
enum Grid {
    Norm,
    Quantise { length: u32, scaled: Scaled },
    Product(Product),
    Rotate(RotateKernel),
    Attention(AttentionKernel),
}

impl Grid {
    fn groups(&self, tokens: u32) -> [u32; 3] {
        match self {
            Grid::Norm => [tokens, 1, 1],
            Grid::Quantise { length, scaled } => quantise::groups(*length, *scaled, tokens),
            Grid::Product(product) => product.groups(tokens),
            Grid::Rotate(kernel) => kernel.groups(tokens),
            Grid::Attention(kernel) => kernel.groups(tokens),
        }
    }
}

/// Bytes of the intermediate tensors that a run of one layer needs beside weights and cache.
pub fn buffer_bytes(shape: &ModelShape) -> u64 {
    let tokens = u64::from(PART_TOKENS);
    let numbers = Numbers { layers: 1, tokens, context: 0, element_bytes: size_of::<f32>() as u64 };
    let graph = fuse(decoder(shape, numbers), Fusion::ALL);
    let records: Vec<Record> = graph.records().into_iter().map(|(_, record)| record).collect();
    let mixed = u64::from(shape.heads) * u64::from(shape.value_length);
    let max_length = u64::from(shape.embedding.max(shape.feed_forward)).max(mixed);
    // Codes, scales and sums of rounded inputs.
    improved(&records).total() + tokens * (max_length + max_length / 8 + max_length / 4)
}

impl GpuLayers {
    /// Uploads these layers, and the output matrix if `output`, and allocates their caches; reports to `progress`.
    pub fn new(
        gpu: Arc<Gpu>,
        model: Arc<Weights>,
        layers: impl IntoIterator<Item = u32>,
        output: bool,
        options: CacheOptions,
        upload: Upload,
        progress: &Progress,
    ) -> Result<GpuLayers, GpuError> {
        weights::check(model.shape(), model.hyperparameters())?;
        let layers: Vec<u32> = layers.into_iter().collect();
        let stored = |matrix: Matrix<'_>| matrix.rows as u64 * matrix.row_bytes() as u64;
        let of_layer =
            |&layer: &u32| model.layer_weights(layer).matrices.into_iter().map(stored).sum::<u64>();
        let of_output = if output { stored(model.output_weights().1) } else { 0 };
        let total = layers.iter().map(of_layer).sum::<u64>() + of_output;
        let mut done = 0;
        let mut report = |bytes: u64| {
            done += bytes;
            progress.report(done, total);
        };
        let mut all = BTreeMap::new();
        for layer in layers {
            all.insert(layer, GpuLayer::upload(&gpu, &model, layer, options, upload, &mut report)?);
        }
        let output = output.then(|| OutputMatrix::upload(&gpu, &model, upload, &mut report)).transpose()?;
        let layers = all;
        let buffers = Buffers::new(&gpu, &model)?;
        let tiling = upload.tiling;
        Ok(GpuLayers { gpu, model, options, tiling, layers, output, buffers, runs: BTreeMap::new() })
    }

    /// Compiles the launches of these layers, unless that is done.
    pub fn prepare(&mut self, layers: Range<u32>) -> Result<(), GpuError> {
        let key = (layers.start, layers.end);
        if !self.runs.contains_key(&key) {
            let runs = self.assemble(layers)?;
            self.runs.insert(key, runs);
        }
        Ok(())
    }

    /// Runs `layers` over `hidden` [tokens, embedding] of a sequence, at positions `first`, `first + 1`, ..
    pub fn forward(
        &mut self,
        sequence: u32,
        layers: Range<u32>,
        hidden: &mut [f32],
        first: u32,
    ) -> Result<(), GpuError> {
        let key = (layers.start, layers.end);
        self.prepare(layers)?;
        let runs = &self.runs[&key];
        let embedding = self.model.shape().embedding as usize;
        let rope = &self.model.hyperparameters().rope;
        let mut angles = vec![[0.0f32; 2]; PART_TOKENS as usize * rope.frequencies.len()];
        let mut position = first;
        for part in hidden.chunks_mut(PART_TOKENS as usize * embedding) {
            let tokens = (part.len() / embedding) as u32;
            let angles = &mut angles[..tokens as usize * rope.frequencies.len()];
            for (position, angles) in (position..).zip(angles.chunks_exact_mut(rope.frequencies.len())) {
                rope.turns(position, angles);
            }
            self.gpu.write(&self.buffers.params, &[Params::pass(tokens, position)])?;
            self.gpu.write(&self.buffers.angles, angles)?;
            self.gpu.write(&self.buffers.hidden, part)?;
            let launches: Vec<Launch> = runs
                .steps(tokens)
                .iter()
                .map(|step| {
                    let own = (sequence as usize).min(step.launches.len() - 1);
                    step.launches[own].with_groups(step.grid.groups(tokens))
                })
                .collect();
            self.gpu.submit(&launches)?;
            self.gpu.read_into(&self.buffers.hidden, part)?;
            position += tokens;
        }
        Ok(())
    }

    /// Returns the logits of rows after all layers, if the output matrix is here.
    pub fn logits(&mut self, hidden: &[f32]) -> Option<Result<Vec<f32>, GpuError>> {
        let output = self.output.as_ref()?;
        let numbers = self.model.hyperparameters();
        Some(output.logits(&self.gpu, hidden).map(|mut logits| {
            if let Some(cap) = numbers.logit_cap {
                for logit in &mut logits {
                    *logit = cap * (*logit / cap).tanh();
                }
            }
            logits
        }))
    }

    /// Returns the bytes of weights, and of caches.
    pub fn bytes(&self) -> [u64; 2] {
        let of = |bytes: fn(&GpuLayer) -> u64| self.layers.values().map(bytes).sum::<u64>();
        let output = self.output.as_ref().map_or(0, OutputMatrix::bytes);
        [of(GpuLayer::weight_bytes) + output, of(GpuLayer::cache_bytes)]
    }

    /// Returns the number of kernel launches of one token, and of a batch, through these layers.
    pub fn launches(&mut self, layers: Range<u32>) -> Result<[usize; 2], GpuError> {
        let runs = self.assemble(layers)?;
        Ok([runs.decode.len(), runs.steps(PART_TOKENS).len()])
    }

    pub fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// Returns a norm of this width without options.
    fn plain_norm(&self) -> NormKernel {
        weights::plain_norm(&self.gpu, &self.model)
    }

    fn assemble(&mut self, layers: Range<u32>) -> Result<Runs, GpuError> {
        let decode = self.steps(layers.clone(), Stage::Decode, self.tiling)?;
        let mut prefill = Vec::new();
        for tiling in self.tiling.of_batches() {
            prefill.push((tiling.tile(), self.steps(layers.clone(), Stage::Prefill, tiling)?));
        }
        Ok(Runs { decode, prefill })
    }
}

impl Buffers {
    fn new(gpu: &Gpu, model: &Weights) -> Result<Buffers, GpuError> {
        let shape = model.shape();
        let part = u64::from(PART_TOKENS);
        let pairs = model.hyperparameters().rope.frequencies.len() as u64;
        let mixed = u64::from(shape.heads) * u64::from(shape.value_length);
        let max_length = u64::from(shape.embedding.max(shape.feed_forward)).max(mixed);
        Ok(Buffers {
            params: gpu.params()?,
            hidden: gpu.zeros("hidden rows", part * u64::from(shape.embedding) * 4)?,
            angles: gpu.zeros("angles", part * pairs * 8)?,
            rounded: [
                gpu.zeros("rounded inputs", part * max_length)?,
                gpu.zeros("scales of inputs", part * max_length / 32 * 4)?,
                gpu.zeros("sums of inputs", part * max_length / 16 * 4)?,
            ],
            objects: Vec::new(),
        })
    }

    /// Objects of at least these sizes, the largest first.
    fn objects(&mut self, gpu: &Gpu, sizes: &[u64]) -> Result<(), GpuError> {
        for (at, &size) in sizes.iter().enumerate() {
            match self.objects.get(at) {
                Some(object) if object.bytes() >= size => {}
                Some(_) => self.objects[at] = gpu.zeros("intermediate tensors", size)?,
                None => self.objects.push(gpu.zeros("intermediate tensors", size)?),
            }
        }
        Ok(())
    }
}
