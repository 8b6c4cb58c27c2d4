//! Kept budget: the size of the kept set while other programs take memory and give it back.
//!
//! Kept weights are ordinary page cache, which the system evicts without notice. A set that no longer fits is worse
//! than none, because a cyclic scan of it evicts every page before its next use. So the budget follows the memory
//! that is left: at the end of each token it gets the bytes of the kept set that were found missing, and the system's
//! own number if there is one. It shrinks at once and grows back in steps. Each step must last before the next is
//! taken, and a step that did not last makes the next wait longer.

/// The steps in which a kept set grows from nothing to all of it.
/// source: assumed
const STEPS: u64 = 4;

/// Less than this share of the kept set is not pressure: single pages are evicted now and then.
/// source: assumed
const NOISE: u64 = 64;

/// The longest time between two attempts to grow, in tokens.
/// source: assumed
const MAX_WAIT: u32 = 64;

/// The bytes that a device keeps.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeptBudget {
    most: u64,
    now: u64,
    /// Tokens that a step must last before the next.
    wait: u32,
    /// Tokens that it has lasted.
    lasted: u32,
    /// Whether the last step grew the kept set and nothing was evicted since.
    grown: bool,
    /// Whether the budget has just shrunk: pieces that are missing now were evicted before that.
    settling: bool,
}

impl KeptBudget {
    /// A budget of `most` bytes while memory has room for them.
    pub fn new(most: u64) -> Self {
        Self { most, now: most, wait: 1, lasted: 0, grown: false, settling: false }
    }

    /// The bytes kept now.
    pub fn now(&self) -> u64 {
        self.now
    }

    /// Ends a token. `lost` bytes of the kept set had been evicted, and memory holds `room` bytes of kept weights, if
    /// that is known. Returns whether the budget has changed.
    pub fn after_token(&mut self, lost: u64, room: Option<u64>) -> bool {
        let before = self.now;
        let ceiling = self.most.min(room.unwrap_or(self.most));
        let pressed = lost > self.now / NOISE;
        let fall = self.now.saturating_sub(ceiling);
        // Pages found missing after the room has shrunk are the same loss, reported twice.
        let is_reported = fall > self.now / NOISE;
        if std::mem::replace(&mut self.settling, is_reported) {
            self.now -= fall;
        } else if pressed {
            self.now -= if fall > 0 { fall } else { lost.min(self.now / 2) };
            self.wait = (self.wait * 2).min(MAX_WAIT);
            (self.lasted, self.grown, self.settling) = (0, false, true);
        } else {
            self.now -= fall;
            self.lasted = self.lasted.saturating_add(1);
            if self.lasted >= self.wait && self.now < ceiling {
                self.now = ceiling.min(self.now + (self.most / STEPS).max(1));
                if self.grown {
                    self.wait = (self.wait / 2).max(1);
                }
                (self.lasted, self.grown) = (0, true);
            }
        }
        self.now != before
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A page cache that evicts the least recently used pages: a scan of more than `room` loses everything.
    fn lost(kept: u64, room: u64) -> u64 {
        if kept > room { kept } else { 0 }
    }

    #[test]
    fn budget_shrinks_at_once_and_grows_back() {
        let mut budget = KeptBudget::new(1000);
        assert!(!budget.after_token(0, Some(2000)));
        assert!(budget.after_token(600, Some(400)));
        assert!(
            !budget.after_token(400, Some(400)),
            "what was left had been taken as well, and is read again"
        );
        assert_eq!(budget.now(), 400);
        assert!(!budget.after_token(0, Some(400)), "nothing to grow into");
        let tokens = (1..).take_while(|_| {
            budget.after_token(0, Some(2000));
            budget.now() < 1000
        });
        assert!(tokens.count() < 6, "a few tokens after the memory is back, everything is kept again");
    }

    #[test]
    fn announced_loss_counts_once() {
        let mut budget = KeptBudget::new(1000);
        assert!(budget.after_token(0, Some(600)), "less memory, before anything is missing");
        assert!(!budget.after_token(900, Some(600)), "a scan of what no longer fitted took the rest");
        assert_eq!(budget.now(), 600);
        assert!(budget.after_token(300, Some(600)), "but what is lost now does not fit");
        let mut budget = KeptBudget::new(1000);
        for room in [900, 700, 500] {
            assert!(budget.after_token(0, Some(room)), "less and less");
        }
        assert!(!budget.after_token(400, Some(500)), "and each fall is told before it is found");
    }

    #[test]
    fn budget_is_found_without_a_reading_of_memory() {
        let mut budget = KeptBudget::new(1000);
        for _ in 0..12 {
            budget.after_token(lost(budget.now(), 300), None);
        }
        assert!(budget.now() <= 300);
        // It tries to grow now and then; on the whole it stays where nothing is lost.
        let losses = (0..200).filter(|_| {
            let lost = lost(budget.now(), 300);
            budget.after_token(lost, None);
            lost > 0
        });
        assert!(losses.count() < 40);
        for _ in 0..200 {
            budget.after_token(0, None);
        }
        assert_eq!(budget.now(), 1000);
    }

    #[test]
    fn single_evicted_pages_are_no_pressure() {
        let mut budget = KeptBudget::new(1000);
        assert!(!budget.after_token(10, Some(5000)));
    }

    proptest! {
        #[test]
        fn budget_never_exceeds_memory(
            most in 0u64..1000,
            tokens in prop::collection::vec((0u64..2000, prop::option::of(0u64..2000)), 0..60),
        ) {
            let mut budget = KeptBudget::new(most);
            for (lost, room) in tokens {
                let before = budget.now();
                let changed = budget.after_token(lost, room);
                prop_assert!(budget.now() <= most.min(room.unwrap_or(most)));
                prop_assert_eq!(changed, budget.now() != before);
            }
        }
    }
}
