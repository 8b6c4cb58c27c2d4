//! Errors and notes say why there is no plan, no time or no file, and how to fix it.

use std::fs;
use std::path::Path;

use crate::processes::{error, run};

fn scenario(folder: &Path, context: u32, more: &str) -> String {
    let text = format!(
        "# Why not?
schema: scenario/1
name: reasons
model: {{profile: llama-8b}}
context: {context}
workload: {{prompt: 16, generate: 4}}
devices:
  - {{name: a, profile: d3}}
  - {{name: b, profile: d2}}
links:
  default:
    latency: {{value: 2 ms, source: test}}
    bandwidth: {{value: 400 Mbit/s, source: test}}
{more}"
    );
    let file = folder.join("s.yaml");
    fs::write(&file, text).expect("the temporary folder can be written");
    file.display().to_string()
}

/// A home that is short of memory.
fn four() -> String {
    let four = Path::new(env!("CARGO_MANIFEST_DIR")).join("scenarios/home/llama-70b-on-four.yaml");
    four.display().to_string()
}

/// What a run says, ending with this code.
fn said(arguments: &[&str], code: i32) -> String {
    let output = run(arguments);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(output.status.code(), Some(code), "{text}{}", String::from_utf8_lossy(&output.stderr));
    text
}

#[test]
fn every_refusal_has_a_hint() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let file = scenario(folder.path(), 512, "");
    let hint = |file: &str, arguments: &[&str]| {
        let said = error(&[&["plan", file][..], arguments].concat(), 2);
        said.lines().find(|line| line.starts_with("hint:")).expect("a hint").to_owned()
    };
    assert!(hint(&file, &["--rounds", "5"]).contains("--rounds"));
    assert!(hint(&file, &["--windows", "0,32"]).contains("head"));
    assert!(hint(&file, &["--windows", "32,32"]).contains("sum"));
    let on_gpus = ["--windows", "40,20,10,10", "--gpu-layers", "40,0,0,0"];
    assert!(hint(&four(), &on_gpus).contains("GPU"));
    // Keys and values of so many tokens fit no laptop.
    let file = scenario(folder.path(), 4_000_000, "");
    assert!(hint(&file, &["--windows", "16,16"]).contains("context"));
}

#[test]
fn run_without_times_says_why() {
    let four = four();
    let text = said(&["simulate", &four, "--strategy", "exo"], 3);
    let first = text.lines().find(|line| line.starts_with("out of memory")).expect("an outcome");
    assert!(first.contains("needs") && first.contains("no times") && !first.contains(" - "), "{first}");
}

#[test]
fn ignored_memory_is_noted() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let file = scenario(folder.path(), 512, "");
    let ignored = "memory ignored";
    assert!(!said(&["simulate", &file], 0).contains(ignored));
    assert!(said(&["simulate", &file, "--ignore-memory"], 0).contains(ignored));
}

#[test]
fn disagreement_of_planner_and_simulator_is_noted() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let file = scenario(folder.path(), 512, "");
    assert!(!said(&["simulate", &file], 0).contains("note: the planner expected"));
    // The paper's model counts arithmetic and reading one after the other, and no page cache that evicts by age.
    let text = said(&["simulate", &four(), "--strategy", "exact"], 0);
    assert!(text.contains("note: the planner expected"), "{text}");
}

#[test]
fn missing_folder_is_not_created() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let file = scenario(folder.path(), 512, "");
    let missing = folder.path().join("missing");
    let inside = missing.join("plan.yaml").display().to_string();
    let told = error(&["plan", &file, "-o", &inside], 2);
    assert!(told.contains("does not exist") && !missing.exists(), "{told}");
    let trace = missing.join("run.trace").display().to_string();
    error(&["simulate", &file, "--trace", &trace], 2);
    let report = missing.join("report").display().to_string();
    error(&["reproduce", "-o", &report], 2);
    assert!(!missing.exists());
    // A folder for many files is made, in one that is there.
    let trace = folder.path().join("run.trace").display().to_string();
    said(&["simulate", &file, "--trace", &trace], 0);
    let report = folder.path().join("report");
    said(&["report", &trace, "-o", &report.display().to_string()], 0);
    assert!(report.join("index.html").is_file());
}
