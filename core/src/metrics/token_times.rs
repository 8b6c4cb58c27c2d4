//! The times at which the tokens of each sequence were sampled, on the head's clock.
//!
//! The first output of a sequence ends the processing of its prompt. Each later output is a [`DecodeStep`], which lasts
//! from the end of the previous output of the sequence to the end of this output. A step generates one token more than
//! the number of accepted drafts.
//!
//! If requests enter slots during the run, a sequence of this module is a request, and not a slot.

use std::collections::BTreeMap;

use super::{ByPass, millis, records_of};
use hearth_schema::pass::{MAX_PASS_TOKENS, Pass};
use hearth_schema::trace::{Admission, Counter, StepKind, Trace};

/// The interval between two consecutive outputs of a sequence, in which one pass generated one or more tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DecodeStep {
    /// The index of the batch of the pass, which the records of the pass have.
    pub batch: u32,
    pub sequence: u32,
    /// The end of the previous output of the sequence, in nanoseconds from the start of the run.
    pub start_ns: u64,
    /// The time at which the tokens were sampled, in nanoseconds from the start of the run.
    pub end_ns: u64,
    pub accepted_drafts: u32,
    pub drafted: u32,
    /// Whether the sequence had other passes between its previous output and this step: passes that were dropped, or
    /// that recomputed tokens after a failure.
    pub was_interrupted: bool,
}

impl DecodeStep {
    pub fn tokens(&self) -> u32 {
        self.accepted_drafts + 1
    }

    pub fn duration_ns(&self) -> u64 {
        self.end_ns.saturating_sub(self.start_ns)
    }

    pub fn ms_per_token(&self) -> f64 {
        millis(self.duration_ns()) / f64::from(self.tokens())
    }
}

/// The first output token of a sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FirstToken {
    pub sequence: u32,
    /// The number of tokens of the prompt.
    pub prompt_tokens: u64,
    /// The index of the batch with the last token of the prompt.
    pub batch: u32,
    /// The time at which the sequence was requested; 0 is the start of the run.
    pub arrival_ns: u64,
    /// The time that a request waited until it first entered a slot.
    pub queue_ns: u64,
    /// The time at which the token was sampled, in nanoseconds from the start of the run.
    pub end_ns: u64,
}

impl FirstToken {
    /// Returns the nanoseconds from the request of the sequence, or from `begin` if that is later, to the token.
    pub fn since_request(&self, begin: u64) -> u64 {
        self.end_ns.saturating_sub(self.arrival_ns.max(begin))
    }
}

/// The requests of each slot, in the order of their first passes, and the time that each request waited for its first
/// slot.
struct Requests {
    slots: BTreeMap<u32, Vec<Admission>>,
    queue_ns: BTreeMap<u32, u64>,
}

impl Requests {
    fn new(admissions: &[Admission]) -> Self {
        let mut slots = BTreeMap::<u32, Vec<Admission>>::new();
        let mut queue_ns = BTreeMap::new();
        for admission in admissions {
            slots.entry(admission.sequence).or_default().push(*admission);
            let waited = admission.admitted_ns.saturating_sub(admission.arrival_ns);
            let first = queue_ns.entry(admission.request).or_insert(waited);
            *first = waited.min(*first);
        }
        for slot in slots.values_mut() {
            slot.sort_by_key(|admission| admission.first_pass);
        }
        Self { slots, queue_ns }
    }

    /// Returns the request to which a pass belongs; `None` if all sequences start with the run.
    fn of(&self, pass: &Pass) -> Option<&Admission> {
        let slot = self.slots.get(&pass.sequence_index)?;
        let count = slot.partition_point(|admission| admission.first_pass <= pass.index);
        slot.get(count.checked_sub(1)?)
    }
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TokenTimes {
    /// The first output token of each sequence, in the order of the passes. Sequences without an output are missing.
    pub first_tokens: Vec<FirstToken>,
    /// The decode steps of all sequences, in the order of the passes.
    pub decode_steps: Vec<DecodeStep>,
}

impl TokenTimes {
    pub fn from_trace(trace: &Trace) -> Self {
        Self::from_records(trace, &super::group_by_pass(&trace.records))
    }

    pub(super) fn from_records(trace: &Trace, by_pass: &ByPass<'_>) -> Self {
        let accepted = trace.readings.iter().filter(|reading| reading.counter == Counter::Accepted);
        let accepted: BTreeMap<u32, u64> =
            accepted.map(|reading| (reading.pass_index, reading.value)).collect();
        let mut times = Self::default();
        let requests = Requests::new(&trace.admissions);
        // For each sequence, the end of its last output and whether a pass without an output followed.
        let mut last: BTreeMap<u32, (u64, bool)> = BTreeMap::new();
        let mut batch = 0;
        for pass in &trace.passes {
            batch = if pass.is_joined { batch } else { pass.index };
            let mut records = records_of(by_pass, batch, 0);
            let output = records.find(|record| pass.has_output && record.kind == StepKind::Output);
            let Some(output) = output else {
                let sequence = requests.of(pass).map_or(pass.sequence_index, |request| request.request);
                last.entry(sequence).and_modify(|(_, was_interrupted)| *was_interrupted = true);
                continue;
            };
            let (request, end_ns) = (requests.of(pass), output.end_ns);
            let sequence = request.map_or(pass.sequence_index, |request| request.request);
            let Some((start_ns, was_interrupted)) = last.insert(sequence, (end_ns, false)) else {
                times.first_tokens.push(FirstToken {
                    sequence,
                    prompt_tokens: u64::from(pass.first_position) + u64::from(pass.tokens),
                    batch,
                    arrival_ns: request.map_or(0, |request| request.arrival_ns),
                    queue_ns: requests.queue_ns.get(&sequence).copied().unwrap_or(0),
                    end_ns,
                });
                continue;
            };
            // A trace file may contain any value here; a pass cannot accept more drafts than it has.
            let drafted = pass.drafted.min(MAX_PASS_TOKENS);
            let accepted = accepted.get(&pass.index).copied().unwrap_or(0).min(u64::from(drafted)) as u32;
            times.decode_steps.push(DecodeStep {
                batch,
                sequence,
                start_ns,
                end_ns,
                accepted_drafts: accepted,
                drafted,
                was_interrupted,
            });
        }
        times
    }

    /// Returns the total number of tokens of the prompts that were processed completely.
    pub fn prompt_tokens(&self) -> u64 {
        self.first_tokens.iter().map(|first| first.prompt_tokens).sum()
    }

    /// Returns the number of output tokens of all sequences, without the first token of each sequence.
    pub fn decoded_tokens(&self) -> usize {
        self.decode_steps.iter().map(|step| step.tokens() as usize).sum()
    }
}
