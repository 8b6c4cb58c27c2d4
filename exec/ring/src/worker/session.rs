//! A head's session with a worker: follows the head's orders until it says goodbye.

use std::sync::{Arc, PoisonError};
use std::time::Duration;

use hearth_profiles::Document;
use hearth_schema::Plan;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinError;
use tokio::time::timeout;

use super::epoch::{Before, NodeEvent, Said, Tenure};
use super::head_link::HeadLink;
use super::model_source::Source;
use crate::error::{RingError, strange};
use crate::execution::{Computing, Lines, Node};
use crate::wire::{DataEvent, Deliver, Door, Frame, Message, Network, PeerAddress, SharedDoor};
use hearth_runtime::accelerator::Accelerator;
use hearth_runtime::clock::wall_nanos;

/// For the node to finish the step at hand when a session ends: a layer's worth of disk reads.
const DRAIN_DEADLINE: Duration = Duration::from_mins(1);

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

/// A head's session with a worker.
pub(super) struct Session<N: Network> {
    network: N,
    source: Source,
    options: WorkerOptions,
    door: SharedDoor,
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
    heard: mpsc::UnboundedReceiver<Said>,
}

impl<N: Network> Session<N> {
    /// A session whose hello has been read; no epoch is prepared.
    pub(super) fn new(
        id: u64,
        head: HeadLink<N::Stream>,
        network: N,
        source: Source,
        options: WorkerOptions,
        door: SharedDoor,
    ) -> Self {
        let (said, heard) = mpsc::unbounded_channel();
        Self {
            network,
            source,
            options,
            door,
            id,
            head,
            prepared: watch::Sender::new(0),
            inbox: mpsc::unbounded_channel().0,
            events: None,
            before: Before::Nothing,
            said,
            heard,
        }
    }

    /// Serves the head until the session ends and the node has stopped.
    pub(super) async fn serve(mut self) -> Result<(), RingError> {
        let ended = self.run().await;
        if let Err(error) = &ended {
            // The head may be the reason why the session ends; then nobody reads this.
            let _ = self.head.send(Message::Refuse { reason: error.to_string() }).await;
        }
        let Session { before, prepared, inbox, .. } = self;
        drop((prepared, inbox));
        if let Before::Serving(serving) = before {
            let _ = timeout(DRAIN_DEADLINE, serving).await;
        }
        ended
    }

    /// Follows the head's orders until it says goodbye.
    async fn run(&mut self) -> Result<(), RingError> {
        self.head.send(Message::Welcome(self.source.facts())).await?;
        loop {
            tokio::select! {
                biased;
                said = self.heard.recv() => {
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
        *self.door.lock().unwrap_or_else(PoisonError::into_inner) = Some(door);
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
            network: self.network.clone(),
            source: self.source.clone(),
            head,
            threads: self.options.threads,
            accelerator: self.options.accelerator.clone(),
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
        self.before = Before::Serving(self.options.computing.spawn(tenure.serve(before)));
        Ok(())
    }

    fn plan(&self, payload: &[u8], place: u16) -> Result<Arc<Plan>, RingError> {
        let text = std::str::from_utf8(payload).map_err(|_| strange("the head", "its plan is not UTF-8"))?;
        let plan =
            Plan::from_yaml(text).map_err(|error| RingError::Plan(format!("the head's plan: {error}")))?;
        if place == 0 || usize::from(place) >= plan.devices.len() {
            return Err(strange("the head", "it names a place that its plan does not have"));
        }
        self.source.check(&plan)?;
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
