//! Checks that the lab can run a scenario exactly as it is written.

use std::collections::BTreeSet;

use hearth_schema::Scenario;
use hearth_schema::events::{Change, Event};
use hearth_schema::plan::Processor;
use hearth_schema::scenario::{DeviceEntry, ResourceLimits};

use super::links;
use super::session::limits_of;
use crate::diagnostics::Failure;

pub fn check(scenario: &Scenario, cpus: &[u32]) -> Result<(), Failure> {
    check_cpu_count(scenario, cpus)?;
    if let Some(entry) = scenario.devices.iter().find(|entry| !is_valid_file_name(&entry.name)) {
        let what = "the lab names files after devices, but the name of this device is not a valid file name";
        return Err(device_error(entry, what).with_hint(FILE_NAME_HINT));
    }
    for entry in &scenario.devices {
        if entry.limits.iter().any(|limits| limits.cpu_cores.is_some_and(|cpu| cpu < MIN_QUOTA)) {
            let what = format!("the kernel does not accept a CPU quota below {MIN_QUOTA} CPUs");
            return Err(device_error(entry, what).with_hint("raise `limits.cpu`"));
        }
        let mut affinity = entry.limits.iter().flat_map(|limits| limits.affinity.iter().flatten());
        if let Some(missing) = affinity.find(|cpu| !cpus.contains(*cpu)) {
            let hint = format!("use only the CPUs {} in `limits.affinity`", list(cpus));
            let what = format!("this machine has no CPU {missing}");
            return Err(device_error(entry, what).with_hint(hint));
        }
    }
    links::check(&scenario.links).map_err(|why| {
        Failure::invalid(format!("the lab {why}")).with_hint("change `links`, or omit `links.emulation`")
    })?;
    if let Some(speculation) = &scenario.workload.speculation {
        if speculation.draft_model.file.is_none() {
            let what = "the lab runs a real draft model, but the scenario names no file of a draft model";
            let hint = "write `workload.speculation.draft: {file: draft.gguf}`";
            return Err(Failure::invalid(what).with_hint(hint));
        }
        if speculation.processor == Some(Processor::Gpu) {
            let what = "the lab can draft only on the CPU of the head device";
            return Err(Failure::invalid(what).with_hint("omit `workload.speculation.processor`"));
        }
    }
    if scenario.workload.arrivals.is_some() && !scenario.events.is_empty() {
        let what = "the lab cannot run events while requests arrive";
        return Err(Failure::invalid(what).with_hint("omit `events` or `workload.arrivals`"));
    }
    for (index, event) in scenario.events.iter().enumerate() {
        check_event(scenario, event, cpus.len()).map_err(|why| {
            Failure::invalid(format!("events[{index}]: the lab does not support this event: {why}"))
                .with_hint("omit the event, or use `hearth simulate`")
        })?;
    }
    Ok(())
}

fn device_error(entry: &DeviceEntry, what: impl std::fmt::Display) -> Failure {
    Failure::invalid(format!("device `{}`: {what}", entry.name))
}

fn list<'p>(cpus: impl IntoIterator<Item = &'p u32>) -> String {
    cpus.into_iter().map(u32::to_string).collect::<Vec<_>>().join(", ")
}

pub const FILE_NAME_HINT: &str = "use letters, digits, `-`, `_` and `.`";

pub fn is_valid_file_name(name: &str) -> bool {
    let is_safe = |letter: char| letter.is_ascii_alphanumeric() || "-_.".contains(letter);
    !name.is_empty() && !name.starts_with('.') && name.chars().all(is_safe)
}

/// Minimum CPU quota, as a number of CPUs. source: `kernel/sched/core.c`, `min_cfs_quota_period`: 1 ms of the lab's
/// periods of 10 ms
const MIN_QUOTA: f64 = 0.1;

