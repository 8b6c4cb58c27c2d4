//! Generation: decides which passes enter the ring next.
//!
//! The generation is a pure reducer with two events: the head is free ([`Generation::begin_batch`]), and the output of a
//! pass is complete ([`Generation::complete_pass`]).
//!
//! Before any token is generated, chunks of prompts enter as soon as the head is free, so devices work in parallel: `m`
//! chunks over `d` equal devices take `m + d - 1` steps instead of `m d`. After its prompt every sequence has at most
//! one pass in flight. Passes of several sequences form a batch ([`super::batching`]), in the order in which the last
//! tokens of the sequences were sampled.
//!
//! With a draft model a pass contains the last token and the drafted tokens after it. The target model accepts the
//! drafts before the first draft that it would not have sampled, and adds one token of its own. With acceptance rate
//! `a` and `n` drafts, a pass generates `(1 - a^(n+1)) / (1 - a)` tokens on average (Leviathan et al., 2023, Eq. 1).
//!
//! In a server each sequence is a slot, whose KV cache is kept between requests.
//!
//! Not here: which drafts are accepted, which the executor computes and the simulator draws at random, and the steps
//! of a pass on a device ([`super::Schedule`]).

use std::collections::VecDeque;

use hearth_schema::pass::{Batch, MAX_PASS_TOKENS, Pass};
use hearth_schema::workload::Workload;

use super::batching::BatchLimits;

/// The progress of the sequences of a workload.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Generation {
    micro_batch: u32,
    drafts: u32,
    sequences: Vec<Sequence>,
    /// Indices of the sequences whose prompts have not entered the ring completely, in the order of arrival.
    entering: VecDeque<u32>,
    /// Indices of the unfinished sequences whose last token is complete, in the order in which the tokens were sampled.
    ready: VecDeque<u32>,
    finished: u32,
    /// The index of the first pass of each batch that entered after the last batch with a complete output.
    in_flight: VecDeque<u32>,
    /// The number of passes that have begun, which is the index of the next pass.
    begun: u32,
    /// Whether the cache of a sequence can be truncated to fewer tokens. A recurrent state can only be cleared.
    can_truncate: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Sequence {
    /// The number of tokens in the prompt of the request.
    requested: u32,
    /// The number of tokens to generate.
    wanted: u32,
    /// The number of tokens to process as a prompt. After a restart it includes the tokens generated before.
    prompt: u32,
    /// Whether any token of the request has entered the ring.
    begun: bool,
    /// The position at which the next pass begins: the number of tokens whose keys and values are cached.
    position: u32,
    generated: u32,
    /// The pass in flight whose output the sequence waits for.
    awaited: Option<Pass>,
}

impl Sequence {
    fn new(prompt: u32, wanted: u32, position: u32) -> Self {
        Self { requested: prompt, wanted, prompt, begun: false, position, generated: 0, awaited: None }
    }

    fn is_over(&self) -> bool {
        self.generated >= self.wanted
    }
}

/// Why a generation rejects an output or a request.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum GenerationError {
    #[error("pass {pass} has an output that no sequence waits for")]
    NotAwaited { pass: u32 },
    #[error("pass {pass} has {drafted} drafted tokens, but {accepted} were accepted")]
    TooManyAccepted { pass: u32, drafted: u32, accepted: u32 },
    #[error("a request cannot enter slot {sequence}: the slot is in use or does not exist")]
    NotVacant { sequence: u32 },
}

impl Generation {
    /// Creates the generation of a valid workload, before its first pass.
    pub fn new(workload: &Workload) -> Self {
        let prompts = vec![workload.prompt_tokens; workload.sequences as usize];
        let (wanted, drafts) = (workload.generated_tokens, workload.drafted_tokens());
        Self::from_prompt_lengths(&prompts, wanted, workload.micro_batch, drafts)
    }

    /// Creates a generation with one sequence for each prompt length (at least 1), which generates `wanted` tokens.
    pub fn from_prompt_lengths(prompts: &[u32], wanted: u32, micro_batch: u32, drafts: u32) -> Self {
        Self {
            micro_batch: micro_batch.max(1),
            drafts,
            sequences: prompts.iter().map(|&prompt| Sequence::new(prompt, wanted, 0)).collect(),
            entering: (0..prompts.len() as u32).collect(),
            ready: VecDeque::new(),
            finished: 0,
            in_flight: VecDeque::new(),
            begun: 0,
            can_truncate: true,
        }
    }

    /// Creates the generation of a server with `sequences` vacant slots. `can_truncate` says whether a cache can be
    /// truncated to the tokens that a request has in common with the request before it in the same slot.
    pub fn with_vacant_slots(sequences: u32, micro_batch: u32, drafts: u32, can_truncate: bool) -> Self {
        let slots = vec![Sequence::new(0, 0, 0); sequences as usize];
        let empty = Self::from_prompt_lengths(&[], 0, micro_batch, drafts);
        Self { sequences: slots, finished: sequences, can_truncate, ..empty }
    }

