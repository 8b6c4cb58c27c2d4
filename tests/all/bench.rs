//! Does `hearth bench` time a model, and say what is wrong with the engine beside it?

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use crate::processes::{error, model, run};

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
fn a_model_is_timed_for_each_number_of_threads() {
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
fn an_engine_that_is_missing_fails_or_hangs_is_named() {
    let folder = tempfile::tempdir().expect("a folder");
    let model = model("q4_k");
    let beside = |peer: &str| [&["bench", &model, "--peer", peer, "--deadline", "10"], &SHORT[..]].concat();
    let bare = program(folder.path(), "bare", "exit 77");
    let output = run(&beside(&bare));
    assert!(output.status.success());
    let note = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(note.contains("has no package llama_cpp"), "{note}");

    let failing = program(folder.path(), "failing", "echo 'no memory left' >&2; exit 1");
    assert!(error(&beside(&failing), 1).contains("no memory left"));
    let silent = program(folder.path(), "silent", "echo '{}'");
    assert!(error(&beside(&silent), 1).contains("printed no result"));
    let slow = program(folder.path(), "slow", "exec sleep 60");
    assert!(error(&beside(&slow), 1).contains("not done within 10 s"));
}

#[test]
fn a_model_that_cannot_be_opened_is_an_error() {
    assert!(error(&["bench", "no-such.gguf", "--peer", "none"], 2).contains("no-such.gguf"));
}
