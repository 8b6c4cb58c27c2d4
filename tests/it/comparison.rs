//! A comparison shows the result of every strategy.

use std::path::{Path, PathBuf};

use hearth_halda::registry::NAMES;
use serde_json::Value;

use crate::processes::run;

fn home() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("scenarios/home/llama-70b-on-four.yaml")
}

fn compared() -> Vec<Value> {
    compared_in(&home())
}

fn compared_in(scenario: &Path) -> Vec<Value> {
    let output = run(&["plan", &scenario.display().to_string(), "--compare", "--json"]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("JSON")
}

#[test]
fn every_strategy_has_a_plan_or_a_reason() {
    let rows = compared();
    let names: Vec<&str> = rows.iter().filter_map(|row| row["strategy"].as_str()).collect();
    let left_out = ["manual", "exhaustive"];
    let expected: Vec<&str> = NAMES.into_iter().filter(|name| !left_out.contains(name)).collect();
    let (last, planners) = names.split_last().expect("rows");
    assert_eq!((planners, *last), (&expected[..], "refine"));
    for row in &rows {
        let reason = row["refused"].as_str().is_some_and(|reason| !reason.is_empty());
        let time = row["predicted"]["tpot_ms"].as_f64().is_some_and(|time| time > 0.0);
        assert!(time != reason, "{row}");
    }
}

#[test]
fn totals_come_from_the_devices_profiles() {
    let rows = compared();
    let row = rows.iter().find(|row| row["strategy"] == "mem-total").expect("a row");
    let windows: Vec<u64> = row["devices"]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(|device| device["window"].as_u64())
        .collect();
    // 11 and 8 GiB on GPUs, 8 and 8 GiB of RAM: 80 layers by 35 are 25.14, 43.43, 61.71, 80 summed up.
    assert_eq!(windows, [25, 18, 19, 18]);
}

#[test]
fn the_scenarios_head_leads_every_plan() {
    let folder = tempfile::tempdir().expect("a folder");
    let text = std::fs::read_to_string(home()).expect("the scenario");
    let swapped = text
        .replace("profile: d3, head: true", "profile: d3")
        .replace("{name: mac, profile: d1}", "{name: mac, profile: d1, head: true}");
    let scenario = folder.path().join("mac-leads.yaml");
    std::fs::write(&scenario, swapped).expect("a copy");
    for row in compared_in(&scenario).iter().filter(|row| row["refused"].is_null()) {
        let first = &row["devices"][0];
        assert_eq!((first["name"].as_str(), first["role"].as_str()), (Some("mac"), Some("head")), "{row}");
    }
}
