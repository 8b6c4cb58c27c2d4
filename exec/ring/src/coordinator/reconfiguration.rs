//! How does a head bring a ring up, and another when one has failed?
//!
//! It interprets the steps of [`Recovery`]: has the workers prepare, hands out the plan, connects to those it sends
//! to, takes up its own part, and turns what it hears into events. When the ring cannot go on as it is, it plans for
//! the devices that are left: with the planner that the command line gave it, or by spreading the layers of those who
//! are gone over the others ([`hearth_core::recovery`]).
//!
//! Not here: which pass enters and what becomes of tokens ([`super::generation`]).

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use hearth_core::recovery::{Event, NoPlan, Recovery, Step, heartbeat};
use hearth_core::schedule::Schedule;
use hearth_profiles::Document;
use hearth_schema::Plan;
use hearth_schema::events::Return;
use hearth_schema::plan::PlannedDevice;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout, timeout_at};

use super::control::{Control, HeadEvent, address, greet};
use super::event_log::Chronicle;
use super::listen_address::{announced, listen_at};
use super::listener::accept;
use super::options::{Renewal, RingOptions};
use crate::error::{RingError, strange};
use crate::execution::{Choosing, LocalModel, Node, Outbox, check_draft};
use crate::wire::{
    Cut, DataEvent, Deliver, Door, Frame, Listener, Message, Network, PeerAddress, Sending, SharedDoor,
    WorkerFacts, bind,
};
use hearth_runtime::accelerator::Progress;
use hearth_runtime::clock::wall_nanos;

/// For a neighbour that has just said that it is prepared.
const NEIGHBOUR_DEADLINE: Duration = Duration::from_nanos(heartbeat::SILENCE);
/// For a device that was gone to answer before a request begins without it.
/// source: assumed, what a person who waits for a first token does not mind
const BACK_DEADLINE: Duration = Duration::from_millis(500);

/// The head's side of a session.
pub(super) struct Lead<N: Network> {
    network: N,
    pub(super) model: Arc<LocalModel>,
    pub(super) options: RingOptions,
    session: u64,
    workers: BTreeMap<String, Control>,
    /// What each device that was ever reached has told of itself.
    pub(super) facts: BTreeMap<String, WorkerFacts>,
    pub(super) recovery: Recovery,
    pub(super) node: Option<Node>,
    /// For the node, when the next request begins.
    pub(super) choosing: Option<Choosing>,
    pub(super) chronicle: Chronicle,
    pub(super) inbox: mpsc::UnboundedSender<HeadEvent>,
    pub(super) events: mpsc::UnboundedReceiver<HeadEvent>,
    door: SharedDoor,
    head_address: String,
    links: u64,
    /// The first pass of the next ring.
    pub(super) first_pass: u32,
    /// Tokens that the next ring computes again.
    pub(super) again: u32,
    /// When whoever is not ready counts as gone.
    ready_by: Instant,
    accepting: JoinHandle<()>,
}

impl<N: Network> Drop for Lead<N> {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

impl<N: Network> Lead<N> {
    /// Brings the ring of a plan up.
    pub(super) async fn connect(
        network: N,
        plan: Plan,
        model: Arc<LocalModel>,
        options: RingOptions,
        (inbox, events): (mpsc::UnboundedSender<HeadEvent>, mpsc::UnboundedReceiver<HeadEvent>),
        session: u64,
    ) -> Result<Self, RingError> {
        model.check(&plan)?;
        check_draft(&plan, &model, options.draft.as_deref())?;
        let mut workers = BTreeMap::new();
        for (device, link) in plan.devices.iter().skip(1).zip(1..) {
            let control = greet(&network, &plan, device, (session, link), &inbox).await?;
            workers.insert(device.name.clone(), control);
        }
        let seen_from: Vec<_> = workers.values().map(|worker| worker.seen_from).collect();
        let at = listen_at(plan.devices[0].address.as_deref(), network.is_sealed(), &seen_from);
        let listener = bind(&network, &at).await?;
        let (head_address, door) = (listener.address(), SharedDoor::default());
        let accepting = tokio::spawn(accept(listener, door.clone(), model.clone()));
        let mut facts: BTreeMap<_, _> =
            workers.iter().map(|(name, worker)| (name.clone(), worker.facts.clone())).collect();
        facts.insert(plan.devices[0].name.clone(), model.facts());
        let on_happening = options.on_happening.clone();
        let mut lead = Self {
            network,
            options,
            session,
            chronicle: Chronicle::new(&plan, on_happening),
            recovery: Recovery::new(Arc::new(plan)),
            links: workers.len() as u64,
            workers,
            facts,
            node: None,
            choosing: None,
            inbox,
            events,
            door,
            head_address,
            first_pass: 0,
            again: 0,
            ready_by: Instant::now(),
            accepting,
            model,
        };
        let steps = lead.react(Event::Start);
        lead.settle(steps).await?;
        Ok(lead)
    }

