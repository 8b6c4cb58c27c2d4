//! Start and end of each token.
//!
//! A token ends when the head has sampled it and begins where the one before it in its sequence ended, as in
//! [`hearth_core::metrics`]. The first token, which ends the prompt, is left out. The tokens of one pass, whose drafts
//! were accepted, count as one.

use hearth_core::metrics::token_times::{DecodeStep, TokenTimes};
use hearth_schema::Trace;

/// The interval of a pass's tokens on the head's clock, in nanoseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Token {
    pub pass: u32,
    /// The end of the previous token of the sequence.
    pub start: u64,
    pub end: u64,
}

impl Token {
    /// Its duration in nanoseconds.
    pub fn duration(&self) -> u64 {
        self.end.saturating_sub(self.start)
    }
}

/// The steps after the first of each sequence, in the order of their passes.
pub fn of(trace: &Trace) -> Vec<Token> {
    let steps = TokenTimes::of(trace).decode_steps.into_iter();
    steps.map(|DecodeStep { pass, start, end, .. }| Token { pass, start, end }).collect()
}

/// The token of median duration; of equals, the earliest.
pub fn median(tokens: &[Token]) -> Option<Token> {
    let mut sorted = tokens.to_vec();
    sorted.sort_by_key(Token::duration);
    sorted.get(sorted.len().div_ceil(2).checked_sub(1)?).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn median_is_the_nearest_rank() {
        let token = |pass, end| Token { pass, start: 0, end };
        assert_eq!(median(&[]), None);
        assert_eq!(median(&[token(1, 9), token(2, 3), token(3, 5)]).map(|token| token.pass), Some(3));
        // The 1st of two, as the median in the metrics.
        assert_eq!(median(&[token(1, 9), token(2, 3)]).map(|token| token.pass), Some(2));
    }
}
