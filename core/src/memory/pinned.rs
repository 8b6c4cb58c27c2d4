//! Pinned memory: the memory of a device that copies its weights into anonymous memory, which is never evicted.
//!
//! Systems that do not map the model's file do so (prima.cpp paper, appendix A.8):
//!
//! - on the CPU in the format that they compute in;
//! - on the GPU likewise; where weights are converted there, a copy in the CPU's format stays in main memory;
//! - the head has the embedding and the output matrix, and may have loaded the whole model to cut it into slices;
//! - a sliding window holds the largest run of its number of blocks. The head's output matrix passes through it in blocks
//!   no larger than a layer's largest, and a row of the embedding is read when it is needed.
//!
//! Anonymous memory beyond what a device can have is swapped, if it has swap space that nothing else is moved to;
//! otherwise the device is out of memory. GPU layers that are converted and do not all fit are converted again for
//! every token, from the copy in main memory; without a copy the device is out of memory.

use hearth_profiles::model::{ModelProfile, TensorGroup};
use hearth_profiles::{Bytes, Device};
use hearth_schema::plan::tensor::{HeadLoads, TensorPlan};
use hearth_schema::plan::{Plan, Processor};
use hearth_schema::residency::Residency;
use hearth_schema::trace::{MemoryKind, Shortage};

use super::{kv_cache_bytes, shortage};
use crate::conversion::{converted, model_as};
use crate::tensor::SlicedModel;

/// What one device of a plan holds and the kernel cannot reclaim.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PinnedMemory {
    /// Weights in main memory, a GPU's copies included.
    pub weights: Bytes,
    /// The part of them that the CPU reads for each token.
    pub read: Bytes,
    /// The whole model, while its slices are cut.
    pub loading: Bytes,
    /// Keys and values in main memory at full context.
    pub kv_cache: Bytes,
    /// Compute buffers in main memory.
    pub buffers: Bytes,
    /// GPU memory in use, without weights that are converted again for every token.
    pub gpu: Bytes,
    /// The part of the copy in main memory that goes to the GPU again for every token, layer by layer of the model.
    pub uploads: Vec<Bytes>,
    /// Main memory that a run can have.
    pub available: Bytes,
    /// Memory of the GPU's own that a run can have.
    pub gpu_available: Bytes,
    /// Swap space that nothing else is moved to.
    pub swap: Bytes,
}

impl PinnedMemory {
    /// The memory of the device at a place of a plan, if it copies its weights. With `ignore_limits` everything fits.
    pub fn new(
        plan: &Plan,
        place: usize,
        model: &ModelProfile,
        device: &Device,
        ignore_limits: bool,
    ) -> Option<Self> {
        if !plan.devices[place].residency.is_pinned() {
            return None;
        }
        let mut account = Account::new(plan, place, model, device);
        if ignore_limits {
            account.gpu_left = Bytes(u64::MAX);
        }
        match plan.kind.tensor() {
            Some(tensor) => account.slices(plan, tensor, place),
            None => account.layers(plan, place),
        }
        Some(account.held)
    }

    /// Main memory that the kernel cannot reclaim.
    pub fn main(&self) -> Bytes {
        self.weights + self.loading + self.kv_cache + self.buffers
    }

    /// Main memory needed beyond what is available, which is swapped or missing.
    pub fn excess(&self) -> Bytes {
        self.main().saturating_sub(self.available)
    }

    /// Whether main memory, with swap, and the GPU's own hold it.
    pub fn fits(&self) -> bool {
        self.excess() <= self.swap && self.gpu <= self.gpu_available
    }

    /// The memories of the device at a place of its plan that are too small.
    pub fn shortages(&self, place: usize) -> Vec<Shortage> {
        let main = shortage(place, MemoryKind::Main, self.main(), self.available + self.swap);
        let gpu = shortage(place, MemoryKind::Gpu, self.gpu, self.gpu_available);
        [main, gpu].into_iter().filter(|shortage| shortage.needed > shortage.available).collect()
    }
}

/// A device's memory while it is counted.
struct Account<'a> {
    held: PinnedMemory,
    model: &'a ModelProfile,
    device: &'a Device,
    /// Free GPU memory.
    gpu_left: Bytes,
}

impl<'a> Account<'a> {
    fn new(plan: &Plan, place: usize, model: &'a ModelProfile, device: &'a Device) -> Self {
        let (memory, on_gpu) = (&device.memory, plan.devices[place].gpu_layers > 0);
        let gpu = device.gpu.as_ref().filter(|_| on_gpu);
        let own_gpu = gpu.filter(|gpu| !gpu.unified_memory);
        let given_up = memory.can_swap.as_ref().map_or(Bytes::ZERO, |bytes| bytes.value);
        let swap = memory.swap_available.as_ref().map_or(Bytes::ZERO, |bytes| bytes.value);
        let shared = gpu.filter(|gpu| gpu.unified_memory).map_or(Bytes::ZERO, |gpu| gpu.compute_buffer.value);
        let gpu_buffer = own_gpu.map_or(Bytes::ZERO, |gpu| gpu.compute_buffer.value);
        let gpu_available = own_gpu.map_or(Bytes::ZERO, |gpu| gpu.memory_available.value);
        let held = PinnedMemory {
            weights: Bytes::ZERO,
            read: Bytes::ZERO,
            loading: Bytes::ZERO,
            kv_cache: Bytes::ZERO,
            buffers: device.cpu.compute_buffer.value + shared,
            gpu: gpu_buffer,
            uploads: vec![Bytes::ZERO; model.layers.len()],
            available: memory.obtainable(),
            gpu_available,
            swap: swap.saturating_sub(given_up),
        };
        Self { held, model, device, gpu_left: gpu_available.saturating_sub(gpu_buffer) }
    }

