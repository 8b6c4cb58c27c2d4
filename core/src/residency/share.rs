//! Share: the order in which pieces of a device's share are evicted when not all of them fit.
//!
//! The share is a list of visits (the work between two idle times of the device), each a list of pieces in the order
//! of use. For a cyclic scan any kept set reads the same bytes; it matters *when* the rest is read. A buffer is
//! filled while the device is idle, so every visit should miss equally much. A disk should never wait while the
//! device computes, so the missing pieces of a visit should lie evenly over it.
//!
//! Pieces are therefore ranked once, in the order of eviction: the visit that misses least is next, and within a
//! visit the places follow the van der Corput sequence, which is even for every length. The kept sets of two budgets
//! are nested, so that a budget can change while the device runs: shrinking only evicts, growing only adds.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// A device's pieces, ranked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Share {
    /// Bytes of each piece, in the order of use.
    bytes: Vec<u64>,
    /// Pieces in the order of eviction.
    evicted: Vec<usize>,
}

impl Share {
    /// Ranks pieces, given in bytes: visit by visit, in the order of use.
    pub fn new(visits: &[Vec<u64>]) -> Self {
        let bytes: Vec<u64> = visits.iter().flatten().copied().collect();
        let mut first = 0;
        let mut ranked: Vec<_> = visits
            .iter()
            .map(|visit| {
                let ranked: Vec<usize> = spread(visit.len()).into_iter().map(|piece| first + piece).collect();
                first += visit.len();
                ranked.into_iter()
            })
            .collect();
        // Visits by the bytes that they miss, the least first.
        let mut visits: BinaryHeap<_> = (0..ranked.len()).map(|visit| Reverse((0, visit))).collect();
        let mut evicted = Vec::with_capacity(bytes.len());
        while let Some(Reverse((missing, visit))) = visits.pop() {
            if let Some(piece) = ranked[visit].next() {
                evicted.push(piece);
                visits.push(Reverse((missing + bytes[piece], visit)));
            }
        }
        Self { bytes, evicted }
    }

    /// Bytes of all pieces.
    pub fn total(&self) -> u64 {
        self.bytes.iter().sum()
    }

    /// Whether each piece is kept within `budget` bytes: as many as fit.
    pub fn kept(&self, budget: u64) -> Vec<bool> {
        let mut kept = vec![true; self.bytes.len()];
        let mut held = self.total();
        for &piece in &self.evicted {
            if held <= budget {
                break;
            }
            kept[piece] = false;
            held -= self.bytes[piece];
        }
        kept
    }
}

/// `0..count` in the order of the van der Corput sequence of base 2.
fn spread(count: usize) -> Vec<usize> {
    let bits = usize::BITS - count.saturating_sub(1).leading_zeros();
    let reversed = |at: usize| if bits == 0 { 0 } else { at.reverse_bits() >> (usize::BITS - bits) };
    // From the end: what a visit needs first has had the least time to be read.
    (0..1usize << bits).map(reversed).filter(|&at| at < count).map(|at| count - 1 - at).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn missing(share: &Share, visits: &[Vec<u64>], budget: u64) -> Vec<u64> {
        let kept = share.kept(budget);
        let mut first = 0;
        let missed = |visit: &Vec<u64>| {
            let own = first..first + visit.len();
            first += visit.len();
            own.filter(|&piece| !kept[piece]).map(|piece| share.bytes[piece]).sum()
        };
        visits.iter().map(missed).collect()
    }

    #[test]
    fn every_visit_misses_equally_much_and_evenly() {
        // A head with an output matrix: the visit that begins with it is larger, and misses no more.
        let visits = [vec![1; 96], vec![1; 32], vec![1; 32], vec![1; 32]];
        let share = Share::new(&visits);
        assert_eq!(missing(&share, &visits, 192 - 64), [16; 4]);
        let kept = share.kept(192 - 64);
        let longest = kept[96..128].chunk_by(|a, b| a == b).map(<[bool]>::len).max();
        assert_eq!(longest, Some(1), "every second piece of 32 is streamed");
    }

    #[test]
    fn small_visits_are_evicted_whole_before_large_ones_are_touched_further() {
        let visits = [vec![1; 100], vec![1; 10]];
        assert_eq!(missing(&Share::new(&visits), &visits, 40), [60, 10]);
    }

    #[test]
    fn a_share_without_pieces_keeps_nothing() {
        assert!(Share::new(&[]).kept(5).is_empty());
        assert!(Share::new(&[vec![], vec![]]).kept(0).is_empty());
    }

    proptest! {
        #[test]
        fn kept_sets_fit_and_are_nested(
            visits in prop::collection::vec(prop::collection::vec(1u64..100, 0..20), 0..6),
            small in 0u64..2000,
            more in 0u64..2000,
        ) {
            let share = Share::new(&visits);
            let held = |kept: &[bool]| -> u64 {
                share.bytes.iter().zip(kept).filter(|(_, kept)| **kept).map(|(bytes, _)| bytes).sum()
            };
            let (few, many) = (share.kept(small), share.kept(small + more));
            prop_assert!(held(&few) <= small && held(&many) <= small + more);
            prop_assert!(few.iter().zip(&many).all(|(few, many)| !few || *many), "nested");
            // No room for the largest piece is left unused.
            prop_assert!(held(&few) == share.total() || held(&few) + 100 > small);
        }
    }
}
