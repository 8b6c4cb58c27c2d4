//! Managed residency: decides which piece of a device's weights is read, awaited or evicted next.
//!
//! The weights that a device uses for a token are divided into pieces. Some are kept in memory. The others stream
//! through a buffer of bounded size: they are read before their use and evicted after it. One helper thread
//! processes the requested parts in order. It starts reads without waiting for them, up to [`READ_DEPTH`] at the
//! same time. If it cannot start a read, it evicts used pieces, and if there are none, it waits for the oldest
//! read. The computation can use a piece once the helper has confirmed that it is in memory.
//!
//! Kept pieces are ordinary page cache, so the system can evict them. After each pass the kept set is adapted to the
//! available memory ([`KeptBudget`]).
//!
//! Not here: when a part is requested, used and released ([`crate::schedule`]).

use std::collections::VecDeque;
use std::ops::Range;

use hearth_profiles::Bytes;
use hearth_schema::residency::ResidencyOptions;

use super::{EvictionOrder, KeptBudget, kept_bytes, stream_buffer_bytes};

/// Number of bytes being read at which the helper thread starts no further read, but waits for the oldest read.
/// source: measured; a disk of 200 MB/s needs one piece, one of 1.5 GB/s 4 MiB; more only fills its queue
const READ_DEPTH: Bytes = Bytes::from_mib(4);

/// The index of a piece among the pieces of a device's weights.
pub type PieceId = u32;

/// The pass, round and layers for which a part of the weights is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReadOrigin {
    pub pass: u32,
    pub round: u32,
    /// The indices of the first layer of the part and of the layer after the last one; `None` for the output matrix.
    pub layers: Option<[u32; 2]>,
}

/// A part of a device's weights that is prefetched or used by a computation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WeightPart {
    /// The pieces of the part, in the order of use.
    pub pieces: Range<PieceId>,
    pub origin: ReadOrigin,
}

/// An event of a device with managed residency.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// A part will be used after all parts that were requested earlier.
    Requested(WeightPart),
    /// The device begins to compute the pass with this index.
    PassBegun(u32),
    /// The computation of a part begins. Parts that were requested earlier are dropped.
    PartBegun(WeightPart),
    /// The computation has used all pieces of its part that precede this piece.
    Used(PieceId),
    /// The computation found that a confirmed piece is not in memory.
    Faulted(PieceId),
    /// The computation of the current part has ended.
    PartEnded,
    /// The generation has ended: all requested parts are dropped.
    Reset,
    /// The memory use of the process changes, so the available memory must be measured again.
    MemoryChanged,
    /// The outcome of [`Step::Measure`]: the bytes of page cache that the operating system can use before it evicts the
    /// device's weights, if known, and the bytes of the kept set that the operating system reports as evicted.
    Measured { page_cache: Option<u64>, evicted: u64 },
    /// The outcome of [`Step::Read`].
    Read(PieceId, ReadOutcome),
    /// The outcome of [`Step::Await`]: the piece has been read.
    Arrived(PieceId),
    /// The outcome of [`Step::Confirm`]: whether the piece is in memory. If not, the piece is being read again.
    Confirmed(PieceId, bool),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReadOutcome {
    InMemory,
    /// The read of this number of bytes, which were not in memory, has started.
    Started(u64),
    /// This number of bytes is not in memory, and the operating system ignored the read request. The helper thread does
    /// not repeat the step.
    Dropped(u64),
    /// No read was started, because the operating system has no free memory now. The step must be repeated.
    Retry,
}

/// The next step of the helper thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// Measure the available memory and report [`Event::Measured`].
    Measure,
    /// Start to read a piece if it is not in memory and report [`Event::Read`].
    Read(PieceId, ReadOrigin),
    /// Check whether a piece that was read or found in memory is still in memory, and report [`Event::Confirmed`].
    Confirm(PieceId, ReadOrigin),
    Evict(PieceId),
    /// Wait for the read of a piece and report [`Event::Arrived`].
    Await(PieceId),
    /// Sleep until [`ManagedResidency::react`] returns true.
    Idle,
}

/// A requested part of the weights. `pieces.start <= used <= ready <= requested <= pieces.end`.
#[derive(Debug, Clone)]
struct Part {
    pieces: Range<PieceId>,
    origin: ReadOrigin,
    /// The first piece that the helper thread has not processed.
    requested: PieceId,
    /// The first piece that is not confirmed to be in memory.
    ready: PieceId,
    /// The first piece that the computation has not used.
    used: PieceId,
}

impl Part {
    fn new(request: WeightPart) -> Self {
        let start = request.pieces.start;
        Self { pieces: request.pieces, origin: request.origin, requested: start, ready: start, used: start }
    }
}

#[derive(Debug, Clone, Copy)]
struct Piece {
    bytes: u64,
    kept: bool,
    /// Whether the piece was read as a kept piece. If it is missing later, the operating system has evicted it.
    loaded: bool,
    /// Whether the piece occupies part of the stream buffer.
    buffered: bool,
}

