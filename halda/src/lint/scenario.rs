//! Findings about a scenario that do not depend on a plan, and about the run events of a scenario.

use hearth_core::cluster::Connection;
use hearth_core::{Cluster, Member};
use hearth_profiles::device::shipped_names;
use hearth_profiles::{Bytes, Seconds};
use hearth_schema::scenario::DeviceEntry;
use hearth_schema::workload::Arrivals;
use hearth_schema::{Plan, Scenario};

use super::{Finding, profiles, rates};

/// The hop time above which a link is slow. source: assumed, seven times the 7 ms of Wi-Fi in prima.cpp, section 4
const MAX_HOP: Seconds = Seconds(0.05);

/// Checks a scenario. The devices of `cluster` must have their full memory, without the scenario's memory limits.
pub fn check_scenario(scenario: &Scenario, cluster: &Cluster) -> Vec<Finding> {
    let mut found = Vec::new();
    addresses(scenario, &mut found);
    if let Err(error) = cluster.model.shape.check_runnable() {
        let what = format!("`{}`: {error}", cluster.model.name);
        found.push(Finding::note("not-runnable", "scenario model", what, "use it to plan and to simulate"));
    }
    let (context, longest) = (cluster.context_length, cluster.model.shape.context_length);
    if context > longest {
        let what =
            format!("the context of {context} tokens exceeds the {longest} for which the model was trained");
        let fix = "lower `context`, or expect worse answers beyond";
        found.push(Finding::warning("context-above-model", "scenario context", what, fix));
    }
    unused_gpus(scenario, cluster, &mut found);
    memory(scenario, cluster, &mut found);
    links(scenario, cluster, &mut found);
    token_events_after_end(scenario, &mut found);
    rates::findings(scenario, cluster, &mut found);
    profiles::findings(scenario, cluster, &mut found);
    let (devices, layers) = (scenario.devices.len(), cluster.model.shape.layers.0);
    if devices > layers as usize {
        let (idle, location) = (devices - layers as usize, "scenario devices");
        let what = format!("{devices} devices share {layers} layers: {idle} stay idle");
        found.push(if scenario.planner.keep_all_devices {
            let fix = "remove devices, or `planner.keep_all`";
            Finding::error("more-devices-than-layers", location, what, fix)
        } else {
            let fix = "remove devices, or use a model with more layers";
            Finding::warning("more-devices-than-layers", location, what, fix)
        });
    }
    found.extend(stand_ins(scenario));
    found
}

/// Reports the devices that are described by the device of a paper.
fn stand_ins(scenario: &Scenario) -> Option<Finding> {
    let is_stand_in = |entry: &&DeviceEntry| shipped_names().any(|name| name == entry.profile);
    let entries = scenario.devices.iter().filter(is_stand_in);
    let names: Vec<String> = entries.map(|entry| format!("`{}` ({})", entry.name, entry.profile)).collect();
    (!names.is_empty()).then(|| {
        let what = format!(
            "described by a device that a paper measured: {}; yours may be faster or slower",
            names.join(", ")
        );
        let fix = "name the parts of a device (`hearth device search`), or measure it with `hearth profile`";
        Finding::note("stand-in", "scenario devices", what, fix)
    })
}

/// Reports GPUs that planners do not use, because of the format of the KV cache or the architecture of the model.
fn unused_gpus(scenario: &Scenario, cluster: &Cluster, found: &mut Vec<Finding>) {
    let architecture = cluster.model.shape.architecture;
    let (code, location, cause, fix) = if !architecture.spec().has_gpu_kernels {
        let cause = format!("GPUs do not support {architecture} models");
        let fix = "remove the GPU from the device's profile, or use a model of another architecture";
        ("gpu-without-architecture", "scenario model", cause, fix)
    } else if !scenario.kv_cache_format.is_supported_on_gpus() {
        let cause = format!("GPUs do not support a KV cache in {}", scenario.kv_cache_format.format());
        ("gpu-without-kv-format", "scenario kv_cache", cause, "use `kv_cache: f16`")
    } else {
        return;
    };
    for Member { name, .. } in cluster.members.iter().filter(|member| member.device.gpu.is_some()) {
        let what = format!("the GPU of `{name}` is not used, because {cause}");
        found.push(Finding::warning(code, location, what, fix));
    }
}

fn addresses(scenario: &Scenario, found: &mut Vec<Finding>) {
    for (index, device) in scenario.devices.iter().enumerate() {
        let earlier = &scenario.devices[..index];
        let same = earlier.iter().find(|other| device.address.is_some() && other.address == device.address);
        if let (Some(same), Some(address)) = (same, &device.address) {
            let (name, fix) = (&device.name, "give each device its own address or port");
            let what = format!("`{}` and `{name}` have the same address {address}", same.name);
            let location = format!("scenario devices[{index}] `{name}`.address");
            found.push(Finding::error("same-address", location, what, fix));
        }
    }
}

