//! Tests that plans like those of other systems, such as exo, can be made, simulated and linted, but not executed.

use crate::folder::Folder;
use crate::processes::{
    assert_rejected, execute_arguments, expect_array, model_path, run_json, run_json_with_code,
    run_successfully, run_with_code, scenario_path, string_values,
};

/// Writes the plan of another system's strategy and returns the path of the plan.
fn write_plan(folder: &Folder, strategy: &str) -> String {
    let (scenario, path) = (scenario_path("paper/llama-8b-on-d1-d4"), folder.path_of("plan.yaml"));
    run_successfully(&["plan", &scenario, "--strategy", strategy, "-o", &path]);
    path
}

#[test]
fn plan_of_another_system_is_not_executed() {
    let folder = Folder::new();
    for strategy in ["dllama", "exo"] {
        let (scenario, plan) = (scenario_path("paper/llama-8b-on-d1-d4"), write_plan(&folder, strategy));
        let from_file = run_json(&["simulate", &scenario, "--plan", &plan]);
        assert_eq!(from_file, run_json(&["simulate", &scenario, "--strategy", strategy]), "{strategy}");
        assert_eq!(from_file["outcome"], "ok");
        let reason = format!("a plan of `{strategy}` can only be simulated");
        assert_rejected(&execute_arguments(&plan, &model_path("q4_k"), &["--prompt", "a"]), &[&reason]);
        let findings = run_json(&["lint", &scenario, "--plan", &plan]);
        assert!(string_values(&findings, "code").contains(&"simulated-only"), "{findings}");
    }
}

#[test]
fn run_and_lint_agree_on_memory() {
    for strategy in ["dllama", "exo"] {
        let scenario = scenario_path("paper/llama-70b-on-d1-d4");
        let flags = [scenario.as_str(), "--strategy", strategy];
        let (text, _) = run_with_code(&[&["simulate"], &flags[..]].concat(), 3);
        let first =
            text.lines().find(|line| line.starts_with("out of memory: d3 needs")).expect("an outcome");
        assert!(first.contains("no times") && !first.contains(" - "), "{first}");
        let findings = run_json_with_code(&[&["lint"], &flags[..]].concat(), 3);
        let codes = string_values(&findings, "code");
        let short = codes.iter().filter(|code| **code == "memory-exceeded").count();
        let run = run_json_with_code(&[&["simulate"], &flags[..]].concat(), 3);
        assert_eq!(expect_array(&run["memory_shortages"]).len(), short, "{strategy}");
        let ignoring = run_json(&[&["simulate", "--ignore-memory"], &flags[..]].concat());
        assert_eq!(ignoring["outcome"], "ok");
    }
}

#[test]
fn hostile_plan_is_rejected() {
    let folder = Folder::new();
    let plan = write_plan(&folder, "dllama");
    let sound = folder.read("plan.yaml");
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
        folder.write("plan.yaml", sound.replacen(from, to, 1));
        assert_rejected(&["simulate", &scenario_path("paper/llama-8b-on-d1-d4"), "--plan", &plan], &[reason]);
    }
}

#[test]
fn flags_of_other_systems_are_checked() {
    let scenario = scenario_path("paper/llama-8b-on-d1-d4");
    let cases: [(&[&str], &[&str]); 3] = [
        (&["--weights-as", "q4_0"], &["`--weights-as` is only for the strategies of other systems"]),
        (&["--strategy", "airinfer"], &["needs the time of one all-reduce"]),
        (&["--strategy", "exho"], &["dllama", "overlap"]),
    ];
    for (flags, parts) in cases {
        assert_rejected(&[&["plan", &scenario], flags].concat(), parts);
    }
    let text = std::fs::read_to_string(&scenario).expect("a tracked file") + "residency: pinned\n";
    let folder = Folder::new();
    let pinned = folder.write("pinned.yaml", text);
    assert_rejected(&["plan", &pinned], &["is only for the strategies of other systems"]);
}
