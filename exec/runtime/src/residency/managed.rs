//! Managed stream: the weights of a device with managed residency, used by the computation and the helper thread.
//!
//! The helper thread (`super::helper`) reads pieces ahead of the computation, which waits for them at a
//! [`ResidencyBarrier`]. If no piece arrives for 20 s, or the thread has ended, the barrier opens, and the
//! computation reads missing pages by page faults. This is slower, but gives the same results.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use hearth_core::residency::{Event, ManagedResidency, PartRequest, PieceId, ReadOrigin};
use hearth_core::schedule::ModelPart;
use hearth_schema::Plan;

use super::barrier::ResidencyBarrier;
use super::helper::Helper;
use super::pieces::{Piece, Pieces};
use super::{ReadSpan, StepId, layers_of};
use crate::memory::MemoryReading;
use crate::pages::processor_count;
use crate::weights::Weights;

/// Maximum time for which a computation waits without the arrival of a piece. Even a slow disk reads a piece in a
/// fraction of this time.
pub(super) const MAX_WAIT: Duration = Duration::from_secs(20);

/// The managed weights of a device. The helper thread ends when this is dropped.
pub struct ManagedStream {
    pub(super) shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

/// State shared by the helper thread and the computation.
#[derive(Debug)]
pub struct Shared {
    pub(super) weights: Arc<Weights>,
    pub(super) pieces: Pieces,
    max_wait: Duration,
    state: Mutex<State>,
    /// Notified when the helper may have something to do.
    pub(super) work: Condvar,
    /// Notified when a piece has arrived.
    pub(super) arrival: Condvar,
}

/// The state guarded by a lock, which is never held during a system call.
#[derive(Debug)]
pub(super) struct State {
    pub(super) residency: ManagedResidency,
    /// Bytes for which the computation has waited.
    awaited: u64,
    /// Bytes that the helper has read.
    pub(super) read: u64,
    /// The completed spans of reading.
    spans: Vec<ReadSpan>,
    /// The current span of reading.
    pub(super) span: Option<ReadSpan>,
    /// Bytes of memory that the run is about to use.
    pub(super) reserved: u64,
    /// Whether the stream has been dropped or the helper has ended.
    pub(super) ended: bool,
}

impl ManagedStream {
    /// Starts the helper thread of the device with this index in the plan.
    pub fn start(
        weights: Arc<Weights>,
        plan: &Plan,
        device: usize,
        memory: impl Fn() -> MemoryReading + Send + 'static,
    ) -> Self {
        Self::with_max_wait(weights, plan, device, memory, MAX_WAIT)
    }

    pub(super) fn with_max_wait(
        weights: Arc<Weights>,
        plan: &Plan,
        device: usize,
        memory: impl Fn() -> MemoryReading + Send + 'static,
        max_wait: Duration,
    ) -> Self {
        let options = plan.devices[device].residency;
        let pieces = Pieces::new(&weights, plan, device);
        let bytes: Vec<u64> = pieces.list.iter().map(|piece| piece.page_bytes).collect();
        let state = State {
            residency: ManagedResidency::new(&pieces.visits, &bytes, options, processor_count()),
            awaited: 0,
            read: 0,
            spans: Vec::new(),
            span: None,
            reserved: 0,
            ended: false,
        };
        let (work, arrival, state) = (Condvar::new(), Condvar::new(), Mutex::new(state));
        let shared = Arc::new(Shared { weights, pieces, max_wait, state, work, arrival });
        let guard = EndGuard(shared.clone());
        let thread = std::thread::spawn(move || Helper::new(&guard.0, memory).run());
        Self { shared, thread: Some(thread) }
    }

    /// Returns the barrier at which the computation waits.
    pub fn barrier(&self) -> ResidencyBarrier {
        ResidencyBarrier::new(self.shared.clone())
    }

    /// Shrinks the kept set before the run uses `bytes` of memory.
    pub fn reserve(&self, bytes: u64) {
        self.shared.lock().reserved = bytes;
        self.shared.react(Event::MemoryChanged);
    }

    /// Requests that a part is read, after those that were requested before.
    pub fn request(&self, part: &ModelPart, at: StepId) {
        if let Some(request) = self.shared.part_request(part, at) {
            self.shared.react(Event::Requested(request));
        }
    }

    /// Begins the computation of a part.
    pub fn begin(&self, part: &ModelPart, at: StepId) {
        if let Some(request) = self.shared.part_request(part, at) {
            self.shared.react(Event::PassBegun(at.pass));
            self.shared.react(Event::PartBegun(request));
        }
    }

    /// Ends the computation of a part.
    pub fn finish(&self, part: &ModelPart) {
        let Some(index) = self.shared.index(part) else { return };
        self.shared.react(Event::PartEnded);
        if index + 1 == self.shared.pieces.parts.len() {
            self.shared.lock().reserved = 0;
        }
    }

