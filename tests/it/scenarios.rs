//! Tests that all scenarios with published device profiles can be planned and simulated.
//!
//! Not here: `scenarios/lab` and some of `scenarios/home`, which measure this machine.

use std::path::Path;

use crate::processes::{expect_array, run_json, run_successfully, scenario_path};
use crate::repository::{TextFile, repository_root, text_files};

/// Returns the scenarios in a subfolder of `scenarios`, without the documents that they refer to.
fn scenarios_of(folder: &str) -> Vec<TextFile> {
    let prefix = format!("scenarios/{folder}/");
    let is_scenario = |file: &TextFile| {
        file.path.strip_prefix(&prefix).is_some_and(|name| !name.contains('/')) && file.extension() == "yaml"
    };
    let found: Vec<TextFile> = text_files().into_iter().filter(is_scenario).collect();
    assert!(found.len() >= 20, "{folder} has {} scenarios", found.len());
    found
}

#[test]
fn every_scenario_of_the_paper_has_a_plan_that_uses_its_head() {
    for TextFile { path, text } in scenarios_of("paper") {
        let plan = run_json(&["plan", &repository_root().join(&path).display().to_string()]);
        assert_eq!(plan["devices"][0]["role"], "head", "{path}");
        let dropped = plan["dropped"].as_array().map_or(0, Vec::len);
        let devices = text.lines().filter(|line| line.trim_start().starts_with("- {name: ")).count();
        assert_eq!(expect_array(&plan["devices"]).len() + dropped, devices, "{path}");
        assert!(!text.contains("keep_all: true") || dropped == 0, "{path} keeps every device");
        let name = Path::new(&path).file_stem().expect("a file").to_string_lossy().into_owned();
        assert!(text.contains(&format!("name: {name}\n")), "{path} is named as its file");
    }
}

#[test]
fn mac_stalls_delay_tokens_without_a_finding() {
    let mean = |name: &str| {
        let path = scenario_path(name);
        let findings = run_successfully(&["lint", &path, "--json"]);
        assert!(!findings.contains("-link"), "{name}: {findings}");
        // The plan is the same in both if neither avoids a risk.
        run_json(&["simulate", &path, "--risk", "ignore", "--draws", "0"])["tpot_ms"]["mean"]
            .as_f64()
            .expect("tokens")
    };
    // Both scenarios have the same delays, so the difference is caused by the stalls.
    let (wifi, stalls) = (mean("home/llama-70b-on-wifi"), mean("home/llama-70b-on-wifi-stalls"));
    assert!(stalls > wifi + 0.5 && stalls < wifi + 10.0, "{wifi} and {stalls} ms");
}

#[test]
fn every_scenario_of_a_phone_reports_its_processors() {
    for TextFile { path, .. } in scenarios_of("soc") {
        let run = run_json(&[
            "simulate",
            &repository_root().join(&path).display().to_string(),
            "--warm",
            "--draws",
            "0",
        ]);
        if path.contains("/home-") {
            continue;
        }
        assert!(run["soc"]["prefill_tokens_per_s"].as_f64() > Some(10.0), "{path}: {}", run["soc"]);
        assert!(run["soc"]["prefill_queue"]["max_ms"].as_f64() > Some(0.0), "{path}");
    }
}

/// Collects `(path of the key, value, source)` of all sourced values in a document.
fn sourced_values(node: &serde_json::Value, path: &str, found: &mut Vec<(String, String, String)>) {
    let Some(fields) = node.as_object() else { return };
    if let (Some(value), Some(source)) =
        (fields.get("value"), fields.get("source").and_then(|text| text.as_str()))
    {
        found.push((path.to_owned(), value.to_string(), source.to_owned()));
    }
    fields.iter().for_each(|(key, node)| sourced_values(node, &format!("{path}/{key}"), found));
}

#[test]
fn values_assumed_as_for_another_device_equal_its_values() {
    let values = |text: &str| {
        let mut found = Vec::new();
        sourced_values(&serde_yaml::from_str(text).expect("YAML"), "", &mut found);
        found
    };
    let files = text_files();
    let shipped = |name: &str| {
        let path = format!("profiles/devices/{name}.yaml");
        values(&files.iter().find(|file| file.path == path).expect("a shipped device").text)
    };
    let mut compared = 0;
    for file in files.iter().filter(|file| file.path.contains("/devices/") && file.extension() == "yaml") {
        for (key, value, source) in values(&file.text) {
            // Such as "assumed: as for d2, which has 8 cores too", but not "as for D3, by cores".
            let like = source.strip_prefix("assumed: as for ").map(str::to_lowercase).unwrap_or_default();
            let name = like.split([' ', ',']).next().unwrap_or_default();
            let is_shipped = name.len() == 2
                && name.starts_with('d')
                && name.ends_with(|digit: char| digit.is_ascii_digit());
            if !is_shipped || [", by ", ", between"].iter().any(|scaled| like.contains(scaled)) {
                continue;
            }
            let (_, original, _) =
                shipped(name).into_iter().find(|(path, ..)| *path == key).expect("the same key");
            assert_eq!(value, original, "{}: {key} is not that of {name}", file.path);
            compared += 1;
        }
    }
    assert!(compared >= 8, "{compared}");
}
