//! The plans of other systems can be made, simulated and linted, and are not executed.

use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::processes::{error, model, run};
use crate::repository::root;

fn paper(name: &str) -> String {
    root().join(format!("scenarios/paper/{name}.yaml")).display().to_string()
}

/// Runs the program and reads its JSON, whatever the run came to.
fn json(arguments: &[&str]) -> Value {
    let output = run(arguments);
    serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|_| panic!("{arguments:?}: {}", String::from_utf8_lossy(&output.stderr)))
}

fn written(folder: &Path, name: &str, strategy: &str) -> String {
    let path = folder.join(name).display().to_string();
    let output = run(&["plan", &paper("llama-8b-on-d1-d4"), "--strategy", strategy, "-o", &path]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    path
}

#[test]
fn plan_of_another_system_is_not_executed() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    for strategy in ["dllama", "exo"] {
        let (scenario, plan) = (paper("llama-8b-on-d1-d4"), written(folder.path(), "plan.yaml", strategy));
        let from_file = json(&["simulate", &scenario, "--plan", &plan, "--json"]);
        assert_eq!(from_file, json(&["simulate", &scenario, "--strategy", strategy, "--json"]), "{strategy}");
        assert_eq!(from_file["outcome"], "ok");
        let refusal = error(&["execute", &plan, "--model", &model("q4_k"), "--prompt", "a"], 2);
        assert!(refusal.contains(&format!("the plan of `{strategy}` is simulated only")), "{refusal}");
        let found = json(&["lint", &scenario, "--plan", &plan, "--json"]);
        let codes: Vec<&str> =
            found.as_array().expect("a list").iter().filter_map(|finding| finding["code"].as_str()).collect();
        assert!(codes.contains(&"simulated-only"), "{codes:?}");
    }
}

#[test]
fn run_and_lint_agree_on_memory() {
    for strategy in ["dllama", "exo"] {
        let scenario = paper("llama-70b-on-d1-d4");
        let output = run(&["simulate", &scenario, "--strategy", strategy]);
        let text = String::from_utf8_lossy(&output.stdout);
        assert_eq!(output.status.code(), Some(3), "{text}");
        assert!(text.contains("out of memory") && text.contains("d3 needs"), "{text}");
        let found = json(&["lint", &scenario, "--strategy", strategy, "--json"]);
        let short =
            found.as_array().expect("a list").iter().filter(|it| it["code"] == "memory-exceeded").count();
        let run = json(&["simulate", &scenario, "--strategy", strategy, "--json"]);
        assert_eq!(run["memory_shortages"].as_array().map(Vec::len), Some(short), "{strategy}");
        let ignoring = json(&["simulate", &scenario, "--strategy", strategy, "--ignore-memory", "--json"]);
        assert_eq!(ignoring["outcome"], "ok");
    }
}

#[test]
fn hostile_plan_is_refused() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let plan = written(folder.path(), "plan.yaml", "dllama");
    let sound = fs::read_to_string(&plan).expect("the plan");
    for (from, to, reason) in [
        ("feed_forward: 3584", "feed_forward: 3552", "add up to 14304"),
        ("feed_forward: 3584", "feed_forward: 4294967295", "add up to"),
        ("kv_heads: 2", "kv_heads: 0", "add up to 6"),
        ("kv_heads: 2", "kv_heads: -1", "invalid type"),
        ("tensor:", "pipeline:", "unknown variant `pipeline`"),
        ("all_reduce: all-gather", "all_reduce: gossip", "unknown variant `gossip`"),
        ("policy: pinned", "policy: sliding", "needs `blocks`"),
    ] {
        assert!(sound.contains(from), "{from}");
        fs::write(&plan, sound.replacen(from, to, 1)).expect("the temporary folder can be written");
        let refusal = error(&["simulate", &paper("llama-8b-on-d1-d4"), "--plan", &plan], 2);
        assert!(refusal.contains(reason), "{to}: {refusal}");
    }
}

#[test]
fn flags_of_other_systems_are_checked() {
    let scenario = paper("llama-8b-on-d1-d4");
    let refusal = error(&["plan", &scenario, "--weights-as", "q4_0"], 2);
    assert!(refusal.contains("--weights-as is for the plans of other systems"), "{refusal}");
    let refusal = error(&["plan", &scenario, "--strategy", "airinfer"], 2);
    assert!(refusal.contains("needs the time of one all-reduce"), "{refusal}");
    let refusal = error(&["plan", &scenario, "--strategy", "exho"], 2);
    assert!(refusal.contains("dllama") && refusal.contains("overlap"), "{refusal}");
    let folder = tempfile::tempdir().expect("a temporary folder");
    let text = fs::read_to_string(&scenario).expect("a tracked file") + "residency: pinned\n";
    let file = folder.path().join("pinned.yaml");
    fs::write(&file, text).expect("the temporary folder can be written");
    let refusal = error(&["plan", &file.display().to_string()], 2);
    assert!(refusal.contains("belongs to the plans of other systems"), "{refusal}");
}
