//! The schedule: the steps in which a device executes its part of a plan.
//!
//! Simulator and executor both interpret this schedule. They can differ in how long a step takes, but not in the steps.
//! The schedule of a device is a pure reducer, `(state, event) -> (state, steps)`.
//!
//! One token goes around the ring `rounds` times (prima.cpp paper, section 3.1 and Fig. 1). In each round a device
//! computes its window, sends the activations to the next device, releases the window if the plan says so, and then
//! prefetches its next window (Fig. 4). A device with managed residency prefetches before it computes, because the
//! size of its buffer limits the prefetch. A partial last round skips devices without layers, but not relays.
//!
//! Several batches may be in flight; they keep their order on every device. With a draft model the head drafts before
//! it embeds a pass with drafts, and runs the draft model on a chunk of a prompt after it has sent that chunk.
//!
//! Not here: which passes enter the ring next ([`Generation`]), and how a step is executed.

pub mod arrivals;
pub mod batching;
pub mod request_slots;

mod cache_pool;
mod generation;
mod reconfigure;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;

use hearth_schema::pass::{Batch, CacheChange, MAX_PASS_TOKENS, Pass};
use hearth_schema::plan::{Plan, Processor, Role};
use hearth_schema::residency::Residency;
use serde::{Deserialize, Serialize};

pub use generation::{Generation, GenerationError, workload_passes};

/// A part of the model's weights that is prefetched and released as one unit.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ModelPart {
    Layers(Range<u32>),
    /// The norm after the last layer, and the output matrix.
    Output,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// Run the draft model on the new tokens of the pass, then generate the drafted tokens of the pass. `batch` is
    /// the index of its batch. Head only.
    Draft { batch: u32, pass: Pass },
    /// Look up the embedding rows of the tokens. Head only.
    Embed { batch: Batch },
    /// Compute those layers of a window that are on one processor.
    Compute { batch: Batch, round: u32, layers: Range<u32>, processor: Processor },
    /// Compute the logits of each pass with an output, at its last position and at the position before each drafted
    /// token, and sample. Head only.
    Output { batch: Batch, processor: Processor },
    /// Send the activations of a round to the device with index `receiver` in the plan, which then begins the round
    /// `next_round`; this is the plan's number of rounds if the receiver is the head and computes the output.
    Send { batch: Batch, round: u32, next_round: u32, receiver: usize },
    /// Start to prefetch a part in the background. `batch` is the index of the current batch.
    Prefetch { part: ModelPart, batch: u32, round: u32 },
    /// Evict a part after its use; with managed residency, only the pieces of the part that are not kept.
    Release { part: ModelPart, batch: u32, round: u32 },
}

/// An event to which the schedule of a device reacts.
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// A batch enters the ring. Head only.
    Begin(Batch),
    /// Activations have arrived from another device, so this device begins its part of the round.
    Arrived { batch: Batch, round: u32 },
    /// The ring changes to another plan, which begins with `first_pass`. Earlier passes are dropped.
    Replanned { plan: Arc<Plan>, first_pass: u32 },
}

