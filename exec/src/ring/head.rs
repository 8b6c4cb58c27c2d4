//! How does the head bring a ring up, and get tokens out of it?
//!
//! It reaches every worker of the plan, checks that each holds the plan's model, hands out the plan,
//! and waits until all hold their layers and their neighbours. A request then runs on the head's own
//! node: a pass enters, activations come back after each round, the last output samples a token, which
//! enters as the next pass. Afterwards the workers' traces are collected and shifted to the head's
//! clock.
//!
//! A worker that hangs up or falls silent for two seconds ends the request with its name. Every wait has
//! a deadline.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use hearth_schema::plan::Plan;
use hearth_schema::scenario::Workload;
use hearth_schema::schedule::{Generation, Pass, Schedule};
use hearth_schema::trace::{Header, Origin, Outcome, Trace, TracedDevice};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use crate::clock::wall_nanos;
use crate::ring::LocalModel;
use crate::ring::control::{Control, HELLO_DEADLINE, address, greet};
use crate::ring::deadline::within;
use crate::ring::error::{RingError, strange};
use crate::ring::head_address::{announced, listen_at};
use crate::ring::network::{Listener, Network};
use crate::ring::node::{Node, Sample};
use crate::ring::recorder::Lines;
use crate::ring::wire::{Frame, MAGIC, Message, PROTOCOL, Purpose, WorkerFacts};
use crate::ring::worker::{NodeEvent, connect_data, receive_activations};

/// How a ring is run.
#[derive(Debug, Clone)]
pub struct RingOptions {
    /// Threads the head computes with; 0 for all cores.
    pub threads: usize,
    /// The longest that one pass may take.
    pub pass_deadline: Duration,
}

impl Default for RingOptions {
    fn default() -> Self {
        Self { threads: 0, pass_deadline: Duration::from_mins(10) }
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
}

/// A ring with all its workers ready.
pub struct Ring {
    plan: Arc<Plan>,
    model: Arc<LocalModel>,
    node: Arc<Mutex<Node>>,
    inbox: mpsc::UnboundedSender<NodeEvent>,
    events: Arc<Mutex<mpsc::UnboundedReceiver<NodeEvent>>>,
    workers: Vec<Control>,
    options: RingOptions,
    _accepting: Accepting,
}

impl Ring {
    /// Brings the ring of a plan up.
    pub async fn connect<N: Network>(
        network: &N,
        plan: Plan,
        model: Arc<LocalModel>,
        options: RingOptions,
    ) -> Result<Ring, RingError> {
        model.check(&plan)?;
        let plan = Arc::new(plan);
        let session = session_id(&plan);
        let (inbox, events) = mpsc::unbounded_channel();
        let mut workers = Vec::new();
        for (place, device) in plan.devices.iter().enumerate().skip(1) {
            workers.push(greet(network, &plan, place, device, session, inbox.clone()).await?);
        }
        let seen_from: Vec<_> = workers.iter().map(|worker| worker.seen_from).collect();
        let at = listen_at(plan.devices[0].address.as_deref(), network.is_sealed(), &seen_from);
        let listener = crate::ring::bind(network, &at).await?;
        let head_address = listener.address();
        let accepting =
            Accepting(tokio::spawn(accept(listener, session, inbox.clone(), model.max_activation_bytes())));
        for worker in &workers {
            worker.configure(&plan, &announced(&head_address, worker.seen_from))?;
        }
        for worker in &mut workers {
            worker.ready().await?;
        }
        let mut outbox = BTreeMap::new();
        for to in Schedule::new(plan.clone(), 0).receivers() {
            let device = &plan.devices[to];
            let link = connect_data(network, &device.name, address(device)?, session, 0).await?;
            outbox.insert(to, link);
        }
        let (threads, (own_plan, own_model)) = (options.threads, (plan.clone(), model.clone()));
        // Making a large cache takes seconds, in which heartbeats must go on.
        let node = tokio::task::spawn_blocking(move || Node::new(&own_plan, 0, &own_model, threads, outbox));
        let node = node.await.map_err(|error| strange("the head's node", &error.to_string()))??;
        Ok(Ring {
            plan,
            model,
            node: Arc::new(Mutex::new(node)),
            inbox,
            events: Arc::new(Mutex::new(events)),
            workers,
            options,
            _accepting: accepting,
        })
    }