    /// Makes the ring ready for a request: takes in who is back, and has all forget the request before.
    pub(super) async fn renew_for_request(&mut self, choosing: Choosing) -> Result<(), RingError> {
        while let Ok(event) = self.events.try_recv() {
            match event {
                // What the request before left behind.
                HeadEvent::Late(_) | HeadEvent::Data(DataEvent::Arrived(_)) => {}
                event => drop(self.hear(event)?),
            }
        }
        self.take_in_who_is_back().await;
        (self.first_pass, self.again, self.choosing) = (0, 0, Some(choosing));
        if self.recovery.must_plan() {
            let steps = self.react(Event::Request);
            self.settle(steps).await?;
        }
        self.chronicle = Chronicle::new(self.recovery.plan(), self.options.on_happening.clone());
        let steps = self.react(Event::Request);
        self.settle(steps).await
    }

    async fn take_in_who_is_back(&mut self) {
        for name in self.recovery.gone() {
            let Some(device) = self.known(&name) else { continue };
            if let Ok(Ok(())) = timeout(BACK_DEADLINE, self.reach(&device)).await {
                self.react(Event::DeviceReturned { device: name, rejoins: Return::NextRequest });
            }
        }
    }

    /// Where a device was planned or said to be.
    fn known(&self, name: &str) -> Option<PlannedDevice> {
        let plans = [self.recovery.plan(), self.recovery.first_plan()];
        plans.iter().find_map(|plan| Some(plan.devices[plan.position(name)?].clone()))
    }

    /// Opens the control connection to a device.
    async fn reach(&mut self, device: &PlannedDevice) -> Result<(), RingError> {
        self.links += 1;
        let control =
            greet(&self.network, self.recovery.first_plan(), device, (self.session, self.links), &self.inbox)
                .await?;
        self.facts.insert(device.name.clone(), control.facts.clone());
        self.workers.insert(device.name.clone(), control);
        Ok(())
    }

    /// Carries steps out, and those that follow, until passes may begin.
    pub(super) async fn settle(&mut self, mut steps: Vec<Step>) -> Result<(), RingError> {
        self.ready_by = Instant::now() + self.options.ready_deadline;
        loop {
            let mut queue = VecDeque::from(steps);
            while let Some(step) = queue.pop_front() {
                if matches!(step, Step::Prepare { .. } | Step::Reset { .. }) {
                    self.ready_by = Instant::now() + self.options.ready_deadline;
                }
                let more = self.perform(step).await?;
                if !more.is_empty() {
                    // What was still to be done belonged to a ring that is not to be.
                    queue = more.into();
                }
            }
            if self.recovery.is_running() {
                return Ok(());
            }
            steps = match timeout_at(self.ready_by, self.events.recv()).await {
                Ok(Some(event)) => self.hear(event)?,
                Ok(None) => return Err(RingError::Interrupted),
                Err(_) => self.miss_who_dawdles()?,
            };
        }
    }

    async fn perform(&mut self, step: Step) -> Result<Vec<Step>, RingError> {
        match step {
            Step::Plan => Ok(self.plan_again()),
            Step::Prepare { epoch } => self.prepare(epoch).await,
            Step::Configure { epoch } => self.configure(epoch).await,
            Step::Reset { epoch } => {
                self.chronicle.epoch(epoch, self.recovery.plan());
                for worker in self.members() {
                    worker.set_clock();
                    worker.order(Message::Reset { epoch });
                }
                let choosing = self.choosing.take();
                self.node()?.reset(epoch, choosing);
                Ok(self.own_part_is_ready(epoch))
            }
            // `react` has carried out what is only recorded.
            Step::Begin { .. } | Step::Missed { .. } | Step::Replanned { .. } | Step::NotReplanned { .. } => {
                Ok(vec![])
            }
            Step::GiveUp { lost, reason } => Err(RingError::CannotGoOn { lost, reason }),
        }
    }

    fn own_part_is_ready(&mut self, epoch: u32) -> Vec<Step> {
        let name = self.recovery.plan().devices[0].name.clone();
        self.react(Event::Ready { device: name, epoch })
    }

    /// The workers of the plan at work.
    fn members(&self) -> impl Iterator<Item = &Control> {
        self.recovery.plan().devices.iter().skip(1).filter_map(|device| self.workers.get(&device.name))
    }

    pub(super) fn node(&mut self) -> Result<&mut Node, RingError> {
        self.node.as_mut().ok_or_else(|| strange("the head's node", "it has stopped"))
    }

