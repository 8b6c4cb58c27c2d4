//! `hearth simulate` predicts the cost of the events of a scenario, in numbers that can be checked by hand.
//!
//! The scenarios of `scenarios/home`, each with its question. What an event adds is checked against the same run
//! without it and a sum on paper.

use std::fs;
use std::path::{Path, PathBuf};

use hearth_core::memory::MemoryBudget;
use hearth_core::residency::kept_bytes;
use hearth_core::schedule::ModelPart;
use hearth_core::schedule::visits;
use hearth_profiles::device::shipped;
use hearth_profiles::{Bytes, Device, Document};
use hearth_schema::Plan;
use hearth_schema::Trace;
use hearth_schema::trace::Counter;
use serde_json::Value;

use crate::processes::{error, run};
use crate::repository::root;

/// What `--json` says, with the trace.
fn simulated(scenario: &Path, more: &[&str], folder: &Path) -> (Value, Trace) {
    let (scenario, trace) = (scenario.display().to_string(), folder.join("run.trace").display().to_string());
    let output = run(&[&["simulate", &scenario, "--json", "--trace", &trace][..], more].concat());
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.is_empty(), "{scenario}: {said}");
    let trace = Trace::read(&mut fs::read(&trace).expect("a trace").as_slice()).expect("a trace");
    (serde_json::from_slice(&output.stdout).expect("one JSON document"), trace)
}

fn home(name: &str) -> PathBuf {
    root().join(format!("scenarios/home/{name}.yaml"))
}

/// The same scenario in a folder, without its events.
fn quiet(name: &str, folder: &Path) -> PathBuf {
    let text = fs::read_to_string(home(name)).expect("a tracked file");
    let path = folder.join("quiet.yaml");
    let (before, _) = text.split_once("events:").expect("it has events");
    fs::write(&path, before).expect("the folder can be written");
    path
}

/// A run event's number: `tpot_ms`, `max_ms` or `pressure`, and a phase.
fn told(json: &Value, index: usize, number: &str, phase: &str) -> f64 {
    let run_event = &json["run_events"][index];
    run_event[number][phase].as_f64().unwrap_or_else(|| panic!("{number} {phase} of {run_event}"))
}

/// Bytes that a device read for each token from one to another.
fn read(trace: &Trace, device: u16, from: u32, to: u32) -> f64 {
    let at = |pass| {
        let mut own =
            trace.readings.iter().filter(|it| (it.device, it.counter) == (device, Counter::BytesRead));
        own.find(|it| it.pass == pass).expect("counted").value
    };
    (at(to) - at(from)) as f64 / f64::from(to - from)
}

fn near(found: f64, expected: f64, within: f64) -> bool {
    (found - expected).abs() <= within * expected
}

#[test]
fn load_halves_the_speed_of_a_device() {
    let folder = tempfile::tempdir().expect("a folder");
    let (json, _) = simulated(&home("game-on-the-laptop"), &[], folder.path());
    let (quiet, _) = simulated(&quiet("game-on-the-laptop", folder.path()), &[], folder.path());
    // Half of its cores: its computing, all of which is on the processor, takes twice as long.
    let computing = quiet["devices"][1]["busy_ms"].as_f64().expect("busy");
    let usual = quiet["tpot_ms"]["mean"].as_f64().expect("tokens");
    assert!(near(told(&json, 0, "tpot_ms", "before"), usual, 0.01));
    assert!(near(told(&json, 0, "max_ms", "during"), usual + computing, 0.01), "{usual} + {computing} ms");
    assert!(near(told(&json, 0, "tpot_ms", "after"), usual, 0.01));
    let span = json["run_events"][0]["end"].as_u64().zip(json["run_events"][0]["start"].as_u64());
    assert_eq!(span.map(|(end, start)| end - start), Some(3_000_000_000));
}

