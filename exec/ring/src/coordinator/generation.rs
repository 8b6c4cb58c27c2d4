//! A request on the head: lets passes enter the ring and takes tokens out of it.
//!
//! A request runs on the head's own node: passes enter as soon as the head is free (`schema::schedule::Generation`),
//! activations come back after each round, outputs give tokens, which enter as the next passes. So several passes are
//! under way: batches of a prompt, and passes of several sequences. When the ring gives way to another in mid-request
//! (`reconfiguration`), all tokens so far enter the new one as a prompt, because their keys and values were spread
//! over the old one; a token that is out stays out and is never sampled again. Afterwards the workers' traces are
//! collected and shifted to the head's clock.
//!
//! A request that ends early, whatever the reason, still gives its tokens and its trace. Every wait has a deadline.

use std::collections::BTreeMap;
use std::time::Duration;

use hearth_core::recovery::Event;
use hearth_schema::Plan;
use hearth_schema::trace::Header;
use hearth_schema::trace::Origin;
use hearth_schema::trace::Outcome;
use hearth_schema::trace::Reading;
use hearth_schema::trace::Record;
use hearth_schema::trace::Trace;
use hearth_schema::trace::TracedDevice;
use tokio::time::error::Elapsed;
use tokio::time::{Instant, timeout_at};

use super::control::HeadEvent;
use super::progress::{Done, Progress, Text};
use super::reconfiguration::Lead;
use super::request::{Asked, Request};
use crate::error::{RingError, strange};
use crate::execution::{Choosing, Lines, Out};
use crate::wire::{DataEvent, Frame, Message, Network};
use hearth_runtime::clock::wall_nanos;

/// For the workers to hand their traces over after a request that ended well.
const COLLECT_DEADLINE: Duration = Duration::from_mins(1);
/// After one that did not: whoever cannot answer at once is left out.
const SALVAGE_DEADLINE: Duration = Duration::from_secs(2);

/// Passes under way at a time, for each device of the ring. Two keep a device at work while the next pass is on its
/// way; more would only wait, each with its activations in somebody's memory.
const PASSES_A_DEVICE: usize = 2;

/// What came out.
#[derive(Debug)]
pub struct Generated {
    /// New tokens of each sequence; a stop token is the last.
    pub sequences: Vec<Vec<u32>>,
    /// What every device did.
    pub trace: Trace,
    /// The plans that followed the first, as devices were lost or taken in.
    pub plans: Vec<Plan>,
}

impl Generated {
    /// New tokens of the first sequence, which may be the only one.
    pub fn tokens(&self) -> &[u32] {
        self.sequences.first().map_or(&[], Vec::as_slice)
    }
}

/// A request that ended before it was done.
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
pub struct Unfinished {
    /// Why.
    pub error: RingError,
    /// What there is of it, if it had begun.
    pub so_far: Option<Box<Generated>>,
}

impl From<RingError> for Unfinished {
    fn from(error: RingError) -> Self {
        Self { error, so_far: None }
    }
}

impl<N: Network> Lead<N> {
    pub(super) async fn request<F: FnMut(u32, u32) + Send>(
        &mut self,
        request: Request,
        mut on_token: F,
    ) -> Result<Generated, Unfinished> {
        let generation = request.generation(self.recovery.plan())?;
        let Request { sequences, stop, scenario, seed, .. } = request;
        let (texts, samples) = sequences
            .into_iter()
            .map(|Asked { prompt, sample }| (Text { prompt: prompt.len(), all: prompt }, sample))
            .unzip();
        let choosing = Choosing::new(samples, stop.clone());
        let mut progress = Progress::new(generation, texts, stop);
        let begun = self.renew_for_request(choosing).await;
        let first = self.recovery.plan().digest();
        let ended = match begun {
            Ok(()) => self.run(&mut progress, &mut on_token).await,
            Err(error) => Err(error),
        };
        let limit = if ended.is_ok() { COLLECT_DEADLINE } else { SALVAGE_DEADLINE };
        self.collect(limit).await;
        let outcome = if ended.is_ok() { Outcome::Ok } else { Outcome::Killed };
        let mut chronicle = std::mem::take(&mut self.chronicle);
        let plans = std::mem::take(&mut chronicle.plans);
        let header = self.header(chronicle.seats(), (first, scenario, seed));
        let trace = chronicle.trace(header, progress.passes, outcome);
        let tokens = |text: Text| text.all[text.prompt..].to_vec();
        let sequences = progress.texts.into_iter().map(tokens).collect();
        let generated = Generated { sequences, trace, plans };
        match ended {
            Ok(()) => Ok(generated),
            Err(error) => Err(Unfinished { error, so_far: Some(Box::new(generated)) }),
        }
    }

    /// Lets passes enter until all tokens are out.
    async fn run(
        &mut self,
        progress: &mut Progress,
        on_token: &mut impl FnMut(u32, u32),
    ) -> Result<(), RingError> {
        loop {
            let done = match self.advance(progress).await? {
                Done::Nothing if progress.generation.is_over() => return Ok(()),
                Done::Nothing => {
                    let limit = self.options.pass_deadline;
                    let event =
                        timeout_at(progress.alarm(limit, self.recovery.plan().rounds), self.events.recv())
                            .await;
                    self.take(heard(event, limit), progress).await?
                }
                done => done,
            };
            if let Done::Tokens(sequence, tokens) = done {
                for token in tokens {
                    on_token(sequence, token);
                }
            }
        }
    }

