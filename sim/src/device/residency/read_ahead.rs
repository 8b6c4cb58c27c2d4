//! Read-ahead: the helper thread of a device whose operating system decides what stays in memory.
//!
//! The thread executes the prefetch steps of the schedule in order. Under residency `os` it calls `WILLNEED`, which
//! returns before the read is complete, so the next chunk is requested at once. Under `windowed` it touches one chunk
//! after another and waits for each (`POPULATE_READ`). In both cases it reads at most the plan's prefetch budget. With
//! [`ResidencyOptions::evict_after_use`] the same thread also evicts windows after their use.
//!
//! Not here: which chunks the page cache evicts to free memory, and managed residency ([`super::managed`]).

use std::collections::VecDeque;
use std::ops::Range;

use hearth_core::residency::WeightPart;
use hearth_profiles::Bytes;
use hearth_schema::residency::{Residency, ResidencyOptions};
use hearth_schema::trace::StepRecord;

use crate::engine::Nanos;
use crate::page_cache::{Chunk, FetchResult};
use crate::resource::ReadKind;

use super::super::layout::WeightLayout;
use super::super::storage::{NO_MEMORY_RETRY_DELAY, Storage, TouchResult};
use super::{Availability, SYSTEM_CALL, WeightResidency, read_record};

/// Maximum number of chunks in a batch of the computation while the helper thread may evict them.
const MAX_BATCH: u32 = 4;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Task {
    Read,
    Evict,
}

#[derive(Debug)]
struct PartRead {
    record: StepRecord,
    chunks: Range<Chunk>,
    outstanding: u32,
    /// Whether all reads of the part have been requested from the disk.
    requested: bool,
}

#[derive(Debug)]
pub struct ReadAheadThread {
    device: u16,
    policy: Residency,
    /// Maximum number of chunks of one part of the model that the helper thread reads ahead.
    budget: u32,
    /// Whether the thread does nothing, so that page faults read all weights and the system evicts them.
    is_on_demand: bool,
    jobs: VecDeque<(Task, WeightPart)>,
    awaited: Option<Chunk>,
    /// Whether an event that continues the helper thread is pending.
    awake: bool,
    reads: Vec<PartRead>,
}

impl ReadAheadThread {
    /// Creates a helper thread without jobs; the read-ahead window of the kernel has `window_chunks` chunks.
    pub fn new(device: usize, options: ResidencyOptions, chunk_size: Bytes, window_chunks: u32) -> Self {
        let chunks = |budget: Bytes| u32::try_from(budget.0.div_ceil(chunk_size.0)).unwrap_or(u32::MAX);
        let budget = options.prefetch_budget.map_or(u32::MAX, chunks);
        // One call is limited to one read-ahead window.
        let budget = if options.prefetch_in_one_call { budget.min(window_chunks) } else { budget };
        Self {
            device: device as u16,
            policy: options.policy,
            budget,
            is_on_demand: false,
            jobs: VecDeque::new(),
            awaited: None,
            awake: false,
            reads: Vec::new(),
        }
    }

    /// Returns a thread that does nothing.
    #[must_use]
    pub fn on_demand(self) -> Self {
        Self { is_on_demand: true, ..self }
    }

    fn push_job(&mut self, task: Task, job: WeightPart) -> bool {
        if self.is_on_demand {
            return false;
        }
        self.jobs.push_back((task, job));
        self.awaited.is_none() && !std::mem::replace(&mut self.awake, true)
    }

    fn record_read(&mut self, now: Nanos, chunk: Bytes) {
        let Some((_, job)) = self.jobs.front_mut() else { return };
        let first = job.pieces.start;
        job.pieces.start += 1;
        let current = self.reads.last_mut().filter(|read| !read.requested);
        if let Some(read) = current {
            read.chunks.end = first + 1;
            read.outstanding += 1;
            read.record.bytes += chunk.0;
            return;
        }
        let record = read_record(self.device, job.origin, now, chunk);
        self.reads.push(PartRead { record, chunks: first..first + 1, outstanding: 1, requested: false });
    }

    fn end_job(&mut self) {
        self.jobs.pop_front();
        if let Some(read) = self.reads.last_mut() {
            read.requested = true;
        }
    }
}

