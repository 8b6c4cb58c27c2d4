//! What does a ring make of what happens around it?
//!
//! Loads, clocks and memory change a device's conditions, and it goes on. A device that is cut off holds the ring up
//! until it is back, or until the head misses it ([`hearth_core::heartbeat`]). Then the head plans again for those that
//! are there. Its new plan takes one way to each device and the answer one way back; after that all tokens so far enter
//! the new ring as a prompt, because their keys and values were spread over the old one.
//!
//! Deviation: planning takes no time, and a head knows the devices' profiles, not what other programs do on them.
//!
//! Not here: who finds the plan ([`hearth_core::replan`]), and what one device makes of it ([`crate::station`]).

use std::sync::Arc;

use hearth_core::Cluster;
use hearth_core::heartbeat;
use hearth_core::replan::NoPlan;
use hearth_core::schedule::Event as Incident;
use hearth_core::schedule::Schedule;
use hearth_profiles::device::PageCachePolicy;
use hearth_profiles::{Bytes, Seconds};
use hearth_schema::Plan;
use hearth_schema::events::Change;
use hearth_schema::events::Return;
use hearth_schema::happenings::Happening;
use hearth_schema::happenings::Sort;
use hearth_schema::trace::Kind;
use hearth_schema::trace::Outcome;

use crate::absence::Held;
use crate::agenda::Action;
use crate::budget::Budget;
use crate::engine::Nanos;
use crate::error::SimError;
use crate::run::{self, Event, Input, Surroundings, World};
use crate::setting;
use crate::station::{Message, Station};

/// Whether what happens can happen to these devices.
pub fn check(input: &Input, surroundings: &Surroundings) -> Result<(), SimError> {
    if let Some(why) = input.plan.only_simulated().filter(|_| !surroundings.events.is_empty()) {
        return Err(SimError::EventsWithoutRing { why });
    }
    for event in surroundings.events {
        let (Some(Change::Swap(_)), Some(name)) = (event.change(), &event.device) else { continue };
        let memory = input.cluster.member(name).map(|member| &member.device.memory);
        if memory.is_none_or(|memory| memory.obtainable() == memory.available.value) {
            return Err(SimError::NoSwap { device: name.clone() });
        }
        let by_itself = [PageCachePolicy::Android, PageCachePolicy::Macos, PageCachePolicy::MacosMetal];
        if memory.is_some_and(|memory| by_itself.contains(&memory.page_cache)) {
            return Err(SimError::SwapsItself { device: name.clone() });
        }
    }
    Ok(())
}

impl<'a> World<'a> {
    /// Before anything else: a device that is to swap has not done so yet.
    pub fn settle_in(&mut self) {
        for seat in 0..self.stations.len() {
            if self.agenda.swaps(self.name(seat)) {
                self.follow(seat);
            }
        }
    }

