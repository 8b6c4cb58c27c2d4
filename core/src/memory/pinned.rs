//! Pinned memory: the memory of a device that copies its weights into anonymous memory, whose pages are never dropped.
//!
//! Systems that do not map the model file work in this way (prima.cpp paper, appendix A.8). Weights are stored in the
//! format of the computation; if they are converted on the GPU, a copy in the format of the CPU stays in main memory.
//! The head device stores the embedding and the output matrix, and may load the whole model to slice it. With a sliding
//! window of weight blocks (TPI-LLM paper), embedding rows are read on demand.
//!
//! Anonymous memory beyond the available memory is swapped, if the device has free swap space. Converted GPU
//! layers that do not fit in GPU memory are converted again for every token, from the copy in main memory.
//! Without swap space or a copy, the device is out of memory.

use hearth_profiles::model::ModelProfile;
use hearth_profiles::{Bytes, DeviceProfile};
use hearth_schema::plan::tensor_parallel::{HeadWeights, TensorParallelPlan};
use hearth_schema::plan::{Plan, Processor};
use hearth_schema::residency::Residency;
use hearth_schema::trace::{MemoryKind, ShortageRecord};

use super::{plan_kv_cache_bytes, shortage};
use crate::tensor::SlicedModel;
use crate::weight_conversion::{converted_group, converted_model};

/// The memory that a device needs for a plan if it copies its weights into memory that cannot be evicted, instead of
/// mapping the model file.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PinnedMemory {
    /// Size of the weights in main memory, including copies of GPU weights.
    pub weights: Bytes,
    /// The part of `weights` that the CPU reads for each token.
    pub cpu_weights: Bytes,
    /// Size of the whole model, if the device is the head device and loads the whole model to slice it; 0 otherwise.
    pub loaded_model: Bytes,
    /// Size of the KV cache in main memory, for the whole context.
    pub kv_cache: Bytes,
    pub buffers: Bytes,
    /// GPU memory in use, without the weights that are converted again for every token.
    pub used_gpu_memory: Bytes,
    /// For each layer of the model, the bytes that are uploaded from main memory to the GPU for every token.
    pub gpu_upload_per_layer: Vec<Bytes>,
    /// Main memory that a run can use.
    pub available_memory: Bytes,
    /// Dedicated GPU memory that a run can use.
    pub available_gpu_memory: Bytes,
    /// Swap space that is not needed for the memory of other programs.
    pub free_swap: Bytes,
}

impl PinnedMemory {
    /// Computes the memory of the device with index `index` in the plan; `None` if the device maps its weights. With
    /// `ignore_limits`, weights of any size fit in GPU memory.
    pub fn new(
        plan: &Plan,
        index: usize,
        model: &ModelProfile,
        device: &DeviceProfile,
        ignore_limits: bool,
    ) -> Option<Self> {
        if !plan.devices[index].residency.uses_anonymous_memory() {
            return None;
        }
        let mut account = Account::new(plan, index, model, device);
        if ignore_limits {
            account.gpu_free = Bytes(u64::MAX);
        }
        match plan.kind.tensor_plan() {
            Some(tensor) => account.add_slices(plan, tensor, index),
            None => account.add_ring_layers(plan, index),
        }
        Some(account.memory)
    }

    /// Returns the size of the main memory that the operating system cannot reclaim.
    pub fn unreclaimable_memory(&self) -> Bytes {
        self.weights + self.loaded_model + self.kv_cache + self.buffers
    }

    /// Returns the needed main memory minus the available main memory, which must be swapped out; 0 if all fits.
    pub fn excess_memory(&self) -> Bytes {
        self.unreclaimable_memory().saturating_sub(self.available_memory)
    }

    /// Whether the main memory (including swap) and the dedicated GPU memory are large enough.
    pub fn fits(&self) -> bool {
        self.excess_memory() <= self.free_swap && self.used_gpu_memory <= self.available_gpu_memory
    }

    /// Returns the kinds of memory (main or GPU) that are too small. `index` is the index of the device in the plan.
    pub fn shortages(&self, index: usize) -> Vec<ShortageRecord> {
        let available = self.available_memory + self.free_swap;
        let main = shortage(index, MemoryKind::Main, self.unreclaimable_memory(), available);
        let gpu = shortage(index, MemoryKind::Gpu, self.used_gpu_memory, self.available_gpu_memory);
        main.into_iter().chain(gpu).collect()
    }
}