#[test]
fn ring_drops_a_lost_device_and_readmits_it() {
    let folder = tempfile::tempdir().expect("a folder");
    let (json, trace) = simulated(&home("phone-leaves"), &[], folder.path());
    assert_eq!(json["outcome"], "ok");
    let kinds: Vec<&str> =
        json["run_events"].as_array().expect("a list").iter().filter_map(|it| it["kind"].as_str()).collect();
    assert_eq!(kinds, ["away", "silent", "replanned", "replanned"]);
    // 1.5 to 2.0 s until it is missed; then the plan's way and back, and 52 tokens once more: 32 and 20.
    let [silence, again] = [1, 2].map(|at: usize| {
        let time = |key: &str| json["run_events"][at][key].as_u64().expect("a time");
        (time("end") - time("start")) as f64 / 1e6
    });
    assert!((1500.0..2000.0).contains(&silence), "{silence} ms");
    let what = json["run_events"][2]["what"].as_str().expect("what");
    assert!(what.ends_with("52 tokens computed again") && !what.contains("phone"), "{what}");
    let lost = told(&json, 2, "max_ms", "during");
    // The token under way began when the phone left: its time is the silence and what followed it.
    assert!(near(lost, silence + again, 0.001), "{lost} ms, {silence} + {again}");
    let expected = (silence + again) / trace.passes.iter().filter(|pass| pass.output).count() as f64;
    let bubble = json["terms_ms"]["bubble"].as_f64().expect("a term");
    assert!(bubble < 2.0 * expected, "the terms tell the loss: {bubble} ms of each token");
    // Every plan is a file of its own.
    let plan = |number: usize| {
        let path = folder.path().join(format!("run.plan-{number}.yaml"));
        Plan::from_yaml(&fs::read_to_string(path).expect("a plan")).expect("a plan")
    };
    assert_eq!(plan(1).position("phone"), None);
    assert_eq!(plan(2).devices.len(), 3);
    assert_eq!(json["run_events"][2]["plan"], plan(1).digest());
    // The same seed makes the same bytes.
    let mut bytes = Vec::new();
    trace.write(&mut bytes).expect("memory");
    simulated(&home("phone-leaves"), &[], folder.path());
    assert_eq!(fs::read(folder.path().join("run.trace")).expect("a trace"), bytes);
}

#[test]
fn manual_windows_are_replanned_when_a_device_is_lost() {
    let folder = tempfile::tempdir().expect("a folder");
    let text = fs::read_to_string(home("phone-leaves")).expect("a tracked file");
    let path = folder.path().join("by-hand.yaml");
    fs::write(&path, text.replace("keep_all: true", "windows: [30, 20, 10]")).expect("written");
    let (json, _) = simulated(&path, &[], folder.path());
    assert_eq!((&json["outcome"], &json["run_events"][2]["kind"]), (&"ok".into(), &"replanned".into()));
    let plan = |name: &str| {
        let path = folder.path().join(name);
        Plan::from_yaml(&fs::read_to_string(path).expect("a plan")).expect("a plan")
    };
    assert_eq!(plan("run.plan-1.yaml").planner.strategy, "overlap");
    // Windows without a strategy are `manual`.
    let planned = folder.path().join("plan.yaml").display().to_string();
    assert!(run(&["plan", &path.display().to_string(), "--output", &planned]).status.success());
    assert_eq!(plan("plan.yaml").planner.strategy, "manual");
}

#[test]
fn swap_is_limited_by_compression() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = home("zram-on-the-phone");
    let (json, trace) = simulated(&path, &[], folder.path());
    let planned = folder.path().join("plan.yaml").display().to_string();
    assert!(run(&["plan", &path.display().to_string(), "--output", &planned]).status.success());
    let plan = Plan::from_yaml(&fs::read_to_string(planned).expect("a plan")).expect("a plan");
    let phone = root().join("scenarios/home/devices/zram-phone.yaml");
    let phone = fs::read_to_string(phone).expect("a tracked file");
    let (phone, model) = (
        Device::from_yaml(&phone).expect("a device"),
        hearth_profiles::model::shipped("llama-8b").expect("shipped"),
    );
    let swapped = phone.memory.obtainable().saturating_sub(phone.memory.available.value);
    // A third of what is swapped out stays: the plan had counted on all of it.
    let room = MemoryBudget::new(&plan, 0, &model, &phone).left.saturating_sub(Bytes(swapped.0 / 3));
    let bytes = |part: ModelPart| match part {
        ModelPart::Output => model.output_bytes(),
        ModelPart::Layers(layers) => layers.map(|layer| model.layer_bytes(layer)).sum(),
    };
    let share: Bytes = visits(&plan, 0).into_iter().flatten().map(bytes).sum();
    let kept = kept_bytes(room.0, share.0, phone.cpu.cores, &plan.devices[0].residency);
    let last = read(&trace, 0, 35, 39);
    assert!(near(last, (share.0 - kept) as f64, 0.02), "{last} bytes a token, of {share} {kept} kept");
    let early = read(&trace, 0, 1, 3);
    assert!(early > 1.5 * last, "{early} bytes a token at first, {last} in the end");
    assert!(
        told(&json, 0, "max_ms", "during") > 2.0 * json["tpot_ms"]["p50"].as_f64().expect("tokens") - 100.0
    );
}

