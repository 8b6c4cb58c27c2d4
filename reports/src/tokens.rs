//! When did each token begin and end?
//!
//! A token ends when the head has sampled it and begins where the one before it ended, as in
//! [`hearth_schema::metrics`]. Only tokens after the first count: the first ends the prompt.
//!
//! Not here: how long the parts of a token took.

use std::collections::BTreeMap;

use hearth_schema::Trace;
use hearth_schema::trace::Kind;

/// The interval of a token on the head's clock, in nanoseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Token {
    /// The pass that made it.
    pub pass: u32,
    /// The end of the token before.
    pub start: u64,
    /// When it had been sampled.
    pub end: u64,
}

impl Token {
    /// How long it took, in nanoseconds.
    pub fn duration(&self) -> u64 {
        self.end.saturating_sub(self.start)
    }
}

/// The tokens after the first, in order.
pub fn of(trace: &Trace) -> Vec<Token> {
    let mut ends: BTreeMap<u32, u64> = BTreeMap::new();
    for record in &trace.records {
        if record.device == 0 && record.kind == Kind::Output {
            ends.entry(record.pass).or_insert(record.end);
        }
    }
    let mut sampled = trace
        .passes
        .iter()
        .filter(|pass| pass.output)
        .filter_map(|pass| Some((pass.index, *ends.get(&pass.index)?)));
    let Some((_, mut start)) = sampled.next() else { return Vec::new() };
    let mut tokens = Vec::new();
    for (pass, end) in sampled {
        tokens.push(Token { pass, start, end });
        start = end;
    }
    tokens
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
    fn the_median_is_the_nearest_rank() {
        let token = |pass, end| Token { pass, start: 0, end };
        assert_eq!(median(&[]), None);
        assert_eq!(median(&[token(1, 9), token(2, 3), token(3, 5)]).map(|token| token.pass), Some(3));
        // The 1st of two, as the median in the metrics.
        assert_eq!(median(&[token(1, 9), token(2, 3)]).map(|token| token.pass), Some(2));
    }
}
