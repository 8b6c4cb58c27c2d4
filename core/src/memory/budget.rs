//! The memory budget of a device with memory-mapped weights: KV cache, buffers, and the memory left for weights.
//!
//! The equation is in [`crate::memory`]. The buffers include a GPU's copy of weights if the GPU shares main memory.
//! The cached weights are those of the CPU and, with Metal, those of the GPU up to the size of Metal's working set.

use std::ops::Range;

use hearth_profiles::model::ModelProfile;
use hearth_profiles::{Bytes, DeviceProfile};
use hearth_schema::Plan;
use hearth_schema::plan::Processor;

use super::{MIN_WEIGHT_CACHE, plan_kv_cache_bytes};

/// The memory that one device with memory-mapped weights needs for a plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryBudget {
    /// Main memory that a run can use on the device.
    pub available_memory: Bytes,
    /// Size of the KV cache of the CPU's layers, for the whole context of all sequences.
    pub kv_cache: Bytes,
    /// Size of the compute buffers, and of everything that a GPU stores in main memory.
    pub buffers: Bytes,
    /// Main memory that remains for weights in the page cache.
    pub weight_cache: Bytes,
    /// Whether `available_memory` suffices for the unreclaimable memory and, with mapped weights, [`MIN_WEIGHT_CACHE`].
    pub fits: bool,
    /// Size of the weights that are read from the mapped model file for each token, including `head_weights`.
    pub weights: Bytes,
    /// The part of `weights` for the output matrix, one embedding row and the projection of per-layer inputs; 0 if it
    /// is not the head device.
    pub head_weights: Bytes,
    /// The part of `weights` for the largest window of layers.
    pub largest_window_weights: Bytes,
    /// GPU memory that the plan needs: weights, keys and values, buffers.
    pub needed_gpu_memory: Bytes,
    /// The part of `needed_gpu_memory` for weights that are read from the mapped model file.
    pub mapped_gpu_weights: Bytes,
    /// Maximum size of the weights that Metal keeps wired; `None` if the GPU does not use Metal.
    pub max_wired_weights: Option<Bytes>,
}

impl MemoryBudget {
    /// Computes the budget of the device with index `index` in the plan.
    pub fn new(plan: &Plan, index: usize, model: &ModelProfile, device: &DeviceProfile) -> Self {
        let bytes = |layers: Range<u32>| layers.map(|layer| model.layer_bytes(layer)).sum::<Bytes>();
        let mapped = |bytes: Bytes| if device.gpu_maps_weights() { bytes } else { Bytes::ZERO };
        let [mut gpu_needed, mut gpu_mapped, mut weights, mut largest_window] = [Bytes::ZERO; 4];
        let (mut cpu_layers, mut gpu_layers) = (Vec::new(), Vec::new());
        for round in 0..plan.rounds {
            let (window, gpu) = (plan.window(index, round), plan.gpu_window(index, round));
            let cpu = gpu.end.max(window.start)..window.end;
            let on_gpu = bytes(gpu.clone());
            gpu_needed += on_gpu;
            gpu_layers.extend(gpu);
            gpu_mapped += mapped(on_gpu);
            cpu_layers.extend(cpu.clone());
            let read = bytes(cpu) + mapped(on_gpu);
            weights += read;
            largest_window = largest_window.max(read);
        }
        let kv_cache = plan_kv_cache_bytes(plan, &model.shape, cpu_layers);
        gpu_needed += plan_kv_cache_bytes(plan, &model.shape, gpu_layers);
        let output_on_gpu = index == 0 && plan.output_processor == Processor::Gpu;
        if output_on_gpu {
            gpu_needed += model.output_head_bytes();
            gpu_mapped += mapped(model.output_head_bytes());
        }
        let mut buffers = device.cpu.compute_buffer.value;
        if let Some(gpu) = device.gpu.as_ref().filter(|_| gpu_needed > Bytes::ZERO) {
            gpu_needed += gpu.compute_buffer.value;
            buffers += if gpu.unified_memory { gpu_needed - gpu_mapped } else { Bytes::ZERO };
        }
        let output =
            if output_on_gpu { mapped(model.output_head_bytes()) } else { model.output_head_bytes() };
        let input = model.embedding_row_bytes() + model.per_layer_projection.bytes();
        let head_weights = if index == 0 { output + input } else { Bytes::ZERO };
        weights += head_weights;
        let available = device.memory.obtainable_bytes();
        let metal = device.gpu.as_ref().filter(|_| device.gpu_maps_weights());
        let min_cache = if weights > Bytes::ZERO { MIN_WEIGHT_CACHE } else { Bytes::ZERO };
        Self {
            available_memory: available,
            kv_cache,
            buffers,
            weight_cache: available.saturating_sub(kv_cache + buffers),
            fits: kv_cache + buffers + min_cache <= available,
            weights,
            head_weights,
            largest_window_weights: largest_window,
            needed_gpu_memory: gpu_needed,
            mapped_gpu_weights: gpu_mapped,
            max_wired_weights: metal.map(|gpu| gpu.memory_available.value.saturating_sub(kv_cache + buffers)),
        }
    }

    /// Returns the size of the main memory that the operating system cannot reclaim.
    pub fn unreclaimable_memory(&self) -> Bytes {
        self.kv_cache + self.buffers
    }

    /// Returns the maximum number of bytes of weights that can stay in memory.
    pub fn max_resident_weights(&self) -> Bytes {
        self.max_wired_weights.map_or(self.weight_cache, |wired| wired.min(self.weight_cache))
    }

    /// Whether weights are read from disk for every token, because they exceed [`Self::max_resident_weights`].
    pub fn reloads_weights(&self) -> bool {
        self.weights > self.max_resident_weights()
    }

    /// Returns the GPU memory for data that cannot be read again from the mapped model file.
    pub fn pinned_gpu_memory(&self) -> Bytes {
        self.needed_gpu_memory.saturating_sub(self.mapped_gpu_weights)
    }
}
