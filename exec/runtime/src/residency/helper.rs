//! What does the thread do that keeps and streams a device's weights?
//!
//! It walks the pieces of the announced parts in order. A kept piece is looked at, and read if the system has
//! taken it; any other piece is read as soon as the buffer has room for it, and given up when it has been used.
//! Several pieces are under way at once: `MADV_WILLNEED` asks for each, `MADV_POPULATE_READ` waits for the oldest.
//! Reads are exact, because nothing is left to faults.
//!
//! After each token the kept set follows the room that the system has left (`KeptBudget`).
//!
//! Not here: what the computation sees of it ([`super::stream`]).

use std::collections::VecDeque;
use std::sync::PoisonError;

use hearth_core::residency::UNDER_WAY;
use hearth_core::residency::kept_bytes;
use hearth_core::residency::kernel_bytes;
use hearth_core::residency::stream_bytes;

use super::stream::{Core, Stage, State};
use super::{At, Span, give_up, is_told};
use crate::clock::wall_nanos;
use crate::memory::Told;
use crate::pages::{expect_no_order, expect_order, populate, processors, resident, will_need};
use crate::read_counter::ReadCounter;

/// What the helper does next.
enum Action {
    GiveUp(usize),
    /// A piece, as one of a part that is asked for in a pass.
    Ask(usize, usize, At),
    Settle,
    Budget,
    Wait,
    End,
}

/// The thread's own side.
pub(super) struct Helper<'a, Memory> {
    core: &'a Core,
    memory: Memory,
    /// What had been read again when a token was last over.
    read_again: Option<u64>,
    counter: ReadCounter,
    /// Whether the system tells what is in memory. Otherwise every piece is asked for.
    told: bool,
    /// Pieces that were asked for, oldest first, with their bytes.
    under_way: VecDeque<(usize, u64)>,
    processors: u32,
    started: bool,
}

impl<'a, Memory: Fn() -> Told> Helper<'a, Memory> {
    pub(super) fn new(core: &'a Core, memory: Memory) -> Self {
        let (counter, under_way) = (ReadCounter::of_this_thread(), VecDeque::new());
        let told = is_told(&core.weights);
        let processors = processors();
        Self { core, memory, read_again: None, counter, told, under_way, processors, started: false }
    }

    pub(super) fn run(mut self) {
        self.core.weights.mappings().for_each(expect_no_order);
        let mut state = self.core.lock();
        loop {
            let action = self.next(&mut state);
            match action {
                Action::End => break,
                Action::Wait => {
                    state.end_span();
                    state = self.core.work.wait(state).unwrap_or_else(PoisonError::into_inner);
                    continue;
                }
                Action::Budget => {
                    drop(state);
                    self.follow_room();
                }
                Action::GiveUp(piece) => {
                    drop(state);
                    give_up(&self.core.weights, self.core.pieces.list[piece].extent);
                    self.gone(piece);
                }
                Action::Ask(piece, part, at) => {
                    drop(state);
                    self.ask(piece, part, at);
                }
                Action::Settle => {
                    drop(state);
                    self.settle();
                }
            }
            state = self.core.lock();
        }
        drop(state);
        self.core.weights.mappings().for_each(expect_order);
    }

    fn next(&mut self, state: &mut State) -> Action {
        if state.ended {
            return Action::End;
        }
        if state.token_over || (!self.started && !state.parts.is_empty()) {
            return Action::Budget;
        }
        // First what keeps the disk busy, then what makes room.
        let under_way: u64 = self.under_way.iter().map(|&(_, bytes)| bytes).sum();
        if under_way < UNDER_WAY.0
            && let Some((piece, part, at)) = self.ahead(state)
        {
            return Action::Ask(piece, part, at);
        }
        while let Some(piece) = state.used.pop() {
            // It may be wanted again already, or be kept by now.
            if state.stages[piece] == Stage::Idle && !state.kept[piece] {
                return Action::GiveUp(piece);
            }
            self.leave(state, piece);
        }
        if self.under_way.is_empty() { Action::Wait } else { Action::Settle }
    }

