//! Managed residency of a simulated device: executes the steps of [`ManagedResidency`] on the simulated storage.
//!
//! The helper thread reads a piece with `WILLNEED` and confirms the read with `POPULATE_READ`. Kept chunks are in the
//! page cache: if they do not all fit in memory, the kernel evicts some, which are read again at their next use.
//!
//! Deviation: a piece is a chunk of the file. A chunk with weights of two layers belongs to the first layer. Experts are in
//! the page cache, too, instead of buffers of the process.

use std::collections::{BTreeSet, VecDeque};
use std::ops::Range;

use hearth_core::residency::{
    Event, ExpertResidency, ManagedResidency, ReadOrigin, ReadOutcome, Step, WeightPart,
};
use hearth_profiles::Bytes;
use hearth_profiles::model::Experts;
use hearth_schema::residency::ResidencyOptions;
use hearth_schema::trace::StepRecord;

use crate::engine::Nanos;
use crate::page_cache::{Chunk, FetchResult};
use crate::resource::ReadKind;

use super::super::layout::{ExpertLayout, WeightLayout};
use super::super::mapped_computation::ExpertGroup;
use super::super::storage::{NO_MEMORY_RETRY_DELAY, Storage, TouchResult, UNCACHED_READ};
use super::{Availability, SYSTEM_CALL, WeightResidency, read_record};

/// Consecutive reads for one part of the model, which have one trace record.
#[derive(Debug)]
struct ReadBatch {
    record: StepRecord,
    outstanding: u32,
    /// Whether no further read will be added to the batch.
    complete: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Helper {
    Idle,
    /// An event that continues the helper thread is pending.
    Awake,
    Awaits(Chunk),
}

#[derive(Debug)]
pub struct ManagedWeights {
    device: u16,
    residency: ManagedResidency,
    experts: Option<ExpertResidency>,
    expert_layout: ExpertLayout,
    /// The chunks of experts that are being read.
    expert_reads: BTreeSet<Chunk>,
    /// The part of the model that is being computed.
    computed: Option<ReadOrigin>,
    helper: Helper,
    batches: VecDeque<ReadBatch>,
}

impl ManagedWeights {
    /// Creates the managed weights of a device. `busy_periods` lists the chunks that the device uses between two idle
    /// times. `memory` is the planned memory for these chunks and the experts.
    pub fn new(
        device: usize,
        (options, cores): (ResidencyOptions, u32),
        busy_periods: &[Vec<Chunk>],
        memory: Bytes,
        expert_layout: ExpertLayout,
        shape: Option<&Experts>,
    ) -> Self {
        let bytes = vec![options.piece_bytes().0; expert_layout.first_chunk as usize];
        let mut managed = Self {
            device: device as u16,
            residency: ManagedResidency::new(busy_periods, &bytes, options, cores),
            experts: shape
                .map(|shape| ExpertResidency::new(expert_layout.expert_bytes(), shape, options, cores)),
            expert_layout,
            expert_reads: BTreeSet::new(),
            computed: None,
            helper: Helper::Idle,
            batches: VecDeque::new(),
        };
        managed.follow_memory(memory.0);
        managed
    }

    fn follow_memory(&mut self, page_cache: u64) {
        match &mut self.experts {
            Some(experts) => experts.divide_memory(&mut self.residency, Some(page_cache), 0),
            None => {
                self.residency.react(Event::Measured { page_cache: Some(page_cache), evicted: 0 });
            }
        }
    }

    fn is_expert(&self, chunk: Chunk) -> bool {
        chunk >= self.expert_layout.first_chunk && chunk != UNCACHED_READ
    }

    fn record_read(&mut self, now: Nanos, origin: ReadOrigin, bytes: Bytes) {
        if let Some(last) = self.batches.back_mut() {
            let StepRecord { pass_index: pass, round, layers, .. } = last.record;
            last.complete |= origin != ReadOrigin { pass, round, layers };
        }
        if let Some(last) = self.batches.back_mut().filter(|last| !last.complete) {
            last.outstanding += 1;
            last.record.bytes += bytes.0;
            return;
        }
        let record = read_record(self.device, origin, now, bytes);
        self.batches.push_back(ReadBatch { record, outstanding: 1, complete: false });
    }

    /// Counts an arrived chunk in the first batch with outstanding reads, because the disk serves reads in order.
    fn count_batch_arrival(&mut self, now: Nanos) {
        let mut open = self.batches.iter_mut().skip_while(|batch| batch.outstanding == 0);
        let Some(batch) = open.next() else { return };
        batch.outstanding -= 1;
        batch.record.end_ns = now;
        if batch.outstanding == 0
            && let Some(next) = open.next()
        {
            next.record.start_ns = now;
        }
    }

