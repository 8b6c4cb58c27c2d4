//! How does a device read its weights if it decides itself which of them stay in memory?
//!
//! Its share is cut into pieces. Some are kept; the others stream through a buffer, read ahead of their turn and
//! paged out behind it ([`hearth_schema::residency`] says which and how many). One helper thread goes through
//! the announced parts in order. It asks for as many pieces as the buffer admits (`WILLNEED`, one piece exactly),
//! pages out one by one what has been used, and then waits for the oldest piece (`POPULATE_READ`). A computation may
//! use what the helper has passed, and waits for the helper where it has not. So reading goes on while the
//! device computes and while others do.
//!
//! Kept pieces are ordinary page cache below: if there are more of them than memory has room for, they are
//! evicted like anything else, and are read again at their next turn. After each token the kept set follows
//! what was lost.
//!
//! Deviation: a piece is a chunk of the file, and one that lies across two layers belongs to the first.

use std::collections::VecDeque;

use hearth_core::residency::KeptBudget;
use hearth_core::residency::Share;
use hearth_core::residency::UNDER_WAY;
use hearth_core::residency::kept_bytes;
use hearth_core::residency::stream_bytes;
use hearth_profiles::Bytes;
use hearth_schema::residency::ResidencyOptions;
use hearth_schema::trace::Record;

use super::helper::Job;
use super::keeper::Found;
use super::storage::{NO_ROOM_PAUSE, Storage, Touch};
use crate::engine::Nanos;
use crate::page_cache::{Chunk, Fetch};
use crate::resource::Flow;

/// The least that a call of the kernel takes.
/// source: assumed; keeps events apart
const CALL: Nanos = 1000;

/// A part that will be needed, or is.
#[derive(Debug, Clone)]
struct Part {
    job: Job,
    /// The first piece that has not been asked for.
    asked: Chunk,
    /// The first piece that the helper has not passed: those before it can be used.
    passed: Chunk,
}

/// Reads for one part, between which the helper did not rest.
#[derive(Debug, Clone)]
struct Stretch {
    record: Record,
    outstanding: u32,
    /// Nothing is added any more.
    over: bool,
}

/// What is known of a piece.
#[derive(Debug, Clone, Copy, Default)]
struct Piece {
    kept: bool,
    /// It has been in memory since it is kept: if it is missing, the system has taken it.
    had: bool,
    /// It is in the buffer: asked for, and not given up yet.
    buffered: bool,
}

/// What goes on in the helper thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Doing {
    Nothing,
    /// An event that goes on is pending.
    Awake,
    /// It waits until this piece arrives.
    Waits(Chunk),
}

/// What asking for a piece came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Asked {
    /// It is there.
    ForNothing,
    /// A call of the kernel, of at least this length.
    Spent(Nanos),
    /// There is nothing to ask for, or no room for it.
    NotNow,
}

/// The kept set and the buffer of one device, and the helper thread that serves them.
#[derive(Debug, Clone)]
pub struct Stream {
    place: u16,
    options: ResidencyOptions,
    processors: u32,
    /// Pieces that the buffer holds.
    room: u32,
    share: Share,
    /// The pieces of the share in the order of use.
    order: Vec<Chunk>,
    pieces: Vec<Piece>,
    budget: KeptBudget,
    /// Announced parts, in the order of use.
    parts: VecDeque<Part>,
    /// Whether the first part is being computed.
    using: bool,
    /// Pieces in the buffer.
    buffered: u32,
    /// Pieces that are being read, in the order in which they were asked for.
    under_way: VecDeque<Chunk>,
    /// Pieces to be paged out.
    used: VecDeque<Chunk>,
    doing: Doing,
    stretches: VecDeque<Stretch>,
    /// The pass that was computed last.
    pass: Option<u32>,
    /// Bytes of the kept set that were missing in this pass.
    lost: u64,
}

/// Pieces that so many bytes hold, at least one.
fn pieces(bytes: u64, piece: u64) -> u32 {
    u32::try_from(bytes / piece).unwrap_or(u32::MAX).max(1)
}

