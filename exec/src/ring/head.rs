//! How does the head get tokens out of a ring?
//!
//! A request runs on the head's own node: passes enter as soon as the head is free (`schema::schedule::Generation`),
//! activations come back after each round, outputs give tokens, which enter as the next passes. So several passes are
//! under way: batches of a prompt, and passes of several sequences. When the ring gives way to another in mid-request
//! (`renewal`), all tokens so far enter the new one as a prompt, because their keys and values were spread
//! over the old one; a token that is out stays out and is never sampled again. Afterwards the workers' traces are
//! collected and shifted to the head's clock.
//!
//! A request that ends early, whatever the reason, still gives its tokens and its trace. Every wait has a deadline.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use hearth_schema::Plan;
use hearth_schema::schedule::{Generation, Pass};
use hearth_schema::trace::{Header, Origin, Outcome, Reading, Record, Trace, TracedDevice};
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout_at};

use crate::clock::wall_nanos;
use crate::ring::LocalModel;
use crate::ring::choosing::Choosing;
use crate::ring::computing::Computing;
use crate::ring::control::HeadEvent;
use crate::ring::data_link::DataEvent;
use crate::ring::error::{RingError, strange};
use crate::ring::network::Network;
use crate::ring::node::Out;
use crate::ring::recorder::Lines;
use crate::ring::recovery::Event;
use crate::ring::renewal::{Lead, Renewal};
use crate::ring::request::{Asked, Request};
use crate::ring::wire::{Frame, Message};

/// For the workers to hand their traces over after a request that ended well.
const COLLECT_DEADLINE: Duration = Duration::from_mins(1);
/// After one that did not: whoever cannot answer at once is left out.
const SALVAGE_DEADLINE: Duration = Duration::from_secs(2);

/// How a ring is run.
#[derive(Clone)]
pub struct RingOptions {
    /// Threads the head computes with; 0 for all cores.
    pub threads: usize,
    /// The longest that one pass may take, without waiting for those before it.
    pub pass_deadline: Duration,
    /// The model that drafts on the head, for a plan that has one.
    pub draft: Option<Arc<LocalModel>>,
    /// What to do when a device is gone.
    pub renewal: Renewal,
    /// Where the head computes.
    pub computing: Computing,
    /// Hears of a worker that fetches its layers how many bytes of how many are there.
    pub on_fetch: Option<OnFetch>,
}

/// Hears how far a worker by name has come with fetching: bytes that are there, and bytes to fetch.
pub type OnFetch = Arc<dyn Fn(&str, u64, u64) + Send + Sync>;

impl Default for RingOptions {
    fn default() -> Self {
        let pass_deadline = Duration::from_mins(10);
        Self {
            threads: 0,
            pass_deadline,
            draft: None,
            renewal: Renewal::default(),
            computing: Computing::default(),
            on_fetch: None,
        }
    }
}

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

/// Ends the request under way of a ring.
#[derive(Debug, Clone)]
pub struct Stopper(mpsc::UnboundedSender<HeadEvent>);

impl Stopper {
    /// For a ring that is going to be connected.
    pub fn stop(&self) {
        let _ = self.0.send(HeadEvent::Stop);
    }
}

/// A ring with all its workers ready.
pub struct Ring<N: Network> {
    /// Away while a request runs.
    lead: Option<Box<Lead<N>>>,
    plan: Plan,
    computing: Computing,
    stopper: Stopper,
}

impl<N: Network> Ring<N> {
    /// Brings the ring of a plan up.
    pub async fn connect(
        network: &N,
        plan: Plan,
        model: Arc<LocalModel>,
        options: RingOptions,
    ) -> Result<Ring<N>, RingError> {
        let (inbox, events) = mpsc::unbounded_channel();
        let (computing, stopper) = (options.computing, Stopper(inbox.clone()));
        let session = session_id(&plan);
        let connecting =
            Lead::connect(network.clone(), plan.clone(), model, options, (inbox, events), session);
        // Making a large cache takes seconds, in which heartbeats must go on.
        let lead = computing.run(connecting).await??;
        Ok(Ring { lead: Some(Box::new(lead)), plan, computing, stopper })
    }

