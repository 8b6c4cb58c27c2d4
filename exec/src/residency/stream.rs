//! How does a device stream the weights that it cannot keep?
//!
//! One helper thread walks the pieces of the announced parts in order. A kept piece is looked at, and read if the
//! system has taken it; any other piece is read as soon as the buffer has room for it, and given up when it has
//! been used. Several pieces are under way at once: `MADV_WILLNEED` asks for each, `MADV_POPULATE_READ` waits for
//! the oldest. Reads are exact, because nothing is left to faults.
//!
//! After each token the kept set follows the room that the system has left (`KeptBudget`).
//!
//! The computation waits at a [`Gate`] for the helper. If the helper makes no progress for [`PATIENCE`], or is
//! gone, the gate opens, and the computation faults in what it misses: slower, and never wrong.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use hearth_schema::Plan;
use hearth_schema::residency::{KeptBudget, ResidencyOptions, kept_bytes, kernel_bytes};
use hearth_schema::schedule::Part;

use super::gate::Gate;
use super::pages::{expect_no_order, populate, resident, will_need};
use super::pieces::Pieces;
use super::{Span, give_up};
use crate::clock::wall_nanos;
use crate::ring::recorder::{At, ReadCounter};
use crate::weights::Weights;

/// The longest a computation waits without any piece arriving: a slow disk reads a piece in a fraction of it.
const PATIENCE: Duration = Duration::from_secs(20);

/// Pieces under way at once keep a disk busy; more only fill its queue. Measured: 4 MiB suffice for 1.8 GB/s.
const UNDER_WAY: u64 = 4 << 20;

/// The device's own residency. The helper ends when this is dropped.
pub struct Stream {
    core: Arc<Core>,
    thread: Option<JoinHandle<()>>,
}

/// What the helper and the computation share.
#[derive(Debug)]
pub struct Core {
    weights: Arc<Weights>,
    pieces: Pieces,
    options: ResidencyOptions,
    state: Mutex<State>,
    /// There may be something to do for the helper.
    work: Condvar,
    /// A piece has arrived.
    arrival: Condvar,
}

/// Where a piece stands on its way to its next use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// Not asked for since its last use.
    Idle,
    /// Asked for.
    Asked,
    /// In memory, and not used yet.
    Ready,
}

#[derive(Debug)]
struct State {
    /// What is computed now and what comes next, with the pass that asked for it.
    parts: VecDeque<(usize, At)>,
    /// How far the helper has come: a place in `parts`, and the next piece of that part.
    cursor: (usize, usize),
    stages: Vec<Stage>,
    kept: Vec<bool>,
    /// Which pieces take up room in the buffer.
    buffered: Vec<bool>,
    /// Bytes in the buffer.
    occupied: u64,
    /// Used pieces to be given up.
    used: Vec<usize>,
    /// Kept pieces that were in memory before; if they are missing now, they were taken.
    loaded: Vec<bool>,
    budget: KeptBudget,
    /// Bytes of kept pieces that were taken since the token began.
    lost: u64,
    /// A token is over: the budget is to be looked at.
    token_over: bool,
    awaited: u64,
    read: u64,
    spans: Vec<Span>,
    ended: bool,
}

impl Stream {
    /// Starts the helper of the device at a place of the plan.
    pub fn start(
        weights: Arc<Weights>,
        plan: &Plan,
        place: usize,
        room: impl Fn() -> Option<u64> + Send + 'static,
    ) -> Self {
        let pieces = Pieces::new(&weights, plan, place);
        let options = plan.devices[place].residency;
        let count = pieces.pieces.len();
        let state = State {
            parts: VecDeque::new(),
            cursor: (0, 0),
            stages: vec![Stage::Idle; count],
            kept: vec![false; count],
            buffered: vec![false; count],
            occupied: 0,
            used: Vec::new(),
            loaded: vec![false; count],
            budget: KeptBudget::new(options.kept.map_or(u64::MAX, |kept| kept.0).min(pieces.share.total())),
            lost: 0,
            token_over: false,
            awaited: 0,
            read: 0,
            spans: Vec::new(),
            ended: false,
        };
        let (work, arrival) = (Condvar::new(), Condvar::new());
        let core = Arc::new(Core { weights, pieces, options, state: Mutex::new(state), work, arrival });
        let mine = Ending(core.clone());
        let thread = std::thread::spawn(move || Helper::new(&mine.0, room).run());
        Self { core, thread: Some(thread) }
    }

    /// What the computation waits at.
    pub fn gate(&self) -> Gate {
        Gate::at(self.core.clone())
    }