    fn wake(&mut self) -> bool {
        let idle = self.helper == Helper::Idle;
        if idle {
            self.helper = Helper::Awake;
        }
        idle
    }
}

impl WeightResidency for ManagedWeights {
    fn leaves_eviction_to_system(&self) -> bool {
        false
    }

    fn warm_chunks(&self, _layout: &WeightLayout) -> Vec<Chunk> {
        self.residency.kept_pieces().collect()
    }

    fn request(&mut self, request: WeightPart) -> bool {
        let woken = self.residency.react(Event::Requested(request));
        woken && self.wake()
    }

    fn begin_part(&mut self, request: WeightPart, storage: &Storage) -> bool {
        self.residency.react(Event::PassBegun(request.origin.pass));
        if self.residency.is_measurement_due() {
            self.follow_memory(u64::from(storage.cache.capacity()) * storage.chunk_size.0);
        }
        self.computed = Some(request.origin);
        let woken = self.residency.react(Event::PartBegun(request));
        woken && self.wake()
    }

    fn end_part(&mut self) {
        self.residency.react(Event::PartEnded);
    }

    /// Counts the available chunks up to and including the first streamed chunk, which is evicted right after its use.
    fn availability(&self, chunks: Range<Chunk>, storage: &Storage) -> Availability {
        let cache = &storage.cache;
        if self.is_expert(chunks.start) {
            let held = chunks.take_while(|chunk| cache.contains(*chunk)).count() as u32;
            return if held > 0 { Availability::Ready(held) } else { Availability::Missing };
        }
        let Some(ready_until) = self.residency.first_pending_piece() else {
            // An embedding row, which is in memory, or is read alone.
            let held = cache.contains(chunks.start);
            return if held { Availability::Ready(1) } else { Availability::Missing };
        };
        if ready_until <= chunks.start {
            return Availability::Pending;
        }
        let mut ready = 0;
        for chunk in chunks.start..chunks.end.min(ready_until) {
            if !cache.contains(chunk) {
                break;
            }
            ready += 1;
            if !self.residency.is_kept(chunk) {
                break;
            }
        }
        if ready == 0 { Availability::Missing } else { Availability::Ready(ready) }
    }

    /// Handles a page fault at an embedding row, or at a chunk that was evicted after its read was confirmed. No
    /// neighbouring page is read, because the mapping has the advice `MADV_RANDOM`.
    fn on_fault(&mut self, now: Nanos, chunk: Chunk, unit: Bytes, storage: &mut Storage) -> TouchResult {
        if self.is_expert(chunk) {
            let is_read = self.expert_reads.contains(&chunk);
            let touch = storage.touch_without_readahead(now, chunk, ReadKind::Prefetch);
            if let (TouchResult::Pending, false, Some(origin)) = (touch, is_read, self.computed) {
                // The kernel has evicted a cached expert, or dropped its read.
                self.expert_reads.insert(chunk);
                self.record_read(now, origin, storage.chunk_size);
            }
            return touch;
        }
        if self.residency.first_pending_piece().is_none() {
            return storage.read_uncached(now, unit);
        }
        self.residency.react(Event::Faulted(chunk));
        storage.touch_without_readahead(now, chunk, ReadKind::Fault)
    }

    fn mark_used(&mut self, chunks: Range<Chunk>) -> bool {
        if self.is_expert(chunks.start) {
            return false;
        }
        let woken = self.residency.react(Event::Used(chunks.end));
        woken && self.wake()
    }

    fn request_experts(
        &mut self,
        now: Nanos,
        &ExpertGroup { layer, ref experts, is_first }: &ExpertGroup,
        storage: &mut Storage,
    ) -> Vec<u32> {
        let Some(state) = &mut self.experts else { return Vec::new() };
        let requested = state.request(layer, experts, is_first);
        let mut missing = Vec::new();
        for expert in requested {
            let mut is_missing = false;
            for chunk in self.expert_layout.chunks((layer, expert)).flatten() {
                let fetch = storage.prefetch(now, chunk, ReadKind::Piece);
                is_missing |= fetch != FetchResult::Present;
                if fetch == FetchResult::Started {
                    self.expert_reads.insert(chunk);
                    if let Some(origin) = self.computed {
                        self.record_read(now, origin, storage.chunk_size);
                    }
                }
            }
            if is_missing {
                missing.push(expert);
            }
        }
        missing
    }

    fn release_experts(&mut self, layer: u32, experts: &[u32]) -> bool {
        let has_evictable = self.experts.as_mut().is_some_and(|state| state.release(layer, experts));
        has_evictable && self.wake()
    }

    fn experts_per_group(&self) -> usize {
        self.experts.as_ref().map_or(usize::MAX, ExpertResidency::experts_per_group)
    }

