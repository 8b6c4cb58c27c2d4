//! Tests that `hearth simulate` predicts the cost of events: the results agree with manually derived values.
//!
//! Each run of a scenario in `scenarios/home` is compared with the same run without events.

use std::fs;

use hearth_core::memory::MemoryBudget;
use hearth_core::residency::kept_bytes;
use hearth_core::schedule::{ModelPart, parts_by_busy_period};
use hearth_profiles::device::shipped_profile as shipped_device;
use hearth_profiles::{Bytes, DeviceProfile, Document};
use hearth_schema::Trace;
use hearth_schema::trace::Counter;
use serde_json::Value;

use crate::folder::Folder;
use crate::processes::{
    assert_rejected, expect_array, expect_number, mean_tpot_ms, run_json, run_json_with_code,
    run_successfully, run_with_code, scenario_path, string_values,
};
use crate::repository::repository_root;

fn simulate(scenario: &str, more: &[&str], folder: &Folder) -> (Value, Trace) {
    let output = run_json(
        &[&["simulate", scenario, "--draws", "0", "--trace", &folder.path_of("run.trace")][..], more]
            .concat(),
    );
    (output, folder.read_trace("run.trace"))
}

fn home(name: &str) -> String {
    scenario_path(&format!("home/{name}"))
}

fn read_home(name: &str) -> String {
    fs::read_to_string(home(name)).expect("a tracked file")
}

fn simulate_without_events(name: &str, folder: &Folder) -> Value {
    let text = read_home(name);
    let (before, _) = text.split_once("events:").expect("it has events");
    simulate(&folder.write("without-events.yaml", before), &[], folder).0
}

/// Returns a metric (`tpot_ms`, `max_ms` or `pressure`) before, during or after the run event with this index.
fn impact(json: &Value, index: usize, metric: &str, phase: &str) -> f64 {
    let run_event = &json["run_events"][index];
    run_event[metric][phase].as_f64().unwrap_or_else(|| panic!("{metric} {phase} of {run_event}"))
}

/// Returns the bytes that a device read per token between the passes `from` and `to`.
fn read_per_token(trace: &Trace, device: u16, from: u32, to: u32) -> f64 {
    let at = |pass| {
        let key = (device, Counter::BytesRead, pass);
        let mut readings = trace.readings.iter();
        readings.find(|it| (it.device_index, it.counter, it.pass_index) == key).expect("counted").value
    };
    (at(to) - at(from)) as f64 / f64::from(to - from)
}

fn near(found: f64, expected: f64, within: f64) -> bool {
    (found - expected).abs() <= within * expected
}

#[test]
fn load_halves_the_speed_of_a_device() {
    let folder = Folder::new();
    let (json, _) = simulate(&home("game-on-the-laptop"), &[], &folder);
    let quiet = simulate_without_events("game-on-the-laptop", &folder);
    // The load takes half of the cores, so computing, all of which is on the CPU, takes twice as long.
    let computing = expect_number(&quiet["devices"][1]["busy_ms"]);
    let usual = mean_tpot_ms(&quiet);
    assert!(near(impact(&json, 0, "tpot_ms", "before"), usual, 0.01));
    assert!(near(impact(&json, 0, "max_ms", "during"), usual + computing, 0.01), "{usual} + {computing} ms");
    assert!(near(impact(&json, 0, "tpot_ms", "after"), usual, 0.01));
    let span = json["run_events"][0]["end"].as_u64().zip(json["run_events"][0]["start"].as_u64());
    assert_eq!(span.map(|(end, start)| end - start), Some(3_000_000_000));
}

#[test]
fn ring_drops_a_lost_device_and_readmits_it() {
    let folder = Folder::new();
    let (json, trace) = simulate(&home("phone-leaves"), &[], &folder);
    assert_eq!(json["outcome"], "ok");
    assert_eq!(string_values(&json["run_events"], "kind"), ["away", "silent", "replanned", "replanned"]);
    // The loss is detected after 1.5 to 2.0 s. Then the ring has a new plan and computes 52 tokens again: 32 + 20.
    let [silence, again] = [1, 2].map(|at: usize| {
        let time = |key: &str| json["run_events"][at][key].as_u64().expect("a time");
        (time("end") - time("start")) as f64 / 1e6
    });
    assert!((1500.0..2000.0).contains(&silence), "{silence} ms");
    let what = json["run_events"][2]["what"].as_str().expect("what");
    assert!(what.ends_with("52 tokens computed again") && !what.contains("phone"), "{what}");
    let lost = impact(&json, 2, "max_ms", "during");
    // The current token started when the phone left, so its time is the silence plus the replanning.
    assert!(near(lost, silence + again, 0.001), "{lost} ms, {silence} + {again}");
    let expected = (silence + again) / trace.passes.iter().filter(|pass| pass.has_output).count() as f64;
    let bubble = expect_number(&json["terms_ms"]["bubble"]);
    assert!(bubble < 2.0 * expected, "the terms include the loss: {bubble} ms of each token");
    let second = folder.read_plan("run.plan-1.yaml");
    assert_eq!(second.device_index("phone"), None);
    assert_eq!(folder.read_plan("run.plan-2.yaml").devices.len(), 3);
    assert_eq!(json["run_events"][2]["plan"], second.digest());
    run_successfully(&["report", &folder.path_of("run.trace"), "--output", &folder.path_of("report")]);
    let report = folder.read("report/report.md");
    assert!(report.contains("## Events") && report.contains("52 tokens computed again"));
    assert!(report.contains("phone was detected as lost 1537 ms"), "{report}");
    // The same seed gives the same trace, byte for byte.
    let mut bytes = Vec::new();
    trace.write(&mut bytes).expect("memory");
    simulate(&home("phone-leaves"), &[], &folder);
    assert_eq!(folder.read("run.trace").as_bytes(), bytes);
}

