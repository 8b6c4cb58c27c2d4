//! Tests of `--verify`: a device with a damaged model file refuses to compute.

use std::fs;
use std::path::Path;

use hearth_profiles::Document;
use hearth_ring::LocalModel;
use hearth_schema::Plan;
use hearth_schema::plan::WeightDigests;

use crate::folder::{Folder, scenario_yaml};
use crate::processes::{
    Head, PROMPT, Worker, assert_rejected, execute_arguments, model_path, run_failing_with_code, run_json,
    run_successfully, run_with_code,
};

fn digests() -> WeightDigests {
    let model = LocalModel::open(Path::new(&model_path("q4_k"))).expect("a model");
    model.weights.compute_digests(2, None, &|_, _| true).expect("it can be read")
}

/// Writes a plan with digests of the weights.
fn write_plan(folder: &Folder, windows: &[u32], addresses: &[&str]) -> String {
    let path = folder.write_plan(windows, addresses, 300);
    let mut plan = folder.read_plan("plan.yaml");
    plan.model.weight_digests = Some(digests());
    fs::write(&path, plan.to_yaml()).expect("written");
    path
}

/// Writes a copy of the model in which the quantised weights of a layer are wrong, except at the start of the tensor,
/// which the model digest covers.
fn write_damaged_model(folder: &Folder, layer: u32) -> String {
    let mut bytes = fs::read(model_path("q4_k")).expect("a model");
    let model = LocalModel::open(Path::new(&model_path("q4_k"))).expect("a model");
    let tensor = model.weights.model().tensor(&format!("blk.{layer}.ffn_down.weight")).expect("a tensor");
    let weights = &mut bytes[tensor.offset as usize..][..tensor.bytes.0 as usize];
    // A block of the format has 16 bytes of scales and 128 bytes of weights; the scales stay finite.
    for block in weights.chunks_exact_mut(144).skip(4096 / 144 + 1) {
        block[16..].iter_mut().for_each(|pair| *pair ^= 0x77);
    }
    folder.write("damaged.gguf", bytes)
}

fn verifying_worker(model: &str) -> Worker {
    Worker::with_flags(&["--listen", "127.0.0.1:0", "--model", model, "--verify"])
}

#[test]
fn plan_has_digests_only_with_the_flag() {
    let folder = Folder::new();
    let scenario = scenario_yaml("  - {name: a, profile: d2}\n  - {name: b, profile: d2}");
    let shipped = folder.write("shipped.yaml", &scenario);
    let file = format!("{{file: '{}'}}", model_path("q4_k"));
    let scenario = folder.write("scenario.yaml", scenario.replace("{profile: llama-8b}", &file));
    run_successfully(&["plan", &scenario, "-o", &folder.path_of("without.yaml")]);
    run_successfully(&["plan", &scenario, "--hash-weights", "-o", &folder.path_of("with.yaml")]);
    let [without, mut with] = ["without.yaml", "with.yaml"].map(|name| folder.read_plan(name));
    assert!(!folder.read("without.yaml").contains("weight_digests"));
    assert_eq!(with.model.weight_digests.take(), Some(digests()));
    assert_eq!(with, without);
    assert_rejected(&["plan", &shipped, "--hash-weights"], &["needs a model file", "--model GGUF"]);
}

#[test]
fn damaged_model_on_the_head_is_refused() {
    let folder = Folder::new();
    let (plan, damaged) = (write_plan(&folder, &[8], &[]), write_damaged_model(&folder, 5));
    let arguments = |model: &str, more: &[&str]| {
        execute_arguments(&plan, model, &[&["--prompt", PROMPT, "--tokens", "20"], more].concat())
    };
    let right = run_json(&arguments(&model_path("q4_k"), &["--verify"]));
    let wrong = run_json(&arguments(&damaged, &[]));
    assert_ne!(right["text"], wrong["text"], "the damage changes the text");
    let parts = ["do not match the weights of layer 5", "damaged.gguf", "download the model again"];
    assert_rejected(&arguments(&damaged, &["--verify"]), &parts);
    let without = folder.write_plan(&[8], &[], 300);
    let arguments = execute_arguments(&without, &damaged, &["--prompt", PROMPT, "--verify"]);
    assert_rejected(&arguments, &["has no digests", "--hash-weights"]);
}

