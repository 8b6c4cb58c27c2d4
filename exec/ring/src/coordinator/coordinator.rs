//! The coordinator: executes the steps of the recovery reducer ([`hearth_core::recovery`]), and converts the messages
//! of the workers into events of the reducer.
//!
//! The coordinator makes the workers prepare an epoch, sends them the plan, connects to the neighbours of the head, and
//! loads the layers of the head. When the ring cannot continue, [`Reconfiguration`] finds another plan.
//!
//! Not here: which pass starts next, and the handling of tokens ([`super::pipeline`]).

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use hearth_core::recovery::{Event, Step, heartbeat};
use hearth_core::schedule::Schedule;
use hearth_profiles::Document;
use hearth_schema::Plan;
use hearth_schema::events::RejoinTime;
use hearth_schema::pass::Batch;
use tokio::sync::{Semaphore, mpsc};
use tokio::time::{Instant, timeout, timeout_at};

use super::connections::WorkerConnections;
use super::event_log::EventLog;
use super::listener::{HeadListener, address_for_worker};
use super::options::RingOptions;
use super::reconfiguration::Reconfiguration;
use super::request::can_share_caches;
use super::stall::{Stall, find_stall};
use super::worker_connection::{HeadEvent, address};
use crate::error::{Result, RingError, protocol_error};
use crate::execution::{
    LocalModel, MAX_BATCHES_PER_DEVICE, Outbox, Samplers, StageRunner, TraceLines, check_draft_model,
};
use crate::wire::{
    ActivationCounters, BrokenLink, DataConnector, DataLinkEvent, EpochConfig, Frame, MAX_DATA_CONNECTIONS,
    Message, PeerAddress, PreparedEpoch, ReceiveBudget, Transport,
};
use hearth_runtime::backend_factory::UploadProgressReporter;
use hearth_runtime::clock::monotonic_nanos;

/// The time limit for connecting to a neighbour that has reported that it accepts connections.
const NEIGHBOUR_DEADLINE: Duration = Duration::from_nanos(heartbeat::LOSS_TIMEOUT_NS);
/// The time that a request waits for a lost device to return. source: assumed, acceptable as a delay of the first token
const REJOIN_DEADLINE: Duration = Duration::from_millis(500);
/// The number of times that a device may send invalid activations before it can no longer rejoin.
/// source: assumed; a single fault can come from the memory or the network of the device
const MAX_FAULTS: u32 = 3;

/// Runs a session on the head: connects to workers, reconfigures the ring, and passes events to the recovery reducer.
pub(super) struct Coordinator<T: Transport> {
    model: Arc<LocalModel>,
    pub(super) options: RingOptions,
    pub(super) connections: WorkerConnections<T>,
    listener: HeadListener,
    pub(super) reconfiguration: Reconfiguration,
    runner: Option<StageRunner>,
    /// The samplers of the next request, until the [`StageRunner`] receives them.
    samplers: Option<Samplers>,
    pub(super) log: EventLog,
    pub(super) events: mpsc::UnboundedReceiver<HeadEvent>,
    /// The epoch for which the current connections were opened.
    pub(super) connected_epoch: u32,
    /// The counts of the head in the current epoch.
    counters: Arc<ActivationCounters>,
    /// The number of times that each device has sent invalid activations.
    faults: BTreeMap<String, u32>,
    /// The last count of loaded bytes that each device has reported in the current epoch, and the bytes in all.
    loaded_bytes: BTreeMap<String, (u64, u64)>,
}

impl<T: Transport> Coordinator<T> {
    /// Returns whether KV caches can be truncated to fewer tokens. A recurrent state can only be cleared.
    pub(super) fn can_truncate_caches(&self) -> bool {
        !self.model.profile.shape.is_recurrent()
    }

    /// Returns whether devices can give the memory of a sequence's cache to other sequences, and copy a cache.
    pub(super) fn can_share_caches(&self) -> bool {
        can_share_caches(self.plan(), &self.model.profile.shape)
    }

