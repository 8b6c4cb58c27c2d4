//! Tests of mapped computations: which pages a thread needs after it was woken.

use hearth_profiles::BytesPerSecond;
use hearth_schema::residency::{Residency, ResidencyOptions};
use hearth_schema::trace::Resource;

use super::*;
use crate::device::residency::ReadAheadThread;
use crate::page_cache::TwoListCache;
use crate::resource::DiskSpeed;
use crate::trace::new_record;

const PIECE: Bytes = Bytes::from_mib(1);
/// Number of threads: enough that at least one of them reads across a page boundary.
const THREADS: f64 = 1e3;

/// A computation on ten chunks that has used the first chunk and waits for the second.
struct ComputationFixture {
    now: Nanos,
    storage: Storage,
    residency: ReadAheadThread,
    computation: MappedComputation,
}

impl ComputationFixture {
    fn new(kind: StepKind) -> Self {
        let options = ResidencyOptions::with_policy(Residency::Os);
        let record = new_record(0, Resource::Cpu, kind, (0, 0), 0);
        let rate = BytesPerSecond(1e9);
        let speed = DiskSpeed {
            bandwidth: rate,
            fault_read_rate: rate,
            prefetch_rate: rate,
            throttle_rate: None,
            latency: Seconds(0.0),
            piece_latency: Seconds(0.0),
        };
        let segment =
            Segment { chunks: 0..10, compute_time: Seconds(0.01), bytes_per_chunk: PIECE, expert: None };
        let segment = ComputationStep::Compute(segment);
        let mut fixture = ComputationFixture {
            now: 0,
            storage: Storage::new(Box::new(TwoListCache::new(10, 10)), PIECE, speed, PIECE),
            residency: ReadAheadThread::new(0, options, PIECE, 1),
            computation: MappedComputation::new(record, vec![segment], THREADS, 1),
        };
        let first = fixture.computation.advance(0, &mut fixture.storage, &mut fixture.residency);
        assert_eq!(first, ComputationAction::Wait);
        assert!(matches!(fixture.arrive(0), ComputationAction::Compute(_)));
        fixture.computation.end_batch(fixture.now, Seconds(0.0));
        let second = fixture.computation.advance(fixture.now, &mut fixture.storage, &mut fixture.residency);
        assert_eq!(second, ComputationAction::Wait);
        fixture
    }

    /// Completes the read of `chunk`, which must be the next read to complete, and continues the computation.
    fn arrive(&mut self, chunk: Chunk) -> ComputationAction {
        self.now = self.storage.next_event_time().expect("a read in flight");
        assert_eq!(self.storage.pop_completed(self.now), Some(chunk));
        assert!(self.computation.on_arrival(chunk));
        self.computation.resume(self.now, &mut self.storage, &mut self.residency)
    }
}

#[test]
fn load_across_page_boundary_needs_both_pages() {
    // For each arrival: the chunk that is evicted before it, if any, and the chunk that arrives.
    for (case, kind, arrivals) in [
        ("the previous page is normally resident", StepKind::Compute, &[(None, 1)][..]),
        ("an evicted previous page is read again", StepKind::Compute, &[(Some(0), 1), (None, 0)]),
        ("the second page may be evicted, too", StepKind::Compute, &[(Some(0), 1), (Some(1), 0), (None, 1)]),
        ("an embedding row needs no previous page", StepKind::Embed, &[(Some(0), 1)]),
    ] {
        let mut fixture = ComputationFixture::new(kind);
        for (at, &(evicted, arriving)) in arrivals.iter().enumerate() {
            if let Some(chunk) = evicted {
                fixture.storage.cache.release(chunk);
            }
            let next = fixture.arrive(arriving);
            if at + 1 < arrivals.len() {
                assert_eq!(next, ComputationAction::Wait, "{case}");
            } else {
                assert!(matches!(next, ComputationAction::Compute(_)), "{case}");
            }
        }
        assert_eq!(fixture.storage.bytes_read(), PIECE * (1 + arrivals.len() as u64), "{case}");
    }
}