/// Reports run events after the estimated end of a run, which is the predicted time per token times all tokens.
pub fn check_event_times(scenario: &Scenario, plan: &Plan) -> Vec<Finding> {
    let Some(predicted) = plan.prediction else { return Vec::new() };
    let workload = &scenario.workload;
    if workload.arrivals.is_some() {
        // The run ends after the last arrival.
        return Vec::new();
    }
    let tokens = (f64::from(workload.prompt_tokens) + f64::from(workload.generated_tokens))
        * f64::from(workload.sequences);
    let end = predicted.tpot * tokens;
    let events = scenario.events.iter().enumerate();
    let late = events.filter_map(|(index, event)| Some((index, event.start_time.filter(|at| *at > end)?)));
    late.map(|(index, at)| {
        let what = format!("the run is expected to end before {end}, but the event is at {at}");
        Finding::warning("event-after-end", format!("scenario events[{index}].at"), what, MOVE_EVENT)
    })
    .collect()
}

const MOVE_EVENT: &str = "move the event, or generate more tokens";

fn token_events_after_end(scenario: &Scenario, found: &mut Vec<Finding>) {
    let workload = &scenario.workload;
    let requests = match &workload.arrivals {
        Some(Arrivals { file: Some(_), .. }) => return,
        Some(Arrivals { requests, .. }) => requests.unwrap_or(workload.sequences),
        None => workload.sequences,
    };
    let last = u64::from(workload.generated_tokens) * u64::from(requests);
    for (index, event) in scenario.events.iter().enumerate() {
        if let Some(token) = event.after_tokens.filter(|token| u64::from(*token) >= last) {
            let what = format!("the run ends after {last} tokens, but the event waits for token {token}");
            let location = format!("scenario events[{index}].token");
            found.push(Finding::warning("event-after-end", location, what, MOVE_EVENT));
        }
    }
}

fn memory(scenario: &Scenario, cluster: &Cluster, found: &mut Vec<Finding>) {
    let has_windows = scenario.planner.windows.is_some();
    for (index, (entry, member)) in scenario.devices.iter().zip(&cluster.members).enumerate() {
        let Some(limits) = &entry.limits else { continue };
        let name = &entry.name;
        let location = |key: &str| format!("scenario devices[{index}] `{name}`.limits.{key}");
        let total = member.device.memory.total_memory.value;
        if let Some(limit) = limits.memory.filter(|limit| *limit > total) {
            let what = format!("the memory limit of `{name}` is {limit}, but the device has {total}");
            let fix = "lower the limit, because it is used as the memory of the device";
            found.push(Finding::warning("limit-above-memory", location("memory"), what, fix));
        }
        if limits.memory_share.is_some() && !has_windows {
            let what = format!(
                "`memory_share` of `{name}` depends on the plan, so the planner assumes the whole \
                 memory of the device, {total}"
            );
            let fix = "set `limits.memory`, or set the windows with `planner.windows`";
            found.push(Finding::note("memory-share-while-planning", location("memory_share"), what, fix));
        }
    }
}

fn links(scenario: &Scenario, cluster: &Cluster, found: &mut Vec<Finding>) {
    let between = &scenario.links.pair_links;
    let activation = cluster.activation_format.bytes_per_token(&cluster.model.shape);
    let mut slow = |location: String, time: Seconds| {
        // NaN counts as slow.
        if time.0.is_nan() || time > MAX_HOP {
            let what = format!("a hop over this link takes {time} in every round of every token");
            let fix = "use a faster link, or remove the device";
            found.push(Finding::warning("slow-link", location, what, fix));
        }
    };
    let devices = scenario.devices.len();
    let pairs = devices * devices.saturating_sub(1) / 2;
    let channels = scenario.links.wifi.iter().flat_map(|wifi| wifi.channels.iter());
    let stations: usize = channels.map(|channel| channel.stations.len()).sum();
    // With Wi-Fi the default link is between wired devices. A single wired device sends only to stations.
    if between.len() < pairs && (stations == 0 || stations + 1 < devices) {
        slow("scenario links.default".to_owned(), scenario.links.default_link.message_time(activation));
    }
    wifi(scenario, cluster, activation, &mut slow);
    for (index, named) in between.iter().enumerate() {
        if let Some(link) = &named.link {
            slow(format!("scenario links.between[{index}]"), link.message_time(activation));
        }
    }
    for (index, named) in between.iter().enumerate() {
        let location = format!("scenario links.between[{index}]");
        let [one, other] = &named.devices;
        let is_same = |[from, to]: &[String; 2]| (from, to) == (one, other) || (from, to) == (other, one);
        if between[..index].iter().any(|earlier| is_same(&earlier.devices)) {
            let what = format!("`{one}` and `{other}` have an earlier link, so this one is not used");
            found.push(Finding::warning("link-twice", location, what, "remove one of the two"));
        }
    }
}

fn wifi(scenario: &Scenario, cluster: &Cluster, activation: Bytes, slow: &mut impl FnMut(String, Seconds)) {
    for (index, channel) in scenario.links.wifi.iter().flat_map(|wifi| wifi.channels.iter().enumerate()) {
        let hop = |station: &String, other: &DeviceEntry| {
            let connection = cluster.links.connection(station, &other.name)?;
            let Connection::Wireless(path) = connection else { return None };
            (*station != other.name).then(|| path.expected_link().message_time(activation))
        };
        let others = |station| scenario.devices.iter().filter_map(move |other| hop(station, other));
        let hops = channel.stations.iter().flat_map(others);
        if let Some(slowest) = hops.max_by(|one, other| one.0.total_cmp(&other.0)) {
            slow(format!("scenario links.wifi.channels[{index}]"), slowest);
        }
    }
}
