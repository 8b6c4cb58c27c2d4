//! How much of a device's memory is left for the page cache?
//!
//! A run can have what is available, and what other programs give up under pressure (`can_swap` of the profile,
//! within the swap space where that is known). Deviation: the paper counts the latter on Android only (appendix
//! A.3); its published times cannot be explained so, see the profiles' sources. The key-value cache and the
//! compute buffers are taken from it and cannot be taken back; weights in GPU memory too, where that is the
//! same memory. The rest holds the weights that the CPU reads through its mapping. A run whose unreclaimable
//! part does not fit ends before it begins.
//!
//! Not here: which weights stay in the rest ([`crate::page_cache`]).

use hearth_profiles::device::Device;
use hearth_profiles::model::ModelProfile;
use hearth_profiles::{Bytes, Layers};
use hearth_schema::Plan;

/// With less than this even weights that only pass through find no room: two read-ahead windows.
const LEAST_CACHE: Bytes = Bytes::mib(16);

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
        let reads = cpu_layers > 0 || place == 0;
        fits &= unreclaimable + if reads { LEAST_CACHE } else { Bytes::ZERO } <= available;
        Self { unreclaimable, cache: available.saturating_sub(unreclaimable), fits }
    }
}

/// What a run can have of a device's main memory.
fn available(device: &Device) -> Bytes {
    let memory = &device.memory;
    let given_up = memory.can_swap.as_ref().map_or(Bytes::ZERO, |bytes| bytes.value);
    let room = memory.swap_available.as_ref().map_or(given_up, |bytes| bytes.value);
    memory.available.value + given_up.min(room)
}
