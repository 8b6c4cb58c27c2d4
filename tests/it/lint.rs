//! `hearth lint` finds the errors that a run would end with, and exits with the right code.

use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::processes::{error, run};

fn scenario(context: u32, devices: &str) -> String {
    format!(
        "# What does lint find?
schema: scenario/1
name: lint-test
seed: 1
model: {{profile: llama-8b}}
context: {context}
workload: {{prompt: 16, generate: 4}}
devices:
{devices}
links:
  default:
    latency: {{value: 2 ms, source: test}}
    bandwidth: {{value: 400 Mbit/s, source: test}}
"
    )
}

fn write(folder: &Path, name: &str, text: &str) -> String {
    let path = folder.join(name);
    fs::write(&path, text).expect("the temporary folder can be written");
    path.display().to_string()
}

/// The findings, after ending with this code and saying nothing on standard error.
fn lint(arguments: &[&str], code: i32) -> Vec<Value> {
    let output = run(&[&["lint"][..], arguments, &["--json"]].concat());
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{arguments:?}: {said}");
    assert!(said.is_empty(), "{said}");
    let found: Value = serde_json::from_slice(&output.stdout).expect("one JSON document");
    found.as_array().expect("a list").clone()
}

fn codes(found: &[Value]) -> Vec<&str> {
    found.iter().map(|finding| finding["code"].as_str().expect("a code")).collect()
}

const TWO: &str = "  - {name: a, profile: d3}\n  - {name: b, profile: d2}";

#[test]
fn own_plan_has_no_findings() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let file = write(folder.path(), "s.yaml", &scenario(512, TWO));
    assert_eq!(codes(&lint(&[&file], 0)), Vec::<&str>::new());
    let output = run(&["lint", &file]);
    assert_eq!(String::from_utf8_lossy(&output.stdout), "0 errors, 0 warnings, 0 notes\n");
}

#[test]
fn finding_has_code_place_and_hint() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let file = write(folder.path(), "s.yaml", &scenario(512, TWO));
    let arguments = [file.as_str(), "--windows", "6,2"];
    let found = lint(&arguments, 0);
    assert_eq!(codes(&found), ["rounds-without-reading"]);
    for key in ["severity", "code", "what", "where", "fix"] {
        assert!(found[0][key].as_str().is_some_and(|text| !text.is_empty()), "{key}: {found:?}");
    }
    let output = run(&[&["lint"][..], &arguments].concat());
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(text.starts_with("warning[rounds-without-reading]: "), "{text}");
    assert!(
        text.contains("\n  where: plan rounds\n  hint:  ") && text.ends_with("1 warning, 0 notes\n"),
        "{text}"
    );
}

#[test]
fn errors_about_memory_are_runs_that_end_before_they_begin() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (mut fitting, mut ending) = (0, 0);
    // A planner refuses what does not fit. So the plans are made where all fits, and carried over.
    let roomy = scenario(512, "  - {name: a, profile: d3}\n  - {name: b, profile: d2}");
    let roomy_file = write(folder.path(), "roomy.yaml", &roomy);
    for context in [512, 8192, 65_536, 262_144, 1_048_576] {
        for limit in ["300 MiB", "700 MiB", "2 GiB", "9 GiB"] {
            for gpu in ["0,0", "8,8", "16,16"] {
                let devices = format!(
                    "  - {{name: a, profile: d3}}\n  - {{name: b, profile: d2, limits: {{memory: {limit}}}}}"
                );
                let file = write(folder.path(), "s.yaml", &scenario(context, &devices));
                let words = ["plan", &roomy_file, "--windows", "16,16", "--gpu-layers", gpu];
                let made = String::from_utf8(run(&words).stdout).expect("a plan");
                let text = fs::read_to_string(&file).expect("the scenario");
                let carried = made
                    .replace("context: 512", &format!("context: {context}"))
                    .replace(&hearth_schema::digest::of(&roomy), &hearth_schema::digest::of(&text));
                let plan = write(folder.path(), "p.yaml", &carried);
                let simulated = run(&["simulate", &file, "--plan", &plan, "--tokens", "2", "--json"]);
                let ends = simulated.status.code() == Some(3);
                let found = lint(&[&file, "--plan", &plan], if ends { 3 } else { 0 });
                let wrong = |code: &&str| matches!(*code, "memory-exceeded" | "gpu-memory");
                let codes = codes(&found);
                assert_eq!(codes.iter().any(wrong), ends, "{context}, {limit}, {gpu}: {codes:?}");
                *(if ends { &mut ending } else { &mut fitting }) += 1;
            }
        }
    }
    println!("{fitting} runs fit, {ending} do not");
    assert!(fitting > 5 && ending > 5);
}

