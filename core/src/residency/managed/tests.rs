//! Tests of managed residency with a model of memory that evicts pieces at random.

use hearth_schema::residency::Residency;
use proptest::prelude::*;

use super::*;

const PIECE: u64 = 1 << 20;
const PIECES: PieceId = 40;

fn managed(buffer: u64, kept: u64) -> ManagedResidency {
    let options = ResidencyOptions {
        stream_buffer: Some(Bytes(buffer * PIECE)),
        kept_set_limit: Some(Bytes(kept * PIECE)),
        ..ResidencyOptions::with_policy(Residency::Managed)
    };
    ManagedResidency::new(&[(0..PIECES).collect()], &[PIECE; PIECES as usize], options, 1)
}

/// Returns a device with a stream buffer of `buffer` pieces that keeps at most `kept` pieces, and the device's memory.
fn device(buffer: u64, kept: u64) -> (ManagedResidency, Memory) {
    let memory = Memory { resident: vec![false; PIECES as usize], reads: Vec::new(), page_cache: 1000 };
    (managed(buffer, kept), memory)
}

fn part(pass: u32, pieces: Range<PieceId>) -> WeightPart {
    WeightPart { pieces, origin: ReadOrigin { pass, round: 0, layers: None } }
}

struct Memory {
    resident: Vec<bool>,
    /// The pieces in the order of their reads.
    reads: Vec<PieceId>,
    page_cache: u64,
}

impl Memory {
    fn run_helper(&mut self, managed: &mut ManagedResidency) {
        loop {
            let event = match managed.next_step() {
                Step::Idle => return,
                Step::Measure => Event::Measured { page_cache: Some(self.page_cache * PIECE), evicted: 0 },
                Step::Read(id, _) if self.resident[id as usize] => Event::Read(id, ReadOutcome::InMemory),
                Step::Read(piece, _) => {
                    self.reads.push(piece);
                    Event::Read(piece, ReadOutcome::Started(PIECE))
                }
                Step::Await(piece) => {
                    self.resident[piece as usize] = true;
                    Event::Arrived(piece)
                }
                Step::Confirm(piece, _) => Event::Confirmed(piece, self.resident[piece as usize]),
                Step::Evict(piece) => {
                    self.resident[piece as usize] = false;
                    continue;
                }
            };
            managed.react(event);
        }
    }

    /// Computes a part piece by piece and runs the helper whenever it is woken.
    fn compute(&mut self, managed: &mut ManagedResidency, pass: u32, pieces: Range<PieceId>) {
        managed.react(Event::PassBegun(pass));
        managed.react(Event::PartBegun(part(pass, pieces.clone())));
        self.run_helper(managed);
        for piece in pieces {
            assert!(managed.first_pending_piece() > Some(piece), "piece {piece} is not ready");
            if managed.react(Event::Used(piece + 1)) {
                self.run_helper(managed);
            }
        }
        managed.react(Event::PartEnded);
    }
}

#[test]
fn pieces_that_are_not_kept_are_read_once_a_pass() {
    let (mut managed, mut memory) = device(4, 30);
    for pass in 0..3 {
        memory.reads.clear();
        memory.compute(&mut managed, pass, 0..PIECES);
        assert_eq!(memory.reads.len(), if pass == 0 { 40 } else { 10 });
    }
    assert_eq!(managed.buffered_bytes(), 0);
    assert_eq!(memory.resident.iter().filter(|&&held| held).count(), 30);
}

#[test]
fn reads_stop_when_the_buffer_is_full_and_continue_after_evictions() {
    let (mut managed, mut memory) = device(4, 0);
    managed.react(Event::Requested(part(0, 0..PIECES)));
    memory.run_helper(&mut managed);
    assert_eq!(memory.reads, [0, 1, 2, 3]);
    managed.react(Event::PartBegun(part(0, 0..PIECES)));
    assert!(managed.react(Event::Used(1)));
    memory.run_helper(&mut managed);
    assert_eq!(memory.reads, [0, 1, 2, 3, 4], "one read for the evicted piece");
}

#[test]
fn four_mebibytes_are_in_flight() {
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
fn part_that_is_skipped_is_evicted() {
    let (mut managed, mut memory) = device(4, 0);
    managed.react(Event::Requested(part(0, 0..10)));
    managed.react(Event::Requested(part(0, 10..20)));
    memory.run_helper(&mut managed);
    memory.compute(&mut managed, 0, 10..20);
    memory.run_helper(&mut managed);
    assert!(memory.resident.iter().all(|held| !held), "nothing is kept");
}

#[test]
fn reset_during_a_part_empties_the_buffer() {
    let (mut managed, mut memory) = device(4, 0);
    managed.react(Event::PartBegun(part(0, 0..PIECES)));
    memory.run_helper(&mut managed);
    managed.react(Event::Used(2));
    managed.react(Event::Reset);
    memory.run_helper(&mut managed);
    assert_eq!((managed.buffered_bytes(), memory.resident.iter().any(|&held| held)), (0, false));
}

#[test]
fn pieces_that_the_computation_has_passed_are_not_read() {
    let (mut managed, mut memory) = device(4, 0);
    managed.react(Event::PartBegun(part(0, 0..PIECES)));
    managed.react(Event::Used(20));
    memory.run_helper(&mut managed);
    assert_eq!(memory.reads.first(), Some(&20));
}

proptest! {
    /// Checks that the computation waits for no piece forever, with any buffer, memory and evictions by the system.
    #[test]
    fn computation_never_deadlocks(
        buffer in 1u64..10,
        kept in 0u64..45,
        memories in prop::collection::vec((0u64..60, prop::collection::vec(0u32..PIECES, 0..10)), 1..12),
        window in 1u32..20,
    ) {
        let (mut managed, mut memory) = device(buffer, kept);
        for (pass, (page_cache, evicted)) in (0..).zip(memories) {
            memory.page_cache = page_cache;
            for piece in evicted {
                memory.resident[piece as usize] = false;
            }
            for start in (0..PIECES).step_by(window as usize) {
                memory.compute(&mut managed, pass, start..PIECES.min(start + window));
            }
        }
        managed.react(Event::Reset);
        memory.run_helper(&mut managed);
        prop_assert_eq!(managed.buffered_bytes(), 0);
        for piece in 0..PIECES {
            prop_assert!(managed.is_kept(piece) || !memory.resident[piece as usize], "piece {} remains", piece);
        }
    }
}
