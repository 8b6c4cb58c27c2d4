//! Tests of `hearth execute` with several prompts, batches and drafts, and with invalid flags.

use serde_json::Value;

use crate::folder::Folder;
use crate::processes::{
    Worker, assert_rejected, execute_arguments, expect_array, model_path, plan_yaml, run_json,
    run_successfully, test_data_path,
};

const PROMPTS: [&str; 3] = ["And Jesus said unto them,", "Now the king of Babylon", "The Lord is my"];

#[test]
fn several_prompts_give_the_texts_of_each_alone() {
    let (worker, folder) = (Worker::start(&model_path("q4_k")), Folder::new());
    let alone = folder.write("alone.yaml", plan_yaml("q4_k", &[8], &[], 300));
    let ring = folder.write("ring.yaml", plan_yaml("q4_k", &[5, 3], &[&worker.address], 300));
    let lines = format!("{}\n\n\"{}\"\n{{\"prompt\": \"{}\"}}\n", PROMPTS[0], PROMPTS[1], PROMPTS[2]);
    let (prompts, trace) = (folder.write("prompts.jsonl", lines), folder.path_of("run.trace"));
    let run = |plan: &str, more: &[&str]| {
        run_json(&execute_arguments(plan, &model_path("q4_k"), &[&["--tokens", "20"], more].concat()))
    };
    let draft = test_data_path("models/psalm-draft-1m-q8_0.gguf").display().to_string();
    let drafting = ["--micro-batch", "3", "--draft-model", &draft, "--draft-tokens", "3"];
    let several = run(&ring, &[&["--prompts", &prompts, "--trace", &trace], &drafting[..]].concat());
    for (prompt, sequence) in PROMPTS.iter().zip(expect_array(&several["sequences"])) {
        let one = run(&alone, &["--prompt", prompt]);
        assert_eq!(sequence["token_ids"], one["token_ids"], "{prompt}");
        assert_eq!((&sequence["text"], &sequence["tokens"]), (&one["text"], &Value::from(19)), "{prompt}");
        assert_eq!(one["sequences"][0]["text"], one["text"]);
    }
    assert_eq!(several["token_ids"], several["sequences"][0]["token_ids"]);
    let drafting = &several["speculation"];
    assert!(drafting["accepted"].as_u64() > Some(0), "{drafting}");
    assert!(drafting["acceptance"].as_f64().is_some_and(|share| share < 1.0), "{drafting}");
    assert!(folder.read("run.trace").contains("\"accepted\""));
}

#[test]
fn vocabularies_that_differ_by_padding_draft_for_each_other() {
    let folder = Folder::new();
    let models =
        [("short.gguf", "500"), ("padded.gguf", "540"), ("other.gguf", "640")].map(|(name, size)| {
            let path = folder.path_of(name);
            run_successfully(&["synth", "--preset", "tiny", "--layers", "2", "--vocab", size, "-o", &path]);
            path
        });
    let run = ["--tokens", "12", "--prompt-tokens", "5"];
    for (target, draft) in [(0, 1), (1, 0)] {
        let alone = run_json(&[&["execute", &models[target]], &run[..]].concat());
        let drafting = ["--draft-model", &models[draft], "--draft-tokens", "3"];
        let drafted = run_json(&[&["execute", &models[target]], &run[..], &drafting].concat());
        assert_eq!(alone["token_ids"], drafted["token_ids"]);
        assert!(drafted["speculation"]["drafted"].as_u64() > Some(0), "{drafted}");
    }
    let refused = [&["execute", &models[0]], &run[..], &["--draft-model", &models[2]]].concat();
    assert_rejected(&refused, &["a vocabulary of 640 tokens", "same family"]);
}

#[test]
fn wrong_drafts_and_prompts_are_rejected_before_running() {
    let folder = Folder::new();
    let (plan, other) = (folder.write_plan(&[8], &[], 64), folder.path_of("other.gguf"));
    run_successfully(&["synth", "--layers", "1", "--vocab", "2048", "-o", &other]);
    let prompts = folder.write("prompts", "{\"text\": 3}\n");
    let cases: [(&[&str], &[&str]); 5] = [
        (&["--prompt", "A", "--draft-model", &other], &["cannot draft for", "same tokenizer"]),
        (&["--prompt=A", "--prompt=B", "--prompt=C"], &["3 sequences of 96 tokens do not fit"]),
        (&["--prompt", "A", "--draft-tokens", "3"], &["--draft-model"]),
        (&["--prompts", &prompts], &["prompts:1", "\"prompt\""]),
        (&["--prompt", "A", "--scenario", &plan], &["this is not a scenario/1 document"]),
    ];
    for (flags, parts) in cases {
        let flags = [&["--tokens", "30"], flags].concat();
        assert_rejected(&execute_arguments(&plan, &model_path("q4_k"), &flags), parts);
    }
}
