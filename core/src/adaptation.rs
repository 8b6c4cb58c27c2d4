//! Adaptation: decides when a running ring changes its plan, because devices compute slower or have less memory than
//! their profiles say.
//!
//! A pure reducer, `(state, event) -> (state, steps)`, like [`crate::recovery`]. The devices measure themselves
//! ([`Event::Measured`]). If the measurements differ enough from those of the last evaluation, the runner finds the best
//! plan for [`Adaptation::cluster`], in which the measurements replace the profiles, and what it saves
//! ([`Step::Evaluate`]).
//!
//! A new plan costs time: devices load other layers, and the active sequences are computed again. Nobody knows how long a
//! slow device will stay slow. So the ring changes its plan when it has lost as much time with its current plan as the
//! change costs (the rule for renting or buying skis: it never takes more than twice the time of the best decision in
//! hindsight). An idle ring has no sequences to compute again, so it changes first (prima.cpp paper, section 3.3).
//!
//! The profile of a device is an upper bound of its memory, because a scenario may give a device less than it has.
//!
//! Not here: how a plan is found and predicted ([`Replanner`]), and how a ring changes its plan ([`crate::recovery`]).

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
use crate::recovery::{Recovery, Replanner};

/// The ratio of two measurements from which on they count as different. source: docs/studies/serving/adaptation.md:
/// on a shared virtual machine, devices computed up to 1.2 times as long as their profiles for no lasting reason
const CHANGE: f64 = 1.25;
/// The fraction of the time per token that a new plan must save. source: assumed, about the error of a prediction; that
/// of the difference of two plans is smaller
const MIN_SAVING: f64 = 0.1;
/// The computing time after which a measurement has half of its weight. source: assumed, long enough to average over
/// short loads
const HALF_LIFE: Seconds = Seconds(2.0);
/// The computing time of a device before its measurements count. source: assumed, tens of tokens
const MIN_COMPUTED: Seconds = Seconds(0.25);

/// The range of slowdowns that count. A device that claims more has measured wrongly, or lies. source: assumed
const SLOWDOWNS: [f64; 2] = [0.25, 100.0];

/// The length of the prompt from which [`Evaluation::prompt_token_time`] follows. source: assumed, a short conversation
const EVALUATED_PROMPT: u32 = 256;

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
    /// The result of [`Step::Evaluate`]: `None` if there is no other plan.
    Evaluated(Option<Evaluation>),
    /// A batch is complete. `cached_tokens` is the number of tokens of active sequences, which another plan would have to
    /// compute again; `in_flight` is the number of batches that the ring computes at the same time.
    BatchCompleted {
        cached_tokens: u64,
        in_flight: usize,
    },
    /// No request is active, and none waits.
    Idle,
    /// The ring has changed its plan, for whatever reason.
    Replanned,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// Find the best plan for [`Adaptation::cluster`], and report what a change to it saves and costs with [`Event::Evaluated`].
    Evaluate,
    /// Change to the best plan for [`Adaptation::cluster`].
    Replan,
}

/// What a change to a new plan saves and costs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Evaluation {
    /// Time per token with the current plan; infinite if it cannot continue.
    pub current: Seconds,
    /// Time per token with the new plan.
    pub new: Seconds,
    /// Time to load the layers that move.
    pub load_time: Seconds,
    /// Time to compute one token of a prompt with the new plan.
    pub prompt_token_time: Seconds,
}

impl Evaluation {
    /// Compares two plans for a cluster, each with its predicted time per token.
    fn new(cluster: &Cluster, current: (&Plan, Seconds), new: (&Plan, Seconds)) -> Self {
        Self {
            current: current.1,
            new: new.1,
            load_time: load_time(cluster, current.0, new.0),
            prompt_token_time: prompt_time(new.0, cluster, EVALUATED_PROMPT)
                * (1.0 / f64::from(EVALUATED_PROMPT)),
        }
    }

    fn saving(&self) -> Seconds {
        Seconds(self.current.0 - self.new.0)
    }
}

/// The conditions of the devices of a ring, and what a better plan would save.
#[derive(Debug, Clone)]
pub struct Adaptation {
    profiles: Arc<Cluster>,
    conditions: BTreeMap<String, Condition>,
    /// The conditions of the last evaluation.
    evaluated: BTreeMap<String, Condition>,
    is_evaluating: bool,
    /// The best plan for the measured conditions, if it saves enough.
    evaluation: Option<Evaluation>,
    /// The time lost since there is an evaluation.
    lost: Seconds,
}

impl Adaptation {
    /// Creates the state for a ring that was planned from the profiles of a cluster.
    pub fn new(profiles: Arc<Cluster>) -> Self {
        Self {
            profiles,
            conditions: BTreeMap::new(),
            evaluated: BTreeMap::new(),
            is_evaluating: false,
            evaluation: None,
            lost: Seconds(0.0),
        }
    }

