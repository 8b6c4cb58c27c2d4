//! The pages that a thread needs when it has been woken.

use hearth_profiles::BytesPerSecond;
use hearth_schema::residency::Residency;
use hearth_schema::residency::ResidencyOptions;
use hearth_schema::trace::Resource;

use super::*;
use crate::device::residency::ReadAhead;
use crate::page_cache::{Policy, TwoList};
use crate::resource::DiskSpeed;
use crate::trace::start_record;

const PIECE: Bytes = Bytes::mib(1);
/// Enough that one of them makes a load across the border.
const THREADS: f64 = 1e3;

/// A walk through ten chunks that has computed the first and waits for the second.
struct World {
    now: Nanos,
    storage: Storage,
    residency: WeightResidency,
    walk: Walk,
}

impl World {
    fn new(kind: Kind) -> Self {
        let rate = BytesPerSecond(PIECE.as_f64() * 1e3);
        let speed =
            DiskSpeed { bandwidth: rate, fault: rate, explicit: rate, throttle: None, latency: Seconds(0.0) };
        let cache = Policy::TwoList(Box::new(TwoList::new(10, 10)));
        let options = ResidencyOptions::of(Residency::Os);
        let record = start_record(0, Resource::Cpu, kind, (0, 0), 0);
        let segment = Segment { chunks: 0..10, time: Seconds(0.01), unit: PIECE };
        let mut world = World {
            now: 0,
            storage: Storage::with_chunks(cache, PIECE, speed, PIECE),
            residency: WeightResidency::System(ReadAhead::new(0, options, PIECE, 1)),
            walk: Walk::new(record, [segment], THREADS, 1),
        };
        let first = world.walk.advance(0, &mut world.storage, &mut world.residency);
        assert_eq!(first, Next::Wait);
        assert!(matches!(world.woken(0), Next::Compute(_)));
        world.walk.computed(world.now, Seconds(0.0));
        let second = world.walk.advance(world.now, &mut world.storage, &mut world.residency);
        assert_eq!(second, Next::Wait);
        world
    }

    /// Continues when this chunk has arrived, which must be the next to arrive.
    fn woken(&mut self, chunk: Chunk) -> Next {
        self.now = self.storage.next_end().expect("something is read");
        assert_eq!(self.storage.arrived(self.now), Some(chunk));
        let woken = self.walk.arrived(self.now, chunk, 0);
        assert_eq!(woken, Some(Next::Retry(self.now)));
        self.walk.retry(self.now, &mut self.storage, &mut self.residency)
    }
}

#[test]
fn what_is_behind_is_there_as_a_rule() {
    let mut world = World::new(Kind::Compute);
    assert!(matches!(world.woken(1), Next::Compute(_)));
    assert_eq!(world.storage.delivered(), PIECE * 2);
}

#[test]
fn a_load_that_reaches_back_needs_the_page_behind_again() {
    let mut world = World::new(Kind::Compute);
    world.storage.release(0);
    assert_eq!(world.woken(1), Next::Wait, "both pages are needed at once");
    assert!(matches!(world.woken(0), Next::Compute(_)));
    assert_eq!(world.storage.delivered(), PIECE * 3);
}

#[test]
fn the_page_behind_may_go_again_before_it_is_used() {
    let mut world = World::new(Kind::Compute);
    world.storage.release(0);
    assert_eq!(world.woken(1), Next::Wait);
    world.storage.release(1);
    assert_eq!(world.woken(0), Next::Wait, "now the page ahead is missing");
    assert!(matches!(world.woken(1), Next::Compute(_)));
    assert_eq!(world.storage.delivered(), PIECE * 4);
}

#[test]
fn a_row_of_the_embedding_reaches_nowhere() {
    let mut world = World::new(Kind::Embed);
    world.storage.release(0);
    assert!(matches!(world.woken(1), Next::Compute(_)));
}
