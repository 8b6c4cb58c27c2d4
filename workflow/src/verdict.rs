//! The verdict on a plan: how fast it is, beside the best single device, what it relies on, and who was left out.
//!
//! Not here: the metrics of the run ([`hearth_core::metrics`]) and the text ([`Verdict`] is data).

use hearth_core::Cluster;
use hearth_core::memory::{DeviceMemory, MIN_TAKEN_MEMORY};
use hearth_core::metrics::{self, Metrics, READING_SPEED};
use hearth_halda::{Instance, LatencyModel, SingleDevice, plan_from_assignment, solve_within_memory};
use hearth_profiles::device::{Os, shipped_names};
use hearth_profiles::{Bytes, Link};
use hearth_schema::plan::DroppedDevice;
use hearth_schema::scenario::DeviceEntry;
use hearth_schema::trace::Outcome;
use hearth_schema::{Plan, Trace};
use hearth_sim::ScenarioEvents;
use serde::Serialize;

use crate::score::with_short_run;
use crate::simulation::{MemoryOptions, simulate_with_events};
use crate::{LoadedScenario, limits};

/// The prompts whose time to the first token is predicted, in tokens: a question, a page, and a long document.
const PROMPTS: [u32; 3] = [32, 512, 4000];

/// The speed of a plan, and what a reader must know about it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Verdict {
    /// `None` if the run did not complete, or generated one token only.
    pub speed: Option<Speed>,
    /// The speed of silent reading, in tokens per second.
    pub reading_speed: f64,
    pub first_tokens: Vec<FirstToken>,
    /// The device that is fastest alone; `None` if no device can run the model alone, or the plan has one device.
    pub best_single_device: Option<SingleDeviceSpeed>,
    /// The devices with layers, in ring order.
    pub devices: Vec<String>,
    /// Why hearth cannot run the plan yet, as sentences.
    pub obstacles: Vec<String>,
    /// What the prediction assumes, as sentences.
    pub assumptions: Vec<String>,
    /// The devices without layers.
    pub left_out: Vec<DroppedDevice>,
}

/// The speed of decoding.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Speed {
    /// The generated tokens of all sequences per second; of one request if requests arrive during the run.
    pub tokens_per_second: f64,
    /// The mean milliseconds per token of a sequence.
    pub tpot_ms: f64,
}

/// The time to the first token of a prompt.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct FirstToken {
    pub prompt_tokens: u32,
    /// `None` if the run does not complete, for example because the longer context does not fit in memory.
    pub seconds: Option<f64>,
    /// Whether the prompt needs a longer context than the scenario has.
    pub needs_longer_context: bool,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SingleDeviceSpeed {
    pub device: String,
    pub speed: Speed,
}

impl Verdict {
    /// Simulates a short run of a plan, and returns the verdict; `None` if the plan cannot be simulated. `cluster` has
    /// no memory limits of the plan's shares.
    pub fn of_plan(loaded: &LoadedScenario, cluster: &Cluster, plan: &Plan) -> Option<Self> {
        let short = with_short_run(cluster);
        let mut limited = short.clone();
        limits::apply_memory_limits(&loaded.scenario, &mut limited, plan, Bytes::ZERO);
        let (memory, events) = (MemoryOptions::default(), ScenarioEvents::default());
        let run = simulate_with_events(&limited, plan, &loaded.scenario, memory, &events).ok()?;
        let metrics = metrics::compute_metrics(&run.trace);
        Some(Self::new(loaded, [&short, &limited], plan, (&run.trace, &metrics), memory))
    }

    /// Creates the verdict on a plan with its trace and the metrics of this. `described` is the cluster without the
    /// memory limits of the plan's shares, `limited` the one that was simulated.
    pub fn new(
        loaded: &LoadedScenario,
        [described, limited]: [&Cluster; 2],
        plan: &Plan,
        (trace, metrics): (&Trace, &Metrics),
        memory: MemoryOptions,
    ) -> Self {
        let prompt_time = |prompt_tokens| FirstToken {
            prompt_tokens,
            seconds: first_token_seconds(loaded, limited, plan, prompt_tokens, memory),
            needs_longer_context: prompt_tokens >= limited.context_length,
        };
        let is_ring = plan.kind.is_ring();
        let alone = (plan.devices.len() > 1).then(|| best_single_device(loaded, described, memory));
        Self {
            speed: Speed::from_metrics(metrics),
            reading_speed: READING_SPEED.0,
            first_tokens: if is_ring { PROMPTS.map(prompt_time).to_vec() } else { Vec::new() },
            best_single_device: alone.flatten(),
            devices: plan.devices.iter().map(|device| device.name.clone()).collect(),
            obstacles: obstacles(limited, plan),
            assumptions: assumptions(loaded, limited, plan, trace),
            left_out: plan.dropped_devices.clone(),
        }
    }
}

