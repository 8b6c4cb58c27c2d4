//! The budget of GPU memory, counted as it is allocated.
//!
//! wgpu does not report how much memory a GPU has. Three limits take its place:
//!
//! - The driver. Where it has a budget for this process (VK_EXT_memory_budget, DXGI), wgpu refuses allocations beyond
//!   [`BUDGET_PERCENT`] of it.
//! - The system, for a GPU that shares the machine's memory and for a software driver: the memory that was available
//!   when the GPU was opened (`hearth_profiles::measure`). Without this limit the system would kill processes.
//! - The plan, which gives a GPU what its device document says is available.
//!
//! A discrete GPU whose driver has no budget refuses by itself. Every refusal is the same error,
//! [`GpuError::OutOfMemory`]: a plan that needs too much does not begin, and a run continues without the GPU.
//!
//! Of shared memory, the processors' part of the same run is taken first ([`Gpu::reserve_shared`]).
//!
//! Not counted: textures, which no run uses.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use hearth_profiles::Bytes;
use hearth_profiles::measure;

use super::{AdapterFacts, Gpu};
use crate::error::GpuError;

/// The share of the driver's budget that may be taken.
/// source: assumed, what is left is for the driver's own buffers and for other programs' changes
pub(super) const BUDGET_PERCENT: u8 = 95;

/// Counts the bytes taken of a limit.
#[derive(Debug)]
pub(super) struct MemoryBudget {
    taken: AtomicU64,
    limit: AtomicU64,
    /// Whether the GPU shares the machine's memory.
    is_shared: bool,
}

/// Bytes of a budget that are returned on drop.
#[derive(Debug)]
pub(crate) struct Reservation {
    memory_budget: Arc<MemoryBudget>,
    bytes: u64,
}

impl MemoryBudget {
    /// A budget of at most `limit` bytes for an adapter.
    pub(super) fn new(facts: &AdapterFacts, limit: Option<u64>) -> Arc<MemoryBudget> {
        let is_shared = matches!(facts.kind, "integrated" | "software");
        // A system that does not tell has nothing available.
        let available = is_shared.then(|| measure::memory::available().0).filter(|&available| available > 0);
        let limit = available.unwrap_or(u64::MAX).min(limit.unwrap_or(u64::MAX));
        Arc::new(MemoryBudget { taken: AtomicU64::new(0), limit: AtomicU64::new(limit), is_shared })
    }

    /// Takes bytes, or returns an out-of-memory error.
    pub(super) fn take(self: &Arc<Self>, what: &str, bytes: u64) -> Result<Reservation, GpuError> {
        let limit = self.limit.load(Ordering::Relaxed);
        let added = |taken: u64| taken.checked_add(bytes).filter(|&taken| taken <= limit);
        match self.taken.fetch_update(Ordering::Relaxed, Ordering::Relaxed, added) {
            Ok(_) => Ok(Reservation { memory_budget: Arc::clone(self), bytes }),
            Err(taken) => Err(GpuError::OutOfMemory {
                what: format!("{what}: {} beside {} of {}", Bytes(bytes), Bytes(taken), Bytes(limit)),
            }),
        }
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.memory_budget.taken.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

impl Gpu {
    /// Returns the bytes taken.
    pub fn memory_used(&self) -> u64 {
        self.memory_budget.taken.load(Ordering::Relaxed)
    }

    /// Returns the bytes that may be taken, if a limit is known.
    pub fn memory_limit(&self) -> Option<u64> {
        Some(self.memory_budget.limit.load(Ordering::Relaxed)).filter(|&limit| limit < u64::MAX)
    }

    /// Takes what processors need of the memory that they share with this GPU, so that nothing is promised it twice. Of
    /// a GPU with memory of its own nothing.
    pub(crate) fn reserve_shared(&self, what: &str, bytes: u64) -> Result<Option<Reservation>, GpuError> {
        self.memory_budget.is_shared.then(|| self.memory_budget.take(what, bytes)).transpose()
    }

    /// Limits the bytes that may be taken from now on, as if other programs had taken the rest.
    pub fn set_memory_limit(&self, limit: u64) {
        self.memory_budget.limit.store(limit, Ordering::Relaxed);
    }
}
