//! Which tokens enter the ring next?
//!
//! A pure reducer that both runners use. It knows two events: the head is free ([`Generation::begin`]), and the
//! tokens of a pass are out ([`Generation::output`]).
//!
//! Prompts go first, one sequence after the other, each in batches that follow one another into the ring as soon as
//! the head is free. So devices work at once: `m` batches over `d` equal devices take `m + d - 1` steps instead of
//! `m d`. Then every sequence has one pass under way at a time, and those that have their last token out enter in the
//! order in which it came.
//!
//! With a draft model a pass holds the last token and the drafts after it. The large model accepts some of them, up to
//! the first that it would not have chosen, and gives one token of its own: its correction of that one, or the token
//! after the last draft. What follows is forgotten: the next pass begins at the last token that stands. With
//! acceptance `a` and `n` drafts, a pass gives `(1 - a^(n+1)) / (1 - a)` tokens on average (Leviathan et al., 2023,
//! Eq. 1). Drafts never run past the tokens wanted.
//!
//! When a ring gives way to another in mid-run ([`Generation::again`]), what was under way is given up, and each
//! sequence that wants more tokens enters again: all its tokens so far are its prompt.
//!
//! Not here: who accepts a draft, which the executor computes and the simulator draws, and what a pass does on a
//! device ([`super::Schedule`]).

use std::collections::VecDeque;

use super::pass::Pass;
use crate::workload::Workload;

/// How far the sequences of a workload are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Generation {
    micro_batch: u32,
    drafts: u32,
    sequences: Vec<Sequence>,
    /// All prompts before this sequence's are through the head.
    entering: usize,
    /// Whose last token is out and who want another, in the order of their tokens.
    ready: VecDeque<u32>,
    /// Sequences that have all their tokens.
    over: u32,
    /// Passes begun.
    begun: u32,
}

/// One of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Sequence {
    /// Tokens of the prompt that was asked.
    asked: u32,
    /// Tokens wanted.
    wanted: u32,
    /// Tokens that enter as its prompt.
    prompt: u32,
    /// Whether any of them ever has.
    begun: bool,
    /// Where its next pass begins.
    position: u32,
    generated: u32,
    /// The pass whose tokens must be out before it goes on.
    awaited: Option<Pass>,
}

/// What cannot have come out of the ring.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum GenerationError {
    /// No token of that pass is waited for.
    #[error("pass {pass} gave a token, and nobody waits for one of it")]
    NotAwaited {
        /// Which pass.
        pass: u32,
    },
    /// More drafts accepted than there were.
    #[error("pass {pass} had {drafted} drafted tokens, and {accepted} were accepted")]
    TooManyAccepted {
        /// Which pass.
        pass: u32,
        /// Its drafts.
        drafted: u32,
        /// What was said of them.
        accepted: u32,
    },
}

impl Generation {
    /// Nothing has entered yet. The workload must be valid.
    pub fn new(workload: &Workload) -> Self {
        let prompts = vec![workload.prompt; workload.sequences as usize];
        Self::of_prompts(&prompts, workload.generate, workload.micro_batch, workload.drafts())
    }

    /// The same for prompts of these lengths, each at least 1, of which each generates so many tokens.
    pub fn of_prompts(prompts: &[u32], wanted: u32, micro_batch: u32, drafts: u32) -> Self {
        let sequence = |&asked: &u32| Sequence {
            asked,
            wanted,
            prompt: asked,
            begun: false,
            position: 0,
            generated: 0,
            awaited: None,
        };
        Self {
            micro_batch: micro_batch.max(1),
            drafts,
            sequences: prompts.iter().map(sequence).collect(),
            entering: 0,
            ready: VecDeque::new(),
            over: 0,
            begun: 0,
        }
    }

    /// The head is free: the pass that it takes up, if one can enter now.
    pub fn begin(&mut self) -> Option<Pass> {
        let pass = self.prompt_pass().or_else(|| self.token_pass())?;
        self.begun += 1;
        Some(pass)
    }

    /// The tokens of a pass are out, so many of its drafts accepted. Returns how many tokens that are. On an error
    /// nothing has changed.
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
        // What was rejected is taken back, and the token that corrects it stands in its place.
        sequence.position -= drafted - accepted;
        sequence.generated += accepted + 1;
        if sequence.generated < sequence.wanted {
            self.ready.push_back(index as u32);
        } else {
            self.over += 1;
        }
        Ok(accepted + 1)
    }

    /// A sequence whose tokens are out and that has no pass under way wants no more: its text has come to an end.
    pub fn end(&mut self, sequence: u32) {
        let before = self.ready.len();
        self.ready.retain(|&ready| ready != sequence);
        if let Some(ended) = self.sequences.get_mut(sequence as usize).filter(|_| self.ready.len() < before) {
            ended.wanted = ended.generated;
            self.over += 1;
        }
    }

    /// The ring begins again: passes under way are given up, and keys and values are computed once more. Returns how
    /// many tokens enter again.
    pub fn again(&mut self) -> u32 {
        self.ready.clear();
        self.entering = 0;
        let mut tokens = 0;
        for sequence in self.sequences.iter_mut().filter(|sequence| sequence.generated < sequence.wanted) {
            let prompt = sequence.asked + sequence.generated;
            *sequence = Sequence { prompt, position: 0, awaited: None, ..*sequence };
            tokens += if sequence.begun { prompt } else { 0 };
        }
        tokens
    }

    /// The index of the next pass.
    pub fn next_pass(&self) -> u32 {
        self.begun
    }

    /// Whether all tokens are out.
    pub fn is_over(&self) -> bool {
        self.over as usize == self.sequences.len()
    }

    /// The next batch of the prompt that is entering, or the first of the next one.
    fn prompt_pass(&mut self) -> Option<Pass> {
        let is_in = |sequence: &Sequence| sequence.position >= sequence.prompt;
        while self.sequences.get(self.entering).is_some_and(is_in) {
            self.entering += 1;
        }
        let number = self.entering as u32;
        let sequence = self.sequences.get_mut(self.entering)?;
        let tokens = (sequence.prompt - sequence.position).min(self.micro_batch);
        let output = sequence.position + tokens == sequence.prompt;
        let plain = Pass::plain(self.begun, sequence.position, tokens, output);
        let pass = Pass { sequence: number, ..plain };
        sequence.position += tokens;
        sequence.begun = true;
        sequence.awaited = Some(pass).filter(|pass| pass.output);
        Some(pass)
    }

    /// The last token of the sequence whose turn it is, and drafts that may follow it.
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

/// The passes that a workload takes if no draft is ever accepted: the prompt in batches, then one pass for each
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