    /// A part comes after those that were announced before.
    pub fn announce(&self, part: &Part, at: At) {
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
    pub fn begin(&self, part: &Part, at: At) {
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
    pub fn finish(&self, part: &Part) {
        let Some(index) = self.core.index(part) else { return };
        let mut state = self.core.lock();
        if state.parts.front().is_some_and(|&(first, _)| first == index) {
            self.core.drop_first(&mut state);
        }
        state.token_over |= index + 1 == self.core.pieces.parts.len();
        self.core.work.notify_one();
    }

    /// Forgets what was announced, and the record of the request before. What is kept stays in memory.
    pub fn reset(&self) {
        let mut state = self.core.lock();
        while !state.parts.is_empty() {
            self.core.drop_first(&mut state);
        }
        self.core.work.notify_one();
        state.spans.clear();
        state.awaited = 0;
    }

    /// Stretches of reading since the last call.
    pub fn take_spans(&self) -> Vec<Span> {
        std::mem::take(&mut self.core.lock().spans)
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

impl Core {
    fn lock(&self) -> MutexGuard<'_, State> {
        // A helper that panicked has left nothing half done that would make weights wrong.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn end(&self) {
        self.lock().ended = true;
        self.work.notify_all();
        self.arrival.notify_all();
    }

    fn index(&self, part: &Part) -> Option<usize> {
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
            at = self.pieces.pieces[piece].addresses.end;
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
                state.awaited += self.pieces.pieces[piece].pages;
                awaited = Some(piece);
            }
            let (next, wait) =
                self.arrival.wait_timeout(state, PATIENCE).unwrap_or_else(PoisonError::into_inner);
            state = next;
            if wait.timed_out() {
                return bytes.len();
            }
        }
    }

    /// The computation has used these bytes; pieces that end in them are done with.
    pub(super) fn used(&self, bytes: &[u8]) {
        let begin = bytes.as_ptr() as usize;
        let (mut at, end) = (begin, begin + bytes.len());
        let mut state = self.lock();
        while at < end {
            let Some(piece) = self.pieces.at(at) else { break };
            at = self.pieces.pieces[piece].addresses.end;
            if at <= end {
                self.done(&mut state, piece);
            }
        }
        self.work.notify_one();
    }

    /// A piece is not needed until it is asked for again.
    fn done(&self, state: &mut State, piece: usize) {
        // One still on its way is given up when it has come.
        if state.stages[piece] == Stage::Ready && !state.kept[piece] {
            state.used.push(piece);
        }
        state.stages[piece] = Stage::Idle;
        if state.kept[piece] && state.buffered[piece] {
            state.buffered[piece] = false;
            state.occupied -= self.pieces.pieces[piece].pages;
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

/// What the helper does next.
enum Action {
    GiveUp(usize),
    Ask(usize, At),
    Settle,
    Budget,
    Wait,
    End,
}

/// The thread's own side.
struct Helper<'a, Room> {
    core: &'a Core,
    room: Room,
    counter: ReadCounter,
    /// Pieces that were asked for, oldest first, with the bytes that were missing.
    under_way: VecDeque<(usize, At, u64)>,
    span: Option<Span>,
    processors: u32,
    started: bool,
}

impl<'a, Room: Fn() -> Option<u64>> Helper<'a, Room> {
    fn new(core: &'a Core, room: Room) -> Self {
        let processors = std::thread::available_parallelism().map_or(1, |count| count.get() as u32);
        let (under_way, span) = (VecDeque::new(), None);
        let counter = ReadCounter::of_this_thread();
        Self { core, room, counter, under_way, span, processors, started: false }
    }

    fn run(mut self) {
        self.core.weights.mappings().for_each(expect_no_order);
        let mut state = self.core.lock();
        loop {
            let action = self.next(&mut state);
            match action {
                Action::End => return,
                Action::Wait => {
                    state.spans.extend(self.span.take());
                    state = self.core.work.wait(state).unwrap_or_else(PoisonError::into_inner);
                    continue;
                }
                Action::Budget => {
                    drop(state);
                    self.follow_room();
                }
                Action::GiveUp(piece) => {
                    drop(state);
                    give_up(&self.core.weights, self.core.pieces.pieces[piece].extent);
                    self.gone(piece);
                }
                Action::Ask(piece, at) => {
                    drop(state);
                    self.ask(piece, at);
                }
                Action::Settle => {
                    drop(state);
                    self.settle();
                }
            }
            state = self.core.lock();
        }
    }

    fn next(&mut self, state: &mut State) -> Action {
        if state.ended {
            return Action::End;
        }
        if state.token_over || (!self.started && !state.parts.is_empty()) {
            return Action::Budget;
        }
        while let Some(piece) = state.used.pop() {
            // It may be wanted again already, or be kept by now.
            if state.stages[piece] == Stage::Idle && !state.kept[piece] {
                return Action::GiveUp(piece);
            }
            self.leave(state, piece);
        }
        let under_way: u64 = self.under_way.iter().map(|&(.., bytes)| bytes).sum();
        let next = if under_way < UNDER_WAY { self.ahead(state) } else { None };
        match next {
            Some((piece, at)) => Action::Ask(piece, at),
            None if self.under_way.is_empty() => Action::Wait,
            None => Action::Settle,
        }
    }

    /// The next piece, if it can be asked for now.
    fn ahead(&self, state: &mut State) -> Option<(usize, At)> {
        let (mut place, mut piece) = state.cursor;
        let (part, at) = *state.parts.get(place)?;
        let range = self.core.pieces.parts[part].1.clone();
        if piece >= range.end {
            place += 1;
            let next = state.parts.get(place)?;
            piece = self.core.pieces.parts[next.0].1.start;
            state.cursor = (place, piece);
            return self.ahead(state);
        }
        // A part announced twice: the piece has still to be used for the first time.
        if state.stages[piece] != Stage::Idle {
            return None;
        }
        let bytes = self.core.pieces.pieces[piece].pages;
        if !state.kept[piece] && !state.buffered[piece] {
            if state.occupied + bytes > self.core.options.buffer().0 && state.occupied > 0 {
                return None;
            }
            state.occupied += bytes;
            state.buffered[piece] = true;
        }
        state.stages[piece] = Stage::Asked;
        state.cursor.1 = piece + 1;
        Some((piece, at))
    }

    fn ask(&mut self, piece: usize, at: At) {
        let own = &self.core.pieces.pieces[piece];
        let Some(bytes) = self.core.weights.bytes(own.extent) else { return self.arrived(piece) };
        let missing = bytes.len() as u64 - resident(bytes);
        if missing == 0 {
            return self.arrived(piece);
        }
        let start = wall_nanos();
        will_need(bytes);
        self.under_way.push_back((piece, at, missing));
        let read = self.counter.bytes();
        let mut state = self.core.lock();
        state.read = read;
        if state.kept[piece] && state.loaded[piece] {
            state.lost += missing;
        }
        let part = self.core.pieces.parts.iter().find(|(_, pieces)| pieces.contains(&piece));
        let Some((part, _)) = part else { return };
        let new = Span::of(part, at, start);
        if let Some(last) = self.span.take_if(|last| last.layers != new.layers || last.at != at) {
            state.spans.push(last);
        }
        self.span.get_or_insert(new).bytes += missing;
    }

    /// Waits for the oldest piece.
    fn settle(&mut self) {
        let Some((piece, ..)) = self.under_way.pop_front() else { return };
        if let Some(bytes) = self.core.weights.bytes(self.core.pieces.pieces[piece].extent) {
            populate(bytes);
        }
        if let Some(span) = &mut self.span {
            span.end = wall_nanos();
        }
        self.arrived(piece);
    }

    fn arrived(&self, piece: usize) {
        let mut state = self.core.lock();
        match state.stages[piece] {
            Stage::Asked => {
                state.stages[piece] = Stage::Ready;
                state.loaded[piece] = state.kept[piece];
                self.core.arrival.notify_all();
            }
            Stage::Ready => {}
            // Nobody wants it any more.
            Stage::Idle => state.used.push(piece),
        }
    }

    /// A piece has left memory.
    fn gone(&self, piece: usize) {
        let mut state = self.core.lock();
        if state.stages[piece] == Stage::Idle {
            self.leave(&mut state, piece);
        }
    }

    fn leave(&self, state: &mut State, piece: usize) {
        let away = state.stages[piece] == Stage::Idle || state.kept[piece];
        if away && state.buffered[piece] {
            state.buffered[piece] = false;
            state.occupied -= self.core.pieces.pieces[piece].pages;
        }
    }

    /// Chooses the kept set anew: at the start, and after each token.
    fn follow_room(&mut self) {
        let share = self.core.pieces.share.total();
        let room = (self.room)().map(|room| {
            // After the first token the kernel has what it needs for the share, and has taken it from the room.
            let room = if self.started { room + kernel_bytes(share) } else { room };
            kept_bytes(room, share, self.processors, &self.core.options)
        });
        if !self.started {
            for &extent in &self.core.pieces.fixed {
                self.core.weights.bytes(extent).map(will_need);
            }
        }
        let mut state = self.core.lock();
        state.token_over = false;
        let lost = std::mem::take(&mut state.lost);
        if state.budget.after_token(lost, room) || !self.started {
            let kept = self.core.pieces.share.kept(state.budget.now());
            for piece in 0..kept.len() {
                let given_up = state.kept[piece] && !kept[piece];
                state.kept[piece] = kept[piece];
                if given_up && state.stages[piece] == Stage::Idle {
                    state.loaded[piece] = false;
                    state.used.push(piece);
                }
            }
        }
        self.started = true;
    }
}
