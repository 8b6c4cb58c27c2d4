//! The experts of a device with managed residency: reads those that a batch uses, and evicts others.
//!
//! Experts are read past the page cache into buffers ([`super::expert_memory`]). The computation requests all
//! missing experts of a group at once, so that the disk has several to read, computes those in memory, and then waits for
//! the others. Threads that do nothing else read and evict.
//!
//! Not here: which experts stay ([`hearth_core::residency::ExpertResidency`]).

use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::Duration;

use hearth_core::expert_cache::ExpertId;
use hearth_core::residency::ExpertResidency;
use hearth_core::schedule::{ModelPart, parts_by_busy_period};
use hearth_profiles::measure::direct::{DirectFile, PageBuffer};
use hearth_schema::Plan;

use super::ReadSpan;
use super::barrier::{ResidencyBarrier, SharedResidency, State};
use super::expert_memory::{ExpertMatrices, ExpertPlace};
use crate::clock::monotonic_nanos;
use crate::pages::cpu_count;
use crate::read_counter::ReadCounter;
use crate::weights::Weights;

/// Number of threads that read experts, each a matrix at a time.
/// source: measured; with one thread and reads of 1 MiB, a disk of 2.7 GB/s gives 2.2 to 2.5, with two to eight all
pub(super) const READING_THREADS: usize = 4;

/// Creates the state of the experts of the device with the index `device` in the plan; `None` if it has none.
pub(super) fn expert_residency(weights: &Weights, plan: &Plan, device: usize) -> Option<ExpertResidency> {
    let shape = weights.shape().experts?;
    let mut bytes = vec![0; weights.shape().layers.0 as usize];
    for part in parts_by_busy_period(plan, device).into_iter().flatten() {
        let ModelPart::Layers(layers) = part else { continue };
        for layer in layers {
            bytes[layer as usize] = buffer_bytes(weights, layer);
        }
    }
    let options = plan.devices[device].residency;
    bytes.iter().any(|bytes| *bytes > 0).then(|| ExpertResidency::new(bytes, &shape, options, cpu_count()))
}

/// Returns the size of the buffers of one expert of a layer.
pub(super) fn buffer_bytes(weights: &Weights, layer: u32) -> u64 {
    let matrices = weights.expert_extents(layer, 0);
    matrices.map(|matrix| PageBuffer::size_for_range(matrix.length as usize) as u64).sum()
}

/// Opens the model files for reading experts. Returns no files if that fails: then the mapped files are used.
pub(super) fn expert_files(weights: &Weights) -> Vec<DirectFile> {
    weights.files().map(DirectFile::new).collect::<Result<_, _>>().unwrap_or_default()
}

/// The experts of a layer that are computed together.
#[derive(Debug)]
pub struct ExpertGroup {
    layer: u32,
    /// Whether the group is the first one of a batch.
    is_first: bool,
    experts: Vec<u32>,
    /// The experts that were not in memory when they were requested.
    missing: Vec<u32>,
    /// The experts in buffers. The others are used in the mapped files.
    in_memory: Vec<(u32, ExpertMatrices)>,
}

impl ExpertGroup {
    pub fn new(layer: u32, experts: Vec<u32>, is_first: bool) -> Self {
        Self { layer, is_first, experts, missing: Vec::new(), in_memory: Vec::new() }
    }

    pub fn is_missing(&self, expert: u32) -> bool {
        self.missing.contains(&expert)
    }

    /// Returns the matrices of an expert in buffers; `None` if those in the mapped files are used.
    pub fn matrices(&self, expert: u32) -> Option<&[Arc<PageBuffer>]> {
        let own = self.in_memory.iter().find(|(other, _)| *other == expert);
        own.map(|(_, matrices)| matrices.as_slice())
    }
}

impl ResidencyBarrier {
    /// Returns how many experts of a layer may be requested together.
    pub fn experts_per_group(&self) -> usize {
        let limit = |shared: &SharedResidency| Some(shared.lock().experts.as_ref()?.experts_per_group());
        self.shared.as_deref().and_then(limit).unwrap_or(usize::MAX)
    }

    /// Requests the experts of a group: those that are not in memory are read.
    pub fn request_experts(&self, group: &mut ExpertGroup) {
        let Some(shared) = self.shared.as_deref() else { return };
        let mut state = shared.lock();
        let State { experts: Some(experts), expert_memory, .. } = &mut *state else { return };
        let layer = group.layer;
        let matrices = shared.weights.expert_extents(layer, 0).count();
        experts.request(layer, &group.experts, group.is_first);
        for at in 0..group.experts.len() {
            let expert = group.experts[at];
            expert_memory.request((layer, expert), matrices);
            match expert_memory.place((layer, expert)) {
                ExpertPlace::InMemory(matrices) => group.in_memory.push((expert, matrices)),
                ExpertPlace::Requested => group.missing.push(expert),
                ExpertPlace::Mapped => {}
            }
        }
        if !group.missing.is_empty() {
            shared.expert_work.notify_all();
        }
    }

    /// Waits, for a limited time, until an expert of a group is in memory.
    pub fn wait_for_expert(&self, group: &mut ExpertGroup, expert: u32) {
        let Some(shared) = self.shared.as_deref().filter(|_| group.is_missing(expert)) else { return };
        let (id, start) = ((group.layer, expert), monotonic_nanos());
        let mut state = shared.lock();
        let mut place = state.expert_memory.place(id);
        while matches!(place, ExpertPlace::Requested) && !state.ended {
            let waited = Duration::from_nanos(monotonic_nanos() - start);
            let Some(left) = shared.max_wait.checked_sub(waited) else { return };
            state = shared.arrived.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
            place = state.expert_memory.place(id);
        }
        if let ExpertPlace::InMemory(matrices) = place {
            group.in_memory.push((expert, matrices));
        }
    }

