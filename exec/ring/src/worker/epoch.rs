//! The work of a worker in one epoch of a session.
//!
//! It begins when the plan arrives: the worker waits for the runner of the previous epoch, connects to the devices
//! that it sends activations to, loads its layers, reports that it is ready, and computes the activations that
//! arrive. When the head prepares the next epoch, the worker stops after the current step and passes the runner on.

use std::sync::Arc;

use hearth_core::schedule::Schedule;
use hearth_schema::Plan;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;

use super::model_source::{LayerFetcher, ModelSource};
use super::worker::Worker;
use crate::error::{RingError, protocol_error};
use crate::execution::{LocalModel, Outbox, StageRunner, TraceLines};
use crate::wire::{
    BrokenLink, DataConnector, DataSink, Message, PeerAddress, ReceivedActivations, Transport,
};
use hearth_runtime::backend_factory::UploadProgress;

/// An event for the runner of an epoch.
#[derive(Debug)]
pub enum RunnerEvent {
    /// Activations have arrived.
    Activations(ReceivedActivations),
    /// A new request begins.
    Reset { epoch: u32 },
    /// The head requests the trace.
    CollectTrace,
}

/// A report of an epoch to the head.
#[derive(Debug)]
pub enum EpochReport {
    /// A message for the head.
    Message(Message),
    /// The trace lines of each epoch.
    Trace(Vec<(u32, TraceLines)>),
    /// A data connection broke.
    LinkBroken(BrokenLink),
    /// The worker cannot continue.
    Failed(RingError),
}

/// The state of a worker in one epoch.
pub struct WorkerEpoch<T: Transport> {
    pub(super) worker: Worker<T>,
    pub(super) session: u64,
    pub(super) epoch: u32,
    pub(super) device_index: u16,
    pub(super) first_pass: u32,
    pub(super) plan: Arc<Plan>,
    /// The address at which the head serves layers.
    pub(super) head_address: String,
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
        let mut runner = match previous {
            PreviousRunner::None => None,
            PreviousRunner::Idle(runner) => Some(*runner),
            PreviousRunner::Running(serving) => serving.await.ok().flatten(),
        };
        match self.run(&mut runner).await {
            Ok(()) => runner,
            Err(error) => {
                self.report(EpochReport::Failed(error));
                None
            }
        }
    }

    /// Replaces the runner of the previous epoch, and computes until another epoch is prepared or the session ends.
    async fn run(&mut self, runner: &mut Option<StageRunner>) -> Result<(), RingError> {
        let Some(model) = self.load_model().await? else { return Ok(()) };
        let Some(outbox) = self.connect_neighbours().await? else { return Ok(()) };
        let progress = UploadProgress::new(self.progress(|done, total| Message::Uploading { done, total }));
        let (plan, epoch) = (&self.plan, self.epoch);
        let new = if let Some(previous) = runner.take() {
            previous.reconfigure(plan, self.first_pass, &model, outbox, epoch, &progress)?
        } else {
            let (index, threads) = (usize::from(self.device_index), self.worker.options.threads);
            let mut new = StageRunner::new(plan, index, &model, threads, outbox, epoch, &progress)?;
            new.set_first_pass(self.first_pass)?;
            new
        };
        let runner = runner.insert(new);
        self.report(EpochReport::Message(Message::Ready { epoch }));
        loop {
            let event = tokio::select! {
                biased;
                () = superseded(&mut self.prepared, epoch) => return Ok(()),
                event = self.events.recv() => event,
            };
            match event {
                None => return Ok(()),
                Some(RunnerEvent::Activations(received)) => drop(runner.receive(&received)?),
                Some(RunnerEvent::Reset { epoch }) => {
                    runner.reset(epoch, None);
                    self.report(EpochReport::Message(Message::Ready { epoch }));
                }
                Some(RunnerEvent::CollectTrace) => self.report(EpochReport::Trace(runner.take_trace())),
            }
        }
    }

    /// Returns a callback that reports progress, in bytes, to the head.
    fn progress(&self, message: fn(u64, u64) -> Message) -> impl Fn(u64, u64) + Send + Sync + use<T> {
        let reports = self.reports.clone();
        move |done, total| drop(reports.send(EpochReport::Message(message(done, total))))
    }

    fn report(&self, report: EpochReport) {
        // The receiver is closed when the session has ended.
        let _ = self.reports.send(report);
    }

    /// Returns the model, whose layers may have to be fetched, or `None` if another epoch is prepared meanwhile.
    async fn load_model(&mut self) -> Result<Option<Arc<LocalModel>>, RingError> {
        let folder = match &self.worker.source {
            ModelSource::File(model) => return Ok(Some(model.clone())),
            ModelSource::Fetch(folder) => folder,
        };
        let fetcher = LayerFetcher {
            transport: &self.worker.transport,
            head_address: &self.head_address,
            session: self.session,
            plan: &self.plan,
            device_index: usize::from(self.device_index),
            folder,
            backend_factory: self.worker.options.backend_factory.as_ref(),
        };
        let progress = self.progress(|done, total| Message::Fetching { done, total });
        tokio::select! {
            biased;
            () = superseded(&mut self.prepared, self.epoch) => Ok(None),
            fetched = fetcher.fetch(progress) => fetched.map(|model| Some(Arc::new(model))),
        }
    }

    /// Connects to the devices that this worker sends activations to. Returns `None` if another epoch is prepared
    /// meanwhile, or if a connection fails, which is reported to the head.
    async fn connect_neighbours(&mut self) -> Result<Option<Outbox>, RingError> {
        let connector = DataConnector {
            transport: &self.worker.transport,
            session: self.session,
            epoch: self.epoch,
            device_index: self.device_index,
            sink: &self.sink,
        };
        let mut outbox = Outbox::new();
        for to in Schedule::new(self.plan.clone(), usize::from(self.device_index)).receivers() {
            let peer = self.receivers.iter().find(|peer| usize::from(peer.device_index) == to);
            let Some(PeerAddress { address, .. }) = peer else {
                let what = "it did not send the address of a neighbour in its plan";
                return Err(protocol_error("the head", what));
            };
            let connected = tokio::select! {
                biased;
                () = superseded(&mut self.prepared, self.epoch) => return Ok(None),
                connected = connector.connect(to as u16, &self.plan.devices[to].name, address) => connected,
            };
            match connected {
                Ok(link) => drop(outbox.insert(to, link)),
                Err(error) => {
                    let broken = BrokenLink { epoch: self.epoch, peer: to as u16, reason: error.to_string() };
                    self.report(EpochReport::LinkBroken(broken));
                    return Ok(None);
                }
            }
        }
        Ok(Some(outbox))
    }
}

/// Waits until another epoch is prepared or the session has ended.
async fn superseded(prepared: &mut watch::Receiver<u32>, epoch: u32) {
    // An error means that the session has ended.
    let _ = prepared.wait_for(|&newest| newest != epoch).await;
}
