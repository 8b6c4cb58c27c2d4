//! Recovery: decides what the head of a ring does when a device is lost, a connection breaks or a device returns.
//!
//! Recovery is a pure reducer, `(state, event) -> (state, steps)`. The executor executes the steps over connections,
//! the simulator in simulated time.
//!
//! A ring is configured in two phases, so that no device sends to a device that is still serving an earlier ring:
//! first every device prepares for an epoch and drops its work, then all receive the plan and connect. Each
//! request and each new ring has an epoch, and responses of earlier epochs are ignored.
//!
//! When a device is lost, the head plans for the remaining devices. If a connection between two available devices
//! breaks, the same ring is built once more; if another connection breaks before the next token, the unreachable device
//! is treated as lost. A device that sends activations that no correct device sends is treated as lost at once. So the
//! number of epochs between two tokens is at most the number of devices plus `FORGIVEN_CUTS`.
//!
//! Not here: how a plan is found ([`Replanner`], `redistribution`), whether it fits in the memory of the devices (the
//! runner reports [`Event::NoPlan`] if it does not), and which pass enters next ([`crate::schedule::Generation`]).

pub mod heartbeat;
mod redistribution;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use hearth_profiles::Seconds;
use hearth_schema::events::RejoinTime;
use hearth_schema::plan::Plan;

use crate::cluster::Cluster;

/// A planner that can be called during a run. With this trait, simulator and executor do not depend on a planner.
pub trait Replanner: std::fmt::Debug + Send + Sync {
    /// Returns a plan for the devices of the cluster. The head, which stores the generated tokens, must stay the same.
    fn replan(&self, available: &Cluster) -> Result<Plan, ReplanError>;

    /// Returns the time per token of a plan with the devices of the cluster; `None` if they cannot run it.
    fn predict(&self, plan: &Plan, cluster: &Cluster) -> Option<Seconds>;
}

/// The reason why there is no plan: text for users, without a full stop at the end.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{reason}")]
pub struct ReplanError {
    pub reason: String,
}

/// An event of the ring, as the head observes it.
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// The ring of the first plan has to be built.
    Start,
    /// A device stopped responding, disconnected or failed. `since` is the time of its last response, in nanoseconds
    /// of the runner's clock. The loss of the head itself is permanent.
    DeviceLost { device: String, since: u64, reason: String },
    /// No device has responded to the head since the time `since`, so the head is disconnected from the network.
    HeadIsolated { since: u64, reason: String },
    /// The head cannot reach a device when it searches for devices before planning.
    DeviceAbsent { device: String },
    /// A device can be reached again. `rejoins` says when a new plan may include the device.
    DeviceReturned { device: String, rejoins: RejoinTime },
    /// The device `reporter` cannot exchange activations with `peer`. Their connection was opened for `epoch`.
    LinkCut { epoch: u32, reporter: String, peer: String, since: u64, reason: String },
    /// The device `reporter` received activations from `peer` that no correct device sends, over a connection that was
    /// opened for `epoch`.
    Fault { epoch: u32, reporter: String, peer: String, since: u64, reason: String },
    /// The result of [`Step::Plan`]: a plan for the available devices.
    Planned(Box<Plan>),
    /// The result of [`Step::Plan`]: there is no plan for the available devices.
    NoPlan { reason: String },
    /// A device has prepared for the ring of an epoch.
    Prepared { device: String, epoch: u32 },
    /// A device is ready for the passes of an epoch.
    Ready { device: String, epoch: u32 },
    /// The tokens of a pass are complete.
    Token,
    /// The devices compute at other speeds or have other memory than planned ([`crate::adaptation`]), or devices have
    /// returned and there is a reason not to wait for the next request.
    ConditionsChanged,
    /// A request begins. If [`Recovery::must_plan`] is true, the ring is planned first, and the event must be repeated.
    Request,
}

/// A step that the runner (the simulator or the executor) has to execute.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// Record the loss of a device and close the connection to it.
    RecordLoss { device: String, since: u64, reason: String },
    /// Find a plan without [`Recovery::unavailable_devices`]. Report [`Event::Planned`] or [`Event::NoPlan`].
    Plan,
    /// Record that [`Recovery::plan`] is now active. `missing` is the device whose loss led to this plan.
    Replanned { missing: Option<String> },
    /// Record that no new plan is adopted, for the given reason. `missing` is the device whose loss required a new
    /// plan.
    NotReplanned { missing: Option<String>, reason: String },
    /// Tell all devices of the plan except the head to prepare for the epoch.
    Prepare { epoch: u32 },
    /// Send the plan of the epoch to all devices, including the head.
    Configure { epoch: u32 },
    /// Tell all devices, including the head, to drop the state of all requests with an earlier epoch.
    Reset { epoch: u32 },
    /// Let the passes of the epoch begin: all devices of the plan are ready.
    Begin { epoch: u32 },
    /// Stop, because the ring cannot continue. `lost` says why devices are unavailable, `reason` why there is no plan.
    GiveUp { lost: String, reason: String },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// The head searches for a new plan. If it finds none, an intact ring continues with its current plan.
    Planning {
        is_intact: bool,
    },
    Preparing,
    Configuring,
    Resetting,
    Running,
    /// The ring has ended: it cannot complete the current request.
    Over,
}