    /// Releases the experts of a group after their use.
    pub fn release_experts(&self, group: ExpertGroup) {
        let Some(shared) = self.shared.as_deref() else { return };
        let ExpertGroup { layer, experts: used, in_memory, .. } = group;
        // Their buffers can be used again only if nobody else refers to them.
        drop(in_memory);
        let mut state = shared.lock();
        let Some(experts) = &mut state.experts else { return };
        if experts.release(layer, &used) {
            shared.expert_work.notify_one();
        }
    }
}

impl State {
    fn record_expert_read(&mut self, start_ns: u64, bytes: u64) {
        if bytes == 0 {
            return;
        }
        self.awaited_bytes += bytes;
        self.expert_bytes_read += bytes;
        let Some(origin) = self.computed else { return };
        let finished = self.expert_span.take_if(|span| span.origin != origin);
        self.completed_spans.extend(finished);
        let span = self.expert_span.get_or_insert(ReadSpan::starting(origin, start_ns));
        span.bytes += bytes;
        span.start_ns = span.start_ns.min(start_ns);
        span.end_ns = monotonic_nanos();
    }

    /// Evicts experts beyond the budget. Returns the buffers that are to be freed, so that another one of `needed` bytes
    /// can be allocated.
    fn evict_experts(&mut self, needed: usize) -> Vec<PageBuffer> {
        let Some(experts) = &mut self.experts else { return Vec::new() };
        while let Some(id) = experts.next_evictable() {
            self.expert_memory.evict(id);
        }
        self.expert_memory.shrink(experts.max_bytes().saturating_sub(needed as u64))
    }
}

impl SharedResidency {
    /// Reads the requested experts and evicts others, until the policy ends.
    pub(super) fn read_experts(&self) {
        let counter = ReadCounter::for_current_thread();
        let mut state = self.lock();
        while !state.ended {
            if let Some((id, index)) = state.expert_memory.next_request() {
                state = self.read_matrix(state, (id, index), &counter);
                if !matches!(state.expert_memory.place(id), ExpertPlace::Requested) {
                    self.arrived.notify_all();
                }
                continue;
            }
            let unused = state.evict_experts(0);
            if unused.is_empty() {
                state = self.expert_work.wait(state).unwrap_or_else(PoisonError::into_inner);
            } else {
                drop(state);
                drop(unused);
                state = self.lock();
            }
        }
    }

    /// Allocates buffers before they are needed, until the policy ends. To provide and clear memory takes longer than to
    /// read a fast disk, and there is time for it while the computation waits for the disk.
    pub(super) fn preallocate_buffers(&self) {
        lower_priority();
        let mut state = self.lock();
        while !state.ended {
            let State { experts, expert_memory, .. } = &mut *state;
            let size = experts
                .as_ref()
                .and_then(|experts| expert_memory.reserve_spare(experts.max_bytes(), experts.in_use_bytes()));
            let Some(size) = size else {
                state = self.buffer_work.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            drop(state);
            let buffer = PageBuffer::populated(size);
            state = self.lock();
            if let Ok(buffer) = buffer {
                state.expert_memory.keep_buffer(buffer);
            } else {
                state.expert_memory.count_freed(size);
                state = self.buffer_work.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
        }
    }

    /// Reads a requested matrix of an expert. Releases the lock meanwhile.
    fn read_matrix<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        (id, index): (ExpertId, usize),
        counter: &ReadCounter,
    ) -> MutexGuard<'a, State> {
        let Some(extent) = self.weights.expert_extents(id.0, id.1).nth(index) else {
            state.expert_memory.finish_read(id, index, None);
            return state;
        };
        let size = PageBuffer::size_for_range(extent.length as usize);
        let limit = state.experts.as_ref().map_or(0, ExpertResidency::max_bytes);
        // While requests follow each other, nothing else evicts.
        let is_full = state.expert_memory.is_full(size, limit);
        let unused = if is_full { state.evict_experts(size) } else { Vec::new() };
        let spare = state.expert_memory.take_buffer(size);
        self.buffer_work.notify_one();
        drop(state);
        drop(unused);
        let (start, before) = (monotonic_nanos(), counter.bytes_read());
        let mut buffer = spare.map_or_else(|| PageBuffer::new(size), Ok).ok();
        let range = extent.offset..extent.offset + extent.length;
        let file = self.expert_files.get(extent.file_index);
        let is_read =
            file.zip(buffer.as_mut()).is_some_and(|(file, buffer)| file.read(&range, buffer).is_ok());
        let bytes = counter.bytes_read().saturating_sub(before);
        let mut state = self.lock();
        state.record_expert_read(start, bytes);
        let memory = &mut state.expert_memory;
        if buffer.is_none() {
            memory.count_freed(size);
        }
        if let Some(unused) = buffer.take_if(|_| !is_read) {
            memory.keep_buffer(unused);
        }
        memory.finish_read(id, index, buffer);
        state
    }
}

/// Lets this thread compute only when the others do not.
fn lower_priority() {
    #[cfg(any(target_os = "android", target_os = "linux"))]
    {
        // On Linux it is that of the thread. If it fails, the computation is a bit slower.
        let _ = rustix::process::setpriority_process(None, 19);
    }
}