#[test]
fn cost_of_memory_pressure_depends_on_residency() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut times = Vec::new();
    for residency in ["os", "windowed", "managed"] {
        let (json, trace) = simulated(&home("memory-step"), &["--residency", residency], folder.path());
        let total = trace.header.devices[1].memory_total as f64;
        let more = told(&json, 0, "pressure", "during") - told(&json, 0, "pressure", "before");
        assert!(near(more, Bytes::mib(1024).as_f64() / total, 0.001), "1 GiB of {total} bytes are {more}");
        let (before, after) = (told(&json, 0, "tpot_ms", "before"), told(&json, 0, "tpot_ms", "after"));
        // A managed device needs a few tokens to take back what it gave up.
        let within = if residency == "managed" { 0.1 } else { 0.01 };
        assert!(near(after, before, within), "{residency}: {before} ms before, {after} after");
        // The third token after the beginning: it and those beside it are under pressure.
        let share: u64 = (24..48).map(|layer| model().layer_bytes(layer).0).sum();
        let part = read(&trace, 1, 11, 13) / share as f64;
        println!(
            "{residency}: reads {part} of its share, {} ms a token",
            told(&json, 0, "tpot_ms", "during")
        );
        if residency == "managed" {
            assert!(part < 0.35, "it keeps most: {part}");
        } else {
            assert!((0.98..1.05).contains(&part), "{residency} reads all of it again: {part}");
        }
        times.push(told(&json, 0, "tpot_ms", "during"));
    }
    assert!(times[2] < 0.6 * times[0] && times[2] < 0.6 * times[1], "{times:?}");
}

fn model() -> hearth_profiles::model::ModelProfile {
    hearth_profiles::model::shipped("llama-14b").expect("shipped")
}

#[test]
fn short_stall_loses_no_device() {
    let folder = tempfile::tempdir().expect("a folder");
    let (json, _) = simulated(&home("wi-fi-stalls"), &[], folder.path());
    let (quiet, _) = simulated(&quiet("wi-fi-stalls", folder.path()), &[], folder.path());
    assert_eq!(json["run_events"].as_array().map(Vec::len), Some(1), "no device was missed");
    let usual = quiet["tpot_ms"]["mean"].as_f64().expect("tokens");
    let head = quiet["devices"][0]["busy_ms"].as_f64().expect("busy");
    // What the head computes before its first message is done while the link stands still.
    let longest = told(&json, 0, "max_ms", "during");
    assert!(
        (1500.0 + usual - head..1500.0 + usual + 3.0).contains(&longest),
        "{longest} ms, {usual} usually"
    );
    let count = 23.0;
    let more = json["terms_ms"]["network"]
        .as_f64()
        .zip(quiet["terms_ms"]["network"].as_f64())
        .map(|(with, without)| with - without);
    assert!(
        more.is_some_and(|more| near(more * count, longest - usual + 0.5 * head, 0.02)),
        "it is air: {more:?}"
    );
}

