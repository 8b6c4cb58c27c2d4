//! Which of the weights that a computation is about to use are in memory?
//!
//! A computation under managed residency never faults: it asks before it uses weights, waits until they are there,
//! and says when it has used them. An open gate, for all other policies, lets everything pass.

use std::sync::Arc;

use super::stream::Core;

/// Between a computation and its weights.
#[derive(Debug, Clone, Default)]
pub struct Gate {
    core: Option<Arc<Core>>,
}

impl Gate {
    /// Weights are used without asking.
    pub fn open() -> Gate {
        Gate::default()
    }

    /// Whether nobody is asked.
    pub fn is_open(&self) -> bool {
        self.core.is_none()
    }

    pub(super) fn at(core: Arc<Core>) -> Gate {
        Gate { core: Some(core) }
    }

    /// How many of these mapped bytes, from the front, can be used now; possibly none.
    pub fn ready(&self, bytes: &[u8]) -> usize {
        self.core.as_ref().map_or(bytes.len(), |core| core.ready(bytes))
    }

    /// The same, after waiting until it is at least `least`.
    pub fn wait(&self, bytes: &[u8], least: usize) -> usize {
        self.core.as_ref().map_or(bytes.len(), |core| core.wait(bytes, least))
    }

    /// These mapped bytes have been used. Those before them in their matrix were used before.
    pub fn used(&self, bytes: &[u8]) {
        if let Some(core) = &self.core {
            core.used(bytes);
        }
    }
}
