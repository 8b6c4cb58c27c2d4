//! The times at which tokens left the ring, sequence by sequence, on the head's clock.
//!
//! The first output of a sequence ends its prompt. Each later one is a [`DecodeStep`], from the end of the sequence's
//! output before it to its own. A step with drafts gives one token more than were accepted.
//!
//! Not here: the terms of a step ([`super`]).

use std::collections::BTreeMap;

use super::{ByPass, millis};
use hearth_schema::pass::{MAX_PASS_TOKENS, Pass};
use hearth_schema::trace::{Counter, Kind, Trace};

/// The interval in which a pass generated tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DecodeStep {
    /// The pass that generated the tokens.
    pub pass: u32,
    /// Its sequence.
    pub sequence: u32,
    /// The end of the previous output of the sequence, in nanoseconds.
    pub start: u64,
    /// The time at which the tokens were sampled, in nanoseconds.
    pub end: u64,
    /// The number of accepted draft tokens.
    pub accepted: u32,
    /// The number of draft tokens.
    pub drafted: u32,
    /// Whether the sequence had other passes since its previous output: abandoned ones, or ones that recomputed tokens
    /// after a failure.
    pub interrupted: bool,
}

impl DecodeStep {
    /// The number of generated tokens.
    pub fn tokens(&self) -> u32 {
        self.accepted + 1
    }

    /// Its duration, in nanoseconds.
    pub fn duration(&self) -> u64 {
        self.end.saturating_sub(self.start)
    }

    /// Milliseconds for each token.
    pub fn ms_per_token(&self) -> f64 {
        millis(self.duration()) / f64::from(self.tokens())
    }
}

/// The first output of a sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FirstToken {
    /// Which sequence.
    pub sequence: u32,
    /// The pass that gave it.
    pub pass: u32,
    /// The time at which it was sampled, in nanoseconds.
    pub end: u64,
}

/// All times of a run.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TokenTimes {
    /// One for each sequence that has a token, in the order of their passes.
    pub first_tokens: Vec<FirstToken>,
    /// The decode steps, in the order of their passes.
    pub decode_steps: Vec<DecodeStep>,
}

impl TokenTimes {
    /// Extracts the token times of a trace.
    pub fn of(trace: &Trace) -> Self {
        Self::grouped(trace, &super::group(&trace.records))
    }

    pub(super) fn grouped(trace: &Trace, by_pass: &ByPass<'_>) -> Self {
        let accepted: BTreeMap<u32, u64> = trace
            .readings
            .iter()
            .filter(|reading| reading.counter == Counter::Accepted)
            .map(|reading| (reading.pass, reading.value))
            .collect();
        let mut times = Self::default();
        // For each sequence, the end of its last output, and whether a pass without one came after that.
        let mut last: BTreeMap<u32, (u64, bool)> = BTreeMap::new();
        for pass in &trace.passes {
            let records = by_pass.get(&(pass.index, 0)).map_or(&[][..], Vec::as_slice);
            let output = records.iter().find(|record| pass.output && record.kind == Kind::Output);
            let Some(output) = output else {
                last.entry(pass.sequence).and_modify(|(_, interrupted)| *interrupted = true);
                continue;
            };
            let (sequence, end) = (pass.sequence, output.end);
            match last.insert(sequence, (end, false)) {
                None => times.first_tokens.push(FirstToken { sequence, pass: pass.index, end }),
                Some((start, interrupted)) => {
                    // A trace may have any number here; a pass has at most its own drafts.
                    let drafted = pass.drafted.min(MAX_PASS_TOKENS);
                    let stood = accepted.get(&pass.index).copied().unwrap_or(0).min(u64::from(drafted));
                    let accepted = stood as u32;
                    let pass = pass.index;
                    times.decode_steps.push(DecodeStep {
                        pass,
                        sequence,
                        start,
                        end,
                        accepted,
                        drafted,
                        interrupted,
                    });
                }
            }
        }
        times
    }

    /// Tokens of all prompts that were read to their ends.
    pub fn prompts(&self, trace: &Trace) -> u64 {
        let last = |first: &FirstToken| trace.passes.iter().find(|pass| pass.index == first.pass);
        let tokens = |pass: &Pass| u64::from(pass.first_position) + u64::from(pass.tokens);
        self.first_tokens.iter().filter_map(last).map(tokens).sum()
    }

    /// Tokens after the first of each sequence.
    pub fn tokens(&self) -> usize {
        self.decode_steps.iter().map(|step| step.tokens() as usize).sum()
    }
}
