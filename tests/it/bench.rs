//! Tests of `hearth bench`: measured speeds, and failures of llama.cpp.

use crate::folder::Folder;
use crate::processes::{expect_array, integer_values, model_path, parse_json, run_json, run_with_code};

const SHORT: [&str; 9] =
    ["--repeats", "1", "--tokens", "3", "--prompts", "5,9", "--threads", "1,2", "--json"];

#[test]
fn model_is_timed_for_each_number_of_threads() {
    let runs = run_json(&[&["bench", &model_path("q4_k"), "--peer", "none"], &SHORT[..8]].concat());
    assert_eq!(integer_values(&runs, "threads"), [1, 2]);
    for run in expect_array(&runs) {
        let speed = &run["hearth"];
        let prompts = expect_array(&speed["prefill"]);
        assert_eq!(integer_values(&speed["prefill"], "tokens"), [5, 9]);
        for number in [&speed["decode_tokens_per_s"], &speed["load_s"], &prompts[1]["tokens_per_s"]] {
            assert!(number.as_f64().expect("a number") > 0.0, "{run}");
        }
        // A token reads all weights except the embedding.
        let bytes = speed["weight_bytes_per_token"].as_u64().expect("a number");
        assert!(bytes < run["file_bytes"].as_u64().expect("a number"), "{run}");
        assert!(run.get("llama_cpp").is_none());
    }
}

#[test]
fn missing_failing_or_hanging_engine_is_named() {
    let folder = Folder::new();
    let python = |name: &str, lines: &str| folder.write_script(name, lines);
    for (peer, note) in [
        (python("bare", "exit 77"), "has no package llama_cpp"),
        (python("failing", "echo 'no memory left' >&2; exit 1"), "no memory left"),
        (python("silent", "echo '{}'"), "printed no result"),
        (python("slow", "sleep 60"), "did not finish within 10 s"),
        ("/no/such/python".into(), "cannot start"),
    ] {
        let flags = ["bench", &model_path("q4_k"), "--peer", &peer, "--deadline", "10"];
        let (stdout, stderr) = run_with_code(&[&flags[..], &SHORT].concat(), 0);
        assert!(stderr.contains(note), "{peer}: {stderr}");
        // The results of hearth are printed anyway.
        assert!(parse_json(&stdout)[1]["hearth"]["decode_tokens_per_s"].as_f64().expect("a number") > 0.0);
    }
}
