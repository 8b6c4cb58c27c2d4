//! Pass: consecutive tokens of one sequence that go around the ring together.
//!
//! A prompt enters in batches; a generated token enters alone, or, with a draft model, in front of the tokens drafted
//! to follow it.
//!
//! Not here: which pass comes when (`hearth_core::schedule::Generation`).

use serde::{Deserialize, Serialize};

/// The largest batch that enters the ring at once, in tokens. Longer prompts take several passes.
pub const MAX_PASS_TOKENS: u32 = 512;

/// Consecutive tokens of one sequence that go through all layers together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Pass {
    /// Counts the passes of a run, from 0.
    pub index: u32,
    /// Position of the first token in its sequence.
    pub first_position: u32,
    /// Tokens in the batch, at least 1.
    pub tokens: u32,
    /// Whether a token is sampled from the last position's output.
    pub output: bool,
    /// The sequence, from 0.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub sequence: u32,
    /// The number of drafted tokens, which are the last ones; each of them has an output too.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub drafted: u32,
}

/// Whether a number is zero, which documents leave out.
pub(crate) fn is_zero<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

impl Pass {
    /// Tokens of the only sequence, none of them drafted.
    pub const fn plain(index: u32, first_position: u32, tokens: u32, output: bool) -> Self {
        Self { index, first_position, tokens, output, sequence: 0, drafted: 0 }
    }

    /// The number of positions with an output: the last one, and one for each drafted token.
    pub fn outputs(&self) -> u32 {
        if self.output { self.drafted.saturating_add(1) } else { 0 }
    }

    /// The position after its last token, `None` if that overflows.
    pub fn end(&self) -> Option<u32> {
        self.first_position.checked_add(self.tokens)
    }
}