    pub(super) async fn connect(
        transport: T,
        plan: Plan,
        model: Arc<LocalModel>,
        options: RingOptions,
        (inbox, events): (mpsc::UnboundedSender<HeadEvent>, mpsc::UnboundedReceiver<HeadEvent>),
    ) -> Result<Self> {
        model.check_plan(&plan)?;
        check_draft_model(&plan, &model, options.draft_model.as_deref())?;
        // Workers use the session number only to distinguish the data connections of different heads.
        let mut connections = WorkerConnections::new(transport, rand::random(), inbox);
        for device in plan.devices.iter().skip(1) {
            connections.open(&plan, device).await?;
        }
        let local_ips: Vec<_> = connections.workers.values().map(|worker| worker.local_ip).collect();
        let head = &plan.devices[0];
        let planned = head.address.as_deref();
        let listener =
            HeadListener::start(&connections.transport, planned, &local_ips, model.clone()).await?;
        connections.worker_info.insert(head.name.clone(), model.worker_info());
        let mut coordinator = Self {
            log: EventLog::new(&plan, options.on_run_event.clone()),
            reconfiguration: Reconfiguration::new(plan, &options),
            connections,
            listener,
            runner: None,
            samplers: None,
            events,
            connected_epoch: 0,
            counters: Arc::default(),
            faults: BTreeMap::new(),
            loaded_bytes: BTreeMap::new(),
            options,
            model,
        };
        let steps = coordinator.react(Event::Start);
        coordinator.execute_recovery(steps).await?;
        Ok(coordinator)
    }

    pub(super) fn plan(&self) -> &Arc<Plan> {
        self.reconfiguration.plan()
    }

    /// Returns the runner of the head's layers. Fails if the runner has stopped.
    pub(super) fn runner(&mut self) -> Result<&mut StageRunner> {
        self.runner.as_mut().ok_or_else(|| protocol_error("the head", "its computation has stopped"))
    }

    /// Prepares the ring for a request: reconnects lost devices, and makes all devices discard the previous request.
    pub(super) async fn start_request(&mut self, samplers: Samplers) -> Result<()> {
        while let Ok(event) = self.events.try_recv() {
            // Passes of the previous request do not count.
            if !matches!(event, HeadEvent::PassTimeout(_) | HeadEvent::Data(DataLinkEvent::Activations(_))) {
                self.handle_event(event)?;
            }
        }
        self.rejoin_lost_devices().await;
        self.reconfiguration.resume_at(0, 0);
        self.samplers = Some(samplers);
        if self.reconfiguration.recovery.must_plan() {
            let steps = self.react(Event::Request);
            self.execute_recovery(steps).await?;
        }
        self.log = EventLog::new(self.reconfiguration.plan(), self.options.on_run_event.clone());
        let steps = self.react(Event::Request);
        self.execute_recovery(steps).await
    }

    pub(super) async fn rejoin_lost_devices(&mut self) {
        for name in self.reconfiguration.recovery.unavailable_devices() {
            if self.faults.get(&name).is_some_and(|&faults| faults >= MAX_FAULTS) {
                continue;
            }
            let Some(device) = self.reconfiguration.planned_device(&name) else { continue };
            let opening = self.connections.open(self.reconfiguration.recovery.first_plan(), &device);
            if let Ok(Ok(())) = timeout(REJOIN_DEADLINE, opening).await {
                self.react(Event::DeviceReturned { device: name, rejoins: RejoinTime::NextRequest });
            }
        }
    }

    /// Executes recovery steps, and the steps that follow from them, until passes may begin.
    pub(super) async fn execute_recovery(&mut self, mut steps: Vec<Step>) -> Result<()> {
        self.reconfiguration.extend_ready_deadline();
        loop {
            let mut queue = VecDeque::from(steps);
            while let Some(step) = queue.pop_front() {
                if matches!(step, Step::Prepare { .. } | Step::Reset { .. }) {
                    self.reconfiguration.extend_ready_deadline();
                }
                let more = self.perform(step).await?;
                if !more.is_empty() {
                    // The remaining steps belong to a ring that has been given up.
                    queue = more.into();
                }
            }
            if self.reconfiguration.recovery.is_ring_running() {
                return Ok(());
            }
            // Checked first, so that a device that always sends something does not delay the deadline.
            steps = if Instant::now() >= self.reconfiguration.ready_deadline {
                self.lose_devices_that_are_not_ready()?
            } else {
                match timeout_at(self.reconfiguration.ready_deadline, self.events.recv()).await {
                    Ok(Some(event)) => self.handle_event(event)?,
                    Ok(None) => return Err(RingError::Interrupted),
                    Err(_) => vec![],
                }
            };
        }
    }

