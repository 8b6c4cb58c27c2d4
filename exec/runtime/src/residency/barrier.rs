//! Residency barrier: blocks a computation until the weights that it is about to use are in memory.
//!
//! With managed residency, a computation waits at the barrier before it uses weights, instead of taking page faults,
//! and reports when it has used them. With all other policies the barrier is open.

use std::sync::Arc;

use super::managed::Shared;

/// The barrier at which a computation waits for its weights.
#[derive(Debug, Clone, Default)]
pub struct ResidencyBarrier {
    shared: Option<Arc<Shared>>,
}

impl ResidencyBarrier {
    /// Creates an open barrier, at which nothing waits.
    pub fn open() -> Self {
        Self::default()
    }

    /// Whether the barrier is open.
    pub fn is_open(&self) -> bool {
        self.shared.is_none()
    }

    pub(super) fn new(shared: Arc<Shared>) -> Self {
        Self { shared: Some(shared) }
    }

    /// Returns how many of these mapped bytes, from the front, are in memory now; possibly none.
    pub fn ready_bytes(&self, bytes: &[u8]) -> usize {
        self.shared.as_ref().map_or(bytes.len(), |shared| shared.ready_bytes(bytes))
    }

    /// Waits until at least `min` of these mapped bytes, from the front, are in memory. Returns how many are.
    pub fn wait(&self, bytes: &[u8], min: usize) -> usize {
        self.shared.as_ref().map_or(bytes.len(), |shared| shared.wait(bytes, min))
    }

    /// Reports that these mapped bytes, and all weights before them in their part, have been used.
    pub fn mark_used(&self, bytes: &[u8]) {
        if let Some(shared) = &self.shared {
            shared.mark_used(bytes);
        }
    }
}
