//! Tests that plans with GPU layers give the same tokens as plans without GPU layers.
//!
//! Any adapter is used, including a software driver. Without an adapter the tests print `SKIPPED` and pass.

use std::fs;

use serde_json::Value;

use crate::folder::Folder;
use crate::processes::{
    Worker, execute_arguments, expect_array, expect_number, hearth_command, model_path, parse_json,
    plan_yaml, plan_yaml_for_model, run_command, run_successfully, run_with_code, test_data_path,
};

/// Returns the GPU adapters as JSON. Standard error is not checked, because GPU libraries may print to it.
fn adapters() -> Value {
    parse_json(&run_successfully(&["gpu", "--json"]))
}

/// Returns the GPU adapters; `None` if this machine has none, so that the test must be skipped.
fn adapters_for(test: &str) -> Option<Value> {
    let found = Some(adapters()).filter(|adapters| !expect_array(adapters).is_empty());
    if found.is_none() {
        eprintln!("SKIPPED {test}: no Vulkan, Metal or DX12 adapter");
    }
    found
}

#[test]
fn gpus_are_listed() {
    let (text, adapters) = (run_successfully(&["gpu"]), adapters());
    match expect_array(&adapters).first() {
        None => assert!(text.contains("layers are computed on the CPU"), "{text}"),
        Some(first) => {
            assert!(text.contains(first["name"].as_str().expect("a name")), "{text}");
            assert!(first["kernels"]["slices"].as_u64().expect("a choice") > 0);
        }
    }
}

#[test]
fn tuned_kernels_are_saved() {
    let Some(_) = adapters_for("tuned_kernels_are_saved") else { return };
    let folder = Folder::new();
    let kernels = |flags: &[&str]| {
        let mut command = hearth_command(&[&["gpu", "--json"], flags].concat());
        let (stdout, _) = run_command(command.env("XDG_CACHE_HOME", folder.path()), 0);
        parse_json(&stdout)[0]["kernels"].clone()
    };
    assert_eq!(kernels(&[])["choice"], "usual");
    let tuned = kernels(&["--tune"]);
    for key in ["product_us", "naive_product_us"] {
        let micros = expect_number(&tuned[key]);
        assert!(micros.is_finite() && micros > 0.0, "{key}: {tuned}");
    }
    let remembered = kernels(&[]);
    for key in ["choice", "layout", "slices", "splits"] {
        assert_eq!(remembered[key], tuned[key], "{key}");
    }
    assert_eq!(remembered["choice"], "measured");
    // An invalid line is ignored.
    folder.write("hearth/gpu-kernels", "diagonal 8 8 8 4 x\n\u{fffd}");
    assert_eq!(kernels(&[])["choice"], "usual");
}

/// Returns a golden prompt and its expected tokens, up to the first token whose two best logits are close.
fn golden(file: &str) -> (String, Vec<u64>) {
    let text = fs::read_to_string(test_data_path("models/golden.json")).expect("the golden texts");
    let golden = parse_json(&text);
    let first = &golden["files"][file][0];
    let tokens = expect_array(&first["greedy_ids"]).iter().filter_map(Value::as_u64);
    let margins = expect_array(&first["margins"]).iter().filter_map(Value::as_f64);
    let sure = tokens.zip(margins).take_while(|(_, margin)| *margin > 0.05).map(|(token, _)| token);
    (first["prompt"].as_str().expect("a prompt").to_owned(), sure.take(24).collect())
}

/// Runs a plan with GPU layers and returns the generated tokens.
fn tokens_of(plan: &str, format: &str, prompt: &str, count: usize, flags: &[&str]) -> Vec<u64> {
    let folder = Folder::new();
    let path = folder.write("plan.yaml", plan);
    let count = count.to_string();
    let all = [&["--prompt", prompt, "--tokens", &count, "--json"], flags].concat();
    let result = parse_json(&run_with_code(&execute_arguments(&path, &model_path(format), &all), 0).0);
    assert!(expect_number(&result["terms_ms"]["gpu"]) > 0.0, "{result}");
    expect_array(&result["token_ids"]).iter().filter_map(Value::as_u64).collect()
}

fn all_on_gpu(format: &str) -> String {
    let text = plan_yaml(format, &[8], &[], 128).replace("gpu_layers: 0", "gpu_layers: 8");
    text.replace("kv_cache: f32", "kv_cache: f32\noutput: gpu")
}

#[test]
fn gpu_ring_gives_the_golden_tokens() {
    let Some(_) = adapters_for("gpu_ring_gives_the_golden_tokens") else { return };
    let (prompt, wanted) = golden("psalm-7m-q4_k.gguf");
    assert!(wanted.len() > 8, "{wanted:?}");
    let worker = Worker::start(&model_path("q4_k"));
    // Two rounds. The head has windows of three layers, two of them on its GPU; the worker has one layer, on its GPU.
    let text = plan_yaml("q4_k", &[3, 1], &[&worker.address], 128);
    let [two, one] = ["gpu_layers: 2", "gpu_layers: 1"];
    let text = text.replacen("gpu_layers: 0", two, 1).replacen("gpu_layers: 0", one, 1);
    assert_eq!(tokens_of(&text, "q4_k", &prompt, wanted.len(), &[]), wanted);
}

#[test]
fn gpu_head_gives_the_golden_tokens() {
    let Some(_) = adapters_for("gpu_head_gives_the_golden_tokens") else { return };
    let (prompt, wanted) = golden("psalm-7m-q8_0.gguf");
    assert_eq!(tokens_of(&all_on_gpu("q8_0"), "q8_0", &prompt, wanted.len(), &[]), wanted);
}

#[test]
fn converted_weights_give_most_golden_tokens() {
    let Some(_) = adapters_for("converted_weights_give_most_golden_tokens") else { return };
    let (prompt, wanted) = golden("psalm-7m-f16.gguf");
    let count = wanted.len().min(8);
    for weights in ["q8", "8/4/4"] {
        let tokens = tokens_of(&all_on_gpu("f16"), "f16", &prompt, count, &["--gpu-weights", weights]);
        assert_eq!(tokens.len(), count);
        // After the first different token the texts diverge, so only the tokens before it are compared.
        let same = tokens.iter().zip(&wanted).take_while(|(own, wanted)| own == wanted).count();
        assert!(same >= 4, "{weights}: {same} of {count} tokens");
    }
}

/// There is no GPU kernel for Q2_K, so that the GPU stores these weights in f16.
#[test]
fn weight_type_without_a_gpu_kernel_is_computed() {
    let Some(_) = adapters_for("weight_type_without_a_gpu_kernel_is_computed") else { return };
    let folder = Folder::new();
    let file = folder.path_of("model.gguf");
    run_successfully(&["synth", "--preset", "tiny", "--quant", "q2_k", "-o", &file]);
    let text = plan_yaml_for_model(&file, &[16], &[], 64).replace("gpu_layers: 0", "gpu_layers: 1");
    let plan = folder.write("plan.yaml", text);
    let tokens = run_successfully(&execute_arguments(&plan, &file, &["--prompt", "a", "--tokens", "1"]));
    assert!(tokens.contains("1 generated tokens"), "{tokens}");
}
