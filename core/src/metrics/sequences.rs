//! Metrics of each sequence in a run with several sequences, and metrics of speculative decoding.
//!
//! All sequences are requested when the run begins, or each one arrives during the run. The time to the first token of
//! each sequence is measured from then on, including the wait for a slot and for earlier prompts. The overall rate is the number of tokens after the first
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
    /// Milliseconds from the request of the sequence to its first token.
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

/// Metrics of requests that arrive during a run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RequestMetrics {
    /// The number of requests that got a token.
    pub count: u64,
    /// Generated tokens per second, from the arrival of the first request to the last token.
    pub output_tokens_per_s: f64,
    /// Time from the arrival of a request to its first token.
    pub ttft_ms: Percentiles,
    /// Time between two outputs of a request (inter-token latency), per token.
    pub itl_ms: Percentiles,
    /// Time that a request waits for a slot.
    pub queue_ms: Percentiles,
}

/// Mean, and percentiles by nearest rank.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Percentiles {
    pub mean: f64,
    pub p50: f64,
    pub p95: f64,
    pub p99: f64,
}

impl Percentiles {
    fn of(mut values: Vec<f64>) -> Self {
        values.sort_by(f64::total_cmp);
        let rank = |share: f64| {
            let at = (share * values.len() as f64).ceil().max(1.0) as usize - 1;
            values.get(at).copied().unwrap_or_default()
        };
        let mean = total(values.iter().copied()) / values.len().max(1) as f64;
        Self { mean, p50: rank(0.5), p95: rank(0.95), p99: rank(0.99) }
    }
}

/// Returns the metrics of requests that arrived during the run; `None` if there are none with a token.
pub(super) fn request_metrics(outputs: &TokenTimes, arrivals: bool) -> Option<RequestMetrics> {
    let firsts = &outputs.first_tokens;
    let start = firsts.iter().map(|first| first.arrival_ns).min().filter(|_| arrivals)?;
    let ends = firsts.iter().map(|first| first.end_ns);
    let end = ends.chain(outputs.decode_steps.iter().map(|step| step.end_ns)).max()?;
    let tokens = (outputs.decoded_tokens() + firsts.len()) as f64;
    let each = |step: &DecodeStep| std::iter::repeat_n(step.ms_per_token(), step.tokens() as usize);
    Some(RequestMetrics {
        count: firsts.len() as u64,
        output_tokens_per_s: tokens / (millis(end.saturating_sub(start)) / 1e3).max(1e-9),
        ttft_ms: Percentiles::of(firsts.iter().map(|first| millis(first.since_request(0))).collect()),
        itl_ms: Percentiles::of(outputs.decode_steps.iter().flat_map(each).collect()),
        queue_ms: Percentiles::of(firsts.iter().map(|first| millis(first.queue_ns)).collect()),
    })
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
            ttft_ms: millis(first.since_request(begin)),
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
