//! How does the head get tokens out of a ring?
//!
//! A request runs on the head's own node: a pass enters, activations come back after each round, the last output
//! samples a token, which enters as the next pass. When the ring gives way to another in mid-request
//! (`renewal`), all tokens so far enter the new one as a prompt, because their keys and values were spread
//! over the old one; a token that is out stays out and is never sampled again. Afterwards the workers' traces are
//! collected and shifted to the head's clock.
//!
//! A request that ends early, whatever the reason, still gives its tokens and its trace. Every wait has a deadline.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use hearth_schema::Plan;
use hearth_schema::scenario::Workload;
use hearth_schema::schedule::{Generation, Pass};
use hearth_schema::trace::{Header, Origin, Outcome, Reading, Record, Trace, TracedDevice};
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout_at};

use crate::clock::wall_nanos;
use crate::ring::LocalModel;
use crate::ring::computing::Computing;
use crate::ring::control::HeadEvent;
use crate::ring::data_link::DataEvent;
use crate::ring::error::{RingError, strange};
use crate::ring::network::Network;
use crate::ring::node::Sample;
use crate::ring::recorder::Lines;
use crate::ring::recovery::Event;
use crate::ring::renewal::{Lead, Renewal};
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
    /// The longest that one pass may take.
    pub pass_deadline: Duration,
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
            renewal: Renewal::default(),
            computing: Computing::default(),
            on_fetch: None,
        }
    }
}

/// What to generate.
pub struct Request {
    /// The prompt's tokens, at least one.
    pub prompt: Vec<u32>,
    /// At most so many new tokens.
    pub generate: u32,
    /// Turns logits into a token.
    pub sample: Sample,
    /// After which token to stop, if any.
    pub stop: Vec<u32>,
    /// Name and seed for the trace.
    pub scenario: String,
    /// The run's seed.
    pub seed: u64,
}

/// What came out.
#[derive(Debug)]
pub struct Generated {
    /// New tokens; a stop token is the last.
    pub tokens: Vec<u32>,
    /// What every device did.
    pub trace: Trace,
    /// The plans that followed the first, as devices were lost or taken in.
    pub plans: Vec<Plan>,
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

    /// Runs a request. `on_token` sees each token as it comes, from another thread.
    pub async fn generate(
        &mut self,
        request: Request,
        on_token: impl FnMut(u32) + Send + 'static,
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

/// A request under way.
struct Progress<F> {
    generation: Generation,
    /// The prompt, and behind it the tokens that are out.
    all: Vec<u32>,
    prompt: usize,
    stop: Vec<u32>,
    passes: Vec<Pass>,
    on_token: F,
    /// When the pass under way takes too long.
    alarm: Option<Instant>,
    is_over: bool,
}

impl<F> Progress<F> {
    /// The tokens of a pass.
    fn input(&self, pass: Pass) -> Result<&[u32], RingError> {
        let range: Range<usize> =
            pass.first_position as usize..pass.first_position as usize + pass.tokens as usize;
        self.all.get(range).ok_or_else(|| strange("the head", "a pass of tokens that are not there"))
    }
}

impl<N: Network> Lead<N> {
    async fn request<F: FnMut(u32) + Send>(
        &mut self,
        request: Request,
        on_token: F,
    ) -> Result<Generated, Unfinished> {
        let Request { prompt, generate, sample, stop, scenario, seed } = request;
        let workload = Workload::plain(prompt.len() as u32, generate);
        if prompt.is_empty()
            || generate == 0
            || prompt.len() as u64 + u64::from(generate) > u64::from(self.plan.context)
        {
            return Err(RingError::Plan(format!(
                "{} prompt tokens and {generate} new ones do not fit the plan's context of {}: shorten them or \
                 plan with a larger `context`",
                prompt.len(),
                self.plan.context
            ))
            .into());
        }
        let mut progress = Progress {
            generation: Generation::new(&workload),
            prompt: prompt.len(),
            all: prompt,
            stop,
            passes: Vec::new(),
            on_token,
            alarm: None,
            is_over: false,
        };
        let begun = self.renew_for_request(sample).await;
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
        let tokens = progress.all.split_off(progress.prompt);
        let generated = Generated { tokens, trace, plans };
        match ended {
            Ok(()) => Ok(generated),
            Err(error) => Err(Unfinished { error, so_far: Some(Box::new(generated)) }),
        }
    }

    /// Lets passes enter until all tokens are out.
    async fn run<F: FnMut(u32)>(&mut self, progress: &mut Progress<F>) -> Result<(), RingError> {
        loop {
            // What is there comes first: news of the ring should not wait for a step.
            while let Ok(event) = self.events.try_recv() {
                self.take(event, progress).await?;
            }
            if progress.is_over {
                return Ok(());
            }
            if let Some(pass) = progress.generation.begin() {
                progress.passes.push(pass);
                // One deadline for the prompt, whose passes follow each other through the ring, and one for each token.
                progress.alarm.get_or_insert_with(|| Instant::now() + self.options.pass_deadline);
                let sampled = self.node()?.begin(pass, progress.input(pass)?)?;
                self.sampled(sampled, pass, progress)?;
                continue;
            }
            if progress.generation.is_over() {
                return Ok(());
            }
            let limit = self.options.pass_deadline;
            let alarm = progress.alarm.unwrap_or_else(|| Instant::now() + limit);
            let event = match timeout_at(alarm, self.events.recv()).await {
                Ok(Some(event)) => event,
                Ok(None) => HeadEvent::Stop,
                Err(_) => HeadEvent::Late(limit),
            };
            self.take(event, progress).await?;
        }
    }

    /// What an event makes of the request.
    async fn take<F: FnMut(u32)>(
        &mut self,
        event: HeadEvent,
        progress: &mut Progress<F>,
    ) -> Result<(), RingError> {
        if let HeadEvent::Data(DataEvent::Arrived(arrival)) = &event {
            let sampled = self.node()?.arrived(arrival)?;
            return self.sampled(sampled, arrival.pass, progress);
        }
        // The next ring begins with all tokens so far. Asked twice, the reducer answers the same.
        let mut renewed = progress.generation.clone();
        (self.again, self.first_pass) = (renewed.again(), renewed.next_pass());
        let steps = self.hear(event)?;
        if !steps.is_empty() {
            progress.generation = renewed;
            progress.alarm = None;
            self.settle(steps).await?;
        }
        Ok(())
    }

    /// A token may have come of a step.
    fn sampled<F: FnMut(u32)>(
        &mut self,
        sampled: Option<u32>,
        pass: Pass,
        progress: &mut Progress<F>,
    ) -> Result<(), RingError> {
        let Some(token) = sampled else { return Ok(()) };
        let broken =
            |error: hearth_schema::schedule::GenerationError| strange("the ring", &error.to_string());
        progress.generation.output(pass.index, 0).map_err(broken)?;
        progress.alarm = None;
        progress.all.push(token);
        progress.is_over = progress.stop.contains(&token);
        self.recovery.react(Event::Token);
        self.chronicle.token();
        (progress.on_token)(token);
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
