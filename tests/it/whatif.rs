//! `hearth whatif` ranks its variants by what `hearth simulate` says of each.

use std::fs;

use serde_json::Value;

use crate::processes::{error, run};

const HOME: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/scenarios/home/llama-70b-on-wifi.yaml");

fn json(arguments: &[&str]) -> Value {
    let output = run(arguments);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("JSON")
}

#[test]
fn variants_are_ranked_by_saved_time() {
    let all = json(&["whatif", HOME, "--tokens", "3", "--json"]);
    let base = all["base"]["tpot_ms"].as_f64().expect("a time");
    let simulated = json(&["simulate", HOME, "--tokens", "3", "--json"]);
    assert_eq!(simulated["tpot_ms"]["mean"].as_f64(), Some(base));
    let variants = all["variants"].as_array().expect("a list");
    let of = |kind: &str| variants.iter().filter(|it| it["kind"] == kind).count();
    assert_eq!(["without", "memory", "disk", "wired", "quant"].map(of), [4, 4, 4, 1, 4]);
    let saved: Vec<f64> = variants.iter().filter_map(|it| it["saved_ms"].as_f64()).collect();
    assert!(saved.windows(2).all(|pair| pair[0] >= pair[1]), "{saved:?}");
    for variant in variants.iter().filter(|it| it["outcome"] == "ok") {
        let (time, saved) = (variant["tpot_ms"].as_f64().unwrap(), variant["saved_ms"].as_f64().unwrap());
        assert!((base - time - saved).abs() < 1e-9, "{variant}");
    }
    // The desktop holds most of the model: without it nothing is as fast.
    let last = variants.last().expect("variants");
    assert_eq!((last["kind"].as_str(), last["device"].as_str()), (Some("without"), Some("desktop")));
    // A smaller format is read faster.
    assert!(variants.iter().any(|it| it["kind"] == "quant" && it["saved_ms"].as_f64() > Some(0.0)));
}

#[test]
fn number_of_threads_changes_nothing() {
    let with = |jobs: &str| run(&["whatif", HOME, "--tokens", "2", "--jobs", jobs]).stdout;
    assert_eq!(with("1"), with("3"));
}

#[test]
fn refused_variants_have_a_reason() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("by-hand.yaml");
    let text = fs::read_to_string(HOME).expect("the scenario");
    // Windows by hand are for a ring of four.
    fs::write(&path, format!("{text}planner: {{strategy: manual, windows: [40, 20, 16, 4]}}\n"))
        .expect("written");
    let path = path.display().to_string();
    let all = json(&["whatif", &path, "--tokens", "2", "--json"]);
    let without: Vec<&Value> =
        all["variants"].as_array().expect("a list").iter().filter(|it| it["kind"] == "without").collect();
    assert_eq!(without.len(), 4);
    for variant in without {
        assert!(variant["tpot_ms"].is_null() && variant["saved_ms"].is_null(), "{variant}");
        assert!(variant["outcome"].as_str().is_some_and(|why| why.len() > 10), "{variant}");
    }
    let output = run(&["whatif", &path, "--tokens", "2"]);
    let said = String::from_utf8(output.stdout).expect("text");
    assert!(said.starts_with("as it is: ") && said.contains("without mac"), "{said}");
    let text = error(&["whatif", HOME, "--strategy", "refine"], 2);
    assert!(text.contains("ends after a time"), "{text}");
}
