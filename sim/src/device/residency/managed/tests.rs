//! Managed streams on memory that differs from the plan's: one part over and over, computed in no time, on a disk that
//! reads a piece a millisecond.

use hearth_schema::residency::Residency;

use super::super::super::storage::test_storage;
use super::*;

const PIECE: Bytes = Bytes::mib(1);
/// Pieces of the share.
const SHARE: Chunk = 100;

fn stream(memory: Bytes) -> ManagedStream {
    let options = ResidencyOptions::of(Residency::Managed);
    ManagedStream::new(0, options, &[(0..SHARE).collect()], memory, 1, SHARE)
}

fn request(pass: u32) -> PartRequest {
    PartRequest { pieces: 0..SHARE, origin: ReadOrigin { pass, round: 0, layers: None } }
}

/// A device and its clock.
struct Setup {
    now: Nanos,
    storage: Storage,
    stream: ManagedStream,
    helper: Option<Nanos>,
}

impl Setup {
    fn new(memory: Bytes, capacity: u32) -> Self {
        Self { now: 0, storage: test_storage(SHARE, capacity, PIECE), stream: stream(memory), helper: None }
    }

    /// Lets the helper or the disk continue, whichever is first; returns the chunks that arrived.
    fn step(&mut self) -> Vec<Chunk> {
        let disk = self.storage.next_end();
        let at = [self.helper, disk].into_iter().flatten().min().expect("something goes on");
        self.now = self.now.max(at);
        let mut arrived = Vec::new();
        if self.helper == Some(at) {
            self.helper = self.stream.work(self.now, &mut self.storage);
        } else {
            while let Some(chunk) = self.storage.arrived(self.now) {
                arrived.push(chunk);
                if self.stream.arrived(self.now, chunk) {
                    self.helper = Some(self.now);
                }
            }
        }
        arrived
    }

    /// Computes the share once; returns how many pieces were read meanwhile.
    fn token(&mut self, pass: u32) -> u64 {
        let before = self.storage.delivered().0;
        let requested = self.stream.request(request(pass));
        if self.stream.begin(request(pass), &self.storage) || requested {
            self.helper = Some(self.now);
        }
        let mut at = 0;
        while at < SHARE {
            match self.stream.find(at..SHARE, &self.storage) {
                Availability::Ready(count) => {
                    if self.stream.used(at..at + count) {
                        self.helper = Some(self.now);
                    }
                    at += count;
                }
                Availability::Pending => drop(self.step()),
                Availability::Missing => {
                    let mut touch = self.stream.fault(self.now, at, PIECE, &mut self.storage);
                    while touch != Touch::Ready {
                        if touch == Touch::NoRoom || self.step().contains(&at) {
                            touch = self.storage.retry(self.now, at, Flow::Fault);
                        }
                    }
                }
            }
        }
        self.stream.end();
        (self.storage.delivered().0 - before) / PIECE.0
    }
}

#[test]
fn kept_pieces_are_read_once() {
    // Of 60 pieces of memory 8 are the buffer, and the kernel needs somewhat less than 2.
    let mut setup = Setup::new(PIECE * 60, 60);
    let kept = setup.stream.kept().count() as u64;
    assert_eq!(kept, 50);
    let reads: Vec<u64> = (0..5).map(|pass| setup.token(pass)).collect();
    // A buffer more or less is read before the token begins.
    let missing = u64::from(SHARE) - kept;
    assert!(reads[0] >= 100 && reads[1..].iter().all(|&read| read.abs_diff(missing) <= 1), "{reads:?}");
}

#[test]
fn kept_set_shrinks_to_memory() {
    // The plan promises memory for 90 pieces where 60 find room.
    let mut setup = Setup::new(PIECE * 90, 60);
    assert_eq!(setup.stream.kept().count(), 80);
    let reads: Vec<u64> = (0..12).map(|pass| setup.token(pass)).collect();
    // Many of them are evicted and read again. After the first token the measured capacity gives the size that fits, and
    // the losses found by the second token shrink the kept set no further.
    assert!(reads[1] > 60, "{reads:?}");
    assert!(reads[10..].iter().all(|&read| read.abs_diff(50) <= 1), "{reads:?}");
    assert_eq!(setup.stream.kept().count(), 50, "{reads:?}");
}

#[test]
fn continuous_reads_are_one_record() {
    let mut setup = Setup::new(PIECE * 60, 60);
    for pass in 0..3 {
        setup.token(pass);
    }
    let mut records = Vec::new();
    setup.stream.report(&mut records);
    setup.stream.flush(setup.now, &mut records);
    let bytes: u64 = records.iter().map(|record| record.bytes).sum();
    assert!(
        bytes.abs_diff(setup.storage.delivered().0) <= 8 * PIECE.0,
        "all that was read, and what is under way"
    );
    // The computation takes no time, so that the disk never rests.
    assert!(records.len() <= 4, "{}", records.len());
    assert!(records.windows(2).all(|pair| pair[0].end <= pair[1].start));
}
