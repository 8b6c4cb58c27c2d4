//! A generation request: its sequences, the batch size of prompts, and the number of tokens drafted at a time.
//!
//! A request is checked against the ring's plan before anything is computed.

use std::time::Duration;

use hearth_core::schedule::Generation;
use hearth_core::schedule::request_slots::can_change_caches;
use hearth_profiles::model::ModelShape;
use hearth_schema::pass::MAX_PASS_TOKENS;
use hearth_schema::plan::Plan;
use hearth_schema::request_trace::MAX_SPAN;

use crate::error::{Result, RingError};
use crate::execution::SampleFn;

/// The prompt and the sampler of one sequence of a generation request.
pub struct SequenceRequest {
    /// The tokens of the prompt; at least one token.
    pub prompt: Vec<u32>,
    pub sampler: SampleFn,
}

/// When a sequence is requested, and how many tokens it wants.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SequenceArrival {
    /// The time from the start of the run.
    pub after: Duration,
    pub max_new_tokens: u32,
}

/// A request to generate tokens for one or more sequences.
pub struct GenerationRequest {
    /// The sequences; at least one sequence.
    pub sequences: Vec<SequenceRequest>,
    /// The arrival of each sequence, in their order; empty if all start at once. Arriving sequences wait for a slot: there
    /// are as many as the plan has sequences.
    pub arrivals: Vec<SequenceArrival>,
    /// Maximum number of new tokens of each sequence that does not arrive later.
    pub max_new_tokens: u32,
    /// Maximum number of prompt tokens in one pass.
    pub micro_batch: u32,
    /// Number of tokens that the draft model proposes at a time; 0 disables drafting.
    pub draft_tokens: u32,
    /// Tokens that end a sequence.
    pub stop_tokens: Vec<u32>,
    /// The name of the scenario, for the trace.
    pub scenario: String,
    /// The seed of the run, for the trace.
    pub seed: u64,
}

impl GenerationRequest {
    /// Creates a request for one sequence, with the largest prompt batches and without speculative decoding.
    pub fn single_sequence(prompt: Vec<u32>, max_new_tokens: u32, sampler: SampleFn) -> Self {
        Self {
            sequences: vec![SequenceRequest { prompt, sampler }],
            arrivals: Vec::new(),
            max_new_tokens,
            micro_batch: MAX_PASS_TOKENS,
            draft_tokens: 0,
            stop_tokens: Vec::new(),
            scenario: String::new(),
            seed: 0,
        }
    }

    /// Returns the state machine that starts the passes of the request, if all sequences start at once.
    pub(super) fn to_generation(&self) -> Generation {
        let prompts: Vec<u32> = self.sequences.iter().map(|sequence| sequence.prompt.len() as u32).collect();
        Generation::from_prompt_lengths(&prompts, self.max_new_tokens, self.micro_batch, self.draft_tokens)
    }

    /// Returns the maximum number of new tokens of a sequence.
    fn max_new_tokens_of(&self, sequence: usize) -> u32 {
        self.arrivals.get(sequence).map_or(self.max_new_tokens, |arrival| arrival.max_new_tokens)
    }

    /// Fails if a plan cannot run the request.
    pub fn check(&self, plan: &Plan) -> Result<()> {
        let (count, planned) = (self.sequences.len(), plan.sequences);
        let starts_at_once = self.arrivals.is_empty();
        let refuse = |what: String, hint: &str| Err(RingError::invalid_plan_with_hint(what, hint));
        if !starts_at_once && self.arrivals.len() != count {
            let what = format!("{count} sequences have {} arrivals", self.arrivals.len());
            return refuse(what, "give the arrival of each sequence, or none");
        }
        if self.arrivals.iter().any(|arrival| arrival.after > MAX_SPAN) {
            return refuse("a sequence arrives more than a year later".into(), "let it arrive earlier");
        }
        if count == 0 || (starts_at_once && count > planned as usize) {
            let what = format!(
                "the request has {count} concurrent sequences, but the plan has caches for {planned}"
            );
            return refuse(what, "plan with more `sequences`");
        }
        let context = plan.context_length;
        let mut all = 0;
        for (number, sequence) in self.sequences.iter().enumerate() {
            let (tokens, new_tokens) = (sequence.prompt.len(), self.max_new_tokens_of(number));
            all += tokens as u64 + u64::from(new_tokens);
            let fits = tokens as u64 + u64::from(new_tokens) <= u64::from(context);
            if tokens == 0 || new_tokens == 0 || !fits {
                let each = if planned > 1 { " for each sequence" } else { "" };
                let what = format!(
                    "{tokens} prompt tokens and {new_tokens} new tokens do not fit in the plan's context of \
                     {context} positions{each}"
                );
                return refuse(what, "shorten the prompt, generate less, or plan with a larger `context`");
            }
        }
        if starts_at_once && all > plan.total_cache_tokens() {
            let room = plan.total_cache_tokens();
            let what = format!("{count} sequences of {all} tokens do not fit in caches for {room} tokens");
            return refuse(what, "shorten the prompts, generate less, or plan with more `sequences`");
        }
        if !(1..=MAX_PASS_TOKENS).contains(&self.micro_batch) {
            let what = format!("a prompt cannot be split into batches of {} tokens", self.micro_batch);
            return refuse(what, &format!("give 1 to {MAX_PASS_TOKENS} tokens per batch"));
        }
        if self.draft_tokens > 0 && plan.draft_model.is_none() {
            return refuse("tokens cannot be drafted without a draft model".into(), "add `--draft-model`");
        }
        if self.draft_tokens >= MAX_PASS_TOKENS {
            let what = format!("{} tokens cannot be drafted at a time", self.draft_tokens);
            return refuse(what, &format!("draft at most {} tokens at a time", MAX_PASS_TOKENS - 1));
        }
        Ok(())
    }
}

/// Returns a plan for at least `sequences` concurrent sequences of a model with the shape `shape`, for which the devices
/// need no more memory than planned. If `plan` has fewer caches, the sequences share the memory of these: each can use
/// the whole context. Where caches cannot share memory ([`can_change_caches`]), each sequence has a smaller context.
pub fn plan_for_sequences(plan: Plan, sequences: u32, shape: &ModelShape) -> Plan {
    if sequences <= plan.sequences {
        return plan;
    }
    let positions = plan.total_cache_tokens();
    if can_share_caches(&plan, shape) {
        return Plan { cache_tokens: Some(positions), sequences, ..plan };
    }
    // Less than the context of `plan`, so it fits a u32.
    Plan { context_length: (positions / u64::from(sequences)) as u32, sequences, ..plan }
}

/// Returns whether devices can give the memory of a sequence's cache to other sequences, and copy a cache.
pub(super) fn can_share_caches(plan: &Plan, shape: &ModelShape) -> bool {
    // Only these systems give back a part of an array.
    cfg!(any(target_os = "android", target_os = "linux")) && can_change_caches(plan, shape)
}