    async fn perform(&mut self, step: Step) -> Result<Vec<Step>> {
        match step {
            Step::Plan => Ok(self.react(self.reconfiguration.find_plan(&self.model))),
            Step::Prepare { epoch } => self.prepare(epoch).await,
            Step::Configure { epoch } => self.configure(epoch).await,
            Step::Reset { epoch } => {
                self.log.begin_epoch(epoch, self.reconfiguration.plan());
                for (_, worker) in self.connections.workers_in(self.reconfiguration.plan()) {
                    worker.measure_clock_offset();
                    worker.send(Message::Reset { epoch });
                }
                let samplers = self.samplers.take();
                self.runner()?.reset(epoch, samplers);
                Ok(self.report_head_ready(epoch))
            }
            // `react` has recorded these; there is nothing else to do.
            Step::Begin { .. }
            | Step::RecordLoss { .. }
            | Step::Replanned { .. }
            | Step::NotReplanned { .. } => Ok(vec![]),
            Step::GiveUp { lost, reason } => Err(RingError::CannotRecover { lost, reason }),
        }
    }

    fn report_head_ready(&mut self, epoch: u32) -> Vec<Step> {
        let device = self.reconfiguration.head_name();
        self.react(Event::Ready { device, epoch })
    }

    async fn prepare(&mut self, epoch: u32) -> Result<Vec<Step>> {
        let plan = self.plan().clone();
        (self.counters, self.loaded_bytes) = (Arc::default(), BTreeMap::new());
        self.listener.accept_epoch(PreparedEpoch {
            session: self.connections.session,
            epoch,
            sink: self.connections.data_sink(),
            // All passes in flight may wait for the head.
            budget: ReceiveBudget::new(
                MAX_BATCHES_PER_DEVICE * plan.devices.len(),
                self.model.max_activation_bytes(),
            ),
            counters: self.counters.clone(),
            connections: Arc::new(Semaphore::new(MAX_DATA_CONNECTIONS)),
        });
        self.connected_epoch = epoch;
        self.log.begin_epoch(epoch, &plan);
        // A worker that the plan does not use frees its memory when its connection closes.
        self.connections.workers.retain(|name, _| plan.device_index(name).is_some());
        for device in plan.devices.iter().skip(1) {
            if !self.connections.workers.contains_key(&device.name)
                && let Err(error) =
                    self.connections.open(self.reconfiguration.recovery.first_plan(), device).await
            {
                return self.lose_worker(&device.name, error, monotonic_nanos());
            }
        }
        self.connections.broadcast(&plan, &Message::Prepare { epoch });
        Ok(vec![])
    }

    async fn configure(&mut self, epoch: u32) -> Result<Vec<Step>> {
        let plan = self.plan().clone();
        let first_pass_index = self.reconfiguration.first_pass;
        for (device_index, device) in (0u16..).zip(&plan.devices).skip(1) {
            let Some(worker) = self.connections.workers.get(&device.name) else { continue };
            let head_address = address_for_worker(&self.listener.address, worker.local_ip);
            let mut receivers = Vec::new();
            for to in Schedule::new(plan.clone(), usize::from(device_index)).receivers() {
                let address =
                    if to == 0 { head_address.clone() } else { address(&plan.devices[to])?.to_owned() };
                receivers.push(PeerAddress { device_index: to as u16, address });
            }
            let config = EpochConfig { epoch, device_index, first_pass_index, head_address, receivers };
            worker.send(Frame { message: Message::Configure(config), payload: plan.to_yaml().into_bytes() });
        }
        let outbox = match self.connect_neighbours(&plan, epoch).await {
            Ok(outbox) => outbox,
            Err(broken) => return Ok(self.report_broken_link(self.reconfiguration.head_name(), broken)),
        };
        // No other device waits for the head's upload, so its progress is not reported.
        let (model, upload) = (&self.model, &UploadProgressReporter::default());
        self.runner = Some(match self.runner.take() {
            Some(runner) => runner.reconfigure(&plan, first_pass_index, model, outbox, epoch, upload)?,
            None => StageRunner::new(&plan, 0, model, self.options.threads, outbox, epoch, upload)?
                .with_draft_model(self.options.draft_model.as_deref())?,
        });
        // Messages that arrived while the head loaded its own layers have not been read yet.
        self.reconfiguration.extend_ready_deadline();
        Ok(self.report_head_ready(epoch))
    }