/// Why a schedule rejects an event. The cause is a faulty or hostile device in the ring.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ScheduleError {
    #[error("`{device}` cannot begin pass {pass}: only the head begins passes")]
    NotTheHead { device: String, pass: u32 },
    #[error("`{device}` received pass {pass} for round {got}, but expects {expected}")]
    UnexpectedRound { device: String, pass: u32, got: u32, expected: String },
    /// The pass has the same index as a pass in flight, but different contents.
    #[error("`{device}` received pass {pass} with tokens that differ from those of an earlier round")]
    ChangedPass { device: String, pass: u32 },
    /// All passes take the same way around the ring and arrive in order, so a pass has been lost or sent twice.
    #[error("`{device}` received pass {pass} in round {round}, but expects pass {expected}")]
    PassOutOfOrder { device: String, pass: u32, round: u32, expected: u32 },
    #[error("`{device}` received pass {pass} of an earlier plan; the current plan begins at pass {since}")]
    DroppedPass { device: String, pass: u32, since: u32 },
    #[error("`{device}` cannot adopt the new plan: {what}")]
    IncompatiblePlan { device: String, what: String },
    #[error(
        "pass {pass} is for sequence {sequence} (counted from 0), but the plan has caches for \
         {sequences} sequences"
    )]
    UnknownSequence { pass: u32, sequence: u32, sequences: u32 },
    #[error("pass {pass} has {tokens} tokens, of which {drafted} are drafted: {why}")]
    BadDrafts { pass: u32, tokens: u32, drafted: u32, why: &'static str },
    /// The pass begins after the last cached position, so keys and values are missing.
    #[error(
        "`{device}` received pass {pass}, which begins at position {first}, but only {cached} positions of \
         the sequence are cached"
    )]
    Gap { device: String, pass: u32, first: u32, cached: u32 },
    #[error(
        "`{device}` received pass {pass}, with which {tokens} tokens are cached: there is memory for {room}"
    )]
    NoCacheMemory { device: String, pass: u32, tokens: u64, room: u64 },
    /// The pass would truncate a recurrent state.
    #[error(
        "`{device}` received pass {pass}, which begins at position {first}, but the recurrent state after {cached} \
         positions can only be continued or cleared"
    )]
    RolledBackState { device: String, pass: u32, first: u32, cached: u32 },
    #[error(
        "the batch of pass {pass} has a change of KV caches that is not possible with this plan: {change:?}"
    )]
    BadCacheChange { pass: u32, change: CacheChange },
    #[error("the batch of pass {pass} has {tokens} tokens: at most {MAX_PASS_TOKENS} are possible")]
    LargeBatch { pass: u32, tokens: u32 },
    #[error(
        "pass {pass} has {tokens} tokens from position {first}: it must have 1 to {MAX_PASS_TOKENS} tokens and \
         end within the context of {context}"
    )]
    BadPass { pass: u32, tokens: u32, first: u32, context: u32 },
}

/// The schedule of one device: its batches in flight and the messages that it expects next.
#[derive(Debug, Clone, PartialEq)]
pub struct Schedule {
    plan: Arc<Plan>,
    device: usize,
    /// The rounds in which this device takes part, in ascending order.
    rounds: Vec<u32>,
    /// The batches in flight by index, each with the index into `rounds` of its next round.
    in_flight: BTreeMap<u32, (Batch, usize)>,
    /// For each sequence, the number of positions whose keys and values are cached or being computed on this device.
    /// Sequences that the device has not seen are missing, and their first pass is not checked for a gap.
    cached: BTreeMap<u32, u32>,
    /// For each sequence, the number of positions that were written since its cache was released.
    backed: BTreeMap<u32, u32>,
    /// The index of the batch that has to arrive next in each round; missing before the first arrival in a round.
    next_passes: BTreeMap<u32, u32>,
    /// The part that was prefetched last and has not been used yet.
    expected: Option<ModelPart>,
    first_pass: u32,
    /// Whether the cache of a sequence can be truncated to fewer positions. A recurrent state can only be cleared.
    can_truncate: bool,
}

impl Schedule {
    /// Creates the schedule of the device with this index in a valid plan.
    pub fn new(plan: Arc<Plan>, device: usize) -> Self {
        let rounds = (0..plan.rounds).filter(|&round| takes_part(&plan, device, round)).collect();
        let (in_flight, cached, next_passes) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        let backed = BTreeMap::new();
        let (expected, first_pass, can_truncate) = (None, 0, true);
        Self {
            plan,
            device,
            rounds,
            in_flight,
            cached,
            backed,
            next_passes,
            expected,
            first_pass,
            can_truncate,
        }
    }

    /// Returns this schedule for a model whose caches can, or cannot, be truncated to fewer positions. If they cannot,
    /// a pass must begin at the first position or after the last cached one.
    #[must_use]
    pub fn with_truncation(self, can_truncate: bool) -> Self {
        Self { can_truncate, ..self }
    }

    pub fn plan(&self) -> &Arc<Plan> {
        &self.plan
    }

