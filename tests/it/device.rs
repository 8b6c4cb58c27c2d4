//! Tests of `hearth device`, and of scenarios whose devices consist of parts of the catalogue.

use crate::folder::Folder;
use crate::processes::{assert_rejected, expect_array, expect_number, run_json, run_successfully};

const DESKTOP: &str = "desktop=rtx-3060-12gb,ddr4-3200-dual,16 GiB,nvme-gen3,windows";
const LAPTOP: &str = "laptop=laptop-ddr4-3200, 16 GiB, nvme-gen3, linux@192.168.1.7:9001";

#[test]
fn parts_are_listed_found_and_shown() {
    let all = run_json(&["device", "list"]);
    assert!(expect_array(&all).len() >= 150);
    let found = run_json(&["device", "search", "RTX", "3060"]);
    let ids: Vec<&str> = expect_array(&found).iter().filter_map(|part| part["id"].as_str()).collect();
    assert!(ids.contains(&"rtx-3060-12gb") && ids.contains(&"rtx-3060-laptop"), "{ids:?}");
    let shown = run_successfully(&["device", "show", "rtx-3060-12gb"]);
    assert!(shown.contains("12.0 GiB at 360 GB/s") && shown.contains("NVIDIA"), "{shown}");
    assert!(run_successfully(&["device", "show", "d3"]).contains("schema: device/1"));
    assert_rejected(&["device", "show", "rtx3060"], &["there is no gpu `rtx3060`", "`rtx-3060-12gb`"]);
    assert_rejected(&["device", "search", "floppy"], &["no part has all of these words"]);
}

#[test]
fn new_profile_is_a_document_that_scenarios_can_name() {
    let folder = Folder::new();
    let [profile, scenario] = ["desktop.yaml", "home.yaml"].map(|name| folder.path_of(name));
    let parts = ["--cpu", "ddr4-3200-dual", "--memory", "16 GiB", "--disk", "nvme-gen3", "--os", "windows"];
    let gpu = ["--gpu", "rtx-3060-12gb", "-o", &profile];
    let text = run_successfully(&[&["device", "new"], &parts[..], &gpu].concat());
    assert!(text.contains("reads weights at 324 GB/s"), "{text}");
    run_successfully(&["init", &scenario, "--device", &format!("desktop={profile}")]);
    let by_file = run_json(&["simulate", &scenario]);
    run_successfully(&["init", &scenario, "--force", "--device", DESKTOP]);
    let by_parts = run_json(&["simulate", &scenario]);
    assert_eq!(by_file["tpot_ms"], by_parts["tpot_ms"]);
    // 4.6 GB at 324 GB/s and 32 layers of 77 us.
    let tpot = expect_number(&by_parts["tpot_ms"]["mean"]);
    assert!((14.0..20.0).contains(&tpot), "{tpot}");
    assert_rejected(&["device", "new", "--cpu", "ddr4-3200-dual"], &["--memory", "--disk", "--os"]);
    let wrong = [&["device", "new"], &parts[..], &["--gpu", "gtx1080"]].concat();
    assert_rejected(&wrong, &["did you mean `gtx-1080`"]);
}

#[test]
fn scenario_of_parts_is_planned_simulated_and_swept() {
    let folder = Folder::new();
    let path = folder.path_of("home.yaml");
    run_successfully(&["init", &path, "--model", "llama-70b", "--device", DESKTOP, "--device", LAPTOP]);
    let text = folder.read("home.yaml");
    assert!(text.contains("parts: {cpu: ddr4-3200-dual, memory: 16.0 GiB"), "{text}");
    run_successfully(&["plan", &path]);
    let sweep = run_json(&[
        "sweep",
        &path,
        "--vary",
        "devices.desktop.parts.gpu=rtx-3060-12gb,rtx-3090",
        "--tokens",
        "4",
    ]);
    let times: Vec<f64> =
        expect_array(&sweep["rows"]).iter().map(|row| expect_number(&row["tpot_ms"])).collect();
    assert!(times[1] < times[0], "{times:?}");
}

#[test]
fn wrong_parts_are_explained() {
    let folder = Folder::new();
    let new = folder.path_of("new.yaml");
    for (device, parts) in [
        ("a=rtx-3060-12gb,16 GiB", &["these parts are missing: a CPU, a disk, an operating system"][..]),
        ("a=rtx3060,ddr4-3200-dual,16 GiB,nvme-gen3,linux", &["`rtx-3060-12gb`", "hearth device search"]),
        ("a=rtx-3060-12gb", &["`rtx-3060-12gb` is a part"]),
        ("a=ddr4-3200-dual,16 GiB,8 GiB,nvme-gen3,linux", &["`16.0 GiB` and `8 GiB`"]),
    ] {
        assert_rejected(&["init", &new, "--device", device], parts);
    }
    let both = folder.path_of("both.yaml");
    run_successfully(&["init", &both, "--device", "a=d2"]);
    let text = folder.read("both.yaml");
    let parts = "parts: {cpu: ddr4-3200-dual, memory: 16 GiB, disk: nvme-gen3, os: linux}";
    let scenario = folder.write("both.yaml", text.replace("profile: d2", &format!("profile: d2, {parts}")));
    assert_rejected(&["simulate", &scenario], &["both `profile` and `parts`"]);
    let scenario = folder.write("both.yaml", text.replace(", profile: d2", ""));
    assert_rejected(&["simulate", &scenario], &["neither `profile` nor `parts`"]);
}

#[test]
fn values_of_parts_are_replaced() {
    let folder = Folder::new();
    let path = folder.path_of("home.yaml");
    run_successfully(&["init", &path, "--model", "llama-8b", "--device", DESKTOP]);
    let text = folder.read("home.yaml");
    let simulate = |values: &str| {
        std::fs::write(&path, text.replace("parts:", &format!("values: {{{values}}}, parts:"))).unwrap();
        expect_number(&run_json(&["simulate", &path])["tpot_ms"]["mean"])
    };
    let (slow, fast) = (simulate("gpu.read_bandwidth: 162 GB/s"), simulate("gpu.read_bandwidth: 324 GB/s"));
    assert!((1.6..2.0).contains(&(slow / fast)), "{slow} {fast}");
    simulate("cpu.cores: 6, memory.available: 9 GiB");
    for (values, error) in [
        ("gpu.bandwidth: 162 GB/s", "did you mean `gpu.read_bandwidth`"),
        ("gpu.read_bandwidth: 162", "`gpu.read_bandwidth` cannot be 162"),
        ("memory.available: 900 GiB", "home.yaml, `values` of `desktop`"),
    ] {
        std::fs::write(&path, text.replace("parts:", &format!("values: {{{values}}}, parts:"))).unwrap();
        assert_rejected(&["simulate", &path], &[error]);
    }
}

#[test]
fn devices_are_compared_value_by_value() {
    let text =
        run_successfully(&["device", "compare", "d3", "rtx-2080-ti,ddr4-2666-dual,16 GiB,nvme-gen3,linux"]);
    assert!(text.contains("gpu.read_bandwidth"), "{text}");
    let same = run_json(&["device", "compare", "d2", "d2"]);
    let ratios = expect_array(&same).iter().filter_map(|pair| pair["ratio"].as_f64());
    assert!(ratios.clone().count() > 15 && ratios.into_iter().all(|ratio| (ratio - 1.0).abs() < 1e-12));
    assert_rejected(&["device", "compare", "d2", "d22"], &["there is no device `d22`", "d1, d2, d3"]);
}
