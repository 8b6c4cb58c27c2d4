//! Pass: consecutive tokens of one sequence that go around the ring together.
//!
//! A prompt enters in chunks. A generated token enters alone, or with a draft model together with the drafted tokens
//! that follow it. Passes of several sequences can go around the ring together, as a [`Batch`]: the devices read their
//! weights once for all tokens of a batch.
//!
//! Not here: the order of passes, and which passes form a batch (`hearth_core::schedule::Generation`).

use std::sync::Arc;

use serde::{Deserialize, Serialize};

/// Maximum number of tokens in a pass and in a batch. Longer prompts take several passes.
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
    /// Whether the pass is in the same batch as the pass with the index before it.
    #[serde(rename = "joined", default, skip_serializing_if = "is_default")]
    pub is_joined: bool,
}

/// Whether a value is the default, which is omitted in documents.
pub(crate) fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

impl Pass {
    /// Creates a pass of sequence 0 without drafted tokens.
    pub const fn new(index: u32, first_position: u32, tokens: u32, has_output: bool) -> Self {
        Self { index, first_position, tokens, has_output, sequence_index: 0, drafted: 0, is_joined: false }
    }

    /// Returns the number of positions after which a token is sampled: 0 without an output, else 1 plus `drafted`.
    pub fn output_count(&self) -> u32 {
        if self.has_output { self.drafted.saturating_add(1) } else { 0 }
    }
}

/// A change of the KV caches of sequences, which each device makes before it computes the passes of a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CacheChange {
    /// Empties the cache of a sequence, and gives its memory back to the system.
    Release { sequence: u32 },
    /// Copies the first `tokens` positions of one sequence to another, whose cache then has these positions.
    Copy { from: u32, to: u32, tokens: u32 },
}

/// Passes of different sequences that go around the ring together; at least one pass. Their indices are consecutive, and
/// the batch is known by the index of its first pass.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Batch {
    passes: Arc<[Pass]>,
    cache_changes: Arc<[CacheChange]>,
}

impl Batch {
    /// Joins passes. Returns `None` if there are no passes or more than [`MAX_PASS_TOKENS`], if their indices are not
    /// consecutive, or if two passes are of the same sequence.
    pub fn new(mut passes: Vec<Pass>) -> Option<Self> {
        let first = passes.first()?.index;
        if passes.len() > MAX_PASS_TOKENS as usize {
            return None;
        }
        for at in 0..passes.len() {
            let (before, pass) = (&passes[..at], passes[at]);
            let is_consecutive = u64::from(pass.index) == u64::from(first) + at as u64;
            if !is_consecutive || before.iter().any(|it| it.sequence_index == pass.sequence_index) {
                return None;
            }
            passes[at].is_joined = at > 0;
        }
        Some(Self { passes: passes.into(), cache_changes: Arc::default() })
    }

    /// Sets the changes of KV caches before the passes, in their order.
    #[must_use]
    pub fn with_cache_changes(self, changes: Vec<CacheChange>) -> Self {
        Self { cache_changes: changes.into(), ..self }
    }

    pub fn cache_changes(&self) -> &[CacheChange] {
        &self.cache_changes
    }

    /// Returns the index of the first pass.
    pub fn index(&self) -> u32 {
        self.passes[0].index
    }

    /// Returns the index of the pass after the last pass.
    pub fn end(&self) -> u32 {
        self.index().saturating_add(self.passes.len() as u32)
    }

    pub fn passes(&self) -> &[Pass] {
        &self.passes
    }

    /// Returns the total number of tokens.
    pub fn tokens(&self) -> u32 {
        self.passes.iter().fold(0, |sum, pass| sum.saturating_add(pass.tokens))
    }

    /// Returns the number of positions after which a token is sampled.
    pub fn output_count(&self) -> u32 {
        self.passes.iter().fold(0, |sum, pass| sum.saturating_add(pass.output_count()))
    }

    /// Whether a token is sampled after any of the passes.
    pub fn has_output(&self) -> bool {
        self.passes.iter().any(|pass| pass.has_output)
    }
}

impl From<Pass> for Batch {
    fn from(pass: Pass) -> Self {
        Self { passes: [Pass { is_joined: false, ..pass }].into(), cache_changes: Arc::default() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batch_has_consecutive_passes_of_different_sequences() {
        let pass = |index, sequence_index| Pass { sequence_index, ..Pass::new(index, 5, 2, true) };
        let batch = Batch::new(vec![pass(3, 1), pass(4, 0)]).expect("a batch");
        assert_eq!((batch.index(), batch.end(), batch.tokens(), batch.output_count()), (3, 5, 4, 2));
        assert_eq!([false, true], [0, 1].map(|at: usize| batch.passes()[at].is_joined));
        for wrong in [vec![], vec![pass(3, 1), pass(5, 0)], vec![pass(3, 1), pass(4, 1)]] {
            assert_eq!(Batch::new(wrong.clone()), None, "{wrong:?}");
        }
        let last = Pass { is_joined: true, ..pass(u32::MAX, 0) };
        assert_eq!(Batch::from(last).passes(), [Pass { is_joined: false, ..last }]);
        assert_eq!(Batch::new(vec![last, pass(0, 1)]), None, "the index overflows");
    }
}