    pub fn device_index(&self) -> usize {
        self.device
    }

    /// Whether this device has begun the batch with this index and has not finished the batch.
    pub fn is_in_flight(&self, batch: u32) -> bool {
        self.in_flight.contains_key(&batch)
    }

    /// Returns the indices of the devices that this device sends to, in ascending order.
    pub fn receivers(&self) -> Vec<usize> {
        let receivers: BTreeSet<usize> = self.rounds.iter().map(|&round| self.next_hop(round).0).collect();
        receivers.into_iter().filter(|&receiver| receiver != self.device).collect()
    }

    /// Returns the index of the device that sends the activations of a batch that arrive here in `round`: the device
    /// that takes part before this one, in the same round or, for the head, in the round before.
    pub fn sender(&self, round: u32) -> Option<usize> {
        let (before, round) = match self.device {
            0 => (self.plan.devices.len(), round.checked_sub(1)?),
            own => (own, round),
        };
        (0..before).rev().find(|&index| takes_part(&self.plan, index, round))
    }

    /// Handles an event and returns the steps to execute, in order. On an error the state is unchanged.
    pub fn react(&mut self, event: &Event) -> Result<Vec<Step>, ScheduleError> {
        let mut steps = Vec::new();
        match *event {
            Event::Replanned { ref plan, first_pass } => self.reconfigure(plan, first_pass)?,
            Event::Begin(ref batch) => {
                if self.device != 0 {
                    return Err(ScheduleError::NotTheHead { device: self.name(), pass: batch.index() });
                }
                self.check(batch)?;
                if self.in_flight.contains_key(&batch.index()) {
                    return Err(self.unexpected(batch, 0));
                }
                self.extend_caches(batch)?;
                let drafted = batch.passes().iter().filter(|pass| pass.drafted > 0);
                steps.extend(drafted.map(|&pass| Step::Draft { batch: batch.index(), pass }));
                steps.push(Step::Embed { batch: batch.clone() });
                self.in_flight.insert(batch.index(), (batch.clone(), 0));
                self.add_window_steps(batch, 0, &mut steps);
                if self.plan.draft_model.is_some() {
                    let is_prompt = |pass: &&Pass| pass.drafted == 0 && (pass.tokens > 1 || !pass.has_output);
                    let prompts = batch.passes().iter().filter(is_prompt);
                    steps.extend(prompts.map(|&pass| Step::Draft { batch: batch.index(), pass }));
                }
            }
            Event::Arrived { ref batch, round } => {
                self.check(batch)?;
                let index = batch.index();
                let begun = self.in_flight.get(&index).map(|(begun, _)| begun);
                if begun.is_some_and(|begun| begun != batch) {
                    return Err(ScheduleError::ChangedPass { device: self.name(), pass: index });
                }
                let is_new = begun.is_none();
                if self.expected_round(index) != Some(round) {
                    return Err(self.unexpected(batch, round));
                }
                let expected = self.next_passes.get(&round).copied().unwrap_or(self.first_pass);
                if index != expected {
                    let (device, pass) = (self.name(), index);
                    return Err(ScheduleError::PassOutOfOrder { device, pass, round, expected });
                }
                if round == self.plan.rounds {
                    self.finish(batch, &mut steps);
                } else {
                    if is_new {
                        self.extend_caches(batch)?;
                        self.in_flight.insert(index, (batch.clone(), 0));
                    }
                    self.add_window_steps(batch, round, &mut steps);
                }
                self.next_passes.insert(round, batch.end());
            }
        }
        Ok(steps)
    }

