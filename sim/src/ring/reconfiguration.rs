//! Reconfiguration of a ring: the effects of a scenario's events, and the new plans that some of them cause.
//!
//! Events of load, clock rate and memory change the resources of a device, which continues to run. A disconnected
//! device stops the ring until the device is reachable again, or until the head detects the loss
//! ([`hearth_core::recovery::heartbeat`]). Then [`hearth_core::recovery`] decides what the head does, and this module
//! executes these steps in simulated time. A new plan takes the one-way latency to each device, and its confirmation
//! takes the one-way latency back. After that, all tokens so far enter the new ring as a prompt, because their keys and
//! values were distributed over the old ring.
//!
//! Deviation: planning and preparing take no time; the head knows at once which devices are reachable; and it plans
//! with the profiles of the devices, not with their background load, unless it adapts ([`super::adaptation`]).
//!
//! Not here: how a device adopts its part of a new plan ([`crate::device::reconfiguration`]).

use std::collections::VecDeque;
use std::sync::Arc;

use hearth_core::adaptation;
use hearth_core::memory::DeviceMemory;
use hearth_core::recovery::{self, ReplanError, Step, heartbeat};
use hearth_core::schedule::batching::BatchLimits;
use hearth_core::schedule::{Event as ScheduleEvent, Schedule};
use hearth_profiles::{Bytes, Seconds};
use hearth_schema::Plan;
use hearth_schema::events::{Change, RejoinTime};
use hearth_schema::run_events::RunEventKind;
use hearth_schema::trace::{Outcome, StepKind};

use crate::device::context::{Event, Message};
use crate::device::{DeviceSim, setup};
use crate::engine::Nanos;
use crate::error::SimError;
use crate::input::{self, Input};
use crate::trace;

use super::Simulation;
use super::reachability::HeldMessage;
use super::timeline::TimelineAction;

impl<'a> Simulation<'a> {
    /// Applies the background load at the start of the run, when memory that an event will swap out cannot be used yet.
    pub fn apply_initial_background_load(&mut self) {
        for id in 0..self.ring.devices.len() {
            if self.timeline.has_swap_event(self.device_name(id)) {
                self.apply_load(id);
            }
        }
    }