    /// Admits a request with `prompt` tokens (at least 1) to a vacant slot, to generate `wanted` tokens (at least 1).
    /// The slot's cache has the keys and values of the first `cached` tokens of the prompt, which are not computed
    /// again, except the last token of the prompt. If the cache cannot be truncated, a prompt that does not continue
    /// all of it is computed from the beginning. Returns the number of prompt tokens that are not computed.
    pub fn admit_request(
        &mut self,
        sequence: u32,
        prompt: u32,
        cached: u32,
        wanted: u32,
    ) -> Result<u32, GenerationError> {
        if !self.is_vacant(sequence) {
            return Err(GenerationError::NotVacant { sequence });
        }
        let position = self.reusable_tokens(sequence, prompt, cached);
        self.sequences[sequence as usize] = Sequence::new(prompt, wanted, position);
        self.finished -= 1;
        self.entering.push_back(sequence);
        Ok(position)
    }

    /// Returns whether a cache can be truncated to fewer tokens.
    pub fn can_truncate(&self) -> bool {
        self.can_truncate
    }

    /// Sets the number of cached tokens of a vacant slot, after its cache was released or copied from another slot.
    pub fn set_cached_tokens(&mut self, sequence: u32, tokens: u32) {
        if self.is_vacant(sequence) {
            self.sequences[sequence as usize].position = tokens;
        }
    }

    /// Returns the number of positions that a sequence needs at least: those of its prompt and of the tokens so far.
    pub fn needed_positions(&self, sequence: u32) -> u32 {
        let needed = |it: &Sequence| if it.is_over() { it.position } else { it.position.max(it.prompt) };
        self.sequences.get(sequence as usize).map_or(0, needed)
    }

    /// Returns the number of tokens of a prompt with `prompt` tokens that need not be computed in a slot whose first
    /// `common` cached tokens are a prefix of the prompt. The last token of a prompt is always computed.
    pub fn reusable_tokens(&self, sequence: u32, prompt: u32, common: u32) -> u32 {
        let cached = self.cached_tokens(sequence);
        let kept = common.min(cached).min(prompt.saturating_sub(1));
        if kept == cached || self.can_truncate { kept } else { 0 }
    }

    pub fn is_vacant(&self, sequence: u32) -> bool {
        self.sequences.get(sequence as usize).is_some_and(Sequence::is_over)
    }

    /// Returns the number of tokens of a sequence whose keys and values are cached.
    pub fn cached_tokens(&self, sequence: u32) -> u32 {
        self.sequences.get(sequence as usize).map_or(0, |sequence| sequence.position)
    }

    /// Ends a sequence before all its tokens are generated, because of a stop token or a disconnected client. If a pass
    /// with an output is in flight, the sequence ends with this pass, otherwise at once.
    pub fn cancel(&mut self, sequence: u32) {
        let Some(slot) = self.sequences.get_mut(sequence as usize).filter(|it| !it.is_over()) else { return };
        if slot.awaited.is_some() {
            slot.wanted = slot.generated + 1;
            return;
        }
        slot.wanted = slot.generated;
        self.finished += 1;
        self.entering.retain(|&entering| entering != sequence);
        self.ready.retain(|&ready| ready != sequence);
    }

    /// Begins and returns the next batch; `None` if no pass should enter the ring now. The head must be free.
    pub fn begin_batch(&mut self, limits: BatchLimits) -> Option<Batch> {
        let is_decoding = |it: &&Sequence| it.awaited.is_some_and(|pass| pass.first_position >= it.prompt);
        let decoding = self.ready.len() + self.sequences.iter().filter(is_decoding).count();
        let is_awaiting = self.sequences.iter().any(|sequence| sequence.awaited.is_some());
        if decoding > 0 && is_awaiting && self.in_flight.len() >= limits.in_flight as usize {
            return None;
        }
        let shared = self.micro_batch.min(limits.shared_prompt_tokens).max(1);
        let (mut passes, mut tokens) = (Vec::new(), 0);
        loop {
            let is_alone = passes.is_empty() && decoding == 0;
            let limit = if is_alone { self.micro_batch } else { shared };
            let Some(pass) = self.prompt_pass(limit.min(MAX_PASS_TOKENS).saturating_sub(tokens)) else {
                break;
            };
            tokens += pass.tokens;
            passes.push(pass);
            if !pass.has_output {
                // The rest of this prompt enters before the next prompt.
                break;
            }
        }
        let of_sequences = decoding.div_ceil(limits.in_flight.max(1) as usize);
        for _ in 0..of_sequences {
            let Some(pass) = self.token_pass(MAX_PASS_TOKENS - tokens) else { break };
            tokens += pass.tokens;
            passes.push(pass);
        }
        let batch = Batch::new(passes)?;
        self.in_flight.push_back(batch.index());
        Some(batch)
    }

