//! Does a comparison show what every strategy comes to?

use std::path::Path;

use hearth_halda::selection::NAMES;
use serde_json::Value;

use crate::processes::run;

fn compared() -> Vec<Value> {
    let scenario = Path::new(env!("CARGO_MANIFEST_DIR")).join("scenarios/home/llama-70b-on-four.yaml");
    let output = run(&["plan", &scenario.display().to_string(), "--compare", "--json"]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("JSON")
}

#[test]
fn every_strategy_has_a_row_with_a_plan_or_a_reason() {
    let rows = compared();
    let names: Vec<&str> = rows.iter().filter_map(|row| row["strategy"].as_str()).collect();
    let left_out = ["manual", "exhaustive"];
    let expected: Vec<&str> = NAMES.into_iter().filter(|name| !left_out.contains(name)).collect();
    assert_eq!(names, expected);
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
