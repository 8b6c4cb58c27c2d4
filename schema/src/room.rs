//! How much of a device's memory does its part of a plan need, and what is left for weights?
//!
//! The key-value cache for the whole context of every sequence, reserved before the first token, and the compute buffers cannot be taken back; nor can weights in GPU
//! memory, where that is main memory. The rest is room for the weights that the CPU reads, which may be more than
//! fits: they are read again then. A run whose other part does not fit ends before it begins. The simulator and `lint`
//! both ask here.
//!
//! A head that drafts has less to begin with ([`crate::draft::beside`]).
//!
//! Not here: which weights stay in the room ([`crate::residency`]), and a planner's account for windows that no plan
//! has yet.

use hearth_profiles::model::ModelProfile;
use hearth_profiles::{Bytes, Device, Layers};

use crate::Plan;
use crate::schedule::Processor;

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
    /// Weights that the CPU reads for a token; the output head's on the head.
    pub share: Bytes,
    /// Of these the output head, and a row of the embedding.
    pub head: Bytes,
    /// The most that the CPU reads in one window.
    pub window: Bytes,
    /// What the GPU has to hold: weights, keys and values, buffers.
    pub gpu_needed: Bytes,
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
        let (mut cache, mut gpu_needed, mut share, mut largest) =
            (Bytes::ZERO, Bytes::ZERO, Bytes::ZERO, Bytes::ZERO);
        for round in 0..plan.rounds {
            let (window, gpu) = (plan.window(place, round), plan.gpu_window(place, round));
            let cpu = gpu.end.max(window.start)..window.end;
            gpu_needed += kv(gpu.len()) + bytes(gpu);
            cache += kv(cpu.len());
            let read = bytes(cpu);
            share += read;
            largest = largest.max(read);
        }
        let output_on_gpu = place == 0 && plan.output == Processor::Gpu;
        if output_on_gpu {
            gpu_needed += model.output_bytes();
        }
        let mut buffers = device.cpu.compute_buffer.value;
        if let Some(gpu) = device.gpu.as_ref().filter(|_| gpu_needed > Bytes::ZERO) {
            gpu_needed += gpu.compute_buffer.value;
            buffers += if gpu.unified_memory { gpu_needed } else { Bytes::ZERO };
        }
        let output = if output_on_gpu { Bytes::ZERO } else { model.output_bytes() };
        let head = if place == 0 { output + model.input_row_bytes() } else { Bytes::ZERO };
        let available = device.memory.obtainable();
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
        }
    }

    /// Whether the CPU reads again from disk for every token.
    pub fn over(&self) -> bool {
        self.share > self.left
    }
}