/// The state of managed residency on one device.
#[derive(Debug, Clone, Default)]
pub struct ManagedResidency {
    options: ResidencyOptions,
    cpus: u32,
    eviction_order: EvictionOrder,
    /// The pieces of the device's weights, in the order of use.
    order: Vec<PieceId>,
    pieces: Vec<Piece>,
    budget: KeptBudget,
    /// Capacity of the stream buffer in bytes.
    capacity: u64,
    buffered: u64,
    parts: VecDeque<Part>,
    computing: bool,
    /// Pieces whose reads are in flight, in the order of their start.
    in_flight: VecDeque<PieceId>,
    /// Pieces to evict. Kept pieces are never in this list.
    evictable: VecDeque<PieceId>,
    pass: Option<u32>,
    /// Bytes of the kept set that were found missing since the last measurement of memory.
    lost: u64,
    measured: bool,
    measure_due: bool,
}

impl ManagedResidency {
    /// Creates the state for the weights of a device. No piece is kept until memory has been measured. `busy_periods`
    /// lists, for each busy period (the work between two idle times of the device), the pieces in the order of use.
    /// `bytes` has the size of each piece by its index. `cpus` is the number of CPUs of the machine.
    pub fn new(busy_periods: &[Vec<PieceId>], bytes: &[u64], options: ResidencyOptions, cpus: u32) -> Self {
        let sizes = |pieces: &Vec<PieceId>| pieces.iter().map(|&piece| bytes[piece as usize]).collect();
        let eviction_order = EvictionOrder::new(&busy_periods.iter().map(sizes).collect::<Vec<_>>());
        let piece = |&bytes: &u64| Piece { bytes, kept: false, loaded: false, buffered: false };
        Self {
            options,
            cpus,
            budget: KeptBudget::new(options.max_kept_bytes(eviction_order.total_bytes())),
            eviction_order,
            order: busy_periods.concat(),
            pieces: bytes.iter().map(piece).collect(),
            capacity: options.stream_buffer_bytes().0,
            ..Self::default()
        }
    }

    /// Returns the total size of the pieces.
    pub fn weight_bytes(&self) -> u64 {
        self.eviction_order.total_bytes()
    }

    /// Returns the size of the pieces in the stream buffer.
    pub fn buffered_bytes(&self) -> u64 {
        self.buffered
    }

    /// Returns the pieces that are kept in memory, in the order of use.
    pub fn kept_pieces(&self) -> impl Iterator<Item = PieceId> {
        self.order.iter().copied().filter(|&piece| self.is_kept(piece))
    }

    pub fn is_kept(&self, piece: PieceId) -> bool {
        self.piece(piece).kept
    }

    pub fn is_in_flight(&self, piece: PieceId) -> bool {
        self.in_flight.contains(&piece)
    }

    /// Whether the next step is [`Step::Measure`].
    pub fn is_measurement_due(&self) -> bool {
        self.measure_due || (!self.measured && !self.parts.is_empty())
    }

    /// Returns the first piece that the computation cannot use yet, `None` if no part is being computed.
    pub fn first_pending_piece(&self) -> Option<PieceId> {
        self.parts.front().filter(|_| self.computing).map(|part| part.ready)
    }