/// Returns an error if the devices that compute at the same time need more CPUs than the machine has, because the
/// simulator does not share CPUs between devices.
fn check_cpu_count(scenario: &Scenario, cpus: &[u32]) -> Result<(), Failure> {
    let workload = &scenario.workload;
    let is_concurrent = workload.sequences > 1 || workload.micro_batch < workload.prompt_tokens;
    if scenario.devices.len() < 2 || !is_concurrent {
        return Ok(());
    }
    let affinity_of = |entry: &DeviceEntry| -> BTreeSet<u32> {
        let affinity = entry.limits.as_ref().and_then(|limits| limits.affinity.as_deref());
        affinity.unwrap_or(cpus).iter().copied().collect()
    };
    let needed_by = |entry: &DeviceEntry| {
        let limits = limits_of(entry);
        let threads = limits.threads.map_or(affinity_of(entry).len() as f64, f64::from);
        limits.cpu_cores.map_or(threads, |cpu| cpu.min(threads))
    };
    for set in scenario.devices.iter().map(affinity_of).chain([cpus.iter().copied().collect()]) {
        let within = scenario.devices.iter().filter(|entry| affinity_of(entry).is_subset(&set));
        let needed: f64 = within.map(needed_by).sum();
        if needed > set.len() as f64 + 1e-9 {
            let what = format!(
                "with several sequences or batches, the devices compute at the same time and need {needed} \
                 CPUs, but only {} are available to them ({})",
                set.len(),
                list(&set)
            );
            return Err(Failure::invalid(what).with_hint(
                "lower `limits.threads` or `limits.cpu`, or give the devices more CPUs with `limits.affinity`",
            ));
        }
    }
    Ok(())
}

/// Returns a warning for each device whose profile is not measured on this machine, and a warning if the links of the
/// scenario are not emulated.
pub fn warnings(scenario: &Scenario) -> Vec<String> {
    let others = scenario.devices.iter().filter(|entry| entry.profile != "measured");
    let mut found: Vec<String> = others
        .map(|entry| {
            let (name, profile) = (&entry.name, entry.profile_label());
            format!("device `{name}` is this machine with limits, not `{profile}`")
        })
        .collect();
    let links = &scenario.links;
    let are_measured = !links.pair_links.is_empty()
        || links.wifi.is_some()
        || !links.default_link.latency.source.starts_with("assumed");
    if scenario.devices.len() > 1 && links.emulation.is_none() && are_measured {
        found.push("the lab does not use the links of the scenario: set `links.emulation: delays`".into());
    }
    found
}

