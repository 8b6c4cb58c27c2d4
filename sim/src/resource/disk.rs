//! Disk: serves reads with a bandwidth, a latency and an optional throttle.
//!
//! Reads belong to one of three flows: the page faults of the computation, the prefetches of the helper thread, and pieces
//! at random places.
//! Requests of one flow are served in the order of submission. Flows that are busy at the same time share the
//! bandwidth (`sharing`), each up to its own maximum rate, because page faults read more slowly than prefetches:
//! 744 MB/s against 1438 MB/s on the virtual disk on which both were measured. The latency delays only a request that
//! is submitted to an idle flow; in a busy flow requests are queued and their latency is hidden.

use std::collections::VecDeque;

use hearth_profiles::{Bytes, BytesPerSecond, Seconds};

use super::sharing::ProcessorSharing;
use super::throttle::Throttle;
use crate::engine::Nanos;

#[derive(Debug, Clone, Copy)]
pub struct DiskSpeed {
    pub bandwidth: BytesPerSecond,
    /// Maximum rate of the reads of kind [`ReadKind::Fault`].
    pub fault_read_rate: BytesPerSecond,
    /// Maximum rate of the reads of kind [`ReadKind::Prefetch`].
    pub prefetch_rate: BytesPerSecond,
    /// Limit on the total rate of all reads, for example by a cgroup.
    pub throttle_rate: Option<BytesPerSecond>,
    /// Time from submitting a read to an idle flow until the first byte is read.
    pub latency: Seconds,
    /// The same for reads of kind [`ReadKind::Piece`].
    pub piece_latency: Seconds,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum ReadKind {
    /// A page fault of a thread that needs the bytes now, or read-ahead that the page fault triggers.
    Fault,
    /// A read by the helper thread before the bytes are used.
    Prefetch,
    /// A read ahead of a piece at a random place, such as an expert.
    Piece,
}

const FLOWS: [ReadKind; 3] = [ReadKind::Fault, ReadKind::Prefetch, ReadKind::Piece];

/// A disk and its outstanding reads, each with a tag `T`.
#[derive(Debug)]
pub struct DiskSim<T> {
    speed: DiskSpeed,
    throttle: Option<Throttle<(ReadKind, T)>>,
    sharing: ProcessorSharing,
    queues: [Queue<T>; FLOWS.len()],
    pub bytes_read: u64,
}

#[derive(Debug)]
struct Queue<T> {
    requests: VecDeque<(T, u64)>,
    /// Time at which the latency of the first request ends; `None` if that time has passed or the queue is empty.
    starts: Option<Nanos>,
}

impl<T> DiskSim<T> {
    pub fn new(speed: DiskSpeed) -> Self {
        let queue = || Queue { requests: VecDeque::new(), starts: None };
        Self {
            speed,
            throttle: speed.throttle_rate.map(Throttle::new),
            sharing: ProcessorSharing::new(speed.bandwidth.0),
            queues: [queue(), queue(), queue()],
            bytes_read: 0,
        }
    }

    /// Sets the fraction of the bandwidth that other programs leave available.
    pub fn set_available_fraction(&mut self, now: Nanos, fraction: f64) {
        self.sharing.set_capacity(now, self.speed.bandwidth.0 * fraction);
    }

    pub fn submit(&mut self, now: Nanos, flow: ReadKind, tag: T, bytes: Bytes) {
        if let Some(throttle) = &mut self.throttle {
            throttle.push(now, (flow, tag), bytes.0);
            self.admit(now);
        } else {
            self.queue(now, flow, tag, bytes.0);
        }
    }

    /// Queues the reads that the throttle admits.
    fn admit(&mut self, now: Nanos) {
        while let Some(throttle) = &mut self.throttle
            && let Some(((flow, tag), bytes)) = throttle.pop_admitted(now)
        {
            self.queue(now, flow, tag, bytes);
        }
    }

    fn queue(&mut self, now: Nanos, flow: ReadKind, tag: T, bytes: u64) {
        let is_piece = flow == ReadKind::Piece;
        let latency = if is_piece { self.speed.piece_latency } else { self.speed.latency }.to_nanos();
        let queue = &mut self.queues[flow as usize];
        queue.requests.push_back((tag, bytes));
        if queue.requests.len() > 1 {
            return;
        }
        if latency == 0 {
            self.serve(now, flow);
        } else {
            queue.starts = Some(now.saturating_add(latency));
        }
    }

