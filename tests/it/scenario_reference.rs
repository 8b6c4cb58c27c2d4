//! Tests that docs/reference/scenarios.md is complete, and that errors about wrong values have an example.

use std::fs;

use hearth_profiles::device::soc::{
    Bus, Graphs, MatmulProfile, MeasuredMatmul, Soc, SocGpu, SocNpu, SocOptions, SocPower, SyncCosts,
};
use hearth_profiles::device::{Cpu, Disk, Gpu, Memory, Quota, Reclaim, Transfer};
use hearth_profiles::link::PeerLink;
use hearth_profiles::link::wifi::{Delay, Stall, Tcp, Wifi, WifiChannel};
use hearth_profiles::{Device, Document, Link, Seconds, Sourced};
use hearth_schema::Scenario;
use hearth_schema::events::{Event, Load, MemoryLoad, Swap};
use hearth_schema::residency::ResidencyOptions;
use hearth_schema::scenario::{
    DeviceEntry, Limits, Links, ModelRef, NamedLink, PlannerOptions, Speculation, Workload,
};
use serde::de::DeserializeOwned;

use crate::repository::root;

/// Returns the keys of several types.
macro_rules! keys_of {
    ($($kind:ty),* $(,)?) => { [$(keys::<$kind>()),*] };
}

/// Returns the keys of a type, taken from the error about an unknown key.
fn keys<T: DeserializeOwned>() -> Vec<String> {
    let Err(error) = serde_yaml::from_str::<T>("{no-such-key: 1}") else { panic!("it knows every key") };
    let text = error.to_string();
    let (_, known) = text.split_once("expected ").unwrap_or_else(|| panic!("no list of keys: {text}"));
    known.split('`').skip(1).step_by(2).map(str::to_owned).collect()
}

#[test]
fn scenario_reference_names_every_key() {
    let text = fs::read_to_string(root().join("docs/reference/scenarios.md")).expect("the reference");
    let all = keys_of! {
        Scenario, ModelRef, DeviceEntry, Limits, Links, NamedLink, PlannerOptions, Workload, Speculation,
        ResidencyOptions, Event, Load, MemoryLoad, Swap, Wifi, WifiChannel, Delay, Stall, Tcp, Device, Cpu,
        Quota, Gpu, Memory, Reclaim, Disk, Transfer, Soc, SocGpu, SocNpu, Bus, SyncCosts, Graphs,
        SocPower, SocOptions, MatmulProfile, MeasuredMatmul, PeerLink, Link, Sourced<Seconds>
    };
    for keys in all {
        assert!(!keys.is_empty());
        for key in keys {
            let named = text.contains(&format!("`{key}`")) || text.contains(&format!("{key}: .."));
            assert!(named, "docs/reference/scenarios.md does not name `{key}`");
        }
    }
}

#[test]
fn error_for_a_wrong_value_has_an_example() {
    let good = "schema: scenario/1\nname: x\nmodel: {profile: llama-8b}\ncontext: 64\n\
                workload: {prompt: 1, generate: 1}\ndevices: [{name: a, profile: d3}]\nlinks:\n  default:\n    \
                latency: {value: 2 ms, source: test}\n    bandwidth: {value: 400 Mbit/s, source: test}\n";
    assert_eq!(Scenario::from_yaml(good).expect("a scenario without a seed").seed, 1);
    for (from, to, part) in [
        ("{value: 2 ms, source: test}", "2 ms", "a value and where it comes from, such as `{value: 5 ms"),
        ("{profile: llama-8b}", "llama-8b", "`{profile: llama-70b}`, a shipped model"),
        ("{prompt: 1, generate: 1}", "16", "a workload, such as `{prompt: 32, generate: 16}`"),
        ("[{name: a, profile: d3}]", "[d3]", "a device, such as `{name: desktop, profile: d3}`"),
    ] {
        let text = good.replacen(from, to, 1);
        assert_ne!(text, good, "the test is out of date: {from}");
        let error = Scenario::from_yaml(&text).expect_err("the wrong shape").to_string();
        assert!(error.contains(part) && !error.contains("struct "), "{error}");
    }
    let device = hearth_profiles::device::shipped_yaml("d3").expect("d3 is shipped");
    let text = device.replacen("available: {value: 9.7 GiB", "available: 9 GiB # {", 1);
    let error = Device::from_yaml(&text).expect_err("no source").to_string();
    assert!(error.contains("where it comes from"), "{error}");
}
