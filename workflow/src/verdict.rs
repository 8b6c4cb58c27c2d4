//! The verdict on a plan: how fast it is, beside the best single device, what it relies on, and who was left out.
//!
//! Not here: the metrics of the run ([`hearth_core::metrics`]) and the text ([`Verdict`] is data).

use hearth_core::memory::DeviceMemory;
use hearth_core::{Cluster, metrics};
use hearth_halda::{Instance, LatencyModel, SingleDevice, plan_from_solution, solve};
use hearth_profiles::{Bytes, PerSecond, Seconds};
use hearth_schema::scenario::DeviceEntry;
use hearth_schema::trace::Outcome;
use hearth_schema::{Plan, Trace};
use serde::Serialize;

use crate::simulation::simulate;
use crate::{LoadedScenario, limits};

/// Speed of silent reading, in tokens. source: Brysbaert 2019, "How many words do we read per minute?": 238 words a
/// minute, with 1.3 tokens to a word
const READING_SPEED: PerSecond = PerSecond(5.2);
/// The prompts whose time to the first token is predicted, in tokens: a question, a page, and a long document.
const PROMPTS: [u32; 3] = [32, 512, 4000];
/// The least memory of other programs that is worth a sentence. source: assumed
const MIN_TAKEN: Bytes = Bytes::from_mib(64);

/// The speed of a plan, and what a reader must know about it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Verdict {
    pub tokens_per_second: Option<f64>,
    /// The speed of silent reading, in tokens per second.
    pub reading_speed: f64,
    pub first_tokens: Vec<FirstToken>,
    /// The device that is fastest alone; `None` if no device can run the model alone, or the plan has one device.
    pub best_single_device: Option<SingleDeviceTime>,
    /// What the prediction relies on, as sentences.
    pub relies_on: Vec<String>,
    /// The devices without layers, each with the reason.
    pub left_out: Vec<(String, String)>,
}

/// The time to the first token of a prompt.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct FirstToken {
    pub prompt_tokens: u32,
    /// `None` if the run does not complete, for example because the longer context does not fit in memory.
    pub seconds: Option<f64>,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SingleDeviceTime {
    pub device: String,
    pub seconds_per_token: f64,
}

impl Verdict {
    /// Creates the verdict on a plan with its trace. `cluster` has the limits of the scenario; if `warm`, runs begin with
    /// the weights in memory that earlier tokens would leave there.
    pub fn new(loaded: &LoadedScenario, cluster: &Cluster, plan: &Plan, trace: &Trace, warm: bool) -> Self {
        let tokens_per_second =
            metrics::compute_metrics(trace).tokens_per_s.filter(|_| trace.outcome == Outcome::Ok);
        let prompt_time = |prompt_tokens| FirstToken {
            prompt_tokens,
            seconds: first_token_seconds(loaded, cluster, plan, prompt_tokens, warm),
        };
        let dropped =
            plan.dropped_devices.iter().map(|dropped| (dropped.name.clone(), dropped.reason.clone()));
        let is_ring = plan.kind.is_ring();
        Self {
            tokens_per_second,
            reading_speed: READING_SPEED.0,
            first_tokens: if is_ring { PROMPTS.map(prompt_time).to_vec() } else { Vec::new() },
            best_single_device: (plan.devices.len() > 1)
                .then(|| best_single_device(loaded, cluster, warm))
                .flatten(),
            relies_on: reliances(loaded, cluster, plan, trace),
            left_out: dropped.collect(),
        }
    }
}

/// Returns the time to the first token of a prompt, in a context that is long enough for it.
fn first_token_seconds(
    loaded: &LoadedScenario,
    cluster: &Cluster,
    plan: &Plan,
    prompt_tokens: u32,
    warm: bool,
) -> Option<f64> {
    let (mut cluster, mut plan) = (cluster.clone(), plan.clone());
    cluster.workload.prompt_tokens = prompt_tokens;
    cluster.workload.generated_tokens = 1;
    let context = cluster.context_length.max(prompt_tokens + 1);
    (cluster.context_length, plan.context_length) = (context, context);
    let trace = simulate(&cluster, &plan, &loaded.scenario, warm).ok()?;
    metrics::compute_metrics(&trace).ttft_ms.filter(|_| trace.outcome == Outcome::Ok).map(|ms| ms / 1e3)
}