/// Accumulates the memory that a device needs for its layers or slices.
struct Account<'a> {
    memory: PinnedMemory,
    model: &'a ModelProfile,
    device: &'a DeviceProfile,
    gpu_free: Bytes,
}

impl<'a> Account<'a> {
    fn new(plan: &Plan, index: usize, model: &'a ModelProfile, device: &'a DeviceProfile) -> Self {
        let (main, on_gpu) = (&device.memory, plan.devices[index].gpu_layers > 0);
        let gpu = device.gpu.as_ref().filter(|_| on_gpu);
        let own_gpu = gpu.filter(|gpu| !gpu.unified_memory);
        let swapped_out = main.can_swap.as_ref().map_or(Bytes::ZERO, |bytes| bytes.value);
        let swap = main.swap_available.as_ref().map_or(Bytes::ZERO, |bytes| bytes.value);
        let shared = gpu.filter(|gpu| gpu.unified_memory).map_or(Bytes::ZERO, |gpu| gpu.compute_buffer.value);
        let gpu_buffer = own_gpu.map_or(Bytes::ZERO, |gpu| gpu.compute_buffer.value);
        let gpu_available = own_gpu.map_or(Bytes::ZERO, |gpu| gpu.memory_available.value);
        let memory = PinnedMemory {
            buffers: device.cpu.compute_buffer.value + shared,
            used_gpu_memory: gpu_buffer,
            gpu_upload_per_layer: vec![Bytes::ZERO; model.layers.len()],
            available_memory: main.obtainable_bytes(),
            available_gpu_memory: gpu_available,
            free_swap: swap.saturating_sub(swapped_out),
            ..PinnedMemory::default()
        };
        Self { memory, model, device, gpu_free: gpu_available.saturating_sub(gpu_buffer) }
    }

    /// Whether the GPU has dedicated memory.
    fn has_gpu_memory(&self) -> bool {
        self.device.gpu.as_ref().is_some_and(|gpu| !gpu.unified_memory)
    }

    fn add_ring_layers(&mut self, plan: &Plan, index: usize) {
        let residency = plan.devices[index].residency;
        // Deviation: layers that use keys and values of layers on another device need no copy of them.
        let own = |layer: &u32| self.model.shape.kv_layer(*layer) == *layer;
        let cache = |layer| plan_kv_cache_bytes(plan, &self.model.shape, Some(layer).filter(own));
        for round in 0..plan.rounds {
            let (window, gpu) = (plan.window(index, round), plan.gpu_window(index, round));
            for layer in window {
                let group = &self.model.layers[layer as usize];
                let on_cpu = converted_group(group, residency.conversion_format).bytes();
                if gpu.contains(&layer) {
                    let on_gpu = converted_group(group, residency.weight_format(true)).bytes();
                    let copy = residency.gpu_conversion_format.map(|_| on_cpu);
                    self.add_gpu_layer(layer, on_gpu, cache(layer), copy);
                } else {
                    self.memory.cpu_weights += on_cpu;
                    self.memory.kv_cache += cache(layer);
                }
            }
        }
        if index == 0 {
            let ends = converted_model(self.model, residency.conversion_format, |_| None);
            self.memory.weights += embedding(&ends);
            if plan.output_processor == Processor::Gpu {
                let on_gpu = converted_group(&self.model.output_head, residency.weight_format(true)).bytes();
                let copy = residency.gpu_conversion_format.map_or(Bytes::ZERO, |_| ends.output_head_bytes());
                let (own, main) = if self.has_gpu_memory() { (on_gpu, copy) } else { (Bytes::ZERO, on_gpu) };
                self.memory.used_gpu_memory += own;
                self.memory.weights += main;
            } else {
                self.memory.cpu_weights += ends.output_head_bytes();
            }
        }
        self.memory.weights += self.memory.cpu_weights;
    }

