//! A head's session with a worker: executes the head's commands until the head ends the session.

use std::sync::Arc;
use std::time::Duration;

use hearth_profiles::Document;
use hearth_schema::Plan;
use tokio::sync::{Semaphore, mpsc, watch};
use tokio::task::JoinError;
use tokio::time::timeout;

use super::epoch::{EpochReport, PreviousRunner, RunnerEvent, WorkerEpoch};
use super::head_connection::HeadConnection;
use super::worker::Worker;
use crate::error::{Result, RingError, protocol_error};
use crate::execution::{StageRunner, TraceLines, check_has_weight_digests};
use crate::wire::{
    ActivationCounters, DataLinkEvent, DataLinkEventSink, EpochConfig, Frame, MAX_DATA_CONNECTIONS, Message,
    PreparedEpoch, ReceiveBudget, Reservation, Transport, replace_prepared_epoch,
};
use hearth_runtime::clock::monotonic_nanos;

/// The time limit for the runner to finish its step when a session ends, enough to read a layer from disk.
const DRAIN_DEADLINE: Duration = Duration::from_mins(1);
/// Maximum number of trace records, and of counter readings, in one frame. A record takes about 200 bytes.
const MAX_REPORT_LINES: usize = 10_000;
/// Maximum number of commands that wait for the runner, which may be computing.
/// source: assumed; a head sends one command per request, and collects traces every two seconds
const MAX_WAITING_COMMANDS: usize = 1000;
/// Maximum length of a plan, in bytes: parsing takes time. source: assumed, more than a plan of 100 devices has
const MAX_PLAN_BYTES: usize = 128 << 10;

pub(super) struct Session<T: Transport> {
    worker: Worker<T>,
    id: u64,
    head: HeadConnection<T::Stream>,
    /// The number of the epoch that was prepared last.
    latest_epoch: watch::Sender<u32>,
    inbox: mpsc::UnboundedSender<RunnerEvent>,
    /// The receiver of the events sent to `inbox`; moved to the [`WorkerEpoch`] when the plan arrives.
    events: Option<mpsc::UnboundedReceiver<RunnerEvent>>,
    /// The commands of the head that may wait for the runner.
    command_budget: ReceiveBudget,
    /// The activations of the prepared epoch that may wait for the runner; none before the runner has its layers.
    activation_budget: ReceiveBudget,
    counters: Arc<ActivationCounters>,
    previous: PreviousRunner,
    reports: mpsc::UnboundedSender<EpochReport>,
    report_rx: mpsc::UnboundedReceiver<EpochReport>,
}

impl<T: Transport> Session<T> {
    pub(super) fn new(worker: Worker<T>, id: u64, head: HeadConnection<T::Stream>) -> Self {
        let (reports, report_rx) = mpsc::unbounded_channel();
        Self {
            worker,
            id,
            head,
            latest_epoch: watch::Sender::new(0),
            inbox: mpsc::unbounded_channel().0,
            events: None,
            command_budget: ReceiveBudget::new(MAX_WAITING_COMMANDS, 0),
            activation_budget: ReceiveBudget::new(0, 0),
            counters: Arc::default(),
            previous: PreviousRunner::Idle(None),
            reports,
            report_rx,
        }
    }

    /// Serves the head until the session ends and the runner of the session has stopped.
    pub(super) async fn serve(mut self) -> Result<()> {
        let ended = self.run().await;
        if let Err(error) = &ended {
            // A lost head does not receive this.
            let _ = self.head.send(Message::Refuse { reason: error.to_string() }).await;
        }
        let Session { previous, latest_epoch, inbox, .. } = self;
        drop((latest_epoch, inbox));
        if let PreviousRunner::Running(serving) = previous {
            let _ = timeout(DRAIN_DEADLINE, serving).await;
        }
        ended
    }