    /// Adds the positions of a new batch to the caches. A pass from an earlier position on, as after rejected drafts,
    /// replaces the positions after it. On an error, because positions before a pass are not cached or there is no memory
    /// for more, the state is unchanged.
    fn extend_caches(&mut self, batch: &Batch) -> Result<(), ScheduleError> {
        let mut changed = BTreeMap::new();
        for change in batch.cache_changes() {
            match *change {
                CacheChange::Release { sequence } => changed.insert(sequence, 0),
                CacheChange::Copy { from, to, tokens: first } => {
                    let cached = changed.get(&from).or(self.cached.get(&from)).copied().unwrap_or(0);
                    if cached < first {
                        let (device, pass) = (self.name(), batch.index());
                        return Err(ScheduleError::Gap { device, pass, first, cached });
                    }
                    changed.insert(to, first)
                }
            };
        }
        for pass in batch.passes() {
            let Pass { index, sequence_index: sequence, first_position: first, .. } = *pass;
            let Some(&cached) = changed.get(&sequence).or(self.cached.get(&sequence)) else { continue };
            if first > cached {
                return Err(ScheduleError::Gap { device: self.name(), pass: index, first, cached });
            }
            if first < cached && first > 0 && !self.can_truncate {
                let (device, pass) = (self.name(), index);
                return Err(ScheduleError::RolledBackState { device, pass, first, cached });
            }
        }
        let ends = batch.passes().iter().map(|pass| (pass.sequence_index, pass.first_position + pass.tokens));
        let ends: Vec<(u32, u32)> = ends.collect();
        let mut backed = self.backed.clone();
        for (&sequence, &tokens) in &changed {
            let own = backed.entry(sequence).or_default();
            *own = if tokens == 0 { 0 } else { tokens.max(*own) };
        }
        for &(sequence, end) in &ends {
            let own = backed.entry(sequence).or_default();
            *own = end.max(*own);
        }
        // Requests that leave their slots may have more passes in flight.
        let slack = cache_pool::HEADROOM_TOKENS * u64::from(self.plan.sequences);
        let (tokens, room) =
            (backed.values().map(|&own| u64::from(own)).sum(), self.plan.total_cache_tokens() + slack);
        if tokens > room {
            return Err(ScheduleError::NoCacheMemory {
                device: self.name(),
                pass: batch.index(),
                tokens,
                room,
            });
        }
        self.backed = backed;
        self.cached.extend(changed);
        self.cached.extend(ends);
        Ok(())
    }

    /// Adds the steps of the device's window in `round`, and of its later windows until another device has to compute.
    fn add_window_steps(&mut self, batch: &Batch, mut round: u32, steps: &mut Vec<Step>) {
        loop {
            let (window, gpu) =
                (self.plan.window(self.device, round), self.plan.gpu_window(self.device, round));
            self.prefetch_before_use(ModelPart::Layers(window.clone()), batch, round, steps);
            if self.is_managed() {
                self.prefetch_after(batch, round, steps);
            }
            let cpu = gpu.end.max(window.start)..window.end;
            for (layers, processor) in [(gpu, Processor::Gpu), (cpu, Processor::Cpu)] {
                if !layers.is_empty() {
                    steps.push(Step::Compute { batch: batch.clone(), round, layers, processor });
                }
            }
            let (_, next) = self.in_flight.get_mut(&batch.index()).expect("a batch in flight");
            *next += 1;
            let last = *next == self.rounds.len();
            let (receiver, next_round) = self.next_hop(round);
            let sends = receiver != self.device;
            if sends {
                steps.push(Step::Send { batch: batch.clone(), round, next_round, receiver });
            }
            if !window.is_empty() {
                self.release(ModelPart::Layers(window), batch, round, steps);
            }
            if !self.is_managed() {
                self.prefetch_after(batch, round, steps);
            }
            if sends {
                if last && self.device != 0 {
                    self.in_flight.remove(&batch.index());
                }
                return;
            }
            // No other device takes part before the next round.
            if next_round == self.plan.rounds {
                self.finish(batch, steps);
                return;
            }
            round = next_round;
        }
    }

    /// Adds the steps that compute the output, and prefetches the head's first window for the next token.
    fn finish(&mut self, batch: &Batch, steps: &mut Vec<Step>) {
        self.in_flight.remove(&batch.index());
        let (first, round) = (self.plan.windows(self.device).into_iter().next(), self.plan.rounds);
        if batch.has_output() {
            self.prefetch_before_use(ModelPart::Output, batch, round, steps);
        }
        if self.is_managed() {
            self.prefetch(first.clone().map(ModelPart::Layers), batch, round, steps);
        }
        if batch.has_output() {
            steps.push(Step::Output { batch: batch.clone(), processor: self.plan.output_processor });
            self.release(ModelPart::Output, batch, round, steps);
        }
        if !self.is_managed() {
            self.prefetch(first.map(ModelPart::Layers), batch, round, steps);
        }
    }