    fn add_slices(&mut self, plan: &Plan, tensor: &TensorParallelPlan, index: usize) {
        let (planned, model) = (&plan.devices[index], self.model);
        let residency = planned.residency;
        let sliced = SlicedModel::new(plan, tensor, index, model);
        let cache = plan_kv_cache_bytes(plan, &sliced.attention.shape, [0]);
        if planned.gpu_layers > 0 {
            for layer in 0..model.shape.layers.0 {
                let weights =
                    sliced.block_bytes(2 * layer as usize) + sliced.block_bytes(2 * layer as usize + 1);
                self.add_gpu_layer(layer, weights, cache, None);
            }
        } else {
            self.memory.cpu_weights = sliced.layers_bytes();
            self.memory.kv_cache = cache * u64::from(model.shape.layers.0);
        }
        if index == 0 {
            self.memory.cpu_weights += sliced.attention.output_head_bytes();
        }
        if residency.policy == Residency::Sliding {
            self.memory.weights = largest_window(&sliced, residency.resident_blocks.unwrap_or(1), index == 0);
        } else {
            let rows = if index == 0 { embedding(&sliced.attention) } else { Bytes::ZERO };
            self.memory.weights += self.memory.cpu_weights + rows;
        }
        if index == 0 && tensor.head_weights == HeadWeights::Model {
            let whole = converted_model(model, residency.conversion_format, |_| residency.conversion_format);
            let format = tensor.embedding_format.or(residency.conversion_format);
            let input = converted_group(&model.input_embedding, format);
            let input = if model.shape.has_tied_embeddings { Bytes::ZERO } else { input.bytes() };
            self.memory.loaded_model = whole.all_layers_bytes() + whole.output_head_bytes() + input;
        }
    }

    /// Adds the memory of a layer on the GPU. `copy` is the size of the layer's copy in main memory, if it has a copy.
    fn add_gpu_layer(&mut self, layer: u32, weights: Bytes, cache: Bytes, copy: Option<Bytes>) {
        if !self.has_gpu_memory() {
            self.memory.weights += weights;
            self.memory.kv_cache += cache;
            return;
        }
        self.memory.weights += copy.unwrap_or(Bytes::ZERO);
        self.memory.used_gpu_memory += cache;
        self.gpu_free = self.gpu_free.saturating_sub(cache);
        match copy {
            Some(copy) if weights > self.gpu_free => self.memory.gpu_upload_per_layer[layer as usize] = copy,
            _ => {
                self.memory.used_gpu_memory += weights;
                self.gpu_free = self.gpu_free.saturating_sub(weights);
            }
        }
    }
}

/// Returns the size of the weights before the first layer, without the embedding if it is tied to the output matrix.
fn embedding(model: &ModelProfile) -> Bytes {
    let tied = model.shape.has_tied_embeddings;
    let embedding = if tied { Bytes::ZERO } else { model.input_embedding_bytes() };
    embedding + model.per_layer_table.bytes() + model.per_layer_projection.bytes()
}

/// Returns the sizes of the blocks that a device with a sliding window of weight blocks (TPI-LLM paper) loads for a
/// token, in order. The head device (`is_head`) also loads the output matrix, divided into blocks no larger than the
/// largest block of a layer.
pub fn streamed_block_sizes(sliced: &SlicedModel, is_head: bool) -> Vec<Bytes> {
    let layers = sliced.feed_forward.len();
    let mut blocks: Vec<Bytes> = (0..2 * layers).map(|block| sliced.block_bytes(block)).collect();
    let largest = blocks.iter().max().copied().unwrap_or_default().max(Bytes(1));
    let mut output = if is_head { sliced.attention.output_head_bytes() } else { Bytes::ZERO };
    while output > Bytes::ZERO {
        let block = output.min(largest);
        blocks.push(block);
        output -= block;
    }
    blocks
}

/// Returns the maximum total size of `count` consecutive blocks. After the last block comes the first one.
fn largest_window(sliced: &SlicedModel, count: u32, is_head: bool) -> Bytes {
    let blocks = streamed_block_sizes(sliced, is_head);
    let count = (count as usize).min(blocks.len());
    let window = |start: usize| -> Bytes { (start..start + count).map(|at| blocks[at % blocks.len()]).sum() };
    (0..blocks.len()).map(window).max().unwrap_or_default()
}
