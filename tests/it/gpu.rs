//! A plan with layers on a GPU gives the tokens of one without.
//!
//! On whatever adapter there is; a software driver will do. Without one the test says `SKIPPED` and passes.

use std::fs;

use serde_json::Value;

use crate::processes::{Worker, data, error, hearth, model, plan, run};

/// What `hearth gpu` knows.
fn adapters() -> Vec<Value> {
    let output = run(&["gpu", "--json"]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let list: Value = serde_json::from_slice(&output.stdout).expect("one JSON document");
    list.as_array().expect("a list").clone()
}

/// Whether this test cannot run here, which is said.
fn is_skipped(test: &str) -> bool {
    let skipped = adapters().is_empty();
    if skipped {
        eprintln!("SKIPPED {test}: no Vulkan, Metal or DX12 adapter");
    }
    skipped
}

#[test]
fn gpus_are_listed() {
    let output = run(&["gpu"]);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let list = adapters();
    match list.first() {
        None => assert!(text.contains("layers are computed on processors"), "{text}"),
        Some(first) => {
            assert!(text.contains(first["name"].as_str().expect("a name")), "{text}");
            assert!(first["kernels"]["slices"].as_u64().expect("a choice") > 0);
        }
    }
}

#[test]
fn tuned_kernels_are_remembered() {
    if is_skipped("tuned_kernels_are_remembered") {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let kernels = |arguments: &[&str]| {
        let output = hearth(arguments).env("XDG_CACHE_HOME", folder.path()).output().expect("it starts");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let list: Value = serde_json::from_slice(&output.stdout).expect("one JSON document");
        list[0]["kernels"].clone()
    };
    assert_eq!(kernels(&["gpu", "--json"])["choice"], "usual");
    let tuned = kernels(&["gpu", "--tune", "--json"]);
    for key in ["product_us", "naive_product_us"] {
        let micros = tuned[key].as_f64().expect("what a product takes");
        assert!(micros.is_finite() && micros > 0.0, "{key}: {tuned}");
    }
    let remembered = kernels(&["gpu", "--json"]);
    for key in ["choice", "layout", "slices", "splits"] {
        assert_eq!(remembered[key], tuned[key], "{key}");
    }
    assert_eq!(remembered["choice"], "measured");
    // What is not understood is no choice.
    fs::write(folder.path().join("hearth/gpu-kernels"), "diagonal 8 8 8 4 x\n\u{fffd}").expect("a file");
    assert_eq!(kernels(&["gpu", "--json"])["choice"], "usual");
}

/// The golden tokens of a prompt, as far as the choice is no near tie.
fn golden(file: &str) -> (String, Vec<u64>) {
    let text = fs::read_to_string(data("models/golden.json")).expect("the golden texts");
    let golden: Value = serde_json::from_str(&text).expect("JSON");
    let first = &golden["files"][file][0];
    let tokens = first["greedy_ids"].as_array().expect("tokens").iter().filter_map(Value::as_u64);
    let margins = first["margins"].as_array().expect("margins").iter().filter_map(Value::as_f64);
    let sure = tokens.zip(margins).take_while(|(_, margin)| *margin > 0.05).map(|(token, _)| token);
    (first["prompt"].as_str().expect("a prompt").to_owned(), sure.take(24).collect())
}

/// The tokens that a plan with layers on a GPU gives, so many, with flags besides.
fn tokens_of(plan: &str, format: &str, prompt: &str, count: usize, flags: &[&str]) -> Vec<u64> {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("plan.yaml").display().to_string();
    fs::write(&path, plan).expect("a plan");
    let (model, count) = (model(format), count.to_string());
    let arguments = ["execute", &path, "--model", &model, "--prompt", prompt, "--tokens", &count, "--json"];
    let output = run(&[&arguments[..], flags].concat());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let result: Value = serde_json::from_slice(&output.stdout).expect("one JSON document");
    assert!(result["terms_ms"]["gpu"].as_f64().expect("a term") > 0.0, "{result}");
    result["token_ids"].as_array().expect("tokens").iter().filter_map(Value::as_u64).collect()
}

/// A plan with all layers and the output matrix on the head's GPU.
fn whole(format: &str) -> String {
    let text = plan(format, &[8], &[], 128).replace("gpu_layers: 0", "gpu_layers: 8");
    text.replace("kv_cache: f32", "kv_cache: f32\noutput: gpu")
}

#[test]
fn gpu_ring_gives_the_golden_tokens() {
    if is_skipped("gpu_ring_gives_the_golden_tokens") {
        return;
    }
    let (prompt, wanted) = golden("psalm-7m-q4_k.gguf");
    assert!(wanted.len() > 8, "{wanted:?}");
    let worker = Worker::start(&model("q4_k"));
    // Two rounds: the head has three layers and two of them on its GPU, the worker one, on its GPU.
    let text = plan("q4_k", &[3, 1], &[&worker.address], 128);
    let text =
        text.replacen("gpu_layers: 0", "gpu_layers: 2", 1).replacen("gpu_layers: 0", "gpu_layers: 1", 1);
    assert_eq!(tokens_of(&text, "q4_k", &prompt, wanted.len(), &[]), wanted);
}

#[test]
fn gpu_head_gives_the_golden_tokens() {
    if is_skipped("gpu_head_gives_the_golden_tokens") {
        return;
    }
    let (prompt, wanted) = golden("psalm-7m-q8_0.gguf");
    assert_eq!(tokens_of(&whole("q8_0"), "q8_0", &prompt, wanted.len(), &[]), wanted);
}

#[test]
fn converted_weights_give_most_golden_tokens() {
    if is_skipped("converted_weights_give_most_golden_tokens") {
        return;
    }
    let (prompt, wanted) = golden("psalm-7m-f16.gguf");
    let count = wanted.len();
    for weights in ["q8", "8/4/4"] {
        let flags = ["--gpu-weights", weights, "--ignore-end"];
        let tokens = tokens_of(&whole("f16"), "f16", &prompt, count, &flags);
        assert_eq!(tokens.len(), count);
        // Nothing leads the text back once it went another way, so the first tokens count.
        let same = tokens.iter().zip(&wanted).take_while(|(own, wanted)| own == wanted).count();
        println!("{weights}: {same} of {count} tokens before another");
        assert!(same >= 4, "{weights}: {same} of {count} tokens");
    }
}

#[test]
fn unsupported_gpu_weight_type_is_refused() {
    if is_skipped("unsupported_gpu_weight_type_is_refused") {
        return;
    }
    let folder = tempfile::tempdir().expect("a temporary folder");
    let at = |name: &str| folder.path().join(name).display().to_string();
    let (file, plan) = (at("model.gguf"), at("plan.yaml"));
    let made = run(&["synth", "--preset", "tiny", "--quant", "q2_k", "-o", &file]);
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let opened = hearth_ring::LocalModel::open(std::path::Path::new(&file)).expect("a model");
    let layers = opened.profile.shape.layers.0;
    let text = format!(
        "schema: plan/1\nscenario: {{name: test, digest: 'sha256:0'}}\nmodel: {{name: tiny, digest: '{}', \
         shape_digest: '{}', layers: {layers}}}\nplanner: {{strategy: manual}}\nrounds: 1\ncontext: 64\n\
         kv_cache: f16\ndevices:\n- {{name: a, role: head, window: {layers}, gpu_layers: 1, residency: {{policy: os}}}}\n",
        opened.profile.digest,
        opened.profile.shape_digest()
    );
    fs::write(&plan, text).expect("a plan");
    let said = error(&["execute", &plan, "--model", &file, "--prompt", "a", "--tokens", "1"], 2);
    assert!(said.contains("no GPU kernel for weights of type q2_k") && said.contains("q4_k"), "{said}");
}
