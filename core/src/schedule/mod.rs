//! The schedule: the steps in which a device carries out its part of a plan.
//!
//! Simulator and executor both interpret this one expansion of a plan. They can differ in how long a step takes,
//! never in what is done, so every gap between a simulated and a real run points at a resource model. It is a pure
//! reducer per device, `(state, event) -> (state, steps)`, and needs only what that device can see: its plan and the
//! messages that reach it.
//!
//! One token goes around the ring `rounds` times (prima.cpp paper, section 3.1 and Fig. 1). In each visit a device
//! computes its window, sends the activations on, releases the window if the plan says so, and then reads its next
//! window ahead (Fig. 4). A device with managed residency begins to read ahead before it computes: its buffer bounds
//! how far it runs ahead, and evictions make room. A partial last round skips devices without layers, but not relays.
//! The head embeds before the first round and outputs after the last.
//!
//! Several passes may be under way, of one sequence or of several; they keep their order on every device. With a
//! draft model the head drafts before a pass that has drafts, and lets the draft model read a batch of the prompt
//! after it has sent that batch. If a pass begins before the end of the positions that a device holds of its
//! sequence, the drafts in between were rejected, and the device rolls them back first.
//!
//! Not here: which pass enters when ([`Generation`]), and how a step is carried out.

mod generation;
mod reconfigure;

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use hearth_schema::pass::{MAX_PASS_TOKENS, Pass};
use hearth_schema::plan::{Plan, Processor, Role};
use hearth_schema::residency::Residency;
use serde::{Deserialize, Serialize};

pub use generation::{Generation, GenerationError, passes};

/// Weights that are read as one part.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ModelPart {
    Layers(Range<u32>),
    /// The output norm and head.
    Output,
}

/// A step of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// Remove the keys and values of a sequence from a position on: the drafts there were rejected.
    Rollback {
        sequence: u32,
        /// The first position removed.
        position: u32,
    },
    /// Let the draft model read the tokens that it has not seen, up to the end of the pass or to its drafts, and draft.
    /// Head only.
    Draft { pass: Pass },
    /// Look up the embedding rows of the tokens. Head only.
    Embed { pass: Pass },
    /// Run the activations through layers.
    Compute { pass: Pass, round: u32, layers: Range<u32>, processor: Processor },
    /// Turn the activations of the last position, and of those before its drafts, into logits and sample. Head only.
    Output {
        pass: Pass,
        /// Where the output matrix lies and is multiplied with.
        processor: Processor,
    },
    /// Hand the activations on.
    Send {
        pass: Pass,
        /// The round of the sender.
        round: u32,
        /// The next round of the receiver; `rounds` if the head is to compute the output.
        next_round: u32,
        /// The receiver's place in the ring.
        to: usize,
    },
    /// Begin to read a part ahead of its turn, while the device continues.
    Prefetch { part: ModelPart, pass: Pass, round: u32 },
    /// Release a used part; under managed residency, the pieces of it that are not kept.
    Release { part: ModelPart, pass: Pass, round: u32 },
}

/// An event of a device.
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// Tokens enter the ring. Head only.
    Begin(Pass),
    /// Activations arrived.
    Arrived {
        pass: Pass,
        /// The round to begin.
        round: u32,
    },
    /// The ring changes to another plan.
    Replanned {
        plan: Arc<Plan>,
        /// The first pass of the plan; earlier ones are dropped.
        first_pass: u32,
    },
}

/// Why an event is refused: the device has a faulty or hostile neighbour.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ScheduleError {
    /// Only the head begins passes.
    #[error("`{device}` cannot begin pass {pass}: only the head begins passes")]
    NotTheHead { device: String, pass: u32 },
    /// The round does not follow from what came before.
    #[error("`{device}` got pass {pass} for round {got}, and expects {expected}")]
    UnexpectedRound { device: String, pass: u32, got: u32, expected: String },
    /// Another pass than the one that began under this index.
    #[error("`{device}` got pass {pass} with other tokens than before")]
    ChangedPass { device: String, pass: u32 },
    /// A message of a pass that was dropped when the ring changed.
    #[error("`{device}` got pass {pass} of an earlier plan; since the last one passes begin at {since}")]
    GivenUp { device: String, pass: u32, since: u32 },
    /// A plan that cannot follow the current one.
    #[error("`{device}` cannot adopt the new plan: {what}")]
    OtherPlan { device: String, what: String },
    /// The plan has no cache for the sequence.
    #[error(
        "pass {pass} is of sequence {sequence}, and the plan has a cache for {sequences}, counted from 0"
    )]
    UnknownSequence { pass: u32, sequence: u32, sequences: u32 },
    /// Drafts without a token before them, without an output, or without a draft model.
    #[error("pass {pass} has {tokens} tokens of which {drafted} are drafted: {why}")]
    BadDrafts { pass: u32, tokens: u32, drafted: u32, why: &'static str },
    /// Keys and values are missing between what the device holds and where the pass begins.
    #[error("`{device}` got pass {pass} from position {first}, and holds {held} positions of its sequence")]
    Gap { device: String, pass: u32, first: u32, held: u32 },
    /// A batch that is empty, too large or past the context.
    #[error(
        "pass {pass} has {tokens} tokens from position {first}: it must have 1 to {MAX_PASS_TOKENS}, within the context of {context}"
    )]
    BadPass { pass: u32, tokens: u32, first: u32, context: u32 },
}

