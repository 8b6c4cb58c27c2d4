//! How does a worker serve one head after another?
//!
//! It listens, and each connection first says what it is for. A head's control connection opens a session: the worker
//! tells what model it has and follows the head's orders (`Session`). It prepares for an epoch, which opens its door
//! to those who will send it activations and to nobody else; it takes the plan and its place in it, and from then on
//! its node computes ([`super::tenure`]). A ring may give way to another in mid-session. The session ends when the head
//! says goodbye, falls silent or disappears; the worker then waits for the next.
//!
//! One session at a time: two heads would share its memory without knowing. Every wait has a deadline. Strangers who
//! connect and say nothing are few at a time: when there are too many the one that has said nothing longest is sent
//! away, so that they cannot use up what the system has of connections.

use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use hearth_profiles::Document;
use hearth_schema::Plan;
use hearth_schema::pass::MAX_PASS_TOKENS;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinError;
use tokio::time::timeout;

use crate::computing::Computing;
use crate::data_link::{DataEvent, Deliver, Door, SharedDoor, admit};
use crate::error::{RingError, strange};
use crate::greeting::{hear, refuse};
use crate::head_link::HeadLink;
use crate::network::{Listener, Network};
use crate::node::Node;
use crate::probe::answer_probes;
use crate::recorder::Lines;
use crate::strangers::{Known, Strangers};
use crate::tenure::{Before, NodeEvent, Said, Tenure};
use crate::wire::{Frame, Message, PeerAddress, Purpose, WorkerFacts};
use crate::{LocalModel, check_executable, facts};
use hearth_runtime::accelerator::Accelerator;
use hearth_runtime::clock::wall_nanos;

/// For the session before to end: its threads stop, its memory is given back.
const ENTER_DEADLINE: Duration = Duration::from_secs(5);
/// Between two looks whether it has.
const ENTER_STEP: Duration = Duration::from_millis(5);
/// After a connection that could not be accepted.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// In a row, after which the listener counts as broken: half a minute.
const MAX_ACCEPT_FAILURES: u32 = 300;
/// For the node to finish the step at hand when a session ends: a layer's worth of disk reads.
const DRAIN_DEADLINE: Duration = Duration::from_mins(1);
/// The largest activations taken before the model is known: a batch of the widest model, twice over.
const MAX_ACTIVATION_BYTES: usize = 2 * MAX_PASS_TOKENS as usize * (16 << 10) * size_of::<f32>();

/// How a worker works.
#[derive(Debug, Clone, Default)]
pub struct WorkerOptions {
    /// Threads it computes with; 0 for all cores.
    pub threads: usize,
    /// Where its node computes.
    pub computing: Computing,
    /// What computes layers on a GPU, of a model that is fetched; a file has its own.
    pub accelerator: Option<Accelerator>,
}

/// Where a worker's layers come from.
#[derive(Debug, Clone)]
pub enum Source {
    /// A file that is here.
    File(Arc<LocalModel>),
    /// The head; what has come is kept in this folder.
    Fetch(PathBuf),
}

impl Source {
    fn facts(&self) -> WorkerFacts {
        match self {
            Source::File(model) => model.facts(),
            Source::Fetch(_) => facts(),
        }
    }

    /// The largest activations a pass can have, in bytes.
    fn max_activation_bytes(&self) -> usize {
        match self {
            Source::File(model) => model.max_activation_bytes(),
            Source::Fetch(_) => MAX_ACTIVATION_BYTES,
        }
    }

    fn check(&self, plan: &Plan) -> Result<(), RingError> {
        match self {
            Source::File(model) => model.check(plan),
            Source::Fetch(_) => check_executable(plan),
        }
    }
}

/// A worker: a model, and at most one session.
pub struct Worker<N: Network> {
    network: N,
    source: Source,
    options: WorkerOptions,
    /// Whether a session has it.
    taken: Arc<Mutex<bool>>,
    door: SharedDoor,
}

impl<N: Network> Clone for Worker<N> {
    fn clone(&self) -> Self {
        Self {
            network: self.network.clone(),
            source: self.source.clone(),
            options: self.options.clone(),
            taken: self.taken.clone(),
            door: self.door.clone(),
        }
    }
}

