//! The experts of a device with managed residency: reads those that a batch uses, and evicts others.
//!
//! The compute threads start the reads of all missing experts of a group at once, so that the disk has several to read,
//! compute the experts that are in memory, and then wait for the others. The helper thread evicts.
//!
//! Not here: which experts stay ([`hearth_core::residency::ExpertResidency`]).

use std::sync::PoisonError;

use hearth_core::expert_cache::ExpertId;
use hearth_core::residency::ExpertResidency;
use hearth_core::schedule::{ModelPart, parts_by_busy_period};
use hearth_profiles::measure::mapping::page_bytes;
use hearth_schema::Plan;

use super::ReadSpan;
use super::barrier::{ResidencyBarrier, SharedResidency, State};
use crate::clock::monotonic_nanos;
use crate::pages::{cpu_count, populate, read_ahead, resident_bytes};
use crate::pool::ThreadPool;
use crate::read_counter::ReadCounter;
use crate::weights::{Extent, Weights};

/// Creates the state of the experts of the device with the index `device` in the plan; `None` if it has none.
pub(super) fn expert_residency(weights: &Weights, plan: &Plan, device: usize) -> Option<ExpertResidency> {
    let shape = weights.shape().experts?;
    let mut bytes = vec![0; weights.shape().layers.0 as usize];
    for part in parts_by_busy_period(plan, device).into_iter().flatten() {
        let ModelPart::Layers(layers) = part else { continue };
        for layer in layers {
            bytes[layer as usize] = weights.expert_bytes(layer);
        }
    }
    let options = plan.devices[device].residency;
    bytes.iter().any(|bytes| *bytes > 0).then(|| ExpertResidency::new(bytes, &shape, options, cpu_count()))
}

/// The experts of a layer that are computed together.
#[derive(Debug)]
pub struct ExpertGroup {
    layer: u32,
    /// Whether the group is the first one of a batch.
    is_first: bool,
    experts: Vec<u32>,
    /// The experts that are being read.
    missing: Vec<u32>,
}

impl ExpertGroup {
    pub fn new(layer: u32, experts: Vec<u32>, is_first: bool) -> Self {
        Self { layer, is_first, experts, missing: Vec::new() }
    }

    pub fn is_missing(&self, expert: u32) -> bool {
        self.missing.contains(&expert)
    }
}

impl ResidencyBarrier {
    /// Returns how many experts of a layer may be requested together.
    pub fn experts_per_group(&self) -> usize {
        let limit = |shared: &SharedResidency| Some(shared.lock().experts.as_ref()?.experts_per_group());
        self.shared.as_deref().and_then(limit).unwrap_or(usize::MAX)
    }

    /// Requests the experts of a group, and starts to read those that are not in memory, on all threads.
    pub fn request_experts(&self, group: &mut ExpertGroup, threads: &ThreadPool) {
        let Some(shared) = self.shared.as_deref() else { return };
        let missing = shared.request_experts(group);
        if missing.is_empty() {
            return;
        }
        let (start, layer) = (monotonic_nanos(), group.layer);
        let extents = missing.iter().flat_map(|&expert| shared.expert_extents((layer, expert)));
        let mut reads: Vec<(Extent, u64)> = extents.map(|extent| (extent, 0)).collect();
        threads.for_each_chunk_mut(&mut reads, 1, |_, reads| {
            for (extent, bytes) in reads {
                *bytes = shared.start_reading(*extent);
            }
        });
        let bytes = reads.iter().map(|(_, bytes)| bytes).sum::<u64>();
        if bytes > 0 {
            shared.lock().record_expert_read(start, bytes);
        }
        group.missing = missing;
    }

    /// Waits until an expert of a group is in memory.
    pub fn wait_for_expert(&self, group: &ExpertGroup, expert: u32, threads: &ThreadPool) {
        let Some(shared) = self.shared.as_deref().filter(|_| group.is_missing(expert)) else { return };
        let mut extents: Vec<Extent> = shared.expert_extents((group.layer, expert)).collect();
        threads.for_each_chunk_mut(&mut extents, 1, |_, extents| {
            for extent in extents {
                shared.weights.mapped_bytes(*extent).map(populate);
            }
        });
        if let Some(span) = &mut shared.lock().expert_span {
            span.end_ns = monotonic_nanos();
        }
    }

