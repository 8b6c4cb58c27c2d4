//! Planners of other systems, compared with their description in the prima.cpp paper.

use hearth_core::memory::PinnedMemory;
use hearth_core::{Cluster, Member};
use hearth_halda::systems::{SYSTEM_NAMES, SystemPlanError, SystemPlanOptions, plan};
use hearth_profiles::{BytesPerSecond, Document, Format, Link, Seconds, Sourced, device};
use hearth_schema::plan::Plan;
use hearth_schema::residency::Residency;
use hearth_schema::scenario::Links;

use crate::fixtures::{self, scenario_record};

/// Returns a cluster of shipped devices with a shipped model. The first device is the head.
fn cluster(model: &str, devices: &[&str]) -> Cluster {
    let member = |(index, name): (usize, &&str)| Member {
        name: if devices[..index].contains(name) { format!("{name}-{index}") } else { (*name).to_owned() },
        address: None,
        device: device::shipped_profile(name).expect("shipped"),
        residency: None,
    };
    let link =
        Link::constant(Sourced::new(Seconds(0.005), "test"), Sourced::new(BytesPerSecond(58e6), "test"));
    fixtures::cluster(model, devices.iter().enumerate().map(member).collect(), Links::uniform(link))
}

/// The devices of the prima.cpp paper's testbed, with D3 as the head.
const PAPER: [&str; 4] = ["d3", "d2", "d1", "d4"];

fn made(name: &str, cluster: &Cluster, weights_as: Option<Format>) -> Result<Plan, SystemPlanError> {
    let air_time = Some(Seconds(0.002)).filter(|_| name == "airinfer");
    let options = SystemPlanOptions { weight_format: weights_as, all_reduce_time: air_time };
    plan(name, cluster, &scenario_record(), options)
}

/// Returns the values of `weights_as` that a system supports; `None` keeps the formats of the model.
fn formats(name: &str) -> &'static [Option<Format>] {
    let all = &[None, Some(Format::Q4_0), Some(Format::F16)];
    if matches!(name, "exo" | "dllama") { &all[..1] } else { all }
}

#[test]
fn exo_has_the_windows_of_the_paper() {
    let cluster = cluster("llama-8b", &PAPER);
    let plan = made("exo", &cluster, None).expect("a plan");
    let windows: Vec<(&str, u32, u32)> =
        plan.devices.iter().map(|device| (device.name.as_str(), device.window, device.gpu_layers)).collect();
    assert_eq!(windows, [("d3", 13, 13), ("d2", 10, 10), ("d1", 9, 0)]);
    assert_eq!((plan.dropped_devices[0].name.as_str(), plan.dropped_devices.len()), ("d4", 1));
    let [d3, _, d1] = &plan.devices[..] else { panic!("three devices") };
    let formats = (d3.residency.conversion_format, d3.residency.gpu_conversion_format);
    assert_eq!(formats, (Some(Format::F16), Some(Format::F32)));
    let kept = (d1.residency.policy, d1.residency.conversion_format);
    assert_eq!(kept, (Residency::Pinned, None), "MLX keeps the format of the model");
    // With D1 as the head, in the paper's order.
    let listed = self::cluster("llama-8b", &["d1", "d2", "d3"]);
    let windows: Vec<u32> =
        made("exo", &listed, None).expect("a plan").devices.iter().map(|device| device.window).collect();
    assert_eq!(windows, [9, 10, 13]);
    let phone = self::cluster("llama-8b", &["d4", "d3"]);
    assert!(made("exo", &phone, None).unwrap_err().to_string().contains("does not run on the head `d4`"));
}

#[test]
fn dllama_slices_evenly_over_a_power_of_two_devices() {
    for (devices, used) in [(&PAPER[..], 4), (&PAPER[..3], 2), (&["d3"; 9][..], 8)] {
        let cluster = cluster("llama-8b", devices);
        let plan = made("dllama", &cluster, None).expect("a plan");
        assert_eq!(plan.devices.len(), used);
        assert_eq!(plan.devices.len() + plan.dropped_devices.len(), devices.len());
        let tensor = plan.kind.tensor_plan().expect("slices");
        let even = |slice: &hearth_schema::plan::tensor_parallel::Slice| {
            (slice.kv_heads as usize, slice.feed_forward_rows as usize) == (8 / used, 14336 / used)
        };
        assert!(tensor.slices.iter().all(even), "{:?}", tensor.slices);
    }
}

