//! A queue of packets with a size in bytes: it drops packets that do not fit and, with Controlled Delay, packets that
//! have waited too long.

use std::collections::VecDeque;

use hearth_profiles::link::impairments::{Queue, QueueDiscipline};

use super::{Nanos, Packet};

/// The delay that CoDel accepts. source: RFC 8289, section 4.2
const TARGET: Nanos = 5_000_000;
/// The time for which CoDel accepts a longer delay. source: RFC 8289, section 4.2
const INTERVAL: Nanos = 100_000_000;

#[derive(Debug)]
pub struct PacketQueue {
    packets: VecDeque<(Nanos, Packet)>,
    bytes: u64,
    max_bytes: u64,
    controlled_delay: Option<ControlledDelay>,
    pub dropped_count: u64,
}

/// The state of CoDel. source: RFC 8289, section 5
#[derive(Debug, Default)]
struct ControlledDelay {
    /// When the delay will have been above the target for an interval; `None` while it is below.
    first_above: Option<Nanos>,
    /// When to drop the next packet; `None` while no packets are dropped.
    next_drop: Option<Nanos>,
    drop_count: u64,
    last_drop_count: u64,
}

impl PacketQueue {
    pub fn new(queue: &Queue) -> Self {
        Self {
            packets: VecDeque::new(),
            bytes: 0,
            max_bytes: queue.size.0,
            controlled_delay: (queue.discipline == QueueDiscipline::Codel).then(ControlledDelay::default),
            dropped_count: 0,
        }
    }

    pub fn is_empty(&self) -> bool {
        self.packets.is_empty()
    }

    /// Adds a packet, or drops it if it does not fit.
    pub fn push(&mut self, now: Nanos, packet: Packet) {
        let bytes = packet.bytes.len() as u64;
        if self.bytes + bytes > self.max_bytes {
            self.dropped_count += 1;
        } else {
            self.bytes += bytes;
            self.packets.push_back((now, packet));
        }
    }

    /// Returns the size of the packet that is next, if none is dropped.
    pub fn next_bytes(&self) -> Option<u64> {
        self.packets.front().map(|(_, packet)| packet.bytes.len() as u64)
    }

    /// Removes the next packet, after those that wait too long.
    pub fn pop(&mut self, now: Nanos) -> Option<Packet> {
        loop {
            let (since, packet) = self.packets.pop_front()?;
            self.bytes -= packet.bytes.len() as u64;
            let is_last = self.packets.is_empty();
            let waited = now.saturating_sub(since);
            if self.controlled_delay.as_mut().is_none_or(|codel| codel.keeps(now, waited, is_last)) {
                return Some(packet);
            }
            self.dropped_count += 1;
        }
    }
}

impl ControlledDelay {
    /// Whether to keep a packet that leaves the queue at `now` after `waited` nanoseconds.
    fn keeps(&mut self, now: Nanos, waited: Nanos, is_last: bool) -> bool {
        if waited < TARGET || is_last {
            (self.first_above, self.next_drop) = (None, None);
            return true;
        }
        let first_above = *self.first_above.get_or_insert(now + INTERVAL);
        match self.next_drop {
            Some(next) if now >= next => {
                self.drop_count += 1;
                self.next_drop = Some(next + self.pause());
                false
            }
            None if now >= first_above => {
                // Soon after an earlier period of drops, the queue needs about the same rate of drops.
                let recent = self.drop_count - self.last_drop_count;
                self.drop_count = if recent > 1 { recent } else { 1 };
                self.last_drop_count = self.drop_count;
                self.next_drop = Some(now + self.pause());
                false
            }
            _ => true,
        }
    }

    /// Returns the time until the next drop.
    fn pause(&self) -> Nanos {
        (INTERVAL as f64 / (self.drop_count.max(1) as f64).sqrt()) as Nanos
    }
}

#[cfg(test)]
mod tests {
    use hearth_profiles::Bytes;

    use super::*;

    fn packet(bytes: usize) -> Packet {
        Packet { from: 0, to: 1, bytes: vec![0; bytes] }
    }

    #[test]
    fn packets_that_do_not_fit_are_dropped() {
        let mut queue = PacketQueue::new(&Queue { size: Bytes(3000), discipline: QueueDiscipline::DropTail });
        (0..3).for_each(|_| queue.push(0, packet(1500)));
        assert_eq!((queue.dropped_count, queue.next_bytes()), (1, Some(1500)));
        assert!(queue.pop(10 * INTERVAL).is_some() && queue.pop(10 * INTERVAL).is_some());
        assert!(queue.is_empty() && queue.pop(0).is_none());
    }

    /// A packet arrives every millisecond and one leaves every 1.25 ms. The queue grows without limit, but CoDel drops
    /// so much that it does not.
    #[test]
    fn controlled_delay_limits_the_wait() {
        let longest_wait_at_end = |discipline| {
            let mut queue = PacketQueue::new(&Queue { size: Bytes(1 << 30), discipline });
            let mut longest = 0;
            for step in 0..40_000_u64 {
                let now = step * 250_000;
                if step % 4 == 0 {
                    queue.push(now, packet(1000));
                }
                if step % 5 == 0 {
                    let since = queue.packets.front().map_or(now, |(since, _)| *since);
                    if step > 30_000 {
                        longest = longest.max(now - since);
                    }
                    queue.pop(now);
                }
            }
            longest
        };
        assert!(longest_wait_at_end(QueueDiscipline::DropTail) > 1_000_000_000);
        assert!(longest_wait_at_end(QueueDiscipline::Codel) < 300_000_000);
    }
}
