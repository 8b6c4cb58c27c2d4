//! Every wrong input gets a clear error, and never a panic, a hang or a silent wrong number.

#![allow(clippy::disallowed_methods)] // how long an answer takes is what some of these tests are about

use std::fs;
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use hearth_profiles::Document;
use hearth_profiles::gguf::GgufModel;

use crate::processes::{Worker, error, hearth, model, plan, run};

fn write(folder: &Path, name: &str, bytes: impl AsRef<[u8]>) -> String {
    let path = folder.join(name);
    fs::write(&path, bytes).expect("the temporary folder can be written");
    path.display().to_string()
}

/// Opens a damaged copy of the trained model and gives the error.
fn open_damaged(damage: impl FnOnce(&mut Vec<u8>)) -> String {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let mut bytes = fs::read(model("q4_k")).expect("a test model");
    damage(&mut bytes);
    let file = write(folder.path(), "bad.gguf", bytes);
    error(&["worker", "--listen", "127.0.0.1:0", "--model", &file], 2)
}

#[test]
fn truncated_model_names_the_tensor_and_the_missing_bytes() {
    let text = open_damaged(|bytes| bytes.truncate(1_000_000));
    assert!(text.contains("past the end of the file") && text.contains("truncated"), "{text}");
}

#[test]
fn model_with_truncated_header_is_refused() {
    let text = open_damaged(|bytes| bytes.truncate(5_000));
    assert!(text.contains("header") || text.contains("end"), "{text}");
}

#[test]
fn file_that_is_not_gguf_is_refused() {
    let text = open_damaged(|bytes| bytes[..4].copy_from_slice(b"PK\x03\x04"));
    assert!(text.contains("GGUF"), "{text}");
}

#[test]
fn huge_counts_are_refused_at_once() {
    for at in [8, 16] {
        let started = Instant::now();
        let text = open_damaged(|bytes| bytes[at..at + 8].copy_from_slice(&(1u64 << 60).to_le_bytes()));
        assert!(text.contains("1152921504606846976") || text.contains("1 152 921 504 606 846 976"), "{text}");
        assert!(started.elapsed().as_secs() < 10);
    }
}

#[test]
fn offset_past_the_end_names_the_tensor() {
    let clean = GgufModel::open(model("q4_k")).expect("a test model");
    let name = clean.tensors[3].name.clone();
    let text = open_damaged(|bytes| {
        // After the name: dimension count, dimensions, type, offset.
        let at = bytes.windows(name.len()).position(|part| part == name.as_bytes()).expect("its name")
            + name.len();
        let dimensions = u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes")) as usize;
        let offset = at + 4 + 8 * dimensions + 4;
        bytes[offset..offset + 8].copy_from_slice(&(1u64 << 40).to_le_bytes());
    });
    assert!(text.contains(&name), "{text}");
}

const SCENARIO: &str = "schema: scenario/1
name: test
seed: 1
model: {profile: llama-8b}
context: 64
workload: {prompt: 8, generate: 4}
devices:
  - {name: a, profile: d3}
links:
  default:
    latency: {value: 5 ms, source: test}
    bandwidth: {value: 400 Mbit/s, source: test}
";

#[test]
fn scenario_errors_have_line_and_column() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let with = |more: &str| SCENARIO.replace("generate: 4}", &format!("generate: 4, {more}}}"));
    let drafting = |tokens, acceptance, draft| {
        with(&format!(
            "speculation: {{draft: {{profile: {draft}}}, tokens: {tokens}, acceptance: {{value: {acceptance}, source: t}}}}"
        ))
    };
    let cases = [
        ("unknown.yaml", SCENARIO.replace("seed: 1", "sede: 1"), "unknown field `sede`", ":3:1"),
        ("bare.yaml", SCENARIO.replace("value: 5 ms", "value: 5"), "with its unit", ":11:"),
        ("duplicate.yaml", SCENARIO.replace("seed: 1", "seed: 1\nseed: 2"), "duplicate", ":4:1"),
        ("unit.yaml", SCENARIO.replace("400 Mbit/s", "400 MB"), "`MB` is not a unit of a rate", ":12:"),
        (
            "other.yaml",
            SCENARIO.replace("scenario/1", "plan/1"),
            "this is not a scenario/1 document",
            "other.yaml",
        ),
        (
            "newer.yaml",
            SCENARIO.replace("scenario/1", "scenario/2"),
            "which this release does not read",
            "newer.yaml",
        ),
        ("slip.yaml", SCENARIO.replace("workload:", "worklaod:"), "hint:  did you mean `workload`?", ":6:1"),
        ("nobody.yaml", SCENARIO.replace("profile: d3", "profile: d9"), "d9", "nobody.yaml, `profile` of `"),
        (
            "nowhere.yaml",
            SCENARIO.replace("profile: d3", "profile: d3, address: 192.168.1.7"),
            "nobody listens at `192.168.1.7`",
            "nowhere.yaml",
        ),
        ("words.yaml", SCENARIO.replace("seed: 1", "seed: one"), "a whole number, 0 or more", ":3:"),
        ("none.yaml", with("sequences: 0"), "`workload.sequences` is 0", "none.yaml"),
        ("many.yaml", with("sequences: 1000000000"), "it must be 1 to 1024", "many.yaml"),
        ("batch.yaml", with("micro_batch: 0"), "`workload.micro_batch` is 0", "batch.yaml"),
        (
            "drafts.yaml",
            drafting("0", "70 %", "llama-1b"),
            "`workload.speculation.tokens` is 0",
            "drafts.yaml",
        ),
        ("sure.yaml", drafting("5", "101 %", "llama-1b"), "a share is 0 % to 100 %", "sure.yaml"),
        ("share.yaml", drafting("5", "0.7", "llama-1b"), "with its unit", ":6:"),
        ("family.yaml", drafting("5", "70 %", "1b"), "a vocabulary of 32000", ""),
        ("drafter.yaml", drafting("5", "70 %", "9b"), "no model `9b`", ""),
        ("long.yaml", SCENARIO.replace("context: 64", "context: 8"), "12 tokens", "long.yaml"),
    ];
    for (name, text, what, place) in cases {
        let file = write(folder.path(), name, text);
        let text = error(&["plan", &file], 2);
        assert!(text.contains(what) && text.contains(place), "{name}: {text}");
    }
}

