//! Metrics of each sequence in a run with several sequences, and metrics of speculative decoding.
//!
//! All sequences are requested when the run begins, or each one arrives during the run. The time to the first token of
//! each sequence is measured from then on, including the wait for a slot and for earlier prompts. The overall rate is the
//! number of tokens after the first token of the run, divided by the time from the first token to the last.
//!
//! `acceptance` is the share of the verified drafts that were accepted. The accepted drafts and the first rejected
//! draft of each pass are verified. Drafts after a rejected draft say nothing about the draft model.

use std::collections::BTreeMap;

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

/// Metrics of requests that arrive during a run. Times are in milliseconds.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RequestMetrics {
    /// The number of requests that got a token.
    pub count: u64,
    /// Generated tokens per second, from the arrival of the first request to the last token.
    pub output_tokens_per_s: f64,
    /// Time from the arrival of a request to its first token.
    pub ttft_ms: Percentiles,
    /// Time between two outputs of a request (inter-token latency). The time of an output with several tokens is divided
    /// equally among them, and counts once for each. Absent if no request has two outputs.
    pub itl_ms: Option<Percentiles>,
    /// Time that a request waits until it first enters a slot.
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
    /// Summarises values, each of which counts as often as the number beside it; `None` if there are none.
    pub(super) fn of(values: impl Iterator<Item = (f64, u64)>) -> Option<Self> {
        let mut sorted: Vec<(f64, u64)> = values.collect();
        sorted.sort_unstable_by(|left, right| left.0.total_cmp(&right.0));
        let count: u64 = sorted.iter().map(|(_, times)| times).sum();
        let rank = |share: f64| {
            let wanted = ((share * count as f64).ceil() as u64).clamp(1, count);
            let mut passed = 0;
            let found = sorted.iter().find(|(_, times)| {
                passed += times;
                passed >= wanted
            });
            found.map_or(0.0, |(value, _)| *value)
        };
        let mean = total(sorted.iter().map(|(value, times)| value * *times as f64)) / count as f64;
        (count > 0).then(|| Self { mean, p50: rank(0.5), p95: rank(0.95), p99: rank(0.99) })
    }
}

/// Returns the metrics of requests that arrived during the run; `None` if there are none with a token. `itl_ms` is the
/// summary of all decode steps.
pub(super) fn request_metrics(outputs: &TokenTimes, itl_ms: Option<Percentiles>) -> Option<RequestMetrics> {
    let firsts = &outputs.first_tokens;
    let start = firsts.iter().map(|first| first.arrival_ns).min()?;
    let ends = firsts.iter().map(|first| first.end_ns);
    let end = ends.chain(outputs.decode_steps.iter().map(|step| step.end_ns)).max()?;
    let tokens = (outputs.decoded_tokens() + firsts.len()) as f64;
    let of_firsts = |ns: fn(&FirstToken) -> u64| Percentiles::of(firsts.iter().map(|it| (millis(ns(it)), 1)));
    Some(RequestMetrics {
        count: firsts.len() as u64,
        output_tokens_per_s: tokens / (millis(end.saturating_sub(start)) / 1e3).max(1e-9),
        ttft_ms: of_firsts(|first| first.since_request(0))?,
        itl_ms,
        queue_ms: of_firsts(|first| first.queue_ns)?,
    })
}

/// Summarises the milliseconds per token of decode steps. The time of a step is divided equally among its tokens.
pub(super) fn token_times_summary(steps: &[DecodeStep]) -> Option<Percentiles> {
    Percentiles::of(steps.iter().map(|step| (step.ms_per_token(), u64::from(step.tokens()))))
}

/// Returns the metrics of each sequence; empty if the run has only one sequence.
pub(super) fn sequence_metrics(outputs: &TokenTimes, begin: Option<u64>) -> Vec<SequenceMetrics> {
    let Some(begin) = begin.filter(|_| outputs.first_tokens.len() > 1) else { return Vec::new() };
    // The time and the number of the tokens after the first one.
    let mut decoded = BTreeMap::<u32, (f64, u64)>::new();
    for step in &outputs.decode_steps {
        let (time, tokens) = decoded.entry(step.sequence).or_default();
        *time += millis(step.duration_ns());
        *tokens += u64::from(step.tokens());
    }
    let one = |first: &FirstToken| {
        let (time, tokens) = decoded.get(&first.sequence).copied().unwrap_or_default();
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