/// The state of a device: its passes in flight, and the messages that it expects next.
#[derive(Debug, Clone, PartialEq)]
pub struct Schedule {
    plan: Arc<Plan>,
    device: usize,
    /// Rounds in which this device is visited, in order.
    visits: Vec<u32>,
    /// Each pass in flight as it began here, and the index into `visits` that comes next.
    under_way: BTreeMap<u32, (Pass, usize)>,
    /// For each sequence, the number of positions whose keys and values are cached or being computed here. Positions
    /// from before a device first saw the sequence are not checked.
    held: BTreeMap<u32, u32>,
    /// The part that was read ahead last and has not been used.
    expected: Option<ModelPart>,
    /// The first pass of the current plan.
    first_pass: u32,
}

impl Schedule {
    /// The state of a device before anything has happened. The plan must be valid and have that device.
    pub fn new(plan: Arc<Plan>, device: usize) -> Self {
        let visits = (0..plan.rounds).filter(|&round| is_visited(&plan, device, round)).collect();
        let (under_way, held) = (BTreeMap::new(), BTreeMap::new());
        Self { plan, device, visits, under_way, held, expected: None, first_pass: 0 }
    }

    /// The plan carried out.
    pub fn plan(&self) -> &Arc<Plan> {
        &self.plan
    }

    /// The device's place in the ring.
    pub fn device(&self) -> usize {
        self.device
    }

    /// Whether this device still expects something of a pass.
    pub fn is_in_flight(&self, pass: u32) -> bool {
        self.under_way.contains_key(&pass)
    }

    /// The places that this device sends to.
    pub fn receivers(&self) -> Vec<usize> {
        let mut places: Vec<usize> = self.visits.iter().map(|&round| self.hop(round).0).collect();
        places.sort_unstable();
        places.dedup();
        places.retain(|&place| place != self.device);
        places
    }

    /// Takes an event and returns the steps that follow, in order. On an error nothing has changed.
    pub fn react(&mut self, event: &Event) -> Result<Vec<Step>, ScheduleError> {
        let mut steps = Vec::new();
        match *event {
            Event::Replanned { ref plan, first_pass } => self.reconfigure(plan, first_pass)?,
            Event::Begin(pass) => {
                if self.device != 0 {
                    return Err(ScheduleError::NotTheHead { device: self.name(), pass: pass.index });
                }
                self.check(pass)?;
                if self.under_way.contains_key(&pass.index) {
                    return Err(self.unexpected(pass, 0));
                }
                self.hold(pass, &mut steps)?;
                if pass.drafted > 0 {
                    steps.push(Step::Draft { pass });
                }
                steps.push(Step::Embed { pass });
                self.under_way.insert(pass.index, (pass, 0));
                self.visit(pass, 0, &mut steps);
                if self.plan.draft.is_some() && pass.drafted == 0 && (pass.tokens > 1 || !pass.output) {
                    steps.push(Step::Draft { pass });
                }
            }
            Event::Arrived { pass, round } => {
                self.check(pass)?;
                let next = self.under_way.get(&pass.index).copied();
                let expected = match next {
                    Some((begun, _)) if begun != pass => {
                        return Err(ScheduleError::ChangedPass { device: self.name(), pass: pass.index });
                    }
                    Some((_, visit)) => self.visits.get(visit).copied().unwrap_or(self.plan.rounds),
                    None if self.device == 0 => return Err(self.unexpected(pass, round)),
                    None => self.visits.first().copied().unwrap_or(0),
                };
                if round != expected {
                    return Err(self.unexpected(pass, round));
                }
                if round == self.plan.rounds {
                    self.finish(pass, &mut steps);
                } else {
                    if next.is_none() {
                        self.hold(pass, &mut steps)?;
                    }
                    self.under_way.entry(pass.index).or_insert((pass, 0));
                    self.visit(pass, round, &mut steps);
                }
            }
        }
        Ok(steps)
    }

