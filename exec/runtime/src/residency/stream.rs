//! How does a device stream the weights that it cannot keep?
//!
//! A helper thread (`helper`) walks the pieces of the announced parts in order, as far ahead of the
//! computation as the buffer allows; the computation uses them up behind it. Here is what the two share, and the
//! computation's side of it.
//!
//! The computation waits at a [`Gate`] for the helper. If the helper makes no progress for 20 s, or is
//! gone, the gate opens, and the computation faults in what it misses: slower, and never wrong.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use hearth_core::residency::KeptBudget;
use hearth_core::schedule::ModelPart;
use hearth_schema::Plan;
use hearth_schema::residency::ResidencyOptions;

use super::gate::Gate;
use super::helper::Helper;
use super::pieces::Pieces;
use super::{At, Span};
use crate::memory::Told;
use crate::weights::Weights;

/// The longest a computation waits without any piece arriving: a slow disk reads a piece in a fraction of it.
pub(super) const PATIENCE: Duration = Duration::from_secs(20);

/// The device's own residency. The helper ends when this is dropped.
pub struct Stream {
    pub(super) core: Arc<Core>,
    thread: Option<JoinHandle<()>>,
}

/// What the helper and the computation share.
#[derive(Debug)]
pub struct Core {
    pub(super) weights: Arc<Weights>,
    pub(super) pieces: Pieces,
    pub(super) options: ResidencyOptions,
    patience: Duration,
    pub(super) state: Mutex<State>,
    /// There may be something to do for the helper.
    pub(super) work: Condvar,
    /// A piece has arrived.
    pub(super) arrival: Condvar,
}

/// Where a piece stands on its way to its next use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stage {
    /// Not asked for since its last use.
    Idle,
    /// Asked for.
    Asked,
    /// In memory, and not used yet.
    Ready,
}

/// Guarded by a lock that is never held over a system call.
#[derive(Debug)]
pub(super) struct State {
    /// What is computed now and what comes next, with the pass that asked for it.
    pub(super) parts: VecDeque<(usize, At)>,
    /// How far the helper has come: a place in `parts`, and the next piece of that part.
    pub(super) cursor: (usize, usize),
    pub(super) stages: Vec<Stage>,
    pub(super) kept: Vec<bool>,
    /// Which pieces take up room in the buffer.
    pub(super) buffered: Vec<bool>,
    /// Bytes in the buffer.
    pub(super) occupied: u64,
    /// Bytes that the buffer holds.
    pub(super) buffer: u64,
    /// Used pieces to be given up.
    pub(super) used: Vec<usize>,
    /// Kept pieces that were in memory before; if they are missing now, they were taken.
    pub(super) loaded: Vec<bool>,
    pub(super) budget: KeptBudget,
    /// Bytes of kept pieces that were taken since the token began.
    pub(super) lost: u64,
    /// A token is over: the budget is to be looked at.
    pub(super) token_over: bool,
    pub(super) awaited: u64,
    pub(super) read: u64,
    pub(super) spans: Vec<Span>,
    /// The stretch that goes on.
    pub(super) span: Option<Span>,
    /// Memory that the run is about to take for itself.
    pub(super) reserved: u64,
    pub(super) ended: bool,
}

impl Stream {
    /// Starts the helper of the device at a place of the plan.
    pub fn start(
        weights: Arc<Weights>,
        plan: &Plan,
        place: usize,
        memory: impl Fn() -> Told + Send + 'static,
    ) -> Self {
        Self::with_patience(weights, plan, place, memory, PATIENCE)
    }

    pub(super) fn with_patience(
        weights: Arc<Weights>,
        plan: &Plan,
        place: usize,
        memory: impl Fn() -> Told + Send + 'static,
        patience: Duration,
    ) -> Self {
        let pieces = Pieces::new(&weights, plan, place);
        let options = plan.devices[place].residency;
        let count = pieces.list.len();
        let state = State {
            parts: VecDeque::new(),
            cursor: (0, 0),
            stages: vec![Stage::Idle; count],
            kept: vec![false; count],
            buffered: vec![false; count],
            occupied: 0,
            buffer: options.buffer().0,
            used: Vec::new(),
            loaded: vec![false; count],
            budget: KeptBudget::new(options.most_kept(pieces.share.total())),
            lost: 0,
            token_over: false,
            awaited: 0,
            read: 0,
            spans: Vec::new(),
            span: None,
            reserved: 0,
            ended: false,
        };
        let (work, arrival) = (Condvar::new(), Condvar::new());
        let core =
            Arc::new(Core { weights, pieces, options, patience, state: Mutex::new(state), work, arrival });
        let mine = Ending(core.clone());
        let thread = std::thread::spawn(move || Helper::new(&mine.0, memory).run());
        Self { core, thread: Some(thread) }
    }

