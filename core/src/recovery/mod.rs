//! Recovery: decides what the head of a ring does when a device is lost, a connection breaks or a device returns.
//!
//! A pure reducer, `(state, event) -> (state, steps)`, without a clock or a socket. The executor's coordinator carries
//! the steps out over connections, and the simulator carries the same steps out in simulated time.
//!
//! A ring is configured in two steps, so that no device sends to one that still serves an earlier ring. First every
//! device prepares for an epoch and gives up its work. When the last one has prepared, all of them get the plan and
//! connect. When all are ready, passes may begin. Each request and each new ring has an epoch of its own, and answers
//! of an earlier epoch are ignored.
//!
//! When a device is lost, the head plans for the others. The lost device stays out of every plan until it is reported
//! to be back. A cut between two devices that are both there may be one broken connection, so the same ring tries once
//! more. If it is cut again before a token is complete, the device that could not be reached is lost. Between two
//! tokens there are therefore at most as many epochs as devices and forgiven cuts, and no sequence of failures makes
//! the head try for ever.
//!
//! Not here: how a plan is found ([`Replanner`], `spread`), whether its parts fit the devices' memory (the runner
//! answers [`Event::NoPlan`] if they do not), and which pass enters next ([`crate::schedule::Generation`]).

pub mod heartbeat;
mod replan;
mod spread;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use hearth_schema::events::Return;
use hearth_schema::plan::Plan;

use crate::cluster::Cluster;
pub use replan::{NoPlan, Replanner};

/// Something that the head notices.
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// The first plan is to be brought up.
    Start,
    /// A device fell silent, hung up or failed. For the head itself, that it is gone for good.
    DeviceLost {
        device: String,
        /// The last heartbeat, in nanoseconds of the runner's clock.
        since: u64,
        reason: String,
    },
    /// No device answers the head: the head itself is cut off.
    HeadIsolated { since: u64, reason: String },
    /// A device cannot be reached when the head looks for devices to plan with.
    DeviceAbsent { device: String },
    /// A device can be reached again, and may be taken in at this time.
    DeviceReturned { device: String, rejoins: Return },
    /// Two devices cannot exchange activations.
    LinkCut {
        /// The epoch that their connection was opened for.
        epoch: u32,
        /// The device that reports the cut.
        by: String,
        /// The device that it cannot reach.
        peer: String,
        since: u64,
        reason: String,
    },
    /// There is a plan for the available devices. Answers [`Step::Plan`].
    Planned(Box<Plan>),
    /// There is none. Answers [`Step::Plan`].
    NoPlan { reason: String },
    /// A device has prepared for an epoch.
    Prepared { device: String, epoch: u32 },
    /// A device is ready for the passes of an epoch.
    Ready { device: String, epoch: u32 },
    /// A token is complete.
    Token,
    /// A request begins. If [`Recovery::must_plan`], the ring is planned first and the event is to come again.
    Request,
}

/// Something that the runner has to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// Record that a device is missed, and close the connection to it.
    Missed { device: String, since: u64, reason: String },
    /// Plan for all devices but [`Recovery::is_gone`], and answer with [`Event::Planned`] or [`Event::NoPlan`].
    Plan,
    /// Record that [`Recovery::plan`] takes over, and which loss led to it.
    Replanned { missing: Option<String> },
    /// Record that there is no other plan, and why.
    NotReplanned { missing: Option<String>, reason: String },
    /// Have all devices of the plan prepare for this epoch.
    Prepare { epoch: u32 },
    /// Give all devices, the head too, the plan of this epoch.
    Configure { epoch: u32 },
    /// Have all devices, the head too, forget the previous request.
    Reset {
        /// The new request's epoch.
        epoch: u32,
    },
    /// Passes may begin.
    Begin { epoch: u32 },
    /// The ring cannot continue.
    GiveUp {
        /// Why each device that is gone is, for people.
        lost: String,
        /// Why there is no plan without them.
        reason: String,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// No plan is active, or the head searches for another.
    Planning {
        /// Whether the current ring is intact and continues if no other plan is found.
        is_intact: bool,
    },
    Preparing,
    Configuring,
    Resetting,
    Running,
    /// The ring cannot continue with this request.
    Over,
}

