//! Managed residency: decides which piece of a share is read, awaited and evicted next.
//!
//! The share of a device is cut into pieces. Some are kept in memory; the others stream through a buffer of bounded
//! size, are read ahead of their use and evicted after it. One helper thread works through the requested parts in
//! order. For each piece it
//!
//! 1. starts a read without waiting for it, if the piece is not in memory ([`Step::Read`]). A piece that is not kept
//!    needs room in the buffer. Reads of up to [`READ_DEPTH`] are in flight at once, which keeps a disk busy;
//! 2. evicts what has been used, when it cannot start a read ([`Step::Evict`]);
//! 3. waits for the oldest read, when there is nothing to evict ([`Step::Await`]);
//! 4. confirms that the piece is in memory ([`Step::Confirm`]), in the order of use. From then on the computation
//!    can use it.
//!
//! Kept pieces are ordinary page cache: the system can evict them. After each pass the kept set follows the memory that
//! is left ([`KeptBudget`]).
//!
//! [`ManagedResidency`] is a pure state machine. The simulator and the executor report [`Event`]s and carry out its
//! [`Step`]s; they differ in how long a step takes, never in what is done.
//!
//! Not here: when a part is requested, used and released ([`crate::schedule`]).

use std::collections::VecDeque;
use std::ops::Range;

use hearth_profiles::Bytes;
use hearth_schema::residency::ResidencyOptions;

use super::{KeptBudget, Share, kept_bytes, stream_bytes};

/// Bytes of pieces whose reads are in flight at once, before the helper waits for the first: several keep a disk
/// busy, more only fill its queue.
/// source: measured; 200 MB/s need one piece, 1.5 GB/s need 4 MiB
const READ_DEPTH: Bytes = Bytes::mib(4);

/// The number of a piece.
pub type PieceId = u32;

/// Where a request for a part came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReadOrigin {
    /// The pass, by index.
    pub pass: u32,
    /// The round.
    pub round: u32,
    /// The layers of the part; none for the output head.
    pub layers: Option<[u32; 2]>,
}

/// A part to be read ahead, computed or released.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PartRequest {
    /// Its pieces, in the order of use.
    pub pieces: Range<PieceId>,
    /// Where the request came from.
    pub origin: ReadOrigin,
}

/// What happens to a managed share.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// A part will be needed after those that were requested before.
    Requested(PartRequest),
    /// The device computes for a pass, by index.
    PassBegun(u32),
    /// A part is computed from now on. Parts that were requested before it are dropped.
    PartBegun(PartRequest),
    /// The computation has used all pieces of its part before this one.
    Used(PieceId),
    /// The computation found a piece missing that had been confirmed.
    Faulted(PieceId),
    /// The part has been computed.
    PartEnded,
    /// The request to the model is over: nothing of what was requested is needed.
    Reset,
    /// The process is about to use more or less memory.
    MemoryChanged,
    /// The outcome of [`Step::Measure`].
    Measured {
        /// Bytes of page cache that the kernel can use before it evicts the device's share, if known.
        page_cache: Option<u64>,
        /// Bytes of the kept set that the system reports as evicted.
        evicted: u64,
    },
    /// The outcome of [`Step::Read`].
    Read(PieceId, ReadOutcome),
    /// A read has ended.
    Arrived(PieceId),
    /// The outcome of [`Step::Confirm`]; a piece that is not there is being read again.
    Confirmed(PieceId, bool),
}

/// What became of the attempt to read a piece.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReadOutcome {
    /// All of it is in memory.
    InMemory,
    /// The read of these missing bytes has started.
    Started(u64),
    /// These bytes are missing, and the system does not read them now.
    Dropped(u64),
    /// Nothing has changed; the system needs time to find memory.
    Retry,
}

/// The next step of the helper thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// Measure the memory; answer with [`Event::Measured`].
    Measure,
    /// Start to read a piece if it is not in memory; answer with [`Event::Read`].
    Read(PieceId, ReadOrigin),
    /// Check that a piece which was read, or found in memory, is still in memory; answer with [`Event::Confirmed`].
    Confirm(PieceId, ReadOrigin),
    /// Remove a piece from memory.
    Evict(PieceId),
    /// Wait for a read in flight; answer with [`Event::Arrived`].
    Await(PieceId),
    /// Sleep until an event brings something to do.
    Idle,
}

