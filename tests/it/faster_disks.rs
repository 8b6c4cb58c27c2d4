//! A ring that is planned again is never slower because one of its disks is faster.
//!
//! A plan is as good as what the planner knows. If the simulator has a limit that the planner does not know, a faster
//! disk lures more weights onto its device than that can read. So each shipped home is planned and simulated over a
//! range of rates, for each of its devices: the time of a token must not grow with the rate.

use std::path::Path;

use serde_json::Value;

use crate::processes::run;

/// A plan is the fastest by a model, and its simulation differs from that by so much.
const TOLERANCE: f64 = 1.03;

/// Simulated milliseconds a token of fresh plans, in the order of the rates.
fn times(scenario: &str, device: &str, more: &[&str]) -> Vec<f64> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("scenarios/home").join(scenario);
    let path = path.display().to_string();
    let vary = format!("devices.{device}.disk.sequential=0.25GB/s..16GB/s/7/log");
    let arguments = ["sweep", &path, "--vary", &vary, "--json"];
    let output = run(&[&arguments[..], more].concat());
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{device}: {said}");
    let table: Value = serde_json::from_slice(&output.stdout).expect("one JSON document");
    let rows = table["rows"].as_array().expect("rows");
    rows.iter().map(|row| row["tpot_ms"].as_f64().unwrap_or_else(|| panic!("no time: {row}"))).collect()
}

fn check(scenario: &str, devices: &[&str], more: &[&str]) {
    for device in devices {
        let times = times(scenario, device, more);
        let mut fastest = f64::INFINITY;
        for time in &times {
            assert!(*time <= fastest * TOLERANCE, "{scenario}, {device} {more:?}: {times:?}");
            fastest = fastest.min(*time);
        }
    }
}

#[test]
fn faster_disk_never_makes_a_new_plan_slower() {
    let four = ["desktop", "laptop", "mac", "phone"];
    check("llama-70b-on-four.yaml", &four, &[]);
    check("llama-70b-on-four.yaml", &four, &["--residency", "managed"]);
    check("llama-70b-on-four.yaml", &["desktop"], &["--vary", "devices.desktop.memory.available=3GiB"]);
    let short = ["--residency", "managed", "--vary", "devices.laptop.memory.available=3GiB"];
    check("llama-70b-on-four.yaml", &["laptop", "desktop"], &short);
}
