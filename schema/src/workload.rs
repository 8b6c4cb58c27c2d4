//! Workload: the requests of a run, with their prompt lengths, batches and numbers of generated tokens.
//!
//! The requests arrive when the run begins, or one after the other ([`Arrivals`]), as at a server.
//!
//! With `speculation` a small model drafts tokens that the target model verifies in one batch (Leviathan et al., 2023;
//! prima.cpp paper, appendix A.9).
//!
//! Not here: the profile of the draft model (`hearth_core::Cluster::draft_model`), the time of each request
//! (`hearth_core::schedule::arrivals`), and the passes of a workload (`hearth_core::schedule::Generation`).

use std::path::PathBuf;

use hearth_profiles::document::DocumentError;
use hearth_profiles::{Fraction, PerSecond, Sourced};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::model::{ModelRef, Processor};
use crate::pass::MAX_PASS_TOKENS;
use crate::request_trace::MAX_SPAN;

/// Maximum number of concurrent sequences: more than a home needs, and so few that products of counts do not overflow.
/// source: assumed
pub const MAX_SEQUENCES: u32 = 1024;

/// The requests of a run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, expecting = "a workload, such as `{prompt: 32, generate: 16}`")]
pub struct Workload {
    /// The number of tokens in the prompt of each request.
    #[serde(rename = "prompt")]
    pub prompt_tokens: u32,
    /// The number of tokens to generate per request.
    #[serde(rename = "generate")]
    pub generated_tokens: u32,
    /// The number of requests, which start when the run begins. With `arrivals`, the maximum number of requests that are
    /// computed at the same time; others wait.
    #[serde(default = "default_number::<1>", skip_serializing_if = "is_default_number::<1>")]
    pub sequences: u32,
    /// When requests arrive. If absent, all start when the run begins.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub arrivals: Option<Arrivals>,
    /// Maximum number of prompt tokens in one batch.
    #[serde(
        default = "default_number::<MAX_PASS_TOKENS>",
        skip_serializing_if = "is_default_number::<MAX_PASS_TOKENS>"
    )]
    pub micro_batch: u32,
    /// Speculative decoding with a draft model.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub speculation: Option<Speculation>,
}

/// Maximum number of requests of a run. source: assumed, a day of one request a second
pub const MAX_REQUESTS: u32 = 86_400;

/// When requests arrive: at random times, or as recorded in a file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(
    deny_unknown_fields,
    expecting = "arrivals, such as `{rate: 12 /min, requests: 100}` or `{file: requests.csv}`"
)]
pub struct Arrivals {
    /// Mean number of requests per unit of time. The times between them are random and independent (a Poisson process).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rate: Option<PerSecond>,
    /// A CSV file of recorded requests with the columns `TIMESTAMP`, `ContextTokens` and `GeneratedTokens`, as in the
    /// public Azure LLM inference traces. It is relative to the folder of the scenario.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file: Option<PathBuf>,
    /// The number of requests; required with `rate`. With `file`, the first of its requests, by default all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub requests: Option<u32>,
}

/// Speculative decoding: a small model on the head drafts tokens, which the target model verifies in one batch.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(
    deny_unknown_fields,
    expecting = "a draft, such as `{draft: {profile: llama-8b}, tokens: 4, acceptance: {value: 70 %, source: \"assumed\"}}`"
)]
pub struct Speculation {
    /// The draft model, which the head stores completely. It must have the vocabulary of the target model (`model`).
    #[serde(rename = "draft")]
    pub draft_model: ModelRef,
    /// The number of tokens drafted for one pass of the target model.
    pub tokens: u32,
    /// The probability that the target model accepts a drafted token, given that it accepted all previous drafts.
    pub acceptance: Sourced<Fraction>,
    /// The processor of the draft model. If absent, the head's GPU if its memory suffices, else the head's CPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub processor: Option<Processor>,
}

/// Returns `N`. Serde attributes name this function as the default of a document key.
pub(crate) fn default_number<const N: u32>() -> u32 {
    N
}

/// Whether a number is the default `N`, which is omitted in documents.
#[allow(clippy::trivially_copy_pass_by_ref)] // serde's signature
pub(crate) fn is_default_number<const N: u32>(number: &u32) -> bool {
    *number == N
}