    pub fn device_name(&self, device_id: usize) -> &'a str {
        &self.input.cluster.members[self.ring.member_indices[device_id]].name
    }

    fn member(&self, name: &str) -> Option<usize> {
        self.input.cluster.members.iter().position(|member| member.name == name)
    }

    pub fn schedule_next_action(&mut self) {
        if let Some(at) = self.timeline.next_due_time() {
            self.engine.set_timer(self.timeline_timer, at, Event::Timeline);
        }
    }

    pub fn run_due_actions(&mut self) -> Result<(), SimError> {
        let now = self.engine.now();
        while let Some(action) = self.timeline.pop_due_action(now).filter(|_| !self.has_ended) {
            match action {
                TimelineAction::Begin(index) => self.begin_event(index)?,
                TimelineAction::Ramp(index, step) => {
                    self.timeline.set_ramp_step(index, step);
                    self.apply_event_load(index);
                }
                TimelineAction::End(index) => self.end_event(index),
                TimelineAction::CheckHeartbeat(member, since)
                    if self.reachability.unreachable_since(member) == Some(since) =>
                {
                    self.heartbeat_missed(member, since)?;
                }
                // The head starts its next pass after this event, unless there is a newer plan by then.
                TimelineAction::CheckHeartbeat(..) | TimelineAction::Ready => {}
            }
        }
        self.schedule_next_action();
        Ok(())
    }

    pub fn on_tokens(&mut self, count: u32) -> Result<(), SimError> {
        let now = self.engine.now();
        let before = self.generated_tokens;
        self.generated_tokens = before.saturating_add(count);
        self.timeline.end_replanning(now);
        if self.has_ended {
            return Ok(());
        }
        (before..self.generated_tokens).for_each(|token| self.timeline.on_token(now, token + 1));
        self.run_due_actions()?;
        if self.has_ended {
            return Ok(());
        }
        self.react(recovery::Event::Token)?;
        if self.has_ended { Ok(()) } else { self.adapt() }
    }

    fn begin_event(&mut self, index: usize) -> Result<(), SimError> {
        let now = self.engine.now();
        let (change, device) = self.timeline.change_and_device(index);
        let member = device.and_then(|name| self.member(name));
        match change {
            Change::Returns(when) => {
                let Some(member) = member else { return Ok(()) };
                let device = self.input.cluster.members[member].name.clone();
                self.timeline.end_absence(now, &device);
                self.reconnect(member);
                self.react(recovery::Event::DeviceReturned { device, rejoins: when })?;
            }
            Change::Leaves if member == Some(self.ring.member_indices[0]) => {
                self.timeline.begin_event(now, index, Seconds(0.0));
                let (device, reason) = (self.device_name(0).to_owned(), "the device left".into());
                self.react(recovery::Event::DeviceLost { device, since: now, reason })?;
            }
            Change::Leaves | Change::Stalls => {
                self.timeline.begin_event(now, index, Seconds(0.0));
                if let (None, Some(lasts)) = (member, self.timeline.event_duration(index)) {
                    // Messages on a Wi-Fi channel continue after the stall; later messages are held.
                    self.collect_deliveries();
                    self.network.links.stall_all_channels(now, now.saturating_add(lasts.to_nanos()));
                    self.collect_deliveries();
                }
                let members = member.map_or(0..self.input.cluster.members.len(), |member| member..member + 1);
                members.for_each(|member| self.disconnect(member));
            }
            Change::Memory(_) | Change::Swap(_) | Change::Load(_) | Change::Slow(_) | Change::DiskLoad(_) => {
                let swappable = member.map_or(Bytes::ZERO, |member| self.swappable(member));
                let ramp_time = match change {
                    Change::Memory(memory) => memory.ramp_time.unwrap_or(Seconds(0.0)),
                    Change::Swap(swap) => swappable / swap.swap_out_rate,
                    _ => Seconds(0.0),
                };
                self.timeline.begin_event(now, index, ramp_time);
                self.apply_event_load(index);
            }
        }
        Ok(())
    }

    fn end_event(&mut self, index: usize) {
        self.timeline.end_event(self.engine.now(), index);
        let (change, device) = self.timeline.change_and_device(index);
        if change == Change::Stalls {
            let member = device.and_then(|name| self.member(name));
            let members = member.map_or(0..self.input.cluster.members.len(), |member| member..member + 1);
            members.for_each(|member| self.reconnect(member));
        } else {
            self.apply_event_load(index);
        }
    }

    /// Returns the memory of other programs on a member that can be swapped out.
    fn swappable(&self, member: usize) -> Bytes {
        let memory = &self.input.cluster.members[member].device.memory;
        memory.obtainable_bytes().saturating_sub(memory.available_memory.value)
    }

    fn apply_event_load(&mut self, index: usize) {
        let (_, device) = self.timeline.change_and_device(index);
        let id =
            device.and_then(|name| (0..self.ring.devices.len()).find(|&id| self.device_name(id) == name));
        if let Some(id) = id {
            self.apply_load(id);
        }
    }

    /// Applies the background load of a device. Ends the run if too little memory remains for the device's weights.
    fn apply_load(&mut self, id: usize) {
        let swappable = self.swappable(self.ring.member_indices[id]);
        let background_load = self.timeline.background_load(self.device_name(id), swappable);
        let device = &self.ring.devices[id];
        let works = self.ring.order.contains(&id) && device.reads_weights_from_page_cache();
        let memory_budget = background_load.memory_budget(self.ring.memories[id].weight_cache);
        if memory_budget.is_none() && works {
            let what = "other programs leave too little memory for weights";
            return self.end_out_of_memory(id, Outcome::OutOfMemory, what);
        }
        let memory_budget = memory_budget.unwrap_or(Bytes::ZERO);
        self.change_device(id, |device, ctx| device.apply_load(&background_load, memory_budget, ctx));
    }

    /// Returns the unreclaimable memory of a device, including what other programs have allocated during the run.
    pub fn unreclaimable_bytes(&self, device_id: usize) -> Bytes {
        let background_load = self.timeline.background_load(self.device_name(device_id), Bytes::ZERO);
        self.ring.memories[device_id].unreclaimable_memory + Bytes(background_load.allocated_bytes as u64)
    }

    /// Ends the run because a device has too little memory; `what` explains the reason to users.
    pub fn end_out_of_memory(&mut self, device_id: usize, outcome: Outcome, what: &str) {
        let (now, name) = (self.engine.now(), self.device_name(device_id));
        self.record_event(RunEventKind::OutOfMemory, Some(name), now, what.into());
        (self.outcome, self.has_ended) = (outcome, true);
    }

    /// Logs a run event from `since` until now.
    fn record_event(&mut self, kind: RunEventKind, device: Option<&str>, since: Nanos, what: String) {
        let now = self.engine.now();
        self.timeline.log_run_event(kind, device.map(str::to_owned), since, what).end_ns = Some(now);
    }

    /// Returns whether one of two devices, given by their IDs, is unreachable now, so that messages must be held.
    pub fn is_disconnected(&self, from: usize, to: usize) -> bool {
        let members = [from, to].map(|id| self.ring.member_indices[id]);
        !members.iter().all(|&member| self.reachability.is_reachable(member))
    }

    /// Delivers activations to a device, or holds them if the sender or the device is unreachable.
    pub fn on_delivery(&mut self, device_id: usize, message: Message) -> Result<(), SimError> {
        if self.is_disconnected(message.sender_id, device_id) {
            let held = HeldMessage { receiver: device_id, message, unsent_since: None };
            self.reachability.held_messages.push(held);
            return Ok(());
        }
        self.with_device(device_id, |device, ctx| device.deliver(message, ctx))
    }

    fn disconnect(&mut self, member: usize) {
        let now = self.engine.now();
        if self.reachability.disconnect(now, member) {
            self.timeline
                .schedule(heartbeat::detection_time_ns(now), TimelineAction::CheckHeartbeat(member, now));
        }
    }

    fn reconnect(&mut self, member: usize) {
        if !self.reachability.reconnect(member) {
            return;
        }
        let now = self.engine.now();
        let deliverable = self.reachability.pop_deliverable_messages(&self.ring.member_indices);
        for HeldMessage { receiver: to, message, unsent_since } in deliverable {
            match unsent_since {
                Some(submitted) => self.transmit(to, message, submitted),
                None => self.engine.schedule_at(now, Event::Deliver(to, message)),
            }
        }
    }

    /// Handles the missed heartbeat of a member. If it is the head device itself, it cannot reach the other members.
    fn heartbeat_missed(&mut self, member: usize, since: Nanos) -> Result<(), SimError> {
        let (device, reason) = (self.input.cluster.members[member].name.clone(), "no heartbeat".into());
        self.react(if member == self.ring.member_indices[0] {
            recovery::Event::HeadIsolated { since, reason }
        } else {
            recovery::Event::DeviceLost { device, since, reason }
        })
    }

    /// Passes an event to [`hearth_core::recovery`] and executes the steps that it returns.
    pub(super) fn react(&mut self, event: recovery::Event) -> Result<(), SimError> {
        let mut steps = VecDeque::from(self.recovery.react(event));
        while let Some(step) = steps.pop_front() {
            let now = self.engine.now();
            match step {
                Step::RecordLoss { device, since, reason } => {
                    self.record_event(RunEventKind::Silent, Some(&device), since, reason);
                }
                Step::Plan => {
                    let result = self.replan()?;
                    steps.extend(self.recovery.react(result));
                }
                Step::Replanned { missing } => self.record_replanned(missing),
                Step::NotReplanned { missing, reason } => {
                    self.record_event(RunEventKind::NotReplanned, missing.as_deref(), now, reason);
                }
                Step::Prepare { epoch } => {
                    self.stop_ring();
                    // The round trip to a device is simulated once, when the device is configured.
                    for device in self.recovery.awaited_devices().clone() {
                        steps.extend(self.recovery.react(recovery::Event::Prepared { device, epoch }));
                    }
                }
                Step::Configure { .. } => self.configure_ring()?,
                Step::GiveUp { .. } => (self.outcome, self.has_ended) = (Outcome::Killed, true),
                // A run is one request, and a pass begins when the head is free.
                Step::Reset { .. } | Step::Begin { .. } => {}
            }
        }
        Ok(())
    }

    /// Makes a plan for the reachable devices, and checks that the plan fits in their memory.
    fn replan(&mut self) -> Result<recovery::Event, SimError> {
        let (all, head) = (self.input.cluster, self.ring.member_indices[0]);
        let is_alone = !self.reachability.is_reachable(head);
        let others = all.members.iter().enumerate().filter(|&(member, _)| member != head);
        for (member, device) in others.map(|(member, it)| (member, it.name.clone())) {
            self.recovery.react(if !is_alone && self.reachability.is_reachable(member) {
                recovery::Event::DeviceReturned { device, rejoins: RejoinTime::NextRequest }
            } else {
                recovery::Event::DeviceAbsent { device }
            });
        }
        let found = match self.scenario_events.replanner {
            None => Err(ReplanError { reason: "this run has no replanner".into() }),
            Some(replanner) => match &self.adaptation {
                Some(adaptation) => self.recovery.replan(replanner, &adaptation.reducer.cluster()),
                None => self.recovery.replan(replanner, all),
            },
        };
        let reason = match found {
            Ok(plan) => match self.misfit(&plan)? {
                None => return Ok(recovery::Event::Planned(Box::new(plan))),
                Some(reason) => reason,
            },
            Err(ReplanError { reason }) => reason,
        };
        Ok(recovery::Event::NoPlan { reason })
    }

    /// Returns the reason why a plan does not fit in the memory of its devices; `None` if it fits.
    pub(super) fn misfit(&self, plan: &Plan) -> Result<Option<String>, SimError> {
        let input = Input { plan, ..self.input };
        let devices = input::check_input(&input)?;
        for (index, device) in devices.iter().enumerate() {
            let name = &plan.devices[index].name;
            let fits =
                |memory: &DeviceMemory| memory.shortages.is_empty() || input.options.ignore_memory_shortages;
            let memory = setup::device_memory(&input, index, device).filter(fits);
            let withheld = self.member(name).map_or(Bytes::ZERO, |member| self.swappable(member));
            let background_load = self.timeline.background_load(name, withheld);
            let budget = memory.as_ref().map(|memory| background_load.memory_budget(memory.weight_cache));
            if budget.is_none_or(|budget| budget.is_none() && plan.devices[index].window > 0) {
                return Ok(Some(format!("the new plan does not fit in the memory of `{name}`")));
            }
        }
        Ok(None)
    }

    fn record_replanned(&mut self, missing: Option<String>) {
        let again = self.generation.restart();
        if let Some(requests) = &mut self.requests {
            requests.lose_caches();
        }
        let plan = Plan::clone(self.recovery.plan());
        let windows = plan.devices.iter().map(|device| format!("{} {}", device.name, device.window));
        let mut what = format!("{}; {again} tokens computed again", windows.collect::<Vec<_>>().join(", "));
        if let Some(adaptation) = &mut self.adaptation {
            if let Some(cause) = adaptation.reducer.summary().filter(|_| missing.is_none()) {
                what = format!("{what}; {cause}");
            }
            adaptation.reducer.react(adaptation::Event::Replanned);
        }
        let now = self.engine.now();
        let run_event = self.timeline.log_run_event(RunEventKind::Replanned, missing, now, what);
        run_event.plan_digest = Some(plan.digest());
        self.new_plans.push(plan);
    }

    fn stop_ring(&mut self) {
        let now = self.engine.now();
        for id in self.ring.order.clone() {
            self.change_device(id, DeviceSim::stop);
        }
        for record in self.trace.records.iter_mut().filter(|record| record.end_ns > now) {
            (record.start_ns, record.end_ns) = (record.start_ns.min(now), now);
            if record.kind == StepKind::Output {
                // The step produced no token.
                record.kind = StepKind::Compute;
            }
        }
        self.engine.clear_events();
        self.reachability.held_messages.clear();
        self.network.drop_pending_messages();
        self.collect_deliveries();
    }

    /// Configures every device for the new plan. All tokens so far enter the new ring as a prompt.
    fn configure_ring(&mut self) -> Result<(), SimError> {
        let first_pass = self.generation.next_pass_index();
        let plan = self.recovery.plan().clone();
        self.batch_limits = BatchLimits::for_plan(&plan);
        self.ring.order.clear();
        for index in 0..plan.devices.len() {
            let id = self.configure_device(&plan, index, first_pass)?;
            self.ring.order.push(id);
        }
        for id in 0..self.ring.devices.len() {
            self.apply_load(id);
        }
        self.await_confirmations();
        Ok(())
    }

    /// Makes the head device wait until the device with the longest round trip has confirmed the plan.
    fn await_confirmations(&mut self) {
        let links = &self.input.cluster.links;
        let one_way = |from: usize, to: usize| {
            let link = links.link_between(self.device_name(from), self.device_name(to));
            link.map_or(0, |link| link.latency.value.to_nanos())
        };
        let round_trip = |&id: &usize| one_way(0, id) + one_way(id, 0);
        let wait = self.ring.order.iter().filter(|&&id| id != 0).map(round_trip).max().unwrap_or(0);
        self.ready_at = self.engine.now() + wait;
        self.timeline.schedule(self.ready_at, TimelineAction::Ready);
        self.schedule_next_action();
    }

    pub fn receive_confirmations(&mut self) -> Result<(), SimError> {
        if self.engine.now() < self.ready_at {
            return Ok(());
        }
        let epoch = self.recovery.epoch();
        for device in self.recovery.awaited_devices().clone() {
            self.react(recovery::Event::Ready { device, epoch })?;
        }
        Ok(())
    }

    fn configure_device(
        &mut self,
        plan: &Arc<Plan>,
        index: usize,
        first_pass: u32,
    ) -> Result<usize, SimError> {
        let (input, name) = (self.input, plan.devices[index].name.as_str());
        let unknown = || SimError::UnknownDevice { index, name: name.to_owned() };
        let member = self.member(name).ok_or_else(unknown)?;
        let device = &input.cluster.members[member].device;
        // `misfit` has checked that it fits.
        let memory = setup::device_memory(&Input { plan, ..input }, index, device).ok_or_else(unknown)?;
        let known = self.ring.member_indices.iter().position(|&it| it == member);
        let id = known.unwrap_or(self.ring.devices.len());
        let old = known.map(|id| &self.ring.devices[id]);
        let (held, output) = old.map_or((vec![], false), |old| (old.gpu_layers(), old.has_gpu_output()));
        // A device that was in no ring before adopts the plan in the same way as the other devices.
        let mut schedule = old.map_or_else(|| Schedule::new(plan.clone(), index), |old| old.schedule.clone());
        schedule.react(&ScheduleEvent::Replanned { plan: plan.clone(), first_pass })?;
        let (model, engine) = (&input.cluster.model, &mut self.engine);
        let new_device = setup::new_device(input, device, model, schedule, id, &memory, engine);
        if known.is_some() {
            self.ring.devices[id].reconfigure(new_device);
            self.ring.memories[id] = memory;
        } else {
            self.ring.member_indices.push(member);
            self.ring.devices.push(new_device);
            self.ring.memories.push(memory);
            self.trace.header.devices.push(trace::build_traced_device(name, device));
        }
        let mut new = self.ring.devices[id].gpu_layers();
        new.retain(|layer| !held.contains(layer));
        self.change_device(id, |device, ctx| {
            device.load_gpu_weights(&new, device.has_gpu_output() && !output, ctx);
        });
        Ok(id)
    }
}
