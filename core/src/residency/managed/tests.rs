//! The helper and the computation of a device, on a memory that evicts at random.

use hearth_schema::residency::Residency;
use proptest::prelude::*;

use super::*;

const PIECE: u64 = 1 << 20;
const PIECES: PieceId = 40;

fn managed(buffer: u64, kept: u64) -> ManagedResidency {
    let options = ResidencyOptions {
        stream_buffer: Some(Bytes(buffer * PIECE)),
        kept: Some(Bytes(kept * PIECE)),
        ..ResidencyOptions::of(Residency::Managed)
    };
    ManagedResidency::new(&[(0..PIECES).collect()], &[PIECE; PIECES as usize], options, 1)
}

fn part(pass: u32, pieces: Range<PieceId>) -> PartRequest {
    PartRequest { pieces, origin: ReadOrigin { pass, round: 0, layers: None } }
}

/// A memory that holds what was read and not evicted, and the pieces in the order of their reads.
struct Memory {
    held: Vec<bool>,
    reads: Vec<PieceId>,
    page_cache: u64,
}

impl Memory {
    fn new(page_cache: u64) -> Self {
        Self { held: vec![false; PIECES as usize], reads: Vec::new(), page_cache }
    }

    /// Carries out steps until the helper rests.
    fn settle(&mut self, managed: &mut ManagedResidency) {
        loop {
            let event = match managed.next_step() {
                Step::Idle => return,
                Step::Measure => Event::Measured { page_cache: Some(self.page_cache * PIECE), evicted: 0 },
                Step::Read(piece, _) if self.held[piece as usize] => {
                    Event::Read(piece, ReadOutcome::InMemory)
                }
                Step::Read(piece, _) => {
                    self.reads.push(piece);
                    Event::Read(piece, ReadOutcome::Started(PIECE))
                }
                Step::Await(piece) => {
                    self.held[piece as usize] = true;
                    Event::Arrived(piece)
                }
                Step::Confirm(piece, _) => Event::Confirmed(piece, self.held[piece as usize]),
                Step::Evict(piece) => {
                    self.held[piece as usize] = false;
                    continue;
                }
            };
            managed.react(event);
        }
    }

    /// Computes a part piece by piece; the helper works whenever it is woken.
    fn compute(&mut self, managed: &mut ManagedResidency, pass: u32, pieces: Range<PieceId>) {
        managed.react(Event::PassBegun(pass));
        managed.react(Event::PartBegun(part(pass, pieces.clone())));
        self.settle(managed);
        for piece in pieces {
            assert!(managed.ready_until() > Some(piece), "the helper stops before piece {piece}");
            if managed.react(Event::Used(piece + 1)) {
                self.settle(managed);
            }
        }
        managed.react(Event::PartEnded);
    }
}

#[test]
fn pieces_that_are_not_kept_are_read_once_a_pass() {
    let (mut managed, mut memory) = (managed(4, 30), Memory::new(1000));
    for pass in 0..3 {
        memory.reads.clear();
        memory.compute(&mut managed, pass, 0..PIECES);
        assert_eq!(memory.reads.len(), if pass == 0 { 40 } else { 10 });
    }
    assert_eq!(managed.buffered_bytes(), 0);
    assert_eq!(memory.held.iter().filter(|&&held| held).count(), 30);
}

#[test]
fn reads_stop_at_the_buffer_and_go_on_behind_the_computation() {
    let (mut managed, mut memory) = (managed(4, 0), Memory::new(1000));
    managed.react(Event::Requested(part(0, 0..PIECES)));
    memory.settle(&mut managed);
    assert_eq!(memory.reads, [0, 1, 2, 3]);
    managed.react(Event::PartBegun(part(0, 0..PIECES)));
    assert!(managed.react(Event::Used(1)));
    memory.settle(&mut managed);
    assert_eq!(memory.reads, [0, 1, 2, 3, 4], "a piece for the one that was evicted");
}

#[test]
fn four_mebibytes_are_read_at_once() {
    let mut managed = managed(8, 0);
    managed.react(Event::Requested(part(0, 0..PIECES)));
    managed.react(Event::Measured { page_cache: None, evicted: 0 });
    for piece in 0..4 {
        assert_eq!(managed.next_step(), Step::Read(piece, part(0, 0..0).origin));
        managed.react(Event::Read(piece, ReadOutcome::Started(PIECE)));
    }
    assert_eq!(managed.next_step(), Step::Await(0));
}

#[test]
fn a_part_that_was_requested_in_vain_is_evicted() {
    let (mut managed, mut memory) = (managed(4, 0), Memory::new(1000));
    managed.react(Event::Requested(part(0, 0..10)));
    managed.react(Event::Requested(part(0, 10..20)));
    memory.settle(&mut managed);
    memory.compute(&mut managed, 0, 10..20);
    memory.settle(&mut managed);
    assert!(memory.held.iter().all(|held| !held), "nothing is kept");
}

#[test]
fn a_reset_in_the_middle_of_a_part_empties_the_buffer() {
    let (mut managed, mut memory) = (managed(4, 0), Memory::new(1000));
    managed.react(Event::PartBegun(part(0, 0..PIECES)));
    memory.settle(&mut managed);
    managed.react(Event::Used(2));
    managed.react(Event::Reset);
    memory.settle(&mut managed);
    assert_eq!((managed.buffered_bytes(), memory.held.iter().any(|&held| held)), (0, false));
}

#[test]
fn a_computation_that_overtakes_the_helper_is_not_read_for() {
    let (mut managed, mut memory) = (managed(4, 0), Memory::new(1000));
    managed.react(Event::PartBegun(part(0, 0..PIECES)));
    managed.react(Event::Used(20));
    memory.settle(&mut managed);
    assert_eq!(memory.reads.first(), Some(&20));
}

proptest! {
    /// Whatever the buffer, the memory and what the system evicts: the computation never waits in vain.
    #[test]
    fn the_helper_never_stops_before_the_computation(
        buffer in 1u64..10,
        kept in 0u64..45,
        memories in prop::collection::vec((0u64..60, prop::collection::vec(0u32..PIECES, 0..10)), 1..12),
        window in 1u32..20,
    ) {
        let (mut managed, mut memory) = (managed(buffer, kept), Memory::new(1000));
        for (pass, (page_cache, evicted)) in (0..).zip(memories) {
            memory.page_cache = page_cache;
            for piece in evicted {
                memory.held[piece as usize] = false;
            }
            for start in (0..PIECES).step_by(window as usize) {
                memory.compute(&mut managed, pass, start..PIECES.min(start + window));
            }
        }
        managed.react(Event::Reset);
        memory.settle(&mut managed);
        prop_assert_eq!(managed.buffered_bytes(), 0);
        for piece in 0..PIECES {
            prop_assert!(managed.is_kept(piece) || !memory.held[piece as usize], "piece {} stays", piece);
        }
    }
}
