//! Errors and notes about phones: unsupported strategies, and runs that need `--warm`.

use std::fs;

use crate::processes::{error, run};
use crate::repository::root;

/// A phone alone, of this profile and used so.
fn scenario(profile: &str, soc: &str) -> String {
    let path = root().join("scenarios/soc/llama-8b-256-tensor.yaml");
    let text = fs::read_to_string(path).expect("a shipped scenario");
    let shipped = "profile: snapdragon-8-gen-3, soc: {strategy: hetero-tensor}";
    assert!(text.contains(shipped), "{text}");
    text.replace(shipped, &format!("profile: {profile}, soc: {soc}"))
}

#[test]
fn unsupported_soc_options_are_refused() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let phone = "snapdragon-8-gen-3";
    let cases = [
        (
            "nvidia-orin",
            "{strategy: npu-only}",
            "has no NPU that computes in FP16: choose `gpu-only` or `best`",
        ),
        ("nvidia-orin", "{strategy: hetero-tensor}", "asks for `hetero-tensor`"),
        ("d3", "{strategy: gpu-only}", "its profile `d3` has no SoC"),
        (phone, "{strategy: chunked, chunk: 0}", "has a chunk of 0 tokens"),
        (phone, "{strategy: chunked, chunk: 4000000000}", "has a chunk of 4000000000 tokens"),
        (phone, "{strategy: padding, chunk: 64}", "`chunk`, which `padding` does not use"),
        (phone, "{strategy: gpu-only, synchronisation: slow}", "which `gpu-only` does not use"),
        (phone, "{strategy: gpu-only, partitions: fixed}", "which `gpu-only` does not use"),
        (phone, "{strategy: heterotensor}", "unknown variant `heterotensor`"),
        (phone, "{partition: fixed}", "unknown field `partition`"),
    ];
    for (number, (profile, soc, what)) in cases.into_iter().enumerate() {
        let path = folder.path().join(format!("{number}.yaml"));
        fs::write(&path, scenario(profile, soc)).expect("a scenario");
        let text = error(&["simulate", &path.display().to_string(), "--warm"], 2);
        assert!(text.contains(what), "{profile} {soc}: {text}");
        assert!(text.contains("hint:") || text.contains("where:"), "{text}");
    }
}

#[test]
fn soc_strategy_is_not_a_planner_strategy() {
    let path = root().join("scenarios/soc/llama-8b-256-tensor.yaml").display().to_string();
    let text = error(&["simulate", &path, "--strategy", "hetero-tensor"], 2);
    assert!(text.contains("soc: {strategy: hetero-tensor}"), "{text}");
}

#[test]
fn cold_soc_suggests_warm() {
    let path = root().join("scenarios/soc/llama-8b-256-tensor.yaml").display().to_string();
    let said = |flags: &[&str]| {
        let output = run(&[&["simulate", &path][..], flags].concat());
        assert!(output.status.success());
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    let (cold, warm) = (said(&[]), said(&["--warm"]));
    assert!(cold.contains("Add --warm") && !cold.contains("GPU and NPU, `"), "{cold}");
    assert!(!warm.contains("Add --warm") && warm.contains("GPU and NPU, `hetero-tensor`"), "{warm}");
}
