//! Tests that `hearth experts` gives the hit rates that others computed from the same recording.

use std::path::Path;

use crate::folder::Folder;
use crate::processes::{assert_rejected, expect_array, expect_number, run_json, run_successfully};
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