/// A requested part. `pieces.start <= used <= ready <= requested <= pieces.end`.
#[derive(Debug, Clone)]
struct Part {
    pieces: Range<PieceId>,
    origin: ReadOrigin,
    /// The first piece that the helper has not processed.
    requested: PieceId,
    /// The first piece that is not confirmed.
    ready: PieceId,
    /// The first piece that the computation has not used.
    used: PieceId,
}

impl Part {
    fn new(request: PartRequest) -> Self {
        let start = request.pieces.start;
        Self { pieces: request.pieces, origin: request.origin, requested: start, ready: start, used: start }
    }

    /// Lets the helper process all of it again.
    fn restart(&mut self) {
        let start = self.pieces.start;
        (self.requested, self.ready, self.used) = (start, start, start);
    }
}

#[derive(Debug, Clone, Copy)]
struct Piece {
    bytes: u64,
    kept: bool,
    /// Whether it was loaded since it is kept: if it is missing nevertheless, the system has evicted it.
    loaded: bool,
    /// Whether it occupies part of the stream buffer.
    buffered: bool,
}

/// The state of a device's managed share.
#[derive(Debug, Clone)]
pub struct ManagedResidency {
    options: ResidencyOptions,
    processors: u32,
    share: Share,
    /// The pieces of the share, in the order of use.
    order: Vec<PieceId>,
    pieces: Vec<Piece>,
    budget: KeptBudget,
    /// Bytes that the buffer may hold.
    capacity: u64,
    /// Bytes in the buffer.
    buffered: u64,
    /// Requested parts, in the order of use.
    parts: VecDeque<Part>,
    /// Whether the first part is being computed.
    computing: bool,
    /// Pieces whose reads are in flight, in the order in which they were started.
    under_way: VecDeque<PieceId>,
    /// Pieces to be evicted, none of them kept.
    evictable: VecDeque<PieceId>,
    /// The last pass that was begun.
    pass: Option<u32>,
    /// Bytes of the kept set that were missing since memory was last measured.
    lost: u64,
    /// Whether memory has been measured at least once.
    measured: bool,
    measure_due: bool,
}

impl ManagedResidency {
    /// A share of which nothing is kept before memory has been measured. `visits` are the pieces of the share in the
    /// order of use, those together that are used without a pause; `bytes` are the sizes of all pieces, by number.
    pub fn new(visits: &[Vec<PieceId>], bytes: &[u64], options: ResidencyOptions, processors: u32) -> Self {
        let sizes: Vec<Vec<u64>> =
            visits.iter().map(|visit| visit.iter().map(|&piece| bytes[piece as usize]).collect()).collect();
        let share = Share::new(&sizes);
        let piece = |&bytes: &u64| Piece { bytes, kept: false, loaded: false, buffered: false };
        Self {
            options,
            processors,
            budget: KeptBudget::new(options.max_kept(share.total())),
            share,
            order: visits.concat(),
            pieces: bytes.iter().map(piece).collect(),
            capacity: options.buffer().0,
            buffered: 0,
            parts: VecDeque::new(),
            computing: false,
            under_way: VecDeque::new(),
            evictable: VecDeque::new(),
            pass: None,
            lost: 0,
            measured: false,
            measure_due: false,
        }
    }

    /// Bytes of the share.
    pub fn share_bytes(&self) -> u64 {
        self.share.total()
    }

    /// Bytes in the stream buffer.
    pub fn buffered_bytes(&self) -> u64 {
        self.buffered
    }

    /// The kept pieces, in the order of use.
    pub fn kept(&self) -> impl Iterator<Item = PieceId> {
        self.order.iter().copied().filter(|&piece| self.is_kept(piece))
    }

    /// Whether a piece is kept.
    pub fn is_kept(&self, piece: PieceId) -> bool {
        self.piece(piece).kept
    }

    /// Whether a piece is being read.
    pub fn is_in_flight(&self, piece: PieceId) -> bool {
        self.under_way.contains(&piece)
    }

    /// Whether [`Step::Measure`] comes next.
    pub fn is_measure_due(&self) -> bool {
        self.measure_due || (!self.measured && !self.parts.is_empty())
    }

    /// The first piece of the part being computed that the computation cannot use yet; none while nothing is computed.
    pub fn ready_until(&self) -> Option<PieceId> {
        self.parts.front().filter(|_| self.computing).map(|part| part.ready)
    }

