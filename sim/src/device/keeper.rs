//! What does a computation see of the thread that reads its weights ahead?
//!
//! The plan's residency chooses who that is: a [`Helper`] that advises or populates and leaves the rest to the
//! system, or the [`Stream`] of a device that decides itself what stays. The walk asks the same of both: what of
//! these chunks can I use, and what if none?
//!
//! Not here: what either does in the background.

use std::ops::Range;

use hearth_profiles::Bytes;
use hearth_schema::trace::Record;

use super::helper::{Helper, Job};
use super::storage::{Storage, Touch};
use super::stream::Stream;
use crate::engine::Nanos;
use crate::page_cache::Chunk;
use crate::resource::Flow;

/// Chunks computed as one stretch while others may evict them.
const STRETCH: u32 = 4;

/// What a computation finds where it stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Found {
    /// So many chunks can be used now.
    Ready(u32),
    /// The helper is about to bring it: wait for the helper.
    Coming,
    /// It has to fault.
    Missing,
}

/// Who reads a device's weights ahead of their turn, and gives them up behind it.
#[derive(Debug, Clone)]
pub enum Keeper {
    /// The system decides what stays.
    Ahead(Helper),
    /// The device decides.
    Managed(Box<Stream>),
}

impl Keeper {
    /// A part will be needed. True if the thread must be woken.
    pub fn announce(&mut self, job: Job) -> bool {
        match self {
            Keeper::Ahead(helper) => helper.read_ahead(job),
            Keeper::Managed(stream) => stream.announce(job),
        }
    }

    /// A part is needed now. True if the thread must be woken.
    pub fn begin(&mut self, job: Job, storage: &Storage) -> bool {
        match self {
            Keeper::Ahead(_) => false,
            Keeper::Managed(stream) => stream.begin(job, storage),
        }
    }

    /// The part has been computed.
    pub fn end(&mut self) {
        if let Keeper::Managed(stream) = self {
            stream.end();
        }
    }

    /// A part is given up; a stream has done so piece by piece. True if the thread must be woken.
    pub fn release(&mut self, job: Job) -> bool {
        match self {
            Keeper::Ahead(helper) => helper.give_up(job),
            Keeper::Managed(_) => false,
        }
    }

    /// How much of these chunks can be computed on.
    pub fn find(&self, chunks: Range<Chunk>, storage: &Storage) -> Found {
        let helper = match self {
            Keeper::Ahead(helper) => helper,
            Keeper::Managed(stream) => return stream.find(chunks, storage),
        };
        let most = if helper.is_idle() { u32::MAX } else { STRETCH };
        let end = chunks.end.min(chunks.start.saturating_add(most));
        let cache = storage.view().view();
        match (chunks.start..end).take_while(|&chunk| cache.holds(chunk)).count() as u32 {
            0 => Found::Missing,
            ready => Found::Ready(ready),
        }
    }

    /// The computation faults at a missing chunk, of which it needs `unit` bytes.
    pub fn fault(&mut self, now: Nanos, chunk: Chunk, unit: Bytes, storage: &mut Storage) -> Touch {
        match self {
            // A row of the embedding; of all else a whole chunk is needed.
            Keeper::Ahead(_) if unit < storage.chunk() => storage.read_aside(now, unit),
            Keeper::Ahead(_) => storage.touch(now, chunk, Flow::Fault),
            Keeper::Managed(stream) => stream.fault(now, chunk, unit, storage),
        }
    }

    /// Whether the system decides what stays. Then what has been read of the embedding does: it is little and often used,
    /// but a device that counts its bytes gives it up at once. And what has just been used may go at any time, while such a
    /// device gives nothing up before it is done with it.
    pub fn leaves_it_to_the_system(&self) -> bool {
        matches!(self, Keeper::Ahead(_))
    }

    /// These chunks have been used. True if the thread must be woken.
    pub fn used(&mut self, chunks: Range<Chunk>) -> bool {
        match self {
            Keeper::Ahead(_) => false,
            Keeper::Managed(stream) => stream.used(chunks),
        }
    }

    /// The thread works until it has spent time; returns when it goes on, if by itself.
    pub fn work(&mut self, now: Nanos, storage: &mut Storage) -> Option<Nanos> {
        match self {
            Keeper::Ahead(helper) => helper.work(now, storage),
            Keeper::Managed(stream) => stream.work(now, storage),
        }
    }

    /// A chunk has arrived, whoever asked for it. True if the thread must be woken.
    pub fn arrived(&mut self, now: Nanos, chunk: Chunk) -> bool {
        match self {
            Keeper::Ahead(helper) => helper.arrived(now, chunk),
            Keeper::Managed(stream) => stream.arrived(now, chunk),
        }
    }

    /// Moves the records of what has been read to the trace.
    pub fn report(&mut self, records: &mut Vec<Record>) {
        match self {
            Keeper::Ahead(helper) => helper.report(records),
            Keeper::Managed(stream) => stream.report(records),
        }
    }

    /// The run is over: what was being read is recorded as far as it came.
    pub fn flush(&mut self, now: Nanos, records: &mut Vec<Record>) {
        match self {
            Keeper::Ahead(helper) => helper.flush(now, records),
            Keeper::Managed(stream) => stream.flush(now, records),
        }
    }
}
