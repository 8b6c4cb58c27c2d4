//! Tests of computing with mapped weights: the pages that a thread needs after it was woken.

use hearth_schema::residency::{Residency, ResidencyOptions};
use hearth_schema::trace::Resource;

use super::super::storage::test_storage;
use super::*;
use crate::device::residency::ReadAhead;
use crate::trace::start_record;

const PIECE: Bytes = Bytes::mib(1);
/// Number of threads, so large that at least one thread has a load across the page boundary.
const THREADS: f64 = 1e3;

/// A walk through ten chunks that has computed the first and waits for the second.
struct WalkFixture {
    now: Nanos,
    storage: Storage,
    residency: ReadAhead,
    walk: Walk,
}

impl WalkFixture {
    fn new(kind: Kind) -> Self {
        let options = ResidencyOptions::with_policy(Residency::Os);
        let record = start_record(0, Resource::Cpu, kind, (0, 0), 0);
        let segment = Segment { chunks: 0..10, time: Seconds(0.01), bytes_per_chunk: PIECE };
        let mut fixture = WalkFixture {
            now: 0,
            storage: test_storage(10, 10, PIECE),
            residency: ReadAhead::new(0, options, PIECE, 1),
            walk: Walk::new(record, vec![segment], THREADS, 1),
        };
        let first = fixture.walk.advance(0, &mut fixture.storage, &mut fixture.residency);
        assert_eq!(first, WalkAction::Wait);
        assert!(matches!(fixture.arrive(0), WalkAction::Compute(_)));
        fixture.walk.end_batch(fixture.now, Seconds(0.0));
        let second = fixture.walk.advance(fixture.now, &mut fixture.storage, &mut fixture.residency);
        assert_eq!(second, WalkAction::Wait);
        fixture
    }

    /// Continues after the arrival of this chunk, which must be the next to arrive.
    fn arrive(&mut self, chunk: Chunk) -> WalkAction {
        self.now = self.storage.next_end().expect("a read in flight");
        assert_eq!(self.storage.pop_completed(self.now), Some(chunk));
        assert!(self.walk.on_arrival(chunk));
        self.walk.retry(self.now, &mut self.storage, &mut self.residency)
    }
}

#[test]
fn previous_page_is_normally_resident() {
    let mut fixture = WalkFixture::new(Kind::Compute);
    assert!(matches!(fixture.arrive(1), WalkAction::Compute(_)));
    assert_eq!(fixture.storage.bytes_read(), PIECE * 2);
}

#[test]
fn load_across_page_boundary_refaults_previous_page() {
    let mut fixture = WalkFixture::new(Kind::Compute);
    fixture.storage.cache.release(0);
    assert_eq!(fixture.arrive(1), WalkAction::Wait, "both pages are needed at once");
    assert!(matches!(fixture.arrive(0), WalkAction::Compute(_)));
    assert_eq!(fixture.storage.bytes_read(), PIECE * 3);
}

#[test]
fn previous_page_may_be_evicted_again() {
    let mut fixture = WalkFixture::new(Kind::Compute);
    fixture.storage.cache.release(0);
    assert_eq!(fixture.arrive(1), WalkAction::Wait);
    fixture.storage.cache.release(1);
    assert_eq!(fixture.arrive(0), WalkAction::Wait, "now the second page is missing");
    assert!(matches!(fixture.arrive(1), WalkAction::Compute(_)));
    assert_eq!(fixture.storage.bytes_read(), PIECE * 4);
}

#[test]
fn embedding_row_needs_no_previous_page() {
    let mut fixture = WalkFixture::new(Kind::Embed);
    fixture.storage.cache.release(0);
    assert!(matches!(fixture.arrive(1), WalkAction::Compute(_)));
}