    async fn connect_neighbours(&mut self, plan: &Arc<Plan>, epoch: u32) -> Result<Outbox, BrokenLink> {
        let sink = self.connections.data_sink();
        let WorkerConnections { transport, session, .. } = &self.connections;
        let (session, counters) = (*session, &self.counters);
        let connector = DataConnector { transport, session, epoch, device_index: 0, sink: &sink, counters };
        let mut outbox = Outbox::new();
        for to in Schedule::new(plan.clone(), 0).receivers() {
            let device = &plan.devices[to];
            let at = device.address.as_deref().unwrap_or_default();
            let connecting = timeout(NEIGHBOUR_DEADLINE, connector.connect(to as u16, &device.name, at));
            let broken =
                |reason: String| BrokenLink { epoch, peer_index: to as u16, is_fault: false, reason };
            let connected = connecting.await.map_err(|_| broken("no response".into()))?;
            outbox.insert(to, connected.map_err(|error| broken(error.to_string()))?);
        }
        Ok(outbox)
    }

    fn report_broken_link(&mut self, reporter: String, broken: BrokenLink) -> Vec<Step> {
        let BrokenLink { epoch, peer_index, is_fault, reason } = broken;
        let Some(device) = self.plan().devices.get(usize::from(peer_index)) else { return vec![] };
        let peer = device.name.clone();
        let since = monotonic_nanos();
        if is_fault {
            let reason = format!("`{reporter}` received invalid activations from `{peer}`: {reason}");
            let before = self.reconfiguration.recovery.unavailable_devices();
            let steps = self.react(Event::Fault { epoch, reporter, peer, since, reason });
            for device in self.reconfiguration.recovery.unavailable_devices().difference(&before) {
                *self.faults.entry(device.clone()).or_default() += 1;
            }
            return steps;
        }
        let reason = format!("`{reporter}` lost the connection to `{peer}` ({reason})");
        self.react(Event::LinkCut { epoch, reporter, peer, since, reason })
    }

    /// Passes an event to the recovery reducer and records the reducer's decisions. Returns the steps to execute.
    pub(super) fn react(&mut self, event: Event) -> Vec<Step> {
        let mut steps = self.reconfiguration.recovery.react(event);
        steps.retain(|step| !self.record(step));
        steps
    }

    /// Records a step in the event log if the step is only a decision. Returns false for a step that must be executed.
    fn record(&mut self, step: &Step) -> bool {
        match step {
            Step::RecordLoss { device, since, reason } => {
                self.connections.workers.remove(device);
                self.log.record_loss(device, *since, reason.clone());
            }
            Step::Replanned { missing } => {
                let cause = self.reconfiguration.take_cause();
                let Reconfiguration { recovery, recomputed_tokens, .. } = &self.reconfiguration;
                let (missing, plan) = (missing.as_deref(), recovery.plan());
                self.log.record_replanned(missing, plan, *recomputed_tokens, cause.as_deref());
            }
            Step::NotReplanned { missing, reason } => {
                self.log.record_not_replanned(missing.as_deref(), reason);
            }
            _ => return false,
        }
        true
    }

    /// Finds a plan for the available devices and their measured conditions. Returns the steps to execute; none if the
    /// plan stays.
    pub(super) fn plan_again(&mut self) -> Vec<Step> {
        match self.react(Event::ConditionsChanged)[..] {
            [Step::Plan] => self.react(self.reconfiguration.find_plan(&self.model)),
            _ => vec![],
        }
    }

    /// Passes the trace lines of a device to the adaptation of the plan. Returns how many times as long as its profile
    /// says the device computes; `None` without profiles.
    pub(super) fn measure(
        &mut self,
        device: &str,
        batches: &BTreeMap<u32, Batch>,
        lines: &TraceLines,
    ) -> Option<f64> {
        self.reconfiguration.measure(&self.model, device, batches, lines)
    }

    /// Passes an event from the head's inbox to the recovery reducer. Returns the recovery steps to execute.
    pub(super) fn handle_event(&mut self, event: HeadEvent) -> Result<Vec<Step>> {
        match event {
            // No pass has started yet.
            HeadEvent::Data(DataLinkEvent::Activations(_)) => Ok(vec![]),
            HeadEvent::Data(DataLinkEvent::LinkBroken(broken)) => {
                Ok(self.report_broken_link(self.reconfiguration.head_name(), broken))
            }
            HeadEvent::Message { connection, frame, .. } => {
                let name = self.connections.name_of(connection);
                name.map_or(Ok(vec![]), |name| self.handle_message(name, frame.message))
            }
            HeadEvent::Lost { connection, error, since } => {
                let name = self.connections.name_of(connection);
                name.map_or(Ok(vec![]), |name| self.lose_worker(&name, error, since))
            }
            HeadEvent::PassTimeout(limit) => self.handle_pass_timeout(limit),
            HeadEvent::Cancel => Err(RingError::Interrupted),
        }
    }