    pub fn react(&mut self, event: Event) -> Vec<Step> {
        match event {
            Event::Measured { device, measurement } => {
                self.conditions.entry(device).or_default().add(measurement);
                self.evaluate_if_changed()
            }
            Event::Outdated { device } => {
                self.conditions.remove(&device);
                self.evaluate_if_changed()
            }
            Event::Evaluated(evaluation) => {
                self.is_evaluating = false;
                let saves = |evaluation: &Evaluation| evaluation.saving() > evaluation.current * MIN_SAVING;
                let evaluation = evaluation
                    .filter(|evaluation| evaluation.current.0.is_infinite() || saves(evaluation))
                    .filter(|evaluation| evaluation.new.0.is_finite());
                match evaluation {
                    None => self.lost = Seconds(0.0),
                    // The current plan does not run any more: there is nothing to wait for.
                    Some(evaluation) if evaluation.current.0.is_infinite() => self.lost = evaluation.current,
                    Some(_) => {}
                }
                self.evaluation = evaluation;
                vec![]
            }
            Event::BatchCompleted { cached_tokens, in_flight } => {
                let saving = self.evaluation.map_or(Seconds(0.0), |evaluation| evaluation.saving());
                // Batches in flight lose the same time.
                self.lost += saving / in_flight.max(1) as f64;
                self.replan_if_worthwhile(cached_tokens)
            }
            Event::Idle => self.replan_if_worthwhile(0),
            Event::Replanned => {
                (self.evaluation, self.lost) = (None, Seconds(0.0));
                // The ring may have the same plan again, over new connections.
                self.evaluated.clear();
                vec![]
            }
        }
    }

    fn evaluate_if_changed(&mut self) -> Vec<Step> {
        if self.is_evaluating || !self.has_changed() {
            return vec![];
        }
        self.is_evaluating = true;
        self.evaluated.clone_from(&self.conditions);
        vec![Step::Evaluate]
    }

    fn replan_if_worthwhile(&mut self, cached_tokens: u64) -> Vec<Step> {
        let is_worthwhile = |evaluation: Evaluation| {
            self.lost >= evaluation.load_time + evaluation.prompt_token_time * cached_tokens as f64
        };
        if !self.evaluation.is_some_and(is_worthwhile) {
            return vec![];
        }
        (self.evaluation, self.lost) = (None, Seconds(0.0));
        vec![Step::Replan]
    }

    fn has_changed(&self) -> bool {
        self.profiles.members.iter().any(|member| {
            let [now, evaluated] = [&self.conditions, &self.evaluated]
                .map(|conditions| conditions.get(&member.name).copied().unwrap_or_default());
            now.differs(&evaluated, &member.device)
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
            let layers = record.layer_range();
            let is_known = !layers.is_empty() && layers.end as usize <= cluster.model.layers.len();
            let (cost, window) = if record.resource == Resource::Gpu {
                (gpu.as_ref(), sustained.gpu.as_ref().and_then(|gpu| gpu.window_overhead.as_ref()))
            } else {
                (Some(&cpu), sustained.cpu.window_overhead.as_ref())
            };
            let Some(cost) = cost.filter(|_| is_known) else { continue };
            sum.expected += window.map_or(Seconds(0.0), |time| time.value);
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

    /// Returns the cluster with the conditions of the last evaluation in place of the profiles.
    pub fn cluster(&self) -> Cluster {
        let mut cluster = Cluster::clone(&self.profiles);
        for member in &mut cluster.members {
            let Some(condition) = self.evaluated.get(&member.name) else { continue };
            let memory = condition.memory_of(&member.device);
            member.device = member.device.at_speed(1.0 / condition.slowdown());
            member.device.memory.available_memory.value = memory;
        }
        cluster
    }

    /// Finds the best plan for [`Self::cluster`], and what a change to it saves and costs. Returns `None` if there is no
    /// plan that `is_accepted`.
    pub fn evaluate(
        &self,
        recovery: &Recovery,
        replanner: &dyn Replanner,
        is_accepted: impl FnOnce(&Plan) -> bool,
    ) -> Option<Evaluation> {
        let (cluster, plan) = (self.cluster(), recovery.plan());
        let new = recovery.replan(replanner, &cluster).ok().filter(is_accepted)?;
        let current = replanner.predict(plan, &cluster).unwrap_or(Seconds(f64::INFINITY));
        let predicted = replanner.predict(&new, &cluster)?;
        Some(Evaluation::new(&cluster, (plan, current), (&new, predicted)))
    }

    /// Returns how the devices differed from their profiles at the last evaluation, for users; `None` if they did not.
    pub fn summary(&self) -> Option<String> {
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
        let texts: Vec<_> = self.evaluated.iter().filter_map(describe).collect();
        (!texts.is_empty()).then(|| texts.join(", "))
    }
}

/// Returns the longest time that a device needs to read the layers that it gets.
fn load_time(cluster: &Cluster, current: &Plan, new: &Plan) -> Seconds {
    let layers = |plan: &Plan, name: &str| -> Vec<u32> {
        let index = plan.device_index(name);
        index.map_or(vec![], |index| plan.windows(index).into_iter().flatten().collect())
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
        let ratio = self.computed / self.expected;
        if self.computed < MIN_COMPUTED || !ratio.is_finite() {
            return 1.0;
        }
        ratio.clamp(SLOWDOWNS[0], SLOWDOWNS[1])
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

#[cfg(test)]
mod tests;
