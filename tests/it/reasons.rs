//! Tests that errors and notes explain why there is no plan or file, and what the user can do.

use crate::folder::{Folder, TWO_DEVICES_YAML, scenario_yaml};
use crate::processes::{assert_rejected, run_failing_with_code, run_successfully, scenario_path};

#[test]
fn every_rejection_has_a_hint() {
    let (folder, file) = Folder::with_two_device_scenario();
    // The KV cache of so many tokens does not fit into a laptop.
    let large = folder.write("large.yaml", scenario_yaml(TWO_DEVICES_YAML).replace("512", "4000000"));
    let four = scenario_path("home/llama-70b-on-four");
    let cases: [(&str, &[&str], &str); 5] = [
        (&file, &["--rounds", "5"], "--rounds"),
        (&file, &["--windows", "0,32"], "head"),
        (&file, &["--windows", "32,32"], "sum"),
        (&four, &["--windows", "40,20,10,10", "--gpu-layers", "40,0,0,0"], "GPU"),
        (&large, &["--windows", "16,16"], "context"),
    ];
    for (file, flags, part) in cases {
        let text = run_failing_with_code(&[&["plan", file], flags].concat(), 2);
        let hint = text.lines().find(|line| line.starts_with("hint:")).expect("a hint");
        assert!(hint.contains(part), "{text}");
    }
}

#[test]
fn ignored_memory_and_disagreement_are_noted() {
    let (_folder, file) = Folder::with_two_device_scenario();
    let text = run_successfully(&["simulate", &file]);
    assert!(!text.contains("memory ignored") && !text.contains("note: the planner expected"), "{text}");
    assert!(run_successfully(&["simulate", &file, "--ignore-memory"]).contains("memory ignored"));
    // The model of the paper does not overlap computing and reading, and has no page cache that evicts by age.
    let text =
        run_successfully(&["simulate", &scenario_path("home/llama-70b-on-four"), "--strategy", "exact"]);
    assert!(text.contains("note: the planner expected"), "{text}");
}

#[test]
fn missing_folder_is_not_created() {
    let (folder, file) = Folder::with_two_device_scenario();
    assert_rejected(&["plan", &file, "-o", &folder.path_of("missing/plan.yaml")], &["does not exist"]);
    run_failing_with_code(&["simulate", &file, "--trace", &folder.path_of("missing/run.trace")], 2);
    run_failing_with_code(&["reproduce", "-o", &folder.path_of("missing/report")], 2);
    assert!(!folder.has_file("missing"));
    // A folder for several files is created in an existing folder.
    let trace = folder.path_of("run.trace");
    run_successfully(&["simulate", &file, "--trace", &trace]);
    run_successfully(&["report", &trace, "-o", &folder.path_of("report")]);
    assert!(folder.has_file("report/index.html"));
}