impl WeightResidency for ReadAheadThread {
    fn leaves_eviction_to_system(&self) -> bool {
        true
    }

    fn warm_chunks(&self, layout: &WeightLayout) -> Vec<Chunk> {
        layout.own_chunks().chain(layout.own_chunks()).collect()
    }

    fn request(&mut self, mut job: WeightPart) -> bool {
        // The budget covers the first chunks of the part, whether they are in memory or not.
        job.pieces.end = job.pieces.end.min(job.pieces.start.saturating_add(self.budget));
        self.push_job(Task::Read, job)
    }

    fn release(&mut self, job: WeightPart) -> bool {
        self.push_job(Task::Evict, job)
    }

    fn availability(&self, chunks: Range<Chunk>, storage: &Storage) -> Availability {
        let is_idle = self.jobs.is_empty() && self.reads.is_empty();
        let max = if is_idle { u32::MAX } else { MAX_BATCH };
        let end = chunks.end.min(chunks.start.saturating_add(max));
        match (chunks.start..end).take_while(|&chunk| storage.cache.contains(chunk)).count() as u32 {
            0 => Availability::Missing,
            ready => Availability::Ready(ready),
        }
    }

    fn on_fault(&mut self, now: Nanos, chunk: Chunk, unit: Bytes, storage: &mut Storage) -> TouchResult {
        // An embedding row: all other computations need whole chunks.
        if unit < storage.chunk_size {
            storage.read_uncached(now, unit)
        } else {
            storage.touch(now, chunk, ReadKind::Fault)
        }
    }

    fn run_helper(&mut self, now: Nanos, storage: &mut Storage) -> Option<Nanos> {
        self.awake = false;
        while let Some((task, job)) = self.jobs.front_mut() {
            let chunk = job.pieces.start;
            if chunk >= job.pieces.end {
                self.end_job();
                continue;
            }
            let mut pause = SYSTEM_CALL;
            match (*task, self.policy) {
                (Task::Evict, _) => {
                    job.pieces.start += 1;
                    if !storage.cache.contains(chunk) {
                        continue;
                    }
                    storage.cache.discard(chunk);
                }
                (Task::Read, Residency::Os) => match storage.prefetch(now, chunk, ReadKind::Prefetch) {
                    FetchResult::Present => {
                        job.pieces.start += 1;
                        continue;
                    }
                    FetchResult::Started => self.record_read(now, storage.chunk_size),
                    // Dropped by the kernel, which still takes time.
                    FetchResult::NoMemory => job.pieces.start += 1,
                    FetchResult::Retry => {}
                },
                (Task::Read, _) => match storage.touch(now, chunk, ReadKind::Prefetch) {
                    TouchResult::Ready => {
                        job.pieces.start += 1;
                        continue;
                    }
                    TouchResult::Pending => {
                        self.record_read(now, storage.chunk_size);
                        self.awaited = Some(chunk);
                        return None;
                    }
                    TouchResult::NoMemory => pause = NO_MEMORY_RETRY_DELAY,
                },
            }
            self.awake = true;
            return Some(now + storage.take_kernel_time().to_nanos().max(pause));
        }
        None
    }

    fn on_arrival(&mut self, now: Nanos, chunk: Chunk) -> bool {
        let mut open = self.reads.iter_mut().filter(|read| read.outstanding > 0);
        if let Some(read) = open.find(|read| read.chunks.contains(&chunk)) {
            read.outstanding -= 1;
            read.record.end_ns = now;
        }
        let woken = self.awaited.take_if(|awaited| *awaited == chunk).is_some();
        self.awake |= woken;
        woken
    }

    fn report_finished_reads(&mut self, records: &mut Vec<StepRecord>) {
        let done = |read: &mut PartRead| read.requested && read.outstanding == 0;
        records.extend(self.reads.extract_if(.., done).map(|read| read.record));
    }

    fn flush_records(&mut self, now: Nanos, records: &mut Vec<StepRecord>) {
        records.extend(self.reads.drain(..).map(|read| StepRecord { end_ns: now, ..read.record }));
    }
}