#[test]
fn plan_that_does_not_cover_the_model_is_refused() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let text = plan("q4_k", &[2, 2], &["127.0.0.1:1"], 64).replace("rounds: 2", "rounds: 1");
    let file = write(folder.path(), "plan.yaml", text);
    let text = error(&["execute", &file, "--model", &model("q4_k"), "--prompt", "And"], 2);
    assert!(text.contains("1 rounds cover 4 of the model's 8 layers"), "{text}");
}

#[test]
fn plan_for_another_model_is_refused() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let file = write(folder.path(), "plan.yaml", plan("q4_k", &[8], &[], 64));
    let text = error(&["execute", &file, "--model", &model("q8_0"), "--prompt", "And"], 2);
    assert!(text.contains("another model"), "{text}");
}

#[test]
fn worker_with_another_model_is_named() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let worker = Worker::start(&model("q8_0"));
    let file = write(folder.path(), "plan.yaml", plan("q4_k", &[4, 4], &[&worker.address], 64));
    let text = error(&["execute", &file, "--model", &model("q4_k"), "--prompt", "And"], 2);
    assert!(text.contains("worker `d1` has another model"), "{text}");
}

#[test]
fn port_in_use_is_refused() {
    let worker = Worker::start(&model("q4_k"));
    let text = error(&["worker", "--listen", &worker.address, "--model", &model("q4_k")], 1);
    assert!(text.contains("cannot listen at") && text.contains("no other program uses"), "{text}");
}

#[test]
fn wrong_address_gets_an_example() {
    for wrong in ["9001", "laptop", "127.0.0.1:99999"] {
        for flags in [["worker", "--model", "m.gguf", "--listen"], ["profile", "--name", "n", "--peer"]] {
            let text = error(&[&flags[..], &[wrong]].concat(), 2);
            assert!(text.contains("write HOST:PORT, as 127.0.0.1:9001"), "{text}");
        }
    }
}

#[test]
fn model_name_instead_of_a_file_gets_a_hint() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let file = write(folder.path(), "s.yaml", SCENARIO);
    let text = error(&["plan", &file, "--model", "llama-8b"], 2);
    assert!(text.contains("`model: {profile: llama-8b}`"), "{text}");
}

#[test]
fn inputs_are_not_overwritten() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let file = write(folder.path(), "s.yaml", SCENARIO);
    let weights = model("q4_k");
    let profile =
        write(folder.path(), "own.yaml", hearth_profiles::device::shipped("d3").expect("a device").to_yaml());
    let named = write(folder.path(), "named.yaml", SCENARIO.replace("d3", "own.yaml"));
    let later = write(folder.path(), "run.plan-1.yaml", plan("q4_k", &[4], &[], 4096));
    let (trace, device) = (folder.path().join("run.trace").display().to_string(), format!("one={profile}"));
    let commands: [&[&str]; 9] = [
        &["plan", &file, "-o", &file],
        &["plan", &file, "--model", &weights, "-o", &weights],
        &["plan", &named, "-o", &profile],
        &["simulate", &file, "--trace", &file],
        &["sweep", &file, "--vary", "seed=1,2", "-o", &file],
        &["sweep", &file, "--vary", "seed=1,2", "-o", &trace, "--chart", &trace],
        &["sweep", "merge", &file, "-o", &file],
        &["execute", &later, "--model", &weights, "--prompt", "a", "--trace", &trace],
        &["init", &profile, "--device", &device, "--force"],
    ];
    let before = [&file, &profile, &later].map(|path| fs::read(path).expect("it is there"));
    for command in commands {
        let text = error(command, 2);
        assert!(
            text.contains("would be overwritten")
                || text.contains("would be written to this file")
                || text.contains("would overwrite"),
            "{command:?}: {text}"
        );
    }
    assert_eq!([&file, &profile, &later].map(|path| fs::read(path).expect("it is there")), before);
}

