//! Receive budgets: the maximum number of bytes of received frames that wait to be processed.
//!
//! A peer can send faster than this device computes. The reader of a connection therefore reserves the size of a frame
//! before it reads the payload, and the reservation is released when the frame has been processed. While the budget is
//! used up, further frames stay in the peer's socket.

use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Bytes reserved for a frame beside its payload: its message and its place in a queue.
/// source: assumed, a few times the size of a message without long texts
const FRAME_OVERHEAD: usize = 512;

/// A number of bytes that received frames may occupy, shared by the readers of one or more connections.
#[derive(Debug, Clone)]
pub struct ReceiveBudget(Arc<Semaphore>);

/// The part of a [`ReceiveBudget`] that one frame occupies until this value is dropped.
#[derive(Debug)]
pub struct Reservation(#[expect(dead_code, reason = "held until dropped")] OwnedSemaphorePermit);

impl ReceiveBudget {
    /// Creates a budget for `frames` frames of up to `max_payload` bytes each; 0 frames let no frame in.
    pub fn new(frames: usize, max_payload: usize) -> Self {
        let budget = Self(Arc::new(Semaphore::new(0)));
        budget.extend(frames, max_payload);
        budget
    }

    /// Adds `frames` frames of up to `max_payload` bytes each.
    pub fn extend(&self, frames: usize, max_payload: usize) {
        let bytes = frames.saturating_mul(max_payload.saturating_add(FRAME_OVERHEAD));
        self.0.add_permits(bytes.min(Semaphore::MAX_PERMITS - self.0.available_permits()));
    }

    /// Waits until a frame with a payload of this length fits. Returns `None` if the budget is closed.
    pub async fn reserve(&self, payload_len: usize) -> Option<Reservation> {
        self.0.clone().acquire_many_owned(cost(payload_len)).await.ok().map(Reservation)
    }

    /// Lets no more frames in: their readers end.
    pub fn close(&self) {
        self.0.close();
    }

    /// Reserves a frame with a payload of this length, or returns `None` if it does not fit now.
    pub fn try_reserve(&self, payload_len: usize) -> Option<Reservation> {
        self.0.clone().try_acquire_many_owned(cost(payload_len)).ok().map(Reservation)
    }
}

fn cost(payload_len: usize) -> u32 {
    u32::try_from(payload_len.saturating_add(FRAME_OVERHEAD)).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn budget_is_given_back() {
        let budget = ReceiveBudget::new(0, 100);
        assert!(budget.try_reserve(0).is_none(), "no frame is expected yet");
        budget.extend(2, 100);
        let first = budget.try_reserve(100).expect("the first frame");
        let _second = budget.try_reserve(100).expect("the second frame");
        assert!(budget.try_reserve(0).is_none());
        drop(first);
        assert!(budget.try_reserve(101).is_none(), "larger than announced");
        assert!(budget.try_reserve(100).is_some());
        ReceiveBudget::new(usize::MAX, usize::MAX).extend(1, 1);
        budget.close();
        assert!(budget.try_reserve(0).is_none());
    }
}
