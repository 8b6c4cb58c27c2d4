//! docs/reference/scenarios.md names every key of a scenario and of a device, and a wrong value gets an example.
//!
//! The keys come from the types: a key that no type knows is refused with a list of those that it knows.

use std::fs;
use std::path::Path;

use hearth_profiles::device::soc::{
    Bus, Graphs, Profiled, Shape, Soc, SocGpu, SocNpu, SocOptions, SocPower, SyncCosts,
};
use hearth_profiles::device::{Cpu, Disk, Gpu, Memory, Quota, Reclaim, Transfer};
use hearth_profiles::link::PeerLink;
use hearth_profiles::link::wifi::{Delay, Stall, Tcp, Wifi, WifiChannel};
use hearth_profiles::{Device, Document, Link, Seconds, Sourced};
use hearth_schema::Scenario;
use hearth_schema::events::Event;
use hearth_schema::events::Load;
use hearth_schema::events::Swap;
use hearth_schema::events::Taken;
use hearth_schema::residency::ResidencyOptions;
use hearth_schema::scenario::DeviceEntry;
use hearth_schema::scenario::Limits;
use hearth_schema::scenario::Links;
use hearth_schema::scenario::ModelRef;
use hearth_schema::scenario::NamedLink;
use hearth_schema::scenario::PlannerOptions;
use hearth_schema::scenario::Speculation;
use hearth_schema::scenario::Workload;
use serde::de::DeserializeOwned;

/// The keys of a type.
fn keys<T: DeserializeOwned>() -> Vec<String> {
    let Err(error) = serde_yaml::from_str::<T>("{no-such-key: 1}") else { panic!("it knows every key") };
    let said = error.to_string();
    let (_, known) = said.split_once("expected ").unwrap_or_else(|| panic!("no list of keys: {said}"));
    known.split('`').skip(1).step_by(2).map(str::to_owned).collect()
}

#[test]
fn scenario_reference_names_every_key() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/reference/scenarios.md");
    let text = fs::read_to_string(path).expect("the reference");
    let all = [
        keys::<Scenario>(),
        keys::<ModelRef>(),
        keys::<DeviceEntry>(),
        keys::<Limits>(),
        keys::<Links>(),
        keys::<NamedLink>(),
        keys::<PlannerOptions>(),
        keys::<Workload>(),
        keys::<Speculation>(),
        keys::<ResidencyOptions>(),
        keys::<Event>(),
        keys::<Load>(),
        keys::<Taken>(),
        keys::<Swap>(),
        keys::<Wifi>(),
        keys::<WifiChannel>(),
        keys::<Delay>(),
        keys::<Stall>(),
        keys::<Tcp>(),
        keys::<Device>(),
        keys::<Cpu>(),
        keys::<Quota>(),
        keys::<Gpu>(),
        keys::<Memory>(),
        keys::<Reclaim>(),
        keys::<Disk>(),
        keys::<Transfer>(),
        keys::<Soc>(),
        keys::<SocGpu>(),
        keys::<SocNpu>(),
        keys::<Bus>(),
        keys::<SyncCosts>(),
        keys::<Graphs>(),
        keys::<SocPower>(),
        keys::<SocOptions>(),
        keys::<Profiled>(),
        keys::<Shape>(),
        keys::<PeerLink>(),
        keys::<Link>(),
        keys::<Sourced<Seconds>>(),
    ];
    for keys in all {
        assert!(!keys.is_empty());
        for key in keys {
            let named = text.contains(&format!("`{key}`")) || text.contains(&format!("{key}: .."));
            assert!(named, "docs/reference/scenarios.md does not name `{key}`");
        }
    }
}

#[test]
fn wrong_value_gets_an_example() {
    let good = "schema: scenario/1\nname: x\nmodel: {profile: llama-8b}\ncontext: 64\n\
                workload: {prompt: 1, generate: 1}\ndevices: [{name: a, profile: d3}]\nlinks:\n  default:\n    \
                latency: {value: 2 ms, source: test}\n    bandwidth: {value: 400 Mbit/s, source: test}\n";
    assert_eq!(Scenario::from_yaml(good).expect("a scenario without a seed").seed, 1);
    for (what, with, said) in [
        ("{value: 2 ms, source: test}", "2 ms", "a value and where it comes from, as `{value: 5 ms"),
        ("{profile: llama-8b}", "llama-8b", "`{profile: llama-70b}`, a shipped model"),
        ("{prompt: 1, generate: 1}", "16", "a workload, as `{prompt: 32, generate: 16}`"),
        ("[{name: a, profile: d3}]", "[d3]", "a device, as `{name: desktop, profile: d3}`"),
    ] {
        let text = good.replacen(what, with, 1);
        assert_ne!(text, good, "the test is out of date: {what}");
        let error = Scenario::from_yaml(&text).expect_err("the wrong shape").to_string();
        assert!(error.contains(said) && !error.contains("struct "), "{error}");
    }
    let device = hearth_profiles::device::shipped_yaml("d3").expect("d3 is shipped");
    let text = device.replacen("available: {value: 9.7 GiB", "available: 9 GiB # {", 1);
    let error = Device::from_yaml(&text).expect_err("no source").to_string();
    assert!(error.contains("where it comes from"), "{error}");
}