#[test]
fn plans_cover_the_model_and_round_trip() {
    for model in ["llama-8b", "llama-70b", "llama-30b", "tiny"] {
        for devices in [&PAPER[..], &["d3"], &["d3", "d5", "d6"]] {
            let cluster = cluster(model, devices);
            for name in SYSTEM_NAMES {
                for format in formats(name) {
                    let Ok(plan) = made(name, &cluster, *format) else { continue };
                    assert_eq!(Plan::from_yaml(&plan.to_yaml()), Ok(plan.clone()), "{name}");
                    assert!(plan.simulation_only_reason().is_some());
                    if let Some(tensor) = plan.kind.tensor_plan() {
                        assert_eq!(tensor.validate_coverage(&plan, &cluster.model.shape), Ok(()), "{name}");
                    } else {
                        assert_eq!(plan.layers_per_round(), cluster.model.shape.layers.0);
                    }
                }
            }
        }
    }
}

#[test]
fn plans_stay_within_memory_budgets() {
    for model in ["llama-8b", "llama-30b", "llama-70b", "3b"] {
        for name in ["hepti", "galaxy", "tpi-llm"] {
            for format in [Format::F32, Format::F16, Format::Q4_0] {
                let cluster = cluster(model, &PAPER);
                let Ok(plan) = made(name, &cluster, Some(format)) else { continue };
                for (index, planned) in plan.devices.iter().enumerate() {
                    let member = cluster.member(&planned.name).expect("a member");
                    let held = PinnedMemory::new(&plan, index, &cluster.model, &member.device, false);
                    let held = held.expect("weights of its own");
                    let fits = held.fits() && held.excess_memory().0 == 0;
                    assert!(fits, "{name} {format} on {}: {held:?}", planned.name);
                }
            }
        }
    }
}

#[test]
fn faster_devices_get_larger_slices() {
    let cluster = cluster("llama-8b", &PAPER);
    for name in ["hepti", "galaxy"] {
        let plan = made(name, &cluster, Some(Format::Q4_0)).expect("a plan");
        let tensor = plan.kind.tensor_plan().expect("slices");
        let slice = |device: &str| tensor.slices.iter().find(|slice| slice.device == device);
        let rows = |device: &str| slice(device).map_or(0, |slice| slice.feed_forward_rows);
        // The CPUs read 58.6, 41.9 and 7.5 GB/s.
        assert!(rows("d3") > rows("d2") && rows("d2") > rows("d4"), "{name}: {:?}", tensor.slices);
    }
}

#[test]
fn errors_name_memory_and_unused_options() {
    let cluster = cluster("llama-14b", &PAPER);
    let refusal = |name: &str| made(name, &cluster, None).expect_err("a refusal").to_string();
    // 14 billion weights of 4 bytes are 56 GB; D1 to D4 have less.
    let memory = refusal("hepti");
    assert!(memory.contains("keeps all weights in memory as f32, but memory holds only"), "{memory}");
    assert!(refusal("nobody").contains("no system is called `nobody`: use one of exo, dllama"));
    let refusal = |name, options| plan(name, &cluster, &scenario_record(), options).expect_err("a refusal");
    assert_eq!(refusal("airinfer", SystemPlanOptions::default()), SystemPlanError::MissingAllReduceTime);
    let stray = SystemPlanOptions { weight_format: Some(Format::F16), all_reduce_time: None };
    assert!(refusal("dllama", stray).to_string().contains("`--weights-as`"));
    let stray = SystemPlanOptions { weight_format: None, all_reduce_time: Some(Seconds(0.1)) };
    assert!(refusal("hepti", stray).to_string().contains("`--air-time`"));
}