    /// Runs a request. `on_token` sees each token as it comes, from another thread.
    pub async fn generate(
        &mut self,
        request: Request,
        on_token: impl FnMut(u32) + Send + 'static,
    ) -> Result<Generated, RingError> {
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
            )));
        }
        for worker in &mut self.workers {
            worker.reset().await?;
        }
        let (node, events) = (self.node.clone(), self.events.clone());
        let (deadline, inbox) = (self.options.pass_deadline, self.inbox.clone());
        let run = tokio::task::spawn_blocking(move || {
            let mut node = node.lock().unwrap_or_else(PoisonError::into_inner);
            let mut events = events.lock().unwrap_or_else(PoisonError::into_inner);
            // What a request before this one left behind is stale, but for a failure.
            while let Ok(event) = events.try_recv() {
                if let NodeEvent::Failed(error) = event {
                    return Err(error);
                }
            }
            node.reset(Some(sample));
            let started = wall_nanos();
            let generation = Generation::new(&workload);
            let done = run(&mut node, &mut events, &inbox, &prompt, generation, &stop, deadline, on_token)?;
            Ok::<_, RingError>((done, node.take_lines(), started))
        });
        let ((tokens, passes), lines, started) =
            run.await.map_err(|error| strange("the head's node", &error.to_string()))??;
        let mut trace = Trace {
            header: self.header(scenario, seed),
            passes,
            records: Vec::new(),
            readings: Vec::new(),
            shortages: Vec::new(),
            happenings: Vec::new(),
            outcome: Outcome::Ok,
        };
        merge(&mut trace, lines, 0, started);
        for worker in &mut self.workers {
            let lines = worker.collect().await?;
            let offset = worker.clock_offset();
            merge(&mut trace, lines, offset, started);
        }
        trace.records.sort_by_key(|record| (record.start, record.device, record.end));
        Ok(Generated { tokens, trace })
    }

    /// Ends the session in order; the workers then wait for the next head.
    pub async fn close(mut self) {
        for worker in &mut self.workers {
            worker.close().await;
        }
    }

    /// The plan it runs.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    fn header(&self, scenario: String, seed: u64) -> Header {
        let mine = self.model.facts();
        let facts = std::iter::once(&mine).chain(self.workers.iter().map(|worker| &worker.facts));
        let devices = self.plan.devices.iter().zip(facts).map(|(device, facts)| TracedDevice {
            name: device.name.clone(),
            profile: None,
            memory_total: facts.memory_total,
            kernel: Some(facts.kernel.clone()),
            unvalidated: None,
        });
        Header {
            schema: Trace::SCHEMA.into(),
            origin: Origin::Measured,
            scenario,
            plan: self.plan.digest(),
            model: self.plan.model.name.clone(),
            kind: self.plan.kind.parallelism(),
            seed,
            version: env!("CARGO_PKG_VERSION").into(),
            devices: devices.collect(),
        }
    }
}

/// The task that lets the ring's last devices in, for as long as this lives.
struct Accepting(JoinHandle<()>);

impl Drop for Accepting {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        // A request may still be waiting on its own thread.
        let _ = self.inbox.send(NodeEvent::Stop);
    }
}