    /// Takes an event. Returns whether it may have given an idle helper something to do.
    pub fn react(&mut self, event: Event) -> bool {
        match event {
            Event::Requested(request) => self.parts.push_back(Part::new(request)),
            Event::PassBegun(pass) => {
                self.measure_due |= self.pass.is_some_and(|last| pass > last);
                self.pass = self.pass.max(Some(pass));
            }
            Event::PartBegun(request) => self.begin(request),
            Event::Used(until) => return self.used(until),
            Event::Faulted(piece) => {
                let Piece { bytes, kept, loaded, .. } = *self.piece(piece);
                self.lost += if self.computing && kept && loaded { bytes } else { 0 };
                return false;
            }
            Event::PartEnded => {
                let before = self.evictable.len();
                if std::mem::take(&mut self.computing) {
                    self.drop_first();
                }
                return self.evictable.len() > before;
            }
            Event::Reset => {
                while !self.parts.is_empty() {
                    self.drop_first();
                }
                self.computing = false;
                self.measure_due |= self.pass.take().is_some();
            }
            Event::MemoryChanged => self.measure_due = true,
            Event::Measured { page_cache, evicted } => self.follow_memory(page_cache, evicted),
            Event::Read(piece, outcome) => self.read(piece, outcome),
            Event::Arrived(piece) => self.under_way.retain(|&other| other != piece),
            Event::Confirmed(piece, true) => {
                if let Some(part) = self.parts.iter_mut().find(|part| awaits(part, piece)) {
                    part.ready += 1;
                    let piece = self.piece_mut(piece);
                    piece.loaded = piece.kept;
                }
            }
            Event::Confirmed(piece, false) => self.under_way.push_back(piece),
        }
        true
    }

    /// The next step of the helper thread. Ask again after it has been carried out and its outcome been reported.
    pub fn next_step(&mut self) -> Step {
        if self.is_measure_due() {
            return Step::Measure;
        }
        loop {
            if let Some(step) = self.next_confirmed() {
                return step;
            }
            // As long as something can be read the disk comes first: evicting can wait.
            match self.next_read() {
                NextRead::Start(piece, origin) => return Step::Read(piece, origin),
                NextRead::StillThere => {}
                NextRead::None => break,
            }
        }
        if let Some(at) = self.evictable.iter().position(|&piece| !self.is_in_flight(piece))
            && let Some(piece) = self.evictable.remove(at)
        {
            self.leave_buffer(piece);
            return Step::Evict(piece);
        }
        self.under_way.front().map_or(Step::Idle, |&piece| Step::Await(piece))
    }

    /// The piece after the confirmed ones, if it is not in flight.
    fn next_confirmed(&self) -> Option<Step> {
        for part in &self.parts {
            if part.ready < part.requested {
                let under_way = self.is_in_flight(part.ready);
                return (!under_way).then_some(Step::Confirm(part.ready, part.origin));
            }
            if part.requested < part.pieces.end {
                return None;
            }
        }
        None
    }

    fn next_read(&mut self) -> NextRead {
        let Some(at) = self.parts.iter().position(|part| part.requested < part.pieces.end) else {
            return NextRead::None;
        };
        let (id, origin) = (self.parts[at].requested, self.parts[at].origin);
        let piece = *self.piece(id);
        // What has been used and not been evicted yet is needed again, and stays.
        if !piece.kept
            && let Some(used) = self.evictable.iter().position(|&used| used == id)
        {
            self.evictable.remove(used);
            self.enter_buffer(id);
            self.parts[at].requested += 1;
            return NextRead::StillThere;
        }
        // An unused piece in the buffer is used before it is needed a second time.
        let overfull = self.buffered > 0 && self.buffered + piece.bytes > self.capacity;
        let under_way: u64 = self.under_way.iter().map(|&other| self.piece(other).bytes).sum();
        if (!piece.kept && (piece.buffered || overfull)) || under_way >= READ_DEPTH.0 {
            return NextRead::None;
        }
        self.parts[at].requested += 1;
        if !piece.kept {
            self.enter_buffer(id);
        }
        NextRead::Start(id, origin)
    }

    fn read(&mut self, piece: PieceId, outcome: ReadOutcome) {
        let missing = match outcome {
            ReadOutcome::InMemory => return,
            ReadOutcome::Started(missing) => {
                self.under_way.push_back(piece);
                missing
            }
            ReadOutcome::Dropped(missing) => missing,
            ReadOutcome::Retry => {
                let asked = |part: &&mut Part| part.pieces.contains(&piece) && part.requested == piece + 1;
                if let Some(part) = self.parts.iter_mut().rev().find(asked) {
                    part.requested = piece;
                }
                if !self.is_kept(piece) {
                    self.leave_buffer(piece);
                }
                return;
            }
        };
        self.lost += if self.piece(piece).loaded { missing } else { 0 };
    }

