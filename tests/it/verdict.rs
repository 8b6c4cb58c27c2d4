//! Tests of the verdict with which `hearth simulate` opens, and of plans in uncertain memory.

use serde_json::Value;

use crate::folder::Folder;
use crate::processes::{expect_array, expect_number, run_json, run_successfully, scenario_path};

#[test]
fn simulation_opens_with_a_verdict() {
    let home = scenario_path("home/llama-70b-on-four");
    let text = run_successfully(&["simulate", &home]);
    let first = text.lines().next().expect("a line");
    assert!(first.contains("tokens/s (") && first.contains("slower than people read"), "{first}");
    for part in [
        "`desktop` alone, the best single device",
        "does not run for 4000 tokens (in a longer context)",
        "assumes: on `desktop` other programs",
    ] {
        assert!(text.contains(part), "{part} is not in {text}");
    }
    let run = run_json(&["simulate", &home, "--draws", "0"]);
    let verdict = &run["verdict"];
    assert_eq!(verdict["speed"]["tpot_ms"], run["tpot_ms"]["mean"]);
    assert!(run.get("spread").is_none(), "no draws");
    let seconds: Vec<Option<f64>> =
        expect_array(&verdict["first_tokens"]).iter().map(|first| first["seconds"].as_f64()).collect();
    // The keys and values of 4000 tokens do not fit beside the weights.
    assert!(seconds[0] > Some(1.0) && seconds[0] < seconds[1] && seconds[2].is_none(), "{seconds:?}");
    let alone = expect_number(&verdict["best_single_device"]["speed"]["tpot_ms"]);
    assert!(alone > 1.1 * expect_number(&run["tpot_ms"]["mean"]), "{alone}");
    assert!(expect_array(&verdict["left_out"]).iter().any(|device| device["name"] == "phone"), "{verdict}");
}

#[test]
fn run_that_does_not_complete_has_no_speed() {
    let folder = Folder::new();
    let path = folder.path_of("one.yaml");
    // The GPU memory of d3 holds no 70B model, and `pinned` systems read nothing from disk.
    run_successfully(&["init", &path, "--model", "llama-70b", "--device", "one=d3", "--device", "two=d2"]);
    let (text, _) = crate::processes::run_with_code(&["simulate", &path, "--strategy", "exo", "--json"], 3);
    let run: Value = serde_json::from_str(&text).expect("JSON");
    assert_eq!(run["outcome"], "out_of_memory");
    assert_eq!(run["verdict"]["speed"], Value::Null);
}

#[test]
fn plan_for_uncertain_memory_has_the_better_tail() {
    let home = scenario_path("home/llama-70b-on-four");
    let tail = |risk: &str| {
        let run = run_json(&["simulate", &home, "--risk", risk, "--draws", "40"]);
        (expect_number(&run["tpot_ms"]["mean"]), run["spread"]["p90_ms"].as_f64().unwrap_or(f64::INFINITY))
    };
    let ((average, average_p90), (ignore, ignore_p90)) = (tail("average"), tail("ignore"));
    assert!(average < 1.02 * ignore, "{average} and {ignore} ms");
    assert!(2.0 * average_p90 < ignore_p90, "{average_p90} and {ignore_p90} ms");
    let plan = run_successfully(&["plan", &home]);
    assert!(plan.contains("exactly the memory of its profile. That is uncertain"), "{plan}");
    assert!(!run_successfully(&["plan", &home, "--risk", "ignore"]).contains("That is uncertain"));
}

#[test]
fn verdict_names_devices_obstacles_and_assumptions() {
    let folder = Folder::new();
    let path = folder.path_of("home.yaml");
    let desktop = "desktop=rtx-3060-12gb,ddr4-3200-dual,32 GiB,nvme-gen3,windows";
    let mac = "mac=apple-m2,16 GiB,apple-ssd,macos";
    run_successfully(&["init", &path, "--model", "qwen3-30b-a3b", "--device", desktop, "--device", mac]);
    let text = run_successfully(&["simulate", &path, "--draws", "8"]);
    for part in [
        " variations of the devices",
        " per token with `desktop`, `mac`\n",
        "uncertain: the time depends most on ",
        "cannot run yet: experts can be computed on CPUs only\n",
        "cannot run yet: hearth builds on Linux for x86-64 only, not yet for `desktop` (Windows), `mac` (macOS)\n",
        "assumes: qwen3-30b-a3b in q4_k_m, with a context of 1024 tokens\n",
        "assumes: the slowest link, `mac` to `desktop`, has 5.00 ms and 465.0 Mbit/s\n",
        "assumes: files in memory are kept as on Linux on `desktop`, `mac`, which was not checked\n",
    ] {
        assert!(text.contains(part), "{part} is not in {text}");
    }
    let plan = run_json(&["plan", &path]);
    assert_eq!(plan["verdict"]["devices"], serde_json::json!(["desktop", "mac"]));
    assert_eq!(expect_array(&plan["verdict"]["obstacles"]).len(), 2);
}