/// The head's part of a request, on its own thread. The tokens and the passes that gave them.
#[allow(clippy::too_many_arguments)] // one call, and each argument is another thing
fn run(
    node: &mut Node,
    events: &mut mpsc::UnboundedReceiver<NodeEvent>,
    inbox: &mpsc::UnboundedSender<NodeEvent>,
    prompt: &[u32],
    mut generation: Generation,
    stop: &[u32],
    deadline: Duration,
    mut on_token: impl FnMut(u32),
) -> Result<(Vec<u32>, Vec<Pass>), RingError> {
    let (mut tokens, mut passes) = (Vec::new(), Vec::new());
    let mut alarm = None;
    while let Some(pass) = generation.begin() {
        passes.push(pass);
        // One deadline for the prompt, whose passes follow each other through the ring, and one for each token.
        alarm.get_or_insert_with(|| Alarm::set(deadline, inbox.clone()));
        let input = match tokens.last() {
            Some(last) => std::slice::from_ref(last),
            None => &prompt[pass.first_position as usize..][..pass.tokens as usize],
        };
        let mut sampled = node.begin(pass, input)?;
        while sampled.is_none() && pass.output {
            let event = events.blocking_recv();
            sampled = take(node, event)?;
        }
        if !pass.output {
            // The next batch enters as soon as the head is free.
            while let Ok(event) = events.try_recv() {
                take(node, Some(event))?;
            }
        }
        if let Some(token) = sampled {
            alarm = None;
            generation.output(pass.index, 0).map_err(|error| strange("the ring", &error.to_string()))?;
            tokens.push(token);
            on_token(token);
            if stop.contains(&token) {
                break;
            }
        }
    }
    Ok((tokens, passes))
}

/// What an event makes of the head's node: perhaps a token.
fn take(node: &mut Node, event: Option<NodeEvent>) -> Result<Option<u32>, RingError> {
    match event {
        Some(NodeEvent::Arrived { from, pass, round, activations, at }) => {
            node.arrived(pass, round, &activations, at, from)
        }
        Some(NodeEvent::Failed(error)) => Err(error),
        Some(NodeEvent::Reset(_) | NodeEvent::Collect(_)) => Ok(None),
        Some(NodeEvent::Stop) | None => Err(RingError::Plan("the ring was closed".into())),
    }
}

/// Fails the node if it is not dropped in time.
struct Alarm(tokio::task::AbortHandle);

impl Alarm {
    fn set(limit: Duration, inbox: mpsc::UnboundedSender<NodeEvent>) -> Alarm {
        let task = tokio::spawn(async move {
            tokio::time::sleep(limit).await;
            let _ = inbox.send(NodeEvent::Failed(RingError::Deadline {
                what: "one pass through the ring".into(),
                seconds: limit.as_secs_f64(),
                hint: "if the devices are that slow, give more with --deadline",
            }));
        });
        Alarm(task.abort_handle())
    }
}

impl Drop for Alarm {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Adds a device's lines, on the head's clock from the request's start.
fn merge(trace: &mut Trace, lines: Lines, to_head: i64, started: u64) {
    let shift = |at: u64| at.saturating_add_signed(to_head).saturating_sub(started);
    for mut record in lines.records {
        (record.start, record.end) = (shift(record.start), shift(record.end));
        trace.records.push(record);
    }
    for mut reading in lines.readings {
        reading.at = shift(reading.at);
        trace.readings.push(reading);
    }
}

/// Names a session: workers use it only to tell data connections of one head from those of another.
fn session_id(plan: &Plan) -> u64 {
    let digest = plan.digest();
    let bytes = digest.bytes().chain(wall_nanos().to_le_bytes()).chain(std::process::id().to_le_bytes());
    // FNV-1a, 64 bits.
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

/// Lets the ring's last devices in.
async fn accept<L: Listener>(
    mut listener: L,
    session: u64,
    inbox: mpsc::UnboundedSender<NodeEvent>,
    max_payload: usize,
) where
    L::Stream: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    while let Ok(mut stream) = listener.accept().await {
        let inbox = inbox.clone();
        tokio::spawn(async move {
            let hello = within(HELLO_DEADLINE, "a hello", Frame::read(&mut stream, 0)).await;
            let Ok(Ok(Some(Frame {
                message: Message::Hello { magic, protocol, session: theirs, purpose },
                ..
            }))) = hello
            else {
                return;
            };
            let Purpose::Data { from } = purpose else { return };
            if (magic, protocol, theirs) != (MAGIC, PROTOCOL, session) {
                let reason = "this head is not in that session".into();
                let _ = Frame::from(Message::Refuse { reason }).write(&mut stream).await;
                return;
            }
            if Frame::from(Message::Welcome(WorkerFacts::default())).write(&mut stream).await.is_ok() {
                receive_activations(stream, inbox, max_payload, from).await;
            }
        });
    }
}