    /// What the computation waits at.
    pub fn gate(&self) -> Gate {
        Gate::at(self.core.clone())
    }

    /// The run is about to take so much memory for itself: the kept set makes way first.
    pub fn reserve(&self, bytes: u64) {
        let mut state = self.core.lock();
        (state.reserved, state.token_over) = (bytes, true);
        self.core.work.notify_one();
    }

    /// A part comes after those that were announced before.
    pub fn announce(&self, part: &ModelPart, at: At) {
        if let Some(index) = self.core.index(part) {
            let mut state = self.core.lock();
            if state.parts.is_empty() {
                state.cursor = (0, self.core.pieces.parts[index].1.start);
            }
            state.parts.push_back((index, at));
            self.core.work.notify_one();
        }
    }

    /// A part is computed now. If something else was announced, that is forgotten.
    pub fn begin(&self, part: &ModelPart, at: At) {
        let Some(index) = self.core.index(part) else { return };
        let mut state = self.core.lock();
        if state.parts.iter().any(|&(announced, _)| announced == index) {
            while state.parts.front().is_some_and(|&(first, _)| first != index) {
                self.core.drop_first(&mut state);
            }
        } else {
            for place in 0..state.parts.len() {
                self.core.abandon(&mut state, place);
            }
            state.parts.push_front((index, at));
            state.cursor = (0, self.core.pieces.parts[index].1.start);
        }
        self.core.work.notify_one();
    }

    /// A part has been computed.
    pub fn finish(&self, part: &ModelPart) {
        let Some(index) = self.core.index(part) else { return };
        let mut state = self.core.lock();
        if state.parts.front().is_some_and(|&(first, _)| first == index) {
            self.core.drop_first(&mut state);
        }
        if index + 1 == self.core.pieces.parts.len() {
            (state.reserved, state.token_over) = (0, true);
        }
        self.core.work.notify_one();
    }

    /// Forgets what was announced, and the record of the request before. What is kept stays in memory.
    pub fn reset(&self) {
        let mut state = self.core.lock();
        while !state.parts.is_empty() {
            self.core.drop_first(&mut state);
        }
        self.core.work.notify_one();
        (state.span, state.awaited) = (None, 0);
        state.spans.clear();
    }

    /// Stretches of reading since the last call.
    pub fn take_spans(&self) -> Vec<Span> {
        let mut state = self.core.lock();
        let going_on = state.span.clone().filter(|span| span.bytes > 0);
        state.spans.extend(going_on);
        if let Some(span) = &mut state.span {
            (span.start, span.bytes) = (span.end, 0);
        }
        std::mem::take(&mut state.spans)
    }

    /// Bytes that the helper has caused to be read so far.
    pub fn bytes_read(&self) -> u64 {
        self.core.lock().read
    }

