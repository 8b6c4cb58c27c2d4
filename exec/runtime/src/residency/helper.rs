//! The helper thread of managed residency: carries out the steps of [`ManagedResidency`] on the mapped files.
//!
//! `MADV_WILLNEED` starts a read, and `MADV_POPULATE_READ` waits for the pages. The mapping has the advice for random
//! access, so that only the requested pages are read. A piece is evicted by unmapping its pages and dropping them from
//! the page cache.
//!
//! Not here: the interface to the computation ([`super::managed_policy`]), and the choice of the next step
//! ([`hearth_core::residency`]).
//!
//! [`ManagedResidency`]: hearth_core::residency::ManagedResidency

use std::sync::{MutexGuard, PoisonError};
use std::time::Duration;

use hearth_core::residency::{Event, PieceId, ReadOrigin, ReadOutcome, Step, page_metadata_bytes};
use hearth_profiles::measure::mapping::{Advice, advise};

use super::ReadSpan;
use super::barrier::{SharedResidency, State};
use crate::clock::monotonic_nanos;
use crate::memory::MemoryReading;
use crate::pages::{populate, read_ahead, resident_bytes};
use crate::read_counter::ReadCounter;

/// The interval at which the available memory is measured besides the measurement of every pass, while there are experts.
/// source: assumed; other programs need longer to fill the memory of a few hundred experts
const MEASUREMENT_INTERVAL: Duration = Duration::from_millis(250);

pub(super) struct Helper<'a, Memory> {
    shared: &'a SharedResidency,
    memory: Memory,
    /// The refaulted bytes of the last memory measurement; `None` if they are unknown.
    refaulted_bytes: Option<u64>,
    counter: ReadCounter,
    /// Whether memory has been measured before.
    measured: bool,
    /// The time of the last measurement, as a value of [`monotonic_nanos`].
    last_measurement: u64,
}

impl<'a, Memory: Fn() -> MemoryReading> Helper<'a, Memory> {
    pub(super) fn new(shared: &'a SharedResidency, memory: Memory) -> Self {
        let counter = ReadCounter::for_current_thread();
        Self {
            shared,
            memory,
            refaulted_bytes: None,
            counter,
            measured: false,
            last_measurement: monotonic_nanos(),
        }
    }

    pub(super) fn run(mut self) {
        // Without the advice, page faults read more than the requested pages.
        self.shared.weights.mappings().for_each(|mapping| {
            let _ = advise(mapping, Advice::Random);
        });
        let mut state = self.shared.lock();
        while !state.ended {
            let has_experts = state.expert_memory.allocated_bytes() > 0;
            let since = Duration::from_nanos(monotonic_nanos().saturating_sub(self.last_measurement));
            if has_experts && since >= MEASUREMENT_INTERVAL {
                drop(state);
                self.yield_memory();
                state = self.shared.lock();
            }
            match state.residency.next_step() {
                Step::Idle => {
                    state.end_span();
                    state = self.sleep(state);
                }
                // The piece was in memory, or has been populated.
                Step::Confirm(piece, _) => {
                    state.residency.react(Event::Confirmed(piece, true));
                    self.shared.arrived.notify_all();
                }
                step => {
                    drop(state);
                    self.execute(step);
                    state = self.shared.lock();
                }
            }
        }
        drop(state);
        self.shared.weights.mappings().for_each(|mapping| {
            let _ = advise(mapping, Advice::Normal);
        });
    }

