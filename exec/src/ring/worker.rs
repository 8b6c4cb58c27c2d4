//! How does a worker serve one head after another?
//!
//! It listens, and each connection first says what it is for. A head's control connection opens a
//! session: the worker tells what model it has, takes the plan and its place in it, connects to the
//! devices it sends to, and says ready. From then on activations that arrive from its neighbours go to
//! its node, which computes and sends on. The session ends when the head says goodbye, falls silent or
//! disappears; the worker then waits for the next.
//!
//! One session at a time: two heads would share its memory without knowing. Every wait has a deadline.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use hearth_profiles::Document;
use hearth_schema::Plan;
use hearth_schema::schedule::{Pass, Schedule};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;

use crate::clock::wall_nanos;
use crate::ring::LocalModel;
use crate::ring::deadline::{WRITE_DEADLINE, within};
use crate::ring::error::{RingError, strange};
use crate::ring::head_link::HeadLink;
use crate::ring::network::{Listener, Network};
use crate::ring::node::Node;
use crate::ring::recorder::Lines;
use crate::ring::wire::{
    Frame, MAGIC, MAX_DOCUMENT_PAYLOAD, Message, PROTOCOL, PeerAddress, Purpose, WorkerFacts,
};

/// From a connection's first byte to its first frame.
const HELLO_DEADLINE: Duration = Duration::from_secs(5);
/// For the session before to end: its threads stop, its memory is given back.
const ENTER_DEADLINE: Duration = Duration::from_secs(5);
/// Between two looks whether it has.
const ENTER_STEP: Duration = Duration::from_millis(5);
/// From the head's hello to its plan.
const CONFIGURE_DEADLINE: Duration = Duration::from_secs(30);
/// For a neighbour to be there.
const NEIGHBOUR_DEADLINE: Duration = Duration::from_secs(10);
/// Between two exchanges of a link measurement.
const PROBE_DEADLINE: Duration = Duration::from_secs(10);
/// After a connection that could not be accepted.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// In a row, after which the listener counts as broken: half a minute.
const MAX_ACCEPT_FAILURES: u32 = 300;
/// From a neighbour's hanging up to when that counts as a failure.
const HANG_UP_GRACE: Duration = Duration::from_secs(1);
/// For the node to finish the step at hand when a session ends: a layer's worth of disk reads.
const DRAIN_DEADLINE: Duration = Duration::from_mins(1);

/// What a node is told.
#[derive(Debug)]
pub enum NodeEvent {
    /// Activations are there.
    Arrived {
        /// The sender's place in the ring, as it says.
        from: u16,
        /// Whose.
        pass: Pass,
        /// The round to take up.
        round: u32,
        /// f32 `[tokens, embedding]`, little-endian.
        activations: Vec<u8>,
        /// When the last byte was there, on this process's clock.
        at: u64,
    },
    /// A new sequence begins.
    Reset(oneshot::Sender<()>),
    /// The trace is wanted.
    Collect(oneshot::Sender<Lines>),
    /// A neighbour broke the protocol or disappeared.
    Failed(RingError),
    /// The session is over.
    Stop,
}

/// The session that a worker is in.
struct Session {
    id: u64,
    inbox: mpsc::UnboundedSender<NodeEvent>,
}

/// A worker: a model, and at most one session.
pub struct Worker<N: Network> {
    network: N,
    model: Arc<LocalModel>,
    threads: usize,
    session: Arc<Mutex<Option<Session>>>,
}

impl<N: Network> Clone for Worker<N> {
    fn clone(&self) -> Self {
        Self {
            network: self.network.clone(),
            model: self.model.clone(),
            threads: self.threads,
            session: self.session.clone(),
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
        Self { network, model, threads, session: Arc::default() }
    }

    /// Serves connections until the listener fails. `report` gets a line for each session's end.
    pub async fn serve(
        &self,
        mut listener: N::Listener,
        report: impl Fn(Result<(), RingError>) + Clone + Send + Sync + 'static,
    ) -> RingError {
        let mut failures = 0;
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
            tokio::spawn(async move { report(worker.connection(stream).await) });
        }
    }

