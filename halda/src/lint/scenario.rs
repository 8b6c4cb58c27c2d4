//! Findings about a scenario that do not depend on a plan, and about its run events.
//!
//! Not here: errors that are found when the scenario is read.

use hearth_core::Cluster;
use hearth_core::cluster::Connection;
use hearth_profiles::{Bytes, Seconds};
use hearth_schema::scenario::DeviceEntry;
use hearth_schema::{Plan, Scenario};

use super::{Finding, profiles, rates};

/// The maximum time of a hop in a home network. source: assumed, seven times the maximum of the 3-7 ms of Wi-Fi in
/// the prima.cpp paper, section 4
const MAX_HOP: Seconds = Seconds(0.05);

/// Checks a scenario. `cluster` must not include the scenario's memory limits.
pub fn check_scenario(scenario: &Scenario, cluster: &Cluster) -> Vec<Finding> {
    let mut found = Vec::new();
    addresses(scenario, &mut found);
    memory(scenario, cluster, &mut found);
    links(scenario, cluster, &mut found);
    token_events_after_end(scenario, &mut found);
    rates::findings(scenario, cluster, &mut found);
    profiles::findings(scenario, cluster, &mut found);
    let (devices, layers) = (scenario.devices.len(), cluster.model.shape.layers.0);
    if devices > layers as usize {
        let what =
            format!("{devices} devices share {layers} layers: {} stay idle", devices - layers as usize);
        let (place, fix) = ("scenario devices", "remove devices, or use a model with more layers");
        found.push(if scenario.planner.keep_all {
            let fix = "remove devices, or `planner.keep_all`";
            Finding::error("more-devices-than-layers", place, what, fix)
        } else {
            Finding::warning("more-devices-than-layers", place, what, fix)
        });
    }
    found
}

/// Reports devices with the same address.
fn addresses(scenario: &Scenario, found: &mut Vec<Finding>) {
    for (index, device) in scenario.devices.iter().enumerate() {
        let earlier = &scenario.devices[..index];
        let same = earlier.iter().find(|other| device.address.is_some() && other.address == device.address);
        if let (Some(same), Some(address)) = (same, &device.address) {
            found.push(Finding::error(
                "same-address",
                format!("scenario devices[{index}] `{}`.address", device.name),
                format!("`{}` and `{}` have the same address {address}", same.name, device.name),
                "give each device its own address or port",
            ));
        }
    }
}

/// Reports run events after the estimated end of a run: the planner's time per token, for each prompt and generated
/// token.
pub fn events_after_end(scenario: &Scenario, plan: &Plan) -> Vec<Finding> {
    let Some(predicted) = plan.predicted else { return Vec::new() };
    let workload = &scenario.workload;
    let tokens = (f64::from(workload.prompt) + f64::from(workload.generate)) * f64::from(workload.sequences);
    let end = predicted.tpot * tokens;
    let events = scenario.events.iter().enumerate();
    let late = events.filter_map(|(index, event)| Some((index, event.at.filter(|at| *at > end)?)));
    late.map(|(index, at)| {
        Finding::warning(
            "event-after-end",
            format!("scenario events[{index}].at"),
            format!("the run is expected to end before {end}, but the event is at {at}"),
            "move the event, or generate more tokens",
        )
    })
    .collect()
}

/// Reports run events at a token that is never generated.
fn token_events_after_end(scenario: &Scenario, found: &mut Vec<Finding>) {
    let last = u64::from(scenario.workload.generate) * u64::from(scenario.workload.sequences);
    for (index, event) in scenario.events.iter().enumerate() {
        if let Some(token) = event.token.filter(|token| u64::from(*token) >= last) {
            found.push(Finding::warning(
                "event-after-end",
                format!("scenario events[{index}].token"),
                format!("the run ends after {last} tokens, but the event waits for token {token}"),
                "move the event, or generate more tokens",
            ));
        }
    }
}

