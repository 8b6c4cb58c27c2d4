//! Throttle: limits the bytes read per second, as a cgroup limits a block device.
//!
//! As in block/blk-throttle.c, the limit applies to slices of 0.1 s. Reads that fit in a slice are admitted at once and
//! run at the speed of the disk. A read that does not fit waits for the end of the slice, and then for the time that
//! its excess bytes take at the limit. So short bursts are faster than the limit: with 400 MB/s, a 1.5 GB/s disk
//! delivers the first 40 MB in 27 ms. Reads are admitted in the order of submission.
//!
//! A read after the end of a slice starts a new slice. The end is rounded up to a multiple of 0.1 s on the
//! clock, one to two slices after the last admitted read. Until then the unused bytes of the slice remain available.

use std::collections::VecDeque;

use hearth_profiles::BytesPerSecond;

use crate::engine::Nanos;

const SLICE: Nanos = 100_000_000;
/// Maximum bytes of a request of the block layer: `BIO_MAX_VECS` (256) pages of 4 KiB. A read may be several requests.
const MAX_REQUEST: f64 = (1 << 20) as f64;

#[derive(Debug, Clone)]
pub struct Throttle<R> {
    /// Bytes that may be read in one slice.
    slice_bytes: f64,
    slice_start: Nanos,
    slice_end: Nanos,
    admitted: f64,
    /// The time at which the first waiting read became the first of the queue.
    checked: Nanos,
    waiting: VecDeque<(R, u64)>,
}

impl<R> Throttle<R> {
    pub fn new(limit: BytesPerSecond) -> Self {
        let slice_bytes = limit.0 * SLICE as f64 * 1e-9;
        let waiting = VecDeque::new();
        Self { slice_bytes, slice_start: 0, slice_end: 0, admitted: 0.0, checked: 0, waiting }
    }

    pub fn push(&mut self, now: Nanos, read: R, bytes: u64) {
        if self.waiting.is_empty() {
            if now > self.slice_end || self.slice_end == 0 {
                (self.slice_start, self.slice_end, self.admitted) = (now, now + SLICE, 0.0);
            }
            self.checked = now;
        }
        self.waiting.push_back((read, bytes));
    }

    /// Returns the time at which the next read is admitted.
    pub fn next_admission_time(&self) -> Option<Nanos> {
        let (_, bytes) = self.waiting.front()?;
        let slices = (self.checked - self.slice_start).div_ceil(SLICE).max(1);
        let excess = self.admitted + *bytes as f64 - slices as f64 * self.slice_bytes;
        if excess <= 0.0 {
            return Some(self.checked);
        }
        // The excess waits for full slices, and for the time of its last request at the limit.
        let wait = excess.min(MAX_REQUEST) / self.slice_bytes * SLICE as f64;
        let more = (excess / self.slice_bytes).ceil() as u64 - 1;
        Some(self.slice_start + (slices + more) * SLICE + wait.ceil() as Nanos)
    }

    /// Removes and returns one read that is admitted by `now`.
    pub fn pop_admitted(&mut self, now: Nanos) -> Option<(R, u64)> {
        if self.next_admission_time()? > now {
            return None;
        }
        let (read, bytes) = self.waiting.pop_front()?;
        self.admitted += bytes as f64;
        self.slice_end = self.slice_end.max((now + SLICE).next_multiple_of(SLICE));
        self.checked = self.checked.max(now);
        self.trim(now);
        Some((read, bytes))
    }

    /// Drops the unused bytes of all past slices except the last, as the kernel does.
    fn trim(&mut self, now: Nanos) {
        let past = (now.saturating_sub(self.slice_start) / SLICE).saturating_sub(1);
        self.slice_start += past * SLICE;
        self.admitted = (self.admitted - past as f64 * self.slice_bytes).max(0.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MB: u64 = 1_000_000;

    fn drain(throttle: &mut Throttle<u32>) -> Vec<(Nanos, u32)> {
        let mut out = Vec::new();
        while let Some(at) = throttle.next_admission_time() {
            while let Some((read, _)) = throttle.pop_admitted(at) {
                out.push((at / SLICE, read));
            }
        }
        out
    }

    #[test]
    fn slice_bytes_are_admitted_at_once() {
        // 400 MB/s are 40 MB per slice, that is two reads of 20 MB.
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
        assert!(throttle.pop_admitted(SLICE / 2).is_some());
        // The slice ends at 2.0 slices, not at 1.5, and allows 80 MB until 2.5.
        (1..5).for_each(|read| throttle.push(SLICE * 19 / 10, read, 20 * MB));
        assert_eq!((1..5).filter(|_| throttle.pop_admitted(SLICE * 19 / 10).is_some()).count(), 3);
    }

    #[test]
    fn excess_waits_after_the_slice() {
        // At 10 MB/s a read of 1 MB exceeds the slice by 0.5 MB: it is admitted 50 ms after the end of the slice.
        let mut throttle = Throttle::new(BytesPerSecond(10e6));
        throttle.push(0, 0, MB / 2);
        throttle.push(0, 1, MB);
        assert!(throttle.pop_admitted(0).is_some());
        assert_eq!(throttle.next_admission_time(), Some(SLICE * 3 / 2));
    }

    #[test]
    fn long_stream_keeps_limit() {
        let mut throttle = Throttle::new(BytesPerSecond(400e6));
        (0..1000).for_each(|read| throttle.push(0, read, 4 * MB));
        // 4 GB at 400 MB/s: the last of a hundred slices begins after 9.9 s.
        assert_eq!(drain(&mut throttle).last(), Some(&(99, 999)));
    }
}
