//! Tests that invalid input gets a clear error, and never causes a panic, a hang or a wrong result.

use std::fs;
use std::time::Instant;

use hearth_profiles::Document;
use hearth_profiles::gguf::GgufModel;

use crate::folder::{Folder, scenario_yaml};
use crate::processes::{
    Worker, assert_rejected, execute_arguments, model_path, parse_json, plan_yaml, run_failing_with_code,
    run_successfully, run_with_code, scenario_path, test_data_path,
};

#[test]
fn damaged_model_is_rejected_at_once() {
    let clean = GgufModel::open(model_path("q4_k")).expect("a test model");
    let name = clean.tensors[3].name.clone();
    let bytes = fs::read(model_path("q4_k")).expect("a test model");
    // The name is followed by the dimension count, the dimensions, the type and the offset.
    let name_at = bytes.windows(name.len()).position(|part| part == name.as_bytes());
    let at = name_at.expect("its name") + name.len();
    let dimensions = u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes")) as usize;
    let offset = at + 4 + 8 * dimensions + 4;
    let with = |at: usize, part: &[u8]| {
        let mut damaged = bytes.clone();
        damaged[at..at + part.len()].copy_from_slice(part);
        damaged
    };
    let huge = (1u64 << 60).to_le_bytes();
    let cases: [(Vec<u8>, &[&str]); 6] = [
        (bytes[..1_000_000].to_vec(), &["past the end of the file", "truncated"]),
        (bytes[..5_000].to_vec(), &["the file ends inside", "truncated"]),
        (with(0, b"PK\x03\x04"), &["GGUF"]),
        (with(8, &huge), &["1 152 921 504 606 846 976"]),
        (with(16, &huge), &["1 152 921 504 606 846 976"]),
        (with(offset, &(1u64 << 40).to_le_bytes()), &[&name]),
    ];
    let folder = Folder::new();
    for (damaged, parts) in cases {
        let start = Instant::now();
        let file = folder.write("bad.gguf", damaged);
        assert_rejected(&["worker", "--listen", "127.0.0.1:0", "--model", &file], parts);
        assert!(start.elapsed().as_secs() < 10);
    }
}

fn one_device() -> String {
    scenario_yaml("  - {name: a, profile: d3}")
}

#[test]
fn scenario_errors_have_line_and_column() {
    let good = one_device();
    let with = |from: &str, to: &str| {
        assert!(good.contains(from), "{from}");
        good.replace(from, to)
    };
    let workload = |more: &str| with("generate: 4}", &format!("generate: 4, {more}}}"));
    let drafting = |tokens, acceptance, draft| {
        let acceptance = format!("{{value: {acceptance}, source: t}}");
        let draft = format!("draft: {{profile: {draft}}}, tokens: {tokens}, acceptance: {acceptance}");
        workload(&format!("speculation: {{{draft}}}"))
    };
    let cases = [
        (with("seed: 1", "sede: 1"), "unknown field `sede`", ":3:1"),
        (with("value: 2 ms", "value: 2"), "with its unit", ":11:"),
        (with("seed: 1", "seed: 1\nseed: 2"), "duplicate", ":4:1"),
        (with("400 Mbit/s", "400 MB"), "`MB` is not a unit of a rate", ":12:"),
        (with("scenario/1", "plan/1"), "this is not a scenario/1 document", "s.yaml"),
        (with("scenario/1", "scenario/2"), "which this release does not read", "s.yaml"),
        (with("workload:", "worklaod:"), "hint:  did you mean `workload`?", ":6:1"),
        (with("profile: d3", "profile: d9"), "d9", "s.yaml, `profile` of `"),
        (with("d3", "d3, address: 192.168.1.7"), "`192.168.1.7` is not the address of a worker", "s.yaml"),
        (with("seed: 1", "seed: one"), "a whole number, 0 or more", ":3:"),
        (workload("sequences: 0"), "`workload.sequences` is 0", "s.yaml"),
        (workload("sequences: 1000000000"), "it must be 1 to 1024", "s.yaml"),
        (workload("micro_batch: 0"), "`workload.micro_batch` is 0", "s.yaml"),
        (drafting("0", "70 %", "llama-1b"), "`workload.speculation.tokens` is 0", "s.yaml"),
        (drafting("5", "101 %", "llama-1b"), "it must be 0 % to 100 %", "s.yaml"),
        (drafting("5", "0.7", "llama-1b"), "with its unit", ":6:"),
        (drafting("5", "70 %", "1b"), "a vocabulary of 32000", ""),
        (drafting("5", "70 %", "9b"), "no model `9b`", ""),
        (with("context: 512", "context: 8"), "20 tokens", "s.yaml"),
    ];
    let folder = Folder::new();
    for (text, what, place) in cases {
        assert_rejected(&["plan", &folder.write("s.yaml", text)], &[what, place]);
    }
}

#[test]
fn plan_that_does_not_fit_the_model_or_memory_is_rejected() {
    let folder = Folder::new();
    let uncovered = plan_yaml("q4_k", &[2, 2], &["127.0.0.1:1"], 64).replace("rounds: 2", "rounds: 1");
    for (text, format, parts) in [
        (uncovered, "q4_k", &["1 rounds cover 4 of the model's 8 layers"][..]),
        (plan_yaml("q4_k", &[8], &[], 64), "q8_0", &["a different model"]),
        (plan_yaml("q4_k", &[8], &[], 4_000_000_000), "q4_k", &["KV cache", "smaller `context`"]),
    ] {
        let file = folder.write("plan.yaml", text);
        assert_rejected(&execute_arguments(&file, &model_path(format), &["--prompt", "And"]), parts);
    }
    let worker = Worker::start(&model_path("q8_0"));
    let file = folder.write_plan(&[4, 4], &[&worker.address], 64);
    let parts = ["worker `d1` has a different model"];
    assert_rejected(&execute_arguments(&file, &model_path("q4_k"), &["--prompt", "And"]), &parts);
}

