//! Tests that docs/reference/scenarios.md is complete, and that errors about wrong values have an example.

use std::collections::BTreeSet;
use std::fs;

use hearth_profiles::{DeviceProfile, Document};
use hearth_schema::{Scenario, editor};
use serde_json::Value;

use crate::repository::repository_root;

/// Adds the keys of all types in a JSON Schema to `keys`.
fn collect_keys(schema: &Value, keys: &mut BTreeSet<String>) {
    keys.extend(
        schema["properties"].as_object().into_iter().flat_map(|properties| properties.keys().cloned()),
    );
    match schema {
        Value::Object(parts) => parts.values().for_each(|part| collect_keys(part, keys)),
        Value::Array(parts) => parts.iter().for_each(|part| collect_keys(part, keys)),
        _ => {}
    }
}

#[test]
fn scenario_reference_names_every_key() {
    let text =
        fs::read_to_string(repository_root().join("docs/reference/scenarios.md")).expect("the reference");
    let mut keys = BTreeSet::new();
    for kind in ["scenario", "device"] {
        collect_keys(editor::json_schema(kind).expect("a schema").as_value(), &mut keys);
    }
    assert!(keys.len() > 100, "{keys:?}");
    for key in keys {
        let named = text.contains(&format!("`{key}`")) || text.contains(&format!("{key}: .."));
        assert!(named, "docs/reference/scenarios.md does not name `{key}`");
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
    let error = DeviceProfile::from_yaml(&text).expect_err("no source").to_string();
    assert!(error.contains("where it comes from"), "{error}");
}
