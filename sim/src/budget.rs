//! How much of a device's memory is left for the page cache?
//!
//! What a run can have of main memory, less what cannot be taken back ([`hearth_schema::room`]). The rest holds the
//! weights that the CPU reads through its mapping. A run whose unreclaimable part does not fit, in main memory or on
//! the GPU, ends before it begins.
//!
//! Not here: which weights stay in the rest ([`crate::page_cache`]).

use hearth_profiles::Bytes;
use hearth_profiles::device::Device;
use hearth_profiles::model::ModelProfile;
use hearth_schema::Plan;
use hearth_schema::room::Room;

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
        let room = Room::new(plan, place, model, device);
        let gpu_fits = device.gpu.as_ref().is_none_or(|gpu| room.gpu_needed <= gpu.memory_available.value);
        Self { unreclaimable: room.cache + room.buffers, cache: room.left, fits: room.fits && gpu_fits }
    }
}
