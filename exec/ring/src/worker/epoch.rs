//! The work of a worker in one epoch of a session.
//!
//! It begins when the plan arrives: the worker waits for the runner of the previous epoch, connects to the devices
//! that it sends activations to, loads its layers, reports that it is ready, and computes the activations that
//! arrive. When the head prepares the next epoch, the worker stops after the current step and passes the runner on.
//!
//! Not here: the head's commands ([`super::session`]).

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
use hearth_runtime::backend_factory::{BackendFactory, UploadProgress};

/// An event for the runner of an epoch.
#[derive(Debug)]
pub enum RunnerEvent {
    Activations(ReceivedActivations),
    /// A new request begins.
    Reset {
        epoch: u32,
    },
    /// The head requests the trace.
    CollectTrace,
}

/// A report of an epoch to the head.
#[derive(Debug)]
pub enum EpochReport {
    /// The worker is ready for the passes of this epoch.
    Ready(u32),
    /// The trace lines of each epoch.
    Trace(Vec<(u32, TraceLines)>),
    /// A data connection broke.
    LinkBroken(BrokenLink),
    /// The progress of fetching layers: bytes fetched so far, and bytes to fetch.
    Fetched(u64, u64),
    /// The progress of the upload to the GPU: bytes uploaded so far, and bytes to upload.
    Uploaded(u64, u64),
    /// The worker cannot continue.
    Failed(RingError),
}

/// The state of a worker in one epoch.
pub struct WorkerEpoch<T> {
    pub(super) transport: T,
    pub(super) source: ModelSource,
    /// The address at which the head serves layers.
    pub(super) head_address: String,
    pub(super) threads: usize,
    pub(super) backend_factory: Option<BackendFactory>,
    pub(super) session: u64,
    pub(super) epoch: u32,
    pub(super) place: u16,
    pub(super) first_pass: u32,
    pub(super) plan: Arc<Plan>,
    pub(super) receivers: Vec<PeerAddress>,
    pub(super) events: mpsc::UnboundedReceiver<RunnerEvent>,
    pub(super) sink: DataSink,
    /// The latest prepared epoch.
    pub(super) prepared: watch::Receiver<u32>,
    pub(super) reports: mpsc::UnboundedSender<EpochReport>,
}

/// The runner of the previous epoch, if there is one.
pub enum PreviousRunner {
    None,
    /// The runner may still be computing.
    Running(JoinHandle<Option<StageRunner>>),
    Idle(Box<StageRunner>),
}

impl<T: Transport> WorkerEpoch<T> {
    /// Computes until another epoch is prepared or the session ends. Returns the runner, for the next epoch.
    pub async fn serve(mut self, previous: PreviousRunner) -> Option<StageRunner> {
        let previous = match previous {
            PreviousRunner::None => None,
            PreviousRunner::Idle(runner) => Some(*runner),
            PreviousRunner::Running(serving) => serving.await.ok().flatten(),
        };
        let Some(model) = self.load_model().await else { return previous };
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
            if let Err(error) = self.handle(&mut runner, event) {
                let _ = self.reports.send(EpochReport::Failed(error));
                return None;
            }
        }
    }

    /// Returns the model; a worker without a model file fetches its layers. Returns `None` if another epoch is
    /// prepared meanwhile.
    async fn load_model(&mut self) -> Option<Result<Arc<LocalModel>, RingError>> {
        let folder = match &self.source {
            ModelSource::File(model) => return Some(Ok(model.clone())),
            ModelSource::Fetch(folder) => folder,
        };
        let fetcher = LayerFetcher {
            transport: &self.transport,
            head_address: &self.head_address,
            session: self.session,
            plan: &self.plan,
            place: usize::from(self.place),
            folder,
            backend_factory: self.backend_factory.as_ref(),
        };
        let reports = self.reports.clone();
        let progress = move |done, total| drop(reports.send(EpochReport::Fetched(done, total)));
        tokio::select! {
            biased;
            () = superseded(&mut self.prepared, self.epoch) => None,
            fetched = fetcher.fetch(progress) => Some(fetched.map(Arc::new)),
        }
    }

    /// Returns the callback that reports the progress of the GPU upload to the head.
    fn progress(&self) -> UploadProgress {
        let reports = self.reports.clone();
        UploadProgress::new(move |done, total| drop(reports.send(EpochReport::Uploaded(done, total))))
    }

    fn new_runner(&self, model: &LocalModel, outbox: Outbox) -> Result<StageRunner, RingError> {
        let place = usize::from(self.place);
        let mut runner =
            StageRunner::new(&self.plan, place, model, self.threads, outbox, self.epoch, &self.progress())?;
        runner.set_first_pass(self.first_pass)?;
        Ok(runner)
    }

    fn handle(&self, runner: &mut StageRunner, event: RunnerEvent) -> Result<(), RingError> {
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

    /// Connects to the devices that this worker sends activations to. Returns `None` if another epoch is prepared
    /// meanwhile, or after a failure, which is reported to the head.
    async fn connect_neighbours(&mut self) -> Option<Outbox> {
        let mut outbox = Outbox::new();
        for to in Schedule::new(self.plan.clone(), usize::from(self.place)).receivers() {
            let address = self.receivers.iter().find(|peer| usize::from(peer.place) == to);
            let Some(address) = address else {
                let what = "it did not send the address of a neighbour in its plan";
                let _ = self.reports.send(EpochReport::Failed(protocol_error("the head", what)));
                return None;
            };
            let connector = DataConnector {
                transport: &self.transport,
                session: self.session,
                epoch: self.epoch,
                place: self.place,
                sink: &self.sink,
            };
            let connected = tokio::select! {
                biased;
                () = superseded(&mut self.prepared, self.epoch) => return None,
                connected = connector.connect(to as u16, &self.plan.devices[to].name, &address.address) => connected,
            };
            match connected {
                Ok(link) => drop(outbox.insert(to, link)),
                Err(error) => {
                    let broken = BrokenLink { epoch: self.epoch, peer: to as u16, reason: error.to_string() };
                    let _ = self.reports.send(EpochReport::LinkBroken(broken));
                    return None;
                }
            }
        }
        Some(outbox)
    }
}

/// Waits until another epoch is prepared or the session has ended.
async fn superseded(prepared: &mut watch::Receiver<u32>, epoch: u32) {
    // An error means that the session has ended.
    let _ = prepared.wait_for(|&newest| newest != epoch).await;
}
