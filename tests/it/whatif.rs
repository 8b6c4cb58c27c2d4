//! Tests that `hearth whatif` ranks variants by their simulated times.

use serde_json::Value;

use crate::folder::Folder;
use crate::processes::{
    assert_rejected, expect_array, expect_number, mean_tpot_ms, run_json, run_successfully, scenario_path,
};

#[test]
fn variants_are_ranked_by_saved_time() {
    let home = scenario_path("home/llama-70b-on-wifi");
    let all = run_json(&["whatif", &home, "--tokens", "3"]);
    let base = expect_number(&all["base"]["tpot_ms"]);
    let simulated = run_json(&["simulate", &home, "--tokens", "3"]);
    assert_eq!(mean_tpot_ms(&simulated), base);
    let variants = expect_array(&all["variants"]);
    let count = |kind: &str| variants.iter().filter(|it| it["kind"] == kind).count();
    assert_eq!(["without", "memory", "disk", "wired", "quant", "model"].map(count), [4, 4, 4, 1, 3, 3]);
    let saved: Vec<f64> = variants.iter().filter_map(|it| it["saved_ms"].as_f64()).collect();
    assert!(saved.windows(2).all(|pair| pair[0] >= pair[1]), "{saved:?}");
    for variant in variants.iter().filter(|it| it["outcome"] == "ok") {
        let (time, saved) = (expect_number(&variant["tpot_ms"]), expect_number(&variant["saved_ms"]));
        assert!((base - time - saved).abs() < 1e-9, "{variant}");
    }
    // The desktop has most of the layers, so its removal is the worst variant.
    let last = variants.last().expect("variants");
    assert_eq!((last["kind"].as_str(), last["device"].as_str()), (Some("without"), Some("desktop")));
    let sparse =
        |it: &&Value| it["kind"] == "model" && it["what"].as_str().is_some_and(|what| what.contains("-a"));
    assert!(variants.iter().filter(sparse).all(|it| expect_number(&it["saved_ms"]) > base / 2.0));
    // A smaller weight format is read faster.
    assert!(variants.iter().any(|it| it["kind"] == "quant" && it["saved_ms"].as_f64() > Some(0.0)));
}

#[test]
fn number_of_threads_changes_nothing() {
    let home = scenario_path("home/llama-70b-on-wifi");
    let with = |jobs: &str| run_successfully(&["whatif", &home, "--tokens", "2", "--jobs", jobs]);
    assert_eq!(with("1"), with("3"));
}

#[test]
fn rejected_variants_have_a_reason() {
    let (folder, home) = (Folder::new(), scenario_path("home/llama-70b-on-wifi"));
    let text = std::fs::read_to_string(&home).expect("the scenario");
    // The manual windows are for four devices.
    let planner = "planner: {strategy: manual, windows: [40, 20, 16, 4]}\n";
    let path = folder.write("manual.yaml", text + planner);
    let all = run_json(&["whatif", &path, "--tokens", "2"]);
    let without: Vec<&Value> =
        expect_array(&all["variants"]).iter().filter(|it| it["kind"] == "without").collect();
    assert_eq!(without.len(), 4);
    for variant in without {
        assert!(variant["tpot_ms"].is_null() && variant["saved_ms"].is_null(), "{variant}");
        assert!(variant["outcome"].as_str().is_some_and(|why| why.len() > 10), "{variant}");
    }
    let text = run_successfully(&["whatif", &path, "--tokens", "2"]);
    assert!(text.starts_with("unchanged: ") && text.contains("without mac"), "{text}");
    assert_rejected(&["whatif", &home, "--strategy", "refine"], &["ends after a time"]);
}

#[test]
fn prices_rank_by_benefit() {
    let folder = Folder::new();
    let path = folder.path_of("home.yaml");
    let desktop = "desktop=rtx-3060-12gb,ddr4-3200-dual,32 GiB,nvme-gen3,linux";
    run_successfully(&["init", &path, "--model", "qwen3-32b", "--device", desktop]);
    let prices = ["--price", "rtx-3090=700", "--price", "rtx-5090=2500", "--price", "memory=4"];
    let all = run_json(&[&["whatif", &path, "--tokens", "4"], &prices[..]].concat());
    let variants = expect_array(&all["variants"]);
    let benefit = |it: &&Value| Some(it["saved_ms"].as_f64()? / it["price"].as_f64()?);
    let ranked: Vec<f64> = variants.iter().filter_map(|it| benefit(&it)).collect();
    assert!(ranked.len() == 3 && ranked.is_sorted_by(|one, other| one >= other), "{ranked:?}");
    assert!(variants[0]["what"].as_str().is_some_and(|what| what.contains("RTX 3090")), "{}", variants[0]);
    let text = run_successfully(&[&["whatif", &path, "--tokens", "4"], &prices[..]].concat());
    assert!(text.contains("; costs 700, saves ") && text.contains("perplexity +10.5 %"), "{text}");
    assert!(text.contains("no effect: desktop: ") && text.contains("of memory instead of"), "{text}");
    assert_rejected(&["whatif", &path, "--price", "rtx3090=7"], &["there is no graphics card `rtx3090`"]);
    assert_rejected(&["whatif", &path, "--price", "memory=-7"], &["`memory=4`"]);
}
