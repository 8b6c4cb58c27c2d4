//! Weight residency: reads the weights of a device ahead of their use, in parallel with the computation.
//!
//! [`WeightResidency`] implements the policies of a plan: [`read_ahead`] advises or populates the next window and
//! leaves eviction to the system; [`managed_policy`] keeps a set of pieces in memory and streams the others. The computation
//! waits at a [`ResidencyBarrier`].
//!
//! Not here: when a part is requested and released ([`hearth_core::schedule`]), and which piece of a managed share is
//! read and evicted next ([`hearth_core::residency`]).

mod barrier;
mod helper;
pub mod managed_policy;
mod pieces;
pub mod read_ahead;
#[cfg(test)]
mod tests;

use std::ops::Deref;
use std::sync::Arc;

use hearth_core::residency::ReadOrigin;
use hearth_core::schedule::ModelPart;
use hearth_schema::Plan;
use hearth_schema::residency::Residency;

use crate::memory::MemoryReading;
use crate::pages::{self, Advice};
use crate::weights::{Extent, Weights};

pub use barrier::ResidencyBarrier;
use managed_policy::{MAX_WAIT, ManagedResidencyPolicy};
use read_ahead::ReadAheadPolicy;

/// The policy by which the weights of a device are read ahead of their use and evicted after it.
pub struct WeightResidency(Box<dyn ResidencyPolicy>);

impl Deref for WeightResidency {
    type Target = dyn ResidencyPolicy;

    fn deref(&self) -> &Self::Target {
        &*self.0
    }
}

/// Reads weights ahead of their use and evicts them after it. With the default methods, weights are read when they are
/// touched.
pub trait ResidencyPolicy: Send + Sync {
    /// Returns the barrier at which the computation waits.
    fn barrier(&self) -> ResidencyBarrier {
        ResidencyBarrier::always_open()
    }

    /// Requests that a part be read, after the parts that were requested earlier. Returns immediately.
    fn prefetch(&self, _part: ModelPart, _at: StepId) {}

    /// Reserves `bytes` of memory that the run is about to use.
    fn reserve(&self, _bytes: u64) {}

    /// Begins the computation of a part.
    fn begin(&self, _part: &ModelPart, _at: StepId) {}

    /// Releases a part after its use, so that it may be evicted.
    fn release(&self, _part: ModelPart) {}

    /// Evicts the pages of the embedding rows of `tokens` after the lookup, under managed residency.
    fn release_embedding_rows(&self, _weights: &Weights, _tokens: &[u32]) {}

    /// Cancels all requested reads and deletes the recorded spans.
    fn reset(&self) {}

    /// Returns the spans of reading since the last call.
    fn take_spans(&self) -> Vec<ReadSpan> {
        Vec::new()
    }

    /// Returns the total bytes of weights that have been read ahead.
    fn bytes_read(&self) -> u64 {
        0
    }

    /// Returns the bytes of weights that were missing when the computation needed them, since the last call.
    fn take_awaited(&self) -> u64 {
        0
    }
}

/// The policy that reads nothing ahead: weights are read by page faults.
struct OnDemand;

impl ResidencyPolicy for OnDemand {}

/// The pass and round of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StepId {
    pub pass: u32,
    pub round: u32,
}

/// A span of time in which a part was read ahead.
#[derive(Debug, Clone)]
pub struct ReadSpan {
    /// The pass and round of the request, and the layers of the part.
    pub origin: ReadOrigin,
    /// The time at which the first piece was requested, in nanoseconds of [`crate::clock::monotonic_nanos`].
    pub start: u64,
    /// The time at which the last piece arrived, on the same clock.
    pub end: u64,
    /// Bytes that were not in memory when they were requested.
    pub bytes: u64,
}

impl ReadSpan {
    fn starting(origin: ReadOrigin, start: u64) -> Self {
        Self { origin, start, end: start, bytes: 0 }
    }
}

/// Returns the origin, for a trace, of the reads of a part; the layers are `None` for the output layer.
fn origin_of(part: &ModelPart, at: StepId) -> ReadOrigin {
    let layers = match part {
        ModelPart::Layers(layers) => Some([layers.start, layers.end]),
        ModelPart::Output => None,
    };
    ReadOrigin { pass: at.pass, round: at.round, layers }
}

impl WeightResidency {
    /// Starts the policy of the device with this index in the plan. `memory` measures the available page cache and
    /// the refaults of this process.
    pub fn start(
        weights: &Arc<Weights>,
        plan: &Plan,
        device: usize,
        memory: impl Fn() -> MemoryReading + Send + 'static,
    ) -> Self {
        let options = plan.devices[device].residency;
        if let Some(table) = weights.untied_embedding_extent().and_then(|table| weights.mapped_bytes(table)) {
            pages::advise(table, Advice::Random);
        }
        let policy: Box<dyn ResidencyPolicy> = match options.policy {
            Residency::Managed if cfg!(any(target_os = "android", target_os = "linux")) => {
                Box::new(ManagedResidencyPolicy::start(weights.clone(), plan, device, memory, MAX_WAIT))
            }
            Residency::Os | Residency::Windowed if options.prefetches() || options.evicts_after_use() => {
                Box::new(ReadAheadPolicy::start(weights.clone(), options))
            }
            // Systems other than Linux neither report which pages are in memory nor read pages on request. Plans with
            // policies that are only simulated are refused earlier.
            _ => Box::new(OnDemand),
        };
        WeightResidency(policy)
    }
}

fn evict(weights: &Weights, extent: Extent) {
    if let Some((bytes, file)) = weights.mapped_bytes(extent).zip(weights.file(extent)) {
        pages::evict(bytes, file, extent.offset);
    }
}

/// Whether the system reports which pages of a model's files are in memory.
pub fn is_residency_known(weights: &Weights) -> bool {
    weights.files().iter().all(pages::is_residency_reported)
}

/// Returns the bytes of a part's weights that are in memory, in whole pages.
pub fn resident_bytes(weights: &Weights, part: &ModelPart) -> u64 {
    weights
        .part_extents(part)
        .into_iter()
        .filter_map(|extent| weights.mapped_bytes(extent))
        .map(pages::resident_bytes)
        .sum()
}