    /// Begins and returns the next pass, alone and with prompts first; `None` if no pass can enter the ring now.
    pub fn begin_pass(&mut self) -> Option<Pass> {
        self.prompt_pass(self.micro_batch).or_else(|| self.token_pass(MAX_PASS_TOKENS))
    }

    /// Handles the output of the pass with index `pass`, of which `accepted` drafts were accepted. Returns the number
    /// of tokens that the pass generated. On an error the state is unchanged.
    pub fn complete_pass(&mut self, pass: u32, accepted: u32) -> Result<u32, GenerationError> {
        let awaits_it = |sequence: &Sequence| sequence.awaited.is_some_and(|awaited| awaited.index == pass);
        let Some(index) = self.sequences.iter().position(awaits_it) else {
            return Err(GenerationError::NotAwaited { pass });
        };
        let sequence = &mut self.sequences[index];
        let drafted = sequence.awaited.map_or(0, |awaited| awaited.drafted);
        if accepted > drafted {
            return Err(GenerationError::TooManyAccepted { pass, drafted, accepted });
        }
        // Batches keep their order in the ring.
        self.in_flight.retain(|&first| first > pass);
        sequence.awaited = None;
        // Rejected drafts are rolled back; the token of the target model replaces the first of them.
        sequence.position -= drafted - accepted;
        sequence.generated += accepted + 1;
        if sequence.is_over() {
            self.finished += 1;
        } else {
            self.ready.push_back(index as u32);
        }
        Ok(accepted + 1)
    }

    /// Restarts all sequences after a change of the ring: drops the passes in flight and empties the caches. Returns
    /// the number of tokens that must be computed again.
    pub fn restart(&mut self) -> u32 {
        self.ready.clear();
        self.entering.clear();
        self.in_flight.clear();
        let mut tokens = 0;
        for (number, sequence) in self.sequences.iter_mut().enumerate() {
            if sequence.is_over() {
                sequence.position = 0;
                continue;
            }
            self.entering.push_back(number as u32);
            let prompt = sequence.requested + sequence.generated;
            *sequence = Sequence { prompt, position: 0, awaited: None, ..*sequence };
            tokens += if sequence.begun { prompt } else { 0 };
        }
        tokens
    }

    pub fn next_pass_index(&self) -> u32 {
        self.begun
    }

    pub fn is_finished(&self) -> bool {
        self.finished as usize == self.sequences.len()
    }

    /// Begins and returns the next chunk, of at most `limit` tokens, of the first prompt that has not entered the ring
    /// completely.
    fn prompt_pass(&mut self, limit: u32) -> Option<Pass> {
        let number = *self.entering.front().filter(|_| limit > 0)?;
        let sequence = self.sequences.get_mut(number as usize)?;
        let tokens = (sequence.prompt - sequence.position).min(limit);
        let output = sequence.position + tokens == sequence.prompt;
        let pass =
            Pass { sequence_index: number, ..Pass::new(self.begun, sequence.position, tokens, output) };
        sequence.position += tokens;
        sequence.begun = true;
        sequence.awaited = Some(pass).filter(|pass| pass.has_output);
        if output {
            self.entering.pop_front();
        }
        self.begun += 1;
        Some(pass)
    }

    /// Begins and returns the pass with the last token of the next ready sequence, and its drafted tokens, if it has at
    /// most `limit` tokens.
    fn token_pass(&mut self, limit: u32) -> Option<Pass> {
        let number = *self.ready.front()?;
        let sequence = self.sequences.get_mut(number as usize)?;
        let drafted = self.drafts.min(sequence.wanted - sequence.generated - 1);
        if drafted >= limit {
            return None;
        }
        self.ready.pop_front();
        let plain = Pass::new(self.begun, sequence.position, drafted + 1, true);
        let pass = Pass { sequence_index: number, drafted, ..plain };
        sequence.position += pass.tokens;
        sequence.awaited = Some(pass);
        self.begun += 1;
        Some(pass)
    }
}

/// Returns the passes of a workload if no draft is ever accepted: the batches of the prompt, then one pass for each
/// generated token except the last.
pub fn workload_passes(workload: &Workload) -> Vec<Pass> {
    let mut generation = Generation::new(workload);
    let mut passes = Vec::new();
    while let Some(pass) = generation.begin_pass() {
        if pass.has_output {
            generation.complete_pass(pass.index, 0).expect("the pass has just begun");
        }
        passes.push(pass);
    }
    passes
}

#[cfg(test)]
mod tests;
