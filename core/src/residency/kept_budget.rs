//! Kept budget: how many bytes of weights are kept in memory while other programs allocate and free memory.
//!
//! Kept weights are mostly page cache, which the operating system evicts without notice. A kept set that no longer
//! fits is worse than no kept set, because a cyclic scan of its pages evicts every page before its next use. So the
//! budget follows the available memory. It shrinks at once and grows back in steps. The next step is taken only after a
//! number of tokens without loss, and each loss doubles this number.

/// Number of steps in which the kept budget grows from zero to its maximum.
/// source: assumed
const GROWTH_STEPS: u64 = 4;

/// A loss of less than 1/64 of the kept bytes is ignored, because individual pages are evicted occasionally.
/// source: assumed
const NOISE_DIVISOR: u64 = 64;

/// Maximum number of tokens between two attempts to grow the kept budget.
/// source: assumed
const MAX_WAIT: u32 = 64;

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct KeptBudget {
    max: u64,
    /// The number of bytes of weights to keep now.
    pub bytes: u64,
    /// Number of tokens without loss that must pass before the next growth step.
    wait: u32,
    /// Number of tokens without loss since the last change of the budget.
    lasted: u32,
    /// Whether the last change of the budget was a growth step and nothing has been lost since.
    grown: bool,
    /// Whether the budget has just shrunk: pieces that are missing now were evicted under the old budget.
    settling: bool,
}

impl KeptBudget {
    /// Creates a budget of at most `max` bytes, which starts at this maximum.
    pub fn new(max: u64) -> Self {
        Self { max, bytes: max, wait: 1, ..Self::default() }
    }

    /// Lowers the budget to `limit` bytes, if it is higher, between two tokens.
    pub fn lower_to(&mut self, limit: u64) {
        let fall = self.bytes.saturating_sub(limit);
        self.settling |= fall > self.bytes / NOISE_DIVISOR;
        self.bytes -= fall;
    }

    /// Updates the budget after a token. `lost` is the number of bytes of the kept set that had been evicted. `limit`
    /// is the number of bytes that can be kept, `None` if it is not known. Returns whether the budget has changed.
    pub fn update_after_token(&mut self, lost: u64, limit: Option<u64>) -> bool {
        let before = self.bytes;
        let ceiling = self.max.min(limit.unwrap_or(self.max));
        let pressed = lost > self.bytes / NOISE_DIVISOR;
        let fall = self.bytes.saturating_sub(ceiling);
        // Pages found missing after the limit has fallen are the same loss, reported twice.
        let is_reported = fall > self.bytes / NOISE_DIVISOR;
        if std::mem::replace(&mut self.settling, is_reported) {
            self.bytes -= fall;
        } else if pressed {
            self.bytes -= if fall > 0 { fall } else { lost.min(self.bytes / 2) };
            self.wait = (self.wait * 2).min(MAX_WAIT);
            (self.lasted, self.grown, self.settling) = (0, false, true);
        } else {
            self.bytes -= fall;
            self.lasted = self.lasted.saturating_add(1);
            if self.lasted >= self.wait && self.bytes < ceiling {
                self.bytes = ceiling.min(self.bytes + (self.max / GROWTH_STEPS).max(1));
                if self.grown {
                    self.wait = (self.wait / 2).max(1);
                }
                (self.lasted, self.grown) = (0, true);
            }
        }
        self.bytes != before
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Returns the bytes that a page cache with LRU eviction loses: all `kept` bytes, if they exceed `limit`.
    fn lost(kept: u64, limit: u64) -> u64 {
        if kept > limit { kept } else { 0 }
    }

    #[test]
    fn budget_shrinks_at_once_and_grows_back() {
        let mut budget = KeptBudget::new(1000);
        assert!(!budget.update_after_token(0, Some(2000)));
        assert!(!budget.update_after_token(10, Some(5000)), "individual evicted pages are ignored");
        assert!(budget.update_after_token(600, Some(400)));
        assert!(!budget.update_after_token(400, Some(400)), "the rest was evicted by the same scan");
        assert_eq!(budget.bytes, 400);
        assert!(!budget.update_after_token(0, Some(400)), "no memory to grow");
        let tokens = (1..).take_while(|_| {
            budget.update_after_token(0, Some(2000));
            budget.bytes < 1000
        });
        assert!(tokens.count() < 6, "everything is kept again a few tokens after the memory is free");
    }

    #[test]
    fn reported_loss_counts_once() {
        let mut budget = KeptBudget::new(1000);
        assert!(budget.update_after_token(0, Some(600)), "the limit falls before anything is missing");
        assert!(!budget.update_after_token(900, Some(600)), "the pieces that no longer fit evicted the rest");
        assert_eq!(budget.bytes, 600);
        assert!(budget.update_after_token(300, Some(600)), "a loss at the reduced size shrinks it again");
        let mut budget = KeptBudget::new(1000);
        for limit in [900, 700, 500] {
            assert!(budget.update_after_token(0, Some(limit)), "the limit falls");
        }
        assert!(!budget.update_after_token(400, Some(500)), "the loss follows from the reported fall");
    }

    #[test]
    fn budget_is_lowered_between_tokens() {
        let mut budget = KeptBudget::new(1000);
        budget.lower_to(1200);
        assert_eq!(budget.bytes, 1000);
        budget.lower_to(300);
        assert!(!budget.update_after_token(700, Some(300)), "the loss was reported");
        assert_eq!(budget.bytes, 300);
    }

    #[test]
    fn budget_adapts_without_a_reported_limit() {
        let mut budget = KeptBudget::new(1000);
        for _ in 0..12 {
            budget.update_after_token(lost(budget.bytes, 300), None);
        }
        assert!(budget.bytes <= 300);
        // It sometimes tries to grow, but for most tokens nothing is lost.
        let losses = (0..200).filter(|_| {
            let lost = lost(budget.bytes, 300);
            budget.update_after_token(lost, None);
            lost > 0
        });
        assert!(losses.count() < 40);
        for _ in 0..200 {
            budget.update_after_token(0, None);
        }
        assert_eq!(budget.bytes, 1000);
    }

    proptest! {
        #[test]
        fn budget_never_exceeds_memory(
            max in 0u64..1000,
            tokens in prop::collection::vec((0u64..2000, prop::option::of(0u64..2000)), 0..60),
        ) {
            let mut budget = KeptBudget::new(max);
            for (lost, limit) in tokens {
                let before = budget.bytes;
                let changed = budget.update_after_token(lost, limit);
                prop_assert!(budget.bytes <= max.min(limit.unwrap_or(max)));
                prop_assert_eq!(changed, budget.bytes != before);
            }
        }
    }
}