    fn begin(&mut self, request: PartRequest) {
        let requested = self.parts.iter().position(|part| part.pieces == request.pieces);
        if let Some(earlier) = requested {
            (0..earlier).for_each(|_| self.drop_first());
        } else {
            // What was expected sooner was expected wrongly. It must not hold the buffer.
            for at in 0..self.parts.len() {
                self.abandon(at);
                self.parts[at].restart();
            }
            self.parts.push_front(Part::new(request));
        }
        self.computing = true;
    }

    fn used(&mut self, until: PieceId) -> bool {
        let Some(part) = self.parts.front_mut().filter(|_| self.computing) else { return false };
        let pieces = part.used..until;
        // A computation that waited in vain overtakes the helper.
        part.used = part.used.max(until);
        (part.ready, part.requested) = (part.ready.max(part.used), part.requested.max(part.used));
        let (queued, held) = (self.evictable.len(), self.buffered);
        for piece in pieces {
            if self.piece(piece).kept {
                // It came through the buffer, and is to be kept now.
                self.leave_buffer(piece);
            } else {
                self.evictable.push_back(piece);
            }
        }
        self.evictable.len() > queued || (held > 0 && self.buffered == 0)
    }

    /// Forgets the first part.
    fn drop_first(&mut self) {
        self.abandon(0);
        self.parts.pop_front();
    }

    /// What was read for a part and has not been used is evicted, unless it is kept.
    fn abandon(&mut self, part: usize) {
        let unused = self.parts[part].used..self.parts[part].requested;
        self.evictable.extend(unused.filter(|&piece| !self.pieces[piece as usize].kept));
    }

    /// Chooses the kept set and the size of the buffer again.
    fn follow_memory(&mut self, page_cache: Option<u64>, evicted: u64) {
        let (share, processors, options) = (self.share.total(), self.processors, self.options);
        if let Some(bytes) = page_cache {
            self.capacity = stream_bytes(bytes, share, processors, &options);
        }
        let limit = page_cache.map(|bytes| kept_bytes(bytes, share, processors, &options));
        let lost = std::mem::take(&mut self.lost).max(evicted);
        if self.budget.after_token(lost, limit) || !self.measured {
            self.choose_kept();
        }
        (self.measured, self.measure_due) = (true, false);
    }

    fn choose_kept(&mut self) {
        let kept = self.share.kept(self.budget.now());
        // What the computation has still to use is evicted after that.
        let parts = &self.parts;
        let awaited = |piece| parts.iter().any(|part| (part.used..part.requested).contains(&piece));
        for (&id, kept) in self.order.iter().zip(kept) {
            let piece = &mut self.pieces[id as usize];
            if piece.kept && !kept && !awaited(id) {
                self.evictable.push_back(id);
            }
            piece.loaded &= kept;
            piece.kept = kept;
        }
        for id in std::mem::take(&mut self.evictable) {
            if self.piece(id).kept {
                self.leave_buffer(id);
            } else {
                self.evictable.push_back(id);
            }
        }
    }

    fn enter_buffer(&mut self, piece: PieceId) {
        let piece = &mut self.pieces[piece as usize];
        if !std::mem::replace(&mut piece.buffered, true) {
            self.buffered += piece.bytes;
        }
    }

    fn leave_buffer(&mut self, piece: PieceId) {
        let piece = &mut self.pieces[piece as usize];
        if std::mem::take(&mut piece.buffered) {
            self.buffered -= piece.bytes;
        }
    }

    fn piece(&self, piece: PieceId) -> &Piece {
        &self.pieces[piece as usize]
    }

    fn piece_mut(&mut self, piece: PieceId) -> &mut Piece {
        &mut self.pieces[piece as usize]
    }
}

/// Whether a piece is the next of a part to be confirmed.
fn awaits(part: &Part, piece: PieceId) -> bool {
    part.ready == piece && part.ready < part.requested
}

/// What can be read next.
enum NextRead {
    Start(PieceId, ReadOrigin),
    /// The next piece has not left memory since its last use.
    StillThere,
    /// Nothing, or there is no room for it.
    None,
}

#[cfg(test)]
mod tests;
