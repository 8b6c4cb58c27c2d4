//! Tests that `--json` prints the keys that docs/reference/json.md documents.

use std::fs;

use serde_json::Value;

use crate::folder::{Folder, TWO_DEVICES_YAML, scenario_yaml};
use crate::processes::{Worker, model_path, run_json, run_successfully, scenario_path};
use crate::repository::repository_root;

/// Returns the rows of the table in docs/reference/json.md: each command and its keys.
fn documented() -> Vec<(String, Vec<String>)> {
    let text = fs::read_to_string(repository_root().join("docs/reference/json.md")).expect("the document");
    let rows = text.lines().filter_map(|line| line.strip_prefix("| `hearth ")?.split_once("` | "));
    rows.map(|(command, keys)| (command.to_owned(), expand(keys))).collect()
}

/// Returns the keys in backquotes in a table cell; `a.{b,c}` stands for `a.b` and `a.c`.
fn expand(keys: &str) -> Vec<String> {
    let marked = keys.split('`').skip(1).step_by(2);
    let several = marked.flat_map(|key| match key.strip_suffix('}').and_then(|key| key.split_once('{')) {
        Some((start, ends)) => ends.split(',').map(|end| format!("{start}{end}")).collect(),
        None => vec![key.to_owned()],
    });
    several.collect()
}

/// Returns whether a value has a key; `[]` stands for every element of a non-empty list.
fn has(value: &Value, key: &str) -> bool {
    if key.is_empty() {
        return true;
    }
    if let Some(rest) = key.strip_prefix("[]") {
        let rest = rest.trim_start_matches('.');
        // A row of a comparison may have a reason instead of a plan.
        let is_refused = |row: &Value| row.get("predicted").is_none() && row["refused"].is_string();
        let whole = |element: &Value| has(element, rest) || is_refused(element);
        return value.as_array().is_some_and(|list| !list.is_empty() && list.iter().all(whole));
    }
    let end = key.find(['.', '[']).unwrap_or(key.len());
    let (name, rest) = key.split_at(end);
    value.get(name).is_some_and(|value| has(value, rest.trim_start_matches('.')))
}

#[test]
fn every_documented_key_is_printed() {
    let folder = Folder::new();
    let home = scenario_path("home/llama-70b-on-four");
    let toy = folder.write("toy.yaml", scenario_yaml(TWO_DEVICES_YAML));
    let worker = Worker::start(&model_path("q4_k"));
    let plan = folder.write_plan(&[2, 2], &[&worker.address], 64);
    let [trace, first, tiny, report] =
        ["run.trace", "first.yaml", "tiny.gguf", "report"].map(|name| folder.path_of(name));
    run_successfully(&["simulate", &toy, "--trace", &trace]);
    let q4_k = model_path("q4_k");
    let routes = repository_root().join("tests/data/moe/qwen3-30b-a3b.route.csv").display().to_string();
    let commands: [(&str, &[&str]); 18] = [
        ("plan SCENARIO", &["plan", &home]),
        ("plan SCENARIO --compare", &["plan", &toy, "--compare"]),
        ("plan SCENARIO --export ENGINE", &["plan", &home, "--export", "llama.cpp"]),
        ("simulate SCENARIO", &["simulate", &toy]),
        ("execute PLAN", &["execute", &plan, "--model", &q4_k, "--prompt", "And", "--tokens", "3"]),
        ("advise DEVICES", &["advise", "one=d1"]),
        ("experts ROUTES", &["experts", &routes]),
        ("model list", &["model", "list", "qwen3"]),
        ("device compare FIRST SECOND", &["device", "compare", "d2", "d3"]),
        ("lint SCENARIO", &["lint", &home]),
        ("bench GGUF", &["bench", &q4_k, "--peer=none", "--repeats=1", "--tokens=2", "--prompts=4"]),
        ("whatif SCENARIO", &["whatif", &toy, "--tokens", "2"]),
        ("sweep SCENARIO", &["sweep", &toy, "--vary", "planner.rounds=1,7"]),
        ("report TRACE", &["report", &trace, "-o", &report]),
        ("synth", &["synth", "--preset", "tiny", "-o", &tiny]),
        ("pack GGUF", &["pack", &tiny]),
        ("tokenize GGUF", &["tokenize", &q4_k, "Once upon"]),
        ("init", &["init", &first, "--device", "one=d1"]),
    ];
    let documented = documented();
    assert_eq!(documented.len(), commands.len(), "a row for each command, and a command for each row");
    for (name, keys) in documented {
        let (_, arguments) = commands.iter().find(|(command, _)| *command == name).expect("a known command");
        let json = run_json(arguments);
        assert!(keys.len() > 3, "{name}: {keys:?}");
        for key in keys {
            assert!(has(&json, &key), "{name}: no `{key}` in {json}");
        }
    }
}