    async fn connection(&self, mut stream: N::Stream) -> Result<(), RingError> {
        let hello = within(HELLO_DEADLINE, "a connection's first frame", Frame::read(&mut stream, 0)).await?;
        let hello = hello.map_err(|error| RingError::greeting("a stranger", error))?;
        let Some(Frame { message: Message::Hello { magic, protocol, session, purpose }, .. }) = hello else {
            return Err(strange("a connection", "its first frame is no hello"));
        };
        if magic != MAGIC || protocol != PROTOCOL {
            let reason =
                format!("this worker speaks protocol {PROTOCOL} of hearth, not {protocol}; use one version");
            return refuse(&mut stream, reason).await;
        }
        match purpose {
            Purpose::Control => self.control(stream, session).await,
            Purpose::Data { from } => self.data(stream, session, from).await,
            Purpose::Probe => probe(stream).await,
        }
    }

    /// Takes activations from a neighbour and hands them to the node.
    async fn data(&self, mut stream: N::Stream, session: u64, from: u16) -> Result<(), RingError> {
        let inbox = {
            let current = self.session.lock().unwrap_or_else(PoisonError::into_inner);
            current.as_ref().filter(|current| current.id == session).map(|current| current.inbox.clone())
        };
        let Some(inbox) = inbox else {
            return refuse(&mut stream, "this worker is not in that session".into()).await;
        };
        Frame::from(Message::Welcome(WorkerFacts::default())).write(&mut stream).await?;
        receive_activations(stream, inbox, self.model.max_activation_bytes(), from).await;
        Ok(())
    }

    async fn control(&self, mut stream: N::Stream, session: u64) -> Result<(), RingError> {
        let (inbox, events) = mpsc::unbounded_channel();
        // A head that has just said goodbye may be followed at once by the next.
        let entering = async {
            while !self.enter(session, &inbox) {
                tokio::time::sleep(ENTER_STEP).await;
            }
        };
        if timeout(ENTER_DEADLINE, entering).await.is_err() {
            let reason = "this worker is in another head's session; wait or stop that one".into();
            return refuse(&mut stream, reason).await;
        }
        // However the session ends, a panic included, the worker is free again.
        let _seat = Seat(self.session.clone());
        let mut head = HeadLink::new(stream);
        let ended = self.session_of(&mut head, session, inbox, events).await;
        if let Err(error) = &ended {
            // The head may be the reason why the session ends; then nobody reads this.
            let _ = head.send(Message::Refuse { reason: error.to_string() }).await;
        }
        ended
    }

    /// Takes the one session, if it is free.
    fn enter(&self, id: u64, inbox: &mpsc::UnboundedSender<NodeEvent>) -> bool {
        let mut current = self.session.lock().unwrap_or_else(PoisonError::into_inner);
        let free = current.is_none();
        if free {
            *current = Some(Session { id, inbox: inbox.clone() });
        }
        free
    }

    async fn session_of(
        &self,
        head: &mut HeadLink<N::Stream>,
        session: u64,
        inbox: mpsc::UnboundedSender<NodeEvent>,
        events: mpsc::UnboundedReceiver<NodeEvent>,
    ) -> Result<(), RingError> {
        head.send(Message::Welcome(self.model.facts())).await?;
        let configure = within(CONFIGURE_DEADLINE, "the head's plan", head.next()).await??;
        let Frame { message: Message::Configure { place, receivers }, payload } = configure else {
            return Err(strange("the head", &format!("{:?} where its plan was due", configure.message)));
        };
        let node = head.while_doing(self.node(&payload, place, session, &receivers)).await??;
        let (failed, mut failure) = oneshot::channel();
        let thread = tokio::task::spawn_blocking(move || {
            if let Err(error) = run(node, events) {
                let _ = failed.send(error);
            }
        });
        head.send(Message::Ready).await?;
        let ended = orders(head, &inbox, &mut failure).await;
        let _ = inbox.send(NodeEvent::Stop);
        let _ = timeout(DRAIN_DEADLINE, thread).await;
        ended
    }