impl Workload {
    /// Creates a workload of one request with batches of the maximum size, without a draft model.
    pub const fn new(prompt: u32, generate: u32) -> Self {
        Self {
            prompt_tokens: prompt,
            generated_tokens: generate,
            sequences: 1,
            arrivals: None,
            micro_batch: MAX_PASS_TOKENS,
            speculation: None,
        }
    }

    /// Returns the number of tokens that are drafted for one pass; 0 without a draft model.
    pub fn drafted_tokens(&self) -> u32 {
        self.speculation.as_ref().map_or(0, |speculation| speculation.tokens)
    }

    /// Checks the values, and that each request fits in a context of `context` tokens.
    pub fn validate(&self, context: u32) -> Result<(), DocumentError> {
        let reject = |what: String| Err(DocumentError::invalid_document(what));
        if self.prompt_tokens == 0 || self.generated_tokens == 0 {
            return reject("`workload.prompt` and `workload.generate` must be at least 1".into());
        }
        let tokens = u64::from(self.prompt_tokens) + u64::from(self.generated_tokens);
        if tokens > u64::from(context) {
            return reject(format!(
                "the workload needs {tokens} tokens, but `context` is {context}: raise `context`, or lower `prompt` or \
                 `generate`"
            ));
        }
        validate_sequences("workload.sequences", self.sequences, context)?;
        let batch = self.micro_batch;
        if !(1..=MAX_PASS_TOKENS).contains(&batch) {
            return reject(format!("`workload.micro_batch` is {batch}: it must be 1 to {MAX_PASS_TOKENS}"));
        }
        self.arrivals.as_ref().map_or(Ok(()), Arrivals::validate)?;
        self.speculation.as_ref().map_or(Ok(()), Speculation::validate)
    }
}

/// Checks that there are 1 to [`MAX_SEQUENCES`] sequences, and that their contexts of `context` tokens have at most
/// `u32::MAX` tokens together. `key` is the key of `sequences` in error messages.
pub(crate) fn validate_sequences(key: &str, sequences: u32, context: u32) -> Result<(), DocumentError> {
    let positions = u64::from(sequences) * u64::from(context);
    let what = if !(1..=MAX_SEQUENCES).contains(&sequences) {
        format!("`{key}` is {sequences}: it must be 1 to {MAX_SEQUENCES}")
    } else if positions > u64::from(u32::MAX) {
        let most = u32::MAX;
        format!(
            "`{key}` ({sequences}) times `context` ({context}) is {positions} positions: at most {most} are possible; \
             lower one of them"
        )
    } else {
        return Ok(());
    };
    Err(DocumentError::invalid_document(what))
}

impl Arrivals {
    fn validate(&self) -> Result<(), DocumentError> {
        let reject = |what: String| Err(DocumentError::invalid_document(what));
        match (self.rate, &self.file) {
            (Some(_), Some(_)) => reject("`workload.arrivals` has both `rate` and `file`: omit one".into()),
            (None, None) => reject("`workload.arrivals` needs `rate` or `file`".into()),
            (Some(rate), None) if rate.0 <= 0.0 => {
                reject("`workload.arrivals.rate` is 0: give a rate such as `12 /min`".into())
            }
            (Some(_), None) if self.requests.is_none() => {
                reject("`workload.arrivals.rate` needs the number of `requests`".into())
            }
            (Some(rate), None) if f64::from(self.requests.unwrap_or(0)) / rate.0 > MAX_SPAN.as_secs_f64() => {
                reject("the requests of `workload.arrivals` take more than a year: raise `rate`".into())
            }
            _ if self.requests.is_some_and(|requests| !(1..=MAX_REQUESTS).contains(&requests)) => {
                reject(format!("`workload.arrivals.requests` must be 1 to {MAX_REQUESTS}"))
            }
            _ => Ok(()),
        }
    }
}

impl Speculation {
    fn validate(&self) -> Result<(), DocumentError> {
        let reject = |what: String| Err(DocumentError::invalid_document(what));
        if !(1..MAX_PASS_TOKENS).contains(&self.tokens) {
            return reject(format!(
                "`workload.speculation.tokens` is {}: it must be 1 to {}; omit `speculation` to disable drafting",
                self.tokens,
                MAX_PASS_TOKENS - 1
            ));
        }
        let acceptance = self.acceptance.value.0;
        if !(0.0..=1.0).contains(&acceptance) {
            let what = format!("`workload.speculation.acceptance` is {acceptance}: it must be 0 % to 100 %");
            return reject(what);
        }
        self.draft_model.validate("workload.speculation.draft")
    }
}
