//! Weight residency: reads the weights of a device ahead of their use, in parallel with the computation.
//!
//! [`WeightResidency`] implements the policies of a plan: [`read_ahead`] advises or populates the next window and
//! leaves eviction to the system; [`managed`] keeps a set of pieces in memory and streams the others. The computation
//! waits at a [`ResidencyBarrier`].
//!
//! Not here: when a part is requested and released ([`hearth_core::schedule`]), and which piece of a managed share is
//! read and evicted next ([`hearth_core::residency`]).

mod barrier;
mod helper;
pub mod managed;
mod pieces;
pub mod read_ahead;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use hearth_core::residency::ReadOrigin;
use hearth_core::schedule::ModelPart;
use hearth_schema::Plan;
use hearth_schema::residency::Residency;

use crate::memory::MemoryReading;
use crate::pages::{self, page_bytes};
use crate::weights::{Extent, Weights};

pub use barrier::ResidencyBarrier;
use managed::{MAX_WAIT, ManagedStream};
use read_ahead::ReadAhead;

/// The policy by which the weights of a device are read ahead of their use and evicted after it.
pub enum WeightResidency {
    /// Weights are read when they are touched.
    OnDemand,
    /// Weights are read ahead; the operating system decides which of them stay in memory.
    System(ReadAhead),
    /// This process keeps a set of pieces and streams the rest.
    Managed(ManagedStream),
}

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
    /// The time at which the first piece was requested, in nanoseconds of [`crate::clock::wall_nanos`].
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

/// Returns the origin of the reads of a part for a trace; its layers are `None` for the output layer.
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
        if let Some(table) = weights.untied_embedding_extent().and_then(|table| weights.bytes(table)) {
            pages::advise_random(table);
        }
        match options.policy {
            // Other systems neither report which pages are in memory nor read pages on request.
            Residency::Managed if cfg!(not(any(target_os = "android", target_os = "linux"))) => {
                WeightResidency::OnDemand
            }
            Residency::Managed => WeightResidency::Managed(ManagedStream::start(
                weights.clone(),
                plan,
                device,
                memory,
                MAX_WAIT,
            )),
            Residency::Os | Residency::Windowed if options.prefetches() || options.releases() => {
                WeightResidency::System(ReadAhead::start(weights.clone(), options))
            }
            // Plans with policies that are only simulated are refused earlier.
            Residency::Os | Residency::Windowed | Residency::Pinned | Residency::Sliding => {
                WeightResidency::OnDemand
            }
        }
    }

    /// Returns the barrier at which the computation waits.
    pub fn barrier(&self) -> ResidencyBarrier {
        match self {
            WeightResidency::OnDemand | WeightResidency::System(_) => ResidencyBarrier::open(),
            WeightResidency::Managed(stream) => stream.barrier(),
        }
    }

    /// Reads a part ahead if the policy allows it.
    pub fn prefetch(&self, part: ModelPart, at: StepId) {
        match self {
            WeightResidency::OnDemand => {}
            WeightResidency::System(reader) => reader.request(part, at),
            WeightResidency::Managed(stream) => stream.request(&part, at),
        }
    }

    /// Reserves `bytes` of memory that the run is about to use.
    pub fn reserve(&self, bytes: u64) {
        if let WeightResidency::Managed(stream) = self {
            stream.reserve(bytes);
        }
    }

    /// Begins the computation of a part.
    pub fn begin(&self, part: &ModelPart, at: StepId) {
        if let WeightResidency::Managed(stream) = self {
            stream.begin(part, at);
        }
    }

    /// Releases a part after its use.
    pub fn release(&self, part: ModelPart) {
        match self {
            WeightResidency::OnDemand => {}
            WeightResidency::System(reader) => reader.release(part),
            WeightResidency::Managed(stream) => stream.finish(&part),
        }
    }

    /// Evicts the pages of the embedding rows of `tokens` after the lookup, under managed residency. These pages do
    /// not belong to a piece.
    pub fn release_embedding_rows(&self, weights: &Weights, tokens: &[u32]) {
        if let WeightResidency::Managed(_) = self {
            let page = page_bytes() as u64;
            for Extent { part, offset, length } in weights.embedding_rows(tokens) {
                let (begin, end) = (offset / page * page, (offset + length).next_multiple_of(page));
                evict(weights, Extent { part, offset: begin, length: end - begin });
            }
        }
    }

    /// Cancels all requested reads and deletes the recorded spans.
    pub fn reset(&self) {
        match self {
            WeightResidency::OnDemand => {}
            WeightResidency::System(reader) => reader.reset(),
            WeightResidency::Managed(stream) => stream.reset(),
        }
    }

    /// Returns the spans of reading since the last call.
    pub fn take_spans(&self) -> Vec<ReadSpan> {
        match self {
            WeightResidency::OnDemand => Vec::new(),
            WeightResidency::System(reader) => reader.take_spans(),
            WeightResidency::Managed(stream) => stream.take_spans(),
        }
    }

    /// Returns the total bytes that have been read ahead.
    pub fn bytes_read(&self) -> u64 {
        match self {
            WeightResidency::OnDemand => 0,
            WeightResidency::System(reader) => reader.bytes_read(),
            WeightResidency::Managed(stream) => stream.bytes_read(),
        }
    }

    /// Returns the bytes for which the computation has waited, since the last call.
    pub fn take_awaited(&self) -> u64 {
        match self {
            WeightResidency::OnDemand | WeightResidency::System(_) => 0,
            WeightResidency::Managed(stream) => stream.take_awaited(),
        }
    }
}

fn evict(weights: &Weights, extent: Extent) {
    if let Some((bytes, file)) = weights.bytes(extent).zip(weights.file(extent)) {
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
        .filter_map(|extent| weights.bytes(extent))
        .map(pages::resident_bytes)
        .sum()
}
