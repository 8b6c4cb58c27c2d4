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

use hearth_core::recovery::Event;
use hearth_core::schedule::Generation;
use hearth_schema::Plan;
use hearth_schema::pass::Pass;
use hearth_schema::run_events::RunEvent;
use hearth_schema::trace::Header;
use hearth_schema::trace::Origin;
use hearth_schema::trace::Outcome;
use hearth_schema::trace::Reading;
use hearth_schema::trace::Record;
use hearth_schema::trace::Trace;
use hearth_schema::trace::TracedDevice;
use tokio::sync::mpsc;
use tokio::time::error::Elapsed;
use tokio::time::{Instant, timeout_at};

use crate::LocalModel;
use crate::choosing::Choosing;
use crate::computing::Computing;
use crate::control::HeadEvent;
use crate::data_link::DataEvent;
use crate::error::{RingError, strange};
use crate::network::Network;
use crate::node::Out;
use crate::recorder::Lines;
use crate::renewal::{Lead, Renewal};
use crate::request::{Asked, Request};
use crate::serving::{Guest, Service};
use crate::wire::{Frame, Message};
use hearth_runtime::clock::wall_nanos;

/// For the workers to hand their traces over after a request that ended well.
const COLLECT_DEADLINE: Duration = Duration::from_mins(1);
/// After one that did not: whoever cannot answer at once is left out.
const SALVAGE_DEADLINE: Duration = Duration::from_secs(2);

/// For a deadline beyond what a clock holds. source: assumed, longer than any pass
pub(super) const LONGEST_WAIT: Duration = Duration::from_hours(24 * 365);

/// How a ring is run.
#[derive(Clone)]
pub struct RingOptions {
    /// Threads the head computes with; 0 for all cores.
    pub threads: usize,
    /// The longest that one pass may take, without waiting for those before it.
    pub pass_deadline: Duration,
    /// The longest that a worker may say nothing of how far it has come before it is ready.
    pub ready_deadline: Duration,
    /// The model that drafts on the head, for a plan that has one.
    pub draft: Option<Arc<LocalModel>>,
    /// What to do when a device is gone.
    pub renewal: Renewal,
    /// Where the head computes.
    pub computing: Computing,
    /// Hears of a worker that fetches its layers how many bytes of how many are there.
    pub on_fetch: Option<OnFetch>,
    /// Hears what happens to the ring, as it does.
    pub on_happening: Option<OnRunEvent>,
}

/// Hears how far a worker by name has come with fetching: bytes that are there, and bytes to fetch.
pub type OnFetch = Arc<dyn Fn(&str, u64, u64) + Send + Sync>;

/// Hears what has happened to the ring, and by which plan it goes on, if by another.
pub type OnRunEvent = Arc<dyn Fn(&RunEvent, Option<&Plan>) + Send + Sync>;

/// What a worker has until it is ready, or says how far it is.
/// source: assumed, far more than taking up mapped layers needs
const READY_DEADLINE: Duration = Duration::from_mins(1);

impl Default for RingOptions {
    fn default() -> Self {
        let pass_deadline = Duration::from_mins(10);
        Self {
            threads: 0,
            pass_deadline,
            ready_deadline: READY_DEADLINE,
            draft: None,
            renewal: Renewal::default(),
            computing: Computing::default(),
            on_fetch: None,
            on_happening: None,
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

    /// Answers guests as they come, until nobody can come any more or the ring fails; whoever is under way is told then.
    /// `guests` comes back, for another ring.
    pub async fn serve(
        &mut self,
        service: Service,
        mut guests: mpsc::UnboundedReceiver<Guest>,
    ) -> (mpsc::UnboundedReceiver<Guest>, Result<(), RingError>) {
        let Some(mut lead) = self.lead.take() else {
            let error = RingError::Plan("a request that was given up is under way".into());
            return (guests, Err(error));
        };
        let serving = async move {
            let ended = lead.serve(service, &mut guests).await;
            (lead, guests, ended)
        };
        match self.computing.run(serving).await {
            Ok((lead, guests, ended)) => {
                self.lead = Some(lead);
                (guests, ended)
            }
            // The thread that served is gone, and with it whoever waited.
            Err(error) => (mpsc::unbounded_channel().1, Err(error)),
        }
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
#[derive(Debug, Clone, Default)]
pub(super) struct Text {
    /// The prompt, and behind it the tokens that are out.
    pub(super) all: Vec<u32>,
    pub(super) prompt: usize,
}

/// What is under way in the ring.
pub(super) struct Progress {
    pub(super) generation: Generation,
    pub(super) texts: Vec<Text>,
    pub(super) stop: Vec<u32>,
    pub(super) passes: Vec<Pass>,
    /// Where traces go that were ordered meanwhile, each with its device; nowhere if nobody wants them.
    pub(super) reports: Option<Vec<(String, Lines)>>,
    /// When each pass under way entered.
    pub(super) under_way: BTreeMap<u32, Instant>,
    /// When a pass came out last.
    last_out: Option<Instant>,
}

/// What the head has just done.
pub(super) enum Done {
    /// Something that gave no token.
    Work,
    /// These tokens of a sequence are out.
    Tokens(u32, Vec<u32>),
    /// Nothing: no pass can enter and no news is there.
    Nothing,
}

impl Progress {
    /// Nothing has entered yet.
    pub(super) fn new(generation: Generation, texts: Vec<Text>, stop: Vec<u32>) -> Self {
        let (passes, under_way) = (Vec::new(), BTreeMap::new());
        Self { generation, texts, stop, passes, reports: None, under_way, last_out: None }
    }

    /// When the pass that is to come out next takes too long. Passes do not overtake each other, so that in one round
    /// it had the ring to itself since it entered, or since the one before it was out; in every further round it may
    /// stand behind all that entered after it.
    pub(super) fn alarm(&self, limit: Duration, rounds: u32) -> Instant {
        let entered = self.under_way.values().next().copied();
        let before = if rounds > 1 { self.under_way.len().max(1) } else { 1 };
        let since = entered.max(self.last_out).unwrap_or_else(Instant::now);
        since.checked_add(limit.saturating_mul(before as u32)).unwrap_or(since + LONGEST_WAIT)
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

/// Names a session: workers use it only to tell data connections of one head from those of another.
fn session_id(plan: &Plan) -> u64 {
    let digest = plan.digest();
    let bytes = digest.bytes().chain(wall_nanos().to_le_bytes()).chain(std::process::id().to_le_bytes());
    // FNV-1a, 64 bits.
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}