impl Stream {
    /// The stream of the device at a place. `visits` are the chunks of its share, what is used between two times
    /// of idleness together; `memory` is what the plan believes there to be, for a file of so many `chunks`.
    pub fn new(
        place: usize,
        options: ResidencyOptions,
        visits: &[Vec<Chunk>],
        memory: Bytes,
        processors: u32,
        chunks: Chunk,
    ) -> Self {
        let piece = options.piece().0;
        let bytes: Vec<Vec<u64>> = visits.iter().map(|visit| vec![piece; visit.len()]).collect();
        let share = Share::new(&bytes);
        let mut budget = KeptBudget::new(options.most_kept(share.total()));
        budget.after_token(0, Some(kept_bytes(memory.0, share.total(), processors, &options)));
        let mut stream = Self {
            place: place as u16,
            options,
            processors,
            room: pieces(stream_bytes(memory.0, share.total(), processors, &options), piece),
            share,
            order: visits.concat(),
            pieces: vec![Piece::default(); chunks as usize],
            budget,
            parts: VecDeque::new(),
            using: false,
            buffered: 0,
            under_way: VecDeque::new(),
            used: VecDeque::new(),
            doing: Doing::Nothing,
            stretches: VecDeque::new(),
            pass: None,
            lost: 0,
        };
        stream.keep();
        stream
    }

    /// The kept pieces.
    pub fn kept(&self) -> impl Iterator<Item = Chunk> {
        self.order.iter().copied().filter(|&chunk| self.pieces[chunk as usize].kept)
    }

    /// Makes the kept set what the budget says; pieces that are kept no longer go.
    fn keep(&mut self) {
        let kept = self.share.kept(self.budget.now());
        // What has been asked for and is still to be used goes when it has been used.
        let parts = &self.parts;
        let awaited = |chunk| parts.iter().any(|part| (part.job.chunks.start..part.asked).contains(&chunk));
        for (&chunk, kept) in self.order.iter().zip(kept) {
            let piece = &mut self.pieces[chunk as usize];
            if piece.kept && !kept && !awaited(chunk) {
                self.used.push_back(chunk);
            }
            piece.had &= kept;
            piece.kept = kept;
        }
        let Self { used, pieces, buffered, .. } = self;
        used.retain(|&chunk| {
            let piece = &mut pieces[chunk as usize];
            *buffered -= u32::from(piece.kept && std::mem::take(&mut piece.buffered));
            !piece.kept
        });
    }

    /// A part will be needed. True if the helper must be woken.
    pub fn announce(&mut self, job: Job) -> bool {
        self.parts.push_back(Part::new(job));
        self.wake()
    }

    /// A part is needed now. True if the helper must be woken.
    pub fn begin(&mut self, job: Job, storage: &Storage) -> bool {
        let token_over = self.pass.is_some_and(|pass| job.pass.index > pass);
        if token_over {
            let lost = std::mem::take(&mut self.lost);
            let memory = u64::from(storage.view().view().capacity()) * storage.chunk().0;
            let (share, processors) = (self.share.total(), self.processors);
            let room = kept_bytes(memory, share, processors, &self.options);
            self.room = pieces(stream_bytes(memory, share, processors, &self.options), storage.chunk().0);
            if self.budget.after_token(lost, Some(room)) {
                self.keep();
            }
        }
        self.pass = self.pass.max(Some(job.pass.index));
        let announced = self.parts.iter().position(|part| part.job.chunks == job.chunks);
        // What was expected sooner was expected wrongly. It must not hold the buffer.
        for _ in 0..announced.unwrap_or(0) {
            if let Some(part) = self.parts.pop_front() {
                self.give_up(&part);
            }
        }
        if announced.is_none() {
            for mut part in std::mem::take(&mut self.parts) {
                self.give_up(&part);
                (part.asked, part.passed) = (part.job.chunks.start, part.job.chunks.start);
                self.parts.push_back(part);
            }
            self.parts.push_front(Part::new(job));
        }
        self.using = true;
        self.wake()
    }

    /// The part has been computed.
    pub fn end(&mut self) {
        if std::mem::take(&mut self.using) {
            self.parts.pop_front();
        }
    }

    /// Everything that was read for a part and is not kept is to be paged out.
    fn give_up(&mut self, part: &Part) {
        let read = part.job.chunks.start..part.asked;
        self.used.extend(read.filter(|&chunk| !self.pieces[chunk as usize].kept));
    }