    /// Prefetches the part that is used after the window of a round. This is the next window. After the last window it
    /// is the output matrix on the head device, and the first window on a worker.
    fn prefetch_after(&mut self, batch: &Batch, round: u32, steps: &mut Vec<Step>) {
        let following = (round + 1..self.plan.rounds)
            .map(|later| self.plan.window(self.device, later))
            .find(|window| !window.is_empty());
        let part = match following {
            Some(window) => Some(ModelPart::Layers(window)),
            None if self.device == 0 && batch.has_output() => Some(ModelPart::Output),
            None => self.plan.windows(self.device).into_iter().next().map(ModelPart::Layers),
        };
        self.prefetch(part, batch, round, steps);
    }

    fn prefetch(&mut self, part: Option<ModelPart>, batch: &Batch, round: u32, steps: &mut Vec<Step>) {
        let part = part.and_then(|part| on_cpu(&self.plan, self.device, part));
        if let Some(part) = part.filter(|_| self.plan.devices[self.device].residency.prefetches())
            && self.expected.as_ref() != Some(&part)
        {
            self.expected = Some(part.clone());
            steps.push(Step::Prefetch { part, batch: batch.index(), round });
        }
    }

    /// With managed residency, appends a step that prefetches `part` before its use, unless it was prefetched.
    fn prefetch_before_use(&mut self, part: ModelPart, batch: &Batch, round: u32, steps: &mut Vec<Step>) {
        let Some(part) = on_cpu(&self.plan, self.device, part) else { return };
        if self.expected.as_ref() != Some(&part) && self.is_managed() {
            self.prefetch(Some(part), batch, round, steps);
        }
        self.expected = None;
    }

    fn release(&self, part: ModelPart, batch: &Batch, round: u32, steps: &mut Vec<Step>) {
        let part = on_cpu(&self.plan, self.device, part);
        if let Some(part) = part.filter(|_| self.plan.devices[self.device].residency.evicts_after_use()) {
            steps.push(Step::Release { part, batch: batch.index(), round });
        }
    }

    fn is_managed(&self) -> bool {
        self.plan.devices[self.device].residency.policy == Residency::Managed
    }

    /// Returns the index of the device that receives this device's activations of a round, and the round that the
    /// receiver then begins.
    fn next_hop(&self, round: u32) -> (usize, u32) {
        (self.device + 1..self.plan.devices.len())
            .find(|&index| takes_part(&self.plan, index, round))
            .map_or((0, round + 1), |index| (index, round))
    }

    fn check(&self, batch: &Batch) -> Result<(), ScheduleError> {
        batch.passes().iter().try_for_each(|&pass| self.check_pass(pass))?;
        let Plan { context_length, sequences, .. } = *self.plan;
        for change in batch.cache_changes() {
            let is_possible = match *change {
                CacheChange::Release { sequence } => sequence < sequences,
                CacheChange::Copy { from, to, tokens } => {
                    from < sequences
                        && to < sequences
                        && from != to
                        && tokens <= context_length
                        && self.can_truncate
                }
            };
            if !is_possible {
                return Err(ScheduleError::BadCacheChange { pass: batch.index(), change: *change });
            }
        }
        let (pass, tokens) = (batch.index(), batch.tokens());
        if tokens > MAX_PASS_TOKENS {
            return Err(ScheduleError::LargeBatch { pass, tokens });
        }
        Ok(())
    }

