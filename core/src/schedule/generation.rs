//! Generation: decides which tokens enter the ring next.
//!
//! A pure reducer that both runners use. It has two events: the head is free ([`Generation::begin`]), and the tokens
//! of a pass are complete ([`Generation::output`]).
//!
//! Prompts go first, one sequence after the other, in batches that enter one after another as soon as the head is
//! free. So devices work at once: `m` batches over `d` equal devices take `m + d - 1` steps instead of `m d`. After
//! its prompt every sequence has one pass in flight at a time, and sequences enter in the order in which their last
//! tokens came out.
//!
//! With a draft model a pass holds the last token and the drafts after it. The large model accepts drafts up to the
//! first that it would not have chosen, and adds one token of its own: its correction of that draft, or the token
//! after the last one. Rejected drafts are rolled back: the next pass begins behind the last accepted token. With
//! acceptance `a` and `n` drafts, a pass gives `(1 - a^(n+1)) / (1 - a)` tokens on average (Leviathan et al., 2023,
//! Eq. 1). Drafts never exceed the tokens wanted.
//!
//! In a server each sequence is a slot whose caches outlive a request ([`Generation::vacant`],
//! [`Generation::enter`]). A request that begins with the same tokens as the slot's last one enters behind their
//! common prefix, and a request that nobody waits for is cancelled ([`Generation::give_up`]).
//!
//! When the ring is replaced in the middle of a run ([`Generation::restart`]), unfinished passes are dropped, and each
//! sequence that wants more tokens enters again with all its tokens so far as its prompt.
//!
//! Not here: which drafts are accepted, which the executor computes and the simulator draws, and the steps of a pass
//! on a device ([`super::Schedule`]).

use std::collections::VecDeque;

use hearth_schema::pass::Pass;
use hearth_schema::workload::Workload;

/// The progress of the sequences of a workload.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Generation {
    micro_batch: u32,
    drafts: u32,
    sequences: Vec<Sequence>,
    /// Sequences whose prompts have not entered yet, in the order in which they will.
    entering: VecDeque<u32>,
    /// Sequences that want another token and whose last one is complete, in the order of their tokens.
    ready: VecDeque<u32>,
    /// Sequences that have all their tokens.
    finished: u32,
    /// Passes begun.
    begun: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Sequence {
    /// Tokens of the request's prompt.
    requested: u32,
    /// Tokens to generate.
    wanted: u32,
    /// Tokens to process as a prompt; after a change of the ring this includes the tokens generated so far.
    prompt: u32,
    /// Whether any token has entered.
    begun: bool,
    /// The position at which its next pass begins.
    position: u32,
    generated: u32,
    /// The pass whose output the sequence waits for.
    awaited: Option<Pass>,
}

impl Sequence {
    fn is_over(&self) -> bool {
        self.generated >= self.wanted
    }
}

/// Why a generation rejects an output or a request.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum GenerationError {
    /// No sequence waits for this pass.
    #[error("pass {pass} gave a token that no sequence waits for")]
    NotAwaited { pass: u32 },
    /// More drafts accepted than there were.
    #[error("pass {pass} had {drafted} drafted tokens, and {accepted} were accepted")]
    TooManyAccepted { pass: u32, drafted: u32, accepted: u32 },
    /// The slot of a request is in use, or does not exist.
    #[error("no request can enter as sequence {sequence}: the slot is in use or does not exist")]
    NotVacant { sequence: u32 },
}

impl Generation {
    /// A generation before its first pass. The workload must be valid.
    pub fn new(workload: &Workload) -> Self {
        let prompts = vec![workload.prompt; workload.sequences as usize];
        Self::of_prompts(&prompts, workload.generate, workload.micro_batch, workload.drafts())
    }

    /// A generation for prompts of these lengths, each at least 1, that generate `wanted` tokens each.
    pub fn of_prompts(prompts: &[u32], wanted: u32, micro_batch: u32, drafts: u32) -> Self {
        let sequence = |&requested: &u32| Sequence {
            requested,
            wanted,
            prompt: requested,
            begun: false,
            position: 0,
            generated: 0,
            awaited: None,
        };
        Self {
            micro_batch: micro_batch.max(1),
            drafts,
            sequences: prompts.iter().map(sequence).collect(),
            entering: (0..prompts.len() as u32).collect(),
            ready: VecDeque::new(),
            finished: 0,
            begun: 0,
        }
    }

    /// A server's generation: slots for `sequences`, all of them vacant.
    pub fn vacant(sequences: u32, micro_batch: u32, drafts: u32) -> Self {
        let vacant = Sequence {
            requested: 0,
            wanted: 0,
            prompt: 0,
            begun: false,
            position: 0,
            generated: 0,
            awaited: None,
        };
        let sequences = vec![vacant; sequences as usize];
        let finished = sequences.len() as u32;
        Self { sequences, finished, ..Self::of_prompts(&[], 0, micro_batch, drafts) }
    }

