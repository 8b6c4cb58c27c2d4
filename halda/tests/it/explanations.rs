//! Times and explanations, compared with hand-computed ones.
//!
//! The instances in `hard.jsonl` have round values: a layer has 2^29 bytes and takes 10 ms on a CPU, RAM has 30 GB/s,
//! a hop takes 5 ms, a key-value write 5 us, and a copy to or from a GPU 50 us.

use hearth_halda::{
    Assignment, BindingConstraint, DropReason, EvenWindows, ExactSearch, Instance, LatencyModel, LayerCounts,
    ManualPlan, MemoryProportional, SingleDevice, StrategyError, Violation, solve,
};

use crate::fixtures::{MAY_DROP, certified_model};

const LAYER_BYTES: f64 = 536_870_912.0;

#[track_caller]
fn near(found: f64, expected: f64) {
    assert!((found - expected).abs() <= 1e-12 * expected.abs().max(1.0), "{found} is not {expected}");
}

#[test]
fn partial_last_round_has_its_terms() {
    let model = certified_model("tie");
    // L = 24, W = 10: two whole rounds and R = 4, which all fit in the head's window of 5.
    let assignment = Assignment::new(0, 3, vec![5, 5], vec![0, 0]);
    let breakdown = model.evaluate(&assignment).unwrap();
    let [head, worker] = &breakdown.devices[..] else { panic!("two devices") };
    assert_eq!(head.layer_counts, LayerCounts { layers: 14, gpu_layers: 0, windows: 3 });
    assert_eq!(worker.layer_counts, LayerCounts { layers: 10, gpu_layers: 0, windows: 2 });
    near(head.compute_seconds, 14.0 * 0.01 + 0.01);
    near(head.memory_seconds, 14.0 * (5e-6 + LAYER_BYTES / 30e9) + 3.0 * 1e-4);
    // 12 of the 14 layers fit in memory, so two are read again at 1 GB/s.
    near(head.disk_seconds, 2.0 * LAYER_BYTES / 1e9);
    near(head.communication_seconds, 3.0 * 0.005);
    near(worker.disk_seconds, 0.0);
    near(worker.communication_seconds, 2.0 * 0.005);
    let refusal = solve(&ExactSearch { rounds: Some(5), ..ExactSearch::default() }, &model).unwrap_err();
    let expected =
        "24 layers cannot be divided into 5 rounds; valid numbers of rounds are 1, 2, 3, 4, 6, 8, 12";
    assert_eq!(refusal.to_string(), expected);
}

#[test]
fn exact_fit_is_bound_by_memory() {
    let model = certified_model("tie");
    let solution = solve(&ExactSearch::default(), &model).unwrap();
    assert_eq!(solution.explanation.optimality_gap, Some(0.0));
    assert_eq!(solution.explanation.search_steps.len(), 7, "24 has 7 factors less than itself");
    for device in &solution.explanation.devices {
        assert_eq!(device.binding_constraints, [BindingConstraint::Memory]);
        // One more layer adds arithmetic, memory traffic and reading from disk.
        near(device.extra_layer_seconds.unwrap(), 0.01 + 5e-6 + LAYER_BYTES / 30e9 + LAYER_BYTES / 1e9);
    }
}

#[test]
fn full_metal_device_rereads_everything_for_one_more_layer() {
    let model = certified_model("metal");
    let solution = solve(&ExactSearch::default(), &model).unwrap();
    assert_eq!(solution.assignment.window_layers, [12, 12]);
    let [metal, linux] = &solution.explanation.devices[..] else { panic!("two devices") };
    assert_eq!(metal.binding_constraints, [BindingConstraint::GpuMemory, BindingConstraint::Memory]);
    // 13 layers are read at 700 MB/s, and the thirteenth is on the CPU because the working set holds 12.
    near(metal.extra_layer_seconds.unwrap(), 13.0 * LAYER_BYTES / 700e6 + 0.01 + 5e-6 + LAYER_BYTES / 30e9);
    assert_eq!(linux.binding_constraints, [BindingConstraint::Overloaded]);
}

#[test]
fn dropped_device_has_its_cost() {
    let model = certified_model("slowgpu");
    let solution = solve(&ExactSearch { rules: MAY_DROP, ..ExactSearch::default() }, &model).unwrap();
    assert_eq!(solution.assignment.window_layers, [12, 0]);
    // The devices are equally fast, so the dropped device would add only its hop and its copies.
    let Some(DropReason::Slower(seconds)) = solution.explanation.devices[1].drop_reason else {
        panic!("{:?}", solution.explanation.devices[1])
    };
    near(seconds, 0.005 + 1e-4);
}