/// The head's view of its ring.
#[derive(Debug, Clone, PartialEq)]
pub struct Recovery {
    first: Arc<Plan>,
    plan: Arc<Plan>,
    /// The plan's devices that have not been lost.
    members: BTreeSet<String>,
    /// The devices that no plan may use, each with the reason.
    gone: BTreeMap<String, String>,
    /// The devices that have not answered yet.
    awaited: BTreeSet<String>,
    epoch: u32,
    /// The epoch for which the current connections were opened.
    connected: u32,
    phase: Phase,
    /// Cuts since the last token.
    cuts: u32,
    /// The device whose loss led to the plan that is looked for.
    missing: Option<String>,
    /// When a device that is back is to be taken in, if one is.
    rejoins: Option<Return>,
    has_begun: bool,
}

/// Cuts between two tokens for which no device is given up.
/// source: assumed, one connection may break by itself
const FORGIVEN_CUTS: u32 = 1;

impl Recovery {
    /// A head with its first plan, which [`Event::Start`] brings up.
    pub fn new(plan: Arc<Plan>) -> Self {
        Self {
            members: names(&plan),
            first: plan.clone(),
            plan,
            gone: BTreeMap::new(),
            awaited: BTreeSet::new(),
            epoch: 0,
            connected: 0,
            phase: Phase::Planning { is_intact: false },
            cuts: 0,
            missing: None,
            rejoins: None,
            has_begun: false,
        }
    }

    /// A head whose ring is up already.
    pub fn running(plan: Arc<Plan>) -> Self {
        Self { epoch: 1, connected: 1, phase: Phase::Running, has_begun: true, ..Self::new(plan) }
    }

    /// Takes an event and returns what to do, in order.
    pub fn react(&mut self, event: Event) -> Vec<Step> {
        match event {
            Event::Start => self.prepare(),
            Event::DeviceLost { device, since, reason } => self.lose(device, since, reason),
            Event::HeadIsolated { since, reason } => self.isolated(since, reason),
            Event::DeviceAbsent { device } => {
                self.gone.entry(device).or_insert_with(|| "it cannot be reached".into());
                vec![]
            }
            Event::DeviceReturned { device, rejoins } => self.returned(&device, rejoins),
            Event::LinkCut { epoch, by, peer, since, reason } => self.cut(epoch, by, peer, (since, reason)),
            Event::Planned(plan) => self.planned(*plan),
            Event::NoPlan { reason } => self.not_planned(reason),
            Event::Prepared { device, epoch } => self.answered(Phase::Preparing, &device, epoch),
            Event::Ready { device, epoch } if self.phase == Phase::Resetting => {
                self.answered(Phase::Resetting, &device, epoch)
            }
            Event::Ready { device, epoch } => self.answered(Phase::Configuring, &device, epoch),
            Event::Token => self.token(),
            Event::Request => self.request(),
        }
    }

    /// The current plan, or the last one.
    pub fn plan(&self) -> &Arc<Plan> {
        &self.plan
    }

    /// The plan that the ring was brought up with.
    pub fn first_plan(&self) -> &Arc<Plan> {
        &self.first
    }

    /// The current epoch.
    pub fn epoch(&self) -> u32 {
        self.epoch
    }

    /// Whether passes may begin.
    pub fn is_running(&self) -> bool {
        self.phase == Phase::Running
    }

    /// Whether passes could ever begin. Until then a loss is a mistake in how the ring was set up.
    pub fn has_begun(&self) -> bool {
        self.has_begun
    }

    /// Whether the next request has to plan first.
    pub fn must_plan(&self) -> bool {
        self.phase != Phase::Running || self.rejoins.is_some()
    }

    /// Whether a device may not be planned with.
    pub fn is_gone(&self, device: &str) -> bool {
        self.gone.contains_key(device)
    }

    /// The devices that may not be planned with.
    pub fn gone(&self) -> BTreeSet<String> {
        self.gone.keys().cloned().collect()
    }

    /// The devices that have not answered yet.
    pub fn awaited(&self) -> &BTreeSet<String> {
        &self.awaited
    }

    /// Finds a plan by spreading the layers of the devices that are gone over the others.
    pub fn spread_layers(&self) -> Result<Plan, NoPlan> {
        spread::without(&self.first, &self.gone())
    }

