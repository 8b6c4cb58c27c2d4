//! Start and end times of each token.
//!
//! A token ends when the head has sampled it, and starts when the previous token of its sequence ended, as in
//! [`hearth_core::metrics`]. The first token of a sequence is left out, because its time is that of the prompt.
//! Several tokens of one pass (accepted drafts) count as one token here.

use hearth_core::metrics::token_times::{DecodeStep, TokenTimes};
use hearth_schema::Trace;

/// The interval of a token, in nanoseconds on the clock of the head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Token {
    pub pass: u32,
    /// The end of the previous token of the sequence.
    pub start: u64,
    pub end: u64,
}

impl Token {
    /// Returns the duration in nanoseconds.
    pub fn duration(&self) -> u64 {
        self.end.saturating_sub(self.start)
    }
}

/// Returns the tokens after the first of each sequence, in the order of their passes.
pub fn of(trace: &Trace) -> Vec<Token> {
    let steps = TokenTimes::from_trace(trace).decode_steps.into_iter();
    steps.map(|DecodeStep { pass, start, end, .. }| Token { pass, start, end }).collect()
}

/// Returns the token of median duration; among equal durations, the earliest.
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
        // Of two tokens the shorter one is the median, as in the metrics.
        assert_eq!(median(&[token(1, 9), token(2, 3)]).map(|token| token.pass), Some(2));
    }
}
