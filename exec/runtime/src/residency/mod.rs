//! Weight residency: reads the weights of a device ahead of their use, in parallel with the computation.
//!
//! [`WeightResidency`] implements the residency policies of a plan: [`read_ahead`] reads the next window and leaves
//! eviction to the system; [`managed_policy`] keeps a set of pieces in memory and streams the other pieces. The
//! computation waits for weights at a [`ResidencyBarrier`].
//!
//! Not here: when a part of the model is requested and released ([`hearth_core::schedule`]), and which piece a managed
//! policy reads and evicts next ([`hearth_core::residency`]).

mod barrier;
mod expert_memory;
mod experts;
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
use hearth_profiles::measure::mapping::{Advice, advise};
use hearth_schema::Plan;
use hearth_schema::residency::Residency;

use crate::memory::MemoryReading;
use crate::pages;
use crate::weights::Weights;

pub use barrier::ResidencyBarrier;
pub use experts::ExpertGroup;
use managed_policy::{MAX_WAIT, ManagedResidencyPolicy};
use read_ahead::ReadAheadPolicy;

/// The running residency policy of a device, which reads weights ahead of their use and evicts them after it.
pub struct WeightResidency(Box<dyn ResidencyPolicy>);

impl Deref for WeightResidency {
    type Target = dyn ResidencyPolicy;

    fn deref(&self) -> &Self::Target {
        &*self.0
    }
}

/// Reads weights ahead of their use and evicts them. With the default methods, page faults read the weights.
pub trait ResidencyPolicy: Send + Sync {
    /// Returns the barrier at which the computation waits for weights.
    fn barrier(&self) -> ResidencyBarrier {
        ResidencyBarrier::always_open()
    }

    /// Requests that a part of the model be read after the parts that were requested earlier. Returns immediately.
    fn prefetch(&self, _part: ModelPart, _at: StepId) {}

    /// Reserves `bytes` bytes of memory that the run is about to use.
    fn reserve(&self, _bytes: u64) {}

    /// Reports that the computation of a part of the model begins.
    fn begin(&self, _part: &ModelPart, _at: StepId) {}

    /// Releases a part of the model after its use, so that its weights may be evicted.
    fn release(&self, _part: ModelPart) {}

    /// Evicts the pages of the embedding rows of `tokens` after the lookup, if the policy manages them.
    fn release_embedding_rows(&self, _weights: &Weights, _tokens: &[u32]) {}

    /// Returns the bytes of weights that are in memory of the process, and not in the page cache.
    fn buffer_bytes(&self) -> u64 {
        0
    }

    /// Cancels all requested reads and deletes the recorded read spans.
    fn reset(&self) {}

    /// Returns the read spans that were recorded since the last call.
    fn take_spans(&self) -> Vec<ReadSpan> {
        Vec::new()
    }

    /// Returns the total bytes of weights that have been read ahead.
    fn bytes_read(&self) -> u64 {
        0
    }

    /// Returns the bytes of weights that were not in memory when the computation needed them, since the last call.
    fn take_awaited_bytes(&self) -> u64 {
        0
    }
}

/// The policy that reads nothing ahead: weights are read by page faults.
struct OnDemand;

impl ResidencyPolicy for OnDemand {}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StepId {
    pub pass: u32,
    pub round: u32,
}

/// A span of time in which a part of the model was read ahead.
#[derive(Debug, Clone)]
pub struct ReadSpan {
    /// The pass and round of the read request, and the layers of the part.
    pub origin: ReadOrigin,
    /// The time at which the first piece was requested, as a value of [`crate::clock::monotonic_nanos`].
    pub start_ns: u64,
    /// The time at which the last piece arrived, as a value of [`crate::clock::monotonic_nanos`].
    pub end_ns: u64,
    /// Bytes of the part that were not in memory when they were requested.
    pub bytes: u64,
}

impl ReadSpan {
    fn starting(origin: ReadOrigin, start_ns: u64) -> Self {
        Self { origin, start_ns, end_ns: start_ns, bytes: 0 }
    }
}

/// Returns the origin of the reads of a part, for a trace; its layers are `None` for the output layer.
fn origin_of(part: &ModelPart, at: StepId) -> ReadOrigin {
    let layers = match part {
        ModelPart::Layers(layers) => Some([layers.start, layers.end]),
        ModelPart::Output => None,
    };
    ReadOrigin { pass: at.pass, round: at.round, layers }
}

impl WeightResidency {
    /// Starts the policy of the device with the index `device` in the plan. `memory` measures the available page cache
    /// and the refaults of this process.
    pub fn start(
        weights: &Arc<Weights>,
        plan: &Plan,
        device: usize,
        memory: impl Fn() -> MemoryReading + Send + 'static,
    ) -> Self {
        let options = plan.devices[device].residency;
        for table in weights.row_table_extents().filter_map(|table| weights.mapped_bytes(table)) {
            // Without the advice, the kernel reads more than the rows.
            let _ = advise(table, Advice::Random);
        }
        let policy: Box<dyn ResidencyPolicy> = match options.policy {
            Residency::Managed if cfg!(any(target_os = "android", target_os = "linux")) => {
                Box::new(ManagedResidencyPolicy::start(weights.clone(), plan, device, memory, MAX_WAIT))
            }
            // Which experts a token uses is known only after the router has chosen, so nothing is read ahead.
            _ if weights.shape().experts.is_some() => Box::new(OnDemand),
            Residency::Os | Residency::Windowed if options.prefetches() || options.evicts_after_use() => {
                Box::new(ReadAheadPolicy::start(weights.clone(), options))
            }
            // Systems other than Linux neither report which pages are in memory nor read pages on request. Plans with
            // policies that are only simulated are rejected earlier.
            _ => Box::new(OnDemand),
        };
        WeightResidency(policy)
    }
}

/// Returns whether the system reports which pages of the model files are in memory.
pub fn is_residency_known(weights: &Weights) -> bool {
    weights.files().all(pages::is_residency_reported)
}

/// Returns the number of bytes of a part's weights that are in the page cache, counted in whole pages.
pub fn resident_bytes(weights: &Weights, part: &ModelPart) -> u64 {
    weights
        .part_extents(part)
        .into_iter()
        .filter_map(|extent| weights.mapped_bytes(extent))
        .map(pages::resident_bytes)
        .sum()
}
