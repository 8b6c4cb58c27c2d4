//! Tests of lab suites on small scenarios with emulated links and hosts, a slow CPU, drafts, and a device that leaves.
//!
//! The scenarios are in `scenarios/lab/ci`. Not here: the accuracy of the predictions, which needs an idle machine
//! (`hearth lab --suite scenarios/lab`).

use std::fs;
use std::path::Path;

use hearth_profiles::Document;
use hearth_schema::Scenario;
use serde_json::Value;

use crate::folder::Folder;
use crate::lab::memory_cgroup_folder;
use crate::processes::{
    assert_rejected, expect_array, expect_number, parse_json, run_with_code, string_values,
};
use crate::repository::repository_root;

#[test]
fn suite_skips_finished_and_failed_scenarios() {
    let Some(_) = memory_cgroup_folder("suite_skips_finished_and_failed_scenarios") else { return };
    let folder = Folder::on_disk();
    let models = repository_root().join("tests/data/models").display().to_string();
    fs::create_dir(folder.path().join("suite")).expect("a folder");
    let has_tun = Path::new("/dev/net/tun").exists();
    for file in fs::read_dir(repository_root().join("scenarios/lab/ci")).expect("the folder").flatten() {
        let text = fs::read_to_string(file.path()).expect("a scenario");
        let text = text.replace("../../../tests/data/models", &models);
        let name = file.file_name().display().to_string();
        if name == "ci-hosts.yaml" && !has_tun {
            eprintln!("SKIPPED suite_skips_finished_and_failed_scenarios: no /dev/net/tun for ci-hosts.yaml");
            continue;
        }
        if name == "ci-links.yaml" {
            let broken = text.replace("psalm-7m-q8_0", "none").replace("ci-links", "ci-broken");
            folder.write("suite/ci-broken.yaml", broken);
        }
        folder.write(&format!("suite/{name}"), text);
    }
    let run_suite = || {
        let [suite, scratch, out] = ["suite", "", "out"].map(|name| folder.path_of(name));
        let (stdout, stderr) =
            run_with_code(&["lab", "--suite", &suite, "--scratch", &scratch, "-o", &out, "--json"], 3);
        let result = parse_json(&stdout);
        assert_eq!(string_values(&result["failed"], "name"), ["ci-broken"], "{stderr}");
        let names = string_values(&result["cases"], "name");
        let expected = ["ci-dies", "ci-drafts", "ci-hosts", "ci-links", "ci-weak"];
        let expected: Vec<&str> =
            expected.into_iter().filter(|name| has_tun || *name != "ci-hosts").collect();
        assert_eq!(names, expected, "{stderr}");
        (result, stderr)
    };
    let (result, _) = run_suite();
    for case in expect_array(&result["cases"]) {
        let run = &case["runs"][0];
        for kind in ["predicted", "measured"] {
            assert!(expect_number(&run[kind]["tpot_ms"]) > 0.0, "{case}");
            let network = expect_number(&run[kind]["terms"]["network"]);
            // Two messages per token of 3 ms each, which vary on the Wi-Fi of `ci-hosts`.
            let min = match case["name"].as_str() {
                Some("ci-links") => 6.0,
                Some("ci-hosts") => 4.0,
                _ => 0.0,
            };
            assert!(network >= min, "{case}");
        }
        assert!(run["prediction"].as_str().is_some_and(|hash| hash.starts_with("sha256:")), "{case}");
    }
    for file in
        ["index.html", "report.md", "validation.csv", "validation.json", "parity-tpot.svg", "results.jsonl"]
    {
        assert!(folder.has_file(&format!("out/{file}")), "{file} is missing");
    }
    assert!(folder.read("out/runs/ci-dies/measured.trace").contains("\"event\""), "the trace has its events");
    // Finished scenarios are not run again.
    let (again, stderr) = run_suite();
    assert_eq!(stderr.matches("is already done").count(), if has_tun { 5 } else { 4 }, "{stderr}");
    let predictions = |result: &Value| {
        let cases = expect_array(&result["cases"]).iter();
        cases.map(|case| case["runs"][0]["prediction"].to_string()).collect::<Vec<_>>()
    };
    assert_eq!(predictions(&again), predictions(&result));
}

#[test]
fn invalid_suite_is_rejected() {
    let folder = Folder::new();
    let (suite, out, model) = (folder.path_of(""), folder.path_of("out"), folder.path_of("none.gguf"));
    let check =
        |flags: &[&str], part: &str| assert_rejected(&[&["lab", "-o", &out], flags].concat(), &[part]);
    check(&["--suite", &suite], "no scenario in this folder");
    check(&["--suite", &folder.path_of("none")], "check the path");
    check(&["--random", "2", "--seed", "3", "--model", &model], "hearth synth");
    let text =
        fs::read_to_string(repository_root().join("scenarios/lab/ci/ci-links.yaml")).expect("a scenario");
    folder.write("one.yaml", &text);
    folder.write("two.yaml", &text);
    check(&["--suite", &suite], "two scenarios are called");
}

#[test]
fn suite_varies_memory_and_number_of_devices() {
    let entries = fs::read_dir(repository_root().join("scenarios/lab")).expect("the folder").flatten();
    let files = entries.map(|entry| entry.path());
    let (mut all, mut short_of_memory, mut of_three) = (0, 0, 0);
    for file in files.filter(|path| path.extension().is_some_and(|kind| kind == "yaml")) {
        let text = fs::read_to_string(&file).expect("a scenario");
        let scenario =
            Scenario::from_yaml(&text).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
        assert_eq!(file.file_stem().and_then(|stem| stem.to_str()), Some(scenario.name.as_str()));
        let mut limits = scenario.devices.iter().filter_map(|device| device.limits.as_ref());
        let is_short = limits.any(|limits| limits.memory_share.is_some_and(|share| share.0 < 0.75));
        all += 1;
        short_of_memory += u32::from(is_short);
        of_three += u32::from(scenario.devices.len() == 3);
    }
    assert!(all >= 24 && short_of_memory >= 12 && of_three >= 8, "{all}, {short_of_memory}, {of_three}");
}
