//! Residency barrier: makes a computation wait until the weights that it is about to use are in memory.
//!
//! Under managed residency a computation does not fault: it waits at the barrier before it uses weights, and reports
//! when it has used them. Under all other policies the barrier is open.

use std::sync::Arc;

use super::managed::Shared;

/// The barrier between a computation and its weights.
#[derive(Debug, Clone, Default)]
pub struct ResidencyBarrier {
    shared: Option<Arc<Shared>>,
}

impl ResidencyBarrier {
    /// A barrier that lets everything pass.
    pub fn open() -> Self {
        Self::default()
    }

    /// Whether everything passes.
    pub fn is_open(&self) -> bool {
        self.shared.is_none()
    }

    pub(super) fn new(shared: Arc<Shared>) -> Self {
        Self { shared: Some(shared) }
    }

    /// Returns how many of these mapped bytes, from the front, can be used now; possibly none.
    pub fn ready(&self, bytes: &[u8]) -> usize {
        self.shared.as_ref().map_or(bytes.len(), |shared| shared.ready(bytes))
    }

    /// Waits until `min` of these mapped bytes, from the front, can be used. Returns how many can.
    pub fn wait(&self, bytes: &[u8], min: usize) -> usize {
        self.shared.as_ref().map_or(bytes.len(), |shared| shared.wait(bytes, min))
    }

    /// Reports that these mapped bytes, and all weights of their part before them, have been used.
    pub fn used(&self, bytes: &[u8]) {
        if let Some(shared) = &self.shared {
            shared.used(bytes);
        }
    }
}
