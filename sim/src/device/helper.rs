//! What does a device read ahead of its turn, while it does something else?
//!
//! Each prefetch step of the schedule is a job for the device's one helper thread, which takes them in order.
//! Under residency `os` it advises: `WILLNEED` in pieces that the kernel honours, which returns before anything
//! has arrived, so that the next piece and the next job are asked for at once. Under `windowed` it populates:
//! it touches one piece after another and waits for each. Both go as far as the plan's prefetch budget. Where the
//! plan says so, the same thread gives windows up that have been computed, in order with its other jobs.
//!
//! Not here: what the page cache evicts for it, and managed residency ([`crate::device::stream`]).

use std::collections::VecDeque;
use std::ops::Range;

use hearth_profiles::Bytes;
use hearth_schema::pass::Pass;
use hearth_schema::residency::Residency;
use hearth_schema::residency::ResidencyOptions;
use hearth_schema::trace::Kind;
use hearth_schema::trace::Record;
use hearth_schema::trace::Resource;

use super::storage::{NO_ROOM_PAUSE, Storage, Touch};
use crate::engine::Nanos;
use crate::page_cache::{Chunk, Fetch};
use crate::resource::Flow;
use crate::trace::start_record;

/// A part to be read ahead or given up.
#[derive(Debug, Clone)]
pub struct Job {
    /// Its chunks that have not been dealt with.
    pub chunks: Range<Chunk>,
    /// After which pass and round.
    pub pass: Pass,
    /// The round.
    pub round: u32,
    /// Its layers, for the trace.
    pub layers: Option<[u32; 2]>,
}

impl Job {
    /// The line of a stretch of reading for it, which begins with so many bytes.
    pub fn record(&self, device: u16, now: Nanos, bytes: Bytes) -> Record {
        let place = (self.pass.index, self.round);
        let line = start_record(device.into(), Resource::DiskPrefetch, Kind::Prefetch, place, now);
        Record { layers: self.layers, bytes: bytes.0, ..line }
    }
}

/// What is to be done with a part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Task {
    ReadAhead,
    GiveUp,
}

/// A job of which something was read.
#[derive(Debug, Clone)]
struct Reading {
    record: Record,
    chunks: Range<Chunk>,
    outstanding: u32,
    /// Everything has been asked for.
    asked: bool,
}

/// The helper thread of one device.
#[derive(Debug, Clone)]
pub struct Helper {
    place: u16,
    residency: Residency,
    /// A job covers at most so many chunks.
    budget: u32,
    jobs: VecDeque<(Task, Job)>,
    waits: Option<Chunk>,
    /// An event that goes on with the jobs is pending.
    awake: bool,
    readings: Vec<Reading>,
}

impl Helper {
    /// A helper with nothing to do, on a disk with a read-ahead window of so many chunks.
    pub fn new(place: usize, residency: ResidencyOptions, chunk: Bytes, read_ahead: u32) -> Self {
        let chunks = |budget: Bytes| u32::try_from(budget.0.div_ceil(chunk.0)).unwrap_or(u32::MAX);
        let budget = residency.prefetch_budget.map_or(u32::MAX, chunks);
        // One call is cut to one read-ahead window.
        let budget = if residency.one_call { budget.min(read_ahead) } else { budget };
        Self {
            place: place as u16,
            residency: residency.policy,
            budget,
            jobs: VecDeque::new(),
            waits: None,
            awake: false,
            readings: Vec::new(),
        }
    }

    /// A part is to be read. True if the helper must be woken.
    pub fn read_ahead(&mut self, mut job: Job) -> bool {
        // The first part of the window, whatever of it is there already.
        job.chunks.end = job.chunks.end.min(job.chunks.start.saturating_add(self.budget));
        self.take(Task::ReadAhead, job)
    }

    /// A part is to be paged out. True if the helper must be woken.
    pub fn give_up(&mut self, job: Job) -> bool {
        self.take(Task::GiveUp, job)
    }