fn best_single_device(loaded: &LoadedScenario, cluster: &Cluster, warm: bool) -> Option<SingleDeviceTime> {
    let instance = Instance::from_cluster(cluster, loaded.scenario.planner.slow_disk_threshold);
    let model = LatencyModel::new(&instance).ok()?;
    let solution = solve(&SingleDevice { device: None }, &model).ok()?;
    let plan = plan_from_solution(&solution, cluster, &loaded.record).ok()?;
    let mut cluster = cluster.clone();
    limits::apply_memory_limits(&loaded.scenario, &mut cluster, &plan, Bytes::ZERO);
    let trace = simulate(&cluster, &plan, &loaded.scenario, warm).ok()?;
    let tpot = metrics::compute_metrics(&trace).tpot_ms.filter(|_| trace.outcome == Outcome::Ok)?;
    let device = plan.devices.first()?.name.clone();
    Some(SingleDeviceTime { device, seconds_per_token: tpot.mean_ms / 1e3 })
}

/// Returns what a prediction relies on, as sentences: memory of other programs, profiles that were not measured, and
/// page caches that were not compared with a machine.
fn reliances(loaded: &LoadedScenario, cluster: &Cluster, plan: &Plan, trace: &Trace) -> Vec<String> {
    let mut all = Vec::new();
    for (index, planned) in plan.devices.iter().enumerate() {
        let Some(member) = cluster.member(&planned.name) else { continue };
        let memory = DeviceMemory::new(plan, index, &cluster.model, &member.device, false);
        let needed = memory.other_memory + memory.weights.min(memory.weight_cache);
        let taken = needed.saturating_sub(member.device.memory.available_memory.value);
        if taken >= MIN_TAKEN {
            all.push(format!(
                "`{}`: {taken} of memory that other programs hold now are swapped out",
                planned.name
            ));
        }
    }
    let is_planned = |entry: &&DeviceEntry| plan.device_index(&entry.name).is_some();
    let planned: Vec<&DeviceEntry> = loaded.scenario.devices.iter().filter(is_planned).collect();
    let names = |is_such: &dyn Fn(&DeviceEntry) -> bool| {
        let such: Vec<String> =
            planned.iter().filter(|entry| is_such(entry)).map(|entry| format!("`{}`", entry.name)).collect();
        (!such.is_empty()).then(|| such.join(", "))
    };
    let is_shipped =
        |entry: &DeviceEntry| hearth_profiles::device::shipped_names().any(|name| name == entry.profile);
    if let Some(names) = names(&is_shipped) {
        all.push(format!(
            "{names}: profiles of other devices that ship with hearth; `hearth profile` measures yours"
        ));
    }
    if let Some(names) = names(&|entry| entry.parts.is_some()) {
        all.push(format!("{names}: speeds by data sheets of parts; `hearth profile` measures yours"));
    }
    let unvalidated = trace.header.devices.iter();
    all.extend(
        unvalidated
            .filter_map(|device| Some(format!("`{}`: {}", device.name, device.unvalidated_parts.as_ref()?))),
    );
    all
}

/// Formats a time as people say it: `538 ms`, `10.8 s`, `14 min 56 s` or `2 h 5 min`.
pub fn spoken_time(seconds: f64) -> String {
    let whole = seconds.round() as u64;
    match whole {
        0..60 => Seconds(seconds).to_string(),
        60..3600 => format!("{} min {} s", whole / 60, whole % 60),
        _ => format!("{} h {} min", whole / 3600, whole % 3600 / 60),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_in_units_that_people_use() {
        let texts = [0.5, 10.8, 59.9, 896.2, 7500.0].map(spoken_time);
        assert_eq!(texts, ["500 ms", "10.8 s", "1 min 0 s", "14 min 56 s", "2 h 5 min"]);
    }
}
