//! Algorithm 1 of the prima.cpp paper on the instances with certified optima.
//!
//! The algorithm may miss the optimum, but its plan is never faster, violates no constraint, and has the time of the
//! latency model. Without a plan there is a reason. The times equal those of another implementation, which are the
//! values `halda_global_text` in `data/lda`.

use std::collections::BTreeSet;

use hearth_halda::{
    CostTerms, Halda, InfeasibleReason, Instance, LatencyModel, SearchStep, Solution, Strategy as Planner,
    StrategyError, solve, valid_rounds, violations,
};
use proptest::prelude::*;
use serde_json::Value;

use crate::fixtures::{certified_rows, checked_solution, config_with_cases};

/// Checks that a plan is not faster than the certified optimum (seconds per token; null if there is no plan).
#[track_caller]
fn checked(place: &str, halda: &Halda, model: &LatencyModel, optimum: &Value) -> Option<Solution> {
    let solution = checked_solution(place, halda, model)?;
    let seconds = solution.seconds_per_token();
    let optimum = optimum.as_f64().expect("a plan where none is certified");
    assert!(seconds >= optimum * (1.0 - 1e-9), "{place}: {seconds} is below {optimum}");
    Some(solution)
}

#[test]
fn certified_instances_match_the_other_implementation() {
    for (place, model, row) in certified_rows() {
        let found = checked(place, &Halda::PRIMA_CPP_PAPER, &model, &row["optimum"]["T"])
            .map(|plan| plan.seconds_per_token());
        match (found, row["halda_global_text"]["T"].as_f64()) {
            (Some(found), Some(expected)) => {
                assert!((found - expected).abs() <= 1e-9 * expected, "{place}: {found} is not {expected}");
            }
            (found, expected) => assert_eq!(found, expected, "{place}"),
        }
    }
}

#[test]
fn no_variant_is_below_the_optimum() {
    for (place, model, row) in certified_rows() {
        for flip_memory_cases in [false, true] {
            for terms in [CostTerms::PRIMA_CPP_PAPER, CostTerms::PRIMA_CPP] {
                for (may_drop_devices, key) in [(false, "optimum"), (true, "optimum_with_device_selection")] {
                    let base = Halda { may_drop_devices, ..Halda::PRIMA_CPP_PAPER };
                    checked(place, &Halda { terms, flip_memory_cases, ..base }, &model, &row[key]["T"]);
                }
            }
        }
        for rounds in valid_rounds(model.model_layers()) {
            let halda = Halda { rounds: Some(rounds), ..Halda::PRIMA_CPP_PAPER };
            let plan = checked(place, &halda, &model, &row["optimum_by_k"][rounds.to_string()]["T"]);
            assert!(plan.is_none_or(|plan| plan.assignment.rounds == rounds), "{place}");
        }
    }
}

#[test]
fn skipped_program_is_not_below_its_bound() {
    let mut compared = 0;
    for (place, model, _) in certified_rows() {
        let steps = |prune_by_bound| {
            let proposal = Halda { prune_by_bound, ..Halda::PRIMA_CPP_PAPER }.propose(&model);
            proposal.map_or(Vec::new(), |proposal| proposal.search_steps)
        };
        for (step, solved) in steps(true).into_iter().zip(steps(false)) {
            let Err(InfeasibleReason::Pruned { bound_seconds: bound }) = step.outcome else { continue };
            let seconds = solved.outcome.unwrap();
            assert!(seconds >= bound * (1.0 - 1e-9), "{place}: {seconds} is below {bound}");
            compared += 1;
        }
    }
    assert!(compared > 50, "{compared}");
}

#[test]
fn flips_are_never_slower_and_find_every_plan() {
    let mut gained = 0;
    for (place, model, row) in certified_rows() {
        let flip_memory_cases = Halda { flip_memory_cases: true, ..Halda::PRIMA_CPP_PAPER };
        let with = checked(place, &flip_memory_cases, &model, &row["optimum"]["T"]);
        let without = checked(place, &Halda::PRIMA_CPP_PAPER, &model, &row["optimum"]["T"]);
        assert_eq!(with.is_some(), !row["optimum"]["T"].is_null(), "{place}");
        let (Some(with), Some(without)) = (with, without) else { continue };
        assert!(with.seconds_per_token() <= without.seconds_per_token() * (1.0 + 1e-12), "{place}");
        gained += usize::from(with.seconds_per_token() < without.seconds_per_token() * (1.0 - 1e-9));
    }
    assert!(gained > 0);
}

#[test]
fn device_selection_removes_devices_with_one_layer() {
    let (mut removed, mut kept, mut slower) = (0, 0, 0);
    for (place, model, row) in certified_rows() {
        let halda = Halda { may_drop_devices: true, ..Halda::PRIMA_CPP_PAPER };
        assert_eq!(halda.propose(&model), halda.propose(&model), "{place}: plans are deterministic");
        let optimum = &row["optimum_with_device_selection"]["T"];
        let Some(plan) = checked(place, &halda, &model, optimum) else { continue };
        let windows = &plan.assignment.window_layers;
        removed += usize::from(windows.contains(&0));
        if windows[1..].contains(&1) {
            // Devices with one layer remain only if there is no plan without them, or it is slower.
            let mut without = model.instance().clone();
            let mut stays = windows.iter().enumerate().map(|(device, window)| device == 0 || *window > 1);
            without.devices.retain(|_| stays.next().unwrap());
            match solve(&Halda::PRIMA_CPP_PAPER, &LatencyModel::new(&without).unwrap()) {
                Err(StrategyError::Infeasible(_)) => {}
                Ok(smaller) => {
                    let [smaller, seconds] = [&smaller, &plan].map(Solution::seconds_per_token);
                    assert!(smaller >= seconds * (1.0 - 1e-9), "{place}: {windows:?}");
                    slower += 1;
                }
                Err(other) => panic!("{place}: {other}"),
            }
            kept += 1;
        }
    }
    assert!(kept > slower && slower > 0, "{kept} {slower}");
    assert!(removed > 10, "{removed}");
}