    /// Enters a request of `prompt` tokens, at least 1, into a vacant slot, to generate `wanted` tokens, at least 1.
    /// The keys and values of its first `held` tokens are still cached from the slot's last request, so these tokens
    /// are not computed; the last token of the prompt always is. Returns the number of tokens that are not computed.
    pub fn enter(
        &mut self,
        sequence: u32,
        prompt: u32,
        held: u32,
        wanted: u32,
    ) -> Result<u32, GenerationError> {
        let vacant = self.sequences.get_mut(sequence as usize).filter(|it| it.is_over());
        let Some(slot) = vacant else { return Err(GenerationError::NotVacant { sequence }) };
        let position = held.min(slot.position).min(prompt.saturating_sub(1));
        *slot = Sequence {
            requested: prompt,
            wanted,
            prompt,
            begun: false,
            position,
            generated: 0,
            awaited: None,
        };
        self.finished -= 1;
        self.entering.push_back(sequence);
        Ok(position)
    }

    /// Whether a request can enter this slot.
    pub fn is_vacant(&self, sequence: u32) -> bool {
        self.sequences.get(sequence as usize).is_some_and(Sequence::is_over)
    }

    /// The number of tokens of a sequence whose keys and values are cached.
    pub fn held(&self, sequence: u32) -> u32 {
        self.sequences.get(sequence as usize).map_or(0, |sequence| sequence.position)
    }

    /// Cancels a sequence, because its text has ended or its client has disconnected. If one of its tokens is in
    /// flight, the sequence ends with that token, otherwise at once.
    pub fn give_up(&mut self, sequence: u32) {
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

    /// Returns the pass that the head, which is free, begins now, if one can enter.
    pub fn begin(&mut self) -> Option<Pass> {
        let pass = self.prompt_pass().or_else(|| self.token_pass())?;
        self.begun += 1;
        Some(pass)
    }

    /// Takes the output of a pass with the number of its drafts that were accepted. Returns the number of tokens. On an
    /// error nothing has changed.
    pub fn output(&mut self, pass: u32, accepted: u32) -> Result<u32, GenerationError> {
        let waits = |sequence: &Sequence| sequence.awaited.is_some_and(|awaited| awaited.index == pass);
        let Some(index) = self.sequences.iter().position(waits) else {
            return Err(GenerationError::NotAwaited { pass });
        };
        let sequence = &mut self.sequences[index];
        let drafted = sequence.awaited.map_or(0, |awaited| awaited.drafted);
        if accepted > drafted {
            return Err(GenerationError::TooManyAccepted { pass, drafted, accepted });
        }
        sequence.awaited = None;
        // Rejected drafts are rolled back; the token that corrects the first takes its place.
        sequence.position -= drafted - accepted;
        sequence.generated += accepted + 1;
        if sequence.is_over() {
            self.finished += 1;
        } else {
            self.ready.push_back(index as u32);
        }
        Ok(accepted + 1)
    }

    /// Restarts after a change of the ring: drops passes in flight, and recomputes keys and values. Returns the number
    /// of tokens that are computed again.
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

    /// The index of the next pass.
    pub fn next_pass(&self) -> u32 {
        self.begun
    }

    /// Whether all tokens are complete.
    pub fn is_over(&self) -> bool {
        self.finished as usize == self.sequences.len()
    }

    /// The next batch of the prompt that is entering, or the first of the next one.
    fn prompt_pass(&mut self) -> Option<Pass> {
        let number = *self.entering.front()?;
        let sequence = self.sequences.get_mut(number as usize)?;
        let tokens = (sequence.prompt - sequence.position).min(self.micro_batch);
        let output = sequence.position + tokens == sequence.prompt;
        let plain = Pass::plain(self.begun, sequence.position, tokens, output);
        let pass = Pass { sequence: number, ..plain };
        sequence.position += tokens;
        sequence.begun = true;
        sequence.awaited = Some(pass).filter(|pass| pass.output);
        if output {
            self.entering.pop_front();
        }
        Some(pass)
    }

    /// The last token of the next ready sequence, with its drafts.
    fn token_pass(&mut self) -> Option<Pass> {
        let number = self.ready.pop_front()?;
        let sequence = self.sequences.get_mut(number as usize)?;
        let wanted = sequence.wanted - sequence.generated;
        let drafted = self.drafts.min(wanted - 1);
        let pass = Pass {
            sequence: number,
            drafted,
            ..Pass::plain(self.begun, sequence.position, drafted + 1, true)
        };
        sequence.position += pass.tokens;
        sequence.awaited = Some(pass);
        Some(pass)
    }
}

/// The passes of a workload if no draft is ever accepted: the prompt in batches, then one pass for each
/// generated token but the last, which nothing follows.
///
/// # Panics
///
/// Never: a pass that has just begun is waited for.
pub fn passes(workload: &Workload) -> Vec<Pass> {
    let mut generation = Generation::new(workload);
    let mut passes = Vec::new();
    while let Some(pass) = generation.begin() {
        if pass.output {
            generation.output(pass.index, 0).expect("the pass has just begun");
        }
        passes.push(pass);
    }
    passes
}

#[cfg(test)]
mod tests;