#[test]
fn manual_windows_are_replanned_when_a_device_is_lost() {
    let folder = Folder::new();
    let text = read_home("phone-leaves").replace("keep_all: true", "windows: [30, 20, 10]");
    let file = folder.write("manual.yaml", text);
    let (json, _) = simulate(&file, &[], &folder);
    assert_eq!((&json["outcome"], &json["run_events"][2]["kind"]), (&"ok".into(), &"replanned".into()));
    assert_eq!(folder.read_plan("run.plan-1.yaml").planner.strategy, "overlap");
    // Windows without a strategy are `manual`.
    run_successfully(&["plan", &file, "--output", &folder.path_of("plan.yaml")]);
    assert_eq!(folder.read_plan("plan.yaml").planner.strategy, "manual");
}

#[test]
fn swap_is_limited_by_compression() {
    let folder = Folder::new();
    let file = home("zram-on-the-phone");
    let (json, trace) = simulate(&file, &[], &folder);
    run_successfully(&["plan", &file, "--output", &folder.path_of("plan.yaml")]);
    let plan = folder.read_plan("plan.yaml");
    let phone = DeviceProfile::from_yaml(&read_home("devices/zram-phone")).expect("a device");
    let model = hearth_profiles::model::shipped_profile("llama-8b").expect("shipped");
    let swapped = phone.memory.obtainable_bytes().saturating_sub(phone.memory.available_memory.value);
    // A third of the swapped bytes remains in memory in compressed form; the plan assumed none.
    let weight_cache = MemoryBudget::new(&plan, 0, &model, &phone).weight_cache;
    let budget = weight_cache.saturating_sub(Bytes(swapped.0 / 3));
    let bytes = |part: ModelPart| match part {
        ModelPart::Output => model.output_head_bytes(),
        ModelPart::Layers(layers) => layers.map(|layer| model.layer_bytes(layer)).sum(),
    };
    let share: Bytes = parts_by_busy_period(&plan, 0).into_iter().flatten().map(bytes).sum();
    let kept = kept_bytes(budget.0, share.0, phone.cpu.cores, &plan.devices[0].residency);
    let last = read_per_token(&trace, 0, 35, 39);
    assert!(near(last, (share.0 - kept) as f64, 0.02), "{last} bytes per token, {kept} of {share} kept");
    let early = read_per_token(&trace, 0, 1, 3);
    assert!(early > 1.5 * last, "{early} bytes per token at first, {last} at the end");
    assert!(impact(&json, 0, "max_ms", "during") > 2.0 * expect_number(&json["tpot_ms"]["p50"]) - 100.0);
}

#[test]
fn cost_of_memory_pressure_depends_on_residency() {
    let folder = Folder::new();
    let model = hearth_profiles::model::shipped_profile("llama-14b").expect("shipped");
    let mut times = Vec::new();
    for residency in ["os", "windowed", "managed"] {
        let (json, trace) = simulate(&home("memory-step"), &["--residency", residency], &folder);
        let total = trace.header.devices[1].total_memory_bytes as f64;
        let more = impact(&json, 0, "pressure", "during") - impact(&json, 0, "pressure", "before");
        let taken = Bytes::from_mib(1024).as_f64();
        assert!(near(more, taken / total, 0.001), "{taken} of {total} bytes are {more}");
        let (before, after) = (impact(&json, 0, "tpot_ms", "before"), impact(&json, 0, "tpot_ms", "after"));
        // A managed device needs a few tokens to load the evicted weights again.
        let within = if residency == "managed" { 0.1 } else { 0.01 };
        assert!(near(after, before, within), "{residency}: {before} ms before, {after} after");
        // The third token after the beginning of the event; its neighbours are also under pressure.
        let share: u64 = (24..48).map(|layer| model.layer_bytes(layer).0).sum();
        let part = read_per_token(&trace, 1, 11, 13) / share as f64;
        if residency == "managed" {
            assert!(part < 0.35, "it keeps most: {part}");
        } else {
            assert!((0.98..1.05).contains(&part), "{residency} reads all of it again: {part}");
        }
        times.push(impact(&json, 0, "tpot_ms", "during"));
    }
    assert!(times[2] < 0.6 * times[0] && times[2] < 0.6 * times[1], "{times:?}");
}

