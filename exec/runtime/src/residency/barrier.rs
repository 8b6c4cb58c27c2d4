//! Residency barrier: blocks a computation until the weights that it is about to use are in memory.
//!
//! With managed residency, a computation waits at the barrier before it uses weights, instead of taking page
//! faults, and reports when it has used them. With all other policies the barrier is open. The state behind
//! the barrier ([`SharedResidency`]) records which weights are in memory; the threads of the policy update it.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use hearth_core::residency::{Event, ExpertResidency, ManagedResidency, PieceId, ReadOrigin, WeightPart};
use hearth_core::schedule::ModelPart;
use hearth_profiles::measure::direct::DirectFile;
use hearth_schema::Plan;

use super::expert_memory::ExpertMemory;
use super::experts::{expert_files, expert_residency};
use super::pieces::{Piece, PieceTable};
use super::{ReadSpan, StepId, is_residency_known, origin_of};
use crate::memory::MemoryReading;
use crate::pages::cpu_count;
use crate::weights::Weights;

/// The barrier at which a computation waits for its weights.
#[derive(Debug, Clone, Default)]
pub struct ResidencyBarrier {
    pub(super) shared: Option<Arc<SharedResidency>>,
}

impl ResidencyBarrier {
    /// Creates an open barrier, at which no computation waits.
    pub fn always_open() -> Self {
        Self::default()
    }

    /// Returns whether computations pass the barrier without waiting.
    pub fn is_open(&self) -> bool {
        self.shared.is_none()
    }

    /// Returns how many bytes at the beginning of the mapped region `bytes` are in memory now, possibly none.
    pub fn resident_prefix_bytes(&self, bytes: &[u8]) -> usize {
        self.shared.as_ref().map_or(bytes.len(), |shared| shared.ready_prefix(&shared.lock(), bytes).0)
    }

    /// Waits, for a limited time, until the first `min` bytes of the mapped region `bytes` are in memory. Returns how
    /// many bytes at the beginning of the region may be used.
    pub fn wait(&self, bytes: &[u8], min: usize) -> usize {
        let Some(shared) = &self.shared else { return bytes.len() };
        let mut state = shared.lock();
        let mut awaited = None;
        loop {
            let (ready, missing) = shared.ready_prefix(&state, bytes);
            if ready >= min.min(bytes.len()) {
                return ready;
            }
            if let Some(piece) = missing.filter(|&piece| awaited != Some(piece)) {
                state.awaited_bytes += shared.piece(piece).touched_page_bytes;
                awaited = Some(piece);
            }
            let (next, wait) =
                shared.arrived.wait_timeout(state, shared.max_wait).unwrap_or_else(PoisonError::into_inner);
            state = next;
            if wait.timed_out() && shared.ready_prefix(&state, bytes).0 < min.min(bytes.len()) {
                return bytes.len();
            }
        }
    }

    /// Reports that the mapped region `bytes`, and all weights before it in the same part of the model, have been used.
    /// Pieces that end in the region are not used again before the next computation of the part.
    pub fn mark_used(&self, bytes: &[u8]) {
        let Some(shared) = &self.shared else { return };
        let begin = bytes.as_ptr() as usize;
        let (mut at, end) = (begin, begin + bytes.len());
        let mut last = None;
        while at < end {
            let Some(piece) = shared.pieces.piece_at(at) else { break };
            at = shared.piece(piece).addresses.end;
            if at <= end {
                last = Some(piece);
            }
        }
        if let Some(last) = last {
            shared.report_event(Event::Used(last + 1));
        }
    }
}

/// The state shared by the threads of the policy and the computation.
#[derive(Debug)]
pub struct SharedResidency {
    pub(super) weights: Arc<Weights>,
    pub(super) pieces: PieceTable,
    /// Whether the system reports which pages are in memory. If false, every piece is read.
    pub(super) is_residency_known: bool,
    pub(super) max_wait: Duration,
    /// The model files, from which experts are read; none if the device has no experts, or if they cannot be opened.
    pub(super) expert_files: Vec<DirectFile>,
    state: Mutex<State>,
    /// Signals that there may be work for the helper thread.
    pub(super) work_available: Condvar,
    /// Signals that there may be work for the threads that read experts.
    pub(super) expert_work: Condvar,
    /// Signals that there may be work for the thread that allocates buffers for experts.
    pub(super) buffer_work: Condvar,
    /// Signals that a piece or a matrix of an expert has arrived.
    pub(super) arrived: Condvar,
}