impl Speed {
    fn from_metrics(metrics: &Metrics) -> Option<Self> {
        let all = metrics.tokens_per_s.filter(|_| metrics.outcome == Outcome::Ok)?;
        let tpot_ms = metrics.tpot_ms.as_ref()?.mean_ms;
        // How many tokens all requests get is then a matter of their arrivals.
        let tokens_per_second = if metrics.requests.is_some() { 1e3 / tpot_ms } else { all };
        Some(Self { tokens_per_second, tpot_ms })
    }
}

/// Simulates a plan without run events; `None` if it cannot be simulated.
fn simulate(
    loaded: &LoadedScenario,
    cluster: &Cluster,
    plan: &Plan,
    memory: MemoryOptions,
) -> Option<Metrics> {
    let none = ScenarioEvents::default();
    let run = simulate_with_events(cluster, plan, &loaded.scenario, memory, &none).ok()?;
    Some(metrics::compute_metrics(&run.trace))
}

/// Returns the time to the first token of a prompt, in a context that is long enough for it.
fn first_token_seconds(
    loaded: &LoadedScenario,
    cluster: &Cluster,
    plan: &Plan,
    prompt_tokens: u32,
    memory: MemoryOptions,
) -> Option<f64> {
    let (mut cluster, mut plan) = (cluster.clone(), plan.clone());
    cluster.workload.prompt_tokens = prompt_tokens;
    cluster.workload.generated_tokens = 1;
    cluster.workload.arrivals = None;
    let context = cluster.context_length.max(prompt_tokens + 1);
    (cluster.context_length, plan.context_length) = (context, context);
    let metrics = simulate(loaded, &cluster, &plan, memory)?;
    metrics.ttft_ms.filter(|_| metrics.outcome == Outcome::Ok).map(|ms| ms / 1e3)
}

fn best_single_device(
    loaded: &LoadedScenario,
    cluster: &Cluster,
    memory: MemoryOptions,
) -> Option<SingleDeviceSpeed> {
    let instance = Instance::from_cluster(cluster, loaded.scenario.planner.slow_disk_threshold);
    let model = LatencyModel::new(&instance).ok()?;
    let alone = |device: usize, cluster: &Cluster| {
        let solution = solve_within_memory(&SingleDevice { device: Some(device) }, &model).ok()?;
        // With the residency that is best for the device alone, as in a ring.
        let plan = plan_from_assignment(&model, &solution.assignment, cluster, &loaded.record).ok()?;
        let mut cluster = cluster.clone();
        limits::apply_memory_limits(&loaded.scenario, &mut cluster, &plan, Bytes::ZERO);
        let speed = Speed::from_metrics(&simulate(loaded, &cluster, &plan, memory)?)?;
        Some(SingleDeviceSpeed { device: plan.devices.first()?.name.clone(), speed })
    };
    // Short runs choose the device, and its speed is that of the whole run, as of the ring.
    let short = with_short_run(cluster);
    let speed = |device: usize| Some((alone(device, &short)?.speed.tokens_per_second, device));
    let speeds = (0..model.device_count()).filter_map(speed);
    let (_, best) = speeds.max_by(|(one, _), (other, _)| one.total_cmp(other))?;
    alone(best, cluster)
}

/// Returns why hearth cannot run a plan yet.
fn obstacles(cluster: &Cluster, plan: &Plan) -> Vec<String> {
    let systems = plan.devices.iter().filter_map(|planned| {
        let member = cluster.member(&planned.name)?;
        Some((planned.name.as_str(), member.device.os))
    });
    let model = cluster.model.shape.check_runnable().err().map(|error| error.to_string());
    let uses_gpu = plan.devices.iter().any(|device| device.gpu_layers > 0);
    let experts = (cluster.model.shape.experts.is_some() && uses_gpu && model.is_none())
        .then(|| "experts can be computed on CPUs only".to_owned());
    model.into_iter().chain(experts).chain(unsupported_systems(systems)).collect()
}

