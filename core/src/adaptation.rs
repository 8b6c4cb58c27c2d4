//! Adaptation: decides when a running ring changes its plan, because devices compute slower or have less memory than
//! their profiles say.
//!
//! A pure reducer, `(state, event) -> (state, steps)`, like [`crate::recovery`]. The devices measure themselves
//! ([`Event::Measured`]). If the measurements differ enough from those of the last decision, the runner finds the best
//! plan for [`Adaptation::cluster`], in which the measurements replace the profiles, and prices it ([`Step::Price`]).
//!
//! A new plan costs time: devices load other layers, and the active sequences are computed again. Nobody knows how long a
//! slow device will stay slow. So the ring changes its plan when it has lost as much time with its current plan as the
//! change costs (the rule for renting or buying skis: it never takes more than twice the time of the best decision in
//! hindsight). An idle ring has no sequences to compute again, so it changes first (prima.cpp paper, section 3.3).
//!
//! The profile of a device is an upper bound of its memory, because a scenario may give a device less than it has.
//!
//! Not here: how a plan is found and priced, and how a ring changes its plan ([`crate::recovery`]).

use std::collections::BTreeMap;
use std::sync::Arc;

use hearth_profiles::device::DeviceProfile;
use hearth_profiles::model::TensorGroup;
use hearth_profiles::{Bytes, Seconds};
use hearth_schema::Plan;
use hearth_schema::pass::Batch;
use hearth_schema::trace::{Counter, CounterReading, Resource, StepKind, StepRecord};

use crate::Cluster;
use crate::compute_cost::{ComputeCost, longer, prompt_time, stream_rate};

/// The ratio of two measurements from which on they count as different. source: docs/studies/serving/adaptation.md:
/// on a shared virtual machine, devices computed up to 1.2 times as long as their profiles for no lasting reason
const CHANGE: f64 = 1.25;
/// The fraction of the time per token that a new plan must save. source: assumed, twice the error of the prediction
const MIN_SAVING: f64 = 0.1;
/// The computing time after which a measurement has half of its weight. source: assumed, long enough to average over
/// short loads
const HALF_LIFE: Seconds = Seconds(2.0);
/// The computing time of a device before its measurements count. source: assumed, tens of tokens
const MIN_COMPUTED: Seconds = Seconds(0.25);

/// What a device has measured of itself since its last measurement.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Measurement {
    /// The time that the device took for layers, without waiting for the disk.
    pub computed: Seconds,
    /// The time that the device takes for the same layers according to its profile.
    pub expected: Seconds,
    /// The memory that the device has for the run, with what the run already uses; `None` if it is not known.
    pub available_memory: Option<Bytes>,
}

#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    Measured {
        device: String,
        measurement: Measurement,
    },
    /// The measurements of a device no longer say anything about it.
    Outdated {
        device: String,
    },
    /// The result of [`Step::Price`]: `None` if there is no other plan.
    Priced(Option<Offer>),
    /// A batch is complete. `cached_tokens` is the number of tokens that another plan would have to compute again.
    BatchCompleted {
        cached_tokens: u64,
    },
    /// No request is active, and none waits.
    Idle,
    /// The ring has changed its plan, for whatever reason.
    Replanned,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// Find the best plan for [`Adaptation::cluster`], and report its price with [`Event::Priced`].
    Price,
    /// Change to the best plan for [`Adaptation::cluster`].
    Replan,
}

/// What a new plan saves and costs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Offer {
    /// Time per token with the current plan; infinite if it cannot continue.
    pub current: Seconds,
    /// Time per token with the new plan.
    pub new: Seconds,
    /// Time to load the layers that move.
    pub load_time: Seconds,
    /// Time to compute one token of a prompt with the new plan.
    pub prompt_token_time: Seconds,
}

impl Offer {
    /// Prices a plan for a cluster, from the predicted times per token of both plans.
    pub fn new(cluster: &Cluster, current: (&Plan, Seconds), new: (&Plan, Seconds)) -> Self {
        Self {
            current: current.1,
            new: new.1,
            load_time: load_time(cluster, current.0, new.0),
            prompt_token_time: prompt_time(new.0, cluster, PRICED_PROMPT) * (1.0 / f64::from(PRICED_PROMPT)),
        }
    }

    fn saving(&self) -> Seconds {
        Seconds(self.current.0 - self.new.0)
    }
}