    async fn prepare(&mut self, epoch: u32) -> Result<Vec<Step>, RingError> {
        let inbox = self.inbox.clone();
        let deliver: Deliver = Arc::new(move |event| inbox.send(HeadEvent::Data(event)).is_ok());
        let door = Door { session: self.session, epoch, deliver };
        *self.door.lock().unwrap_or_else(PoisonError::into_inner) = Some(door);
        self.chronicle.epoch(epoch, self.recovery.plan());
        let plan = self.recovery.plan().clone();
        for device in plan.devices.iter().skip(1) {
            if !self.workers.contains_key(&device.name)
                && let Err(error) = self.reach(device).await
            {
                return self.lose(&device.name, error, wall_nanos());
            }
        }
        self.members().for_each(|worker| worker.order(Message::Prepare { epoch }));
        Ok(vec![])
    }

    async fn configure(&mut self, epoch: u32) -> Result<Vec<Step>, RingError> {
        let plan = self.recovery.plan().clone();
        for (place, device) in plan.devices.iter().enumerate().skip(1) {
            let Some(worker) = self.workers.get(&device.name) else { continue };
            let mut receivers = Vec::new();
            for to in Schedule::new(plan.clone(), place).receivers() {
                let address = match to {
                    0 => announced(&self.head_address, worker.seen_from),
                    _ => address(&plan.devices[to])?.to_owned(),
                };
                receivers.push(PeerAddress { place: to as u16, address });
            }
            let (place, first_pass) = (place as u16, self.first_pass);
            let head = announced(&self.head_address, worker.seen_from);
            let message = Message::Configure { epoch, place, first_pass, head, receivers };
            worker.order(Frame { message, payload: plan.to_yaml().into_bytes() });
        }
        let outbox = match self.connect_neighbours(&plan, epoch).await {
            Ok(outbox) => outbox,
            Err(cut) => return Ok(self.cut_off(cut)),
        };
        // Nobody waits for the head's own part but the head.
        let own = Progress::default();
        let node = match self.node.take() {
            Some(node) => node.renew(&plan, self.first_pass, &self.model, outbox, epoch, &own)?,
            None => Node::new(&plan, 0, &self.model, self.options.threads, outbox, epoch, &own)?
                .drafting_with(self.options.draft.as_deref())?,
        };
        self.node = Some(node);
        // What others said while the head was busy with its own part is still to be heard.
        self.ready_by = Instant::now() + self.options.ready_deadline;
        Ok(self.own_part_is_ready(epoch))
    }

    async fn connect_neighbours(&mut self, plan: &Arc<Plan>, epoch: u32) -> Result<Outbox, Cut> {
        let inbox = self.inbox.clone();
        let deliver: Deliver = Arc::new(move |event| inbox.send(HeadEvent::Data(event)).is_ok());
        let (network, session) = (&self.network, self.session);
        let sending = Sending { network, session, epoch, place: 0, deliver: &deliver };
        let mut outbox = Outbox::new();
        for to in Schedule::new(plan.clone(), 0).receivers() {
            let device = &plan.devices[to];
            let at = device.address.as_deref().unwrap_or_default();
            let connecting = timeout(NEIGHBOUR_DEADLINE, sending.connect(to as u16, &device.name, at));
            let why = match connecting.await {
                Ok(Ok(link)) => {
                    outbox.insert(to, link);
                    continue;
                }
                Ok(Err(error)) => error.to_string(),
                Err(_) => "it does not answer".into(),
            };
            return Err(Cut { epoch, peer: to as u16, why });
        }
        Ok(outbox)
    }

    /// A connection of this device broke.
    fn cut_off(&mut self, cut: Cut) -> Vec<Step> {
        let by = self.recovery.plan().devices[0].name.clone();
        self.cut(&by, cut)
    }

    fn cut(&mut self, by: &str, Cut { epoch, peer, why }: Cut) -> Vec<Step> {
        let Some(device) = self.recovery.plan().devices.get(usize::from(peer)) else { return vec![] };
        let peer = device.name.clone();
        let reason = format!("nothing gets from or to `{peer}` and `{by}` ({why})");
        self.react(Event::LinkCut { epoch, by: by.to_owned(), peer, since: wall_nanos(), reason })
    }

    /// Tells the recovery what has happened. Its decisions are recorded at once; the steps to carry out are returned.
    pub(super) fn react(&mut self, event: Event) -> Vec<Step> {
        let mut steps = self.recovery.react(event);
        steps.retain(|step| !self.record(step));
        steps
    }

    /// Records a decision. False if the step is more than that.
    fn record(&mut self, step: &Step) -> bool {
        match step {
            Step::Missed { device, since, reason } => {
                self.workers.remove(device);
                self.chronicle.missed(device, *since, reason.clone());
            }
            Step::Replanned { missing } => {
                self.chronicle.renewed(missing.as_deref(), self.recovery.plan(), self.again);
            }
            Step::NotReplanned { missing, reason } => self.chronicle.not_renewed(missing.as_deref(), reason),
            _ => return false,
        }
        true
    }