    /// How much of these chunks the computation can use now. A streamed piece ends a stretch, so that it can be
    /// given up as soon as it has been used.
    pub fn find(&self, chunks: std::ops::Range<Chunk>, storage: &Storage) -> Found {
        let cache = storage.view().view();
        let Some(part) = self.parts.front().filter(|_| self.using) else {
            // An embedding row: in memory by chance, or read by itself.
            return if cache.holds(chunks.start) { Found::Ready(1) } else { Found::Missing };
        };
        if part.passed <= chunks.start {
            return Found::Coming;
        }
        let mut ready = 0;
        for chunk in chunks.start..chunks.end.min(part.passed) {
            if !cache.holds(chunk) {
                break;
            }
            ready += 1;
            if !self.pieces[chunk as usize].kept {
                break;
            }
        }
        if ready == 0 { Found::Missing } else { Found::Ready(ready) }
    }

    /// The computation stands at a chunk that the helper has passed and that is gone, or at an embedding row.
    /// The mapping is advised of random access: nothing is read around it.
    pub fn fault(&mut self, now: Nanos, chunk: Chunk, unit: Bytes, storage: &mut Storage) -> Touch {
        if !self.using {
            return storage.read_aside(now, unit);
        }
        let piece = self.pieces[chunk as usize];
        self.lost += if piece.kept && piece.had { storage.chunk().0 } else { 0 };
        storage.touch_exactly(now, chunk, Flow::Fault)
    }

    /// These chunks have been used. True if the helper must be woken.
    pub fn used(&mut self, chunks: std::ops::Range<Chunk>) -> bool {
        if !self.using {
            return false;
        }
        let before = self.used.len();
        for chunk in chunks {
            let piece = &mut self.pieces[chunk as usize];
            if !piece.kept {
                self.used.push_back(chunk);
            } else if std::mem::take(&mut piece.buffered) {
                // It came through the buffer, and is to be kept now.
                self.buffered -= 1;
            }
        }
        self.used.len() > before && self.wake()
    }

    /// Works until it has spent time; returns when it goes on, if by itself.
    pub fn work(&mut self, now: Nanos, storage: &mut Storage) -> Option<Nanos> {
        let pause = loop {
            if let Some(pause) = self.pass_what_is_there(now, storage) {
                break Some(pause);
            }
            // As long as there is room to read, the disk comes first: paging out can wait.
            match self.ask(now, storage) {
                Asked::ForNothing => {}
                Asked::Spent(pause) => break Some(pause),
                Asked::NotNow => break self.page_out(storage),
            }
        };
        self.doing = match (pause, self.under_way.front()) {
            (Some(_), _) => Doing::Awake,
            (None, Some(&oldest)) => Doing::Waits(oldest),
            (None, None) => Doing::Nothing,
        };
        if self.doing == Doing::Nothing {
            self.stretches.iter_mut().for_each(|stretch| stretch.over = true);
        }
        pause.map(|pause| now + storage.toil().to_nanos().max(pause))
    }

    /// Pages one piece out.
    fn page_out(&mut self, storage: &mut Storage) -> Option<Nanos> {
        let at = self.used.iter().position(|chunk| !self.under_way.contains(chunk))?;
        let chunk = self.used.remove(at)?;
        storage.discard(chunk);
        if std::mem::take(&mut self.pieces[chunk as usize].buffered) {
            self.buffered -= 1;
        }
        Some(CALL)
    }

    /// Lets the computation have what has arrived, in order. A piece that the kernel did not read or took again is
    /// asked for once more.
    fn pass_what_is_there(&mut self, now: Nanos, storage: &mut Storage) -> Option<Nanos> {
        for at in 0..self.parts.len() {
            let part = &mut self.parts[at];
            while part.passed < part.asked {
                let chunk = part.passed;
                if self.under_way.contains(&chunk) {
                    return None;
                }
                match storage.touch_exactly(now, chunk, Flow::Prefetch) {
                    Touch::Ready => {}
                    Touch::Waits => {
                        self.started(now, at, chunk, storage.chunk());
                        return Some(CALL);
                    }
                    Touch::NoRoom => return Some(NO_ROOM_PAUSE),
                }
                let piece = &mut self.pieces[chunk as usize];
                piece.had = piece.kept;
                part.passed += 1;
            }
            if part.asked < part.job.chunks.end {
                return None;
            }
        }
        None
    }

