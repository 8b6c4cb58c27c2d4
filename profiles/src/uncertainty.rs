//! The uncertainty of a value, which follows from its source.

use crate::{Fraction, Sourced};

/// Uncertainty of a value by the first word of its source, as the standard deviation of the logarithm. source: assumed;
/// repeated measurements differ by up to 3 %, inferred values are fits to a few rows, and assumed values are orders of
/// magnitude by analogy.
const UNCERTAINTY: [(&str, f64); 5] =
    [("measured", 0.03), ("read from", 0.0), ("set", 0.0), ("inferred", 0.1), ("assumed", 0.25)];
/// Uncertainty of a published value, as the standard deviation of the logarithm. source: assumed; published numbers
/// are rounded, such as 0.72 to 0.7 GB/s
const PUBLISHED_UNCERTAINTY: f64 = 0.03;

/// Half the interquartile range of a normal distribution, in standard deviations.
const HALF_INTERQUARTILE_RANGE: f64 = 0.67;

/// Returns the standard deviation of the logarithm of a value with this source and spread of repeated measurements.
pub fn relative_uncertainty(source: &str, spread: Option<Fraction>) -> f64 {
    let repeats = spread.map_or(0.0, |spread| spread.0 / HALF_INTERQUARTILE_RANGE);
    let kind = UNCERTAINTY.iter().find(|(word, _)| source.starts_with(word));
    kind.map_or(PUBLISHED_UNCERTAINTY, |(_, uncertainty)| *uncertainty).max(repeats)
}

/// Returns the spread of a value with this uncertainty, rounded to tenths of a percent.
pub fn spread_of_uncertainty(uncertainty: f64) -> Fraction {
    Fraction((uncertainty * HALF_INTERQUARTILE_RANGE * 1e3).round() / 1e3)
}

impl<T> Sourced<T> {
    /// Returns the standard deviation of the logarithm of the value, which follows from its source and spread.
    pub fn relative_uncertainty(&self) -> f64 {
        relative_uncertainty(&self.source, self.spread)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uncertainty_follows_from_the_source() {
        assert_eq!(relative_uncertainty("assumed: as for q4_k", None), 0.25);
        assert_eq!(relative_uncertainty("prima.cpp paper, Table 3", None), 0.03);
        assert_eq!(relative_uncertainty("set: the scenario's limit", None), 0.0);
        // A spread of 6.7 % is a standard deviation of 10 %.
        let spread = Some(Fraction(0.067));
        assert!((relative_uncertainty("measured: five runs", spread) - 0.1).abs() < 1e-12);
    }
}