/// Returns what a prediction assumes, as sentences: memory of other programs that is free then, profiles that were not
/// measured, and page caches that were not compared with a machine.
fn assumptions(loaded: &LoadedScenario, cluster: &Cluster, plan: &Plan, trace: &Trace) -> Vec<String> {
    let (model, tokens) = (&cluster.model, plan.context_length);
    let mut all = vec![format!("{} in {}, with a context of {tokens} tokens", model.name, model.quant)];
    all.extend(slowest_hop(cluster, plan));
    for (index, planned) in plan.devices.iter().enumerate() {
        let Some(member) = cluster.member(&planned.name) else { continue };
        let memory = DeviceMemory::new(plan, index, &cluster.model, &member.device, false);
        let taken = memory.taken_from_others(&member.device);
        if taken >= MIN_TAKEN_MEMORY {
            all.push(format!(
                "on `{}` other programs give up {taken} of memory that they hold now",
                planned.name
            ));
        }
    }
    let is_planned = |entry: &&DeviceEntry| plan.device_index(&entry.name).is_some();
    let planned: Vec<&DeviceEntry> = loaded.scenario.devices.iter().filter(is_planned).collect();
    let names = |matches: &dyn Fn(&DeviceEntry) -> bool| {
        let entries = planned.iter().filter(|entry| matches(entry));
        let names: Vec<String> = entries.map(|entry| format!("`{}`", entry.name)).collect();
        (!names.is_empty()).then(|| names.join(", "))
    };
    let is_shipped = |entry: &DeviceEntry| shipped_names().any(|name| name == entry.profile);
    if let Some(names) = names(&is_shipped) {
        all.push(format!("{names} as fast as the device of a paper; `hearth profile` measures yours"));
    }
    if let Some(names) = names(&|entry| entry.parts.is_some()) {
        all.push(format!("{names} as fast as such parts usually are; `hearth profile` measures yours"));
    }
    let devices = trace.header.devices.iter();
    let unvalidated = devices.filter_map(|device| Some((&device.name, device.unvalidated_parts.as_ref()?)));
    let (as_linux, others): (Vec<_>, Vec<_>) =
        unvalidated.partition(|(_, parts)| parts.ends_with("as classic Linux"));
    let names: Vec<String> = as_linux.iter().map(|(name, _)| format!("`{name}`")).collect();
    if !names.is_empty() {
        all.push(format!(
            "files in memory are kept as on Linux on {}, which was not checked",
            names.join(", ")
        ));
    }
    all.extend(others.into_iter().map(|(name, parts)| format!("`{name}` with the {parts}")));
    all
}

/// Returns a sentence about the slowest hop of a ring, if it has any.
fn slowest_hop(cluster: &Cluster, plan: &Plan) -> Option<String> {
    let activation = plan.activation_format.bytes_per_token(&cluster.model.shape);
    let names: Vec<&String> = plan.devices.iter().map(|device| &device.name).collect();
    let hops = names.iter().zip(names.iter().cycle().skip(1)).filter(|(from, to)| from != to);
    let links =
        hops.filter_map(|(from, to)| Some((from, to, cluster.links.link_between(from, to)?.into_owned())));
    let time = |link: &Link| link.message_time(activation).0;
    let (from, to, link) = links.max_by(|(_, _, one), (_, _, other)| time(one).total_cmp(&time(other)))?;
    let (latency, bits) = (link.latency.value, link.bandwidth.value.0 * 8.0 / 1e6);
    Some(format!("the slowest link, `{from}` to `{to}`, has {latency} and {bits:.1} Mbit/s"))
}

/// Returns a sentence about the devices on which hearth does not run yet, if there are any.
pub(crate) fn unsupported_systems<'a>(devices: impl Iterator<Item = (&'a str, Os)>) -> Option<String> {
    let unsupported = devices.filter_map(|(name, os)| {
        let os = match os {
            Os::Linux => return None,
            Os::Windows => "Windows",
            Os::Macos => "macOS",
            Os::Android => "Android",
        };
        Some(format!("`{name}` ({os})"))
    });
    let unsupported: Vec<String> = unsupported.collect();
    (!unsupported.is_empty())
        .then(|| format!("hearth builds on Linux for x86-64 only, not yet for {}", unsupported.join(", ")))
}
