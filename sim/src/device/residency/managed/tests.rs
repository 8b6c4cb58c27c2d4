//! Tests of managed streams, also with less memory than the plan expects. One part is computed again and again in
//! zero time, on a disk that reads one piece per millisecond.

use hearth_schema::residency::Residency;

use super::super::super::storage::test_storage;
use super::*;

const PIECE: Bytes = Bytes::mib(1);
const SHARE: Chunk = 100;

fn stream(memory: Bytes) -> ManagedStream {
    let options = ResidencyOptions::with_policy(Residency::Managed);
    ManagedStream::new(0, options, &[(0..SHARE).collect()], memory, 1, SHARE)
}

fn request(pass: u32) -> PartRequest {
    PartRequest { pieces: 0..SHARE, origin: ReadOrigin { pass, round: 0, layers: None } }
}

struct StreamFixture {
    now: Nanos,
    storage: Storage,
    stream: ManagedStream,
    helper: Option<Nanos>,
}

impl StreamFixture {
    fn new(memory: Bytes, capacity: u32) -> Self {
        Self { now: 0, storage: test_storage(SHARE, capacity, PIECE), stream: stream(memory), helper: None }
    }

    /// Continues the helper or the disk, whichever is first; returns the chunks that arrived.
    fn step(&mut self) -> Vec<Chunk> {
        let disk = self.storage.next_end();
        let at = [self.helper, disk].into_iter().flatten().min().expect("a pending event");
        self.now = self.now.max(at);
        let mut arrived = Vec::new();
        if self.helper == Some(at) {
            self.helper = self.stream.run_helper(self.now, &mut self.storage);
        } else {
            while let Some(chunk) = self.storage.pop_completed(self.now) {
                arrived.push(chunk);
                if self.stream.on_arrival(self.now, chunk) {
                    self.helper = Some(self.now);
                }
            }
        }
        arrived
    }

    /// Computes the share once. Returns the number of pieces that were read meanwhile.
    fn token(&mut self, pass: u32) -> u64 {
        let before = self.storage.bytes_read().0;
        let requested = self.stream.request(request(pass));
        if self.stream.begin_part(request(pass), &self.storage) || requested {
            self.helper = Some(self.now);
        }
        let mut at = 0;
        while at < SHARE {
            match self.stream.availability(at..SHARE, &self.storage) {
                Availability::Ready(count) => {
                    if self.stream.mark_used(at..at + count) {
                        self.helper = Some(self.now);
                    }
                    at += count;
                }
                Availability::Pending => drop(self.step()),
                Availability::Missing => {
                    let mut touch = self.stream.on_fault(self.now, at, PIECE, &mut self.storage);
                    while touch != Touch::Ready {
                        if touch == Touch::NoMemory || self.step().contains(&at) {
                            touch = self.storage.retry(self.now, at, Flow::Fault);
                        }
                    }
                }
            }
        }
        self.stream.end_part();
        (self.storage.bytes_read().0 - before) / PIECE.0
    }
}

#[test]
fn kept_pieces_are_read_once() {
    // Of 60 pieces of memory the buffer takes 8, and the kernel slightly less than 2.
    let mut fixture = StreamFixture::new(PIECE * 60, 60);
    let kept = fixture.stream.residency.kept_pieces().count() as u64;
    assert_eq!(kept, 50);
    let reads: Vec<u64> = (0..5).map(|pass| fixture.token(pass)).collect();
    // Pieces in the buffer are read before the token begins.
    let missing = u64::from(SHARE) - kept;
    assert!(reads[0] >= 100 && reads[1..].iter().all(|&read| read.abs_diff(missing) <= 1), "{reads:?}");
}

#[test]
fn kept_set_shrinks_to_memory() {
    // The plan expects memory for 90 pieces, but only 60 fit.
    let mut fixture = StreamFixture::new(PIECE * 90, 60);
    assert_eq!(fixture.stream.residency.kept_pieces().count(), 80);
    let reads: Vec<u64> = (0..12).map(|pass| fixture.token(pass)).collect();
    // At first many kept pieces are evicted and read again. After the first token the kept set follows the measured
    // capacity, and the losses that the second token finds shrink it no further.
    assert!(reads[1] > 60, "{reads:?}");
    assert!(reads[10..].iter().all(|&read| read.abs_diff(50) <= 1), "{reads:?}");
    assert_eq!(fixture.stream.residency.kept_pieces().count(), 50, "{reads:?}");
}

#[test]
fn continuous_reads_are_one_record() {
    let mut fixture = StreamFixture::new(PIECE * 60, 60);
    for pass in 0..3 {
        fixture.token(pass);
    }
    let mut records = Vec::new();
    fixture.stream.report(&mut records);
    fixture.stream.flush(fixture.now, &mut records);
    let bytes: u64 = records.iter().map(|record| record.bytes).sum();
    assert!(
        bytes.abs_diff(fixture.storage.bytes_read().0) <= 8 * PIECE.0,
        "all bytes read, except reads in flight"
    );
    // The computation takes no time, so the disk is never idle.
    assert!(records.len() <= 4, "{}", records.len());
    assert!(records.windows(2).all(|pair| pair[0].end <= pair[1].start));
}