/// The length of the prompt from which [`Offer::prompt_token_time`] follows. source: assumed, a short conversation
const PRICED_PROMPT: u32 = 256;

/// Returns the longest time that a device needs to read the layers that it gets.
fn load_time(cluster: &Cluster, current: &Plan, new: &Plan) -> Seconds {
    let layers = |plan: &Plan, name: &str| -> Vec<u32> {
        let index = plan.device_index(name);
        index.map_or(vec![], |index| (0..plan.rounds).flat_map(|round| plan.window(index, round)).collect())
    };
    let time = |name: &str| {
        let member = cluster.member(name)?;
        let held = layers(current, name);
        let added = layers(new, name).into_iter().filter(|layer| !held.contains(layer));
        let bytes: Bytes =
            added.filter_map(|layer| cluster.model.layers.get(layer as usize)).map(TensorGroup::bytes).sum();
        Some(bytes / stream_rate(&member.device.disk))
    };
    new.devices.iter().filter_map(|device| time(&device.name)).fold(Seconds(0.0), longer)
}

/// The state of a device as far as it is measured.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct Condition {
    computed: Seconds,
    expected: Seconds,
    memory: Option<Bytes>,
}

impl Condition {
    /// Adds a measurement; earlier ones lose weight.
    fn add(&mut self, new: Measurement) {
        let kept = 0.5_f64.powf(new.computed / HALF_LIFE);
        self.computed = self.computed * kept + new.computed;
        self.expected = self.expected * kept + new.expected;
        self.memory = new.available_memory.or(self.memory);
    }

    /// Returns the time that layers take, relative to the profile of the device.
    fn slowdown(&self) -> f64 {
        if self.computed < MIN_COMPUTED || self.expected <= Seconds(0.0) {
            return 1.0;
        }
        self.computed / self.expected
    }

    fn memory_of(&self, profile: &DeviceProfile) -> Bytes {
        let planned = profile.memory.available_memory.value;
        self.memory.map_or(planned, |memory| memory.min(planned))
    }

    fn differs(&self, other: &Self, profile: &DeviceProfile) -> bool {
        let memory = |condition: &Self| condition.memory_of(profile).as_f64().max(1.0);
        let changed = |one: f64, other: f64| (one / other).max(other / one) > CHANGE;
        changed(self.slowdown(), other.slowdown()) || changed(memory(self), memory(other))
    }
}

/// The conditions of the devices of a ring, and what a better plan would save.
#[derive(Debug, Clone)]
pub struct Adaptation {
    profiles: Arc<Cluster>,
    conditions: BTreeMap<String, Condition>,
    /// The conditions of the last decision.
    decided: BTreeMap<String, Condition>,
    is_pricing: bool,
    /// The best plan for the measured conditions, if it saves enough.
    offer: Option<Offer>,
    /// The time lost since there is an offer.
    lost: Seconds,
}

impl Adaptation {
    /// Creates the state for a ring that was planned from the profiles of a cluster.
    pub fn new(profiles: Arc<Cluster>) -> Self {
        let (conditions, decided) = Default::default();
        Self { profiles, conditions, decided, is_pricing: false, offer: None, lost: Seconds(0.0) }
    }

    pub fn react(&mut self, event: Event) -> Vec<Step> {
        match event {
            Event::Measured { device, measurement } => {
                self.conditions.entry(device).or_default().add(measurement);
                self.price_if_changed()
            }
            Event::Outdated { device } => {
                self.conditions.remove(&device);
                self.price_if_changed()
            }
            Event::Priced(offer) => {
                self.is_pricing = false;
                let saves = |offer: &Offer| offer.saving() > offer.current * MIN_SAVING;
                let offer = offer
                    .filter(|offer| offer.current.0.is_infinite() || saves(offer))
                    .filter(|offer| offer.new.0.is_finite());
                match offer {
                    None => self.lost = Seconds(0.0),
                    // The ring cannot wait until it has paid: it does not run any more.
                    Some(offer) if offer.current.0.is_infinite() => self.lost = offer.current,
                    Some(_) => {}
                }
                self.offer = offer;
                vec![]
            }
            Event::BatchCompleted { cached_tokens } => {
                self.lost += self.offer.map_or(Seconds(0.0), |offer| offer.saving());
                self.replan_if_paid(cached_tokens)
            }
            Event::Idle => self.replan_if_paid(0),
            Event::Replanned => {
                (self.offer, self.lost) = (None, Seconds(0.0));
                vec![]
            }
        }
    }

