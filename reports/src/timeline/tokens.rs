//! The token of median duration.
//!
//! A [`DecodeStep`] counts as one token here, even if it generated several tokens (accepted drafts).

use hearth_core::metrics::token_times::DecodeStep;

/// Returns the token of median duration; among equal durations, the earliest.
pub fn median(tokens: &[DecodeStep]) -> Option<DecodeStep> {
    let mut sorted = tokens.to_vec();
    sorted.sort_by_key(DecodeStep::duration);
    sorted.get(sorted.len().div_ceil(2).checked_sub(1)?).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn median_is_the_nearest_rank() {
        let token = |pass, end| DecodeStep {
            pass,
            sequence: 0,
            start: 0,
            end,
            accepted: 0,
            drafted: 0,
            interrupted: false,
        };
        assert_eq!(median(&[]), None);
        assert_eq!(median(&[token(1, 9), token(2, 3), token(3, 5)]).map(|token| token.pass), Some(3));
        // Of two tokens the shorter one is the median, as in the metrics.
        assert_eq!(median(&[token(1, 9), token(2, 3)]).map(|token| token.pass), Some(2));
    }
}