    /// Finds a plan with a planner that knows all devices. The plan keeps what the tokens so far depend on: the size
    /// and format of the caches, the format of activations, the draft model. It also keeps the devices' addresses.
    pub fn replan(&self, replanner: &dyn Replanner, cluster: &Cluster) -> Result<Plan, NoPlan> {
        let head = self.head();
        let there = cluster.members.iter().filter(|member| !self.is_gone(&member.name));
        let members: Vec<_> = there.cloned().collect();
        let Some(place) = members.iter().position(|member| member.name == head) else {
            return Err(NoPlan { reason: format!("the scenario has no device `{head}`, which is the head") });
        };
        let mut plan = replanner.replan(&Cluster { members, head: place, ..cluster.clone() })?;
        let first = &self.first;
        (plan.context, plan.sequences) = (first.context, first.sequences);
        (plan.activations, plan.kv_cache) = (first.activations, first.kv_cache);
        plan.draft.clone_from(&first.draft);
        for device in &mut plan.devices {
            let known = first.position(&device.name).and_then(|place| first.devices[place].address.clone());
            device.address = known.or_else(|| device.address.take());
        }
        Ok(plan)
    }

    fn head(&self) -> &str {
        &self.first.devices[0].name
    }

    fn planned(&mut self, plan: Plan) -> Vec<Step> {
        let Phase::Planning { is_intact } = self.phase else { return vec![] };
        if let Some(reason) = self.refusal(&plan) {
            return self.not_planned(reason);
        }
        if is_intact && is_same_ring(&plan, &self.plan) {
            self.phase = Phase::Running;
            return vec![];
        }
        self.members = names(&plan);
        self.plan = Arc::new(plan);
        let mut steps = vec![Step::Replanned { missing: self.missing.take() }];
        steps.extend(self.prepare());
        steps
    }

    /// Why the ring cannot continue with a plan.
    fn refusal(&self, plan: &Plan) -> Option<String> {
        let head = &plan.devices[0].name;
        if head != self.head() {
            return Some(format!("its head would be `{head}`, and the tokens are on another device"));
        }
        // Otherwise a planner that uses devices that are gone would be called forever.
        let gone = plan.devices.iter().find(|device| self.is_gone(&device.name));
        let gone = gone.map(|device| format!("the new plan uses `{}`, which is gone", device.name));
        gone.or_else(|| plan.only_simulated())
    }

    fn not_planned(&mut self, reason: String) -> Vec<Step> {
        let Phase::Planning { is_intact } = self.phase else { return vec![] };
        if is_intact {
            self.phase = Phase::Running;
            return vec![Step::NotReplanned { missing: None, reason }];
        }
        self.give_up(self.missing.clone(), reason)
    }

    fn give_up(&mut self, missing: Option<String>, reason: String) -> Vec<Step> {
        self.phase = Phase::Over;
        self.awaited.clear();
        let lost = self.gone.values().cloned().collect::<Vec<_>>().join(", ");
        vec![Step::NotReplanned { missing, reason: reason.clone() }, Step::GiveUp { lost, reason }]
    }

    fn prepare(&mut self) -> Vec<Step> {
        self.epoch += 1;
        self.connected = self.epoch;
        self.phase = Phase::Preparing;
        self.awaited = self.members.iter().filter(|&name| name != self.head()).cloned().collect();
        let mut steps = vec![Step::Prepare { epoch: self.epoch }];
        steps.extend(self.advance());
        steps
    }

    /// Continues once the last answer has arrived.
    fn advance(&mut self) -> Vec<Step> {
        if !self.awaited.is_empty() {
            return vec![];
        }
        let epoch = self.epoch;
        if self.phase == Phase::Preparing {
            self.phase = Phase::Configuring;
            self.awaited = self.members.clone();
            return vec![Step::Configure { epoch }];
        }
        (self.phase, self.has_begun) = (Phase::Running, true);
        vec![Step::Begin { epoch }]
    }

    fn answered(&mut self, phase: Phase, device: &str, epoch: u32) -> Vec<Step> {
        if self.phase != phase || self.epoch != epoch || !self.awaited.remove(device) {
            return vec![];
        }
        self.advance()
    }