/// Binds an address, and refuses one that other machines can reach unless a key keeps strangers out.
pub async fn bind<N: Network>(network: &N, address: &str) -> Result<N::Listener, RingError> {
    let host = address.rsplit_once(':').map_or(address, |(host, _)| host).trim_matches(['[', ']']);
    let loopback = host == "localhost" || host.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback());
    if !loopback && !network.is_sealed() {
        return Err(RingError::NotLoopback { address: address.into() });
    }
    network
        .bind(address)
        .await
        .map_err(|error| RingError::CannotListen { address: address.into(), why: error.to_string() })
}

impl<N: Network> Worker<N> {
    /// A worker with a model that computes with so many threads; 0 takes every core.
    pub fn new(network: N, model: Arc<LocalModel>, threads: usize) -> Self {
        Self::with(network, Source::File(model), WorkerOptions { threads, ..WorkerOptions::default() })
    }

    /// A worker with a model, or one that fetches its layers.
    pub fn with(network: N, source: Source, options: WorkerOptions) -> Self {
        Self { network, source, options, taken: Arc::default(), door: Arc::default() }
    }

    /// Serves connections until the listener fails. `report` gets a line for each session's end.
    pub async fn serve(
        &self,
        mut listener: N::Listener,
        report: impl Fn(Result<(), RingError>) + Clone + Send + Sync + 'static,
    ) -> RingError {
        let mut failures = 0;
        let mut strangers = Strangers::default();
        loop {
            let stream = match listener.accept().await {
                Ok(stream) => stream,
                Err(error) if failures < MAX_ACCEPT_FAILURES => {
                    // A peer that gave up, or too many open files for a moment.
                    failures += 1;
                    report(Err(RingError::CannotListen {
                        address: listener.address(),
                        why: error.to_string(),
                    }));
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                    continue;
                }
                Err(error) => {
                    let address = listener.address();
                    return RingError::CannotListen { address, why: error.to_string() };
                }
            };
            failures = 0;
            let (worker, report) = (self.clone(), report.clone());
            strangers.let_in(move |known| async move { report(worker.connection(stream, known).await) });
        }
    }

    async fn connection(&self, mut stream: N::Stream, known: Known) -> Result<(), RingError> {
        let (session, purpose) = hear(&mut stream).await?;
        known.greeted();
        match purpose {
            Purpose::Control => self.control(stream, session).await,
            Purpose::Data { from, epoch } => {
                let most = self.source.max_activation_bytes();
                admit(stream, &self.door, session, (from, epoch), most).await
            }
            Purpose::Probe => answer_probes(stream).await,
            Purpose::Fetch => Err(refuse(&mut stream, "only a head gives layers".into()).await),
        }
    }

    async fn control(&self, mut stream: N::Stream, id: u64) -> Result<(), RingError> {
        // A head that has just said goodbye may be followed at once by the next.
        let entering = async {
            while !self.enter() {
                tokio::time::sleep(ENTER_STEP).await;
            }
        };
        if timeout(ENTER_DEADLINE, entering).await.is_err() {
            let reason = "this worker is in another head's session; wait or stop that one".into();
            return Err(refuse(&mut stream, reason).await);
        }
        // However the session ends, a panic included, the worker is free again.
        let _seat = Seat { taken: self.taken.clone(), door: self.door.clone() };
        let (said, heard) = mpsc::unbounded_channel();
        let mut session = Session {
            worker: self,
            id,
            head: HeadLink::new(stream),
            prepared: watch::Sender::new(0),
            inbox: mpsc::unbounded_channel().0,
            events: None,
            before: Before::Nothing,
            said,
        };
        let ended = session.run(heard).await;
        if let Err(error) = &ended {
            // The head may be the reason why the session ends; then nobody reads this.
            let _ = session.head.send(Message::Refuse { reason: error.to_string() }).await;
        }
        let Session { before, prepared, inbox, .. } = session;
        drop((prepared, inbox));
        if let Before::Serving(serving) = before {
            let _ = timeout(DRAIN_DEADLINE, serving).await;
        }
        ended
    }