#[test]
fn head_names_the_worker_whose_model_is_damaged() {
    let folder = Folder::new();
    let worker = verifying_worker(&write_damaged_model(&folder, 5));
    let run = |plan: &str| {
        let arguments = execute_arguments(plan, &model_path("q4_k"), &["--prompt", PROMPT, "--verify"]);
        run_failing_with_code(&arguments, 1)
    };
    let error = run(&write_plan(&folder, &[4, 4], &[&worker.address]));
    for part in ["`d1` refused", "layer 5", "damaged.gguf", "download the model again"] {
        assert!(error.contains(part), "{part}: {error}");
    }
    // The head computes the damaged layer, and its own file is right.
    let plan = write_plan(&folder, &[6, 2], &[&worker.address]);
    let arguments = ["--prompt", PROMPT, "--tokens", "5", "--verify"];
    run_json(&execute_arguments(&plan, &model_path("q4_k"), &arguments));
    let without = folder.write_plan(&[4, 4], &[&worker.address], 300);
    let arguments = execute_arguments(&without, &model_path("q4_k"), &["--prompt", PROMPT]);
    let error = run_failing_with_code(&arguments, 1);
    assert!(error.contains("`d1` refused") && error.contains("--hash-weights"), "{error}");
}

#[test]
fn fetched_layers_are_verified() {
    let folder = Folder::new();
    let flags = ["--listen", "127.0.0.1:0", "--fetch", &folder.path_of("fetched"), "--verify"];
    let worker = Worker::with_flags(&flags);
    let plan = write_plan(&folder, &[4, 4], &[&worker.address]);
    let arguments = execute_arguments(&plan, &model_path("q4_k"), &["--prompt", PROMPT, "--tokens", "5"]);
    run_successfully(&arguments);
    let mut plan = Plan::from_yaml(&folder.read("plan.yaml")).expect("a plan");
    let digests = plan.model.weight_digests.as_mut().expect("digests");
    digests.layers.swap(6, 7);
    folder.write("plan.yaml", plan.to_yaml());
    let error = run_with_code(&arguments, 1).1;
    assert!(error.contains("the weights of layers 6, 7") && error.contains("fetched"), "{error}");
}

#[test]
fn ring_continues_without_a_worker_that_gets_a_damaged_layer() {
    let folder = Folder::new();
    // The damaged layer is not among the first layers of this worker.
    let damaged = verifying_worker(&write_damaged_model(&folder, 6));
    let expected = Head::run(&write_plan(&folder, &[8], &[]), 120, &[]).tokens;
    // The strategy `even` makes plans without digests, and the head adds them.
    let devices = ["d0", "d1", "d2"].map(|name| format!("  - {{name: {name}, profile: d4}}")).join("\n");
    let even = scenario_yaml(&devices).replace("llama-8b", "tiny") + "planner: {strategy: even}\n";
    let even = folder.write("scenario.yaml", even);
    for flags in [&["--verify"][..], &["--verify", "--scenario", &even]] {
        let mut other = verifying_worker(&model_path("q4_k"));
        let plan = write_plan(&folder, &[2, 2, 4], &[&damaged.address, &other.address]);
        let mut head = Head::start(&plan, expected.len(), flags);
        head.wait_for_tokens(10);
        other.kill();
        let observed = head.finish();
        assert_eq!(observed.exit_code, Some(0), "{}", observed.other_output);
        assert_eq!(observed.tokens, expected);
        assert!(observed.other_output.contains("the weights of layer 6"), "{}", observed.other_output);
    }
}
