//! `--json` prints the keys that docs/reference/json.md promises.

use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::processes::{Worker, model, plan, run};

/// The rows of the document: a command and its keys.
fn promised() -> Vec<(String, Vec<String>)> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/reference/json.md");
    let text = fs::read_to_string(path).expect("the document");
    let rows = text.lines().filter_map(|line| line.strip_prefix("| `hearth ")?.split_once("` | "));
    rows.map(|(command, keys)| (command.to_owned(), spread(keys))).collect()
}

/// What stands between marks, `a.{b,c}` as `a.b` and `a.c`.
fn spread(keys: &str) -> Vec<String> {
    let marked = keys.split('`').skip(1).step_by(2);
    let several = marked.flat_map(|key| match key.strip_suffix('}').and_then(|key| key.split_once('{')) {
        Some((start, ends)) => ends.split(',').map(|end| format!("{start}{end}")).collect(),
        None => vec![key.to_owned()],
    });
    several.collect()
}

/// Whether a document has a key, of whatever value; `[]` is each element of a list, which is not empty.
fn has(value: &Value, key: &str) -> bool {
    if key.is_empty() {
        return true;
    }
    if let Some(rest) = key.strip_prefix("[]") {
        let rest = rest.trim_start_matches('.');
        let whole =
            |element: &Value| has(element, rest) || element.get("predicted").is_none() && is_refused(element);
        return value.as_array().is_some_and(|list| !list.is_empty() && list.iter().all(whole));
    }
    let end = key.find(['.', '[']).unwrap_or(key.len());
    let (name, rest) = key.split_at(end);
    value.get(name).is_some_and(|value| has(value, rest.trim_start_matches('.')))
}

/// Whether a row of a comparison says why there is no plan.
fn is_refused(row: &Value) -> bool {
    row.get("refused").is_some_and(Value::is_string)
}

#[test]
fn every_documented_key_is_printed() {
    let folder = tempfile::tempdir().expect("a folder");
    let place = |name: &str| folder.path().join(name).display().to_string();
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let home = root.join("scenarios/home/llama-70b-on-four.yaml").display().to_string();
    let toy = place("toy.yaml");
    let text = "schema: scenario/1\nname: toy\nmodel: {profile: llama-8b}\ncontext: 128\n\
                workload: {prompt: 8, generate: 4}\ndevices: [{name: one, profile: d1}, {name: two, profile: d2}]\n\
                links: {default: {latency: {value: 1 ms, source: a}, bandwidth: {value: 1 Gbit/s, source: a}}}\n";
    fs::write(&toy, text).expect("a scenario");
    let worker = Worker::start(&model("q4_k"));
    let file = place("plan.yaml");
    fs::write(&file, plan("q4_k", &[2, 2], &[worker.address.as_str()], 64)).expect("a plan");
    let traced = place("run.trace");
    assert!(run(&["simulate", &toy, "--trace", &traced]).status.success());
    let (q4_k, first, tiny) = (model("q4_k"), place("first.yaml"), place("tiny.gguf"));
    let commands: [(&str, &[&str]); 11] = [
        ("plan SCENARIO", &["plan", &home]),
        ("plan SCENARIO --compare", &["plan", &toy, "--compare"]),
        ("simulate SCENARIO", &["simulate", &toy]),
        ("execute PLAN", &["execute", &file, "--model", &q4_k, "--prompt", "And", "--tokens", "3"]),
        ("lint SCENARIO", &["lint", &home]),
        (
            "bench GGUF",
            &["bench", &q4_k, "--peer", "none", "--repeats", "1", "--tokens", "2", "--prompts", "4"],
        ),
        ("whatif SCENARIO", &["whatif", &toy, "--tokens", "2"]),
        ("sweep SCENARIO", &["sweep", &toy, "--vary", "planner.rounds=1,7"]),
        ("report TRACE", &["report", &traced, "-o", folder.path().to_str().expect("a path")]),
        ("synth", &["synth", "--preset", "tiny", "-o", &tiny]),
        ("init", &["init", &first, "--device", "one=d1"]),
    ];
    let promised = promised();
    assert_eq!(promised.len(), commands.len(), "a row for each command, and a command for each row");
    for (name, keys) in promised {
        let (_, arguments) = commands.iter().find(|(command, _)| *command == name).expect("a known command");
        let output = run(&[arguments, &["--json"][..]].concat());
        let said = String::from_utf8_lossy(&output.stderr);
        let json: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{name}: {said}"));
        assert!(keys.len() > 3, "{name}: {keys:?}");
        for key in keys {
            assert!(has(&json, &key), "{name}: no `{key}` in {json}");
        }
    }
}
