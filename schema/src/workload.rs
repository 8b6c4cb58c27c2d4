//! Workload: prompts, how they enter the ring, and how many tokens each generates.
//!
//! With `speculation` a small model drafts tokens that the large one verifies in one batch (Leviathan et al., 2023;
//! prima.cpp paper, appendix A.9).
//!
//! Not here: the draft's numbers (`hearth_core::Cluster::draft`), and the passes of the tokens
//! (`hearth_core::schedule::Generation`).

use hearth_profiles::document::DocumentError;
use hearth_profiles::{Fraction, Sourced};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::model::{ModelRef, Processor};
use crate::pass::MAX_PASS_TOKENS;

/// More requests at once than a home has; keeps products of counts far from overflow.
/// source: assumed
pub const MAX_SEQUENCES: u32 = 1024;

/// The requests of a run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, expecting = "a workload, such as `{prompt: 32, generate: 16}`")]
pub struct Workload {
    pub prompt: u32,
    pub generate: u32,
    /// Independent requests of that size, all made when the run begins.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub sequences: u32,
    /// The largest number of tokens of a prompt that enter the ring as one batch.
    #[serde(default = "largest_batch", skip_serializing_if = "is_largest_batch")]
    pub micro_batch: u32,
    /// A small model that drafts tokens for this one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub speculation: Option<Speculation>,
}

/// Drafting tokens with a small model on the head, and verifying them in one batch.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(
    deny_unknown_fields,
    expecting = "a draft, such as `{draft: {profile: llama-8b}, tokens: 4, acceptance: {value: 70 %, source: \"assumed\"}}`"
)]
pub struct Speculation {
    /// The small model, with the large one's vocabulary. The head holds it whole.
    pub draft: ModelRef,
    /// Tokens drafted for one pass of the large model.
    pub tokens: u32,
    /// The probability that the large model accepts a drafted token, given that it accepted the previous ones.
    pub acceptance: Sourced<Fraction>,
    /// Where the draft runs; if absent, on the head's GPU where its memory holds it, else on the CPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub processor: Option<Processor>,
}

pub(crate) fn one() -> u32 {
    1
}

#[allow(clippy::trivially_copy_pass_by_ref)] // serde's signature
pub(crate) fn is_one(count: &u32) -> bool {
    *count == 1
}

fn largest_batch() -> u32 {
    MAX_PASS_TOKENS
}

#[allow(clippy::trivially_copy_pass_by_ref)] // serde's signature
fn is_largest_batch(tokens: &u32) -> bool {
    *tokens == MAX_PASS_TOKENS
}

impl Workload {
    /// One request, with the largest batches and without a draft.
    pub const fn plain(prompt: u32, generate: u32) -> Self {
        Self { prompt, generate, sequences: 1, micro_batch: MAX_PASS_TOKENS, speculation: None }
    }

    /// Tokens drafted at a time.
    pub fn drafts(&self) -> u32 {
        self.speculation.as_ref().map_or(0, |speculation| speculation.tokens)
    }

    /// Checks that the workload fits a context.
    pub fn validate(&self, context: u32) -> Result<(), DocumentError> {
        let refuse = |what: String| Err(DocumentError::invalid(what));
        if self.prompt == 0 || self.generate == 0 {
            return refuse("`workload.prompt` and `workload.generate` must be at least 1".into());
        }
        let tokens = u64::from(self.prompt) + u64::from(self.generate);
        if tokens > u64::from(context) {
            return refuse(format!(
                "the workload needs {tokens} tokens and `context` is {context}: raise one or lower the other"
            ));
        }
        if !(1..=MAX_SEQUENCES).contains(&self.sequences) {
            return refuse(format!(
                "`workload.sequences` is {}: it must be 1 to {MAX_SEQUENCES}",
                self.sequences
            ));
        }
        if u64::from(self.sequences) * u64::from(context) > u64::from(u32::MAX) {
            return refuse(format!(
                "{} sequences of a `context` of {context} are more than {} positions: lower one",
                self.sequences,
                u32::MAX
            ));
        }
        if !(1..=MAX_PASS_TOKENS).contains(&self.micro_batch) {
            return refuse(format!(
                "`workload.micro_batch` is {}: it must be 1 to {MAX_PASS_TOKENS}",
                self.micro_batch
            ));
        }
        self.speculation.as_ref().map_or(Ok(()), Speculation::validate)
    }
}

impl Speculation {
    fn validate(&self) -> Result<(), DocumentError> {
        let refuse = |what: String| Err(DocumentError::invalid(what));
        if !(1..MAX_PASS_TOKENS).contains(&self.tokens) {
            return refuse(format!(
                "`workload.speculation.tokens` is {}: it must be 1 to {}; leave `speculation` out to draft nothing",
                self.tokens,
                MAX_PASS_TOKENS - 1
            ));
        }
        let acceptance = self.acceptance.value.0;
        if !(0.0..=1.0).contains(&acceptance) {
            return refuse(format!(
                "`workload.speculation.acceptance` is {acceptance}: a share is 0 % to 100 %"
            ));
        }
        self.draft.validate("workload.speculation.draft")
    }
}
