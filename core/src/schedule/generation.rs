//! Generation: decides which pass enters the ring next.
//!
//! The generation is a pure reducer with two events: the head is free ([`Generation::begin_pass`]), and the output of a
//! pass is complete ([`Generation::complete_pass`]).
//!
//! Prompts enter first, one sequence after the other, in batches. A batch enters as soon as the head is free, so
//! devices work in parallel: `m` batches over `d` equal devices take `m + d - 1` steps instead of `m d`. After its
//! prompt every sequence has at most one pass in flight. Sequences enter in the order in which their last tokens were
//! sampled.
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

use hearth_schema::pass::Pass;
use hearth_schema::workload::Workload;

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

    /// Begins and returns the next pass; `None` if no pass can enter the ring now. The head must be free.
    pub fn begin_pass(&mut self) -> Option<Pass> {
        let pass = self.prompt_pass().or_else(|| self.token_pass())?;
        self.begun += 1;
        Some(pass)
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

    /// Returns the next batch of the first prompt that has not entered the ring completely.
    fn prompt_pass(&mut self) -> Option<Pass> {
        let number = *self.entering.front()?;
        let sequence = self.sequences.get_mut(number as usize)?;
        let tokens = (sequence.prompt - sequence.position).min(self.micro_batch);
        let output = sequence.position + tokens == sequence.prompt;
        let pass =
            Pass { sequence_index: number, ..Pass::new(self.begun, sequence.position, tokens, output) };
        sequence.position += tokens;
        sequence.begun = true;
        sequence.awaited = Some(pass).filter(|pass| pass.has_output);
        if output {
            self.entering.pop_front();
        }
        Some(pass)
    }

    /// Returns the pass with the last token of the next ready sequence, and its drafted tokens.
    fn token_pass(&mut self) -> Option<Pass> {
        let number = self.ready.pop_front()?;
        let sequence = self.sequences.get_mut(number as usize)?;
        let drafted = self.drafts.min(sequence.wanted - sequence.generated - 1);
        let plain = Pass::new(self.begun, sequence.position, drafted + 1, true);
        let pass = Pass { sequence_index: number, drafted, ..plain };
        sequence.position += pass.tokens;
        sequence.awaited = Some(pass);
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
