//! Tests of errors and notes about phones: unsupported strategies, and runs without `--warm`.

use crate::folder::Folder;
use crate::processes::{run_failing_with_code, run_successfully, scenario_path};

#[test]
fn unsupported_soc_options_are_rejected() {
    let text = std::fs::read_to_string(scenario_path("soc/llama-8b-256-tensor")).expect("a shipped scenario");
    let device = "profile: snapdragon-8-gen-3, soc: {strategy: hetero-tensor}";
    assert!(text.contains(device), "{text}");
    let (folder, phone) = (Folder::new(), "snapdragon-8-gen-3");
    let no_npu = "has no NPU that computes in FP16: choose `gpu-only` or `best`";
    for (profile, soc, what) in [
        ("nvidia-orin", "{strategy: npu-only}", no_npu),
        ("nvidia-orin", "{strategy: hetero-tensor}", "has strategy `hetero-tensor`"),
        ("d3", "{strategy: gpu-only}", "its profile `d3` has no SoC"),
        (phone, "{strategy: chunked, chunk: 0}", "has a chunk of 0 tokens"),
        (phone, "{strategy: chunked, chunk: 4000000000}", "has a chunk of 4000000000 tokens"),
        (phone, "{strategy: padding, chunk: 64}", "`chunk`, which `padding` does not use"),
        (phone, "{strategy: gpu-only, synchronisation: slow}", "which `gpu-only` does not use"),
        (phone, "{strategy: gpu-only, partitions: fixed}", "which `gpu-only` does not use"),
        (phone, "{strategy: heterotensor}", "unknown variant `heterotensor`"),
        (phone, "{partition: fixed}", "unknown field `partition`"),
    ] {
        let file = folder.write("s.yaml", text.replace(device, &format!("profile: {profile}, soc: {soc}")));
        let text = run_failing_with_code(&["simulate", &file, "--warm"], 2);
        assert!(text.contains(what), "{profile} {soc}: {text}");
        assert!(text.contains("hint:") || text.contains("where:"), "{text}");
    }
}

#[test]
fn cold_soc_suggests_warm() {
    let path = scenario_path("soc/llama-8b-256-tensor");
    let (cold, warm) =
        (run_successfully(&["simulate", &path]), run_successfully(&["simulate", &path, "--warm"]));
    assert!(cold.contains("Add `--warm`") && !cold.contains("GPU and NPU, `"), "{cold}");
    assert!(!warm.contains("Add `--warm`") && warm.contains("GPU and NPU, `hetero-tensor`"), "{warm}");
}