#[test]
fn more_devices_than_layers_is_an_error() {
    let (_, first, _) = certified_rows().next().unwrap();
    let mut instance = first.instance().clone();
    instance.model.model_layers = 1;
    let model = LatencyModel::new(&instance).unwrap();
    let refusal = solve(&Halda::PRIMA_CPP_PAPER, &model).unwrap_err();
    let expected = "no plan exists: k = 1: a round of 1 layers cannot give each of 2 devices a layer";
    assert_eq!(refusal.to_string(), expected);
    let missing_head = solve(&Halda { head: 2, ..Halda::PRIMA_CPP_PAPER }, &model).unwrap_err();
    assert_eq!(missing_head, StrategyError::NoSuchDevice { device: 2, devices: 2 });
}

#[test]
fn steps_without_a_program_have_reasons() {
    let mut reasons = BTreeSet::new();
    for (_, model, _) in certified_rows() {
        let halda = Halda { flip_memory_cases: true, ..Halda::PRIMA_CPP_PAPER };
        let steps = match halda.propose(&model) {
            Ok(proposal) => proposal.search_steps,
            Err(StrategyError::Infeasible(steps)) => steps,
            Err(other) => panic!("{other}"),
        };
        for reason in steps.into_iter().filter_map(|step| step.outcome.err()) {
            reasons.insert(match reason {
                InfeasibleReason::NoWindowInCase { .. } => "no window",
                InfeasibleReason::CasesAllowTooFewLayers { .. } => "too little",
                InfeasibleReason::CasesRequireMoreLayers { .. } => "too much",
                InfeasibleReason::Pruned { .. } => "no better",
                InfeasibleReason::MoreDevicesThanLayers { .. } => "too few layers",
                other => panic!("{other}"),
            });
        }
    }
    let reasons: Vec<_> = reasons.into_iter().collect();
    assert_eq!(reasons, ["no better", "no window", "too few layers", "too little", "too much"]);
}

/// Generates instances of random devices from the certified instances, each with 0 to 2 times its memory.
fn ring(largest: usize) -> impl Strategy<Value = Instance> {
    let instances: Vec<&Instance> = certified_rows().map(|(_, model, _)| model.instance()).collect();
    let devices: Vec<_> = instances.iter().flat_map(|instance| instance.devices.clone()).collect();
    let device = (0..devices.len(), 0.0..2.0_f64).prop_map(move |(index, scale)| {
        let mut device = devices[index].clone();
        let scaled = |bytes: u64| (bytes as f64 * scale) as u64;
        device.ram_available = scaled(device.ram_available);
        device.metal_available = scaled(device.metal_available);
        device.cuda_available = scaled(device.cuda_available);
        device
    });
    let devices = prop::collection::vec(device, 1..=largest);
    let threshold = prop_oneof![Just(0.0), Just(3e8), Just(1e9)];
    let parts = (0..instances.len(), 1..=126_u32, devices, threshold);
    parts.prop_map(move |(index, layers, devices, slow_disk_threshold)| {
        let mut model = instances[index].model.clone();
        model.model_layers = layers;
        Instance { model, devices, slow_disk_threshold, ..instances[index].clone() }
    })
}

proptest! {
    #![proptest_config(config_with_cases(64))]

    #[test]
    fn large_rings_end_with_a_plan_or_a_reason(instance in ring(24)) {
        let model = LatencyModel::new(&instance).unwrap();
        let devices = instance.devices.len();
        let rounds = valid_rounds(instance.model.model_layers).len();
        for (may_drop_devices, flip_memory_cases) in [(false, false), (true, false), (false, true)] {
            let halda = Halda { may_drop_devices, flip_memory_cases, ..Halda::PRIMA_CPP_PAPER };
            let steps = match solve(&halda, &model) {
                Ok(solution) => {
                    prop_assert_eq!(violations(&model, &solution.assignment, halda.rules()), vec![]);
                    prop_assert!(solution.explanation.optimality_gap.is_none_or(|gap| gap >= -1e-9));
                    solution.explanation.search_steps
                }
                Err(StrategyError::Infeasible(steps)) => steps,
                Err(other) => return Err(TestCaseError::fail(other.to_string())),
            };
            // Each iteration but the last forces a device, each removal drops one, and each pass of flips tries all.
            let iterations = (devices + 1) * if may_drop_devices { devices } else { 1 };
            let flipped = if flip_memory_cases { 2 * devices * devices } else { 0 };
            prop_assert!(steps.len() <= rounds * (iterations + flipped), "{} steps", steps.len());
            let solver = |step: &SearchStep| matches!(step.outcome, Err(InfeasibleReason::SolverFailed { .. }));
            prop_assert!(!steps.iter().any(solver), "{steps:?}");
        }
    }
}
