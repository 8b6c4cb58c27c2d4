//! A worker's part in one epoch of a session.
//!
//! It lasts from the plan until the head has the worker prepare for another epoch: it waits for the runner of the
//! previous epoch, connects to those it sends to, takes up its layers, reports that it is ready, and computes what
//! arrives. When the next epoch is prepared it stops after the current step and hands its runner on.
//!
//! Not here: the head's orders ([`super::session`]).

use std::sync::Arc;

use hearth_core::schedule::Schedule;
use hearth_schema::Plan;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;

use super::model_source::{LayerFetcher, ModelSource};
use crate::error::{RingError, protocol_error};
use crate::execution::LocalModel;
use crate::execution::TraceLines;
use crate::execution::{Outbox, StageRunner};
use crate::wire::PeerAddress;
use crate::wire::Transport;
use crate::wire::{BrokenLink, DataConnector, DataSink, ReceivedActivations};
use hearth_runtime::accelerator::{Accelerator, Progress};

/// An event for the runner of an epoch.
#[derive(Debug)]
pub enum RunnerEvent {
    Activations(ReceivedActivations),
    /// A new request begins.
    Reset {
        epoch: u32,
    },
    /// The trace is wanted.
    CollectTrace,
}

/// A report of an epoch to the head.
#[derive(Debug)]
pub enum EpochReport {
    /// Ready for the passes of this epoch.
    Ready(u32),
    /// The trace, epoch by epoch.
    Trace(Vec<(u32, TraceLines)>),
    /// A connection broke.
    LinkBroken(BrokenLink),
    /// Bytes fetched, and bytes to fetch.
    Fetched(u64, u64),
    /// Bytes on the GPU, and bytes in total.
    Uploaded(u64, u64),
    /// The worker cannot continue.
    Failed(RingError),
}

/// A worker's part in one ring.
pub struct WorkerEpoch<T> {
    pub(super) transport: T,
    pub(super) source: ModelSource,
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
    pub(super) events: mpsc::UnboundedReceiver<RunnerEvent>,
    pub(super) sink: DataSink,
    /// The epoch that was prepared last.
    pub(super) prepared: watch::Receiver<u32>,
    pub(super) reports: mpsc::UnboundedSender<EpochReport>,
}

/// The runner of the previous epoch, if there is one.
pub enum PreviousRunner {
    None,
    /// The runner may still compute.
    Running(JoinHandle<Option<StageRunner>>),
    Idle(Box<StageRunner>),
}

impl<T: Transport> WorkerEpoch<T> {
    /// Serves until another epoch is prepared or the session ends. Returns its runner.
    pub async fn serve(mut self, previous: PreviousRunner) -> Option<StageRunner> {
        let previous = match previous {
            PreviousRunner::None => None,
            PreviousRunner::Idle(runner) => Some(*runner),
            PreviousRunner::Running(serving) => serving.await.ok().flatten(),
        };
        let Some(model) = self.model().await else { return previous };
        let model = match model {
            Ok(model) => model,
            Err(error) => {
                let _ = self.reports.send(EpochReport::Failed(error));
                return None;
            }
        };
        let Some(outbox) = self.connect_neighbours().await else { return previous };
        let runner = match previous {
            Some(runner) => {
                runner.reconfigure(&self.plan, self.first_pass, &model, outbox, self.epoch, &self.progress())
            }
            None => self.new_runner(&model, outbox),
        };
        let mut runner = match runner {
            Ok(runner) => runner,
            Err(error) => {
                let _ = self.reports.send(EpochReport::Failed(error));
                return None;
            }
        };
        let _ = self.reports.send(EpochReport::Ready(self.epoch));
        loop {
            let event = tokio::select! {
                biased;
                () = superseded(&mut self.prepared, self.epoch) => return Some(runner),
                event = self.events.recv() => event,
            };
            let Some(event) = event else { return Some(runner) };
            if let Err(error) = self.take(&mut runner, event) {
                let _ = self.reports.send(EpochReport::Failed(error));
                return None;
            }
        }
    }

    /// The model, or of it what this place needs. None if another epoch is prepared meanwhile.
    async fn model(&mut self) -> Option<Result<Arc<LocalModel>, RingError>> {
        let folder = match &self.source {
            ModelSource::File(model) => return Some(Ok(model.clone())),
            ModelSource::Fetch(folder) => folder,
        };
        let fetch = LayerFetcher {
            transport: &self.transport,
            head: &self.head,
            session: self.session,
            plan: &self.plan,
            place: usize::from(self.place),
            folder,
            accelerator: self.accelerator.as_ref(),
        };
        let reports = self.reports.clone();
        let progress = move |done, total| drop(reports.send(EpochReport::Fetched(done, total)));
        tokio::select! {
            biased;
            () = superseded(&mut self.prepared, self.epoch) => None,
            fetched = fetch.model(progress) => Some(fetched.map(Arc::new)),
        }
    }

    /// Tells the head how far the GPU's layers have come.
    fn progress(&self) -> Progress {
        let reports = self.reports.clone();
        Progress::new(move |done, total| drop(reports.send(EpochReport::Uploaded(done, total))))
    }

    fn new_runner(&self, model: &LocalModel, outbox: Outbox) -> Result<StageRunner, RingError> {
        let place = usize::from(self.place);
        let mut runner =
            StageRunner::new(&self.plan, place, model, self.threads, outbox, self.epoch, &self.progress())?;
        runner.set_first_pass(self.first_pass)?;
        Ok(runner)
    }

    fn take(&self, runner: &mut StageRunner, event: RunnerEvent) -> Result<(), RingError> {
        match event {
            RunnerEvent::Activations(arrival) => {
                runner.receive(&arrival)?;
            }
            RunnerEvent::Reset { epoch } => {
                runner.reset(epoch, None);
                let _ = self.reports.send(EpochReport::Ready(epoch));
            }
            RunnerEvent::CollectTrace => {
                let _ = self.reports.send(EpochReport::Trace(runner.take_trace()));
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
                let _ = self.reports.send(EpochReport::Failed(protocol_error("the head", what)));
                return None;
            };
            let sending = DataConnector {
                transport: &self.transport,
                session: self.session,
                epoch: self.epoch,
                place: self.place,
                sink: &self.sink,
            };
            let connected = tokio::select! {
                biased;
                () = superseded(&mut self.prepared, self.epoch) => return None,
                connected = sending.connect(to as u16, &self.plan.devices[to].name, &address.address) => connected,
            };
            match connected {
                Ok(link) => drop(outbox.insert(to, link)),
                Err(error) => {
                    let cut = BrokenLink { epoch: self.epoch, peer: to as u16, reason: error.to_string() };
                    let _ = self.reports.send(EpochReport::LinkBroken(cut));
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
