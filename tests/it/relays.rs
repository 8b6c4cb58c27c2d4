//! A relay passes messages on, from the scenario to the simulated run.
//!
//! A desktop that cannot dial a laptop (address translation, say), and a phone too slow to be given a layer of this
//! model, which both can reach.

use std::fs;

use hearth_profiles::Document;
use hearth_schema::Plan;
use hearth_schema::Trace;
use hearth_schema::plan::Role;
use hearth_schema::trace::Kind;
use hearth_schema::trace::Outcome;

use crate::processes::{error, run};

const SCENARIO: &str = "schema: scenario/1
name: relay
seed: 1
model: {profile: llama-30b}
context: 256
workload: {prompt: 8, generate: 4}
devices:
  - {name: desktop, profile: d3}
  - {name: phone, profile: d4}
  - {name: laptop, profile: d2}
links:
  default: {latency: {value: 5 ms, source: assumed}, bandwidth: {value: 465 Mbit/s, source: assumed}}
  between:
    - {devices: [desktop, laptop], unreachable: forward}
planner: {strategy: exact}
";

#[test]
fn relay_forwards_every_message() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name).display().to_string();
    let (scenario, planned, traced) = (path("s.yaml"), path("p.yaml"), path("t.jsonl"));
    fs::write(&scenario, SCENARIO).expect("the folder can be written");
    assert!(run(&["plan", &scenario, "--output", &planned]).status.success());
    let plan = Plan::from_yaml(&fs::read_to_string(&planned).expect("a plan")).expect("a plan");
    let ring: Vec<(&str, Role)> = plan.devices.iter().map(|it| (it.name.as_str(), it.role)).collect();
    assert_eq!(ring, [("desktop", Role::Head), ("phone", Role::Relay), ("laptop", Role::Worker)]);

    assert!(run(&["simulate", &scenario, "--plan", &planned, "--trace", &traced]).status.success());
    let trace = Trace::read(&mut fs::read(&traced).expect("a trace").as_slice()).expect("a trace");
    assert_eq!(trace.outcome, Outcome::Ok);
    let of_phone: Vec<_> = trace.records.iter().filter(|record| record.device == 1).collect();
    assert!(of_phone.iter().all(|record| record.kind != Kind::Compute));
    let sent: Vec<_> = of_phone.iter().filter(|record| record.kind == Kind::Send).collect();
    assert!(sent.iter().all(|record| record.peer == Some(2)));
    assert_eq!(sent.len(), trace.passes.len());
    let from_desktop = trace.records.iter().filter(|it| it.device == 0 && it.kind == Kind::Send);
    assert!(from_desktop.into_iter().all(|record| record.peer == Some(1)));

    let mut direct = plan;
    direct.devices.remove(1);
    fs::write(&planned, direct.to_yaml()).expect("the folder can be written");
    let text = error(&["simulate", &scenario, "--plan", &planned], 2);
    assert!(
        text.contains("the plan sends from `desktop` to `laptop`, which the scenario says cannot"),
        "{text}"
    );

    // The free order finds the same ring: there is no other way from the desktop to the laptop.
    let ordered = ["plan", &scenario, "--order", "best", "--output", &planned];
    assert!(run(&ordered).status.success());
    let plan = Plan::from_yaml(&fs::read_to_string(&planned).expect("a plan")).expect("a plan");
    assert_eq!(plan.planner.options, ["drop=true", "order=best"]);
    assert_eq!(plan.devices[1].role, Role::Relay);
}

#[test]
fn contradictory_links_are_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let scenario = folder.path().join("s.yaml").display().to_string();
    for (entry, complaint) in [
        ("{devices: [desktop, phone]}", "says nothing: give `link` or `unreachable`"),
        ("{devices: [desktop, desktop], unreachable: both}", "names one device twice"),
        ("{devices: [desktop, tower], unreachable: both}", "names `tower`, which is not a device here"),
        ("{devices: [desktop, phone], unreachable: backward}", "unknown variant `backward`"),
    ] {
        let text = SCENARIO.replace("{devices: [desktop, laptop], unreachable: forward}", entry);
        fs::write(&scenario, text).expect("the folder can be written");
        let text = error(&["plan", &scenario], 2);
        assert!(text.contains(complaint), "{text}");
    }
}
