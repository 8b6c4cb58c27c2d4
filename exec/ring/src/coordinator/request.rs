//! What is asked of a ring?
//!
//! One sequence or several at once, how their prompts enter, and how many tokens are drafted at a time. Whether the
//! ring's plan has room for that is checked here, before anything is computed.
//!
//! Not here: in which passes it goes around the ring (`hearth_core::schedule::Generation`).

use hearth_core::schedule::Generation;
use hearth_schema::pass::MAX_PASS_TOKENS;
use hearth_schema::plan::Plan;

use crate::error::RingError;
use crate::execution::Sample;

/// One sequence that is asked for.
pub struct Asked {
    /// The prompt's tokens, at least one.
    pub prompt: Vec<u32>,
    /// Turns its logits into tokens.
    pub sample: Sample,
}

/// What to generate.
pub struct Request {
    /// What is under way at once, at least one.
    pub sequences: Vec<Asked>,
    /// At most so many new tokens of each.
    pub generate: u32,
    /// The most tokens of a prompt that enter the ring as one batch.
    pub micro_batch: u32,
    /// Tokens that the draft model proposes at a time; 0 drafts nothing.
    pub drafts: u32,
    /// After which tokens a sequence stops, if any.
    pub stop: Vec<u32>,
    /// Name and seed for the trace.
    pub scenario: String,
    /// The run's seed.
    pub seed: u64,
}

impl Request {
    /// One sequence, in the largest batches and without drafts.
    pub fn one(prompt: Vec<u32>, generate: u32, sample: Sample) -> Self {
        Self {
            sequences: vec![Asked { prompt, sample }],
            generate,
            micro_batch: MAX_PASS_TOKENS,
            drafts: 0,
            stop: Vec::new(),
            scenario: String::new(),
            seed: 0,
        }
    }

    /// Its passes, if a ring of this plan can do it.
    pub fn generation(&self, plan: &Plan) -> Result<Generation, RingError> {
        let refuse = |why: String| Err(RingError::Plan(why));
        let (count, planned) = (self.sequences.len(), plan.sequences);
        if count == 0 || count > planned as usize {
            return refuse(format!(
                "{count} sequences at once, and the plan has caches for 1 to {planned}; plan with more `sequences`"
            ));
        }
        let generate = self.generate;
        for asked in &self.sequences {
            let tokens = asked.prompt.len();
            let fits = tokens as u64 + u64::from(generate) <= u64::from(plan.context);
            if tokens == 0 || generate == 0 || !fits {
                let each = if planned > 1 { " for each sequence" } else { "" };
                return refuse(format!(
                    "{tokens} prompt tokens and {generate} new ones do not fit the plan's context of {} positions{each}: shorten \
                     them or plan with a larger `context`",
                    plan.context
                ));
            }
        }
        if !(1..=MAX_PASS_TOKENS).contains(&self.micro_batch) {
            return refuse(format!(
                "batches of {} tokens: 1 to {MAX_PASS_TOKENS} enter the ring at once",
                self.micro_batch
            ));
        }
        if self.drafts > 0 && plan.draft.is_none() {
            return refuse("tokens cannot be drafted without a draft model; give --draft-model".into());
        }
        if self.drafts >= MAX_PASS_TOKENS {
            return refuse(format!("{} drafts at a time: at most {}", self.drafts, MAX_PASS_TOKENS - 1));
        }
        let prompts: Vec<u32> = self.sequences.iter().map(|asked| asked.prompt.len() as u32).collect();
        Ok(Generation::of_prompts(&prompts, generate, self.micro_batch, self.drafts))
    }
}

/// The plan for so many sequences at once. One that has caches for fewer shares their positions out, so that each
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
