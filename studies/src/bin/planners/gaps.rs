//! Quantiles of the gaps of a strategy.
//!
//! A gap is a time over the best known time of the same instance, less one. A run that ends out of memory has no
//! time; its gap is infinite and is counted where it belongs, at the end.
//!
//! Not here: what the times are of.

/// Times closer than this, relatively, are the same.
pub const SAME: f64 = 1e-9;
/// A plan within this of the best counts among the best under the simulator, whose chunks are coarse.
const NEAR: f64 = 0.01;

/// Gaps of one strategy, sorted.
#[derive(Debug, Clone, Default)]
pub struct Gaps(Vec<f64>);

impl Gaps {
    pub fn new(mut gaps: Vec<f64>) -> Self {
        gaps.sort_by(f64::total_cmp);
        Self(gaps)
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.0.len()
    }

    /// In ascending order.
    pub fn sorted(&self) -> &[f64] {
        &self.0
    }

    /// The nearest-rank quantile.
    pub fn quantile(&self, share: f64) -> f64 {
        let rank = (share * self.0.len() as f64).ceil().max(1.0) as usize;
        self.0.get(rank - 1).copied().unwrap_or(f64::NAN)
    }

    /// How many are zero.
    pub fn none(&self) -> usize {
        self.0.iter().filter(|gap| **gap <= SAME).count()
    }

    /// How many are at most a hundredth.
    pub fn near(&self) -> usize {
        self.0.iter().filter(|gap| **gap <= NEAR).count()
    }

    /// How many mean more than twice the time.
    pub fn doubled(&self) -> usize {
        self.0.iter().filter(|gap| **gap > 1.0).count()
    }

    /// How many runs end out of memory.
    pub fn out_of_memory(&self) -> usize {
        self.0.iter().filter(|gap| gap.is_infinite()).count()
    }
}

/// The gap of a time over the best one; infinite without a time.
pub fn gap(seconds: Option<f64>, best: f64) -> f64 {
    seconds.map_or(f64::INFINITY, |seconds| seconds / best - 1.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_of_the_nearest_rank() {
        // Gaps 0, 0.5, 1, 3 and no end: the median is the third, the ninth decile the fifth.
        let gaps = Gaps::new(vec![gap(Some(4.0), 1.0), gap(None, 1.0), 0.0, 0.5, 1.0]);
        assert_eq!(gaps.sorted()[..4], [0.0, 0.5, 1.0, 3.0]);
        assert_eq!(gaps.quantile(0.5), 1.0);
        assert_eq!(gaps.quantile(0.9), f64::INFINITY);
        assert_eq!((gaps.none(), gaps.near(), gaps.doubled(), gaps.out_of_memory()), (1, 1, 2, 1));
        assert!(Gaps::default().quantile(0.5).is_nan());
    }
}