    /// Takes the news that is there, or lets a pass enter.
    pub(super) async fn advance(&mut self, progress: &mut Progress) -> Result<Done, RingError> {
        // What is there comes first: news of the ring should not wait for a step.
        if let Ok(event) = self.events.try_recv() {
            return self.take(event, progress).await;
        }
        let has_room = progress.under_way.len() < PASSES_A_DEVICE * self.recovery.plan().devices.len();
        let Some(pass) = has_room.then(|| progress.generation.begin()).flatten() else {
            return Ok(Done::Nothing);
        };
        progress.passes.push(pass);
        progress.under_way.insert(pass.index, Instant::now());
        let so_far = progress.texts.get(pass.sequence as usize).map_or(&[][..], |text| &text.all);
        let out = self.node()?.begin(pass, so_far)?;
        self.out(out, progress)
    }

    /// What an event makes of what is under way.
    pub(super) async fn take(
        &mut self,
        event: HeadEvent,
        progress: &mut Progress,
    ) -> Result<Done, RingError> {
        if let HeadEvent::Data(DataEvent::Arrived(arrival)) = &event {
            let out = self.node()?.arrived(arrival)?;
            return self.out(out, progress);
        }
        if let (HeadEvent::Said { link, frame }, Some(reports)) = (&event, &mut progress.reports)
            && let Message::Report { .. } = frame.message
        {
            reports.extend(self.name_of(*link).zip(lines(&frame.payload)));
            return Ok(Done::Work);
        }
        // The next ring begins with all tokens so far. Asked twice, the reducer answers the same.
        let mut renewed = progress.generation.clone();
        (self.again, self.first_pass) = (renewed.again(), renewed.next_pass());
        let steps = self.hear(event)?;
        if !steps.is_empty() {
            progress.begin_again(renewed);
            self.settle(steps).await?;
        }
        Ok(Done::Work)
    }

    /// A pass may be out after a step, and with it tokens.
    fn out(&mut self, out: Option<Out>, progress: &mut Progress) -> Result<Done, RingError> {
        let Some(Out { pass, tokens }) = out else { return Ok(Done::Work) };
        progress.under_way.remove(&pass.index);
        progress.last_out = Some(Instant::now());
        let Some(accepted) = tokens.len().checked_sub(1) else { return Ok(Done::Work) };
        let broken = |error: hearth_core::schedule::GenerationError| strange("the ring", &error.to_string());
        progress.generation.output(pass.index, accepted as u32).map_err(broken)?;
        if progress.stop.contains(&tokens[accepted]) {
            progress.generation.give_up(pass.sequence);
        }
        let text = progress.texts.get_mut(pass.sequence as usize);
        let text = text.ok_or_else(|| strange("the ring", "a token of a sequence that is not there"))?;
        text.all.extend_from_slice(&tokens);
        // Devices are taken in between requests, so that nothing is to be done.
        self.react(Event::Token);
        self.chronicle.token();
        Ok(Done::Tokens(pass.sequence, tokens))
    }

    /// Takes the traces of all devices that answer in time.
    pub(super) async fn collect(&mut self, limit: Duration) {
        let deadline = Instant::now() + limit;
        if let Some(node) = &mut self.node {
            let (lines, name) = (node.take_all_lines(), self.recovery.plan().devices[0].name.clone());
            self.chronicle.take(&name, lines, 0);
        }
        let mut awaited = self.order_lines();
        let mut collected: BTreeMap<String, Vec<(u32, Lines)>> = BTreeMap::new();
        while !awaited.is_empty() {
            let Ok(Some(event)) = timeout_at(deadline, self.events.recv()).await else { break };
            match event {
                HeadEvent::Said {
                    link,
                    frame: Frame { message: Message::Report { epoch, more }, payload },
                } => {
                    let Some(name) = self.name_of(link) else { continue };
                    if let Some(lines) = lines(&payload) {
                        collected.entry(name.clone()).or_default().push((epoch, lines));
                    }
                    if !more {
                        awaited.remove(&name);
                    }
                }
                HeadEvent::Gone { link, error, since } => {
                    if let Some(name) = self.name_of(link) {
                        awaited.remove(&name);
                        // The next request plans without it; this one has its tokens.
                        let _ = self.lose(&name, error, since);
                    }
                }
                _ => {}
            }
        }
        for name in awaited {
            self.chronicle.missed(&name, wall_nanos(), "it did not hand its trace over in time".into());
        }
        for (name, lines) in collected {
            let offset = self.clock_offset(&name);
            self.chronicle.take(&name, lines, offset);
        }
    }

    fn header(&self, seats: &[String], (plan, scenario, seed): (String, String, u64)) -> Header {
        let devices = seats.iter().map(|name| {
            let facts = self.facts.get(name).cloned().unwrap_or_default();
            TracedDevice {
                name: name.clone(),
                profile: None,
                memory_total: facts.memory_total,
                kernel: Some(facts.kernel).filter(|kernel| !kernel.is_empty()),
                unvalidated: None,
                policy: None,
            }
        });
        Header {
            schema: Trace::SCHEMA.into(),
            origin: Origin::Measured,
            scenario,
            plan,
            model: self.recovery.plan().model.name.clone(),
            kind: self.recovery.plan().kind.parallelism(),
            seed,
            version: env!("CARGO_PKG_VERSION").into(),
            devices: devices.collect(),
        }
    }
}

/// What a worker's report says, if it says anything.
fn lines(payload: &[u8]) -> Option<Lines> {
    let (records, readings) = serde_json::from_slice::<(Vec<Record>, Vec<Reading>)>(payload).ok()?;
    Some(Lines { records, readings })
}

/// What is heard when news were waited for with a limit.
pub(super) fn heard(event: Result<Option<HeadEvent>, Elapsed>, limit: Duration) -> HeadEvent {
    match event {
        Ok(Some(event)) => event,
        Ok(None) => HeadEvent::Stop,
        Err(_) => HeadEvent::Late(limit),
    }
}