    fn price_if_changed(&mut self) -> Vec<Step> {
        if self.is_pricing || !self.has_changed() {
            return vec![];
        }
        self.is_pricing = true;
        self.decided.clone_from(&self.conditions);
        vec![Step::Price]
    }

    fn replan_if_paid(&mut self, cached_tokens: u64) -> Vec<Step> {
        let is_paid =
            |offer: Offer| self.lost >= offer.load_time + offer.prompt_token_time * cached_tokens as f64;
        if !self.offer.is_some_and(is_paid) {
            return vec![];
        }
        self.offer = None;
        vec![Step::Replan]
    }

    fn has_changed(&self) -> bool {
        self.profiles.members.iter().any(|member| {
            let [now, decided] = [&self.conditions, &self.decided]
                .map(|conditions| conditions.get(&member.name).copied().unwrap_or_default());
            now.differs(&decided, &member.device)
        })
    }

    /// Returns the time that layers take on a device, relative to its profile; 1 if the device has not measured enough.
    pub fn slowdown(&self, device: &str) -> f64 {
        self.conditions.get(device).map_or(1.0, Condition::slowdown)
    }

    /// Returns what a device has measured in the steps and readings of its trace. `batches` are the batches by the index of
    /// their first pass, which is the `pass_index` of a step.
    pub fn measure(
        &self,
        device: &str,
        batches: &BTreeMap<u32, Batch>,
        (records, readings): (&[StepRecord], &[CounterReading]),
    ) -> Measurement {
        let mut sum = Measurement::default();
        let cluster = &self.profiles;
        let Some(member) = cluster.member(device) else { return sum };
        let element = cluster.kv_cache_format.format();
        let sustained =
            DeviceProfile { cpu: member.device.cpu.with_sustained_rates(), ..member.device.clone() };
        let cpu = ComputeCost::for_main_memory(&sustained, &cluster.model, element);
        let gpu = sustained.gpu.as_ref().map(|gpu| ComputeCost::for_gpu(gpu, &cluster.model, element));
        for record in records.iter().filter(|record| record.kind == StepKind::Compute) {
            let Some(batch) = batches.get(&record.pass_index) else { continue };
            let cost = if record.resource == Resource::Gpu { gpu.as_ref() } else { Some(&cpu) };
            let layers = record.layer_range();
            let is_known = layers.end as usize <= cluster.model.layers.len();
            let Some(cost) = cost.filter(|_| is_known) else { continue };
            sum.expected += layers.map(|layer| cost.layer_time(layer, batch.passes())).sum();
            let processors = record.cost.filter(|cost| cost.faulted_bytes > 0);
            let nanos =
                processors.map_or(record.duration_ns(), |cost| cost.cpu_ns.saturating_add(cost.queue_ns));
            sum.computed += Seconds(nanos as f64 / 1e9);
        }
        let available = readings.iter().rev().find(|reading| reading.counter == Counter::Available);
        sum.available_memory = available.map(|reading| Bytes(reading.value));
        sum
    }

    /// Returns the cluster with the conditions of the last decision in place of the profiles.
    pub fn cluster(&self) -> Cluster {
        let mut cluster = Cluster::clone(&self.profiles);
        for member in &mut cluster.members {
            let Some(condition) = self.decided.get(&member.name) else { continue };
            let memory = condition.memory_of(&member.device);
            member.device = member.device.at_speed(1.0 / condition.slowdown());
            member.device.memory.available_memory.value = memory;
        }
        cluster
    }

    /// Returns how the devices differed from their profiles at the last decision, for users.
    pub fn summary(&self) -> String {
        let describe = |(name, condition): (&String, &Condition)| {
            let profile = &self.profiles.member(name)?.device;
            if !condition.differs(&Condition::default(), profile) {
                return None;
            }
            let (slowdown, memory) = (condition.slowdown(), condition.memory_of(profile));
            let speed = format!("{name} computes {slowdown:.1} times as long as its profile says");
            let planned = profile.memory.available_memory.value;
            let lacks = memory.as_f64() * CHANGE < planned.as_f64();
            Some(if lacks { format!("{speed} and has {memory} of {planned}") } else { speed })
        };
        self.decided.iter().filter_map(describe).collect::<Vec<_>>().join(", ")
    }
}

#[cfg(test)]
mod tests;
