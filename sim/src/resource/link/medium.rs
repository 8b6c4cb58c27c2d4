//! Transmission medium: a channel or one direction of a wire, with one transmission at a time.
//!
//! The medium is granted to transmissions in the order of their requests. A transmission occupies the medium for an
//! overhead and the time of its bytes. A message longer than a burst requests the medium for each burst, so that other
//! messages can be sent in between. A wire has neither overhead nor stalls.
//!
//! Not here: the division of a message into transmissions ([`super::wifi`]).

use std::collections::VecDeque;

use super::stalls::Stalls;
use crate::engine::Nanos;

/// A part of a message, or the whole message, that is sent in one transmission on one hop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Burst {
    pub message_number: u64,
    /// Whether the burst is transmitted on the second hop, from the access point to the receiver.
    pub is_downlink: bool,
    pub bytes: u64,
    /// The time in nanoseconds for which the burst occupies the medium, with overhead but without stalls.
    pub transmission_time: Nanos,
}

#[derive(Debug, Clone, Copy)]
pub struct Transmission {
    pub burst: Burst,
    pub start: Nanos,
    /// The time at which the transmission ends if no stall is added.
    pub end: Nanos,
}

#[derive(Debug, Clone)]
pub struct Medium {
    queue: VecDeque<Burst>,
    current: Option<Transmission>,
    stalls: Stalls,
    /// Total time of all transmissions that have ended, without stalls.
    pub busy_time: Nanos,
}

impl Medium {
    pub fn new(stalls: Stalls) -> Self {
        Self { queue: VecDeque::new(), current: None, stalls, busy_time: 0 }
    }

    pub fn request(&mut self, now: Nanos, burst: Burst) {
        self.queue.push_back(burst);
        if self.current.is_none() {
            self.grant(now);
        }
    }

    pub fn next_completion_time(&self) -> Option<Nanos> {
        self.current.map(|current| current.end)
    }

    /// Removes and returns the transmission that has ended by `now`. The next transmission starts when it ended.
    pub fn pop_completed(&mut self, now: Nanos) -> Option<Transmission> {
        let current = self.current.take_if(|current| current.end <= now)?;
        self.busy_time += current.burst.transmission_time;
        self.grant(current.end);
        Some(current)
    }

    pub fn stall(&mut self, now: Nanos, until: Nanos) {
        let remaining = self.current.map(|current| self.stalls.unstalled_time(now, current.end));
        self.stalls.add_stall(now, until);
        if let (Some(current), Some(remaining)) = (&mut self.current, remaining) {
            current.end = self.stalls.transmission_end(now, remaining);
        }
    }

    fn grant(&mut self, now: Nanos) {
        self.current = self.queue.pop_front().map(|burst| {
            let end = self.stalls.transmission_end(now, burst.transmission_time);
            Transmission { burst, start: now, end }
        });
    }
}

#[cfg(test)]
mod tests {
    use rand_chacha::ChaCha8Rng;
    use rand_chacha::rand_core::SeedableRng;

    use super::*;

    fn burst(message: u64, transmission_time: Nanos) -> Burst {
        Burst { message_number: message, is_downlink: false, bytes: 1, transmission_time }
    }

    #[test]
    fn medium_is_granted_in_request_order() {
        let mut medium = Medium::new(Stalls::new(vec![], ChaCha8Rng::seed_from_u64(1)));
        medium.request(0, burst(1, 10));
        medium.request(2, burst(2, 5));
        medium.request(3, burst(3, 1));
        assert!(medium.pop_completed(9).is_none());
        let first = medium.pop_completed(10).map(|current| (current.burst.message_number, current.start));
        assert_eq!(first, Some((1, 0)));
        // A stall interrupts the second transmission; the rest of it follows the stall.
        medium.stall(12, 20);
        assert_eq!(medium.next_completion_time(), Some(23));
        assert_eq!(medium.pop_completed(23).map(|current| current.burst.message_number), Some(2));
        assert_eq!(medium.pop_completed(24).map(|current| current.start), Some(23));
        assert_eq!((medium.next_completion_time(), medium.busy_time), (None, 16));
    }
}