fn check_event(scenario: &Scenario, event: &Event, cpu_count: usize) -> Result<(), String> {
    let Some(change) = event.change() else { return Ok(()) };
    let named = |entry: &&DeviceEntry| Some(&entry.name) == event.device.as_ref();
    let limits = scenario.devices.iter().find(named).map(limits_of).unwrap_or_default();
    let head = &scenario.devices[scenario.head_index()].name;
    let why = match change {
        Change::Load(load) => {
            if load.available_gpu_fraction.is_some() {
                return Err("the lab cannot load a GPU".into());
            }
            // A load slows a device only if both need the same CPUs.
            let own = limits.affinity.as_ref().map_or(cpu_count, Vec::len);
            let threads = limits.threads.map_or(own, |threads| threads as usize);
            if threads == own {
                return Ok(());
            }
            return Err(format!(
                "the device computes with {threads} threads but can run on {own} CPUs, so a load would \
                 not slow it down: give it `limits.affinity` with {threads} CPUs"
            ));
        }
        Change::Memory(load) => {
            if load.ramp_time.is_some() {
                return Err("the lab allocates the memory of an event at once: omit `over`".into());
            }
            match &limits {
                ResourceLimits { memory: Some(all), .. } if load.size >= *all => {
                    return Err(format!(
                        "the event takes {}, but the memory limit of the device is {all}",
                        load.size
                    ));
                }
                ResourceLimits { memory: None, memory_share: None, .. } => {
                    "the device has no memory limit, so the event would have no effect"
                }
                _ => return Ok(()),
            }
        }
        Change::Leaves if event.device.as_ref() == Some(head) => "the head device cannot leave",
        Change::Leaves => return Ok(()),
        Change::Swap(_) => "the lab has no swap within the memory limits of its control groups",
        Change::Slow(_) => "the lab cannot change the clock rate; set `limits.cpu` for a slow device",
        Change::DiskLoad(_) => "a load would have no effect on a throttled disk",
        Change::Returns(_) => "a device that has left cannot return in the lab",
        Change::Stalls => "the lab cannot stall links",
    };
    Err(why.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: &str = "workload: {prompt: 8, generate: 1}";

    #[test]
    fn unsafe_file_names_are_rejected() {
        for (name, fits) in
            [("three-half_2.0", true), ("", false), ("..", false), ("a/b", false), (".git", false)]
        {
            assert_eq!(is_valid_file_name(name), fits, "{name}");
        }
        let devices = "{name: a, profile: measured}, {name: '../../b', profile: measured}";
        let rejected = check(&scenario(devices, PLAIN), &[0]).expect_err("no file");
        let what = rejected.into_error().one_line_message();
        assert!(what.contains("`../../b`"), "{what}");
    }

    fn rejection(limits: &str, workload: &str) -> Option<String> {
        let devices = format!("{{name: a, profile: d1}}, {{name: b, profile: d1{limits}}}");
        let rejected = check(&scenario(&devices, workload), &[0, 1]);
        rejected.err().map(|failure| failure.into_error().one_line_message())
    }

    fn scenario(devices: &str, workload: &str) -> Scenario {
        let yaml = format!(
            "{{schema: scenario/1, name: n, model: {{profile: tiny}}, context: 64, devices: [{devices}], links: {{default: \
             {{latency: {{value: 5 ms, source: t}}, bandwidth: {{value: 1 MB/s, source: t}}}}}}, {workload}}}"
        );
        serde_yaml::from_str(&yaml).expect("a scenario")
    }

    #[test]
    fn concurrent_devices_need_enough_cpus() {
        let devices = "{name: a, profile: measured, limits: {threads: 2}}, {name: b, profile: measured, limits: {threads: 2, \
                       cpu: 0.5}}";
        assert!(check_cpu_count(&scenario(devices, PLAIN), &[0, 1]).is_ok());
        for concurrent in ["micro_batch: 4", "sequences: 2"] {
            let loaded = scenario(devices, &format!("workload: {{prompt: 8, generate: 1, {concurrent}}}"));
            let rejected =
                check_cpu_count(&loaded, &[0, 1]).expect_err("2.5 of 2").into_error().one_line_message();
            assert!(rejected.contains("2.5 CPUs, but only 2 are available to them (0, 1)"), "{rejected}");
            assert!(check_cpu_count(&loaded, &[0, 1, 2]).is_ok());
        }
        let pair = |cpu| {
            let device = |name, cpu| {
                format!("{{name: {name}, profile: measured, limits: {{threads: 1, affinity: [{cpu}]}}}}")
            };
            let devices = format!("{}, {}", device("a", 0), device("b", cpu));
            scenario(&devices, "workload: {prompt: 8, generate: 1, sequences: 2}")
        };
        assert!(check_cpu_count(&pair(1), &[0, 1]).is_ok());
        assert!(check_cpu_count(&pair(0), &[0, 1, 2, 3]).is_err(), "both on one");
    }

    #[test]
    fn differences_are_warned_about() {
        let found = warnings(&scenario("{name: a, profile: measured}, {name: b, profile: d1}", PLAIN));
        assert!(found[0].contains("not `d1`") && found[1].contains("links.emulation"), "{found:?}");
        assert_eq!(warnings(&scenario("{name: a, profile: measured}", PLAIN)), Vec::<String>::new());
    }

    #[test]
    fn unsupported_events_are_rejected() {
        assert_eq!(rejection("", PLAIN), None);
        let event =
            |limits, what: &str| rejection(limits, &format!("{PLAIN}, events: [{{at: 1 s, {what}}}]"));
        let (one, memory) = (", limits: {threads: 1, affinity: [0]}", ", limits: {memory: 1 GiB}");
        assert_eq!(event(one, "device: b, load: 2 threads"), None);
        assert_eq!(event(memory, "for: 1 s, device: b, memory: 100 MiB"), None);
        assert_eq!(event("", "device: b, leaves: true"), None);
        for (limits, what, complaint) in [
            (", limits: {threads: 1, affinity: [7777]}", "device: b, load: 1 threads", "no CPU 7777"),
            (memory, "device: b, memory: {taken: 1 MiB, over: 1 s}", "at once"),
            (memory, "device: b, memory: 2 GiB", "but the memory limit of the device is"),
            ("", "device: b, memory: 1 MiB", "no memory limit"),
            ("", "device: a, leaves: true", "the head"),
            ("", "device: b, slow: 50 %", "clock"),
            ("", "device: b, disk_load: 50 %", "throttle"),
            ("", "for: 1 s, stalls: true", "links"),
            ("", "device: b, load: {threads: 1, gpu: 50 %}", "GPU"),
        ] {
            let rejection = event(limits, what).expect(what);
            assert!(rejection.contains(complaint), "{what}: {rejection}");
        }
        let cpu = |cpu: &str| rejection(&format!(", limits: {{threads: 1, cpu: {cpu}}}"), PLAIN);
        assert!(cpu("0.05").is_some_and(|why| why.contains("0.1 CPUs")));
        assert_eq!(cpu("0.1"), None);
        let draft = "workload: {prompt: 1, generate: 1, speculation: {draft: {profile: tiny}, tokens: 2, acceptance: \
                     {value: 50 %, source: t}}}";
        assert!(rejection("", draft).is_some_and(|why| why.contains("draft model")));
    }
}