    /// Asks for the next piece, if it is there or the buffer has room for it.
    fn ask(&mut self, now: Nanos, storage: &mut Storage) -> Asked {
        let Some(at) = self.parts.iter().position(|part| part.asked < part.job.chunks.end) else {
            return Asked::NotNow;
        };
        let chunk = self.parts[at].asked;
        let piece = self.pieces[chunk as usize];
        // One that has been used and not given up yet is needed again, and stays. One that has still to be used is
        // used once more before it is needed again.
        let of_used = (!piece.kept).then(|| self.used.iter().position(|&used| used == chunk)).flatten();
        if of_used.and_then(|at| self.used.remove(at)).is_some() {
            if !std::mem::replace(&mut self.pieces[chunk as usize].buffered, true) {
                self.buffered += 1;
            }
            self.parts[at].asked += 1;
            return Asked::ForNothing;
        }
        let full = !piece.kept && (self.buffered >= self.room || piece.buffered);
        if full || storage.chunk() * self.under_way.len() as u64 >= UNDER_WAY {
            return Asked::NotNow;
        }
        let fetch = storage.prefetch(now, chunk);
        if fetch == Fetch::Again {
            return Asked::Spent(CALL);
        }
        self.parts[at].asked += 1;
        if !piece.kept {
            self.pieces[chunk as usize].buffered = true;
            self.buffered += 1;
        }
        match fetch {
            Fetch::Present => return Asked::ForNothing,
            Fetch::Started => self.started(now, at, chunk, storage.chunk()),
            // Dropped by the kernel, which costs time all the same.
            Fetch::NoRoom | Fetch::Again => {}
        }
        self.lost += if piece.had { storage.chunk().0 } else { 0 };
        Asked::Spent(CALL)
    }

    /// A piece of a part is on its way.
    fn started(&mut self, now: Nanos, part: usize, chunk: Chunk, bytes: Bytes) {
        self.under_way.push_back(chunk);
        let job = &self.parts[part].job;
        if let Some(last) = self.stretches.back_mut() {
            let record = &last.record;
            last.over |=
                (record.pass, record.round, record.layers) != (job.pass.index, job.round, job.layers);
        }
        if let Some(last) = self.stretches.back_mut().filter(|last| !last.over) {
            last.outstanding += 1;
            last.record.bytes += bytes.0;
            return;
        }
        let record = job.record(self.place, now, bytes);
        self.stretches.push_back(Stretch { record, outstanding: 1, over: false });
    }

    /// A chunk has arrived, whoever asked for it. True if the helper must be woken.
    pub fn arrived(&mut self, now: Nanos, chunk: Chunk) -> bool {
        if let Some(at) = self.under_way.iter().position(|&under_way| under_way == chunk) {
            self.under_way.remove(at);
            self.stretch_arrived(now);
        }
        let woken = self.doing == Doing::Waits(chunk);
        if woken {
            self.doing = Doing::Awake;
        }
        woken
    }

    /// Stretches follow each other: the disk serves one flow in order.
    fn stretch_arrived(&mut self, now: Nanos) {
        let mut open = self.stretches.iter_mut().skip_while(|stretch| stretch.outstanding == 0);
        let Some(stretch) = open.next() else { return };
        stretch.outstanding -= 1;
        stretch.record.end = now;
        if stretch.outstanding == 0
            && let Some(next) = open.next()
        {
            next.record.start = now;
        }
    }

    /// Moves the records of what has been read to the trace.
    pub fn report(&mut self, records: &mut Vec<Record>) {
        while let Some(stretch) =
            self.stretches.pop_front_if(|stretch| stretch.over && stretch.outstanding == 0)
        {
            records.push(stretch.record);
        }
    }

    /// The run is over: what was being read is recorded as far as it came.
    pub fn flush(&mut self, now: Nanos, records: &mut Vec<Record>) {
        records.extend(self.stretches.drain(..).map(|stretch| {
            let end = if stretch.outstanding > 0 { now } else { stretch.record.end };
            Record { end, ..stretch.record }
        }));
    }

    fn wake(&mut self) -> bool {
        let sleeps = self.doing == Doing::Nothing;
        if sleeps {
            self.doing = Doing::Awake;
        }
        sleeps
    }
}

impl Part {
    fn new(job: Job) -> Self {
        let start = job.chunks.start;
        Self { job, asked: start, passed: start }
    }
}

#[cfg(test)]
mod tests;
