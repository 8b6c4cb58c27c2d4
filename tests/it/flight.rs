//! `hearth execute` runs several prompts, batches and drafts, and refuses what it cannot run.

use std::fs;

use serde_json::Value;

use crate::processes::{Worker, data, error, model, plan, run};

/// The first prompts of the golden texts.
const PROMPTS: [&str; 3] = ["And Jesus said unto them,", "Now the king of Babylon", "The Lord is my"];

fn json(arguments: &[&str]) -> Value {
    let output = run(&[&["--json", "execute"], arguments].concat());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("JSON")
}

#[test]
fn several_prompts_give_the_texts_of_each_alone() {
    let (worker, folder) = (Worker::start(&model("q4_k")), tempfile::tempdir().expect("a folder"));
    let [alone, ring, prompts, trace] =
        ["alone.yaml", "ring.yaml", "prompts.jsonl", "run.trace"].map(|name| folder.path().join(name));
    fs::write(&alone, plan("q4_k", &[8], &[], 300)).expect("a file");
    fs::write(&ring, plan("q4_k", &[5, 3], &[&worker.address], 300)).expect("a file");
    let lines = format!("{}\n\n\"{}\"\n{{\"prompt\": \"{}\"}}\n", PROMPTS[0], PROMPTS[1], PROMPTS[2]);
    fs::write(&prompts, lines).expect("a file");
    let [alone, ring, prompts, trace] =
        [&alone, &ring, &prompts, &trace].map(|path| path.to_str().expect("a name"));
    let file = model("q4_k");
    let common = ["--model", &file, "--tokens", "20", "--threads", "1", "--ignore-end"];
    let draft = data("models/psalm-draft-1m-q8_0.gguf");
    let draft = draft.to_str().expect("a name");
    let some = ["--prompts", prompts, "--micro-batch", "3", "--draft-model", draft, "--draft-tokens", "3"];
    let several = json(&[&[ring, "--trace", trace], &common[..], &some].concat());
    for (prompt, sequence) in PROMPTS.iter().zip(several["sequences"].as_array().expect("sequences")) {
        let one = json(&[&[alone, "--prompt", prompt], &common[..]].concat());
        assert_eq!(sequence["token_ids"], one["token_ids"], "{prompt}");
        assert_eq!((&sequence["text"], &sequence["tokens"]), (&one["text"], &Value::from(19)), "{prompt}");
        assert_eq!(one["sequences"][0]["text"], one["text"]);
    }
    assert_eq!(several["token_ids"], several["sequences"][0]["token_ids"]);
    let drafting = &several["speculation"];
    assert!(
        drafting["accepted"].as_u64() > Some(0)
            && drafting["acceptance"].as_f64().is_some_and(|share| share < 1.0),
        "{drafting}"
    );
    assert!(fs::read_to_string(trace).expect("a trace").contains("\"accepted\""));
}

#[test]
fn wrong_drafts_and_prompts_are_refused_before_running() {
    let folder = tempfile::tempdir().expect("a folder");
    let [small, file] = ["plan.yaml", "other.gguf"].map(|name| folder.path().join(name));
    fs::write(&small, plan("q4_k", &[8], &[], 64)).expect("a file");
    let [small, other] = [&small, &file].map(|path| path.to_str().expect("a name"));
    let made = run(&["synth", "--layers", "1", "--vocab", "2048", "-o", other]);
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let model = model("q4_k");
    let common = ["execute", small, "--model", &model, "--tokens", "30"];
    let said = error(&[&common[..], &["--prompt", "A", "--draft-model", other]].concat(), 2);
    assert!(said.contains("cannot draft for") && said.contains("same tokenizer"), "{said}");
    let said = error(&[&common[..], &["--prompt", "A", "--prompt", "B", "--prompt", "C"]].concat(), 2);
    assert!(said.contains("context of 21 positions for each sequence"), "{said}");
    let said = error(&[&common[..], &["--prompt", "A", "--draft-tokens", "3"]].concat(), 2);
    assert!(said.contains("--draft-model"), "{said}");
    fs::write(&file, "{\"text\": 3}\n").expect("a file");
    let said = error(&[&common[..], &["--prompts", other]].concat(), 2);
    assert!(said.contains("other.gguf:1") && said.contains("\"prompt\""), "{said}");
}