    /// Waits until there may be work. Nobody reports that experts have been read, so with experts the wait is limited.
    fn sleep<'s>(&self, state: MutexGuard<'s, State>) -> MutexGuard<'s, State> {
        if state.experts.is_none() {
            return self.shared.work_available.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        let wait = self.shared.work_available.wait_timeout(state, MEASUREMENT_INTERVAL);
        wait.unwrap_or_else(PoisonError::into_inner).0
    }

    /// Measures the available memory, and shrinks the cache of experts to it. Unlike pages of files, the system cannot
    /// reclaim its memory.
    fn yield_memory(&mut self) {
        let reading = (self.memory)();
        self.last_measurement = monotonic_nanos();
        let mut state = self.shared.lock();
        let available = state.available_bytes(&reading, 0);
        let State { residency, experts, .. } = &mut *state;
        let (Some(experts), Some(bytes)) = (experts, available) else { return };
        experts.yield_memory(bytes, residency.weight_bytes());
        self.shared.expert_work.notify_one();
    }

    /// Carries out a step that makes system calls. The caller does not hold the lock of the state.
    fn execute(&mut self, step: Step) {
        match step {
            Step::Measure => self.measure(),
            Step::Read(piece, origin) => self.read(piece, origin),
            Step::Evict(piece) => self.shared.weights.evict(self.shared.piece(piece).extent),
            Step::Await(piece) => self.wait_for(piece),
            Step::Confirm(..) | Step::Idle => {}
        }
    }

    fn read(&mut self, piece: PieceId, origin: ReadOrigin) {
        let bytes = self.shared.weights.mapped_bytes(self.shared.piece(piece).extent);
        let absent =
            |bytes: &[u8]| self.shared.is_residency_known.then(|| bytes.len() as u64 - resident_bytes(bytes));
        let region = bytes.map(|bytes| (bytes, absent(bytes)));
        let Some((bytes, absent)) = region.filter(|(_, absent)| *absent != Some(0)) else {
            self.shared.lock().residency.react(Event::Read(piece, ReadOutcome::InMemory));
            return;
        };
        let (start, before) = (monotonic_nanos(), self.counter.bytes_read());
        read_ahead(bytes);
        let read = self.counter.bytes_read();
        // The kernel skips pages that are present, so the bytes read are those that were missing.
        let missing = absent.unwrap_or(read.saturating_sub(before));
        let mut state = self.shared.lock();
        state.residency.react(Event::Read(piece, ReadOutcome::Started(missing)));
        state.read_bytes = read;
        if missing == 0 {
            return;
        }
        if state.current_span.as_ref().is_some_and(|last| last.origin != origin) {
            state.end_span();
        }
        state.current_span.get_or_insert(ReadSpan::starting(origin, start)).bytes += missing;
    }

    fn wait_for(&mut self, piece: PieceId) {
        if let Some(bytes) = self.shared.weights.mapped_bytes(self.shared.piece(piece).extent) {
            populate(bytes);
        }
        let read = self.counter.bytes_read();
        let mut state = self.shared.lock();
        state.read_bytes = read;
        if let Some(span) = &mut state.current_span {
            span.end_ns = monotonic_nanos();
        }
        state.residency.react(Event::Arrived(piece));
    }

    fn measure(&mut self) {
        let reading = (self.memory)();
        let refaulted_bytes = reading.refaulted_bytes;
        self.last_measurement = monotonic_nanos();
        let first = !std::mem::replace(&mut self.measured, true);
        if first {
            for &extent in &self.shared.pieces.vector_extents {
                self.shared.weights.mapped_bytes(extent).map(read_ahead);
            }
        }
        // Pages that are evicted between the helper's check and the use of a piece are read again by page faults,
        // which only the system counts.
        let evicted =
            refaulted_bytes.zip(self.refaulted_bytes).map_or(0, |(now, before)| now.saturating_sub(before));
        self.refaulted_bytes = refaulted_bytes;
        let mut state = self.shared.lock();
        // After the first measurement, the kernel has already allocated its memory for the share.
        let used_experts = state.experts.as_ref().map_or(0, |experts| experts.used_bytes().0);
        let read = state.residency.weight_bytes() + used_experts;
        let allocated = if first { 0 } else { page_metadata_bytes(read) };
        let page_cache = state.available_bytes(&reading, allocated);
        let State { residency, experts, .. } = &mut *state;
        match experts {
            Some(experts) => {
                experts.divide_memory(residency, page_cache, evicted);
                // They evict what no longer fits.
                self.shared.expert_work.notify_one();
            }
            None => {
                residency.react(Event::Measured { page_cache, evicted });
            }
        }
    }
}
