//! `exact` compared with the certified optimum of each instance in `data/lda`.
//!
//! Times are compared to a relative 1e-9. Assignments are not compared, because several may be optimal.

use hearth_halda::{
    Assignment, Exact, HeadChoice, LatencyModel, Rules, StrategyError, solve, valid_rounds, violations,
};
use serde_json::Value;

use crate::fixtures::certified_rows;

/// Checks that `exact` finds a plan with the certified time, or none if `certified` is null.
#[track_caller]
fn check(place: &str, exact: Exact, model: &LatencyModel, certified: &Value) {
    match (solve(&exact, model), certified.as_f64()) {
        (Ok(solution), Some(certified)) => {
            let found = solution.seconds();
            assert!((found - certified).abs() <= 1e-9 * certified, "{place}: {found} is not {certified}");
            assert_eq!(violations(model, &solution.assignment, exact.rules), [], "{place}");
            assert_eq!(found, model.evaluate(&solution.assignment).unwrap().seconds, "{place}");
        }
        (Err(StrategyError::Infeasible(_)), None) => {}
        (found, certified) => panic!("{place}: {found:?} where {certified:?} is certified"),
    }
}

#[test]
fn every_instance_has_its_certified_optimum() {
    for (place, instance, row) in certified_rows() {
        let model = LatencyModel::new(&instance).unwrap();
        check(&place, Exact::default(), &model, &row["optimum"]["T"]);
        let exact = Exact { rules: Rules { may_drop: true, ..Rules::default() }, ..Exact::default() };
        check(&place, exact, &model, &row["optimum_with_device_selection"]["T"]);
    }
}

#[test]
fn every_valid_k_has_its_certified_optimum() {
    let mut checked = 0;
    for (place, instance, row) in certified_rows() {
        let model = LatencyModel::new(&instance).unwrap();
        let by_k = row["optimum_by_k"].as_object().unwrap();
        let mut certified: Vec<u32> = by_k.keys().map(|k| k.parse().unwrap()).collect();
        certified.sort_unstable();
        assert_eq!(certified, valid_rounds(instance.model.model_layers), "{place}");
        for (k, optimum) in by_k {
            let exact = Exact { rounds: k.parse().ok(), ..Exact::default() };
            check(&format!("{place} k={k}"), exact, &model, &optimum["T"]);
            checked += 1;
        }
    }
    assert_eq!(checked, OPTIMA_BY_K);
}

/// The number of optima by k in the three files.
const OPTIMA_BY_K: usize = 355;

#[test]
fn certified_assignments_evaluate_to_their_times() {
    for (place, instance, row) in certified_rows() {
        let model = LatencyModel::new(&instance).unwrap();
        for key in ["optimum", "optimum_with_device_selection", "halda_global_text"] {
            let Some(certified) = row[key]["T"].as_f64() else { continue };
            let layers = |name: &str| serde_json::from_value(row[key][name].clone()).unwrap();
            let rounds = row[key]["k"].as_u64().unwrap() as u32;
            let assignment = Assignment::new(0, rounds, layers("w"), layers("n"));
            let breakdown = model.evaluate(&assignment).unwrap();
            let relative = (breakdown.seconds / certified - 1.0).abs();
            assert!(relative <= 1e-9, "{place} {key}: {} is not {certified}", breakdown.seconds);
            let sets: Vec<u8> = serde_json::from_value(row[key]["sets"].clone()).unwrap();
            let found: Vec<u8> = breakdown.devices.iter().map(|terms| terms.case.number()).collect();
            assert_eq!(found, sets, "{place} {key}");
        }
    }
}

#[test]
fn fewer_rules_are_never_slower() {
    for (place, instance, _) in
        certified_rows().into_iter().filter(|(_, instance, _)| instance.model.model_layers <= 40)
    {
        let model = LatencyModel::new(&instance).unwrap();
        let rules = Rules { may_drop: true, may_leave_remainder: false };
        let fixed = Exact { rules, ..Exact::default() };
        let Ok(fixed_head) = solve(&fixed, &model) else { continue };
        let best_head = solve(&Exact { head: HeadChoice::Best, ..fixed }, &model).unwrap();
        assert!(best_head.seconds() <= fixed_head.seconds(), "{place}");
        let rules = Rules { may_leave_remainder: true, ..rules };
        let remainder = solve(&Exact { rules, ..fixed }, &model).unwrap();
        assert!(remainder.seconds() <= fixed_head.seconds() * (1.0 + 1e-12), "{place}");
    }
}