    /// Takes the one session, if it is free.
    fn enter(&self) -> bool {
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        !std::mem::replace(&mut *taken, true)
    }
}

/// A worker's one session; free again when this is dropped.
struct Seat {
    taken: Arc<Mutex<bool>>,
    door: SharedDoor,
}

impl Drop for Seat {
    fn drop(&mut self) {
        *self.door.lock().unwrap_or_else(PoisonError::into_inner) = None;
        *self.taken.lock().unwrap_or_else(PoisonError::into_inner) = false;
    }
}

/// A head's session with a worker.
struct Session<'a, N: Network> {
    worker: &'a Worker<N>,
    id: u64,
    head: HeadLink<N::Stream>,
    /// The epoch that was prepared last.
    prepared: watch::Sender<u32>,
    /// To the node of that epoch.
    inbox: mpsc::UnboundedSender<NodeEvent>,
    /// Its other end, until the plan is there.
    events: Option<mpsc::UnboundedReceiver<NodeEvent>>,
    before: Before,
    said: mpsc::UnboundedSender<Said>,
}

impl<N: Network> Session<'_, N> {
    /// Follows the head's orders until it says goodbye.
    async fn run(&mut self, mut heard: mpsc::UnboundedReceiver<Said>) -> Result<(), RingError> {
        self.head.send(Message::Welcome(self.worker.source.facts())).await?;
        loop {
            tokio::select! {
                biased;
                said = heard.recv() => {
                    if let Some(said) = said {
                        self.tell(said).await?;
                    }
                }
                ended = ended(&mut self.before) => {
                    // A node that has stopped because of an error has said it; one that panicked has not.
                    let node = ended.map_err(|_| {
                        strange("this worker's node", "it stopped; see the worker's output")
                    })?;
                    self.before = node.map_or(Before::Nothing, |node| Before::Idle(Box::new(node)));
                }
                frame = self.head.next() => {
                    if !self.follow(frame?).await? {
                        return Ok(());
                    }
                }
            }
        }
    }

    /// Carries an order out. False if it was the last.
    async fn follow(&mut self, frame: Frame) -> Result<bool, RingError> {
        match frame.message {
            Message::Goodbye => return Ok(false),
            Message::Ping { nonce } => self.head.send(Message::Pong { nonce, clock: wall_nanos() }).await?,
            Message::Prepare { epoch } => self.prepare(epoch).await?,
            Message::Configure { epoch, place, first_pass, head, receivers } => {
                let plan = self.plan(&frame.payload, place)?;
                self.configure(epoch, plan, (place, first_pass), head, receivers)?;
            }
            Message::Reset { epoch } => drop(self.inbox.send(NodeEvent::Reset { epoch })),
            Message::Collect => drop(self.inbox.send(NodeEvent::Collect)),
            other => return Err(strange("the head", &format!("{other:?} is no order"))),
        }
        Ok(true)
    }

    /// Tells the head what the node or a connection has to say.
    async fn tell(&mut self, said: Said) -> Result<(), RingError> {
        match said {
            Said::Ready(epoch) => self.head.send(Message::Ready { epoch }).await,
            Said::Lines(all) => self.report(all).await,
            Said::Cut(cut) if cut.epoch != *self.prepared.borrow() => Ok(()),
            Said::Cut(cut) => {
                self.head.send(Message::Cut { epoch: cut.epoch, peer: cut.peer, why: cut.why }).await
            }
            Said::Fetched(done, total) => self.head.send(Message::Fetching { done, total }).await,
            Said::Uploaded(done, total) => self.head.send(Message::Uploading { done, total }).await,
            Said::Failed(error) => Err(error),
        }
    }

    /// Stops what is under way and opens the door for the next ring.
    async fn prepare(&mut self, epoch: u32) -> Result<(), RingError> {
        if epoch <= *self.prepared.borrow() {
            return Err(strange("the head", &format!("it prepares for epoch {epoch} again")));
        }
        let (inbox, events) = mpsc::unbounded_channel();
        let deliver = deliver(inbox.clone(), self.said.clone());
        (self.inbox, self.events) = (inbox, Some(events));
        let door = Door { session: self.id, epoch, deliver };
        *self.worker.door.lock().unwrap_or_else(PoisonError::into_inner) = Some(door);
        self.prepared.send_replace(epoch);
        self.head.send(Message::Prepared { epoch }).await
    }

    /// Takes up a plan. What goes wrong from here on is said by the node.
    fn configure(
        &mut self,
        epoch: u32,
        plan: Arc<Plan>,
        (place, first_pass): (u16, u32),
        head: String,
        receivers: Vec<PeerAddress>,
    ) -> Result<(), RingError> {
        if epoch != *self.prepared.borrow() {
            return Err(strange("the head", "it configures another epoch than it prepared"));
        }
        let Some(events) = self.events.take() else {
            return Err(strange("the head", "it configures an epoch twice"));
        };
        let tenure = Tenure {
            network: self.worker.network.clone(),
            source: self.worker.source.clone(),
            head,
            threads: self.worker.options.threads,
            accelerator: self.worker.options.accelerator.clone(),
            session: self.id,
            epoch,
            place,
            first_pass,
            plan,
            receivers,
            events,
            deliver: deliver(self.inbox.clone(), self.said.clone()),
            prepared: self.prepared.subscribe(),
            said: self.said.clone(),
        };
        let before = std::mem::replace(&mut self.before, Before::Nothing);
        self.before = Before::Serving(self.worker.options.computing.spawn(tenure.serve(before)));
        Ok(())
    }

    fn plan(&self, payload: &[u8], place: u16) -> Result<Arc<Plan>, RingError> {
        let text = std::str::from_utf8(payload).map_err(|_| strange("the head", "its plan is not UTF-8"))?;
        let plan =
            Plan::from_yaml(text).map_err(|error| RingError::Plan(format!("the head's plan: {error}")))?;
        if place == 0 || usize::from(place) >= plan.devices.len() {
            return Err(strange("the head", "it names a place that its plan does not have"));
        }
        self.worker.source.check(&plan)?;
        Ok(Arc::new(plan))
    }

    async fn report(&mut self, all: Vec<(u32, Lines)>) -> Result<(), RingError> {
        let last = all.len().saturating_sub(1);
        for (index, (epoch, lines)) in all.iter().enumerate() {
            write_report(&mut self.head, *epoch, lines, index < last).await?;
        }
        Ok(())
    }
}

