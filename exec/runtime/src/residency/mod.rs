//! How does a device keep its weights in memory, or bring them there before they are needed?
//!
//! A [`Keeper`] carries out one of the plan's policies beside the computation: [`ahead`] advises or populates
//! the next window and leaves the rest to the system, [`stream`] keeps a set of pieces and streams the others.
//! [`Gate`] is what the computation sees of it.
//!
//! Not here: when a part is asked for and given up, which the schedule says, and what is kept of a share that
//! does not fit (`hearth_schema::residency`).

pub mod ahead;
mod gate;
mod helper;
mod pieces;
pub mod stream;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use hearth_core::schedule::ModelPart;
use hearth_schema::Plan;
use hearth_schema::residency::Residency;

use crate::memory::Told;
use crate::pages::{self, page_bytes};
use crate::weights::{Extent, Weights};

use ahead::Prefetcher;
pub use gate::Gate;
use stream::Stream;

/// Reads a device's weights ahead of their turn, and gives them up behind it.
pub enum Keeper {
    /// Nothing is done: the computation faults in what it misses.
    Faults,
    /// The system decides what stays.
    Ahead(Prefetcher),
    /// The device decides.
    Managed(Stream),
}

/// The step being recorded: its pass and round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct At {
    /// Pass index.
    pub pass: u32,
    /// Round.
    pub round: u32,
}

/// A stretch of reading ahead.
#[derive(Debug, Clone)]
pub struct Span {
    /// After which pass and round it was asked for.
    pub at: At,
    /// Which layers.
    pub layers: Option<[u32; 2]>,
    /// When the first piece was asked for.
    pub start: u64,
    /// When the last one was there.
    pub end: u64,
    /// Bytes that were not in memory when they were asked for.
    pub bytes: u64,
}

impl Span {
    /// One that begins.
    fn of(part: &ModelPart, at: At, start: u64) -> Span {
        let layers = match part {
            ModelPart::Layers(layers) => Some([layers.start, layers.end]),
            ModelPart::Output => None,
        };
        Span { at, layers, start, end: start, bytes: 0 }
    }
}

impl Keeper {
    /// What the plan says for the device at a place. `memory` tells how much page cache this process may hold, and what
    /// was taken from it all the same.
    pub fn start(
        weights: &Arc<Weights>,
        plan: &Plan,
        place: usize,
        memory: impl Fn() -> Told + Send + 'static,
    ) -> Self {
        let options = plan.devices[place].residency;
        if let Some(table) = weights.embedding_alone().and_then(|table| weights.bytes(table)) {
            pages::expect_no_order(table);
        }
        match options.policy {
            // Elsewhere pages can be neither looked at nor asked for, and the system keeps what it likes.
            Residency::Managed if cfg!(not(any(target_os = "android", target_os = "linux"))) => {
                Keeper::Faults
            }
            Residency::Managed => Keeper::Managed(Stream::start(weights.clone(), plan, place, memory)),
            Residency::Os | Residency::Windowed if options.prefetches() || options.releases() => {
                Keeper::Ahead(Prefetcher::start(weights.clone(), options))
            }
            // `only_simulated` plans come no further than their refusal.
            Residency::Os | Residency::Windowed | Residency::Pinned | Residency::Sliding => Keeper::Faults,
        }
    }

    /// What the computation is to wait at.
    pub fn gate(&self) -> Gate {
        match self {
            Keeper::Faults | Keeper::Ahead(_) => Gate::open(),
            Keeper::Managed(stream) => stream.gate(),
        }
    }

    /// A part will be needed: it is read as far as the policy allows.
    pub fn prefetch(&self, part: ModelPart, at: At) {
        match self {
            Keeper::Faults => {}
            Keeper::Ahead(prefetcher) => prefetcher.request(part, at),
            Keeper::Managed(stream) => stream.announce(&part, at),
        }
    }

    /// The run is about to take so much memory for itself.
    pub fn reserve(&self, bytes: u64) {
        if let Keeper::Managed(stream) = self {
            stream.reserve(bytes);
        }
    }

    /// A part is needed now.
    pub fn begin(&self, part: &ModelPart, at: At) {
        if let Keeper::Managed(stream) = self {
            stream.begin(part, at);
        }
    }

    /// A part has been used.
    pub fn release(&self, part: ModelPart) {
        match self {
            Keeper::Faults => {}
            Keeper::Ahead(prefetcher) => prefetcher.release(part),
            Keeper::Managed(stream) => stream.finish(&part),
        }
    }

    /// Embedding rows have been looked up. They are no pieces, so a device that counts its bytes gives up their
    /// pages at once.
    pub fn embedded(&self, weights: &Weights, tokens: &[u32]) {
        if let Keeper::Managed(_) = self {
            let page = page_bytes() as u64;
            for Extent { part, offset, length } in weights.embedding_rows(tokens) {
                let (begin, end) = (offset / page * page, (offset + length).next_multiple_of(page));
                give_up(weights, Extent { part, offset: begin, length: end - begin });
            }
        }
    }

    /// Forgets what was done for the request before.
    pub fn reset(&self) {
        match self {
            Keeper::Faults => {}
            Keeper::Ahead(prefetcher) => prefetcher.reset(),
            Keeper::Managed(stream) => stream.reset(),
        }
    }

    /// What was read since the last call.
    pub fn take_spans(&self) -> Vec<Span> {
        match self {
            Keeper::Faults => Vec::new(),
            Keeper::Ahead(prefetcher) => prefetcher.take_spans(),
            Keeper::Managed(stream) => stream.take_spans(),
        }
    }

    /// Bytes that have been read ahead so far.
    pub fn bytes_read(&self) -> u64 {
        match self {
            Keeper::Faults => 0,
            Keeper::Ahead(prefetcher) => prefetcher.bytes_read(),
            Keeper::Managed(stream) => stream.bytes_read(),
        }
    }

    /// Bytes that the computation has waited for since the last call.
    pub fn take_awaited(&self) -> u64 {
        match self {
            Keeper::Faults | Keeper::Ahead(_) => 0,
            Keeper::Managed(stream) => stream.take_awaited(),
        }
    }
}

/// Gives up the whole pages inside an extent.
fn give_up(weights: &Weights, extent: Extent) {
    if let Some((bytes, file)) = weights.bytes(extent).zip(weights.file(extent)) {
        pages::give_up(bytes, file, extent.offset);
    }
}

/// Whether the system tells of all of a model's files what of them is in memory.
pub fn is_told(weights: &Weights) -> bool {
    weights.files().iter().all(pages::is_told)
}

/// Bytes of a part's weights that are in memory, in whole pages.
pub fn resident_bytes(weights: &Weights, part: &ModelPart) -> u64 {
    weights
        .part_extents(part)
        .into_iter()
        .filter_map(|extent| weights.bytes(extent))
        .map(pages::resident)
        .sum()
}
