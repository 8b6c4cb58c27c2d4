//! Tests that `hearth experts` gives the hit rates that others computed from the same recording.

use std::path::Path;

use hearth_schema::route_trace::{RouteBatch, RouteTrace};

use crate::folder::{Folder, scenario_yaml};
use crate::processes::{
    assert_rejected, expect_array, expect_number, model_path, run_json, run_successfully,
};
use crate::repository::repository_root;

fn data(name: &str) -> String {
    repository_root().join("tests/data/moe").join(name).display().to_string()
}

#[test]
fn hit_rates_are_those_of_the_published_replay() {
    let curve = std::fs::read_to_string(data("qwen3-30b-a3b.curve.csv")).expect("the curve");
    let (mut compared, mut worst) = (0, 0.0_f64);
    for line in curve.lines().skip(1) {
        let columns: Vec<&str> = line.split(',').collect();
        let [budget, policy, hits, decode, read] = columns[..] else { panic!("{line}") };
        let policy = match policy {
            "layer" => "layer-lru",
            "layerlfu" => "layer-lfu",
            // Its random numbers are not known.
            "random" => continue,
            other => other,
        };
        let budget = format!("{budget} MiB");
        let run =
            run_json(&["experts", &data("qwen3-30b-a3b.route.csv"), "--budget", &budget, "--policy", policy]);
        let found = &expect_array(&run["replays"])[0];
        for (key, expected) in [("hit_rate", hits), ("hit_rate_decode", decode)] {
            let difference = 100.0 * expect_number(&found[key]) - expected.parse::<f64>().expect("a number");
            worst = worst.max(difference.abs());
            assert!(difference.abs() < 0.001, "{line}: {found}");
        }
        let bytes = read.parse::<f64>().expect("a number") * 1024.0 * 1024.0;
        assert!((expect_number(&found["read_bytes"]) / bytes - 1.0).abs() < 1e-5, "{line}: {found}");
        compared += 1;
    }
    assert!(compared >= 50 && worst > 0.0, "{compared} {worst}");
}

#[test]
fn next_use_hits_more_than_the_published_policies() {
    let curve = std::fs::read_to_string(data("qwen3-30b-a3b.curve.csv")).expect("the curve");
    let rows: Vec<Vec<&str>> = curve.lines().skip(1).map(|line| line.split(',').collect()).collect();
    // Smaller caches hold less than a token uses, and the caches of the layers exceed them.
    let budgets = [1000, 1500, 2000, 2500, 3000, 4000, 6000, 8000];
    let sizes = budgets.map(|budget| format!("{budget} MiB")).join(",");
    let run =
        run_json(&["experts", &data("qwen3-30b-a3b.route.csv"), "--budget", &sizes, "--policy", "next-use"]);
    for (budget, found) in budgets.iter().zip(expect_array(&run["replays"])) {
        let of_budget = rows.iter().filter(|row| row[0] == budget.to_string() && row[1] != "belady");
        let published = of_budget.map(|row| row[2].parse::<f64>().expect("a number")).fold(0.0, f64::max);
        assert!(
            published > 0.0 && 100.0 * expect_number(&found["hit_rate"]) > published,
            "{budget}: {found}"
        );
    }
}

#[test]
fn recording_is_described_and_checked() {
    let folder = Folder::new();
    let route = data("qwen3-30b-a3b.route.csv");
    let text = run_successfully(&["experts", &route, "--budget", "4000 MiB", "--policy", "lru"]);
    assert!(text.contains("128 generated tokens; a token uses 785 MiB of experts"), "{text}");
    // The recorded session had 74.9 % of hits with this cache.
    assert!(text.contains("3.91 GiB  lru          74.9 %   80.3 %"), "{text}");
    assert_rejected(&["experts", &route, "--policy", "fifo"], &["there is no policy `fifo`", "layer-lru"]);
    assert_rejected(&["experts", &route, "--budget", "4"], &["--budget"]);
    let bad = folder.write("bad.csv", "hello\n");
    assert_rejected(&["experts", &bad], &["bad.csv", "line 1", "# route_trace v1"]);
    assert_rejected(&["experts", &folder.path_of("none.csv")], &["none.csv"]);
    assert!(Path::new(&route).exists());
}