    /// Checks that the positions of a new pass follow those held of its sequence, and rolls later ones back.
    fn hold(&mut self, pass: Pass, steps: &mut Vec<Step>) -> Result<(), ScheduleError> {
        let Pass { sequence, first_position, tokens, .. } = pass;
        if let Some(&held) = self.held.get(&sequence) {
            if first_position > held {
                let device = self.name();
                return Err(ScheduleError::Gap { device, pass: pass.index, first: first_position, held });
            }
            if first_position < held {
                steps.push(Step::Rollback { sequence, position: first_position });
            }
        }
        self.held.insert(sequence, first_position + tokens);
        Ok(())
    }

    /// Adds the steps of this round's window, and all that follow without another device.
    fn visit(&mut self, pass: Pass, round: u32, steps: &mut Vec<Step>) {
        let mut round = round;
        loop {
            let (window, gpu) =
                (self.plan.window(self.device, round), self.plan.gpu_window(self.device, round));
            self.expect(ModelPart::Layers(window.clone()), pass, round, steps);
            if self.manages() {
                self.prefetch_after(pass, round, steps);
            }
            for (layers, processor) in
                [(gpu.clone(), Processor::Gpu), (gpu.end.max(window.start)..window.end, Processor::Cpu)]
            {
                if !layers.is_empty() {
                    steps.push(Step::Compute { pass, round, layers, processor });
                }
            }
            let (_, visit) = self.under_way.get_mut(&pass.index).expect("a pass under way");
            *visit += 1;
            let last = *visit == self.visits.len();
            let (to, next_round) = self.hop(round);
            if to != self.device {
                steps.push(Step::Send { pass, round, next_round, to });
                self.after_window(window, pass, round, steps);
                if last && self.device != 0 {
                    self.under_way.remove(&pass.index);
                }
                return;
            }
            // No other device has layers in between.
            self.after_window(window, pass, round, steps);
            if next_round == self.plan.rounds {
                self.finish(pass, steps);
                return;
            }
            round = next_round;
        }
    }

    /// Adds the steps of the output, after which the head's first window is next.
    fn finish(&mut self, pass: Pass, steps: &mut Vec<Step>) {
        self.under_way.remove(&pass.index);
        let (first, round) = (self.plan.windows(self.device).into_iter().next(), self.plan.rounds);
        if pass.output {
            self.expect(ModelPart::Output, pass, round, steps);
        }
        if self.manages() {
            self.prefetch(first.clone().map(ModelPart::Layers), pass, round, steps);
        }
        if pass.output {
            steps.push(Step::Output { pass, processor: self.plan.output });
            self.release(ModelPart::Output, pass, round, steps);
        }
        if !self.manages() {
            self.prefetch(first.map(ModelPart::Layers), pass, round, steps);
        }
    }

    /// Adds the steps after a window has been computed and its activations sent.
    fn after_window(&mut self, window: Range<u32>, pass: Pass, round: u32, steps: &mut Vec<Step>) {
        if !window.is_empty() {
            self.release(ModelPart::Layers(window), pass, round, steps);
        }
        if !self.manages() {
            self.prefetch_after(pass, round, steps);
        }
    }

    /// Prefetches the part after the window of a round: the next window; at the end, the output matrix on the head and
    /// the first window on a worker.
    fn prefetch_after(&mut self, pass: Pass, round: u32, steps: &mut Vec<Step>) {
        let following = (round + 1..self.plan.rounds)
            .map(|later| self.plan.window(self.device, later))
            .find(|window| !window.is_empty());
        let part = match following {
            Some(window) => Some(ModelPart::Layers(window)),
            None if self.device == 0 && pass.output => Some(ModelPart::Output),
            None => self.plan.windows(self.device).into_iter().next().map(ModelPart::Layers),
        };
        self.prefetch(part, pass, round, steps);
    }

    fn prefetch(&mut self, part: Option<ModelPart>, pass: Pass, round: u32, steps: &mut Vec<Step>) {
        let part = part.and_then(|part| on_cpu(&self.plan, self.device, part));
        if let Some(part) = part.filter(|_| self.plan.devices[self.device].residency.prefetches())
            && self.expected.as_ref() != Some(&part)
        {
            self.expected = Some(part.clone());
            steps.push(Step::Prefetch { part, pass, round });
        }
    }

    /// Marks a part as used. Under managed residency it is requested, unless it was the expected one.
    fn expect(&mut self, part: ModelPart, pass: Pass, round: u32, steps: &mut Vec<Step>) {
        let Some(part) = on_cpu(&self.plan, self.device, part) else { return };
        if self.expected.as_ref() != Some(&part) && self.manages() {
            self.prefetch(Some(part), pass, round, steps);
        }
        self.expected = None;
    }

