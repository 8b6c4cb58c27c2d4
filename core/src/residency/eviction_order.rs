//! Eviction order: the order in which the pieces of a device's weights are evicted if not all of them fit in memory.
//!
//! A busy period is the work between two idle times of the device. It uses a list of pieces in a fixed order. The
//! stream buffer is filled while the device is idle, so every busy period should miss the same number of bytes. The
//! disk should not be idle while the device computes, so the missing pieces should be spread evenly over a busy period.
//!
//! Pieces are therefore ranked once, in the order of eviction: the next piece belongs to the busy period that misses
//! the fewest bytes, and the positions within a busy period follow the van der Corput sequence, each prefix of which is
//! evenly spread. The kept sets of two budgets are nested, so a budget can change while the device runs: shrinking only
//! evicts pieces, growing only adds pieces.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// The pieces of a device's weights, ranked for eviction.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct EvictionOrder {
    /// The size of each piece in bytes, in the order of use.
    bytes: Vec<u64>,
    /// The pieces in the order of eviction, as indices into `bytes`.
    evicted: Vec<usize>,
}

impl EvictionOrder {
    /// Ranks the pieces of a device for eviction. `busy_periods` has the sizes in bytes of the pieces of each busy
    /// period (the work between two idle times of the device), in the order of use.
    pub fn new(busy_periods: &[Vec<u64>]) -> Self {
        let bytes: Vec<u64> = busy_periods.iter().flatten().copied().collect();
        let mut first = 0;
        let rank = |pieces: &Vec<u64>| {
            let begin = first;
            first += pieces.len();
            spread(pieces.len()).into_iter().map(move |piece| begin + piece)
        };
        let mut ranked: Vec<_> = busy_periods.iter().map(rank).collect();
        // Busy periods by the number of bytes that they miss, the smallest first.
        let mut periods: BinaryHeap<_> = (0..ranked.len()).map(|period| Reverse((0, period))).collect();
        let mut evicted = Vec::with_capacity(bytes.len());
        while let Some(Reverse((missing, period))) = periods.pop() {
            if let Some(piece) = ranked[period].next() {
                evicted.push(piece);
                periods.push(Reverse((missing + bytes[piece], period)));
            }
        }
        Self { bytes, evicted }
    }

    pub fn total_bytes(&self) -> u64 {
        self.bytes.iter().sum()
    }

    /// Returns for each piece, in the order of use, whether the piece is kept if `budget` bytes fit in memory.
    pub fn kept_flags(&self, budget: u64) -> Vec<bool> {
        let mut kept = vec![true; self.bytes.len()];
        let mut kept_bytes = self.total_bytes();
        let mut evicted = self.evicted.iter();
        while kept_bytes > budget
            && let Some(&piece) = evicted.next()
        {
            kept[piece] = false;
            kept_bytes -= self.bytes[piece];
        }
        kept
    }
}

/// Returns the indices below `count` in van der Corput order (base 2), counted from the last index.
fn spread(count: usize) -> Vec<usize> {
    let bits = usize::BITS - count.saturating_sub(1).leading_zeros();
    let reversed = |at: usize| if bits == 0 { 0 } else { at.reverse_bits() >> (usize::BITS - bits) };
    // From the end, because the first pieces of a busy period have the least time to be read.
    (0..1usize << bits).map(reversed).filter(|&at| at < count).map(|at| count - 1 - at).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn missing(order: &EvictionOrder, busy_periods: &[Vec<u64>], budget: u64) -> Vec<u64> {
        let kept = order.kept_flags(budget);
        let mut first = 0;
        let missed = |pieces: &Vec<u64>| {
            let own = first..first + pieces.len();
            first += pieces.len();
            own.filter(|&piece| !kept[piece]).map(|piece| order.bytes[piece]).sum()
        };
        busy_periods.iter().map(missed).collect()
    }

    #[test]
    fn every_busy_period_misses_the_same_bytes_evenly_spread() {
        // The busy period of a head that begins with the output matrix is larger, but misses no more than the others.
        let busy_periods = [vec![1; 96], vec![1; 32], vec![1; 32], vec![1; 32]];
        let order = EvictionOrder::new(&busy_periods);
        assert_eq!(missing(&order, &busy_periods, 192 - 64), [16; 4]);
        let kept = order.kept_flags(192 - 64);
        let longest = kept[96..128].chunk_by(|a, b| a == b).map(<[bool]>::len).max();
        assert_eq!(longest, Some(1), "every second piece of 32 is streamed");
    }

    #[test]
    fn small_busy_period_is_evicted_completely_if_busy_periods_cannot_miss_equally() {
        let busy_periods = [vec![1; 100], vec![1; 10]];
        assert_eq!(missing(&EvictionOrder::new(&busy_periods), &busy_periods, 40), [60, 10]);
    }

    proptest! {
        #[test]
        fn kept_sets_fit_and_are_nested(
            busy_periods in prop::collection::vec(prop::collection::vec(1u64..100, 0..20), 0..6),
            small in 0u64..2000,
            more in 0u64..2000,
        ) {
            let order = EvictionOrder::new(&busy_periods);
            let kept_bytes = |kept: &[bool]| -> u64 {
                order.bytes.iter().zip(kept).filter(|(_, kept)| **kept).map(|(bytes, _)| bytes).sum()
            };
            let (few, many) = (order.kept_flags(small), order.kept_flags(small + more));
            prop_assert_eq!(few.len(), busy_periods.concat().len());
            prop_assert!(kept_bytes(&few) <= small && kept_bytes(&many) <= small + more);
            prop_assert!(few.iter().zip(&many).all(|(few, many)| !few || *many), "nested");
            // The unused part of the budget is smaller than the largest piece.
            prop_assert!(kept_bytes(&few) == order.total_bytes() || kept_bytes(&few) + 100 > small);
        }
    }
}
