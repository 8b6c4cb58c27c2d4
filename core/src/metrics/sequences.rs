//! Metrics of each sequence in a run with several sequences, and metrics of speculative decoding.
//!
//! All sequences are requested when the run begins. The time to the first token of each sequence is measured from the
//! start of the run, including the wait for earlier prompts. The overall rate is the number of tokens after the first
//! token of the run, divided by the time from the first token to the last.
//!
//! `acceptance` is the share of the verified drafts that were accepted. The accepted drafts and the first rejected
//! draft of each pass are verified. Drafts after a rejected draft say nothing about the draft model.

use serde::{Deserialize, Serialize};

use super::token_times::{DecodeStep, FirstToken, TokenTimes};
use super::{ByPass, millis, records_of, total, total_millis};
use hearth_schema::trace::StepKind;

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SequenceMetrics {
    pub sequence: u32,
    /// Milliseconds from the start of the run to the first token of the sequence.
    pub ttft_ms: f64,
    /// The number of generated tokens after the first token of the sequence.
    #[serde(rename = "tokens")]
    pub decoded_tokens: u64,
    /// Mean time per token after the first, in milliseconds; absent if there is only one token.
    pub tpot_ms: Option<f64>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SpeculationMetrics {
    /// The number of passes with drafted tokens.
    pub steps: u64,
    /// The mean number of tokens that a pass with drafted tokens generates.
    pub tokens_per_step: f64,
    pub drafted: u64,
    /// The number of drafted tokens that the target model accepted.
    #[serde(rename = "accepted")]
    pub accepted_drafts: u64,
    /// The fraction of the verified drafts that were accepted. The verified drafts of a pass are the accepted drafts
    /// and the first rejected draft.
    pub acceptance: f64,
    /// The part of the mean time per token that the draft model takes, in milliseconds.
    pub draft_ms: f64,
    /// The mean time per token minus `draft_ms`, in milliseconds.
    pub verify_ms: f64,
}

/// Returns the metrics of each sequence; empty if the run has only one sequence.
pub(super) fn sequence_metrics(outputs: &TokenTimes, begin: Option<u64>) -> Vec<SequenceMetrics> {
    let Some(begin) = begin.filter(|_| outputs.first_tokens.len() > 1) else { return Vec::new() };
    let one = |first: &FirstToken| {
        let steps = || outputs.decode_steps.iter().filter(|step| step.sequence == first.sequence);
        let time = total(steps().map(|step| millis(step.duration_ns())));
        let tokens: u64 = steps().map(|step| u64::from(step.tokens())).sum();
        SequenceMetrics {
            sequence: first.sequence,
            ttft_ms: millis(first.end_ns.saturating_sub(begin)),
            decoded_tokens: tokens,
            tpot_ms: (tokens > 0).then(|| time / tokens as f64),
        }
    };
    outputs.first_tokens.iter().map(one).collect()
}

/// Returns the tokens per second over all sequences; for a single sequence the inverse of `mean_ms`, its mean TPOT.
pub(super) fn token_rate(outputs: &TokenTimes, mean_ms: f64) -> Option<f64> {
    let ends = outputs.first_tokens.iter().map(|first| first.end_ns);
    let from = ends.clone().min()?;
    let until = ends.chain(outputs.decode_steps.iter().map(|step| step.end_ns)).max()?;
    let span = millis(until.saturating_sub(from));
    let (tokens, span) = match outputs.first_tokens.len() {
        1 => (1, mean_ms),
        several => (outputs.decoded_tokens() + several - 1, span),
    };
    (span > 0.0).then(|| tokens as f64 * (1e3 / span))
}

/// Returns the metrics of speculative decoding; `None` if no tokens were drafted. `mean_ms` is the mean time per token.
pub(super) fn speculation_metrics(
    outputs: &TokenTimes,
    by_pass: &ByPass<'_>,
    mean_ms: Option<f64>,
) -> Option<SpeculationMetrics> {
    let with_drafts = || outputs.decode_steps.iter().filter(|step| step.drafted > 0);
    let sum = |count: fn(&DecodeStep) -> u32| with_drafts().map(|step| u64::from(count(step))).sum::<u64>();
    let steps = with_drafts().count() as u64;
    let mean_ms = mean_ms.filter(|_| steps > 0)?;
    let (drafted, accepted) = (sum(|step| step.drafted), sum(|step| step.accepted_drafts));
    let verified = sum(|step| step.drafted.min(step.accepted_drafts + 1));
    let drafting = |step: &DecodeStep| {
        total_millis(records_of(by_pass, step.batch, 0).filter(|record| record.kind == StepKind::Draft))
    };
    let draft_ms = total(outputs.decode_steps.iter().map(drafting)) / outputs.decoded_tokens() as f64;
    Some(SpeculationMetrics {
        steps,
        tokens_per_step: (accepted + steps) as f64 / steps as f64,
        drafted,
        accepted_drafts: accepted,
        acceptance: accepted as f64 / verified as f64,
        draft_ms,
        verify_ms: mean_ms - draft_ms,
    })
}