    /// Whether the loss of a member ends what the ring does.
    fn is_at_work(&self) -> bool {
        !matches!(self.phase, Phase::Planning { is_intact: false } | Phase::Over)
    }

    fn lose(&mut self, device: String, since: u64, reason: String) -> Vec<Step> {
        if device == self.head() {
            return self.give_up(Some(device), "the head is gone, and with it the tokens".into());
        }
        self.gone.entry(device.clone()).or_insert_with(|| reason.clone());
        if !self.members.remove(&device) {
            return vec![];
        }
        self.awaited.remove(&device);
        self.missing = Some(device.clone());
        let missed = Step::Missed { device, since, reason };
        if !self.is_at_work() {
            return vec![missed];
        }
        self.phase = Phase::Planning { is_intact: false };
        vec![missed, Step::Plan]
    }

    fn isolated(&mut self, since: u64, reason: String) -> Vec<Step> {
        let head = self.head().to_owned();
        let others: Vec<String> = self.members.iter().filter(|&name| *name != head).cloned().collect();
        if others.is_empty() || !self.is_at_work() {
            return vec![];
        }
        for device in others {
            self.members.remove(&device);
            self.gone.entry(device).or_insert_with(|| reason.clone());
        }
        self.awaited.clear();
        self.missing = Some(head.clone());
        self.phase = Phase::Planning { is_intact: false };
        vec![Step::Missed { device: head, since, reason }, Step::Plan]
    }

    fn returned(&mut self, device: &str, rejoins: Return) -> Vec<Step> {
        let was_gone = self.gone.remove(device).is_some();
        self.missing.take_if(|missing| *missing == device);
        match rejoins {
            Return::BetweenTokens => self.rejoins = Some(rejoins),
            // The current plan was made without it.
            Return::NextRequest if was_gone => drop(self.rejoins.get_or_insert(rejoins)),
            Return::NextRequest => {}
        }
        vec![]
    }

    fn cut(&mut self, epoch: u32, by: String, peer: String, (since, reason): (u64, String)) -> Vec<Step> {
        let is_connected = matches!(self.phase, Phase::Configuring | Phase::Resetting | Phase::Running);
        let are_members = self.members.contains(&by) && self.members.contains(&peer);
        if !is_connected || epoch != self.connected || !are_members {
            return vec![];
        }
        self.cuts += 1;
        if self.cuts > FORGIVEN_CUTS {
            let lost = if peer == self.head() { by } else { peer };
            return self.lose(lost, since, reason);
        }
        let mut steps = vec![Step::Replanned { missing: None }];
        steps.extend(self.prepare());
        steps
    }

    fn token(&mut self) -> Vec<Step> {
        self.cuts = 0;
        if self.phase != Phase::Running {
            return vec![];
        }
        match self.rejoins.take_if(|rejoins| *rejoins == Return::BetweenTokens) {
            Some(_) => self.plan_intact(),
            None => vec![],
        }
    }

    fn request(&mut self) -> Vec<Step> {
        self.cuts = 0;
        let rejoins = self.rejoins.take().is_some();
        match self.phase {
            Phase::Running if rejoins => self.plan_intact(),
            Phase::Running => {
                self.epoch += 1;
                self.phase = Phase::Resetting;
                self.awaited = self.members.clone();
                vec![Step::Reset { epoch: self.epoch }]
            }
            _ => {
                self.phase = Phase::Planning { is_intact: false };
                vec![Step::Plan]
            }
        }
    }

    fn plan_intact(&mut self) -> Vec<Step> {
        self.phase = Phase::Planning { is_intact: true };
        vec![Step::Plan]
    }
}

fn names(plan: &Plan) -> BTreeSet<String> {
    plan.devices.iter().map(|device| device.name.clone()).collect()
}

/// Whether two plans make one ring: the same parts of the model at the same places.
fn is_same_ring(one: &Plan, other: &Plan) -> bool {
    let parts = |plan: &Plan| {
        let devices = plan.devices.iter();
        devices.map(|it| (it.name.clone(), it.window, it.gpu_layers, it.residency)).collect::<Vec<_>>()
    };
    one.rounds == other.rounds && parts(one) == parts(other)
}

#[cfg(test)]
mod tests;