    fn run_helper(&mut self, now: Nanos, storage: &mut Storage) -> Option<Nanos> {
        let (helper, pause) = loop {
            if let Some(id) = self.experts.as_mut().and_then(ExpertResidency::next_evictable) {
                self.expert_layout.chunks(id).flatten().for_each(|chunk| storage.cache.discard(chunk));
                break (Helper::Awake, SYSTEM_CALL);
            }
            match self.residency.next_step() {
                Step::Read(chunk, origin) => {
                    let outcome = match storage.prefetch(now, chunk, ReadKind::Prefetch) {
                        FetchResult::Present => ReadOutcome::InMemory,
                        FetchResult::Started => ReadOutcome::Started(storage.chunk_size.0),
                        // Dropped by the kernel, which still takes time.
                        FetchResult::NoMemory => ReadOutcome::Dropped(storage.chunk_size.0),
                        FetchResult::Retry => ReadOutcome::Retry,
                    };
                    self.residency.react(Event::Read(chunk, outcome));
                    if let ReadOutcome::Started(_) = outcome {
                        self.record_read(now, origin, storage.chunk_size);
                    }
                    if outcome != ReadOutcome::InMemory {
                        break (Helper::Awake, SYSTEM_CALL);
                    }
                }
                Step::Confirm(chunk, origin) => {
                    match storage.touch_without_readahead(now, chunk, ReadKind::Prefetch) {
                        TouchResult::Ready => drop(self.residency.react(Event::Confirmed(chunk, true))),
                        // The kernel did not read the chunk, or has evicted it since.
                        TouchResult::Pending => {
                            self.residency.react(Event::Confirmed(chunk, false));
                            self.record_read(now, origin, storage.chunk_size);
                            break (Helper::Awake, SYSTEM_CALL);
                        }
                        TouchResult::NoMemory => break (Helper::Awake, NO_MEMORY_RETRY_DELAY),
                    }
                }
                Step::Evict(chunk) => {
                    storage.cache.discard(chunk);
                    break (Helper::Awake, SYSTEM_CALL);
                }
                Step::Await(chunk) => break (Helper::Awaits(chunk), 0),
                // Memory is measured when a pass begins.
                Step::Measure | Step::Idle => break (Helper::Idle, 0),
            }
        };
        self.helper = helper;
        if helper == Helper::Idle {
            self.batches.iter_mut().for_each(|batch| batch.complete = true);
        }
        (helper == Helper::Awake).then(|| now + storage.take_kernel_time().to_nanos().max(pause))
    }

    fn on_arrival(&mut self, now: Nanos, chunk: Chunk) -> bool {
        if self.expert_reads.remove(&chunk) {
            self.count_batch_arrival(now);
        } else if self.residency.is_in_flight(chunk) {
            self.residency.react(Event::Arrived(chunk));
            self.count_batch_arrival(now);
        }
        let woken = self.helper == Helper::Awaits(chunk);
        if woken {
            self.helper = Helper::Awake;
        }
        woken
    }

    fn report_finished_reads(&mut self, records: &mut Vec<StepRecord>) {
        while let Some(batch) = self.batches.pop_front_if(|batch| batch.complete && batch.outstanding == 0) {
            records.push(batch.record);
        }
    }

    fn flush_records(&mut self, now: Nanos, records: &mut Vec<StepRecord>) {
        records.extend(self.batches.drain(..).map(|batch| {
            let end = if batch.outstanding > 0 { now } else { batch.record.end_ns };
            StepRecord { end_ns: end, ..batch.record }
        }));
    }
}

#[cfg(test)]
mod tests {
    use hearth_schema::residency::Residency;

    use super::*;

    #[test]
    fn continuous_reads_are_one_record() {
        let options = ResidencyOptions::with_policy(Residency::Managed);
        let mut stream = {
            let layout = ExpertLayout { first_chunk: 3, ..ExpertLayout::default() };
            ManagedWeights::new(0, (options, 1), &[vec![0, 1, 2]], Bytes::from_mib(3), layout, None)
        };
        // The read for the next pass is requested while the disk reads for this one.
        for (now, pass) in [(0, 0), (1, 0), (2, 1)] {
            stream.record_read(now, ReadOrigin { pass, round: 0, layers: None }, Bytes(100));
        }
        stream.count_batch_arrival(10);
        stream.count_batch_arrival(20);
        let mut records = Vec::new();
        stream.report_finished_reads(&mut records);
        assert_eq!(records.len(), 1, "the second read is in flight");
        stream.flush_records(25, &mut records);
        let found =
            records.iter().map(|it| (it.pass_index, it.start_ns..it.end_ns, it.bytes)).collect::<Vec<_>>();
        assert_eq!(found, [(0, 0..20, 200), (1, 20..25, 100)]);
    }
}
