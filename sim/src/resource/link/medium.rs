//! Transmission medium: one transmission at a time holds a channel or one direction of a wire.
//!
//! Transmissions get the medium in the order of request and hold it for an overhead and the bytes. A message longer
//! than a burst requests it for each burst, so that others come between. A wire has neither overhead nor stalls.
//!
//! Not here: which transmissions a message has ([`super::wifi`]).

use std::collections::VecDeque;

use super::stalls::Stalls;
use crate::engine::Nanos;

/// One transmission of a message on one hop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Burst {
    /// The message's number.
    pub message: u64,
    /// Whether it is on the second hop, to the receiver.
    pub down: bool,
    pub bytes: u64,
    /// Transmission time.
    pub time: Nanos,
}

/// The transmission that holds the medium.
#[derive(Debug, Clone, Copy)]
pub struct Grant {
    pub burst: Burst,
    /// The time at which it got the medium.
    pub since: Nanos,
    /// The time at which it releases it, if no stall is added.
    pub ends: Nanos,
}

/// A medium and the transmissions that wait for it.
#[derive(Debug, Clone)]
pub struct Medium {
    queue: VecDeque<Burst>,
    current: Option<Grant>,
    stalls: Stalls,
    busy_time: Nanos,
}

impl Medium {
    pub fn new(stalls: Stalls) -> Self {
        Self { queue: VecDeque::new(), current: None, stalls, busy_time: 0 }
    }

    /// Requests the medium for a transmission.
    pub fn request(&mut self, now: Nanos, burst: Burst) {
        self.queue.push_back(burst);
        if self.current.is_none() {
            self.grant(now);
        }
    }

    /// Returns the time at which the current transmission ends.
    pub fn next_end(&self) -> Option<Nanos> {
        self.current.map(|current| current.ends)
    }

    /// Takes the transmission that has ended by `now`; the next one begins where it ended.
    pub fn ended(&mut self, now: Nanos) -> Option<Grant> {
        let current = self.current.take_if(|current| current.ends <= now)?;
        self.busy_time += current.burst.time;
        self.grant(current.ends);
        Some(current)
    }

    /// Stops all transmission from `now` until `until`.
    pub fn stall(&mut self, now: Nanos, until: Nanos) {
        let left = self.current.map(|current| self.stalls.transmission_time(now, current.ends));
        self.stalls.add(now, until);
        if let (Some(current), Some(left)) = (&mut self.current, left) {
            current.ends = self.stalls.end(now, left);
        }
    }

    /// Total transmission time of all transmissions that have ended.
    pub fn busy_time(&self) -> Nanos {
        self.busy_time
    }

    fn grant(&mut self, now: Nanos) {
        let granted = |burst: Burst| Grant { burst, since: now, ends: self.stalls.end(now, burst.time) };
        self.current = self.queue.pop_front().map(granted);
    }
}

#[cfg(test)]
mod tests {
    use rand_chacha::ChaCha8Rng;
    use rand_chacha::rand_core::SeedableRng;

    use super::*;

    fn burst(message: u64, time: Nanos) -> Burst {
        Burst { message, down: false, bytes: 1, time }
    }

    #[test]
    fn medium_is_granted_in_request_order() {
        let mut medium = Medium::new(Stalls::new(vec![], ChaCha8Rng::seed_from_u64(1)));
        medium.request(0, burst(1, 10));
        medium.request(2, burst(2, 5));
        medium.request(3, burst(3, 1));
        assert!(medium.ended(9).is_none());
        assert_eq!(medium.ended(10).map(|current| (current.burst.message, current.since)), Some((1, 0)));
        // A stall during the second: the rest of it comes afterwards.
        medium.stall(12, 20);
        assert_eq!(medium.next_end(), Some(23));
        assert_eq!(medium.ended(23).map(|current| current.burst.message), Some(2));
        assert_eq!(medium.ended(24).map(|current| current.since), Some(23));
        assert_eq!((medium.next_end(), medium.busy_time()), (None, 16));
    }
}