    async fn run(&mut self) -> Result<()> {
        self.head.send(Message::Welcome(self.worker.source.worker_info())).await?;
        loop {
            tokio::select! {
                biased;
                report = self.report_rx.recv() => {
                    if let Some(report) = report {
                        self.forward(report).await?;
                    }
                }
                ended = runner_ended(&mut self.previous) => {
                    // A runner that stopped with an error has reported it; one that panicked has not.
                    let what = "it stopped unexpectedly; see the log of the worker";
                    let runner = ended.map_err(|_| protocol_error("this worker's computation", what))?;
                    self.previous = PreviousRunner::Idle(runner.map(Box::new));
                }
                frame = self.head.next_frame() => {
                    if !self.execute(frame?).await? {
                        return Ok(());
                    }
                }
            }
        }
    }

    /// Executes a command of the head. Returns false after the last command of the session.
    async fn execute(&mut self, frame: Frame) -> Result<bool> {
        match frame.message {
            Message::Goodbye => return Ok(false),
            Message::Ping { nonce } => {
                let counts = self.counters.counts();
                self.head.send(Message::Pong { nonce, clock_ns: monotonic_nanos(), counts }).await?;
            }
            Message::Prepare { epoch } => self.prepare(epoch).await?,
            Message::Configure(config) => {
                let plan = parse_plan(frame.payload).await?;
                let plan = self.check_plan(plan, config.device_index)?;
                self.configure(config, plan)?;
            }
            Message::Reset { epoch } => {
                let reset = RunnerEvent::Reset { epoch, _reservation: self.reserve_command()? };
                drop(self.inbox.send(reset));
            }
            Message::CollectTrace => {
                let collect = RunnerEvent::CollectTrace { _reservation: self.reserve_command()? };
                drop(self.inbox.send(collect));
            }
            _ => return Err(protocol_error("the head", "it sent a message that a head must not send")),
        }
        Ok(true)
    }

    fn reserve_command(&self) -> Result<Reservation> {
        let reservation = self.command_budget.try_reserve(0);
        reservation
            .ok_or_else(|| protocol_error("the head", "it sends commands faster than they are executed"))
    }

    async fn forward(&mut self, report: EpochReport) -> Result<()> {
        let prepared = *self.latest_epoch.borrow();
        match report {
            EpochReport::Message(Message::LinkBroken(broken)) if broken.epoch != prepared => Ok(()),
            EpochReport::Message(message) => self.head.send(message).await,
            EpochReport::Trace(all) => self.send_trace(all).await,
            EpochReport::Failed(error) => Err(error),
        }
    }

    /// Stops the current epoch and accepts connections for the next one.
    async fn prepare(&mut self, epoch: u32) -> Result<()> {
        if epoch <= *self.latest_epoch.borrow() {
            let what = format!("it prepares epoch {epoch}, which is not greater than the current epoch");
            return Err(protocol_error("the head", what));
        }
        let (inbox, events) = mpsc::unbounded_channel();
        let sink = sink(inbox.clone(), self.reports.clone());
        (self.inbox, self.events) = (inbox, Some(events));
        (self.activation_budget, self.counters) = (ReceiveBudget::new(0, 0), Arc::default());
        let (budget, counters) = (self.activation_budget.clone(), self.counters.clone());
        let connections = Arc::new(Semaphore::new(MAX_DATA_CONNECTIONS));
        let prepared = PreparedEpoch { session: self.id, epoch, sink, budget, counters, connections };
        replace_prepared_epoch(&self.worker.prepared_epoch, Some(prepared));
        self.latest_epoch.send_replace(epoch);
        self.head.send(Message::Prepared { epoch }).await
    }