/// The recovery state of a ring, as the head sees it.
#[derive(Debug, Clone, PartialEq)]
pub struct Recovery {
    first: Arc<Plan>,
    plan: Arc<Plan>,
    /// The names of the devices of the plan that have not been lost.
    members: BTreeSet<String>,
    /// The devices that no plan may use, each with the reason.
    unavailable: BTreeMap<String, String>,
    /// The devices whose response is still awaited in the current phase of the configuration.
    awaited: BTreeSet<String>,
    epoch: u32,
    /// The epoch for which the current connections were opened.
    connected: u32,
    phase: Phase,
    /// The number of broken connections since the last token.
    cuts: u32,
    /// The device whose loss led to the current search for a plan.
    missing: Option<String>,
    /// When a new plan may include the returned devices; `None` if no device has returned.
    rejoins: Option<RejoinTime>,
    has_begun: bool,
}

/// Maximum number of broken connections between two tokens for which the same ring is built again.
/// source: assumed, one connection may break by itself
const FORGIVEN_CUTS: u32 = 1;

impl Recovery {
    /// Creates the state for the first plan, whose ring is not built until [`Event::Start`].
    pub fn new(plan: Arc<Plan>) -> Self {
        Self {
            members: names(&plan),
            first: plan.clone(),
            plan,
            unavailable: BTreeMap::new(),
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

    pub fn with_running_ring(plan: Arc<Plan>) -> Self {
        Self { epoch: 1, connected: 1, phase: Phase::Running, has_begun: true, ..Self::new(plan) }
    }

    /// Handles an event and returns the steps to execute, in order.
    pub fn react(&mut self, event: Event) -> Vec<Step> {
        match event {
            Event::Start => self.prepare(),
            Event::DeviceLost { device, since, reason } => self.lose(device, since, reason),
            Event::HeadIsolated { since, reason } => self.isolated(since, reason),
            Event::DeviceAbsent { device } => {
                self.unavailable.entry(device).or_insert_with(|| "it cannot be reached".into());
                vec![]
            }
            Event::DeviceReturned { device, rejoins } => self.returned(&device, rejoins),
            Event::LinkCut { epoch, reporter, peer, since, reason } => {
                self.cut(epoch, [reporter, peer], since, reason)
            }
            Event::Fault { epoch, reporter, peer, since, reason } => {
                self.fault(epoch, [reporter, peer], since, reason)
            }
            Event::Planned(plan) => self.planned(*plan),
            Event::NoPlan { reason } => self.not_planned(reason),
            Event::Prepared { device, epoch } => self.responded(&[Phase::Preparing], &device, epoch),
            Event::Ready { device, epoch } => {
                self.responded(&[Phase::Configuring, Phase::Resetting], &device, epoch)
            }
            Event::Token => self.token(),
            Event::ConditionsChanged if self.phase == Phase::Running => {
                self.rejoins = None;
                vec![self.start_planning(true)]
            }
            Event::ConditionsChanged => vec![],
            Event::Request => self.request(),
        }
    }

    /// Returns the current plan, or the last plan if the ring has ended.
    pub fn plan(&self) -> &Arc<Plan> {
        &self.plan
    }

    pub fn first_plan(&self) -> &Arc<Plan> {
        &self.first
    }

    pub fn epoch(&self) -> u32 {
        self.epoch
    }

    /// Whether the ring is configured and passes may begin.
    pub fn is_ring_running(&self) -> bool {
        self.phase == Phase::Running
    }

    /// Whether the ring has ever been running. Before that, the loss of a device points to a mistake in the setup.
    pub fn has_ever_run(&self) -> bool {
        self.has_begun
    }

    /// Whether a new plan is needed before the next request.
    pub fn must_plan(&self) -> bool {
        self.phase != Phase::Running || self.rejoins.is_some()
    }

    pub fn is_unavailable(&self, device: &str) -> bool {
        self.unavailable.contains_key(device)
    }

    pub fn unavailable_devices(&self) -> BTreeSet<String> {
        self.unavailable.keys().cloned().collect()
    }

    pub fn awaited_devices(&self) -> &BTreeSet<String> {
        &self.awaited
    }

    /// Finds a plan without a planner: distributes the layers of the unavailable devices over the available devices.
    pub fn redistribute_layers(&self) -> Result<Plan, ReplanError> {
        redistribution::redistribute_layers(&self.first, &self.unavailable_devices())
    }

    /// Finds a plan for the available devices of `cluster` with a planner. The plan keeps the addresses of the devices
    /// and everything that the tokens so far depend on: size and format of the KV caches, format of the
    /// activations, and draft model. For the same model file it also keeps the digests of the weights.
    pub fn replan(&self, replanner: &dyn Replanner, cluster: &Cluster) -> Result<Plan, ReplanError> {
        let head = self.head();
        let available = cluster.members.iter().filter(|member| !self.is_unavailable(&member.name));
        let members: Vec<_> = available.cloned().collect();
        let Some(index) = members.iter().position(|member| member.name == head) else {
            return Err(ReplanError { reason: format!("the head `{head}` is not a device of the scenario") });
        };
        let mut plan = replanner.replan(&Cluster { members, head: index, ..cluster.clone() })?;
        let first = &self.first;
        (plan.context_length, plan.sequences) = (first.context_length, first.sequences);
        plan.cache_tokens = first.cache_tokens;
        if plan.cache_tokens.is_some() && plan.devices.iter().any(|device| device.gpu_layers > 0) {
            let reason =
                "the new plan has layers on a GPU, where sequences cannot share the memory of their caches";
            return Err(ReplanError { reason: reason.into() });
        }
        (plan.activation_format, plan.kv_cache_format) = (first.activation_format, first.kv_cache_format);
        plan.draft_model.clone_from(&first.draft_model);
        if plan.model.file_digest == first.model.file_digest {
            plan.model.weight_digests.clone_from(&first.model.weight_digests);
        }
        for device in &mut plan.devices {
            let known = first.devices.iter().find(|known| known.name == device.name);
            let address = known.and_then(|known| known.address.clone());
            device.address = address.or_else(|| device.address.take());
        }
        Ok(plan)
    }

    fn head(&self) -> &str {
        &self.first.devices[0].name
    }

    fn planned(&mut self, plan: Plan) -> Vec<Step> {
        let Phase::Planning { is_intact } = self.phase else { return vec![] };
        if let Some(reason) = self.rejection_reason(&plan) {
            return self.not_planned(reason);
        }
        if is_intact && is_same_ring(&plan, &self.plan) {
            self.phase = Phase::Running;
            return vec![];
        }
        self.members = names(&plan);
        self.plan = Arc::new(plan);
        let replanned = Step::Replanned { missing: self.missing.take() };
        [vec![replanned], self.prepare()].concat()
    }

    fn rejection_reason(&self, plan: &Plan) -> Option<String> {
        let (head, own) = (&plan.devices[0].name, self.head());
        if head != own {
            return Some(format!("the new head would be `{head}`, but the generated tokens are on `{own}`"));
        }
        // Without this check, a planner that uses unavailable devices would be called forever.
        let unavailable = plan.devices.iter().find(|device| self.is_unavailable(&device.name));
        let reason = unavailable.map(|it| format!("the new plan uses `{}`, which is unavailable", it.name));
        reason.or_else(|| plan.simulation_only_reason())
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
        let lost = self.unavailable.values().cloned().collect::<Vec<_>>().join(", ");
        vec![Step::NotReplanned { missing, reason: reason.clone() }, Step::GiveUp { lost, reason }]
    }

    fn prepare(&mut self) -> Vec<Step> {
        self.epoch += 1;
        self.connected = self.epoch;
        self.phase = Phase::Preparing;
        self.awaited = self.members.iter().filter(|&name| name != self.head()).cloned().collect();
        [vec![Step::Prepare { epoch: self.epoch }], self.advance()].concat()
    }

    /// Enters the next phase if no response is awaited any more.
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

    /// Handles the response of a device for `epoch`. The response is valid only in one of the phases `phases`.
    fn responded(&mut self, phases: &[Phase], device: &str, epoch: u32) -> Vec<Step> {
        if !phases.contains(&self.phase) || self.epoch != epoch || !self.awaited.remove(device) {
            return vec![];
        }
        self.advance()
    }

    /// Whether the loss of a device of the plan requires a new plan.
    fn depends_on_members(&self) -> bool {
        !matches!(self.phase, Phase::Planning { is_intact: false } | Phase::Over)
    }

    fn lose(&mut self, device: String, since: u64, reason: String) -> Vec<Step> {
        if device == self.head() {
            return self
                .give_up(Some(device), "the head device is lost, and the generated tokens with it".into());
        }
        self.unavailable.entry(device.clone()).or_insert_with(|| reason.clone());
        if !self.members.remove(&device) {
            return vec![];
        }
        self.awaited.remove(&device);
        self.missing = Some(device.clone());
        let loss = Step::RecordLoss { device, since, reason };
        if self.depends_on_members() { vec![loss, self.start_planning(false)] } else { vec![loss] }
    }

    fn isolated(&mut self, since: u64, reason: String) -> Vec<Step> {
        let head = self.head().to_owned();
        let others: Vec<String> = self.members.iter().filter(|&name| *name != head).cloned().collect();
        if others.is_empty() || !self.depends_on_members() {
            return vec![];
        }
        for device in others {
            self.members.remove(&device);
            self.unavailable.entry(device).or_insert_with(|| reason.clone());
        }
        self.awaited.clear();
        self.missing = Some(head.clone());
        vec![Step::RecordLoss { device: head, since, reason }, self.start_planning(false)]
    }

    fn returned(&mut self, device: &str, rejoins: RejoinTime) -> Vec<Step> {
        let was_unavailable = self.unavailable.remove(device).is_some();
        self.missing.take_if(|missing| *missing == device);
        match rejoins {
            RejoinTime::BetweenTokens => self.rejoins = Some(rejoins),
            // Only a device that the current plan excludes is a reason to plan again.
            RejoinTime::NextRequest if was_unavailable => drop(self.rejoins.get_or_insert(rejoins)),
            RejoinTime::NextRequest => {}
        }
        vec![]
    }

    /// Whether a report about the connection of two devices, which was opened for `epoch`, is about the current ring.
    fn is_current(&self, epoch: u32, devices: &[String; 2]) -> bool {
        let is_connected = matches!(self.phase, Phase::Configuring | Phase::Resetting | Phase::Running);
        is_connected && epoch == self.connected && devices.iter().all(|device| self.members.contains(device))
    }

    fn fault(&mut self, epoch: u32, devices: [String; 2], since: u64, reason: String) -> Vec<Step> {
        if !self.is_current(epoch, &devices) {
            return vec![];
        }
        let [reporter, peer] = devices;
        // The head's own activations are valid, so a device that reports the head is at fault itself.
        let lost = if peer == self.head() { reporter } else { peer };
        if lost == self.head() { vec![] } else { self.lose(lost, since, reason) }
    }

    fn cut(&mut self, epoch: u32, devices: [String; 2], since: u64, reason: String) -> Vec<Step> {
        if !self.is_current(epoch, &devices) {
            return vec![];
        }
        let [reporter, peer] = devices;
        self.cuts += 1;
        if self.cuts > FORGIVEN_CUTS {
            let lost = if peer == self.head() { reporter } else { peer };
            return self.lose(lost, since, reason);
        }
        [vec![Step::Replanned { missing: None }], self.prepare()].concat()
    }

    fn token(&mut self) -> Vec<Step> {
        self.cuts = 0;
        let rejoins = self.rejoins == Some(RejoinTime::BetweenTokens);
        if self.phase != Phase::Running || !rejoins {
            return vec![];
        }
        self.rejoins = None;
        vec![self.start_planning(true)]
    }

    fn request(&mut self) -> Vec<Step> {
        self.cuts = 0;
        let rejoins = self.rejoins.take().is_some();
        match self.phase {
            Phase::Running if rejoins => vec![self.start_planning(true)],
            Phase::Running => {
                self.epoch += 1;
                self.phase = Phase::Resetting;
                self.awaited = self.members.clone();
                vec![Step::Reset { epoch: self.epoch }]
            }
            _ => vec![self.start_planning(false)],
        }
    }

    fn start_planning(&mut self, is_intact: bool) -> Step {
        self.phase = Phase::Planning { is_intact };
        Step::Plan
    }
}

fn names(plan: &Plan) -> BTreeSet<String> {
    plan.devices.iter().map(|device| device.name.clone()).collect()
}

/// Whether two plans describe the same ring: the same devices in the same order, with the same parts of the model.
fn is_same_ring(one: &Plan, other: &Plan) -> bool {
    let parts = |plan: &Plan| {
        let devices = plan.devices.iter();
        devices.map(|it| (it.name.clone(), it.window, it.gpu_layers, it.residency)).collect::<Vec<_>>()
    };
    one.rounds == other.rounds && parts(one) == parts(other)
}

#[cfg(test)]
mod tests;
