//! The work of a worker in one epoch of a session.
//!
//! The work begins when the plan arrives: the worker waits for the runner of the previous epoch, connects to the
//! devices that it sends activations to, loads its layers, reports that it is ready, and computes received activations.
//! When the head prepares the next epoch, the worker stops after the current step and passes the runner on.

use std::sync::Arc;

use hearth_core::schedule::Schedule;
use hearth_schema::Plan;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;

use super::model_source::ModelSource;
use super::worker::Worker;
use crate::error::{Result, RingError, protocol_error};
use crate::execution::{LocalModel, MAX_BATCHES_PER_DEVICE, Outbox, StageRunner, TraceLines};
use crate::wire::{
    ActivationCounters, BrokenLink, DataConnector, DataLinkEventSink, EpochConfig, Message, PeerAddress,
    ReceiveBudget, ReceivedActivations, Reservation, Transport,
};
use hearth_runtime::ExecError;
use hearth_runtime::backend_factory::UploadProgressReporter;

/// An event for the runner of an epoch. A command of the head occupies a part of the head's budget until it is
/// executed.
#[derive(Debug)]
pub enum RunnerEvent {
    /// Activations have arrived.
    Activations(ReceivedActivations),
    /// A new request begins.
    Reset { epoch: u32, _reservation: Reservation },
    /// The head requests the trace.
    CollectTrace { _reservation: Reservation },
}

/// A report of an epoch to the head.
#[derive(Debug)]
pub enum EpochReport {
    Message(Message),
    /// The trace lines of the request, by epoch.
    Trace(Vec<(u32, TraceLines)>),
    /// The worker cannot continue.
    Failed(RingError),
}

/// The state of a worker in one epoch.
pub struct WorkerEpoch<T: Transport> {
    pub(super) worker: Worker<T>,
    pub(super) session: u64,
    pub(super) config: EpochConfig,
    pub(super) plan: Arc<Plan>,
    pub(super) sink: DataLinkEventSink,
    /// Lets activations in as soon as the layers are loaded.
    pub(super) budget: ReceiveBudget,
    pub(super) counters: Arc<ActivationCounters>,
    /// The number of the epoch that was prepared last.
    pub(super) latest_epoch: watch::Receiver<u32>,
    pub(super) reports: mpsc::UnboundedSender<EpochReport>,
}

/// The runner of the previous epoch, if there is one.
pub enum PreviousRunner {
    /// The runner may still be computing.
    Running(JoinHandle<Option<StageRunner>>),
    Idle(Option<Box<StageRunner>>),
}

impl<T: Transport> WorkerEpoch<T> {
    /// Computes until another epoch is prepared or the session ends. Returns the runner, unless there was an error.
    pub async fn serve(
        self,
        previous: PreviousRunner,
        events: mpsc::UnboundedReceiver<RunnerEvent>,
    ) -> Option<StageRunner> {
        let mut runner = match previous {
            PreviousRunner::Idle(runner) => runner.map(|runner| *runner),
            PreviousRunner::Running(serving) => serving.await.ok().flatten(),
        };
        match self.run(&mut runner, events).await {
            Ok(()) => runner,
            // Another epoch is prepared, or the session has ended. The stage of the previous epoch is already gone, so the
            // next epoch loads its layers again, and the trace of the request has a gap.
            Err(RingError::Compute(ExecError::HashingStopped)) => None,
            Err(error) => {
                self.report(EpochReport::Failed(error));
                None
            }
        }
    }

