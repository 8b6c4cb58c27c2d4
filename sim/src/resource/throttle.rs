//! Throttle: a limit on bytes per second, as a cgroup's on a block device.
//!
//! block/blk-throttle.c: a limit acts per slice of a tenth of a second. The bytes of a slice pass at once, at the speed
//! of the disk, and the next read waits for the next slice. An idle reader begins with a new slice if it was idle long
//! enough: the end of a slice is rounded up to whole slices of the clock, so this takes one to two slices, and until
//! then the unused rest remains. A read that does not fit waits for the end of the slice and then for as long as its
//! surplus takes at the limit. So a 400 MB/s limit delivers its first 40 MB in the 27 ms that a 1.5 GB/s disk needs:
//! short bursts are faster than the limit, and prefetched pages are complete, and evictable, earlier than at a steady
//! 400 MB/s. Reads pass in the order of arrival.

use std::collections::VecDeque;

use hearth_profiles::BytesPerSecond;

use crate::engine::Nanos;

const SLICE: Nanos = 100_000_000;
/// The largest request of the block layer: `BIO_MAX_VECS` (256) pages of 4 KiB. One read of the simulator may be
/// several requests.
const REQUEST: f64 = (1 << 20) as f64;

/// A limit and the reads that wait for it.
#[derive(Debug, Clone)]
pub struct Throttle<R> {
    /// Bytes that one slice allows.
    slice_bytes: f64,
    slice_start: Nanos,
    slice_end: Nanos,
    /// Bytes passed since `slice_start`.
    passed: f64,
    /// The time at which the first waiting read was last checked.
    checked: Nanos,
    waiting: VecDeque<(R, u64)>,
}

impl<R> Throttle<R> {
    pub fn new(limit: BytesPerSecond) -> Self {
        let slice_bytes = limit.0 * SLICE as f64 * 1e-9;
        Self { slice_bytes, slice_start: 0, slice_end: 0, passed: 0.0, checked: 0, waiting: VecDeque::new() }
    }

    /// Adds a read.
    pub fn push(&mut self, now: Nanos, read: R, bytes: u64) {
        if self.waiting.is_empty() {
            if now > self.slice_end || self.slice_end == 0 {
                (self.slice_start, self.slice_end, self.passed) = (now, now + SLICE, 0.0);
            }
            self.checked = now;
        }
        self.waiting.push_back((read, bytes));
    }

    /// Returns the time at which the next read may pass.
    pub fn next_pass(&self) -> Option<Nanos> {
        let (_, bytes) = self.waiting.front()?;
        let slices = (self.checked - self.slice_start).div_ceil(SLICE).max(1);
        let surplus = self.passed + *bytes as f64 - slices as f64 * self.slice_bytes;
        if surplus <= 0.0 {
            return Some(self.checked);
        }
        // The time of one request of the surplus, and the whole slices before the rest may pass.
        let wait = surplus.min(REQUEST) / self.slice_bytes * SLICE as f64;
        let more = (surplus / self.slice_bytes).ceil() as u64 - 1;
        Some(self.slice_start + (slices + more) * SLICE + wait.ceil() as Nanos)
    }

    /// Takes one read that may pass by `now`.
    pub fn pass(&mut self, now: Nanos) -> Option<(R, u64)> {
        if self.next_pass()? > now {
            return None;
        }
        let (read, bytes) = self.waiting.pop_front()?;
        self.passed += bytes as f64;
        self.slice_end = self.slice_end.max((now + SLICE).next_multiple_of(SLICE));
        self.checked = self.checked.max(now);
        self.trim(now);
        Some((read, bytes))
    }

    /// Drops the unused bytes of earlier slices; the kernel keeps one slice of tolerance.
    fn trim(&mut self, now: Nanos) {
        let over = (now.saturating_sub(self.slice_start) / SLICE).saturating_sub(1);
        self.slice_start += over * SLICE;
        self.passed = (self.passed - over as f64 * self.slice_bytes).max(0.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MB: u64 = 1_000_000;

    fn drain(throttle: &mut Throttle<u32>) -> Vec<(Nanos, u32)> {
        let mut out = Vec::new();
        while let Some(at) = throttle.next_pass() {
            while let Some((read, _)) = throttle.pass(at) {
                out.push((at / SLICE, read));
            }
        }
        out
    }

    #[test]
    fn slice_bytes_pass_at_once() {
        // 400 MB/s: 40 MB a slice, that is two reads of 20 MB.
        let mut throttle = Throttle::new(BytesPerSecond(400e6));
        (0..5).for_each(|read| throttle.push(0, read, 20 * MB));
        assert_eq!(drain(&mut throttle), [(0, 0), (0, 1), (1, 2), (1, 3), (2, 4)]);
    }

    #[test]
    fn idle_slices_are_not_saved() {
        let mut throttle = Throttle::new(BytesPerSecond(400e6));
        throttle.push(0, 0, 20 * MB);
        assert_eq!(drain(&mut throttle).len(), 1);
        (1..4).for_each(|read| throttle.push(50 * SLICE, read, 20 * MB));
        assert_eq!(drain(&mut throttle), [(50, 1), (50, 2), (51, 3)]);
    }

    #[test]
    fn slice_end_is_rounded_to_clock_slices() {
        let mut throttle = Throttle::new(BytesPerSecond(400e6));
        throttle.push(SLICE / 2, 0, 20 * MB);
        assert!(throttle.pass(SLICE / 2).is_some());
        // The slice ends at 2.0 slices and not at 1.5; what it allows until 2.5 is 80 MB.
        (1..5).for_each(|read| throttle.push(SLICE * 19 / 10, read, 20 * MB));
        assert_eq!((1..5).filter(|_| throttle.pass(SLICE * 19 / 10).is_some()).count(), 3);
    }

    #[test]
    fn surplus_waits_after_the_slice() {
        // 10 MB/s and a request of 1 MB that is too much by 0.5 MB: 50 ms after the slice.
        let mut throttle = Throttle::new(BytesPerSecond(10e6));
        throttle.push(0, 0, MB / 2);
        throttle.push(0, 1, MB);
        assert!(throttle.pass(0).is_some());
        assert_eq!(throttle.next_pass(), Some(SLICE * 3 / 2));
    }

    #[test]
    fn long_stream_keeps_limit() {
        let mut throttle = Throttle::new(BytesPerSecond(400e6));
        (0..1000).for_each(|read| throttle.push(0, read, 4 * MB));
        // 4 GB at 400 MB/s: the last of a hundred slices begins after 9.9 s.
        assert_eq!(drain(&mut throttle).last(), Some(&(99, 999)));
    }
}