#[test]
fn plan_of_another_model_is_a_finding() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let file = write(folder.path(), "s.yaml", &scenario(512, TWO));
    let plan = folder.path().join("p.yaml").display().to_string();
    assert!(run(&["plan", &file, "--windows", "16,16", "--output", &plan]).status.success());
    assert_eq!(codes(&lint(&[&file, "--plan", &plan], 0)), Vec::<&str>::new());
    let text = fs::read_to_string(&plan).expect("a plan");
    let twice = write(folder.path(), "twice.yaml", &text.replace("rounds: 1", "rounds: 2"));
    let found = lint(&[&file, "--plan", &twice], 3);
    assert_eq!(codes(&found), ["plan-invalid"]);
    assert!(found[0]["what"].as_str().is_some_and(|what| what.contains("set `rounds: 1`")), "{found:?}");
    let other = scenario(512, TWO).replace("llama-8b", "1b");
    let other = write(folder.path(), "other.yaml", &other);
    assert_eq!(codes(&lint(&[&other, "--plan", &plan], 3)), ["other-model", "other-scenario"]);
    // What is no plan at all, or nowhere, is refused like anywhere else.
    let text = error(&["lint", &file, "--plan", &file], 2);
    assert!(text.contains("this is not a plan/1 document"), "{text}");
    error(&["lint", &file, "--plan", "nowhere.yaml"], 2);
}

#[test]
fn refused_strategy_is_a_finding() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let file = write(folder.path(), "s.yaml", &scenario(512, TWO));
    let found = lint(&[&file, "--strategy", "even", "--rounds", "5"], 3);
    assert_eq!(codes(&found), ["no-plan"]);
    assert!(found[0]["what"].as_str().is_some_and(|what| what.contains("5 rounds")), "{found:?}");
}

#[test]
fn limit_above_memory_is_a_finding() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let devices = "  - {name: a, profile: d3, limits: {memory: 1 TiB}}";
    let file = write(folder.path(), "s.yaml", &scenario(512, devices));
    assert_eq!(codes(&lint(&[&file], 0)), ["limit-above-memory"]);
}

#[test]
fn implausible_numbers_are_findings() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let text = scenario(512, TWO).replace("400 Mbit/s", "0.002 Mbit/s");
    let file = write(folder.path(), "s.yaml", &text);
    let found = lint(&[&file], 0);
    let absurd: Vec<&Value> = found.iter().filter(|finding| finding["code"] == "absurd-number").collect();
    assert_eq!(absurd.len(), 1, "{found:?}");
    assert_eq!(absurd[0]["where"], "scenario links.default.bandwidth");
    let device = hearth_profiles::device::shipped_yaml("d3").expect("d3 is shipped");
    let device = device.replace("3.17 GB/s", "500 GB/s").replace("{value: 9.7 GiB", "{value: 3 MiB");
    write(folder.path(), "d.yaml", &device);
    let text = scenario(512, "  - {name: a, profile: d.yaml}\n  - {name: b, profile: d2, head: true}");
    let file = write(folder.path(), "t.yaml", &text);
    let output = run(&["lint", &file, "--json"]);
    let found: Value = serde_json::from_slice(&output.stdout).expect("one JSON document");
    let places: Vec<&str> =
        found.as_array().expect("a list").iter().filter_map(|it| it["where"].as_str()).collect();
    for place in ["device `a` disk.sequential", "device `a` memory.available"] {
        assert!(places.contains(&place), "{places:?}");
    }
}
