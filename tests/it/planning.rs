//! Planning on the command line: comparison, search and limits.

use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::processes::{error, run};

/// A scenario of desktops, of which the second may have limits, and a model of 32 layers.
fn scenario(folder: &Path, limits: &str, more: &str) -> String {
    let text = format!(
        "# Does planning keep to what a scenario says?
schema: scenario/1
name: planning-test
seed: 1
model: {{profile: llama-8b}}
context: 512
workload: {{prompt: 16, generate: 12}}
devices:
  - {{name: a, profile: d2}}
  - {{name: b, profile: d3{limits}}}
links:
  default:
    latency: {{value: 2 ms, source: test}}
    bandwidth: {{value: 400 Mbit/s, source: test}}
{more}"
    );
    let file = folder.join("scenario.yaml");
    fs::write(&file, text).expect("the temporary folder can be written");
    file.display().to_string()
}

/// Runs the program, which must end well and say nothing on standard error, and reads its JSON.
fn json(arguments: &[&str]) -> Value {
    let output = run(arguments);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.is_empty(), "{arguments:?}: {said}");
    serde_json::from_slice(&output.stdout).expect("one JSON document")
}

/// The windows of a plan in JSON, by device.
fn windows(plan: &Value) -> Vec<(String, u64)> {
    let devices = plan["devices"].as_array().expect("devices");
    let part = |device: &Value| {
        let name = device["name"].as_str().expect("a name").to_owned();
        (name, device["window"].as_u64().expect("a window"))
    };
    devices.iter().map(part).collect()
}

#[test]
fn comparison_lists_every_strategy() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let file = scenario(folder.path(), "", "");
    let rows = json(&["plan", &file, "--compare", "--refine-evaluations", "20", "--json"]);
    let rows = rows.as_array().expect("a list");
    for name in ["exact", "single", "mem", "even", "refine"] {
        assert!(rows.iter().any(|row| row["strategy"] == name), "no row of `{name}`");
    }
    let time = |row: &Value| row["simulated"]["tpot_ms"].as_f64();
    let fastest = rows.iter().filter_map(time).min_by(f64::total_cmp).expect("times");
    for row in rows {
        assert_eq!(row["simulated"]["outcome"], "ok");
        assert!(row["predicted"]["tpot_ms"].is_number() && row["refused"].is_null());
        assert_eq!(row["best"], time(row) == Some(fastest), "{}", row["strategy"]);
    }
    // The same plan and as many tokens give the same number in the other command.
    let tokens = rows[0]["simulated"]["tokens"].to_string();
    let whole = json(&["simulate", &file, "--strategy", "exact", "--tokens", &tokens, "--json"]);
    let exact = rows.iter().find(|row| row["strategy"] == "exact").expect("a row");
    assert_eq!(whole["tpot_ms"]["mean"].as_f64(), time(exact));
}

#[test]
fn refused_strategy_says_why() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let file = scenario(folder.path(), "", "");
    let output = run(&["plan", &file, "--compare", "--rounds", "5"]);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && output.stderr.is_empty(), "{text}");
    let lines: Vec<&str> = text.lines().collect();
    assert!(lines[0].contains("simulated: the mean after the first of 8 generated tokens"), "{text}");
    assert!(lines[1].contains("expected") && lines[1].contains("windows (GPU layers)"), "{text}");
    let line = |name: &str| lines.iter().find(|line| line[1..].trim_start().starts_with(name));
    for name in ["exact", "even"] {
        let line = line(name).expect("a row");
        assert!(line.contains("refused: 32 layers cannot be spread over 5 rounds"), "{line}");
    }
    assert_eq!(lines.iter().filter(|line| line.starts_with('*')).count(), 1, "{text}");
    assert!(line("single").is_some_and(|line| line.contains("a 32")), "{text}");
}

#[test]
fn refine_is_deterministic_by_evaluations() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let file = scenario(folder.path(), "", "planner: {strategy: even}\n");
    let plan = |name: &str, evaluations: &str| {
        let path = folder.path().join(name).display().to_string();
        let words = ["plan", &file, "--windows", "16,16", "--strategy", "refine", "--output", &path];
        let output = run(&[&words[..], &["--refine-evaluations", evaluations]].concat());
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        let time = json(&["simulate", &file, "--plan", &path, "--tokens", "8", "--json"]);
        (fs::read_to_string(path).expect("a plan"), said, time["tpot_ms"]["mean"].as_f64().expect("a time"))
    };
    let (_, said, start) = plan("start.yaml", "1");
    assert!(said.contains("(the plan of `manual`)") && said.contains("in 1 evaluation;"), "{said}");
    assert!(said.contains("the evaluations were used up"), "{said}");
    let (text, said, better) = plan("better.yaml", "60");
    assert!(better < start, "{better} is not below {start}");
    assert!(text.contains("strategy: refine") && text.contains("start=manual"), "{text}");
    assert_eq!(plan("again.yaml", "60").0, text);
    println!("{start} to {better}: {said}");
}

#[test]
fn refine_keeps_given_rounds() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let file = scenario(folder.path(), "", "");
    let words = ["--strategy", "refine", "--rounds", "2", "--refine-evaluations", "30", "--json"];
    let output = run(&[&["plan", &file, "--output", "/dev/null"][..], &words].concat());
    let plan: Value = serde_json::from_slice(&output.stdout).expect("one JSON document");
    assert_eq!(plan["rounds"], 2);
    let sentence = plan["explanation"][0].as_str().expect("a sentence");
    assert!(sentence.starts_with("The simulator: from "), "{sentence}");
}

#[test]
fn planners_know_absolute_limits_only() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let plan = |limits: &str| {
        let file = scenario(folder.path(), limits, "");
        windows(&json(&["plan", &file, "--strategy", "mem", "--json"]))
    };
    let free = plan("");
    let layers = |plan: &[(String, u64)]| plan.iter().find(|(name, _)| name == "b").expect("`b`").1;
    let bound = plan(", limits: {memory: 1 GiB}");
    assert!(layers(&bound) < layers(&free), "{bound:?} beside {free:?}");
    assert_eq!(plan(", limits: {memory_share: 50 %}"), free);

    // A plan made in one command and simulated in another is what the second makes by itself.
    let file = scenario(folder.path(), ", limits: {memory: 4 GiB}", "");
    let path = folder.path().join("plan.yaml").display().to_string();
    assert!(run(&["plan", &file, "--output", &path]).status.success());
    let given = json(&["simulate", &file, "--plan", &path, "--json"]);
    assert_eq!(given, json(&["simulate", &file, "--json"]));
}

#[test]
fn wrong_search_flags_are_refused() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let file = scenario(folder.path(), "", "");
    let text = error(&["plan", &file, "--strategy", "refined"], 2);
    assert!(text.contains("there is no strategy `refined`") && text.contains("exhaustive, refine"), "{text}");
    for seconds in ["0", "-1", "1e3", "999999"] {
        let seconds = format!("--refine-seconds={seconds}");
        let text = error(&["plan", &file, "--strategy", "refine", &seconds], 2);
        assert!(text.contains("refine-seconds"), "{text}");
    }
}
