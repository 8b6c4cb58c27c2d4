//! The managed residency policy: keeps some weights in memory and streams the others ahead of their use.
//!
//! The helper thread (`super::helper`) reads pieces ahead of the computation, which waits for them at a
//! [`ResidencyBarrier`]. If no piece arrives for 20 s, or if the helper thread has ended, the barrier opens, and the
//! computation reads missing pages by page faults. This is slower, but gives the same results.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use hearth_core::residency::Event;
use hearth_core::schedule::ModelPart;
use hearth_profiles::measure::mapping::page_bytes;
use hearth_schema::Plan;

use super::barrier::{ResidencyBarrier, SharedResidency};
use super::experts::READING_THREADS;
use super::helper::Helper;
use super::{ReadSpan, ResidencyPolicy, StepId};
use crate::memory::MemoryReading;
use crate::weights::{Extent, Weights};

/// Maximum time for which a computation waits for the next piece. Even a slow disk reads a piece in a fraction of this
/// time.
pub(super) const MAX_WAIT: Duration = Duration::from_secs(20);

/// The managed residency policy of a device. Its threads end when it is dropped.
pub struct ManagedResidencyPolicy {
    pub(super) shared: Arc<SharedResidency>,
    threads: Vec<JoinHandle<()>>,
}

impl ManagedResidencyPolicy {
    /// Starts the threads of the device with the index `device` in the plan: the helper thread, and for a mixture those
    /// that read experts. A computation waits at most `max_wait` for the next piece or expert.
    pub fn start(
        weights: Arc<Weights>,
        plan: &Plan,
        device: usize,
        memory: impl Fn() -> MemoryReading + Send + 'static,
        max_wait: Duration,
    ) -> Self {
        let shared = Arc::new(SharedResidency::new(weights, plan, device, max_wait));
        let guard = EndGuard(shared.clone());
        let mut threads = vec![std::thread::spawn(move || Helper::new(&guard.0, memory).run())];
        if shared.has_experts() {
            threads.extend((0..READING_THREADS).map(|_| {
                let guard = EndGuard(shared.clone());
                std::thread::spawn(move || guard.0.read_experts())
            }));
            let guard = EndGuard(shared.clone());
            threads.push(std::thread::spawn(move || guard.0.preallocate_buffers()));
        }
        Self { shared, threads }
    }
}

impl ResidencyPolicy for ManagedResidencyPolicy {
    fn barrier(&self) -> ResidencyBarrier {
        ResidencyBarrier { shared: Some(self.shared.clone()) }
    }

    fn prefetch(&self, part: ModelPart, at: StepId) {
        if let Some(weight_part) = self.shared.weight_part(&part, at) {
            self.shared.report_event(Event::Requested(weight_part));
        }
    }

    /// Shrinks the kept set, so that `bytes` bytes of memory are free when the run uses them.
    fn reserve(&self, bytes: u64) {
        self.shared.lock().reserved_bytes = bytes;
        self.shared.report_event(Event::MemoryChanged);
    }

    fn begin(&self, part: &ModelPart, at: StepId) {
        if let Some(weight_part) = self.shared.weight_part(part, at) {
            self.shared.lock().computed = Some(weight_part.origin);
            self.shared.report_event(Event::PassBegun(at.pass));
            self.shared.report_event(Event::PartBegun(weight_part));
        }
    }

    fn release(&self, part: ModelPart) {
        let Some(index) = self.shared.part_index(&part) else { return };
        self.shared.report_event(Event::PartEnded);
        if index + 1 == self.shared.pieces.pieces_by_part.len() {
            self.shared.lock().reserved_bytes = 0;
        }
    }

    /// Evicts the pages of the embedding rows of `tokens`, which do not belong to a piece.
    fn release_embedding_rows(&self, weights: &Weights, tokens: &[u32]) {
        let page = page_bytes() as u64;
        for Extent { file_index, offset, length } in weights.embedding_row_extents(tokens) {
            let (begin, end) = (offset / page * page, (offset + length).next_multiple_of(page));
            weights.evict(Extent { file_index, offset: begin, length: end - begin });
        }
    }

    fn buffer_bytes(&self) -> u64 {
        self.shared.lock().expert_memory.allocated_bytes()
    }

    /// Cancels requested reads and deletes recorded read spans; kept pieces stay in memory.
    fn reset(&self) {
        self.shared.report_event(Event::Reset);
        let mut state = self.shared.lock();
        (state.current_span, state.expert_span, state.awaited_bytes) = (None, None, 0);
        state.completed_spans.clear();
    }

    fn take_spans(&self) -> Vec<ReadSpan> {
        let mut state = self.shared.lock();
        let current = state.current_span.clone().filter(|span| span.bytes > 0);
        state.completed_spans.extend(current);
        let of_experts = state.expert_span.take();
        state.completed_spans.extend(of_experts);
        if let Some(span) = &mut state.current_span {
            (span.start_ns, span.bytes) = (span.end_ns, 0);
        }
        std::mem::take(&mut state.completed_spans)
    }

    fn bytes_read(&self) -> u64 {
        let state = self.shared.lock();
        state.read_bytes + state.expert_bytes_read
    }

    fn take_awaited_bytes(&self) -> u64 {
        std::mem::take(&mut self.shared.lock().awaited_bytes)
    }
}

impl Drop for ManagedResidencyPolicy {
    fn drop(&mut self) {
        self.shared.end();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

/// Opens the barrier when a thread of the policy ends, even by a panic.
struct EndGuard(Arc<SharedResidency>);

impl Drop for EndGuard {
    fn drop(&mut self) {
        self.0.end();
    }
}