/// The state of managed residency, guarded by a lock that is never held during a system call.
#[derive(Debug)]
pub(super) struct State {
    pub(super) residency: ManagedResidency,
    /// The experts of a mixture, which do not belong to pieces.
    pub(super) experts: Option<ExpertResidency>,
    /// The memory of the cached experts.
    pub(super) expert_memory: ExpertMemory,
    /// The part of the model that is being computed.
    pub(super) computed: Option<ReadOrigin>,
    /// Total bytes of experts that have been read from disk.
    pub(super) expert_bytes_read: u64,
    /// The reads of experts for the part that is being computed.
    pub(super) expert_span: Option<ReadSpan>,
    /// Bytes of weights for which the computation has waited since the last call of `take_awaited_bytes`.
    pub(super) awaited_bytes: u64,
    /// Total bytes that the helper thread has read from disk.
    pub(super) read_bytes: u64,
    /// The completed read spans that have not been taken for the trace yet.
    pub(super) completed_spans: Vec<ReadSpan>,
    /// The read span in progress, if any.
    pub(super) current_span: Option<ReadSpan>,
    /// Bytes of memory that the run is about to use.
    pub(super) reserved_bytes: u64,
    /// Whether the policy has been dropped or one of its threads has ended.
    pub(super) ended: bool,
}

impl State {
    /// Returns the memory for weights and for the kernel's memory that they need, if it is known. `metadata` bytes of the
    /// latter have been allocated.
    pub(super) fn available_bytes(&self, reading: &MemoryReading, metadata: u64) -> Option<u64> {
        let buffers = self.expert_memory.allocated_bytes().saturating_sub(reading.swapped_bytes);
        let available = reading.page_cache_available_bytes? + metadata + buffers;
        Some(available.saturating_sub(self.reserved_bytes))
    }

    /// Completes the read span in progress, because the helper thread is idle or reads another part.
    pub(super) fn end_span(&mut self) {
        self.completed_spans.extend(self.current_span.take().filter(|span| span.bytes > 0));
    }
}

impl SharedResidency {
    /// Creates the state for the device with the index `device` in the plan. No piece has been read yet.
    pub(super) fn new(
        weights: Arc<Weights>,
        plan: &Plan,
        device: usize,
        max_wait: Duration,
    ) -> SharedResidency {
        let options = plan.devices[device].residency;
        let pieces = PieceTable::new(&weights, plan, device);
        let bytes: Vec<u64> =
            pieces.pieces_in_order_of_use.iter().map(|piece| piece.touched_page_bytes).collect();
        let state = State {
            residency: ManagedResidency::new(&pieces.busy_periods, &bytes, options, cpu_count()),
            experts: expert_residency(&weights, plan, device),
            expert_memory: ExpertMemory::default(),
            computed: None,
            expert_bytes_read: 0,
            expert_span: None,
            awaited_bytes: 0,
            read_bytes: 0,
            completed_spans: Vec::new(),
            current_span: None,
            reserved_bytes: 0,
            ended: false,
        };
        SharedResidency {
            is_residency_known: is_residency_known(&weights),
            expert_files: if state.experts.is_some() { expert_files(&weights) } else { Vec::new() },
            weights,
            pieces,
            max_wait,
            state: Mutex::new(state),
            work_available: Condvar::new(),
            expert_work: Condvar::new(),
            buffer_work: Condvar::new(),
            arrived: Condvar::new(),
        }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        // A panic of the helper cannot leave the weights in an invalid state.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reports an event, and wakes the helper thread if there is work for it.
    pub(super) fn report_event(&self, event: Event) {
        let woken = self.lock().residency.react(event);
        if woken {
            self.work_available.notify_one();
        }
    }

    pub(super) fn end(&self) {
        self.lock().ended = true;
        self.work_available.notify_all();
        self.expert_work.notify_all();
        self.buffer_work.notify_all();
        self.arrived.notify_all();
    }

    pub(super) fn has_experts(&self) -> bool {
        self.lock().experts.is_some()
    }

    pub(super) fn piece(&self, piece: PieceId) -> &Piece {
        &self.pieces.pieces_in_order_of_use[piece as usize]
    }

    pub(super) fn part_index(&self, part: &ModelPart) -> Option<usize> {
        self.pieces.pieces_by_part.iter().position(|(own, _)| own == part)
    }

    /// Returns the pieces of a part of the model, or `None` if the device does not compute this part. `at` is the step
    /// whose reads they are.
    pub(super) fn weight_part(&self, part: &ModelPart, at: StepId) -> Option<WeightPart> {
        let pieces = self.pieces.pieces_by_part[self.part_index(part)?].1.clone();
        Some(WeightPart { pieces, origin: origin_of(part, at) })
    }

    /// Returns how many bytes at the beginning of `bytes` are in memory now, and the first missing piece.
    pub(super) fn ready_prefix(&self, state: &State, bytes: &[u8]) -> (usize, Option<PieceId>) {
        let begin = bytes.as_ptr() as usize;
        let (mut at, end) = (begin, begin + bytes.len());
        let ready_until = state.residency.first_pending_piece().unwrap_or(0);
        while at < end && !state.ended {
            // Bytes outside of pieces are always in memory.
            let Some(piece) = self.pieces.piece_at(at) else { break };
            if piece >= ready_until {
                return (at - begin, Some(piece));
            }
            at = self.piece(piece).addresses.end;
        }
        (bytes.len(), None)
    }
}
