//! Memory accounting: the memory that a plan needs on each device, and the memory that remains for weights.
//!
//! Planner, `lint`, simulator and executor all use these equations:
//!
//! ```text
//! kv cache      = layers * sequences * context * (key width + value width) * element    (`TokenMixer::cache_bytes`)
//! unreclaimable = kv cache + compute buffers                     weights are mapped    ([`MemoryBudget`])
//!               = weights + kv cache + compute buffers + loading  weights are copied    ([`PinnedMemory`])
//! weight cache  = available - unreclaimable
//! ```
//!
//! `element` is the size of an element of the cache, `loading` the size of the whole model if a head device loads it to
//! slice it. The KV cache is allocated before the first token. Mapped weights may exceed the weight cache; the
//! excess is read from disk for every token. If the unreclaimable memory does not fit, the run fails before it begins.
//!
//! Not here: how much of the weight cache managed residency keeps ([`crate::residency`]), and the same equations in
//! the symbols of the paper, for windows that are not part of a plan yet (`hearth_halda::latency`).

mod budget;
pub mod draft;
mod pinned;

use hearth_profiles::model::{ModelProfile, ModelShape};
use hearth_profiles::{Bytes, DeviceProfile};
use hearth_schema::Plan;
use hearth_schema::scenario::KvFormat;
use hearth_schema::trace::{MemoryKind, ShortageRecord};

pub use budget::MemoryBudget;
pub use pinned::{PinnedMemory, streamed_block_sizes};

/// Minimum memory for cached weights: two read-ahead windows of 8 MiB. With less, the pages that the kernel reads
/// around a page fault may exceed the memory limit.
/// source: measured in the lab, 4 MiB were too little
pub const MIN_WEIGHT_CACHE: Bytes = Bytes::from_mib(16);

/// The least memory of other programs that a prediction mentions if it relies on it. source: assumed
pub const MIN_TAKEN_MEMORY: Bytes = Bytes::from_mib(64);

/// Memory of an executor's idle process on a device where this memory has not been measured.
/// source: measured in the lab, 4.0 MiB with one or two threads
const IDLE_PROCESS: Bytes = Bytes::from_mib(4);

/// Additional memory of the process on the head device: coordinator, tokenizer, trace and logits.
/// source: measured in the lab, 2.9 to 4.0 MB for the head processes of 14 rings
const HEAD_PROCESS: Bytes = Bytes(3_650_000);

/// Memory per token of the vocabulary on the head device, the only device that processes text.
/// source: measured in the lab, 4.6 MB for 128256 tokens
const VOCABULARY_ENTRY: Bytes = Bytes(36);

/// Returns the size of the KV cache of the layers `layers` for the whole context of every sequence, `u64::MAX`
/// bytes if it overflows. For layers without attention, it is the size of their state.
pub fn kv_cache_bytes(
    shape: &ModelShape,
    layers: impl IntoIterator<Item = u32>,
    context: u32,
    format: KvFormat,
    sequences: u32,
) -> Bytes {
    let sequence = shape.layers_cache_bytes(layers, context, format.format());
    Bytes(sequence.0.saturating_mul(u64::from(sequences)))
}

/// Returns the size of the KV cache of some layers of a plan's model, for all sequences of the plan.
pub fn plan_kv_cache_bytes(plan: &Plan, shape: &ModelShape, layers: impl IntoIterator<Item = u32>) -> Bytes {
    let Plan { context_length, kv_cache_format, sequences, .. } = *plan;
    if plan.cache_tokens.is_none() {
        return kv_cache_bytes(shape, layers, context_length, kv_cache_format, sequences);
    }
    // A state has the same size whatever the context is.
    let layers: Vec<u32> = layers.into_iter().collect();
    let of_context = |context| kv_cache_bytes(shape, layers.iter().copied(), context, kv_cache_format, 1);
    let states = of_context(0) * u64::from(sequences);
    let tokens = u32::try_from(plan.total_cache_tokens()).unwrap_or(u32::MAX);
    states + of_context(tokens).saturating_sub(of_context(0))
}

/// Returns the memory of an executor's process without KV cache, compute buffers and weights. `is_head` says
/// whether it runs on the head device and needs more. `idle` is the measured memory of an idle process, 0 if unknown.
pub fn process_overhead_bytes(shape: &ModelShape, is_head: bool, idle: Bytes) -> Bytes {
    let text =
        if is_head { HEAD_PROCESS + VOCABULARY_ENTRY * u64::from(shape.vocab_size) } else { Bytes::ZERO };
    idle.max(IDLE_PROCESS) + text
}