    /// Runs a request. `on_token` sees each token as it comes, after the number of its sequence, from another thread.
    pub async fn generate(
        &mut self,
        request: Request,
        on_token: impl FnMut(u32, u32) + Send + 'static,
    ) -> Result<Generated, Unfinished> {
        let lead = self.lead.take();
        let mut lead =
            lead.ok_or_else(|| RingError::Plan("a request that was given up is under way".into()))?;
        let running = async move {
            let ended = lead.request(request, on_token).await;
            (lead, ended)
        };
        let (lead, ended) = self.computing.run(running).await?;
        self.lead = Some(lead);
        ended
    }

    /// What ends a request under way.
    pub fn stopper(&self) -> Stopper {
        self.stopper.clone()
    }

    /// Ends the session in order; the workers then wait for the next head.
    pub async fn close(mut self) {
        if let Some(lead) = &mut self.lead {
            lead.close().await;
        }
    }

    /// The plan that it was brought up with.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }
}

impl<N: Network> Drop for Ring<N> {
    fn drop(&mut self) {
        // A request may still be waiting on its own thread.
        self.stopper.stop();
    }
}

/// Passes under way at a time, for each device of the ring. Two keep a device at work while the next pass is on its
/// way; more would only wait, each with its activations in somebody's memory.
const PASSES_A_DEVICE: usize = 2;

/// A sequence under way.
struct Text {
    /// The prompt, and behind it the tokens that are out.
    all: Vec<u32>,
    prompt: usize,
}

/// A request under way.
struct Progress<F> {
    generation: Generation,
    texts: Vec<Text>,
    stop: Vec<u32>,
    passes: Vec<Pass>,
    on_token: F,
    /// When each pass under way entered.
    under_way: BTreeMap<u32, Instant>,
    /// When a pass came out last.
    last_out: Option<Instant>,
}

impl<F> Progress<F> {
    /// When the pass that is to come out next takes too long. Passes do not overtake each other, so that in one round
    /// it had the ring to itself since it entered, or since the one before it was out; in every further round it may
    /// stand behind all that entered after it.
    fn alarm(&self, limit: Duration, rounds: u32) -> Instant {
        let entered = self.under_way.values().next().copied();
        let before = if rounds > 1 { self.under_way.len().max(1) } else { 1 };
        entered.max(self.last_out).unwrap_or_else(Instant::now) + limit * before as u32
    }

    /// What was under way is given up.
    fn begin_again(&mut self, generation: Generation) {
        self.generation = generation;
        self.under_way.clear();
        self.last_out = None;
    }
}