    /// Handles an event. Returns whether an idle helper thread has to be woken.
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
            Event::Arrived(piece) => self.in_flight.retain(|&other| other != piece),
            Event::Confirmed(piece, true) => {
                let is_next = |part: &&mut Part| part.ready == piece && part.ready < part.requested;
                if let Some(part) = self.parts.iter_mut().find(is_next) {
                    part.ready += 1;
                    let piece = &mut self.pieces[piece as usize];
                    piece.loaded = piece.kept;
                }
            }
            Event::Confirmed(piece, false) => self.in_flight.push_back(piece),
        }
        true
    }

    /// Returns the next step. The helper thread must execute the step and report its outcome before the next call.
    pub fn next_step(&mut self) -> Step {
        if self.is_measurement_due() {
            return Step::Measure;
        }
        loop {
            if let Some(step) = self.next_confirmed() {
                return step;
            }
            // Reads have priority over evictions, to keep the disk busy.
            match self.next_read() {
                NextRead::Start(piece, origin) => return Step::Read(piece, origin),
                NextRead::InMemory => {}
                NextRead::None => break,
            }
        }
        if let Some(at) = self.evictable.iter().position(|&piece| !self.is_in_flight(piece))
            && let Some(piece) = self.evictable.remove(at)
        {
            self.leave_buffer(piece);
            return Step::Evict(piece);
        }
        self.in_flight.front().map_or(Step::Idle, |&piece| Step::Await(piece))
    }

    /// Returns the step that confirms the first unconfirmed piece; `None` while the piece is not yet requested or read.
    fn next_confirmed(&self) -> Option<Step> {
        for part in &self.parts {
            if part.ready < part.requested {
                return (!self.is_in_flight(part.ready)).then_some(Step::Confirm(part.ready, part.origin));
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
        // A used piece that has not been evicted yet is needed again and stays in memory.
        if !piece.kept
            && let Some(used) = self.evictable.iter().position(|&used| used == id)
        {
            self.evictable.remove(used);
            self.enter_buffer(id);
            self.parts[at].requested += 1;
            return NextRead::InMemory;
        }
        // A piece that is still in the buffer for an earlier use is not read again before that use.
        let is_full = self.buffered > 0 && self.buffered + piece.bytes > self.capacity;
        let in_flight: u64 = self.in_flight.iter().map(|&other| self.piece(other).bytes).sum();
        if (!piece.kept && (piece.buffered || is_full)) || in_flight >= READ_DEPTH.0 {
            return NextRead::None;
        }
        self.parts[at].requested += 1;
        if !piece.kept {
            self.enter_buffer(id);
        }
        NextRead::Start(id, origin)
    }

    fn read(&mut self, piece: PieceId, outcome: ReadOutcome) {
        let is_loaded = self.piece(piece).loaded;
        match outcome {
            ReadOutcome::InMemory => {}
            ReadOutcome::Started(missing) => {
                self.in_flight.push_back(piece);
                self.lost += if is_loaded { missing } else { 0 };
            }
            ReadOutcome::Dropped(missing) => self.lost += if is_loaded { missing } else { 0 },
            ReadOutcome::Retry => {
                let is_last = |part: &&mut Part| part.pieces.contains(&piece) && part.requested == piece + 1;
                if let Some(part) = self.parts.iter_mut().rev().find(is_last) {
                    part.requested = piece;
                }
                if !self.is_kept(piece) {
                    self.leave_buffer(piece);
                }
            }
        }
    }

    fn begin(&mut self, request: WeightPart) {
        let requested = self.parts.iter().position(|part| part.pieces == request.pieces);
        if let Some(earlier) = requested {
            (0..earlier).for_each(|_| self.drop_first());
        } else {
            // The part was not requested. Pieces of the parts that were must not occupy the buffer until then.
            for at in 0..self.parts.len() {
                self.abandon(at);
                let part = &mut self.parts[at];
                let start = part.pieces.start;
                (part.requested, part.ready, part.used) = (start, start, start);
            }
            self.parts.push_front(Part::new(request));
        }
        self.computing = true;
    }

    fn used(&mut self, until: PieceId) -> bool {
        let Some(part) = self.parts.front_mut().filter(|_| self.computing) else { return false };
        let pieces = part.used..until;
        // The computation may overtake the helper.
        part.used = part.used.max(until);
        (part.ready, part.requested) = (part.ready.max(part.used), part.requested.max(part.used));
        let (evictable, buffered) = (self.evictable.len(), self.buffered);
        pieces.for_each(|piece| self.evict_or_keep(piece));
        self.evictable.len() > evictable || (buffered > 0 && self.buffered == 0)
    }

    fn drop_first(&mut self) {
        self.abandon(0);
        self.parts.pop_front();
    }

    /// Marks for eviction all pieces that were read for a part and are still unused, except kept pieces.
    fn abandon(&mut self, part: usize) {
        let unused = self.parts[part].used..self.parts[part].requested;
        self.evictable.extend(unused.filter(|&piece| !self.pieces[piece as usize].kept));
    }

    /// Adapts the kept set and the size of the stream buffer to the measured memory.
    fn follow_memory(&mut self, page_cache: Option<u64>, evicted: u64) {
        let (weights, cpus, options) = (self.weight_bytes(), self.cpus, self.options);
        if let Some(bytes) = page_cache {
            self.capacity = stream_buffer_bytes(bytes, weights, cpus, &options);
        }
        let limit = page_cache.map(|bytes| kept_bytes(bytes, weights, cpus, &options));
        let lost = std::mem::take(&mut self.lost).max(evicted);
        if self.budget.update_after_token(lost, limit) || !self.measured {
            self.choose_kept();
        }
        (self.measured, self.measure_due) = (true, false);
    }

    fn choose_kept(&mut self) {
        let kept = self.eviction_order.kept_flags(self.budget.bytes);
        // Pieces that the computation still has to use are evicted after their use.
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
            self.evict_or_keep(id);
        }
    }

    /// Marks a used piece for eviction, unless it has become a kept piece since it was read through the buffer.
    fn evict_or_keep(&mut self, piece: PieceId) {
        if self.is_kept(piece) {
            self.leave_buffer(piece);
        } else {
            self.evictable.push_back(piece);
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
}

/// The result of the search for the next piece to read.
enum NextRead {
    Start(PieceId, ReadOrigin),
    /// The next piece has not been evicted since its last use, so no read is needed.
    InMemory,
    /// No piece is requested, or the buffer or the read queue is full.
    None,
}

#[cfg(test)]
mod tests;