#[test]
#[cfg(unix)]
fn file_name_may_be_invalid_utf8() {
    use std::os::unix::ffi::OsStrExt;
    let name = std::ffi::OsStr::from_bytes(b"\xff.yaml");
    let output = hearth(&["lint"]).arg(name).output().expect("it runs");
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(2) && text.contains("error: "), "{text}");
}

#[test]
fn text_may_begin_with_gguf_but_a_model_is_refused() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let text = write(folder.path(), "prompts", "GGUF is a file format");
    let alone = write(folder.path(), "plan.yaml", plan("q4_k", &[4], &[], 4096));
    let (weights, tokens) = (model("q4_k"), ["--tokens", "1"]);
    let ask = |prompts: &str| {
        run(&[&["execute", &alone, "--model", &weights, "--prompts", prompts][..], &tokens].concat())
    };
    let said = ask(&text);
    assert!(said.status.success(), "{}", String::from_utf8_lossy(&said.stderr));
    assert!(String::from_utf8_lossy(&ask(&weights).stderr).contains("this is a model"));
}

#[test]
fn missing_argument_is_named_in_json() {
    let text = run(&["--json", "profile", "--from-trace", "run.trace"]).stderr;
    let said: serde_json::Value = serde_json::from_slice(&text).expect("one JSON document");
    assert!(said["error"]["what"].as_str().is_some_and(|what| what.contains("--predicted")), "{said}");
}

#[test]
fn address_beyond_loopback_needs_a_key() {
    let text = error(&["worker", "--listen", "0.0.0.0:0", "--model", &model("q4_k")], 2);
    assert!(text.contains("0.0.0.0:0") && text.contains("key"), "{text}");
}

#[test]
fn dead_worker_is_named_within_its_deadline() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (first, mut second) = (Worker::start(&model("q4_k")), Worker::start(&model("q4_k")));
    let addresses = [first.address.as_str(), second.address.as_str()];
    let file = write(folder.path(), "plan.yaml", plan("q4_k", &[2, 1, 1], &addresses, 4096));
    let arguments = [
        "execute",
        &file,
        "--model",
        &model("q4_k"),
        "--prompt",
        "And",
        "--tokens",
        "4000",
        "--ignore-end",
        "--give-up",
    ];
    let head =
        hearth(&arguments).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().expect("the head starts");
    std::thread::sleep(Duration::from_millis(1500));
    let killed = Instant::now();
    second.kill();
    let output = head.wait_with_output().expect("the head ends");
    let took = killed.elapsed();
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(3), "{text}");
    assert!(text.contains("worker `d2` is gone"), "{text}");
    println!("noticed after {} ms: {text}", took.as_millis());
    assert!(took.as_secs() < 10, "a deadline of 2 s, on a busy machine");
}

#[test]
fn interrupted_head_exits_with_a_silent_ring() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let worker = Worker::start(&model("q4_k"));
    let file = write(folder.path(), "plan.yaml", plan("q4_k", &[4, 4], &[&worker.address], 4096));
    let arguments =
        ["execute", &file, "--model", &model("q4_k"), "--prompt", "And", "--tokens", "4000", "--ignore-end"];
    let head =
        hearth(&arguments).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().expect("the head starts");
    std::thread::sleep(Duration::from_secs(1));
    worker.signal("STOP");
    let interrupted = std::process::Command::new("kill").args(["-INT", &head.id().to_string()]).status();
    assert!(interrupted.is_ok_and(|status| status.success()));
    let started = Instant::now();
    let output = head.wait_with_output().expect("the head ends");
    worker.signal("CONT");
    assert!(started.elapsed().as_secs() < 8, "it ended after {} s", started.elapsed().as_secs());
    assert!(!output.status.success());
}

#[test]
fn context_larger_than_memory_is_refused() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let file = write(folder.path(), "plan.yaml", plan("q4_k", &[8], &[], 4_000_000_000));
    let text = error(&["execute", &file, "--model", &model("q4_k"), "--prompt", "And"], 2);
    assert!(text.contains("key-value cache") && text.contains("smaller `context`"), "{text}");
}

#[test]
fn binary_input_is_refused() {
    assert!(error(&["simulate", &model("q4_k")], 2).contains("this is a model"));
    let folder = tempfile::tempdir().expect("a temporary folder");
    let file = write(folder.path(), "picture.yaml", b"schema: \xff\xd8");
    assert!(error(&["simulate", &file], 2).contains("byte 9 is not UTF-8"));
}