    /// Releases the experts of a group after their use.
    pub fn release_experts(&self, group: &ExpertGroup) {
        let Some(shared) = self.shared.as_deref() else { return };
        let mut state = shared.lock();
        let Some(experts) = &mut state.experts else { return };
        if experts.release(group.layer, &group.experts) {
            shared.work_available.notify_one();
        }
    }
}

impl State {
    fn record_expert_read(&mut self, start_ns: u64, bytes: u64) {
        self.awaited_bytes += bytes;
        self.expert_bytes_read += bytes;
        let Some(origin) = self.computed else { return };
        let finished = self.expert_span.take_if(|span| span.origin != origin);
        self.completed_spans.extend(finished);
        self.expert_span.get_or_insert(ReadSpan::starting(origin, start_ns)).bytes += bytes;
    }

    /// Removes an expert that has to be evicted, and returns the extents of its pages that no cached expert uses.
    /// [`State::evicted_expert`] is set until they have been evicted.
    pub(super) fn next_evictable_expert(&mut self, weights: &Weights) -> Option<Vec<Extent>> {
        let experts = self.experts.as_mut()?;
        let (layer, expert) = experts.next_evictable()?;
        self.evicted_expert = Some((layer, expert));
        let page = page_bytes() as u64;
        let is_free = |expert: u32| !experts.is_cached((layer, expert));
        // Two experts share a page, which would stay in memory if each left it to the other.
        let widen = |(own, all): (Extent, Extent)| {
            let (mut begin, mut end) = (own.offset, own.offset + own.length);
            if own.length >= page && begin > all.offset && is_free(expert - 1) {
                begin = begin / page * page;
            }
            if own.length >= page && end < all.offset + all.length && is_free(expert + 1) {
                end = end.next_multiple_of(page);
            }
            Extent { offset: begin, length: end - begin, ..own }
        };
        Some(weights.expert_extents(layer, expert).map(widen).collect())
    }
}

impl SharedResidency {
    /// Returns the experts of a group that are probably not in memory.
    fn request_experts(&self, group: &ExpertGroup) -> Vec<u32> {
        let mut state = self.lock();
        let Some(experts) = &mut state.experts else { return Vec::new() };
        let requested = experts.request(group.layer, &group.experts, group.is_first);
        let evicted = |state: &State| {
            let own = state.evicted_expert.filter(|(layer, _)| *layer == group.layer);
            own.is_some_and(|(_, expert)| requested.contains(&expert)) && !state.ended
        };
        // Until it has been evicted, its pages seem to be in memory.
        while evicted(&state) {
            let (next, wait) =
                self.arrived.wait_timeout(state, self.max_wait).unwrap_or_else(PoisonError::into_inner);
            state = next;
            if wait.timed_out() {
                break;
            }
        }
        if !state.has_lost_experts {
            return requested;
        }
        drop(state);
        // After a loss, cached experts may be missing too. Otherwise their pages are not looked at, which takes almost as
        // long as starting to read them.
        let is_missing =
            |expert: &u32| requested.contains(expert) || !self.is_resident((group.layer, *expert));
        group.experts.iter().copied().filter(is_missing).collect()
    }

    fn expert_extents(&self, (layer, expert): ExpertId) -> impl Iterator<Item = Extent> + use<> {
        self.weights.expert_extents(layer, expert).map(|(own, _)| own)
    }

    /// Returns whether the system reports that all pages of an expert are in memory.
    fn is_resident(&self, id: ExpertId) -> bool {
        let mut regions = self.expert_extents(id).filter_map(|extent| self.weights.mapped_bytes(extent));
        self.is_residency_known && regions.all(|region| resident_bytes(region) == region.len() as u64)
    }

    /// Starts to read a matrix. Returns how many bytes are read, because they were not in memory.
    fn start_reading(&self, extent: Extent) -> u64 {
        thread_local! {
            static COUNTER: ReadCounter = ReadCounter::for_current_thread();
        }
        let Some(region) = self.weights.mapped_bytes(extent) else { return 0 };
        COUNTER.with(|counter| {
            let before = counter.bytes_read();
            read_ahead(region);
            counter.bytes_read().saturating_sub(before)
        })
    }
}
