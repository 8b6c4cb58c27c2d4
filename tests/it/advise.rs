//! Tests of `hearth advise` and `hearth model`, and of mixtures of experts.

use serde_json::Value;

use crate::folder::Folder;
use crate::processes::{assert_rejected, expect_array, expect_number, run_json, run_successfully};

const LAPTOP: &str = "laptop=laptop-ddr4-3200,16 GiB,nvme-gen3,linux";
const DESKTOP: &str = "desktop=rtx-3060-12gb,ddr4-3200-dual,32 GiB,nvme-gen3,windows";

fn advice(devices: &[&str]) -> Vec<Value> {
    let list = run_json(&[&["advise"], devices].concat());
    expect_array(&list["models"]).clone()
}

fn find<'a>(models: &'a [Value], name: &str) -> &'a Value {
    models.iter().find(|model| model["model"] == name).unwrap_or_else(|| panic!("no {name}"))
}

#[test]
fn more_devices_run_larger_models() {
    let (laptop, desktop) = (advice(&[LAPTOP]), advice(&[DESKTOP]));
    assert!(laptop.len() >= 60, "{}", laptop.len());
    let speed = |models: &[Value], name: &str| expect_number(&find(models, name)["tokens_per_s"]);
    // 2.5 GB at 24 GB/s, and at 324 GB/s with 36 layers of 77 us.
    assert!((6.0..12.0).contains(&speed(&laptop, "qwen3-4b")));
    assert!((70.0..120.0).contains(&speed(&desktop, "qwen3-4b")));
    // Two thirds of a second for each token of a dense 32B model, a twentieth for a mixture of nearly the same size.
    assert!(speed(&desktop, "qwen3-30b-a3b") > 3.0 * speed(&desktop, "qwen3-32b"));
    assert_eq!(find(&laptop, "llama-3.1-405b")["plan"], Value::Null);
    assert!(find(&laptop, "llama-3.1-405b")["reason"].as_str().is_some_and(|why| why.contains("226 GiB")));
    // The first models are those that are fast enough, in descending order of their class.
    let is_fast = |model: &Value| model["tokens_per_s"].as_f64().is_some_and(|speed| speed >= 5.2);
    assert!(desktop.iter().map(is_fast).is_sorted_by(|one, other| one >= other));
}

#[test]
fn advice_is_text_that_names_the_next_command() {
    let text = run_successfully(&["advise", DESKTOP, LAPTOP, "--network", "cable"]);
    assert!(text.contains("on desktop, laptop, with a context of 4096 tokens"), "{text}");
    assert!(text.contains("best that hearth can run: ") && text.contains("`hearth pull "), "{text}");
    assert!(
        text.contains("hearth builds on Linux for x86-64 only, not yet for `desktop` (Windows)"),
        "{text}"
    );
    assert!(text.lines().all(|line| line.chars().count() <= 170), "{text}");
    let all = run_successfully(&["advise", LAPTOP, "--all"]);
    assert!(all.contains("its weights have 226 GiB, all memory together 11.0 GiB"), "{all}");
    assert_rejected(&["advise", "laptop=rtx3060,16 GiB"], &["did you mean", "rtx-3060"]);
    assert_rejected(&["advise"], &["<NAME=PARTS|SCENARIO>"]);
}

#[test]
fn scenario_can_be_advised() {
    let folder = Folder::new();
    let path = folder.path_of("home.yaml");
    run_successfully(&["init", &path, "--device", LAPTOP, "--context", "2048"]);
    let text = run_successfully(&["advise", &path]);
    assert!(text.contains("on laptop, with a context of 2048 tokens"), "{text}");
}

#[test]
fn models_are_listed_and_shown() {
    let all = run_json(&["model", "list"]);
    assert!(expect_array(&all).len() > 100);
    let found = run_json(&["model", "list", "a3b", "Coder"]);
    assert_eq!(expect_array(&found).len(), 1);
    assert_eq!(found[0]["name"], "qwen3-coder-30b-a3b");
    let text = run_successfully(&["model", "show", "qwen3-30b-a3b"]);
    assert!(text.contains("30.5 B parameters, 3.4 B of them active"), "{text}");
    assert!(text.contains("q4_k_m   17.3 GiB  perplexity +2.8 %"), "{text}");
    assert_rejected(&["model", "show", "qwen3-30b"], &["use one of qwen3-30b-a3b,", "`hearth model list`"]);
    assert_rejected(&["model", "list", "gpt-9"], &["no model has all of these words"]);
}

#[test]
fn mixtures_are_simulated() {
    let folder = Folder::new();
    let path = folder.path_of("home.yaml");
    let init = |model: &str| {
        run_successfully(&["init", &path, "--force", "--model", model, "--device", DESKTOP]);
        run_json(&["simulate", &path, "--warm"])
    };
    let (mixture, dense) = (init("qwen3-30b-a3b"), init("qwen3-32b"));
    let tpot = |run: &Value| expect_number(&run["tpot_ms"]["mean"]);
    // 1.9 of 18.6 GB for a token, of which the CPU reads a part; a dense model reads all of its 19.8 GB.
    assert!(3.0 * tpot(&mixture) < tpot(&dense), "{} {}", tpot(&mixture), tpot(&dense));
    run_successfully(&["init", &path, "--force", "--model", "qwen3-30b-a3b", "--device", LAPTOP]);
    let findings = run_json(&["lint", &path]);
    let codes: Vec<&str> = expect_array(&findings).iter().filter_map(|it| it["code"].as_str()).collect();
    assert!(codes.contains(&"experts-exceed-memory") && !codes.contains(&"not-runnable"), "{codes:?}");
    assert_rejected(
        &["synth", "--preset", "tiny", "--arch", "minimax-m2", "-o", &folder.path_of("m.gguf")],
        &["minimax-m2 models can be planned and simulated, but not yet run"],
    );
    assert_rejected(
        &["plan", &path, "--strategy", "dllama"],
        &["plans of `dllama` for mixtures of experts are not supported"],
    );
}

#[test]
fn mixture_is_written_run_and_split() {
    let folder = Folder::new();
    let path = folder.path_of("m.gguf");
    let base = ["synth", "--preset", "tiny", "--arch", "qwen3moe", "-o", &path];
    let synth = |flags: &[&'static str]| [&base[..], flags].concat();
    assert_rejected(&synth(&["--experts", "0"]), &["`experts.count` is 0"]);
    assert_rejected(
        &synth(&["--experts", "4", "--experts-used", "5"]),
        &["`experts.used` is 5: it must be from 1 to 4"],
    );
    assert_rejected(&synth(&["--experts", "4000000000"]), &["`experts.count` is 4000000000"]);
    run_successfully(&synth(&["--experts", "16", "--experts-used", "4", "--expert-ffn", "64"]));
    let run = |flags: &[&str]| {
        let all =
            [&["run", &path, "Once upon a time", "--tokens", "12", "--temperature", "0"], flags].concat();
        run_json(&all)["token_ids"].clone()
    };
    let alone = run(&["--threads", "1"]);
    assert_eq!(expect_array(&alone).len(), 12);
    assert_eq!(alone, run(&["--threads", "2"]));
}