    /// Makes the node: its neighbours first, then its layers and caches, which takes seconds if they are large.
    async fn node(
        &self,
        payload: &[u8],
        place: u16,
        session: u64,
        receivers: &[PeerAddress],
    ) -> Result<Node, RingError> {
        let plan = self.plan(payload, place)?;
        let outbox = self.connect_neighbours(&plan, place, session, receivers).await?;
        let (threads, model) = (self.threads, self.model.clone());
        let node = tokio::task::spawn_blocking(move || {
            Node::new(&plan, usize::from(place), &model, threads, outbox)
        });
        node.await.map_err(|error| strange("this worker's node", &error.to_string()))?
    }

    fn plan(&self, payload: &[u8], place: u16) -> Result<Arc<Plan>, RingError> {
        let text = std::str::from_utf8(payload).map_err(|_| strange("the head", "its plan is not UTF-8"))?;
        let plan =
            Plan::from_yaml(text).map_err(|error| RingError::Plan(format!("the head's plan: {error}")))?;
        if place == 0 || usize::from(place) >= plan.devices.len() {
            return Err(strange("the head", "it names a place that its plan does not have"));
        }
        self.model.check(&plan)?;
        Ok(Arc::new(plan))
    }

    async fn connect_neighbours(
        &self,
        plan: &Arc<Plan>,
        place: u16,
        session: u64,
        receivers: &[PeerAddress],
    ) -> Result<BTreeMap<usize, mpsc::UnboundedSender<Frame>>, RingError> {
        let mut outbox = BTreeMap::new();
        for to in Schedule::new(plan.clone(), usize::from(place)).receivers() {
            let address = receivers.iter().find(|peer| usize::from(peer.place) == to);
            let Some(address) = address else {
                return Err(strange("the head", "its plan needs a neighbour that it gives no address of"));
            };
            let name = &plan.devices[to].name;
            let link = connect_data(&self.network, name, &address.address, session, place).await?;
            outbox.insert(to, link);
        }
        Ok(outbox)
    }
}

/// A worker's one session; free again when this is dropped.
struct Seat(Arc<Mutex<Option<Session>>>);

impl Drop for Seat {
    fn drop(&mut self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}

/// Follows the head's orders until it says goodbye.
async fn orders<S>(
    head: &mut HeadLink<S>,
    inbox: &mpsc::UnboundedSender<NodeEvent>,
    failure: &mut oneshot::Receiver<RingError>,
) -> Result<(), RingError>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    loop {
        let frame = tokio::select! {
            frame = head.next() => frame?,
            error = &mut *failure => return Err(stopped(error)),
        };
        match frame.message {
            Message::Goodbye => return Ok(()),
            Message::Reset => {
                ask(inbox, failure, NodeEvent::Reset).await?;
                head.send(Message::Ready).await?;
            }
            Message::Collect => {
                let lines = ask(inbox, failure, NodeEvent::Collect).await?;
                write_report(head, &lines).await?;
            }
            other => return Err(strange("the head", &format!("{other:?} is no order"))),
        }
    }
}

/// Why the node's thread has ended, as far as it could tell.
fn stopped(error: Result<RingError, oneshot::error::RecvError>) -> RingError {
    error.unwrap_or_else(|_| strange("this worker's node", "it stopped; see the worker's output"))
}

/// Asks the node for something and waits for its answer, or for its failure.
async fn ask<T>(
    inbox: &mpsc::UnboundedSender<NodeEvent>,
    failure: &mut oneshot::Receiver<RingError>,
    event: impl FnOnce(oneshot::Sender<T>) -> NodeEvent,
) -> Result<T, RingError> {
    let (answer, answered) = oneshot::channel();
    let _ = inbox.send(event(answer));
    tokio::select! {
        biased;
        error = failure => Err(stopped(error)),
        answer = answered => answer.map_err(|_| strange("this worker's node", "it stopped")),
    }
}

/// The node's thread: takes events until the session drops the inbox or something fails.
fn run(mut node: Node, mut events: mpsc::UnboundedReceiver<NodeEvent>) -> Result<(), RingError> {
    while let Some(event) = events.blocking_recv() {
        match event {
            NodeEvent::Arrived { from, pass, round, activations, at } => {
                node.arrived(pass, round, &activations, at, from)?;
            }
            NodeEvent::Reset(done) => {
                node.reset(None);
                let _ = done.send(());
            }
            NodeEvent::Collect(lines) => {
                let _ = lines.send(node.take_lines());
            }
            NodeEvent::Failed(error) => return Err(error),
            NodeEvent::Stop => break,
        }
    }
    Ok(())
}