#[test]
fn short_stall_loses_no_device() {
    let folder = Folder::new();
    let (json, _) = simulate(&home("wi-fi-stalls"), &[], &folder);
    let quiet = simulate_without_events("wi-fi-stalls", &folder);
    assert_eq!(expect_array(&json["run_events"]).len(), 1, "no device was lost");
    let usual = mean_tpot_ms(&quiet);
    let head = expect_number(&quiet["devices"][0]["busy_ms"]);
    // While the link is stalled, the head still computes until its first message.
    let longest = impact(&json, 0, "max_ms", "during");
    let stalled = 1500.0 + usual;
    assert!((stalled - head..stalled + 3.0).contains(&longest), "{longest} ms, {usual} usually");
    let [with, without] = [&json, &quiet].map(|run| expect_number(&run["terms_ms"]["network"]) * 23.0);
    let expected = longest - usual + 0.5 * head;
    assert!(near(with - without, expected, 0.02), "the network has {} ms more", with - without);
}

#[test]
fn invalid_events_are_rejected_and_late_events_are_reported() {
    let folder = Folder::new();
    let text = read_home("wi-fi-stalls");
    let (before, _) = text.split_once("events:").expect("it has events");
    let with = |event: &str| folder.write("s.yaml", format!("{before}events:\n  - {event}\n"));
    for (event, complaint) in [
        (
            "{token: 3, device: tablet, slow: 50 %}",
            "events[0] names `tablet`, which is not a device of this scenario",
        ),
        ("{token: 3, device: laptop, slow: 0.5}", "slow"),
        ("{token: 3, device: laptop, leaves: true, for: 3 s}", "cannot have `for`"),
        ("{token: 3, device: laptop, sleeps: true}", "unknown field `sleeps`"),
    ] {
        assert_rejected(&["simulate", &with(event)], &[complaint]);
    }
    let file = with("{token: 30, device: laptop, slow: 50 %}");
    let (_, stderr) = run_with_code(&["simulate", &file], 0);
    assert!(stderr.contains("events[0] did not happen"), "{stderr}");
    // The windows of the scenario are far from the best ones, so that `lint` fails.
    assert!(string_values(&run_json_with_code(&["lint", &file], 3), "code").contains(&"event-after-end"));
    let file = with("{at: 5 min, device: laptop, slow: 50 %}");
    assert!(run_with_code(&["lint", &file], 3).0.contains("but the event is at 300 s"));
    // Without swap space nothing can be swapped out.
    let mut device = shipped_device("d2").expect("shipped");
    device.memory.can_swap = None;
    folder.write("no-swap.yaml", device.to_yaml());
    with("{at: 1 s, device: laptop, swap: {rate: 1 MB/s, compression: 3}}");
    let text = folder.read("s.yaml").replace("profile: d2", "profile: no-swap.yaml");
    assert_rejected(&["simulate", &folder.write("s.yaml", text)], &["does not have both `memory.can_swap`"]);
}

#[test]
fn exceeding_the_metal_working_set_costs_all_layers() {
    let folder = Folder::new();
    let name = "metal-one-layer-over";
    let (over, trace) = simulate(&home(name), &[], &folder);
    let over_read = read_per_token(&trace, 1, 4, 20);
    let device = repository_root().join("scenarios/home/devices/metal-mac.yaml").display().to_string();
    let text = read_home(name).replace("devices/metal-mac.yaml", &device);
    let file = folder.write("within.yaml", text.replace("windows: [27, 33]", "windows: [28, 32]"));
    let (within, trace) = simulate(&file, &[], &folder);
    assert_eq!(read_per_token(&trace, 1, 4, 20), 0.0);
    // All 33 layers are read again, although 32 layers would fit into the working set.
    let model = hearth_profiles::model::shipped_profile("llama-30b").expect("shipped");
    let share: Bytes = (27..60).map(|layer| model.layer_bytes(layer)).sum();
    assert!(near(over_read, share.as_f64(), 0.01), "{over_read} of {share}");
    // A token takes longer by the time to read the layers before the GPU can start.
    let disk = share.as_f64() / 2e9 * 1e3;
    assert!(near(mean_tpot_ms(&over) - mean_tpot_ms(&within), disk, 0.05), "{over} {within}");
    assert!(near(expect_number(&over["terms_ms"]["demand_disk"]), disk, 0.05), "{over}");
    assert!(expect_number(&within["terms_ms"]["demand_disk"]) < 1.0);
    let (findings, _) = run_with_code(&["lint", &home(name), "--strategy", "manual"], 3);
    assert!(findings.contains("error[far-above-optimum]"), "{findings}");
    assert!(findings.contains("working-set-exceeded"), "{findings}");
    assert!(findings.contains("all of them are read again"), "{findings}");
}