#[test]
fn infeasible_instance_names_the_reason() {
    let model = certified_model("slow");
    let refusal = solve(&ExactSearch { rounds: Some(1), ..ExactSearch::default() }, &model).unwrap_err();
    let expected = "no plan exists: k = 1: a round has 40 layers, but only 16 fit in memory, and the disks are too slow to \
                    read weights for every token";
    assert_eq!(refusal.to_string(), expected);
    let model = certified_model("LltM");
    let refusal = solve(&ExactSearch::default(), &model).unwrap_err();
    let expected = "no plan exists: k = 1: a round of 2 layers cannot give each of 3 devices a layer";
    assert_eq!(refusal.to_string(), expected);
    let solution = solve(&ExactSearch { rules: MAY_DROP, ..ExactSearch::default() }, &model).unwrap();
    assert_eq!(solution.assignment.window_layers, [2, 0, 0]);
}

#[test]
fn baselines_have_their_windows() {
    let model = certified_model("tie");
    let mem = solve(&MemoryProportional::Total(vec![1, 2]), &model).unwrap();
    assert_eq!(mem.assignment.window_layers, [8, 16]);
    let even = solve(&EvenWindows { rounds: 8 }, &model).unwrap();
    assert_eq!(even.assignment.window_layers, [2, 1]);
    near(even.seconds_per_token(), 2.908_700_377_6);
    let single = solve(&SingleDevice::default(), &model).unwrap();
    assert_eq!(single.assignment.window_layers, [24, 0]);
    // 12 of 24 layers do not fit and are read again. The optimum reads nothing.
    near(single.breakdown.devices[0].disk_seconds, 12.0 * LAYER_BYTES / 1e9);
    near(single.explanation.optimal_seconds_per_token.unwrap(), 0.689_816_729_6);
    assert!(single.explanation.optimality_gap.unwrap() > 9.0);
}

#[test]
fn manual_plan_is_checked() {
    let model = certified_model("slowgpu");
    let manual = |rounds, window_layers, gpu_layers| {
        solve(&ManualPlan { rounds, window_layers, gpu_layers, ..ManualPlan::default() }, &model)
    };
    let broken = |result| match result {
        Err(StrategyError::ConstraintsViolated { violations, .. }) => violations,
        other => panic!("{other:?}"),
    };
    assert!(manual(Some(1), vec![6, 6], vec![0, 0]).is_ok());
    assert!(manual(None, vec![4, 1], vec![]).is_ok(), "W = 5 leaves R = 2");
    let found = broken(manual(Some(2), vec![4, 1], vec![]));
    assert!(matches!(found[..], [Violation::RoundsDoNotCoverModel { expected: 3, .. }]), "{found:?}");
    // 4 GiB of GPU memory hold 8 layers; the other device has no GPU.
    let found = broken(manual(Some(1), vec![10, 2], vec![9, 1]));
    let sentences: Vec<String> = found.iter().map(ToString::to_string).collect();
    let too_large =
        "the 9 GPU layers of `linux-cuda` take 4831838208 bytes, but its GPU has 4294967296 bytes for them";
    assert_eq!(sentences, [too_large, "`linux-none` has 1 GPU layers, but no GPU"]);
    let found = broken(manual(Some(3), vec![6, 6], vec![0, 7]));
    assert!(matches!(found[0], Violation::RoundsDoNotCoverModel { expected: 1, .. }), "{found:?}");
    assert!(matches!(found[1], Violation::GpuLayersExceedWindow { .. }), "{found:?}");
    let found = broken(manual(Some(1), vec![0, 12], vec![0, 0]));
    assert!(matches!(found[..], [Violation::HeadWithoutLayers { .. }]), "{found:?}");
    let found = broken(manual(Some(1), vec![12], vec![0]));
    assert!(matches!(found[..], [Violation::DeviceCountMismatch { .. }]), "{found:?}");
    let found = broken(manual(Some(1), vec![u32::MAX, u32::MAX], vec![0, 0]));
    assert!(matches!(found[..], [Violation::RingExceedsModel { .. }]), "{found:?}");
}

#[test]
fn invalid_instance_names_field_and_device() {
    let check = |change: fn(&mut Instance), expected: &str| {
        let mut instance = certified_model("slowgpu").instance().clone();
        change(&mut instance);
        assert_eq!(LatencyModel::new(&instance).unwrap_err().to_string(), expected);
    };
    let no_disk = "`s_disk` of devices[1] `linux-none` is 0: it must be above zero";
    check(|instance| instance.devices[1].disk_read_rate = 0.0, no_disk);
    let hop = "`t_comm` of devices[0] `linux-cuda` is NaN: it must be a finite number";
    check(|instance| instance.devices[0].hop_seconds = f64::NAN, hop);
    let speed = "`s_gpu` of devices[0] `linux-cuda` has no speed for `q4k`, which the model uses: measure or estimate it";
    check(|instance| instance.devices[0].gpu_speed.clear(), speed);
    check(|instance| instance.devices.clear(), "instance `slowgpu` has no devices: give at least the head");
    check(|instance| instance.model.model_layers = 0, "`L` of the model `hard` is 0: it must be above zero");
    let unknown = r#"{"name": "a", "s_threshold": 0, "modle": {}}"#;
    let error = serde_json::from_str::<Instance>(unknown).unwrap_err().to_string();
    assert!(error.contains("unknown field `modle`"), "{error}");
}