#[test]
fn port_in_use_is_rejected() {
    let worker = Worker::start(&model_path("q4_k"));
    let text =
        run_failing_with_code(&["worker", "--listen", &worker.address, "--model", &model_path("q4_k")], 1);
    assert!(text.contains("cannot listen on") && text.contains("a free port"), "{text}");
}

#[test]
fn invalid_arguments_are_rejected_with_a_hint() {
    let (folder, weights) = (Folder::new(), model_path("q4_k"));
    let file = folder.write("s.yaml", one_device());
    let binary = folder.write("picture.yaml", b"schema: \xff\xd8");
    let (phone, name) = (scenario_path("soc/llama-8b-256-tensor"), "n".repeat(64));
    let text = test_data_path("models/README.md").display().to_string();
    let worker = ["worker", "--listen", "127.0.0.1:0", "--model", &weights];
    let announced = [&worker[..], &["--announce", "always", "--name", &name]].concat();
    let cases: [(&[&str], &[&str]); 8] = [
        (&["plan", &file, "--model", "llama-8b"], &["`model: {profile: llama-8b}`"]),
        (&["worker", "--listen", "0.0.0.0:0", "--model", &weights], &["0.0.0.0:0", "key"]),
        (&["simulate", &weights], &["this file is a model"]),
        (&["simulate", &binary], &["byte 9 is not UTF-8"]),
        (&["simulate", &phone, "--strategy", "hetero-tensor"], &["soc: {strategy: hetero-tensor}"]),
        (&["bench", "no-such.gguf", "--peer", "none"], &["no-such.gguf"]),
        (&["bench", &text, "--peer", "none"], &["not a GGUF file"]),
        (&announced, &["1 to 63 bytes", "--name"]),
    ];
    for (arguments, parts) in cases {
        assert_rejected(arguments, parts);
    }
    for wrong in ["9001", "laptop", "127.0.0.1:99999"] {
        for flags in [["worker", "--model", "m.gguf", "--listen"], ["profile", "--name", "n", "--peer"]] {
            assert_rejected(&[&flags[..], &[wrong]].concat(), &["write HOST:PORT, such as 127.0.0.1:9001"]);
        }
    }
}

#[test]
fn inputs_are_not_overwritten() {
    let folder = Folder::new();
    let file = folder.write("s.yaml", one_device());
    let weights = model_path("q4_k");
    let device = hearth_profiles::device::shipped_profile("d3").expect("a device");
    let profile = folder.write("own.yaml", device.to_yaml());
    let named = folder.write("named.yaml", one_device().replace("d3", "own.yaml"));
    let later = folder.write("run.plan-1.yaml", plan_yaml("q4_k", &[4], &[], 4096));
    let (trace, device) = (folder.path_of("run.trace"), format!("one={profile}"));
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
    let inputs = || ["s.yaml", "own.yaml", "run.plan-1.yaml"].map(|name| folder.read(name));
    let before = inputs();
    for command in commands {
        let text = run_failing_with_code(command, 2);
        let reasons = ["would be overwritten", "would be written to this file", "would overwrite"];
        assert!(reasons.iter().any(|reason| text.contains(reason)), "{command:?}: {text}");
    }
    assert_eq!(inputs(), before);
}

#[test]
#[cfg(unix)]
fn file_name_may_be_invalid_utf8() {
    use std::os::unix::ffi::OsStrExt;
    let name = std::ffi::OsStr::from_bytes(b"\xff.yaml");
    run_failing_with_code(&["lint".as_ref(), name], 2);
}

#[test]
fn text_may_begin_with_gguf_but_a_model_is_rejected() {
    let folder = Folder::new();
    let prompts = folder.write("prompts", "GGUF is a file format");
    let plan = folder.write_plan(&[4], &[], 4096);
    let weights = model_path("q4_k");
    let flags = |file| execute_arguments(&plan, &weights, &["--tokens", "1", "--prompts", file]);
    run_successfully(&flags(&prompts));
    assert_rejected(&flags(&weights), &["this file is a model"]);
}

#[test]
fn errors_are_json_with_json() {
    for (arguments, place, what) in [
        (&["simulate", "nowhere.yaml", "--json"][..], Some("nowhere.yaml"), "cannot"),
        (&["simulate", "--json", "--no-such-flag"], None, "--no-such-flag"),
        (&["--json", "profile", "--from-trace", "run.trace"], None, "--predicted"),
        (&["--json"], None, "subcommand"),
    ] {
        let (_, text) = run_with_code(arguments, 2);
        let failure = &parse_json(&text)["error"];
        assert_eq!((failure["code"].as_i64(), failure["where"].as_str()), (Some(2), place), "{text}");
        assert!(failure["what"].as_str().is_some_and(|text| text.contains(what)), "{text}");
        assert!(failure["hint"].is_string(), "{text}");
    }
    assert!(run_successfully(&["--json", "--help"]).contains("Exit codes"));
}
