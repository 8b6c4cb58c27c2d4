//! `hearth bench` times a model and reports problems with the other engine.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use crate::processes::{data, error, model, run};

/// A program that behaves as some Python might.
fn program(folder: &Path, name: &str, lines: &str) -> String {
    let path = folder.join(name);
    fs::write(&path, format!("#!/bin/sh\n{lines}\n")).expect("a script can be written");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("it can be made to run");
    path.display().to_string()
}

/// A short measurement of a trained model.
const SHORT: [&str; 9] =
    ["--repeats", "1", "--tokens", "3", "--prompts", "5,9", "--threads", "1,2", "--json"];

#[test]
fn model_is_timed_for_each_number_of_threads() {
    let output = run(&[&["bench", &model("q4_k"), "--peer", "none"], &SHORT[..]].concat());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let json: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let runs = json.as_array().expect("a list");
    assert_eq!(runs.iter().map(|run| run["threads"].as_u64()).collect::<Vec<_>>(), [Some(1), Some(2)]);
    for run in runs {
        let speed = &run["hearth"];
        let prompts = speed["prefill"].as_array().expect("a list");
        assert_eq!(prompts.iter().map(|p| p["tokens"].as_u64()).collect::<Vec<_>>(), [Some(5), Some(9)]);
        for number in [&speed["decode_tokens_per_s"], &speed["load_s"], &prompts[1]["tokens_per_s"]] {
            assert!(number.as_f64().expect("a number") > 0.0, "{run}");
        }
        // A token reads all weights but the embedding.
        let bytes = speed["weight_bytes_per_token"].as_u64().expect("a number");
        assert!(bytes < run["file_bytes"].as_u64().expect("a number"), "{run}");
        assert!(run.get("llama_cpp").is_none());
    }
}

#[test]
fn missing_failing_or_hanging_engine_is_named() {
    let folder = tempfile::tempdir().expect("a folder");
    let model = model("q4_k");
    // Whatever the other engine does, what was measured here is printed.
    let note_beside = |peer: &str| {
        let output = run(&[&["bench", &model, "--peer", peer, "--deadline", "10"], &SHORT[..]].concat());
        assert!(output.status.success());
        let json: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
        assert!(json[1]["hearth"]["decode_tokens_per_s"].as_f64().expect("a number") > 0.0);
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    let program = |name: &str, lines: &str| program(folder.path(), name, lines);
    for (name, lines, note) in [
        ("bare", "exit 77", "has no package llama_cpp"),
        ("failing", "echo 'no memory left' >&2; exit 1", "no memory left"),
        ("silent", "echo '{}'", "printed no result"),
        ("slow", "sleep 60", "not done within 10 s"),
    ] {
        let found = note_beside(&program(name, lines));
        assert!(found.contains(note), "{name}: {found}");
    }
    assert!(note_beside("/no/such/python").contains("cannot start"));
}

#[test]
fn model_that_cannot_be_opened_is_an_error() {
    assert!(error(&["bench", "no-such.gguf", "--peer", "none"], 2).contains("no-such.gguf"));
    let text = data("models/README.md").display().to_string();
    assert!(error(&["bench", &text, "--peer", "none"], 2).contains("not a GGUF file"));
}
