//! Memory budget of a GPU: the bytes that may be allocated, and the bytes that are allocated.
//!
//! wgpu does not report how much memory a GPU has. Three limits are used instead:
//!
//! - The driver: if it reports a budget for this process (VK_EXT_memory_budget, DXGI), wgpu rejects allocations that
//!   exceed [`BUDGET_PERCENT`] of the budget.
//! - The operating system: a GPU that shares the machine's memory, or a software driver, may use the memory that was
//!   available when the GPU was opened (`hearth_profiles::measure`). Without this limit the system would kill
//!   processes.
//! - The plan: it assigns to a GPU no more memory than the device document states as available.
//!
//! On a discrete GPU whose driver reports no budget, allocations that exceed the GPU memory fail in the driver. If a
//! limit is exceeded, the allocation returns [`GpuError::OutOfMemory`]. A run whose plan needs too much memory does not
//! start, and a run that has started continues without the GPU.
//!
//! If the GPU shares the machine's memory, the memory that the CPU needs in the same run is reserved first
//! ([`Gpu::reserve_shared`]). Textures are not counted, because no run uses them.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use hearth_profiles::Bytes;
use hearth_profiles::measure;

use super::{AdapterInfo, Gpu};
use crate::error::GpuError;

/// Percentage of the memory budget of the driver that may be allocated.
/// source: assumed; the rest is for the driver's own buffers and for changes in the memory use of other programs
pub(super) const BUDGET_PERCENT: u8 = 95;

/// The bytes of GPU memory that are reserved, and the maximum that can be reserved.
#[derive(Debug)]
pub(super) struct MemoryBudget {
    reserved: AtomicU64,
    limit: AtomicU64,
    /// Whether the GPU shares the memory of the machine.
    is_shared: bool,
}

/// Reserved bytes of GPU memory, which are released on drop.
#[derive(Debug)]
pub(crate) struct Reservation {
    memory_budget: Arc<MemoryBudget>,
    bytes: u64,
}

impl MemoryBudget {
    /// Creates the budget of an adapter, with at most `limit` bytes if there is a limit.
    pub(super) fn new(info: &AdapterInfo, limit: Option<u64>) -> Arc<MemoryBudget> {
        let is_shared = matches!(info.kind, "integrated" | "software");
        // Zero means that the system does not report the available memory.
        let available =
            is_shared.then(|| measure::memory::available_memory().0).filter(|&available| available > 0);
        let limit = available.unwrap_or(u64::MAX).min(limit.unwrap_or(u64::MAX));
        Arc::new(MemoryBudget { reserved: AtomicU64::new(0), limit: AtomicU64::new(limit), is_shared })
    }

    /// Reserves `bytes` bytes. Returns [`GpuError::OutOfMemory`] if the limit would be exceeded; `what` names the use
    /// of the memory in this error.
    pub(super) fn reserve(self: &Arc<Self>, what: &str, bytes: u64) -> Result<Reservation, GpuError> {
        let limit = self.limit.load(Ordering::Relaxed);
        let added = |reserved: u64| reserved.checked_add(bytes).filter(|&reserved| reserved <= limit);
        match self.reserved.fetch_update(Ordering::Relaxed, Ordering::Relaxed, added) {
            Ok(_) => Ok(Reservation { memory_budget: Arc::clone(self), bytes }),
            Err(reserved) => {
                let [bytes, reserved, limit] = [bytes, reserved, limit].map(Bytes);
                let what = format!("{what}: {bytes} are needed, and {reserved} of {limit} are in use");
                Err(GpuError::OutOfMemory { what })
            }
        }
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.memory_budget.reserved.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

impl Gpu {
    pub fn reserved_bytes(&self) -> u64 {
        self.memory_budget.reserved.load(Ordering::Relaxed)
    }

    /// Returns the maximum number of bytes that can be reserved; `None` if no limit is known.
    pub fn memory_limit_bytes(&self) -> Option<u64> {
        Some(self.memory_budget.limit.load(Ordering::Relaxed)).filter(|&limit| limit < u64::MAX)
    }

    /// Reserves memory that the CPU needs in the same run, if CPU and GPU share memory, so that the GPU cannot use this
    /// memory too. Reserves nothing for a GPU with its own memory.
    pub(crate) fn reserve_shared(&self, what: &str, bytes: u64) -> Result<Option<Reservation>, GpuError> {
        self.memory_budget.is_shared.then(|| self.memory_budget.reserve(what, bytes)).transpose()
    }

    /// Sets the maximum number of bytes that can be reserved, as if other programs used the rest of the memory.
    pub fn set_memory_limit(&self, limit: u64) {
        self.memory_budget.limit.store(limit, Ordering::Relaxed);
    }
}