    /// Turns what is heard into events of the ring's state.
    pub(super) fn hear(&mut self, event: HeadEvent) -> Result<Vec<Step>, RingError> {
        match event {
            // Nothing was asked for yet.
            HeadEvent::Data(DataEvent::Arrived(_)) => Ok(vec![]),
            HeadEvent::Data(DataEvent::Cut(cut)) => Ok(self.cut_off(cut)),
            HeadEvent::Said { link, frame } => {
                let Some(name) = self.name_of(link) else { return Ok(vec![]) };
                match frame.message {
                    Message::Prepared { epoch } => Ok(self.react(Event::Prepared { device: name, epoch })),
                    Message::Ready { epoch } => Ok(self.react(Event::Ready { device: name, epoch })),
                    Message::Cut { epoch, peer, why } => Ok(self.cut(&name, Cut { epoch, peer, why })),
                    Message::Fetching { done, total } => {
                        // Many gigabytes take longer than getting ready does.
                        self.ready_by = Instant::now() + self.options.ready_deadline;
                        if let Some(on_fetch) = &self.options.on_fetch {
                            on_fetch(&name, done, total);
                        }
                        Ok(vec![])
                    }
                    Message::Uploading { .. } => {
                        self.ready_by = Instant::now() + self.options.ready_deadline;
                        Ok(vec![])
                    }
                    // The trace of a request that has ended.
                    Message::Report { .. } => Ok(vec![]),
                    other => {
                        let error = strange(&name, &format!("{other:?} is no answer"));
                        self.lose(&name, error, wall_nanos())
                    }
                }
            }
            HeadEvent::Gone { link, error, since } => match self.name_of(link) {
                Some(name) => self.lose(&name, error, since),
                None => Ok(vec![]),
            },
            HeadEvent::Late(limit) => Err(RingError::Deadline {
                what: "one pass through the ring".into(),
                seconds: limit.as_secs_f64(),
                hint: "if the devices are that slow, give more with --deadline",
            }),
            HeadEvent::Stop => Err(RingError::Interrupted),
        }
    }

    /// Who is reached over a control connection.
    pub(super) fn name_of(&self, link: u64) -> Option<String> {
        self.workers.values().find(|worker| worker.link == link).map(|worker| worker.name().to_owned())
    }

    /// A worker is gone: its connection is closed, so that it is free for others when it wakes up.
    pub(super) fn lose(&mut self, name: &str, error: RingError, since: u64) -> Result<Vec<Step>, RingError> {
        self.workers.remove(name);
        if !self.recovery.has_begun() {
            return Err(error);
        }
        Ok(self.react(Event::DeviceLost { device: name.into(), since, reason: error.to_string() }))
    }

    fn miss_who_dawdles(&mut self) -> Result<Vec<Step>, RingError> {
        let mut steps = Vec::new();
        for name in self.recovery.awaited().clone() {
            let error = RingError::Deadline {
                what: format!("worker `{name}` getting ready"),
                seconds: self.options.ready_deadline.as_secs_f64(),
                hint: "see whether the other end still runs and the network is up",
            };
            steps.extend(self.lose(&name, error, wall_nanos())?);
        }
        Ok(steps)
    }

    fn plan_again(&mut self) -> Vec<Step> {
        let found = match &self.options.renewal {
            Renewal::Never => Err(NoPlan { reason: "this run does not plan again".into() }),
            Renewal::Spread => self.recovery.spread(),
            Renewal::Planner { cluster, replanner } => self.recovery.replan(&**replanner, cluster),
        };
        let checked = found.and_then(|plan| match self.model.check(&plan) {
            Ok(()) => Ok(plan),
            Err(error) => Err(NoPlan { reason: error.to_string() }),
        });
        self.react(match checked {
            Ok(plan) => Event::Planned(Box::new(plan)),
            Err(NoPlan { reason }) => Event::NoPlan { reason },
        })
    }

    /// Ends the session in order; the workers then wait for the next head.
    pub(super) async fn close(&mut self) {
        for worker in self.workers.values_mut() {
            worker.close().await;
        }
    }

    /// Orders a trace from every worker of the ring; who that is.
    pub(super) fn order_lines(&mut self) -> BTreeSet<String> {
        self.members().for_each(|worker| worker.order(Message::Collect));
        self.members().map(|worker| worker.name().to_owned()).collect()
    }

    /// What to add to a worker's times.
    pub(super) fn clock_offset(&self, name: &str) -> i64 {
        self.workers.get(name).map_or(0, Control::clock_offset)
    }
}
