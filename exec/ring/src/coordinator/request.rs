//! The request of a generation: its sequences, how their prompts enter, and how many tokens are drafted at a time.
//!
//! Whether the ring's plan can run it is checked here, before anything is computed.
//!
//! Not here: the passes that it makes ([`hearth_core::schedule::Generation`]).

use hearth_core::schedule::Generation;
use hearth_schema::pass::MAX_PASS_TOKENS;
use hearth_schema::plan::Plan;

use crate::error::RingError;
use crate::execution::SampleFn;

/// One sequence of a request.
pub struct SequenceRequest {
    /// The prompt's tokens, at least one.
    pub prompt: Vec<u32>,
    /// Turns its logits into tokens.
    pub sampler: SampleFn,
}

/// What to generate.
pub struct GenerationRequest {
    /// The sequences; at least one.
    pub sequences: Vec<SequenceRequest>,
    /// The most new tokens of each sequence.
    pub max_new_tokens: u32,
    /// The most tokens of a prompt that enter the ring as one batch.
    pub micro_batch: u32,
    /// Tokens that the draft model proposes at a time; 0 drafts nothing.
    pub draft_tokens: u32,
    /// The tokens that end a sequence, if any.
    pub stop_tokens: Vec<u32>,
    /// Name and seed for the trace.
    pub scenario: String,
    /// The run's seed.
    pub seed: u64,
}

impl GenerationRequest {
    /// A request of one sequence, in the largest batches and without drafts.
    pub fn single(prompt: Vec<u32>, max_new_tokens: u32, sampler: SampleFn) -> Self {
        Self {
            sequences: vec![SequenceRequest { prompt, sampler }],
            max_new_tokens,
            micro_batch: MAX_PASS_TOKENS,
            draft_tokens: 0,
            stop_tokens: Vec::new(),
            scenario: String::new(),
            seed: 0,
        }
    }

    /// Its passes, if a ring of this plan can do it.
    pub fn generation(&self, plan: &Plan) -> Result<Generation, RingError> {
        let (count, planned) = (self.sequences.len(), plan.sequences);
        let refuse = |what: String, hint: &str| Err(RingError::plan_with_hint(what, hint));
        if count == 0 || count > planned as usize {
            let what = format!("{count} sequences at once, and the plan has caches for 1 to {planned}");
            return refuse(what, "plan with more `sequences`");
        }
        let new_tokens = self.max_new_tokens;
        for sequence in &self.sequences {
            let tokens = sequence.prompt.len();
            let fits = tokens as u64 + u64::from(new_tokens) <= u64::from(plan.context);
            if tokens == 0 || new_tokens == 0 || !fits {
                let each = if planned > 1 { " for each sequence" } else { "" };
                let what = format!(
                    "{tokens} prompt tokens and {new_tokens} new ones do not fit the plan's context of {} positions{each}",
                    plan.context
                );
                return refuse(what, "shorten them or plan with a larger `context`");
            }
        }
        if !(1..=MAX_PASS_TOKENS).contains(&self.micro_batch) {
            let what = format!("batches of {} tokens", self.micro_batch);
            return refuse(
                what,
                &format!("give 1 to {MAX_PASS_TOKENS} tokens, which enter the ring at once"),
            );
        }
        if self.draft_tokens > 0 && plan.draft.is_none() {
            return refuse("tokens cannot be drafted without a draft model".into(), "give --draft-model");
        }
        if self.draft_tokens >= MAX_PASS_TOKENS {
            let what = format!("{} drafts at a time", self.draft_tokens);
            return refuse(what, &format!("give at most {}", MAX_PASS_TOKENS - 1));
        }
        let prompts: Vec<u32> = self.sequences.iter().map(|sequence| sequence.prompt.len() as u32).collect();
        Ok(Generation::of_prompts(&prompts, new_tokens, self.micro_batch, self.draft_tokens))
    }
}

/// The plan for a number of concurrent sequences. One that has caches for fewer divides their positions, so that each
/// sequence has a smaller context, and the devices need no more memory than was planned.
pub fn for_sequences(plan: Plan, sequences: u32) -> Plan {
    if sequences <= plan.sequences {
        return plan;
    }
    let positions = u64::from(plan.context) * u64::from(plan.sequences);
    // Not more than the positions that a plan may have, which fit an u32.
    let context = (positions / u64::from(sequences)) as u32;
    Plan { context, sequences, ..plan }
}