    fn check_pass(&self, pass: Pass) -> Result<(), ScheduleError> {
        let Pass { sequence_index: sequence, first_position: first, tokens, drafted, has_output, .. } = pass;
        let (context, sequences, since) = (self.plan.context_length, self.plan.sequences, self.first_pass);
        let pass = pass.index;
        if pass < since {
            return Err(ScheduleError::DroppedPass { device: self.name(), pass, since });
        }
        let end = u64::from(first) + u64::from(tokens);
        if tokens == 0 || tokens > MAX_PASS_TOKENS || end > u64::from(context) {
            return Err(ScheduleError::BadPass { pass, tokens, first, context });
        }
        if sequence >= sequences {
            return Err(ScheduleError::UnknownSequence { pass, sequence, sequences });
        }
        let why = match drafted {
            0 => return Ok(()),
            _ if drafted >= tokens => "the token before them is missing",
            _ if !has_output => "the pass has no output",
            _ if self.plan.draft_model.is_none() => "the plan has no draft model",
            _ => return Ok(()),
        };
        Err(ScheduleError::BadDrafts { pass, tokens, drafted, why })
    }

    /// Returns the round in which a batch has to arrive next, `None` if only the head itself can begin the batch.
    fn expected_round(&self, batch: u32) -> Option<u32> {
        match self.in_flight.get(&batch) {
            Some(&(_, next)) => Some(self.rounds.get(next).copied().unwrap_or(self.plan.rounds)),
            None if self.device == 0 => None,
            None => Some(self.rounds.first().copied().unwrap_or(0)),
        }
    }

    fn unexpected(&self, batch: &Batch, got: u32) -> ScheduleError {
        let index = batch.index();
        let expected = match self.expected_round(index) {
            None => "only passes that it began itself".into(),
            Some(round) if self.is_in_flight(index) => format!("round {round}"),
            Some(round) => format!("round {round} first"),
        };
        ScheduleError::UnexpectedRound { device: self.name(), pass: index, got, expected }
    }

    fn name(&self) -> String {
        self.plan.devices[self.device].name.clone()
    }
}

/// Whether a device takes part in a round: it has layers in this round, is the head device, or is a relay.
fn takes_part(plan: &Plan, device: usize, round: u32) -> bool {
    device == 0 || plan.devices[device].role == Role::Relay || !plan.window(device, round).is_empty()
}

/// Returns the weights of a part that the CPU reads: the layers that are not on the GPU, or the output matrix. Returns
/// `None` if the GPU has the whole part.
fn on_cpu(plan: &Plan, device: usize, part: ModelPart) -> Option<ModelPart> {
    let gpu_layers = plan.devices[device].gpu_layers;
    match part {
        ModelPart::Layers(window) if window.len() as u32 <= gpu_layers => None,
        ModelPart::Layers(window) => Some(ModelPart::Layers(window.start + gpu_layers..window.end)),
        ModelPart::Output => (plan.output_processor == Processor::Cpu).then_some(ModelPart::Output),
    }
}

/// Returns the parts that a device's CPU reads for a token, in the order of use. Each list is one busy period: the
/// device is idle between two lists and never within one. The head device begins the next token directly after the
/// output, so the output matrix precedes its first window.
pub fn parts_by_busy_period(plan: &Plan, device: usize) -> Vec<Vec<ModelPart>> {
    let schedule = Schedule::new(Arc::new(plan.clone()), device);
    let output = (device == 0).then_some(ModelPart::Output).and_then(|part| on_cpu(plan, device, part));
    let mut busy_periods = vec![Vec::from_iter(output)];
    for &round in &schedule.rounds {
        let window = Some(plan.window(device, round)).filter(|window| !window.is_empty());
        if let Some(last) = busy_periods.last_mut() {
            last.extend(window.and_then(|window| on_cpu(plan, device, ModelPart::Layers(window))));
        }
        if schedule.next_hop(round).0 != device {
            busy_periods.push(Vec::new());
        }
    }
    // A head that is not idle after its last window continues with the output.
    let tail = busy_periods.pop().unwrap_or_default();
    match busy_periods.first_mut() {
        Some(first) => drop(first.splice(0..0, tail)),
        None => busy_periods.push(tail),
    }
    busy_periods.retain(|parts| !parts.is_empty());
    busy_periods
}

#[cfg(test)]
pub(crate) mod tests;