    /// Starts the prepared epoch with a plan. The started epoch reports its errors to the head itself.
    fn configure(&mut self, config: EpochConfig, plan: Arc<Plan>) -> Result<()> {
        if config.epoch != *self.latest_epoch.borrow() {
            return Err(protocol_error("the head", "it configures an epoch that it did not prepare"));
        }
        let twice = || protocol_error("the head", "it configures an epoch twice");
        let events = self.events.take().ok_or_else(twice)?;
        let worker_epoch = WorkerEpoch {
            worker: self.worker.clone(),
            session: self.id,
            config,
            plan,
            sink: sink(self.inbox.clone(), self.reports.clone()),
            budget: self.activation_budget.clone(),
            counters: self.counters.clone(),
            latest_epoch: self.latest_epoch.subscribe(),
            reports: self.reports.clone(),
        };
        let previous = std::mem::replace(&mut self.previous, PreviousRunner::Idle(None));
        let serving = self.worker.options.compute_mode.spawn(worker_epoch.serve(previous, events));
        self.previous = PreviousRunner::Running(serving);
        Ok(())
    }

    fn check_plan(&self, plan: Plan, device_index: u16) -> Result<Arc<Plan>> {
        if device_index == 0 || usize::from(device_index) >= plan.devices.len() {
            return Err(protocol_error("the head", "its plan has no worker with the index that it sent"));
        }
        self.worker.source.check_plan(&plan)?;
        if self.worker.options.verification.is_some() {
            check_has_weight_digests(&plan)?;
        }
        Ok(Arc::new(plan))
    }

    /// Sends trace lines, given by epoch, to the head in frames of a limited size.
    async fn send_trace(&mut self, all: Vec<(u32, TraceLines)>) -> Result<()> {
        let mut reports = Vec::new();
        for (epoch, lines) in &all {
            let mut records = lines.records.chunks(MAX_REPORT_LINES);
            let mut readings = lines.readings.chunks(MAX_REPORT_LINES);
            for _ in 0..records.len().max(readings.len()).max(1) {
                let chunk = (records.next().unwrap_or_default(), readings.next().unwrap_or_default());
                reports.push((*epoch, chunk));
            }
        }
        let last = reports.len().saturating_sub(1);
        for (index, (epoch, chunk)) in reports.into_iter().enumerate() {
            let payload = serde_json::to_vec(&chunk)
                .map_err(|error| protocol_error("this worker", error.to_string()))?;
            let message = Message::TraceLines { epoch, more: index < last };
            self.head.send(Frame { message, payload }).await?;
        }
        Ok(())
    }
}

/// Parses the plan of a head. A hostile plan may take long to parse, and the worker must answer others meanwhile.
async fn parse_plan(payload: Vec<u8>) -> Result<Plan> {
    if payload.len() > MAX_PLAN_BYTES {
        let what = format!("its plan has {} bytes, more than {MAX_PLAN_BYTES}", payload.len());
        return Err(protocol_error("the head", what));
    }
    let text = String::from_utf8(payload).map_err(|_| protocol_error("the head", "its plan is not UTF-8"))?;
    let parsed = tokio::task::spawn_blocking(move || Plan::from_yaml(&text)).await;
    parsed
        .map_err(|_| protocol_error("the head", "its plan cannot be parsed"))?
        .map_err(|error| RingError::invalid_plan(format!("the head's plan is invalid: {error}")))
}

/// Creates a sink that forwards received activations to the runner, and events of broken connections to the session.
fn sink(
    inbox: mpsc::UnboundedSender<RunnerEvent>,
    reports: mpsc::UnboundedSender<EpochReport>,
) -> DataLinkEventSink {
    Arc::new(move |event| match event {
        DataLinkEvent::Activations(arrival) => inbox.send(RunnerEvent::Activations(arrival)).is_ok(),
        DataLinkEvent::LinkBroken(broken) => {
            reports.send(EpochReport::Message(Message::LinkBroken(broken))).is_ok()
        }
    })
}

async fn runner_ended(previous: &mut PreviousRunner) -> Result<Option<StageRunner>, JoinError> {
    match previous {
        PreviousRunner::Running(serving) => serving.await,
        PreviousRunner::Idle(_) => std::future::pending().await,
    }
}