    /// Returns the time at which to call [`DiskSim::pop_completed`] next, if no read is submitted before.
    pub fn next_event_time(&self) -> Option<Nanos> {
        let starts = self.queues.iter().filter_map(|queue| queue.starts);
        let admissions = self.throttle.as_ref().and_then(Throttle::next_admission_time);
        starts.chain(self.sharing.next_completion_time()).chain(admissions).min()
    }

    /// Removes one read that is complete by `now`. Returns the tag of the read.
    pub fn pop_completed(&mut self, now: Nanos) -> Option<T> {
        self.admit(now);
        for flow in FLOWS {
            let queue = &mut self.queues[flow as usize];
            if queue.starts.is_some_and(|starts| starts <= now) {
                queue.starts = None;
                self.serve(now, flow);
            }
        }
        let flow = FLOWS[self.sharing.pop_completed(now)? as usize];
        let (tag, bytes) = self.queues[flow as usize].requests.pop_front()?;
        self.bytes_read += bytes;
        self.serve(now, flow);
        Some(tag)
    }

    fn serve(&mut self, now: Nanos, flow: ReadKind) {
        let max_rate = match flow {
            ReadKind::Fault => self.speed.fault_read_rate,
            ReadKind::Prefetch | ReadKind::Piece => self.speed.prefetch_rate,
        };
        if let Some((_, bytes)) = self.queues[flow as usize].requests.front() {
            self.sharing.add_job(now, flow as u64, *bytes as f64, max_rate.0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MILLI: Nanos = 1_000_000;

    fn speed() -> DiskSpeed {
        DiskSpeed {
            bandwidth: BytesPerSecond(1000e6),
            fault_read_rate: BytesPerSecond(400e6),
            prefetch_rate: BytesPerSecond(1000e6),
            throttle_rate: None,
            latency: Seconds(0.0),
            piece_latency: Seconds(0.002),
        }
    }

    fn drain(disk: &mut DiskSim<u32>) -> Vec<(Nanos, u32)> {
        let mut out = Vec::new();
        while let Some(at) = disk.next_event_time() {
            while let Some(tag) = disk.pop_completed(at) {
                out.push((at, tag));
            }
        }
        out
    }

    #[test]
    fn flow_is_served_in_order_at_its_max_rate() {
        let mut disk = DiskSim::new(speed());
        disk.submit(0, ReadKind::Fault, 1, Bytes(4_000_000));
        disk.submit(0, ReadKind::Fault, 2, Bytes(8_000_000));
        assert_eq!(drain(&mut disk), [(10 * MILLI, 1), (30 * MILLI, 2)]);
        assert_eq!(disk.bytes_read, 12_000_000);
    }

    #[test]
    fn fault_slows_prefetch() {
        let mut disk = DiskSim::new(speed());
        disk.submit(0, ReadKind::Prefetch, 1, Bytes(10_000_000));
        // Faults get their maximum of 400 MB/s (an equal share would be 500), the prefetch the other 600.
        disk.submit(0, ReadKind::Fault, 2, Bytes(2_000_000));
        // After 5 ms: 7 MB of the prefetch left, at 1000 MB/s.
        assert_eq!(drain(&mut disk), [(5 * MILLI, 2), (12 * MILLI, 1)]);
    }

    #[test]
    fn throttle_limits_both_flows() {
        // 10 MB/s are 1 MB per slice, so the second read waits for the end of the slice, and another 0.1 s for its
        // own bytes. Reading then takes 1 ms and 2.5 ms.
        let mut disk = DiskSim::new(DiskSpeed { throttle_rate: Some(BytesPerSecond(10e6)), ..speed() });
        disk.submit(0, ReadKind::Prefetch, 1, Bytes(1_000_000));
        disk.submit(0, ReadKind::Fault, 2, Bytes(1_000_000));
        assert_eq!(drain(&mut disk), [(MILLI, 1), (202 * MILLI + MILLI / 2, 2)]);
    }

    #[test]
    fn only_idle_flow_pays_latency() {
        let mut disk = DiskSim::new(DiskSpeed { latency: Seconds(0.005), ..speed() });
        disk.submit(0, ReadKind::Fault, 1, Bytes(4_000_000));
        disk.submit(0, ReadKind::Fault, 2, Bytes(4_000_000));
        assert_eq!(drain(&mut disk), [(15 * MILLI, 1), (25 * MILLI, 2)]);
        // Pieces have a latency of their own.
        let mut disk = DiskSim::new(speed());
        disk.submit(0, ReadKind::Piece, 1, Bytes(4_000_000));
        disk.submit(0, ReadKind::Piece, 2, Bytes(4_000_000));
        assert_eq!(drain(&mut disk), [(6 * MILLI, 1), (10 * MILLI, 2)]);
    }
}