    /// Replaces the runner of the previous epoch, and computes until another epoch is prepared or the session ends.
    async fn run(
        &self,
        runner: &mut Option<StageRunner>,
        mut events: mpsc::UnboundedReceiver<RunnerEvent>,
    ) -> Result<()> {
        let Some(model) = self.load_model().await? else { return Ok(()) };
        let Some(outbox) = self.connect_neighbours().await? else { return Ok(()) };
        let EpochConfig { epoch, device_index, first_pass_index: first_pass, .. } = self.config;
        let reports = self.reports.clone();
        let latest_epoch = self.latest_epoch.clone();
        let upload = &UploadProgressReporter::new(move |done, total| {
            let is_sent = reports.send(EpochReport::Message(Message::Uploading { done, total })).is_ok();
            is_sent && *latest_epoch.borrow() == epoch
        });
        let plan = &self.plan;
        let new = if let Some(previous) = runner.take() {
            previous.reconfigure(plan, first_pass, &model, outbox, epoch, upload)?
        } else {
            let (index, threads) = (usize::from(device_index), self.worker.options.threads);
            let mut new = StageRunner::new(plan, index, &model, threads, outbox, epoch, upload)?;
            new.set_first_pass(first_pass)?;
            new
        };
        let runner = runner.insert(new);
        // More passes in flight exceed what any head starts.
        let frames = MAX_BATCHES_PER_DEVICE * plan.devices.len();
        self.budget.extend(frames, model.max_activation_bytes());
        self.report(EpochReport::Message(Message::Ready { epoch }));
        let mut is_faulty = false;
        loop {
            let event = tokio::select! {
                biased;
                () = self.superseded() => return Ok(()),
                event = events.recv() => event,
            };
            match event {
                None => return Ok(()),
                // The head is about to end the epoch.
                Some(RunnerEvent::Activations(_)) if is_faulty => {}
                Some(RunnerEvent::Activations(received)) if !runner.is_expected(&received) => {
                    self.counters.record_dropped();
                }
                Some(RunnerEvent::Activations(received)) => match runner.process_activations(&received) {
                    Ok(_) => {}
                    Err(RingError::InvalidActivations { sender_index: peer_index, what: reason }) => {
                        is_faulty = true;
                        let broken = BrokenLink { epoch, peer_index, is_fault: true, reason };
                        self.report(EpochReport::Message(Message::LinkBroken(broken)));
                    }
                    Err(error) => return Err(error),
                },
                Some(RunnerEvent::Reset { epoch, .. }) => {
                    is_faulty = false;
                    runner.reset(epoch, None);
                    self.report(EpochReport::Message(Message::Ready { epoch }));
                }
                Some(RunnerEvent::CollectTrace { .. }) => {
                    self.report(EpochReport::Trace(runner.take_trace()));
                }
            }
        }
    }

    pub(super) fn report(&self, report: EpochReport) {
        // The receiver is closed when the session has ended.
        let _ = self.reports.send(report);
    }

    /// Fetches the layers if necessary. Returns the model, or `None` if another epoch is prepared meanwhile.
    async fn load_model(&self) -> Result<Option<Arc<LocalModel>>> {
        let folder = match &self.worker.source {
            ModelSource::File(model) => return Ok(Some(model.clone())),
            ModelSource::Fetch(folder) => folder,
        };
        tokio::select! {
            biased;
            () = self.superseded() => Ok(None),
            fetched = self.fetch_layers(folder) => fetched.map(|model| Some(Arc::new(model))),
        }
    }

    /// Connects to the devices that this worker sends activations to. Returns `None` if another epoch is prepared
    /// meanwhile, or if a connection fails, which is reported to the head.
    async fn connect_neighbours(&self) -> Result<Option<Outbox>> {
        let EpochConfig { epoch, device_index, ref receivers, .. } = self.config;
        let (transport, session, sink) = (&self.worker.transport, self.session, &self.sink);
        let counters = &self.counters;
        let connector = DataConnector { transport, session, epoch, device_index, sink, counters };
        let mut outbox = Outbox::new();
        for to in Schedule::new(self.plan.clone(), usize::from(device_index)).receivers() {
            let peer = receivers.iter().find(|peer| usize::from(peer.device_index) == to);
            let Some(PeerAddress { address, .. }) = peer else {
                let what = "it did not send the address of a neighbour in its plan";
                return Err(protocol_error("the head", what));
            };
            let connected = tokio::select! {
                biased;
                () = self.superseded() => return Ok(None),
                connected = connector.connect(to as u16, &self.plan.devices[to].name, address) => connected,
            };
            match connected {
                Ok(link) => drop(outbox.insert(to, link)),
                Err(error) => {
                    let reason = error.to_string();
                    let broken = BrokenLink { epoch, peer_index: to as u16, is_fault: false, reason };
                    self.report(EpochReport::Message(Message::LinkBroken(broken)));
                    return Ok(None);
                }
            }
        }
        Ok(Some(outbox))
    }

    /// Waits until another epoch is prepared or the session has ended.
    async fn superseded(&self) {
        // An error means that the session has ended.
        let _ = self.latest_epoch.clone().wait_for(|&newest| newest != self.config.epoch).await;
    }
}