/// Hands what data connections bring to the node, and what becomes of them to the session.
fn deliver(inbox: mpsc::UnboundedSender<NodeEvent>, said: mpsc::UnboundedSender<Said>) -> Deliver {
    Arc::new(move |event| match event {
        DataEvent::Arrived(arrival) => inbox.send(NodeEvent::Arrived(arrival)).is_ok(),
        DataEvent::Cut(cut) => said.send(Said::Cut(cut)).is_ok(),
    })
}

/// The node that has stopped serving.
async fn ended(before: &mut Before) -> Result<Option<Node>, JoinError> {
    match before {
        Before::Serving(serving) => serving.await,
        Before::Nothing | Before::Idle(_) => std::future::pending().await,
    }
}

/// Records of a report frame; a record takes about 200 bytes.
const REPORT_LINES: usize = 10_000;

async fn write_report<S>(
    head: &mut HeadLink<S>,
    epoch: u32,
    lines: &Lines,
    more: bool,
) -> Result<(), RingError>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let mut records = lines.records.chunks(REPORT_LINES);
    let mut readings = lines.readings.chunks(REPORT_LINES);
    let mut next = || {
        let chunk = (records.next().unwrap_or_default(), readings.next().unwrap_or_default());
        (!chunk.0.is_empty() || !chunk.1.is_empty()).then_some(chunk)
    };
    let mut chunk = next();
    loop {
        let following = next();
        let payload = serde_json::to_vec(&chunk.unwrap_or_default())
            .map_err(|error| strange("this worker", &error.to_string()))?;
        let more = more || following.is_some();
        head.send(Frame { message: Message::Report { epoch, more }, payload }).await?;
        if following.is_none() {
            return Ok(());
        }
        chunk = following;
    }
}
