//! Pass: consecutive tokens of one sequence that go around the ring together.
//!
//! A prompt enters in batches. A generated token enters alone, or with a draft model together with the drafted tokens
//! that follow it.
//!
//! Not here: the order of passes (`hearth_core::schedule::Generation`).

use serde::{Deserialize, Serialize};

/// Maximum number of tokens in a pass. Longer prompts take several passes.
pub const MAX_PASS_TOKENS: u32 = 512;

/// Consecutive tokens of one sequence that go through all layers together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Pass {
    /// The index of the pass in its run, from 0.
    pub index: u32,
    /// The position of the first token in its sequence, from 0.
    pub first_position: u32,
    /// The number of tokens, at least 1.
    pub tokens: u32,
    /// Whether a token is sampled after the last position.
    #[serde(rename = "output")]
    pub has_output: bool,
    /// The index of the sequence, from 0.
    #[serde(rename = "sequence", default, skip_serializing_if = "is_default")]
    pub sequence_index: u32,
    /// The number of drafted tokens. They are the last tokens of the pass; a token is also sampled after each draft.
    #[serde(default, skip_serializing_if = "is_default")]
    pub drafted: u32,
}

/// Whether a value is the default, which is omitted in documents.
pub(crate) fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

impl Pass {
    /// Creates a pass of sequence 0 without drafted tokens.
    pub const fn new(index: u32, first_position: u32, tokens: u32, has_output: bool) -> Self {
        Self { index, first_position, tokens, has_output, sequence_index: 0, drafted: 0 }
    }

    /// Returns the number of positions after which a token is sampled: 0 without an output, else 1 plus `drafted`.
    pub fn output_count(&self) -> u32 {
        if self.has_output { self.drafted.saturating_add(1) } else { 0 }
    }
}