/// Records of a report frame; a record takes about 200 bytes.
const REPORT_LINES: usize = 10_000;

async fn write_report<S>(head: &mut HeadLink<S>, lines: &Lines) -> Result<(), RingError>
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
        head.send(Frame { message: Message::Report { more: following.is_some() }, payload }).await?;
        if following.is_none() {
            return Ok(());
        }
        chunk = following;
    }
}

/// Reads activations until the connection ends, and tells the node how it ended.
pub async fn receive_activations<S>(
    mut stream: S,
    inbox: mpsc::UnboundedSender<NodeEvent>,
    max_payload: usize,
    from: u16,
) where
    S: AsyncRead + Unpin,
{
    let name = format!("device {from}");
    let error = loop {
        match Frame::read(&mut stream, max_payload).await {
            Ok(Some(Frame { message, payload })) => {
                let at = wall_nanos();
                let Message::Activations { pass, first_position, tokens, output, round } = message else {
                    break strange(&name, "it sent something else than activations");
                };
                let pass = Pass::plain(pass, first_position, tokens, output);
                if inbox.send(NodeEvent::Arrived { from, pass, round, activations: payload, at }).is_err() {
                    return;
                }
            }
            Ok(None) => {
                // The usual end of a session, which the head is about to announce, or already has.
                tokio::time::sleep(HANG_UP_GRACE).await;
                break RingError::Gone { name, why: "it hung up".into() };
            }
            Err(error) => break RingError::Gone { name, why: error.to_string() },
        }
    };
    let _ = inbox.send(NodeEvent::Failed(error));
}

/// Connects to a neighbour for activations; what is sent into the channel is written to it.
pub async fn connect_data<N: Network>(
    network: &N,
    name: &str,
    address: &str,
    session: u64,
    place: u16,
) -> Result<mpsc::UnboundedSender<Frame>, RingError> {
    let unreachable = |error: std::io::Error| RingError::Unreachable {
        name: name.into(),
        address: address.into(),
        why: error.to_string(),
    };
    let connect = async {
        let mut stream = network.connect(address).await.map_err(unreachable)?;
        let purpose = Purpose::Data { from: place };
        let hello = Message::Hello { magic: MAGIC, protocol: PROTOCOL, session, purpose };
        let greeting = |error| RingError::greeting(name, error);
        Frame::from(hello).write(&mut stream).await.map_err(greeting)?;
        match Frame::read(&mut stream, 0).await.map_err(greeting)? {
            Some(Frame { message: Message::Welcome(_), .. }) => Ok(stream),
            Some(Frame { message: Message::Refuse { reason }, .. }) => {
                Err(RingError::Refused { name: name.into(), reason })
            }
            _ => Err(strange(name, "its first frame is no welcome")),
        }
    };
    let mut stream = within(NEIGHBOUR_DEADLINE, "connecting to a neighbour", connect).await??;
    let (sender, mut frames) = mpsc::unbounded_channel::<Frame>();
    tokio::spawn(async move {
        while let Some(frame) = frames.recv().await {
            if !matches!(timeout(WRITE_DEADLINE, frame.write(&mut stream)).await, Ok(Ok(()))) {
                return;
            }
        }
    });
    Ok(sender)
}

/// Answers a link measurement: every ping, however long, with a short pong.
pub(super) async fn probe<S>(mut stream: S) -> Result<(), RingError>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    Frame::from(Message::Welcome(WorkerFacts::default())).write(&mut stream).await?;
    loop {
        let frame =
            within(PROBE_DEADLINE, "a probe", Frame::read(&mut stream, MAX_DOCUMENT_PAYLOAD)).await??;
        match frame.map(|frame| frame.message) {
            Some(Message::Ping { nonce }) => {
                Frame::from(Message::Pong { nonce, clock: wall_nanos() }).write(&mut stream).await?;
            }
            _ => return Ok(()),
        }
    }
}

async fn refuse<S>(stream: &mut S, reason: String) -> Result<(), RingError>
where
    S: AsyncWrite + Unpin,
{
    Frame::from(Message::Refuse { reason: reason.clone() }).write(stream).await?;
    Err(RingError::Refused { name: "this worker".into(), reason })
}
