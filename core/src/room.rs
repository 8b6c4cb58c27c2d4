//! How much of a device's memory does its part of a plan need, and what is left for weights?
//!
//! The key-value cache for the whole context of every sequence, reserved before the first token, and the compute buffers
//! cannot be taken back; nor can a GPU's copy of weights, where its memory is main memory. The rest is room for the
//! weights of the mapped file, which may be more than fits: they are read again then. They are the CPU's, and with Metal
//! the GPU's too, as far as its working set goes. A run whose other part does not fit ends before it begins. The
//! simulator and `lint` both ask here.
//!
//! A head that drafts has less to begin with ([`crate::draft::beside`]).
//!
//! Not here: which weights stay in the room ([`hearth_schema::residency`]), and a planner's account for windows that no plan
//! has yet.

use hearth_profiles::model::ModelProfile;
use hearth_profiles::{Bytes, Device, Layers};

use hearth_schema::Plan;
use hearth_schema::plan::Processor;

/// With less than this no weights can pass through: two read-ahead windows of 8 MiB. A device that leaves less to the
/// system beside its share may be pushed over by what faults read around it.
/// source: measured in the lab, 4 MiB were too little
pub const LEAST_ROOM: Bytes = Bytes::mib(16);

/// The memory of one device under one plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Room {
    /// What a run can have of main memory.
    pub available: Bytes,
    /// Keys and values of the CPU's layers at full context.
    pub cache: Bytes,
    /// Compute buffers, and what a GPU takes of main memory.
    pub buffers: Bytes,
    /// What is left for weights.
    pub left: Bytes,
    /// Whether what cannot be taken back fits, and something of the weights beside it.
    pub fits: bool,
    /// Weights that are read through the mapping for a token; the output head's on the head.
    pub share: Bytes,
    /// Of these the output head, and a row of the embedding.
    pub head: Bytes,
    /// The most that is read so in one window.
    pub window: Bytes,
    /// What the GPU has to hold: weights, keys and values, buffers.
    pub gpu_needed: Bytes,
    /// Of these the weights that are read through the mapping.
    pub gpu_mapped: Bytes,
    /// The most of the weights that Metal keeps wired, where it does that.
    pub wired: Option<Bytes>,
}

impl Room {
    /// The memory of the device at a place of the plan.
    pub fn new(plan: &Plan, place: usize, model: &ModelProfile, device: &Device) -> Self {
        let bytes =
            |layers: std::ops::Range<u32>| layers.map(|layer| model.layer_bytes(layer)).sum::<Bytes>();
        let element = Bytes(plan.kv_cache.element_bytes());
        let kv = |layers: usize| {
            model.shape.kv_bytes_per_layer(plan.context, element)
                * Layers(layers as u32)
                * u64::from(plan.sequences)
        };
        let maps = device.gpu_maps_weights();
        let (mut cache, mut gpu_needed, mut gpu_mapped, mut share, mut largest) =
            (Bytes::ZERO, Bytes::ZERO, Bytes::ZERO, Bytes::ZERO, Bytes::ZERO);
        for round in 0..plan.rounds {
            let (window, gpu) = (plan.window(place, round), plan.gpu_window(place, round));
            let cpu = gpu.end.max(window.start)..window.end;
            let (on_gpu, mapped) = (bytes(gpu.clone()), if maps { bytes(gpu.clone()) } else { Bytes::ZERO });
            gpu_needed += kv(gpu.len()) + on_gpu;
            gpu_mapped += mapped;
            cache += kv(cpu.len());
            let read = bytes(cpu) + mapped;
            share += read;
            largest = largest.max(read);
        }
        let output_on_gpu = place == 0 && plan.output == Processor::Gpu;
        if output_on_gpu {
            gpu_needed += model.output_bytes();
            gpu_mapped += if maps { model.output_bytes() } else { Bytes::ZERO };
        }
        let mut buffers = device.cpu.compute_buffer.value;
        if let Some(gpu) = device.gpu.as_ref().filter(|_| gpu_needed > Bytes::ZERO) {
            gpu_needed += gpu.compute_buffer.value;
            buffers += if gpu.unified_memory { gpu_needed - gpu_mapped } else { Bytes::ZERO };
        }
        let output = if output_on_gpu && !maps { Bytes::ZERO } else { model.output_bytes() };
        let head = if place == 0 { output + model.input_row_bytes() } else { Bytes::ZERO };
        let available = device.memory.obtainable();
        let working_set = device.gpu.as_ref().filter(|_| maps).map(|gpu| gpu.memory_available.value);
        let least = if share + head > Bytes::ZERO { LEAST_ROOM } else { Bytes::ZERO };
        Self {
            available,
            cache,
            buffers,
            left: available.saturating_sub(cache + buffers),
            fits: cache + buffers + least <= available,
            share: share + head,
            head,
            window: largest,
            gpu_needed,
            gpu_mapped,
            wired: working_set.map(|set| set.saturating_sub(cache + buffers)),
        }
    }

    /// The most of the weights that can stay.
    pub fn keeps(&self) -> Bytes {
        self.wired.map_or(self.left, |wired| wired.min(self.left))
    }

    /// Whether weights are read again from disk for every token.
    pub fn over(&self) -> bool {
        self.share > self.keeps()
    }

    /// What the GPU has to hold and cannot read again.
    pub fn gpu_pinned(&self) -> Bytes {
        self.gpu_needed.saturating_sub(self.gpu_mapped)
    }
}