/// Checks the memory limits of the devices.
fn memory(scenario: &Scenario, cluster: &Cluster, found: &mut Vec<Finding>) {
    let has_windows = scenario.planner.windows.is_some();
    for (index, (entry, member)) in scenario.devices.iter().zip(&cluster.members).enumerate() {
        let Some(limits) = &entry.limits else { continue };
        let place = |key: &str| format!("scenario devices[{index}] `{}`.limits.{key}", entry.name);
        let total = member.device.memory.total.value;
        if let Some(limit) = limits.memory.filter(|limit| *limit > total) {
            found.push(Finding::warning(
                "limit-above-memory",
                place("memory"),
                format!("the memory limit of `{}` is {limit}, but the device has {total}", entry.name),
                "lower the limit, because it is used as the memory of the device",
            ));
        }
        if limits.memory_share.is_some() && !has_windows {
            found.push(Finding::note(
                "memory-share-while-planning",
                place("memory_share"),
                format!(
                    "`memory_share` of `{}` depends on the plan, so planners assume its whole memory of {total}",
                    entry.name
                ),
                "set `limits.memory`, or set the windows with `planner.windows`",
            ));
        }
    }
}

/// Checks the links: their hop times, and pairs that are given twice.
fn links(scenario: &Scenario, cluster: &Cluster, found: &mut Vec<Finding>) {
    let between = &scenario.links.between;
    let activation = cluster.activations.token_bytes(&cluster.model.shape);
    let mut slow = |place: String, time: Seconds| {
        // NaN counts as slow.
        if time.0.is_nan() || time > MAX_HOP {
            let what = format!("a hop over this link takes {time} in every round of every token");
            let fix = "use a faster link, or remove the device";
            found.push(Finding::warning("slow-link", place, what, fix));
        }
    };
    let devices = scenario.devices.len();
    let pairs = devices * devices.saturating_sub(1) / 2;
    let channels = scenario.links.wifi.iter().flat_map(|wifi| wifi.channels.iter());
    let stations: usize = channels.map(|channel| channel.stations.len()).sum();
    // With Wi-Fi the default link is between wired devices. A single wired device sends only to stations.
    if between.len() < pairs && (stations == 0 || stations + 1 < devices) {
        slow("scenario links.default".to_owned(), scenario.links.default.time(activation));
    }
    wifi(scenario, cluster, activation, &mut slow);
    for (index, named) in between.iter().enumerate() {
        if let Some(link) = &named.link {
            slow(format!("scenario links.between[{index}]"), link.time(activation));
        }
    }
    for (index, named) in between.iter().enumerate() {
        let place = format!("scenario links.between[{index}]");
        let [one, other] = &named.devices;
        let same =
            |pair: &[String; 2]| (&pair[0], &pair[1]) == (one, other) || (&pair[0], &pair[1]) == (other, one);
        if between[..index].iter().any(|earlier| same(&earlier.devices)) {
            let what = format!("`{one}` and `{other}` already have a link, which is used instead");
            found.push(Finding::warning("link-twice", place, what, "remove one of the two"));
        }
    }
}

/// Reports the slowest hop of each Wi-Fi channel.
fn wifi(scenario: &Scenario, cluster: &Cluster, activation: Bytes, slow: &mut impl FnMut(String, Seconds)) {
    for (index, channel) in scenario.links.wifi.iter().flat_map(|wifi| wifi.channels.iter().enumerate()) {
        let hop = |station: &String, other: &DeviceEntry| match cluster.links.connection(station, &other.name)
        {
            Some(Connection::Wireless(way)) if *station != other.name => {
                Some(way.expected_link().time(activation))
            }
            _ => None,
        };
        let hops = channel
            .stations
            .iter()
            .flat_map(|station| scenario.devices.iter().filter_map(move |other| hop(station, other)));
        if let Some(slowest) = hops.max_by(|one, other| one.0.total_cmp(&other.0)) {
            slow(format!("scenario links.wifi.channels[{index}]"), slowest);
        }
    }
}
