//! Gaps: statistics of how much a strategy's times exceed the best times.
//!
//! A gap is the ratio of a time to the best known time of the same instance, minus one. The gap of a run that ends
//! out of memory is infinite, so that the quantiles include these runs.

/// Maximum relative difference between times that count as equal.
pub const EQUALITY_TOLERANCE: f64 = 1e-9;
/// Maximum gap of a near-optimal plan in the simulator; not zero, because the simulated chunks are coarse.
const NEAR_OPTIMAL_GAP: f64 = 0.01;

/// The gaps of one strategy, in ascending order.
#[derive(Debug, Clone, Default)]
pub struct Gaps(Vec<f64>);

impl Gaps {
    pub fn new(mut gaps: Vec<f64>) -> Self {
        gaps.sort_by(f64::total_cmp);
        Self(gaps)
    }

    pub fn count(&self) -> usize {
        self.0.len()
    }

    pub fn as_slice(&self) -> &[f64] {
        &self.0
    }

    /// Returns the nearest-rank quantile of the gaps for a share from 0 to 1; NaN without gaps.
    pub fn quantile(&self, share: f64) -> f64 {
        let rank = (share * self.0.len() as f64).ceil().max(1.0) as usize;
        self.0.get(rank - 1).copied().unwrap_or(f64::NAN)
    }

    fn count_if(&self, fits: impl Fn(f64) -> bool) -> usize {
        self.0.iter().filter(|gap| fits(**gap)).count()
    }

    pub fn zero_count(&self) -> usize {
        self.count_if(|gap| gap <= EQUALITY_TOLERANCE)
    }

    pub fn near_optimal_count(&self) -> usize {
        self.count_if(|gap| gap <= NEAR_OPTIMAL_GAP)
    }

    /// Returns the number of gaps above 100 %: times that are more than twice the best time.
    pub fn more_than_double_count(&self) -> usize {
        self.count_if(|gap| gap > 1.0)
    }

    pub fn out_of_memory_count(&self) -> usize {
        self.count_if(f64::is_infinite)
    }
}

/// Returns the ratio of a time to the best time, minus one; infinite if `seconds` is `None`.
pub fn optimality_gap(seconds: Option<f64>, best: f64) -> f64 {
    seconds.map_or(f64::INFINITY, |seconds| seconds / best - 1.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_have_the_nearest_rank() {
        // Gaps 0, 0.5, 1, 3 and infinity: the median is the third, the ninth decile the fifth.
        let gaps = Gaps::new(vec![optimality_gap(Some(4.0), 1.0), optimality_gap(None, 1.0), 0.0, 0.5, 1.0]);
        assert_eq!(gaps.as_slice()[..4], [0.0, 0.5, 1.0, 3.0]);
        assert_eq!(gaps.quantile(0.5), 1.0);
        assert_eq!(gaps.quantile(0.9), f64::INFINITY);
        assert_eq!((gaps.zero_count(), gaps.near_optimal_count()), (1, 1));
        assert_eq!((gaps.more_than_double_count(), gaps.out_of_memory_count()), (2, 1));
        assert!(Gaps::default().quantile(0.5).is_nan());
    }
}
