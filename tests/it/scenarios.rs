//! Every scenario of published devices can be planned and simulated.
//!
//! Those of `scenarios/lab` and some of `scenarios/home` measure this machine or need its limits; here are the ones
//! whose devices are documents.

use std::path::Path;

use crate::processes::run;
use crate::repository::{root, text_files};

#[test]
fn every_scenario_of_the_paper_has_a_plan_that_uses_its_head() {
    let scenarios: Vec<String> = text_files()
        .into_iter()
        .filter(|file| file.path.starts_with("scenarios/paper/") && file.extension() == "yaml")
        .map(|file| file.path)
        .filter(|path| !path.contains("/devices/"))
        .collect();
    assert!(scenarios.len() >= 20, "the paper's testbeds are shipped: {scenarios:?}");
    for path in scenarios {
        let full = root().join(&path);
        let output = run(&["plan", &full.display().to_string(), "--json"]);
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{path}: {}", String::from_utf8_lossy(&output.stderr));
        let plan: serde_json::Value = serde_json::from_str(&text).expect("one JSON document");
        assert_eq!(plan["devices"][0]["role"], "head", "{path}");
        let kept = plan["devices"].as_array().map_or(0, Vec::len);
        let dropped = plan["dropped"].as_array().map_or(0, Vec::len);
        let yaml = std::fs::read_to_string(&full).expect("a tracked file");
        let devices = yaml.lines().filter(|line| line.trim_start().starts_with("- {name: ")).count();
        assert_eq!(kept + dropped, devices, "{path}");
        assert!(!yaml.contains("keep_all: true") || dropped == 0, "{path} keeps every device");
        let name = Path::new(&path).file_stem().expect("a file").to_string_lossy().into_owned();
        assert!(yaml.contains(&format!("name: {name}\n")), "{path} is named as its file");
    }
}

#[test]
fn mac_stalls_delay_tokens_without_a_finding() {
    let mean = |name: &str| {
        let path = root().join(format!("scenarios/home/{name}.yaml")).display().to_string();
        let linted = run(&["lint", &path, "--json"]);
        let text = String::from_utf8_lossy(&linted.stdout).into_owned();
        assert!(linted.status.success() && !text.contains("-link"), "{name}: {text}");
        let output = run(&["simulate", &path, "--json"]);
        assert!(output.status.success(), "{name}: {}", String::from_utf8_lossy(&output.stderr));
        let metrics: serde_json::Value = serde_json::from_slice(&output.stdout).expect("one JSON document");
        metrics["tpot_ms"]["mean"].as_f64().expect("tokens")
    };
    // The same delays, so that the difference is the stalls'.
    let (wifi, stalls) = (mean("llama-70b-on-wifi"), mean("llama-70b-on-wifi-stalls"));
    assert!(stalls > wifi + 0.5 && stalls < wifi + 10.0, "{wifi} and {stalls} ms");
}

#[test]
fn every_scenario_of_a_phone_runs_and_says_what_its_processors_did() {
    let scenarios: Vec<String> = text_files()
        .into_iter()
        .filter(|file| file.path.starts_with("scenarios/soc/") && file.extension() == "yaml")
        .map(|file| file.path)
        .filter(|path| !path.contains("/models/"))
        .collect();
    assert!(scenarios.len() >= 20, "{scenarios:?}");
    for path in scenarios {
        let output = run(&["simulate", &root().join(&path).display().to_string(), "--warm", "--json"]);
        assert!(output.status.success(), "{path}: {}", String::from_utf8_lossy(&output.stderr));
        let told: serde_json::Value = serde_json::from_slice(&output.stdout).expect("one JSON document");
        let is_home = path.contains("/home-");
        let speed = told["soc"]["prefill_tokens_per_s"].as_f64();
        assert!(is_home || speed > Some(10.0), "{path}: {}", told["soc"]);
        assert!(is_home || told["soc"]["prefill_queue"]["max_ms"].as_f64() > Some(0.0), "{path}");
    }
}