    fn take(&mut self, task: Task, job: Job) -> bool {
        self.jobs.push_back((task, job));
        self.waits.is_none() && !std::mem::replace(&mut self.awake, true)
    }

    /// Whether it has work that touches the page cache.
    pub fn is_idle(&self) -> bool {
        self.jobs.is_empty() && self.readings.is_empty()
    }

    /// Works until it has spent time; returns when it goes on, if by itself.
    pub fn work(&mut self, now: Nanos, storage: &mut Storage) -> Option<Nanos> {
        self.awake = false;
        while let Some((task, job)) = self.jobs.front_mut() {
            let chunk = job.chunks.start;
            if chunk >= job.chunks.end {
                self.end_job();
                continue;
            }
            // The least that a call takes.
            let mut pause: Nanos = 1000;
            let again = match (*task, self.residency) {
                (Task::GiveUp, _) => {
                    job.chunks.start += 1;
                    if !storage.view().view().holds(chunk) {
                        continue;
                    }
                    storage.discard(chunk);
                    true
                }
                (Task::ReadAhead, Residency::Os) => match storage.prefetch(now, chunk) {
                    Fetch::Present => {
                        job.chunks.start += 1;
                        continue;
                    }
                    Fetch::Started => {
                        self.started(now, storage.chunk());
                        true
                    }
                    // Dropped by the kernel, which costs time all the same.
                    Fetch::NoRoom => {
                        job.chunks.start += 1;
                        true
                    }
                    Fetch::Again => true,
                },
                (Task::ReadAhead, _) => match storage.touch(now, chunk, Flow::Prefetch) {
                    Touch::Ready => {
                        job.chunks.start += 1;
                        continue;
                    }
                    Touch::Waits => {
                        self.started(now, storage.chunk());
                        self.waits = Some(chunk);
                        false
                    }
                    Touch::NoRoom => {
                        pause = NO_ROOM_PAUSE;
                        true
                    }
                },
            };
            if !again {
                return None;
            }
            self.awake = true;
            return Some(now + storage.toil().to_nanos().max(pause));
        }
        None
    }

    /// A chunk has arrived, whoever asked for it. True if the helper waited for it and must be woken.
    pub fn arrived(&mut self, now: Nanos, chunk: Chunk) -> bool {
        let found = self
            .readings
            .iter()
            .position(|reading| reading.outstanding > 0 && reading.chunks.contains(&chunk));
        if let Some(at) = found {
            let reading = &mut self.readings[at];
            reading.outstanding -= 1;
            reading.record.end = now;
        }
        let woken = self.waits == Some(chunk);
        if woken {
            self.waits = None;
            self.awake = true;
        }
        woken
    }

    /// The run is over: what was being read is recorded as far as it came.
    pub fn flush(&mut self, now: Nanos, records: &mut Vec<Record>) {
        records.extend(self.readings.drain(..).map(|reading| Record { end: now, ..reading.record }));
    }

    /// The first job's first chunk is on its way.
    fn started(&mut self, now: Nanos, chunk: Bytes) {
        let Some((_, job)) = self.jobs.front_mut() else { return };
        let first = job.chunks.start;
        job.chunks.start += 1;
        let current = self.readings.last_mut().filter(|reading| !reading.asked);
        if let Some(reading) = current {
            reading.chunks.end = first + 1;
            reading.outstanding += 1;
            reading.record.bytes += chunk.0;
            return;
        }
        let record = job.record(self.place, now, chunk);
        self.readings.push(Reading { record, chunks: first..first + 1, outstanding: 1, asked: false });
    }

    fn end_job(&mut self) {
        self.jobs.pop_front();
        if let Some(reading) = self.readings.last_mut() {
            reading.asked = true;
        }
    }

    /// Moves the records of jobs that are done to the trace.
    pub fn report(&mut self, records: &mut Vec<Record>) {
        let done = |reading: &mut Reading| reading.asked && reading.outstanding == 0;
        records.extend(self.readings.extract_if(.., done).map(|reading| reading.record));
    }
}