impl<N: Network> Lead<N> {
    async fn request<F: FnMut(u32, u32) + Send>(
        &mut self,
        request: Request,
        on_token: F,
    ) -> Result<Generated, Unfinished> {
        let generation = request.generation(&self.plan)?;
        let Request { sequences, stop, scenario, seed, .. } = request;
        let (texts, samples) = sequences
            .into_iter()
            .map(|Asked { prompt, sample }| (Text { prompt: prompt.len(), all: prompt }, sample))
            .unzip();
        let choosing = Choosing::new(samples, stop.clone());
        let (passes, under_way, last_out) = (Vec::new(), BTreeMap::new(), None);
        let mut progress = Progress { generation, texts, stop, passes, on_token, under_way, last_out };
        let begun = self.renew_for_request(choosing).await;
        let first = self.plan.digest();
        let ended = match begun {
            Ok(()) => self.run(&mut progress).await,
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
    async fn run<F: FnMut(u32, u32)>(&mut self, progress: &mut Progress<F>) -> Result<(), RingError> {
        loop {
            // What is there comes first: news of the ring should not wait for a step.
            while let Ok(event) = self.events.try_recv() {
                self.take(event, progress).await?;
            }
            let has_room = progress.under_way.len() < PASSES_A_DEVICE * self.plan.devices.len();
            if let Some(pass) = has_room.then(|| progress.generation.begin()).flatten() {
                progress.passes.push(pass);
                progress.under_way.insert(pass.index, Instant::now());
                let so_far = progress.texts.get(pass.sequence as usize).map_or(&[][..], |text| &text.all);
                let out = self.node()?.begin(pass, so_far)?;
                self.out(out, progress)?;
                continue;
            }
            if progress.generation.is_over() {
                return Ok(());
            }
            let limit = self.options.pass_deadline;
            let event = match timeout_at(progress.alarm(limit, self.plan.rounds), self.events.recv()).await {
                Ok(Some(event)) => event,
                Ok(None) => HeadEvent::Stop,
                Err(_) => HeadEvent::Late(limit),
            };
            self.take(event, progress).await?;
        }
    }

    /// What an event makes of the request.
    async fn take<F: FnMut(u32, u32)>(
        &mut self,
        event: HeadEvent,
        progress: &mut Progress<F>,
    ) -> Result<(), RingError> {
        if let HeadEvent::Data(DataEvent::Arrived(arrival)) = &event {
            let out = self.node()?.arrived(arrival)?;
            return self.out(out, progress);
        }
        // The next ring begins with all tokens so far. Asked twice, the reducer answers the same.
        let mut renewed = progress.generation.clone();
        (self.again, self.first_pass) = (renewed.again(), renewed.next_pass());
        let steps = self.hear(event)?;
        if !steps.is_empty() {
            progress.begin_again(renewed);
            self.settle(steps).await?;
        }
        Ok(())
    }

    /// A pass may be out after a step, and with it tokens.
    fn out<F: FnMut(u32, u32)>(
        &mut self,
        out: Option<Out>,
        progress: &mut Progress<F>,
    ) -> Result<(), RingError> {
        let Some(Out { pass, tokens }) = out else { return Ok(()) };
        progress.under_way.remove(&pass.index);
        progress.last_out = Some(Instant::now());
        let Some(accepted) = tokens.len().checked_sub(1) else { return Ok(()) };
        let broken =
            |error: hearth_schema::schedule::GenerationError| strange("the ring", &error.to_string());
        progress.generation.output(pass.index, accepted as u32).map_err(broken)?;
        if progress.stop.contains(&tokens[accepted]) {
            progress.generation.end(pass.sequence);
        }
        let text = progress.texts.get_mut(pass.sequence as usize);
        let text = text.ok_or_else(|| strange("the ring", "a token of a sequence that is not there"))?;
        text.all.extend_from_slice(&tokens);
        self.recovery.react(Event::Token);
        self.chronicle.token();
        for token in tokens {
            (progress.on_token)(pass.sequence, token);
        }
        Ok(())
    }

    /// Takes the traces of all devices that answer in time.
    async fn collect(&mut self, limit: Duration) {
        let deadline = Instant::now() + limit;
        if let Some(node) = &mut self.node {
            let (lines, name) = (node.take_all_lines(), self.plan.devices[0].name.clone());
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
                    let read = serde_json::from_slice::<(Vec<Record>, Vec<Reading>)>(&payload);
                    if let Ok((records, readings)) = read {
                        let lines = Lines { records, readings };
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
            model: self.plan.model.name.clone(),
            kind: self.plan.kind.parallelism(),
            seed,
            version: env!("CARGO_PKG_VERSION").into(),
            devices: devices.collect(),
        }
    }
}

/// Names a session: workers use it only to tell data connections of one head from those of another.
fn session_id(plan: &Plan) -> u64 {
    let digest = plan.digest();
    let bytes = digest.bytes().chain(wall_nanos().to_le_bytes()).chain(std::process::id().to_le_bytes());
    // FNV-1a, 64 bits.
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}