    /// Cancels outstanding requests and deletes the spans of the previous generation. Kept pieces stay in memory.
    pub fn reset(&self) {
        self.shared.react(Event::Reset);
        let mut state = self.shared.lock();
        (state.span, state.awaited) = (None, 0);
        state.spans.clear();
    }

    /// Returns the spans of reading since the last call.
    pub fn take_spans(&self) -> Vec<ReadSpan> {
        let mut state = self.shared.lock();
        let current = state.span.clone().filter(|span| span.bytes > 0);
        state.spans.extend(current);
        if let Some(span) = &mut state.span {
            (span.start, span.bytes) = (span.end, 0);
        }
        std::mem::take(&mut state.spans)
    }

    /// Returns the total bytes that the helper has read.
    pub fn bytes_read(&self) -> u64 {
        self.shared.lock().read
    }

    /// Returns the bytes that were missing when the computation needed them, since the last call.
    pub fn take_awaited(&self) -> u64 {
        std::mem::take(&mut self.shared.lock().awaited)
    }
}

impl Drop for ManagedStream {
    fn drop(&mut self) {
        self.shared.end();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Opens the barrier when the helper ends, also by a panic.
struct EndGuard(Arc<Shared>);

impl Drop for EndGuard {
    fn drop(&mut self) {
        self.0.end();
    }
}

impl State {
    /// Completes the current span, because the helper is idle or reads another part.
    pub(super) fn end_span(&mut self) {
        self.spans.extend(self.span.take().filter(|span| span.bytes > 0));
    }
}

impl Shared {
    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        // A panic of the helper cannot leave the weights in an invalid state.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reports an event, and wakes the helper if there is something to do.
    fn react(&self, event: Event) {
        let woken = self.lock().residency.react(event);
        if woken {
            self.work.notify_one();
        }
    }

    fn end(&self) {
        self.lock().ended = true;
        self.work.notify_all();
        self.arrival.notify_all();
    }

    pub(super) fn piece(&self, piece: PieceId) -> &Piece {
        &self.pieces.list[piece as usize]
    }

    /// Returns the index of a part in the share.
    fn index(&self, part: &ModelPart) -> Option<usize> {
        self.pieces.parts.iter().position(|(own, _)| own == part)
    }

    /// Returns the request for a part, or `None` if the part is not in the device's share.
    fn part_request(&self, part: &ModelPart, at: StepId) -> Option<PartRequest> {
        let pieces = self.pieces.parts[self.index(part)?].1.clone();
        let origin = ReadOrigin { pass: at.pass, round: at.round, layers: layers_of(part) };
        Some(PartRequest { pieces, origin })
    }

    /// Returns how many of these bytes, from the front, are in memory now.
    pub(super) fn ready_bytes(&self, bytes: &[u8]) -> usize {
        self.ready_in(&self.lock(), bytes).0
    }

    /// Returns how many of these bytes, from the front, are in memory now, and the first missing piece.
    fn ready_in(&self, state: &State, bytes: &[u8]) -> (usize, Option<PieceId>) {
        let begin = bytes.as_ptr() as usize;
        let (mut at, end) = (begin, begin + bytes.len());
        let ready_until = state.residency.first_unready_piece().unwrap_or(0);
        while at < end && !state.ended {
            // Bytes outside of pieces are always in memory.
            let Some(piece) = self.pieces.at(at) else { break };
            if piece >= ready_until {
                return (at - begin, Some(piece));
            }
            at = self.piece(piece).addresses.end;
        }
        (bytes.len(), None)
    }

    /// Waits until at least `min` of these bytes, from the front, are in memory. Returns how many are.
    pub(super) fn wait(&self, bytes: &[u8], min: usize) -> usize {
        let mut state = self.lock();
        let mut awaited = None;
        loop {
            let (ready, missing) = self.ready_in(&state, bytes);
            if ready >= min.min(bytes.len()) {
                return ready;
            }
            if let Some(piece) = missing.filter(|&piece| awaited != Some(piece)) {
                state.awaited += self.piece(piece).page_bytes;
                awaited = Some(piece);
            }
            let (next, wait) =
                self.arrival.wait_timeout(state, self.max_wait).unwrap_or_else(PoisonError::into_inner);
            state = next;
            if wait.timed_out() && self.ready_in(&state, bytes).0 < min.min(bytes.len()) {
                return bytes.len();
            }
        }
    }

    /// Reports that the computation has used these bytes. Pieces that end in them are not needed again in this visit.
    pub(super) fn mark_used(&self, bytes: &[u8]) {
        let begin = bytes.as_ptr() as usize;
        let (mut at, end) = (begin, begin + bytes.len());
        let mut last = None;
        while at < end {
            let Some(piece) = self.pieces.at(at) else { break };
            at = self.piece(piece).addresses.end;
            if at <= end {
                last = Some(piece);
            }
        }
        if let Some(last) = last {
            self.react(Event::Used(last + 1));
        }
    }
}
