//! Tests of relays: devices without layers that forward messages between devices that cannot connect to each other.

use hearth_profiles::Document;
use hearth_schema::plan::Role;
use hearth_schema::trace::{Outcome, StepKind};

use crate::folder::{Folder, scenario_yaml};
use crate::processes::{assert_rejected, run_successfully};

/// Returns a scenario in which the desktop cannot connect to the laptop, for example because the laptop is behind NAT.
/// The phone, which is too slow to compute a layer, can connect to both.
fn scenario_with_relay() -> String {
    let devices = [("desktop", "d3"), ("phone", "d4"), ("laptop", "d2")];
    let device = |(name, profile)| format!("  - {{name: {name}, profile: {profile}}}");
    let text = scenario_yaml(&devices.map(device).join("\n")).replace("llama-8b", "llama-30b");
    text + "  between:\n    - {devices: [desktop, laptop], unreachable: forward}\nplanner: {strategy: exact}\n"
}

#[test]
fn relay_forwards_every_message() {
    let folder = Folder::new();
    let (file, planned) = (folder.write("s.yaml", scenario_with_relay()), folder.path_of("plan.yaml"));
    run_successfully(&["plan", &file, "--output", &planned]);
    let plan = folder.read_plan("plan.yaml");
    let ring: Vec<(&str, Role)> = plan.devices.iter().map(|it| (it.name.as_str(), it.role)).collect();
    assert_eq!(ring, [("desktop", Role::Head), ("phone", Role::Relay), ("laptop", Role::Worker)]);

    run_successfully(&["simulate", &file, "--plan", &planned, "--trace", &folder.path_of("run.trace")]);
    let trace = folder.read_trace("run.trace");
    assert_eq!(trace.outcome, Outcome::Ok);
    assert!(!trace.records.iter().any(|it| it.device_index == 1 && it.kind == StepKind::Compute));
    let peers = |device: u16| {
        let sent =
            trace.records.iter().filter(move |it| it.device_index == device && it.kind == StepKind::Send);
        sent.map(|record| record.peer).collect::<Vec<_>>()
    };
    assert_eq!(peers(1), vec![Some(2); trace.passes.len()]);
    assert!(peers(0).iter().all(|peer| *peer == Some(1)));

    // `--order best` finds the same ring, because there is no other path from the desktop to the laptop.
    run_successfully(&["plan", &file, "--order", "best", "--output", &planned]);
    let free = folder.read_plan("plan.yaml");
    assert_eq!(free.planner.options, ["drop=true", "order=best"]);
    assert_eq!(free.devices[1].role, Role::Relay);

    let mut direct = plan;
    direct.devices.remove(1);
    folder.write("plan.yaml", direct.to_yaml());
    let reason = "the plan sends messages from `desktop` to `laptop`, but in the scenario `laptop` cannot";
    assert_rejected(&["simulate", &file, "--plan", &planned], &[reason]);
}

#[test]
fn contradictory_links_are_rejected() {
    let folder = Folder::new();
    for (entry, complaint) in [
        ("{devices: [desktop, phone]}", "has no effect: give `link` or `unreachable`"),
        ("{devices: [desktop, desktop], unreachable: both}", "names one device twice"),
        (
            "{devices: [desktop, tower], unreachable: both}",
            "names `tower`, which is not a device of this scenario",
        ),
        ("{devices: [desktop, phone], unreachable: backward}", "unknown variant `backward`"),
    ] {
        let text = scenario_with_relay().replace("{devices: [desktop, laptop], unreachable: forward}", entry);
        assert_rejected(&["plan", &folder.write("s.yaml", text)], &[complaint]);
    }
}