    pub fn name(&self, seat: usize) -> &'a str {
        &self.input.cluster.members[self.seats[seat]].name
    }

    fn member(&self, name: &str) -> Option<usize> {
        self.input.cluster.members.iter().position(|member| member.name == name)
    }

    /// Has the agenda's next action brought up when it is due.
    pub fn set_agenda(&mut self) {
        if let Some(at) = self.agenda.next() {
            self.engine.set(self.agenda_timer, at, Event::Agenda);
        }
    }

    /// Does what is due.
    pub fn look_at_agenda(&mut self) -> Result<(), SimError> {
        let now = self.engine.now();
        while let Some(action) = self.agenda.due(now).filter(|_| !self.ended) {
            match action {
                Action::Begin(index) => self.begin_event(index),
                Action::Ramp(index, step) => {
                    self.agenda.ramp(index, step);
                    self.follow_event(index);
                }
                Action::End(index) => self.end_event(index),
                Action::Look(member, since) if self.absence.since(member) == Some(since) => {
                    self.miss(member, since)?;
                }
                // The head takes up its pass now, unless there is a newer plan by then.
                Action::Look(..) | Action::Ready => {}
            }
        }
        self.set_agenda();
        Ok(())
    }

    /// So many tokens are out at once.
    pub fn tokens_out(&mut self, count: u32) -> Result<(), SimError> {
        let now = self.engine.now();
        let before = self.tokens;
        self.tokens = before.saturating_add(count);
        self.agenda.renewed(now);
        if self.ended {
            return Ok(());
        }
        (before..self.tokens).for_each(|token| self.agenda.token(now, token + 1));
        self.look_at_agenda()?;
        if std::mem::take(&mut self.rejoins) && !self.ended {
            self.plan_again(None)?;
        }
        Ok(())
    }

    fn begin_event(&mut self, index: usize) {
        let now = self.engine.now();
        let (change, device) = self.agenda.event(index);
        let member = device.and_then(|name| self.member(name));
        match change {
            Change::Returns(when) => {
                let Some(member) = member else { return };
                let name = self.input.cluster.members[member].name.as_str();
                self.agenda.back(now, name);
                self.reach_again(member);
                self.rejoins |= when == Return::BetweenTokens;
            }
            Change::Leaves if member == Some(self.seats[0]) => {
                self.agenda.begin(now, index, Seconds(0.0));
                let (name, what) = (self.name(0), "the head is gone, and with it the tokens".into());
                self.happened(Sort::NotReplanned, Some(name), now, what);
                (self.outcome, self.ended) = (Outcome::Killed, true);
            }
            Change::Leaves | Change::Stalls => {
                self.agenda.begin(now, index, Seconds(0.0));
                if let (None, Some(lasts)) = (member, self.agenda.lasts(index)) {
                    // What is on the air now goes on when the stall is over; the rest is held.
                    self.settle();
                    self.post.stall_all(now, now.saturating_add(lasts.to_nanos()));
                    self.settle();
                }
                let whom = member.map_or(0..self.input.cluster.members.len(), |member| member..member + 1);
                whom.for_each(|member| self.cut_off(member));
            }
            Change::Memory(taken) => {
                self.agenda.begin(now, index, taken.over.unwrap_or(Seconds(0.0)));
                self.follow_event(index);
            }
            Change::Swap(swap) => {
                let bytes = member.map_or(Bytes::ZERO, |member| self.to_swap(member));
                self.agenda.begin(now, index, bytes / swap.rate);
                self.follow_event(index);
            }
            Change::Load(_) | Change::Slow(_) | Change::DiskLoad(_) => {
                self.agenda.begin(now, index, Seconds(0.0));
                self.follow_event(index);
            }
        }
    }

    fn end_event(&mut self, index: usize) {
        self.agenda.end(self.engine.now(), index);
        let (change, device) = self.agenda.event(index);
        if change == Change::Stalls {
            let member = device.and_then(|name| self.member(name));
            let whom = member.map_or(0..self.input.cluster.members.len(), |member| member..member + 1);
            whom.for_each(|member| self.reach_again(member));
        } else {
            self.follow_event(index);
        }
    }

    /// What other programs have on a member that can be swapped out.
    fn to_swap(&self, member: usize) -> Bytes {
        let memory = &self.input.cluster.members[member].device.memory;
        memory.obtainable().saturating_sub(memory.available.value)
    }

    /// The device of an event has other conditions now.
    fn follow_event(&mut self, index: usize) {
        let (_, device) = self.agenda.event(index);
        let seat = device.and_then(|name| (0..self.seats.len()).find(|&seat| self.name(seat) == name));
        if let Some(seat) = seat {
            self.follow(seat);
        }
    }

    /// Tells a station its conditions. A device without room for its part ends the run.
    fn follow(&mut self, seat: usize) {
        let conditions = self.agenda.conditions(self.name(seat), self.to_swap(self.seats[seat]));
        let works = self.ring.contains(&seat) && self.stations[seat].has_weights();
        let room = conditions.room(self.budgets[seat].cache);
        if room.is_none() && works {
            let (now, what) =
                (self.engine.now(), "other programs left no room for weights to pass through".into());
            self.happened(Sort::OutOfMemory, Some(self.name(seat)), now, what);
            (self.outcome, self.ended) = (Outcome::OutOfMemory, true);
            return;
        }
        // Acting on a station cannot fail here: it takes up no event of its schedule.
        let room = room.unwrap_or(Bytes::ZERO);
        let mut desk = crate::station::Desk {
            engine: &mut self.engine,
            records: &mut self.records,
            outgoing: &mut Vec::new(),
        };
        self.stations[seat].follow(&conditions, room, &mut desk);
    }

    /// What pressure cannot take back on a device, other programs' new memory included.
    pub fn unreclaimable(&self, seat: usize) -> Bytes {
        let conditions = self.agenda.conditions(self.name(seat), Bytes::ZERO);
        self.budgets[seat].unreclaimable + Bytes(conditions.taken as u64)
    }

    pub fn happened(&mut self, sort: Sort, device: Option<&str>, since: Nanos, what: String) {
        let (device, end) = (device.map(str::to_owned), Some(self.engine.now()));
        self.agenda.happenings.push(Happening { sort, device, start: since, end, what, plan: None });
    }

    /// Whether nothing goes from one seat to another.
    pub fn is_cut(&self, from: usize, to: usize) -> bool {
        ![from, to].iter().all(|&seat| self.absence.reaches(self.seats[seat]))
    }

    /// Activations arrive, if they can.
    pub fn arrive(&mut self, seat: usize, message: Message) -> Result<(), SimError> {
        let from = usize::from(message.from);
        if self.is_cut(from, seat) {
            self.absence.hold(Held { from, to: seat, message, unsent: None });
            return Ok(());
        }
        self.at(seat, |station, desk| station.deliver(message, desk))
    }

    fn cut_off(&mut self, member: usize) {
        let now = self.engine.now();
        if self.absence.cut(now, member) {
            self.agenda.enter(heartbeat::noticed(now), Action::Look(member, now));
        }
    }

    fn reach_again(&mut self, member: usize) {
        if !self.absence.back(member) {
            return;
        }
        let now = self.engine.now();
        for Held { from, to, message, unsent } in self.absence.go_on(&self.seats) {
            match unsent {
                Some(handed) => self.put_on_the_way(from, to, message, handed),
                None => self.engine.at(now, Event::Deliver(to, Message { at: now, ..message })),
            }
        }
    }

    /// The head has had no sign of life of a member for too long; if the head itself is cut off, of none.
    fn miss(&mut self, member: usize, since: Nanos) -> Result<(), SimError> {
        let head = self.seats[0];
        let missed = |seat: &usize| self.seats[*seat] == member || (member == head && *seat != 0);
        if !self.ring.iter().any(|seat| *seat != 0 && missed(seat)) {
            return Ok(());
        }
        let name = self.input.cluster.members[member].name.as_str();
        self.happened(Sort::Silent, Some(name), since, "no sign of life".into());
        self.plan_again(Some(name))
    }

    /// Plans again for the devices that are there: because one is missing, or because one is back.
    fn plan_again(&mut self, missing: Option<&str>) -> Result<(), SimError> {
        let there = self.there();
        let found = match self.surroundings.replanner {
            None => Err(NoPlan { reason: "nobody plans again in this run".into() }),
            Some(replanner) => replanner.replan(&there),
        };
        let now = self.engine.now();
        let fitting = match found {
            Ok(plan) => self.fitting(plan, &there)?,
            Err(none) => Err(none.to_string()),
        };
        match fitting {
            Ok(plan) if missing.is_none() && same_ring(&plan, self.plan()) => Ok(()),
            Ok(plan) => self.adopt(plan, missing),
            Err(reason) => {
                self.happened(Sort::NotReplanned, missing, now, reason);
                if missing.is_some() {
                    (self.outcome, self.ended) = (Outcome::Killed, true);
                }
                Ok(())
            }
        }
    }

    /// The plan at work.
    fn plan(&self) -> &Plan {
        self.plans.last().unwrap_or(self.input.plan)
    }

    /// The cluster of the devices that the head can reach.
    fn there(&self) -> Cluster {
        let (all, head) = (self.input.cluster, self.seats[0]);
        let alone = !self.absence.reaches(head);
        let reached = |&member: &usize| member == head || (!alone && self.absence.reaches(member));
        let there: Vec<usize> = (0..all.members.len()).filter(reached).collect();
        Cluster {
            members: there.iter().map(|&member| all.members[member].clone()).collect(),
            head: there.iter().position(|&member| member == head).unwrap_or(0),
            ..all.clone()
        }
    }

    /// The plan if it can be carried out; why not.
    fn fitting(&self, plan: Plan, there: &Cluster) -> Result<Result<Plan, String>, SimError> {
        let input = Input { cluster: there, plan: &plan, options: self.input.options };
        let devices = run::check(&input)?;
        if let Some(why) = plan.only_simulated() {
            return Ok(Err(why));
        }
        let (head, found) = (self.name(0).to_owned(), plan.devices[0].name.clone());
        if head != found {
            return Err(SimError::OtherHead { head, found });
        }
        for (place, device) in devices.iter().enumerate() {
            let name = &plan.devices[place].name;
            let fits = |budget: &Budget| budget.shortages.is_empty() || input.options.ignore_memory;
            let budget = setting::budget(&input, place, device).filter(fits);
            let withheld = self.member(name).map_or(Bytes::ZERO, |member| self.to_swap(member));
            let conditions = self.agenda.conditions(name, withheld);
            let room = budget.as_ref().map(|budget| conditions.room(budget.cache));
            if room.is_none_or(|room| room.is_none() && plan.devices[place].window > 0) {
                return Ok(Err(format!("the new plan's part of `{name}` does not fit its memory")));
            }
        }
        Ok(Ok(plan))
    }

    /// Gives the ring at work up, and begins with all tokens so far on that of a new plan.
    fn adopt(&mut self, plan: Plan, missing: Option<&str>) -> Result<(), SimError> {
        let now = self.engine.now();
        for seat in self.ring.clone() {
            self.at(seat, |station, desk| {
                station.stop(desk);
                Ok(())
            })?;
        }
        for record in self.records.iter_mut().filter(|record| record.end > now) {
            (record.start, record.end) = (record.start.min(now), now);
            if record.kind == Kind::Output {
                // No token has come of it.
                record.kind = Kind::Compute;
            }
        }
        self.engine.forget();
        self.absence.give_up();
        self.post.give_up();
        self.settle();
        let again = self.generation.again();
        let first_pass = self.generation.next_pass();
        let shared = Arc::new(plan.clone());
        self.ring.clear();
        for place in 0..plan.devices.len() {
            let seat = self.take_seat(&shared, place, first_pass)?;
            self.ring.push(seat);
        }
        let new = plan.devices.iter().map(|device| format!("{} {}", device.name, device.window));
        let new: Vec<String> = new.collect();
        let what = format!("{}; {again} tokens computed again", new.join(", "));
        let device = missing.map(str::to_owned);
        let digest = Some(plan.digest());
        let sort = Sort::Replanned;
        self.agenda.happenings.push(Happening { sort, device, start: now, end: None, what, plan: digest });
        self.plans.push(plan);
        for seat in 0..self.stations.len() {
            self.follow(seat);
        }
        self.make_ready();
        Ok(())
    }

    /// The head waits until the farthest device has the plan and has answered.
    fn make_ready(&mut self) {
        let links = &self.input.cluster.links;
        let one_way = |from: usize, to: usize| {
            let link = links.between(self.name(from), self.name(to));
            link.map_or(0, |link| link.latency.value.to_nanos())
        };
        let far = |&seat: &usize| one_way(0, seat) + one_way(seat, 0);
        let wait = self.ring.iter().filter(|&&seat| seat != 0).map(far).max().unwrap_or(0);
        self.ready = self.engine.now() + wait;
        self.agenda.enter(self.ready, Action::Ready);
        self.set_agenda();
    }

    /// The device at a place of a new plan takes up its part. Returns its seat.
    fn take_seat(&mut self, plan: &Arc<Plan>, place: usize, first_pass: u32) -> Result<usize, SimError> {
        let (input, name) = (self.input, plan.devices[place].name.as_str());
        let Some(member) = self.member(name) else {
            return Err(SimError::UnknownDevice { place, name: name.to_owned() });
        };
        let device = &input.cluster.members[member].device;
        // `fitting` has seen that it fits.
        let Some(budget) = setting::budget(&Input { plan, ..input }, place, device) else {
            return Err(SimError::UnknownDevice { place, name: name.to_owned() });
        };
        let known = self.seats.iter().position(|&seated| seated == member);
        let seat = known.unwrap_or(self.stations.len());
        // A device that was in no ring before hears of this one in the same way.
        let mut schedule = match known {
            Some(seat) => self.stations[seat].schedule().clone(),
            None => Schedule::new(plan.clone(), place),
        };
        schedule.react(&Incident::Replanned { plan: plan.clone(), first_pass })?;
        let parts = setting::parts(input, device, &input.cluster.model, schedule, seat, &budget);
        let (held, output) = match known {
            Some(seat) => (self.stations[seat].gpu_layers(), self.stations[seat].gpu_output()),
            None => (Vec::new(), false),
        };
        if known.is_some() {
            self.stations[seat].take_up(parts);
            self.budgets[seat] = budget;
        } else {
            self.seats.push(member);
            self.stations.push(Station::new(parts, &mut self.engine));
            self.budgets.push(budget);
            self.header.devices.push(run::traced(name, device));
        }
        let mut new = self.stations[seat].gpu_layers();
        new.retain(|layer| !held.contains(layer));
        self.at(seat, |station, desk| {
            station.load(&new, station.gpu_output() && !output, desk);
            Ok(())
        })?;
        Ok(seat)
    }
}

/// Whether two plans are one ring.
fn same_ring(one: &Plan, other: &Plan) -> bool {
    let ring = |plan: &Plan| {
        let part = |device: &hearth_schema::plan::PlannedDevice| {
            (device.name.clone(), device.window, device.gpu_layers, device.residency)
        };
        plan.devices.iter().map(part).collect::<Vec<_>>()
    };
    one.rounds == other.rounds && ring(one) == ring(other)
}