/// The memory that one device needs for a plan, with mapped or copied weights.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceMemory {
    /// Size of the weights: mapped weights that the device reads for a token, or copied weights that the device stores.
    pub weights: Bytes,
    /// Main memory that the device needs in addition to its weights.
    pub other_memory: Bytes,
    /// Main memory that the operating system cannot reclaim.
    pub unreclaimable_memory: Bytes,
    /// Main memory that a run can use.
    pub available_memory: Bytes,
    /// Main memory that remains for weights. The other weights are read for every token, from model file or swap space.
    pub weight_cache: Bytes,
    pub needed_gpu_memory: Bytes,
    pub available_gpu_memory: Bytes,
    /// The kinds of memory (main or GPU) of which the device has less than the minimum that the run needs.
    pub shortages: Vec<ShortageRecord>,
    /// For each layer of the model, the bytes uploaded to the GPU for every token; empty if weights are mapped.
    pub gpu_upload_per_layer: Vec<Bytes>,
}

impl DeviceMemory {
    /// Computes the memory of the device with index `index` in the plan. `device` is the profile minus the memory of a
    /// draft model ([`draft::device_without_draft`]). If `unlimited` is true, pinned weights always fit.
    pub fn new(
        plan: &Plan,
        index: usize,
        model: &ModelProfile,
        device: &DeviceProfile,
        unlimited: bool,
    ) -> Self {
        match PinnedMemory::new(plan, index, model, device, unlimited) {
            Some(pinned) => Self::pinned(index, pinned, unlimited),
            None => Self::mapped(index, &MemoryBudget::new(plan, index, model, device), device),
        }
    }

    fn mapped(index: usize, budget: &MemoryBudget, device: &DeviceProfile) -> Self {
        let unreclaimable = budget.unreclaimable_memory();
        let gpu_available = device.gpu.as_ref().map_or(Bytes::ZERO, |gpu| gpu.memory_available.value);
        let min_cache = if budget.weights > Bytes::ZERO { MIN_WEIGHT_CACHE } else { Bytes::ZERO };
        let main = shortage(index, MemoryKind::Main, unreclaimable + min_cache, budget.available_memory);
        let gpu = shortage(index, MemoryKind::Gpu, budget.pinned_gpu_memory(), gpu_available);
        let shortages = main.into_iter().chain(gpu.filter(|_| device.gpu.is_some())).collect();
        Self {
            weights: budget.weights,
            other_memory: unreclaimable,
            unreclaimable_memory: unreclaimable,
            available_memory: budget.available_memory,
            weight_cache: budget.weight_cache,
            needed_gpu_memory: budget.needed_gpu_memory,
            available_gpu_memory: gpu_available,
            shortages,
            gpu_upload_per_layer: Vec::new(),
        }
    }

    fn pinned(index: usize, pinned: PinnedMemory, unlimited: bool) -> Self {
        let swapped = if unlimited { Bytes::ZERO } else { pinned.excess_memory() };
        // Without swapping the weight cache is unlimited, because the memory layout also contains gaps and the parts
        // of other devices.
        let weight_cache =
            if swapped == Bytes::ZERO { Bytes(u64::MAX) } else { pinned.weights.saturating_sub(swapped) };
        Self {
            weights: pinned.weights,
            other_memory: pinned.unreclaimable_memory().saturating_sub(pinned.weights),
            unreclaimable_memory: pinned.unreclaimable_memory(),
            available_memory: pinned.available_memory,
            weight_cache,
            needed_gpu_memory: pinned.used_gpu_memory,
            available_gpu_memory: pinned.available_gpu_memory,
            shortages: pinned.shortages(index),
            gpu_upload_per_layer: pinned.gpu_upload_per_layer,
        }
    }

    /// Returns how much of the memory that a run uses other programs hold before the run and must release.
    pub fn taken_from_others(&self, device: &DeviceProfile) -> Bytes {
        let used = self.other_memory + self.weights.min(self.weight_cache);
        used.saturating_sub(device.memory.available_memory.value)
    }

    /// Returns the main memory that the device would use if its memory were unlimited.
    pub fn needed_memory(&self) -> Bytes {
        self.weights + self.other_memory
    }
}

fn shortage(index: usize, kind: MemoryKind, needed: Bytes, available: Bytes) -> Option<ShortageRecord> {
    let (device_index, needed_bytes, available_bytes) = (index as u16, needed.0, available.0);
    let shortage = ShortageRecord { device_index, memory_kind: kind, needed_bytes, available_bytes };
    (needed > available).then_some(shortage)
}
