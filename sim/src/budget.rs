//! How much of a device's memory is left for the page cache?
//!
//! prima.cpp paper, appendix A.3: what a run can have is `d_avail`, on Android more by what idle applications
//! can be swapped out. The key-value cache and the compute buffers are taken from it and cannot be taken back;
//! weights in GPU memory too, where that is the same memory. The rest holds the weights that the CPU reads
//! through its mapping. A run whose unreclaimable part does not fit ends before it begins.
//!
//! Not here: which weights stay in the rest ([`crate::page_cache`]).

use hearth_profiles::device::{Device, Os};
use hearth_profiles::model::ModelProfile;
use hearth_profiles::{Bytes, units::Layers};
use hearth_schema::Plan;

/// Memory of one device under one plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Budget {
    /// Main memory that pressure cannot take back.
    pub unreclaimable: Bytes,
    /// Main memory left for cached weights.
    pub cache: Bytes,
    /// Whether main and GPU memory hold what cannot be reclaimed.
    pub fits: bool,
}

impl Budget {
    /// The budget of the device at a place of the plan.
    pub fn new(plan: &Plan, place: usize, model: &ModelProfile, device: &Device) -> Self {
        let (mut cpu_layers, mut gpu_layers, mut gpu_weights) = (0, 0, Bytes::ZERO);
        for round in 0..plan.rounds {
            let gpu = plan.gpu_window(place, round);
            gpu_layers += gpu.len() as u32;
            cpu_layers += (plan.window(place, round).len() - gpu.len()) as u32;
            gpu_weights += gpu.map(|layer| model.layer_bytes(layer)).sum::<Bytes>();
        }
        let element = Bytes(plan.kv_cache.element_bytes());
        let kv = |layers| model.shape.kv_bytes_per_layer(plan.context, element) * Layers(layers);
        let mut unreclaimable = kv(cpu_layers) + device.cpu.compute_buffer.value;
        let mut fits = true;
        if let Some(gpu) = device.gpu.as_ref().filter(|_| gpu_layers > 0) {
            let needed = gpu_weights + kv(gpu_layers) + gpu.compute_buffer.value;
            fits &= needed <= gpu.memory_available.value;
            if gpu.unified_memory {
                unreclaimable += needed;
            }
        }
        let available = available(device);
        fits &= unreclaimable <= available;
        Self { unreclaimable, cache: available.saturating_sub(unreclaimable), fits }
    }
}

/// What a run can have of a device's main memory.
fn available(device: &Device) -> Bytes {
    let memory = &device.memory;
    let swappable = match (device.os, &memory.can_swap, &memory.swap_available) {
        (Os::Android, Some(can_swap), Some(swap)) => can_swap.value.min(swap.value),
        _ => Bytes::ZERO,
    };
    memory.available.value + swappable
}
