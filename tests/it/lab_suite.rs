//! A suite of labs runs small scenarios with emulated links, a weak processor, drafts, and a device that leaves.
//!
//! The scenarios of `scenarios/lab/ci`. That they are predicted right is not asked here, where other programs run beside;
//! that is what `hearth lab --suite scenarios/lab` on a quiet machine is for.

use std::fs;
use std::path::Path;

use crate::lab::{folder_on_disk, groups};
use crate::processes::{error, run};
use crate::repository::root;

fn suite(output: &Path) -> (serde_json::Value, String) {
    let scenarios = root().join("scenarios/lab/ci").display().to_string();
    let out = output.join("out").display().to_string();
    let scratch = output.display().to_string();
    let ran = run(&["lab", "--suite", &scenarios, "--scratch", &scratch, "-o", &out, "--json"]);
    let said = String::from_utf8_lossy(&ran.stderr).into_owned();
    // 3 if a bar is missed, as it may be where other programs run beside.
    assert!([Some(0), Some(3)].contains(&ran.status.code()), "{said}");
    (serde_json::from_slice(&ran.stdout).expect("one JSON document"), said)
}

#[test]
fn interrupted_suite_continues() {
    if groups("interrupted_suite_continues").is_none() {
        return;
    }
    let folder = folder_on_disk();
    let (result, said) = suite(folder.path());
    assert_eq!(result["failed"], serde_json::json!([]), "{said}");
    let cases = result["cases"].as_array().expect("cases");
    let names: Vec<&str> = cases.iter().map(|case| case["name"].as_str().expect("a name")).collect();
    assert_eq!(names, ["ci-dies", "ci-drafts", "ci-links", "ci-weak"], "{said}");
    for case in cases {
        let time = |run: &serde_json::Value| run["tpot_ms"].as_f64().expect("a time");
        let (predicted, measured) = (time(&case["runs"][0]["predicted"]), time(&case["runs"][0]["measured"]));
        assert!(predicted > 0.0 && measured > 0.0, "{case}");
        assert!(
            case["runs"][0]["prediction"].as_str().is_some_and(|hash| hash.starts_with("sha256:")),
            "{case}"
        );
        let air = case["runs"][0]["measured"]["terms"]["network"].as_f64().expect("a term");
        // Two messages a token, of 3 ms each.
        if case["name"] == "ci-links" {
            assert!(air >= 6.0, "{case}");
            let air = case["runs"][0]["predicted"]["terms"]["network"].as_f64().expect("a term");
            assert!(air >= 6.0, "{case}");
        }
    }
    let out = folder.path().join("out");
    for file in
        ["index.html", "report.md", "validation.csv", "validation.json", "parity-tpot.svg", "results.jsonl"]
    {
        assert!(out.join(file).exists(), "{file} is missing");
    }
    let dies = fs::read_to_string(out.join("runs/ci-dies/measured.trace")).expect("a trace");
    assert!(dies.contains("\"event\""), "what happened is in the trace");
    // What is done is not run again.
    let (again, said) = suite(folder.path());
    assert_eq!(said.matches("is done already").count(), 4, "{said}");
    let predictions = |result: &serde_json::Value| {
        let cases = result["cases"].as_array().cloned().unwrap_or_default();
        cases.iter().map(|case| case["runs"][0]["prediction"].to_string()).collect::<Vec<_>>()
    };
    assert_eq!(predictions(&again), predictions(&result));
    // One that fails does not stop the others.
    let broken = folder.path().join("broken");
    fs::create_dir(&broken).expect("a folder");
    let links = fs::read_to_string(root().join("scenarios/lab/ci/ci-links.yaml")).expect("a scenario");
    let model = root().join("tests/data/models").display().to_string();
    let links = links.replace("../../../tests/data/models", &model);
    let text = links.replace("psalm-7m-q8_0", "none").replace("ci-links", "ci-broken");
    fs::write(broken.join("a.yaml"), text).expect("it can be written");
    fs::write(broken.join("b.yaml"), links).expect("it can be written");
    let (broken, out) = (broken.display().to_string(), folder.path().join("second").display().to_string());
    let scratch = folder.path().display().to_string();
    let ran = run(&["lab", "--suite", &broken, "--scratch", &scratch, "-o", &out, "--json"]);
    assert_eq!(ran.status.code(), Some(3), "{}", String::from_utf8_lossy(&ran.stderr));
    let result: serde_json::Value = serde_json::from_slice(&ran.stdout).expect("one JSON document");
    assert_eq!(
        (result["cases"].as_array().map(Vec::len), &result["failed"][0]["name"]),
        (Some(1), &"ci-broken".into())
    );
}

#[test]
fn invalid_suite_is_refused() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let at = |name: &str| folder.path().join(name).display().to_string();
    assert!(error(&["lab", "--suite", &at(""), "-o", &at("out")], 2).contains("no scenario in this folder"));
    assert!(error(&["lab", "--suite", &at("none"), "-o", &at("out")], 2).contains("check the path"));
    let model = at("none.gguf");
    let drawn = error(&["lab", "--random", "2", "--seed", "3", "--model", &model, "-o", &at("out")], 2);
    assert!(drawn.contains("hearth synth"), "{drawn}");
    let links = root().join("scenarios/lab/ci/ci-links.yaml");
    let text = fs::read_to_string(links).expect("a scenario");
    for name in ["one", "two"] {
        fs::write(folder.path().join(format!("{name}.yaml")), &text).expect("it can be written");
    }
    assert!(error(&["lab", "--suite", &at(""), "-o", &at("out")], 2).contains("two scenarios are called"));
}

#[test]
fn suite_covers_all_axes() {
    use hearth_profiles::Document;
    use hearth_schema::Scenario;
    let folder = root().join("scenarios/lab");
    let entries = fs::read_dir(&folder).expect("the folder").flatten().map(|entry| entry.path());
    let files: Vec<_> = entries.filter(|path| path.extension().is_some_and(|kind| kind == "yaml")).collect();
    let mut counts = (0, 0, 0);
    for file in &files {
        let text = fs::read_to_string(file).expect("a scenario");
        let scenario =
            Scenario::from_yaml(&text).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
        assert_eq!(file.file_stem().and_then(|stem| stem.to_str()), Some(scenario.name.as_str()));
        let mut limits = scenario.devices.iter().filter_map(|device| device.limits.as_ref());
        let below = limits.any(|limits| limits.memory_share.is_some_and(|share| share.0 < 0.75));
        counts.0 += 1;
        counts.1 += u32::from(below);
        counts.2 += u32::from(scenario.devices.len() == 3);
    }
    assert!(counts.0 >= 24 && counts.1 >= 12 && counts.2 >= 8, "{counts:?} scenarios, short ones, of three");
}
