//! Transmission medium: one transmission at a time holds a channel or one direction of a wire.
//!
//! Transmissions get the medium in the order of request and hold it for an overhead and the bytes. A message longer than
//! a burst requests it for each burst, so that others come between. A wire has neither overhead nor stalls.
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
    pub air: Nanos,
}

/// The transmission that holds the medium.
#[derive(Debug, Clone, Copy)]
pub struct Grant {
    pub burst: Burst,
    /// When it got the medium.
    pub since: Nanos,
    /// When it releases it, if no stall is added.
    pub ends: Nanos,
}

/// A medium and the transmissions that wait for it.
#[derive(Debug, Clone)]
pub struct Medium {
    queue: VecDeque<Burst>,
    hold: Option<Grant>,
    stalls: Stalls,
    held: Nanos,
}

impl Medium {
    pub fn new(stalls: Stalls) -> Self {
        Self { queue: VecDeque::new(), hold: None, stalls, held: 0 }
    }

    /// Requests the medium for a transmission.
    pub fn ask(&mut self, now: Nanos, burst: Burst) {
        self.queue.push_back(burst);
        if self.hold.is_none() {
            self.grant(now);
        }
    }

    /// When the current transmission ends.
    pub fn next_end(&self) -> Option<Nanos> {
        self.hold.map(|hold| hold.ends)
    }

    /// Takes the transmission that has ended by `now`; the next one begins where it ended.
    pub fn ended(&mut self, now: Nanos) -> Option<Grant> {
        let hold = self.hold.take_if(|hold| hold.ends <= now)?;
        self.held += hold.burst.air;
        self.grant(hold.ends);
        Some(hold)
    }

    /// Stops all transmission from `now` until `until`.
    pub fn stall(&mut self, now: Nanos, until: Nanos) {
        let left = self.hold.map(|hold| self.stalls.air(now, hold.ends));
        self.stalls.add(now, until);
        if let (Some(hold), Some(left)) = (&mut self.hold, left) {
            hold.ends = self.stalls.end(now, left);
        }
    }

    /// Total transmission time of all transmissions that have ended.
    pub fn held(&self) -> Nanos {
        self.held
    }

    fn grant(&mut self, now: Nanos) {
        let granted = |burst: Burst| Grant { burst, since: now, ends: self.stalls.end(now, burst.air) };
        self.hold = self.queue.pop_front().map(granted);
    }
}

#[cfg(test)]
mod tests {
    use rand_chacha::ChaCha8Rng;
    use rand_chacha::rand_core::SeedableRng;

    use super::*;

    fn burst(message: u64, air: Nanos) -> Burst {
        Burst { message, down: false, bytes: 1, air }
    }

    #[test]
    fn it_goes_round_in_the_order_of_asking() {
        let mut token = Medium::new(Stalls::new(vec![], ChaCha8Rng::seed_from_u64(1)));
        token.ask(0, burst(1, 10));
        token.ask(2, burst(2, 5));
        token.ask(3, burst(3, 1));
        assert!(token.ended(9).is_none());
        assert_eq!(token.ended(10).map(|hold| (hold.burst.message, hold.since)), Some((1, 0)));
        // A stall during the second: the rest of it comes afterwards.
        token.stall(12, 20);
        assert_eq!(token.next_end(), Some(23));
        assert_eq!(token.ended(23).map(|hold| hold.burst.message), Some(2));
        assert_eq!(token.ended(24).map(|hold| hold.since), Some(23));
        assert_eq!((token.next_end(), token.held()), (None, 16));
    }
}
