//! How much of a device's memory is left for the page cache?
//!
//! What a run can have of main memory, less what cannot be taken back ([`hearth_core::room`]). The rest holds the
//! weights that are read through the mapping. A run whose unreclaimable part does not fit, in main memory or on
//! the GPU, ends before it begins.
//!
//! Weights that are pinned cannot be taken back either ([`hearth_core::holdings`]). What of them memory does not
//! hold is swapped, which is read again as what a cache does not hold.
//!
//! Not here: which weights stay in the rest ([`crate::page_cache`]).

use hearth_core::holdings::Holdings;
use hearth_core::room::LEAST_ROOM;
use hearth_core::room::Room;
use hearth_profiles::Bytes;
use hearth_profiles::device::Device;
use hearth_profiles::model::ModelProfile;
use hearth_schema::Plan;
use hearth_schema::trace::MemoryKind;
use hearth_schema::trace::Shortage;

/// Memory of one device under one plan.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Budget {
    /// Main memory that pressure cannot take back.
    pub unreclaimable: Bytes,
    /// Main memory left for cached weights.
    pub cache: Bytes,
    /// Memories that do not hold what cannot be reclaimed.
    pub shortages: Vec<Shortage>,
    /// What goes to the GPU again for every token, layer by layer; empty if nothing is pinned.
    pub uploads: Vec<Bytes>,
}

impl Budget {
    /// The budget of the device at a place of the plan.
    pub fn new(
        plan: &Plan,
        place: usize,
        model: &ModelProfile,
        device: &Device,
        ignore_limits: bool,
    ) -> Self {
        if let Some(held) = Holdings::new(plan, place, model, device, ignore_limits) {
            return Self::pinned(place, held, ignore_limits);
        }
        let room = Room::new(plan, place, model, device);
        let gpu_available = device.gpu.as_ref().map_or(room.gpu_pinned(), |gpu| gpu.memory_available.value);
        let (unreclaimable, device) = (room.cache + room.buffers, place as u16);
        let shortage = |memory, needed: Bytes, available: Bytes| Shortage {
            device,
            memory,
            needed: needed.0,
            available: available.0,
        };
        let mut shortages = Vec::new();
        if !room.fits {
            let least = if room.share > Bytes::ZERO { LEAST_ROOM } else { Bytes::ZERO };
            shortages.push(shortage(MemoryKind::Main, unreclaimable + least, room.available));
        }
        if room.gpu_pinned() > gpu_available {
            shortages.push(shortage(MemoryKind::Gpu, room.gpu_pinned(), gpu_available));
        }
        Self { unreclaimable, cache: room.left, shortages, uploads: Vec::new() }
    }

    fn pinned(place: usize, held: Holdings, ignore_limits: bool) -> Self {
        let swapped = if ignore_limits { Bytes::ZERO } else { held.excess() };
        // The layout has room between parts, and beside them what other devices have.
        let cache =
            if swapped == Bytes::ZERO { Bytes(u64::MAX) } else { held.weights.saturating_sub(swapped) };
        Self {
            unreclaimable: held.main(),
            cache,
            shortages: short(place as u16, &held),
            uploads: held.uploads,
        }
    }
}

/// The memories of a device that are too small.
pub fn short(place: u16, held: &Holdings) -> Vec<Shortage> {
    let main = Shortage {
        device: place,
        memory: MemoryKind::Main,
        needed: held.main().0,
        available: (held.available + held.swap).0,
    };
    let gpu = Shortage {
        device: place,
        memory: MemoryKind::Gpu,
        needed: held.gpu.0,
        available: held.gpu_available.0,
    };
    [main, gpu].into_iter().filter(|shortage| shortage.needed > shortage.available).collect()
}
