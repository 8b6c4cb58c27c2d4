//! What does a worker do in one ring of a session?
//!
//! From the plan that it is given until the head has it prepare for another epoch: it waits for the node of the ring
//! before, connects to those it sends to, takes up its layers, says ready, and computes what arrives. When the next
//! epoch is prepared it stops after the step at hand and hands its node on.
//!
//! Not here: the head's orders ([`crate::worker`]).

use std::sync::Arc;

use hearth_core::schedule::Schedule;
use hearth_schema::Plan;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;

use super::model_source::{Fetch, Source};
use crate::error::{RingError, strange};
use crate::execution::Lines;
use crate::execution::LocalModel;
use crate::execution::{Node, Outbox};
use crate::wire::Network;
use crate::wire::PeerAddress;
use crate::wire::{Arrival, Cut, Deliver, Sending};
use hearth_runtime::accelerator::{Accelerator, Progress};

/// What a node is told.
#[derive(Debug)]
pub enum NodeEvent {
    /// Activations are there.
    Arrived(Arrival),
    /// A new request begins.
    Reset {
        /// Its epoch.
        epoch: u32,
    },
    /// The trace is wanted.
    Collect,
}

/// What the head is to be told.
#[derive(Debug)]
pub enum Said {
    /// The node is ready for the passes of this epoch.
    Ready(u32),
    /// The trace, epoch by epoch.
    Lines(Vec<(u32, Lines)>),
    /// A connection broke.
    Cut(Cut),
    /// So many bytes of so many have been fetched.
    Fetched(u64, u64),
    /// So many bytes of so many are on the GPU.
    Uploaded(u64, u64),
    /// The worker cannot go on.
    Failed(RingError),
}

/// A worker's part in one ring.
pub struct Tenure<N> {
    pub(super) network: N,
    pub(super) source: Source,
    /// Where the head gives layers.
    pub(super) head: String,
    pub(super) threads: usize,
    pub(super) accelerator: Option<Accelerator>,
    pub(super) session: u64,
    pub(super) epoch: u32,
    pub(super) place: u16,
    pub(super) first_pass: u32,
    pub(super) plan: Arc<Plan>,
    pub(super) receivers: Vec<PeerAddress>,
    pub(super) events: mpsc::UnboundedReceiver<NodeEvent>,
    pub(super) deliver: Deliver,
    /// The epoch that was prepared last.
    pub(super) prepared: watch::Receiver<u32>,
    pub(super) said: mpsc::UnboundedSender<Said>,
}

/// The node of the ring before, if there is one.
pub enum Before {
    /// None, or none any more.
    Nothing,
    /// It may still be in a step.
    Serving(JoinHandle<Option<Node>>),
    /// It waits.
    Idle(Box<Node>),
}

impl<N: Network> Tenure<N> {
    /// Serves until another epoch is prepared or the session ends. What is left is the node.
    pub async fn serve(mut self, before: Before) -> Option<Node> {
        let before = match before {
            Before::Nothing => None,
            Before::Idle(node) => Some(*node),
            Before::Serving(serving) => serving.await.ok().flatten(),
        };
        let Some(model) = self.model().await else { return before };
        let model = match model {
            Ok(model) => model,
            Err(error) => {
                let _ = self.said.send(Said::Failed(error));
                return None;
            }
        };
        let Some(outbox) = self.connect_neighbours().await else { return before };
        let node = match before {
            Some(node) => {
                node.renew(&self.plan, self.first_pass, &model, outbox, self.epoch, &self.progress())
            }
            None => self.new_node(&model, outbox),
        };
        let mut node = match node {
            Ok(node) => node,
            Err(error) => {
                let _ = self.said.send(Said::Failed(error));
                return None;
            }
        };
        let _ = self.said.send(Said::Ready(self.epoch));
        loop {
            let event = tokio::select! {
                biased;
                () = superseded(&mut self.prepared, self.epoch) => return Some(node),
                event = self.events.recv() => event,
            };
            let Some(event) = event else { return Some(node) };
            if let Err(error) = self.take(&mut node, event) {
                let _ = self.said.send(Said::Failed(error));
                return None;
            }
        }
    }

    /// The model, or of it what this place needs. None if another epoch is prepared meanwhile.
    async fn model(&mut self) -> Option<Result<Arc<LocalModel>, RingError>> {
        let folder = match &self.source {
            Source::File(model) => return Some(Ok(model.clone())),
            Source::Fetch(folder) => folder,
        };
        let fetch = Fetch {
            network: &self.network,
            head: &self.head,
            session: self.session,
            plan: &self.plan,
            place: usize::from(self.place),
            folder,
            accelerator: self.accelerator.as_ref(),
        };
        let said = self.said.clone();
        let progress = move |done, total| drop(said.send(Said::Fetched(done, total)));
        tokio::select! {
            biased;
            () = superseded(&mut self.prepared, self.epoch) => None,
            fetched = fetch.model(progress) => Some(fetched.map(Arc::new)),
        }
    }

    /// Tells the head how far the GPU's layers have come.
    fn progress(&self) -> Progress {
        let said = self.said.clone();
        Progress::new(move |done, total| drop(said.send(Said::Uploaded(done, total))))
    }

    fn new_node(&self, model: &LocalModel, outbox: Outbox) -> Result<Node, RingError> {
        let place = usize::from(self.place);
        let mut node =
            Node::new(&self.plan, place, model, self.threads, outbox, self.epoch, &self.progress())?;
        node.begin_at(self.first_pass)?;
        Ok(node)
    }

    fn take(&self, node: &mut Node, event: NodeEvent) -> Result<(), RingError> {
        match event {
            NodeEvent::Arrived(arrival) => {
                node.arrived(&arrival)?;
            }
            NodeEvent::Reset { epoch } => {
                node.reset(epoch, None);
                let _ = self.said.send(Said::Ready(epoch));
            }
            NodeEvent::Collect => {
                let _ = self.said.send(Said::Lines(node.take_all_lines()));
            }
        }
        Ok(())
    }

    /// Connects to those it sends to. None if another epoch is prepared meanwhile, or one cannot be reached, which
    /// the head is told.
    async fn connect_neighbours(&mut self) -> Option<Outbox> {
        let mut outbox = Outbox::new();
        for to in Schedule::new(self.plan.clone(), usize::from(self.place)).receivers() {
            let address = self.receivers.iter().find(|peer| usize::from(peer.place) == to);
            let Some(address) = address else {
                let what = "its plan needs a neighbour that it gives no address of";
                let _ = self.said.send(Said::Failed(strange("the head", what)));
                return None;
            };
            let sending = Sending {
                network: &self.network,
                session: self.session,
                epoch: self.epoch,
                place: self.place,
                deliver: &self.deliver,
            };
            let connected = tokio::select! {
                biased;
                () = superseded(&mut self.prepared, self.epoch) => return None,
                connected = sending.connect(to as u16, &self.plan.devices[to].name, &address.address) => connected,
            };
            match connected {
                Ok(link) => drop(outbox.insert(to, link)),
                Err(error) => {
                    let cut = Cut { epoch: self.epoch, peer: to as u16, why: error.to_string() };
                    let _ = self.said.send(Said::Cut(cut));
                    return None;
                }
            }
        }
        Some(outbox)
    }
}

/// Waits until another epoch than this is prepared, or the session has ended.
async fn superseded(prepared: &mut watch::Receiver<u32>, epoch: u32) {
    // An error says that nobody can prepare anything any more.
    let _ = prepared.wait_for(|&newest| newest != epoch).await;
}