    /// Whether the GPU has its own memory.
    fn apart(&self) -> bool {
        self.device.gpu.as_ref().is_some_and(|gpu| !gpu.unified_memory)
    }

    /// Counts the whole layers of a ring.
    fn layers(&mut self, plan: &Plan, place: usize) {
        let residency = plan.devices[place].residency;
        let cache = kv_cache_bytes(&self.model.shape, 1, plan.context, plan.kv_cache, plan.sequences);
        for round in 0..plan.rounds {
            let (window, gpu) = (plan.window(place, round), plan.gpu_window(place, round));
            for layer in window {
                let group = &self.model.layers[layer as usize];
                let on_cpu = converted(group, residency.weights_as).bytes();
                if gpu.contains(&layer) {
                    let on_gpu = converted(group, residency.format_on(true)).bytes();
                    let copy = residency.gpu_weights_as.map(|_| on_cpu);
                    self.on_gpu(layer, on_gpu, cache, copy);
                } else {
                    self.held.read += on_cpu;
                    self.held.kv_cache += cache;
                }
            }
        }
        if place == 0 {
            let ends = model_as(self.model, residency.weights_as, |_| None);
            self.held.weights += embedding(&ends);
            if plan.output == Processor::Gpu {
                let on_gpu = converted(&self.model.output, residency.format_on(true)).bytes();
                let copy = residency.gpu_weights_as.map_or(Bytes::ZERO, |_| ends.output_bytes());
                let (own, shared) = if self.apart() { (on_gpu, copy) } else { (Bytes::ZERO, on_gpu) };
                self.held.gpu += own;
                self.held.weights += shared;
            } else {
                self.held.read += ends.output_bytes();
            }
        }
        self.held.weights += self.held.read;
    }

    /// Counts a slice of every layer.
    fn slices(&mut self, plan: &Plan, tensor: &TensorPlan, place: usize) {
        let (planned, model) = (&plan.devices[place], self.model);
        let residency = planned.residency;
        let sliced = SlicedModel::new(plan, tensor, place, model);
        let cache = kv_cache_bytes(&sliced.attention.shape, 1, plan.context, plan.kv_cache, 1);
        if planned.gpu_layers > 0 {
            for layer in 0..model.shape.layers.0 {
                let weights =
                    sliced.block_bytes(2 * layer as usize) + sliced.block_bytes(2 * layer as usize + 1);
                self.on_gpu(layer, weights, cache, None);
            }
        } else {
            self.held.read = sliced.layers_bytes();
            self.held.kv_cache = cache * model.shape.layers;
        }
        if place == 0 {
            self.held.read += sliced.attention.output_bytes();
        }
        if residency.policy == Residency::Sliding {
            self.held.weights = largest_window(&sliced, residency.blocks.unwrap_or(1), place == 0);
        } else {
            let rows = if place == 0 { embedding(&sliced.attention) } else { Bytes::ZERO };
            self.held.weights += self.held.read + rows;
        }
        if place == 0 && tensor.head_loads == HeadLoads::Model {
            let whole = model_as(model, residency.weights_as, |_| residency.weights_as);
            let input = converted(&model.input, tensor.embedding_as.or(residency.weights_as));
            let input = if model.shape.tied_embeddings { Bytes::ZERO } else { input.bytes() };
            self.held.loading = whole.layers_bytes() + whole.output_bytes() + input;
        }
    }

    /// Counts a layer on a GPU that shares main memory or has its own, where `copy` bytes in main memory may back it.
    fn on_gpu(&mut self, layer: u32, weights: Bytes, cache: Bytes, copy: Option<Bytes>) {
        if !self.apart() {
            self.held.weights += weights;
            self.held.kv_cache += cache;
            return;
        }
        self.held.weights += copy.unwrap_or(Bytes::ZERO);
        self.held.gpu += cache;
        self.gpu_left = self.gpu_left.saturating_sub(cache);
        match copy {
            Some(copy) if weights > self.gpu_left => self.held.uploads[layer as usize] = copy,
            _ => {
                self.held.gpu += weights;
                self.gpu_left = self.gpu_left.saturating_sub(weights);
            }
        }
    }
}

/// The head's embedding, 0 if it is tied to the output matrix.
fn embedding(model: &ModelProfile) -> Bytes {
    if model.shape.tied_embeddings { Bytes::ZERO } else { model.input_bytes() }
}

/// The blocks that a device with a sliding window loads for a token, in order. The head's output matrix is cut into
/// blocks no larger than a layer's.
pub fn streamed_blocks(sliced: &SlicedModel, head: bool) -> Vec<Bytes> {
    let layers = sliced.feed_forward.len();
    let mut blocks: Vec<Bytes> = (0..2 * layers).map(|block| sliced.block_bytes(block)).collect();
    let largest = sliced.attention.layers.iter().chain(&sliced.feed_forward).map(TensorGroup::bytes).max();
    let largest = largest.unwrap_or_default().0.max(1);
    let mut output = if head { sliced.attention.output_bytes().0 } else { 0 };
    while output > 0 {
        let block = output.min(largest);
        blocks.push(Bytes(block));
        output -= block;
    }
    blocks
}

/// The bytes of the largest run of `count` consecutive blocks.
fn largest_window(sliced: &SlicedModel, count: u32, head: bool) -> Bytes {
    let blocks = streamed_blocks(sliced, head);
    let count = (count as usize).min(blocks.len());
    let window = |start: usize| -> Bytes { (start..start + count).map(|at| blocks[at % blocks.len()]).sum() };
    (0..blocks.len()).map(window).max().unwrap_or_default()
}