    /// The next piece, if it can be asked for now, and whose it is.
    fn ahead(&self, state: &mut State) -> Option<(usize, usize, At)> {
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
        let bytes = self.core.pieces.list[piece].pages;
        if !state.kept[piece] && !state.buffered[piece] {
            if state.occupied + bytes > state.buffer && state.occupied > 0 {
                return None;
            }
            state.occupied += bytes;
            state.buffered[piece] = true;
        }
        state.stages[piece] = Stage::Asked;
        state.cursor.1 = piece + 1;
        Some((piece, part, at))
    }

    fn ask(&mut self, piece: usize, part: usize, at: At) {
        let own = &self.core.pieces.list[piece];
        let Some(bytes) = self.core.weights.bytes(own.extent) else { return self.arrived(piece) };
        let absent = self.told.then(|| bytes.len() as u64 - resident(bytes));
        if absent == Some(0) {
            return self.arrived(piece);
        }
        let (start, before) = (wall_nanos(), self.counter.bytes());
        will_need(bytes);
        let read = self.counter.bytes();
        // Present pages are passed over, so what is read is what was missing.
        let missing = absent.unwrap_or(read.saturating_sub(before));
        self.under_way.push_back((piece, bytes.len() as u64));
        let mut state = self.core.lock();
        state.read = read;
        if missing == 0 {
            return;
        }
        if state.kept[piece] && state.loaded[piece] {
            state.lost += missing;
        }
        let new = Span::of(&self.core.pieces.parts[part].0, at, start);
        if state.span.as_ref().is_some_and(|last| last.layers != new.layers || last.at != at) {
            state.end_span();
        }
        state.span.get_or_insert(new).bytes += missing;
    }

    /// Waits for the oldest piece.
    fn settle(&mut self) {
        let Some((piece, _)) = self.under_way.pop_front() else { return };
        if let Some(bytes) = self.core.weights.bytes(self.core.pieces.list[piece].extent) {
            populate(bytes);
        }
        {
            let read = self.counter.bytes();
            let mut state = self.core.lock();
            state.read = read;
            if let Some(span) = &mut state.span {
                span.end = wall_nanos();
            }
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
        if state.stages[piece] == Stage::Idle || state.kept[piece] {
            self.core.leave_buffer(state, piece);
        }
    }

    /// Chooses the kept set anew: at the start, and after each token.
    fn follow_room(&mut self) {
        let share = self.core.pieces.share.total();
        let Told { room, read_again } = (self.memory)();
        let room = room.map(|room| {
            // After the first token the kernel has what it needs for the share, and has taken it from the room.
            let room = if self.started { room + kernel_bytes(share) } else { room };
            let room = room.saturating_sub(self.core.lock().reserved);
            let options = &self.core.options;
            let buffer = stream_bytes(room, share, self.processors, options);
            self.core.lock().buffer = buffer;
            kept_bytes(room, share, self.processors, options)
        });
        if !self.started {
            for &extent in &self.core.pieces.fixed {
                self.core.weights.bytes(extent).map(will_need);
            }
        }
        let mut state = self.core.lock();
        state.token_over = false;
        // What was taken between the helper's look and its use comes back by faults, and only the system's count has it.
        let taken = read_again.zip(self.read_again).map_or(0, |(now, before)| now.saturating_sub(before));
        self.read_again = read_again;
        let lost = std::mem::take(&mut state.lost).max(taken);
        if state.budget.after_token(lost, room) || !self.started {
            let kept = self.core.pieces.share.kept(state.budget.now());
            for (piece, kept) in kept.into_iter().enumerate() {
                let given_up = std::mem::replace(&mut state.kept[piece], kept) && !kept;
                if given_up && state.stages[piece] == Stage::Idle {
                    state.loaded[piece] = false;
                    state.used.push(piece);
                }
            }
        }
        self.started = true;
    }
}
