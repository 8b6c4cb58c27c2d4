//! Memory accounting: what a plan needs of each device's memory, and what is left for weights.
//!
//! Planner, `lint`, simulator and executor all count here:
//!
//! ```text
//! kv cache      = layers * sequences * context * (key width + value width) * element
//! unreclaimable = kv cache + compute buffers                     weights are mapped    ([`MemoryBudget`])
//!               = weights + kv cache + compute buffers + loading  weights are copied    ([`PinnedMemory`])
//! weight cache  = available - unreclaimable
//! ```
//!
//! Nothing of the unreclaimable part can be evicted: the cache is reserved for the whole context of every sequence
//! before the first token. Mapped weights may exceed the weight cache; what does not fit is read again for every token.
//! A run whose unreclaimable part does not fit ends before it begins. Published systems that copy their weights are
//! those of the prima.cpp paper, appendix A.8.
//!
//! [`draft`] subtracts what a draft model takes of the head, [`crate::conversion`] gives the size of weights in another format,
//! and [`process_bytes`] what the executor's process holds beside all that.
//!
//! Not here: how much of the weight cache managed residency keeps ([`crate::residency`]), and the planners' account in
//! the symbols of the paper, for windows that no plan has yet (`hearth_halda::latency`).

mod budget;
pub mod draft;
mod pinned;

use hearth_profiles::model::{ModelProfile, ModelShape};
use hearth_profiles::{Bytes, Device};
use hearth_schema::Plan;
use hearth_schema::scenario::KvFormat;
use hearth_schema::trace::{MemoryKind, Shortage};

pub use budget::MemoryBudget;
pub use pinned::{PinnedMemory, streamed_blocks};

/// The least memory that weights can pass through: two read-ahead windows of 8 MiB. A device that leaves less to the
/// system beside its share may be pushed over by what faults read around it.
/// source: measured in the lab, 4 MiB were too little
pub const MIN_WEIGHT_CACHE: Bytes = Bytes::mib(16);

/// What an idle process holds, where it has not been measured.
/// source: measured in the lab, 4.0 MiB with one or two threads
const IDLE_PROCESS: Bytes = Bytes::mib(4);

/// What the head's process holds beside that: the coordinator, its tokenizer, trace and logits.
/// source: measured in the lab, 2.9 to 4.0 MB over 14 heads of one round
const HEAD_PROCESS: Bytes = Bytes(3_650_000);

/// What each token of the vocabulary takes on the head, the only device that handles text.
/// source: measured in the lab, 4.6 MB for 128256 tokens
const VOCABULARY_ENTRY: Bytes = Bytes(36);

/// Keys and values of `layers` layers for the whole context of every sequence, `u64::MAX` bytes if that overflows.
pub fn kv_cache_bytes(
    shape: &ModelShape,
    layers: u32,
    context: u32,
    format: KvFormat,
    sequences: u32,
) -> Bytes {
    let layer = shape.kv_bytes_per_layer(context, Bytes(format.element_bytes())).0;
    Bytes(layer.saturating_mul(u64::from(layers)).saturating_mul(u64::from(sequences)))
}

/// Memory of an executor's process without cache, buffers and weights; `idle` is its memory when it does nothing.
pub fn process_bytes(shape: &ModelShape, head: bool, idle: Bytes) -> Bytes {
    let text = if head { HEAD_PROCESS + VOCABULARY_ENTRY * u64::from(shape.vocabulary) } else { Bytes::ZERO };
    idle.max(IDLE_PROCESS) + text
}

/// The memory of one device under one plan, whether it maps its weights or copies them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceMemory {
    /// Weights that the device uses for a token, or holds.
    pub weights: Bytes,
    /// Main memory that the device needs beside its weights.
    pub without_weights: Bytes,
    /// Main memory that pressure cannot take back.
    pub unreclaimable: Bytes,
    /// Main memory that a run can have.
    pub available: Bytes,
    /// Main memory left for weights. What exceeds it is read again, from the file or from swap.
    pub weight_cache: Bytes,
    /// GPU memory needed.
    pub gpu_needed: Bytes,
    /// GPU memory that a run can have.
    pub gpu_available: Bytes,
    /// The memories that are too small for what cannot be reclaimed.
    pub shortages: Vec<Shortage>,
    /// What goes to the GPU again for every token, layer by layer of the model; empty if weights are mapped.
    pub uploads: Vec<Bytes>,
}

impl DeviceMemory {
    /// The memory of the device at a place of the plan, as its draft leaves it ([`draft::device_without_draft`]). With
    /// `ignore_limits` pinned weights always fit.
    pub fn new(
        plan: &Plan,
        place: usize,
        model: &ModelProfile,
        device: &Device,
        ignore_limits: bool,
    ) -> Self {
        match PinnedMemory::new(plan, place, model, device, ignore_limits) {
            Some(pinned) => Self::pinned(place, pinned, ignore_limits),
            None => Self::mapped(place, &MemoryBudget::new(plan, place, model, device), device),
        }
    }

    fn mapped(place: usize, budget: &MemoryBudget, device: &Device) -> Self {
        let unreclaimable = budget.unreclaimable();
        let gpu_available = device.gpu.as_ref().map_or(Bytes::ZERO, |gpu| gpu.memory_available.value);
        let mut shortages = Vec::new();
        if !budget.fits {
            let least = if budget.weights > Bytes::ZERO { MIN_WEIGHT_CACHE } else { Bytes::ZERO };
            shortages.push(shortage(place, MemoryKind::Main, unreclaimable + least, budget.available));
        }
        if device.gpu.is_some() && budget.gpu_pinned() > gpu_available {
            shortages.push(shortage(place, MemoryKind::Gpu, budget.gpu_pinned(), gpu_available));
        }
        Self {
            weights: budget.weights,
            without_weights: unreclaimable,
            unreclaimable,
            available: budget.available,
            weight_cache: budget.left,
            gpu_needed: budget.gpu_needed,
            gpu_available,
            shortages,
            uploads: Vec::new(),
        }
    }

    fn pinned(place: usize, pinned: PinnedMemory, ignore_limits: bool) -> Self {
        let swapped = if ignore_limits { Bytes::ZERO } else { pinned.excess() };
        // Without swapping, the whole layout has room, with its gaps and what other devices have.
        let weight_cache =
            if swapped == Bytes::ZERO { Bytes(u64::MAX) } else { pinned.weights.saturating_sub(swapped) };
        Self {
            weights: pinned.weights,
            without_weights: pinned.main().saturating_sub(pinned.weights),
            unreclaimable: pinned.main(),
            available: pinned.available,
            weight_cache,
            gpu_needed: pinned.gpu,
            gpu_available: pinned.gpu_available,
            shortages: pinned.shortages(place),
            uploads: pinned.uploads,
        }
    }

    /// Main memory that the device would use if it had enough.
    pub fn needed(&self) -> Bytes {
        self.weights + self.without_weights
    }
}

fn shortage(place: usize, memory: MemoryKind, needed: Bytes, available: Bytes) -> Shortage {
    Shortage { device: place as u16, memory, needed: needed.0, available: available.0 }
}