    /// Bytes that the computation found missing and waited for, since the last call.
    pub fn take_awaited(&self) -> u64 {
        std::mem::take(&mut self.core.lock().awaited)
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        self.core.end();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Opens the gate when the helper ends, in whatever way.
struct Ending(Arc<Core>);

impl Drop for Ending {
    fn drop(&mut self) {
        self.0.end();
    }
}

impl State {
    /// The stretch of reading is over.
    pub(super) fn end_span(&mut self) {
        self.spans.extend(self.span.take().filter(|span| span.bytes > 0));
    }
}

impl Core {
    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        // A helper that panicked has left nothing half done that would make weights wrong.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn end(&self) {
        self.lock().ended = true;
        self.work.notify_all();
        self.arrival.notify_all();
    }

    fn index(&self, part: &ModelPart) -> Option<usize> {
        self.pieces.parts.iter().position(|(own, _)| own == part)
    }

    /// How many of these bytes, from the front, are in memory.
    pub(super) fn ready(&self, bytes: &[u8]) -> usize {
        self.ready_in(&self.lock(), bytes).0
    }

    /// And which piece is missing next.
    fn ready_in(&self, state: &State, bytes: &[u8]) -> (usize, Option<usize>) {
        let begin = bytes.as_ptr() as usize;
        let (mut at, end) = (begin, begin + bytes.len());
        let mut missing = None;
        while at < end && !state.ended {
            let Some(piece) = self.pieces.at(at) else { break };
            if state.stages[piece] != Stage::Ready {
                missing = Some(piece);
                break;
            }
            at = self.pieces.list[piece].addresses.end;
        }
        // What is no piece is nobody's business here.
        if missing.is_none() { (bytes.len(), None) } else { (at.min(end) - begin, missing) }
    }

    /// The same, after waiting until it is at least `least`.
    pub(super) fn wait(&self, bytes: &[u8], least: usize) -> usize {
        let mut state = self.lock();
        let mut awaited = None;
        loop {
            let (ready, missing) = self.ready_in(&state, bytes);
            if ready >= least.min(bytes.len()) {
                return ready;
            }
            if let Some(piece) = missing.filter(|&piece| awaited != Some(piece)) {
                state.awaited += self.pieces.list[piece].pages;
                awaited = Some(piece);
            }
            let (next, wait) =
                self.arrival.wait_timeout(state, self.patience).unwrap_or_else(PoisonError::into_inner);
            state = next;
            if wait.timed_out() && self.ready_in(&state, bytes).0 < least.min(bytes.len()) {
                return bytes.len();
            }
        }
    }

    /// The computation has used these bytes; pieces that end in them are done with.
    pub(super) fn used(&self, bytes: &[u8]) {
        let begin = bytes.as_ptr() as usize;
        let (mut at, end) = (begin, begin + bytes.len());
        let mut state = self.lock();
        let before = state.used.len();
        while at < end {
            let Some(piece) = self.pieces.at(at) else { break };
            at = self.pieces.list[piece].addresses.end;
            if at <= end {
                self.done(&mut state, piece);
            }
        }
        // Waking a thread takes as long as computing some rows: kept pieces can wait for the end of the part.
        if state.used.len() > before {
            self.work.notify_one();
        }
    }

    /// A piece is not needed until it is asked for again.
    fn done(&self, state: &mut State, piece: usize) {
        // The helper may have been overtaken: it does not read what has been used.
        let current = state.parts.front().map(|&(part, _)| self.pieces.parts[part].1.clone());
        if state.cursor.0 == 0 && current.is_some_and(|own| own.contains(&piece)) {
            state.cursor.1 = state.cursor.1.max(piece + 1);
        }
        // One still on its way is given up when it has come.
        if state.stages[piece] == Stage::Ready && !state.kept[piece] {
            state.used.push(piece);
        }
        state.stages[piece] = Stage::Idle;
        if state.kept[piece] {
            self.leave_buffer(state, piece);
        }
    }

    /// A piece takes up no more room in the buffer.
    pub(super) fn leave_buffer(&self, state: &mut State, piece: usize) {
        if std::mem::take(&mut state.buffered[piece]) {
            state.occupied -= self.pieces.list[piece].pages;
        }
    }

    /// The first part is over.
    fn drop_first(&self, state: &mut State) {
        self.abandon(state, 0);
        state.parts.pop_front();
        state.cursor = match (state.cursor, state.parts.front()) {
            ((0, _), Some(&(next, _))) => (0, self.pieces.parts[next].1.start),
            ((0, _), None) => (0, 0),
            ((place, piece), _) => (place - 1, piece),
        };
    }

    /// Nothing of a part is wanted any more, as far as the helper has come in it.
    fn abandon(&self, state: &mut State, place: usize) {
        let pieces = self.pieces.parts[state.parts[place].0].1.clone();
        let come = match state.cursor {
            (at, _) if at > place => pieces.end,
            (at, piece) if at == place => piece.clamp(pieces.start, pieces.end),
            _ => pieces.start,
        };
        // The same part may be announced once more, and its pieces be on their way for that.
        let again =
            (place + 1..state.parts.len()).find(|&later| state.parts[later].0 == state.parts[place].0);
        let wanted = match again {
            Some(later) if state.cursor.0 > later => pieces.end,
            Some(later) if state.cursor.0 == later => state.cursor.1,
            _ => pieces.start,
        };
        for piece in wanted..come {
            if state.stages[piece] != Stage::Idle {
                self.done(state, piece);
            }
        }
    }
}