#[test]
fn invalid_events_are_refused_and_late_ones_reported() {
    let folder = tempfile::tempdir().expect("a folder");
    let text = fs::read_to_string(home("wi-fi-stalls")).expect("a tracked file");
    let path = folder.path().join("s.yaml");
    let file = path.display().to_string();
    let with = |events: &str| {
        let (before, _) = text.split_once("events:").expect("it has events");
        fs::write(&path, format!("{before}events:\n  - {events}\n")).expect("the folder can be written");
    };
    for (events, complaint) in [
        ("{token: 3, device: tablet, slow: 50 %}", "events[0] names `tablet`, which is not a device here"),
        ("{token: 3, device: laptop, slow: 0.5}", "slow"),
        ("{token: 3, device: laptop, leaves: true, for: 3 s}", "has no `for`"),
        ("{token: 3, device: laptop, sleeps: true}", "unknown field `sleeps`"),
    ] {
        with(events);
        let said = error(&["simulate", &file], 2);
        assert!(said.contains(complaint), "{said}");
    }
    with("{token: 30, device: laptop, slow: 50 %}");
    let output = run(&["simulate", &file, "--json"]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.contains("events[0] did not happen"), "{said}");
    let found = run(&["lint", &file, "--json"]);
    let found: Value = serde_json::from_slice(&found.stdout).expect("one JSON document");
    let codes: Vec<&str> =
        found.as_array().expect("a list").iter().filter_map(|it| it["code"].as_str()).collect();
    assert!(codes.contains(&"event-after-end"), "{codes:?}");
    with("{at: 5 min, device: laptop, slow: 50 %}");
    let found = run(&["lint", &file, "--json"]);
    assert!(String::from_utf8_lossy(&found.stdout).contains("this happens at 300 s"));
    // Without swap space nothing can be swapped out.
    with("{at: 1 s, device: laptop, swap: {rate: 1 MB/s, compression: 3}}");
    let bare = folder.path().join("bare.yaml");
    let mut device = shipped("d2").expect("shipped");
    device.memory.can_swap = None;
    fs::write(&bare, device.to_yaml()).expect("the folder can be written");
    let named = fs::read_to_string(&path).expect("ours").replace("profile: d2", "profile: bare.yaml");
    fs::write(&path, named).expect("the folder can be written");
    assert!(error(&["simulate", &file], 2).contains("no `memory.can_swap`"));
}

#[test]
fn report_lists_the_events() {
    let folder = tempfile::tempdir().expect("a folder");
    simulated(&home("phone-leaves"), &[], folder.path());
    let path = |name: &str| folder.path().join(name).display().to_string();
    assert!(run(&["report", &path("run.trace"), "--output", &path("report")]).status.success());
    let report = fs::read_to_string(folder.path().join("report/report.md")).expect("a report");
    assert!(report.contains("## Events") && report.contains("52 tokens computed again"));
    assert!(report.contains("phone was detected as lost 1537 ms"), "{report}");
}

/// The scenario of a Mac beside a desktop, with other windows.
fn mac(windows: &str, folder: &Path) -> PathBuf {
    let text = fs::read_to_string(home("metal-one-layer-over")).expect("a tracked file");
    let device = root().join("scenarios/home/devices/metal-mac.yaml").display().to_string();
    let text = text.replace("devices/metal-mac.yaml", &device).replace("windows: [27, 33]", windows);
    let path = folder.join("mac.yaml");
    fs::write(&path, text).expect("the folder can be written");
    path
}

#[test]
fn exceeding_the_metal_working_set_costs_all_layers() {
    let folder = tempfile::tempdir().expect("a folder");
    let (over, trace) = simulated(&home("metal-one-layer-over"), &[], folder.path());
    let over_read = read(&trace, 1, 4, 20);
    let (within, trace) = simulated(&mac("windows: [28, 32]", folder.path()), &[], folder.path());
    assert_eq!(read(&trace, 1, 4, 20), 0.0);
    // The whole share, of which 32 layers stayed before.
    let model = hearth_profiles::model::shipped("llama-30b").expect("shipped");
    let share: Bytes = (27..60).map(|layer| model.layer_bytes(layer)).sum();
    assert!(near(over_read, share.as_f64(), 0.01), "{over_read} of {share}");
    // That it comes from the disk before the GPU can begin is what a token takes longer.
    let tpot = |json: &Value| json["tpot_ms"]["mean"].as_f64().expect("tokens");
    let disk = share.as_f64() / 2e9 * 1e3;
    assert!(near(tpot(&over) - tpot(&within), disk, 0.05), "{over} {within}");
    assert!(near(over["terms_ms"]["demand_disk"].as_f64().expect("a term"), disk, 0.05), "{over}");
    assert!(within["terms_ms"]["demand_disk"].as_f64().expect("a term") < 1.0);
    // Said before anything runs.
    let said = run(&["lint", &home("metal-one-layer-over").display().to_string(), "--strategy", "manual"]);
    let said = String::from_utf8_lossy(&said.stdout).into_owned();
    assert!(said.contains("working-set-exceeded") && said.contains("all of it is read again"), "{said}");
}