    fn release(&self, part: ModelPart, pass: Pass, round: u32, steps: &mut Vec<Step>) {
        let part = on_cpu(&self.plan, self.device, part);
        if let Some(part) = part.filter(|_| self.plan.devices[self.device].residency.releases()) {
            steps.push(Step::Release { part, pass, round });
        }
    }

    fn manages(&self) -> bool {
        self.plan.devices[self.device].residency.policy == Residency::Managed
    }

    /// The place that gets the activations after this device's window of a round, and the round that it begins.
    fn hop(&self, round: u32) -> (usize, u32) {
        (self.device + 1..self.plan.devices.len())
            .find(|&place| is_visited(&self.plan, place, round))
            .map_or((0, round + 1), |place| (place, round))
    }

    fn check(&self, pass: Pass) -> Result<(), ScheduleError> {
        if pass.index < self.first_pass {
            let (device, since) = (self.name(), self.first_pass);
            return Err(ScheduleError::GivenUp { device, pass: pass.index, since });
        }
        let end = u64::from(pass.first_position) + u64::from(pass.tokens);
        if pass.tokens == 0 || pass.tokens > MAX_PASS_TOKENS || end > u64::from(self.plan.context) {
            return Err(ScheduleError::BadPass {
                pass: pass.index,
                tokens: pass.tokens,
                first: pass.first_position,
                context: self.plan.context,
            });
        }
        if pass.sequence >= self.plan.sequences {
            let (sequence, sequences) = (pass.sequence, self.plan.sequences);
            return Err(ScheduleError::UnknownSequence { pass: pass.index, sequence, sequences });
        }
        let why = match pass.drafted {
            0 => return Ok(()),
            drafted if drafted >= pass.tokens => "the token before them is missing",
            _ if !pass.output => "the pass has no output",
            _ if self.plan.draft.is_none() => "the plan has no draft model",
            _ => return Ok(()),
        };
        let (tokens, drafted) = (pass.tokens, pass.drafted);
        Err(ScheduleError::BadDrafts { pass: pass.index, tokens, drafted, why })
    }

    fn unexpected(&self, pass: Pass, got: u32) -> ScheduleError {
        let expected = match self.under_way.get(&pass.index) {
            Some(&(_, visit)) => {
                format!("round {}", self.visits.get(visit).copied().unwrap_or(self.plan.rounds))
            }
            None if self.device == 0 => "only passes that it began itself".into(),
            None => format!("round {} first", self.visits.first().copied().unwrap_or(0)),
        };
        ScheduleError::UnexpectedRound { device: self.name(), pass: pass.index, got, expected }
    }

    fn name(&self) -> String {
        self.plan.devices[self.device].name.clone()
    }
}

/// Whether a device takes part in a round: it has layers there, is the head, or is a relay.
fn is_visited(plan: &Plan, device: usize, round: u32) -> bool {
    device == 0 || plan.devices[device].role == Role::Relay || !plan.window(device, round).is_empty()
}

/// The rest of a part that the CPU computes from the mapped file, without layers in GPU memory.
fn on_cpu(plan: &Plan, device: usize, part: ModelPart) -> Option<ModelPart> {
    let gpu_layers = plan.devices[device].gpu_layers;
    match part {
        ModelPart::Layers(window) if window.len() as u32 <= gpu_layers => None,
        ModelPart::Layers(window) => Some(ModelPart::Layers(window.start + gpu_layers..window.end)),
        ModelPart::Output => (plan.output == Processor::Cpu).then_some(ModelPart::Output),
    }
}

/// The parts that a device's CPU reads for a token, in the order of use. The device is idle between two lists and never
/// within one. A head outputs a token and begins the next one at once, so its output precedes its first window.
pub fn visits(plan: &Plan, device: usize) -> Vec<Vec<ModelPart>> {
    let schedule = Schedule::new(Arc::new(plan.clone()), device);
    let output = (device == 0).then_some(ModelPart::Output).and_then(|part| on_cpu(plan, device, part));
    let mut visits = vec![Vec::from_iter(output)];
    for &round in &schedule.visits {
        let window = plan.window(device, round);
        let part = Some(window).filter(|window| !window.is_empty()).map(ModelPart::Layers);
        if let Some(last) = visits.last_mut() {
            last.extend(part.and_then(|part| on_cpu(plan, device, part)));
        }
        if schedule.hop(round).0 != device {
            visits.push(Vec::new());
        }
    }
    // A head that is not idle after its last window continues with the output.
    if let Some(tail) = visits.pop()
        && !tail.is_empty()
    {
        match visits.first_mut() {
            Some(first) => drop(first.splice(0..0, tail)),
            None => visits.push(tail),
        }
    }
    visits.retain(|parts| !parts.is_empty());
    visits
}

#[cfg(test)]
pub(crate) mod tests;