#[test]
fn routes_of_a_run_are_recorded_replayed_and_simulated() {
    let folder = Folder::new();
    let (model, routes) = (folder.path_of("mixture.gguf"), folder.path_of("routes.csv"));
    let synth = ["synth", "--preset", "tiny", "--arch", "qwen3moe", "--experts", "8", "--experts-used", "2"];
    run_successfully(&[&synth[..], &["-o", &model]].concat());
    let record = |extra: &[&str]| {
        let base = ["execute", &model, "--tokens", "6", "--ignore-end", "--record-routes", &routes];
        [&base[..], extra].concat().into_iter().map(str::to_owned).collect::<Vec<_>>()
    };
    let words = record(&["--prompt-tokens", "5"]);
    run_successfully(&words.iter().map(String::as_str).collect::<Vec<_>>());
    let replayed = run_json(&["experts", &routes, "--budget", "1 GiB", "--policy", "next-use"]);
    // The prompt gives the first of six tokens, and five more passes follow.
    assert_eq!(expect_number(&replayed["recording"]["decoded_tokens"]), 5.0);
    assert!(expect_number(&replayed["replays"][0]["hit_rate"]) > 0.0, "{replayed}");
    // A recording of the same model is followed, and one of another model is refused.
    let scenario = folder.write(
        "s.yaml",
        scenario_yaml("  - {name: a, profile: d3}").replace("profile: llama-8b", "file: mixture.gguf"),
    );
    let simulated = run_json(&["simulate", &scenario, "--routes", &routes, "--draws", "0"]);
    assert!(expect_number(&simulated["tpot_ms"]["mean"]) > 0.0, "{simulated}");
    let other = data("qwen3-30b-a3b.route.csv");
    let expected = ["qwen3-30b-a3b.route.csv", "48 layers of 128 experts", "layers of 8"];
    assert_rejected(&["simulate", &scenario, "--routes", &other], &expected);
    // The executor can take the recorded routes instead of those of its router.
    let text = std::fs::read_to_string(&routes).expect("written");
    let moved = |line: &str| {
        let mut cells: Vec<String> = line.split(',').map(str::to_owned).collect();
        if let Some(expert) = cells.get(5).and_then(|cell| cell.parse::<u32>().ok()) {
            cells[5] = ((expert + 3) % 8).to_string();
        }
        cells.join(",")
    };
    let moved = folder.write("moved.csv", text.lines().map(moved).collect::<Vec<_>>().join("\n"));
    let words = record(&["--prompt-tokens", "5", "--routes", &moved]);
    run_successfully(&words.iter().map(String::as_str).collect::<Vec<_>>());
    let uses = |path: &str| {
        let trace = RouteTrace::parse(&std::fs::read_to_string(path).expect("written")).expect("valid");
        let sorted = |batch: RouteBatch| {
            let mut experts = batch.experts;
            experts.sort_unstable();
            (batch.layer, experts)
        };
        trace.batches.into_iter().map(sorted).collect::<Vec<_>>()
    };
    assert_eq!(uses(&routes), uses(&moved));
    let words = record(&["--prompt-tokens", "5", "--routes", &other]);
    assert_rejected(&words.iter().map(String::as_str).collect::<Vec<_>>(), &expected);
    let two = record(&["--prompt-tokens", "5", "--sequences", "2"]);
    assert_rejected(&two.iter().map(String::as_str).collect::<Vec<_>>(), &["--record-routes", "one prompt"]);
    let dense = model_path("q8_0");
    let base = ["execute", &dense, "--prompt-tokens", "5", "--record-routes", &routes];
    assert_rejected(&base, &["--record-routes", "not a mixture of experts"]);
}

/// The scenarios of a phone on which others measured the same model (`docs/studies/experts`).
#[test]
fn larger_caches_of_experts_are_faster() {
    let mut last = (0.0, f64::INFINITY);
    for cache in ["uncached", "cache-2000", "cache-4000"] {
        let scenario = repository_root().join(format!("scenarios/experts/phone-{cache}.yaml"));
        let args = ["simulate", &scenario.display().to_string(), "--draws", "0", "--tokens", "60"];
        let found = run_json(&args);
        let speed = 1e3 / expect_number(&found["tpot_ms"]["mean"]);
        let read = expect_number(&expect_array(&found["devices"])[0]["bytes_read_per_token"]);
        assert!(speed > last.0 && read < last.1, "{cache}: {speed} tokens/s, {read} bytes after {last:?}");
        last = (speed, read);
        // The planner hides no reading behind the computation.
        let plan = run_json(&["plan", &scenario.display().to_string()]);
        let planned = 1e3 / expect_number(&plan["predicted"]["tpot_ms"]);
        assert!((0.6..1.2).contains(&(planned / speed)), "{cache}: {planned} planned, {speed} simulated");
    }
}