    /// Returns the place where activations are stuck, according to the counts of all devices. If the plan has a device
    /// without layers in some round, the counts do not tell.
    pub(super) fn find_stall(&self) -> Option<Stall> {
        let plan = self.plan();
        let has_one_receiver = |index| Schedule::new(plan.clone(), index).receivers().len() == 1;
        if !(0..plan.devices.len()).all(has_one_receiver) {
            return None;
        }
        let mut counts = vec![self.counters.counts()];
        for device in plan.devices.iter().skip(1) {
            counts.push(self.connections.workers.get(&device.name)?.counts());
        }
        find_stall(&counts)
    }

    /// Continues without the device, or over new connections, because of which a pass has not returned within `limit`.
    fn handle_pass_timeout(&mut self, limit: Duration) -> Result<Vec<Step>> {
        let seconds = limit.as_secs_f64();
        let hint = "if the devices are slow, set a longer `--deadline`";
        let plan = self.plan().clone();
        let name = |index: usize| plan.devices[index].name.clone();
        match self.find_stall() {
            Some(Stall::Worker(index)) => {
                let what = format!("a pass that `{}` has not passed on", name(index));
                let error = RingError::Deadline { what, seconds, hint };
                self.lose_worker(&name(index), error, monotonic_nanos())
            }
            Some(Stall::Link { sender, receiver }) => {
                let (reporter, peer) = (name(receiver), name(sender));
                let reason =
                    format!("activations from `{peer}` did not arrive at `{reporter}` within {seconds} s");
                let (epoch, since) = (self.connected_epoch, monotonic_nanos());
                Ok(self.react(Event::LinkCut { epoch, reporter, peer, since, reason }))
            }
            None => Err(RingError::Deadline { what: "one pass through the ring".into(), seconds, hint }),
        }
    }

    fn handle_message(&mut self, device: String, message: Message) -> Result<Vec<Step>> {
        match message {
            Message::Prepared { epoch } => Ok(self.react(Event::Prepared { device, epoch })),
            Message::Ready { epoch } => Ok(self.react(Event::Ready { device, epoch })),
            Message::LinkBroken(broken) => Ok(self.report_broken_link(device, broken)),
            Message::Fetching { done, total } => {
                self.record_loading_progress(&device, done);
                if let Some(on_fetch) = &self.options.on_fetch_progress {
                    on_fetch(&device, done, total);
                }
                Ok(vec![])
            }
            Message::Uploading { done, .. } => {
                self.record_loading_progress(&device, done);
                Ok(vec![])
            }
            // The trace of a request that has ended.
            Message::TraceLines { .. } => Ok(vec![]),
            _ => {
                let error = protocol_error(&device, "it sent a message that a worker must not send");
                self.lose_worker(&device, error, monotonic_nanos())
            }
        }
    }

    /// Extends the deadline of a device that loads its layers, if it has loaded more bytes than before. Many gigabytes
    /// may take longer than the deadline.
    fn record_loading_progress(&mut self, device: &str, done: u64) {
        let files = self.model.weights.model().file_sizes.iter().map(|size| size.file_bytes);
        // The counts start again for each kind of loading: headers, layers, verification and upload.
        let limit = files.sum::<u64>().saturating_mul(4);
        let (last, total) = self.loaded_bytes.entry(device.into()).or_default();
        *total = total.saturating_add(if done >= *last { done - *last } else { done });
        if done != *last && *total <= limit {
            self.reconfiguration.extend_ready_deadline();
        }
        *last = done;
    }

    /// Closes the connection to a lost worker, so that the worker can later serve a head again. `since` is the time of
    /// its last message. Returns the recovery steps to execute, or `error` if the ring has never run.
    pub(super) fn lose_worker(&mut self, name: &str, error: RingError, since: u64) -> Result<Vec<Step>> {
        self.connections.workers.remove(name);
        if !self.reconfiguration.recovery.has_ever_run() {
            return Err(error);
        }
        Ok(self.react(Event::DeviceLost { device: name.into(), since, reason: error.to_string() }))
    }

    fn lose_devices_that_are_not_ready(&mut self) -> Result<Vec<Step>> {
        let mut steps = Vec::new();
        for name in self.reconfiguration.recovery.awaited_devices().clone() {
            let error = RingError::Deadline {
                what: format!("preparing worker `{name}`"),
                seconds: self.reconfiguration.ready_timeout.as_secs_f64(),
                hint: "check that the worker is still running and that the network is up",
            };
            steps.extend(self.lose_worker(&name, error, monotonic_nanos())?);
        }
        Ok(steps)
    }
}
