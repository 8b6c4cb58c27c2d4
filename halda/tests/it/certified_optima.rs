//! `exact` compared with the certified optimum of each instance in `data/lda`.
//!
//! Times are compared to a relative 1e-9. Assignments are not compared, because several may be optimal.

use hearth_halda::{Assignment, ExactSearch, HeadChoice, LatencyModel, solve, valid_rounds};
use serde_json::Value;

use crate::fixtures::{MAY_DROP, UNRESTRICTED, certified_rows, checked_solution};

/// Checks that `exact` finds a plan with the certified time, or none if `certified` is null.
#[track_caller]
fn check(place: &str, exact: ExactSearch, model: &LatencyModel, certified: &Value) {
    let found = checked_solution(place, &exact, model).map(|solution| solution.seconds_per_token());
    match (found, certified.as_f64()) {
        (Some(found), Some(certified)) => {
            assert!((found - certified).abs() <= 1e-9 * certified, "{place}: {found} is not {certified}");
        }
        (found, certified) => assert_eq!(found, certified, "{place}"),
    }
}

#[test]
fn every_instance_and_every_valid_k_has_its_certified_optimum() {
    let mut checked = 0;
    for (place, model, row) in certified_rows() {
        check(place, ExactSearch::default(), &model, &row["optimum"]["T"]);
        let exact = ExactSearch { rules: MAY_DROP, ..ExactSearch::default() };
        check(place, exact, &model, &row["optimum_with_device_selection"]["T"]);
        let by_k = row["optimum_by_k"].as_object().unwrap();
        let mut certified: Vec<u32> = by_k.keys().map(|k| k.parse().unwrap()).collect();
        certified.sort_unstable();
        assert_eq!(certified, valid_rounds(model.model_layers()), "{place}");
        for (k, optimum) in by_k {
            let exact = ExactSearch { rounds: k.parse().ok(), ..ExactSearch::default() };
            check(&format!("{place} k={k}"), exact, &model, &optimum["T"]);
            checked += 1;
        }
    }
    assert_eq!(checked, 355, "optima by k in the three files");
}

#[test]
fn certified_assignments_evaluate_to_their_times() {
    for (place, model, row) in certified_rows() {
        for key in ["optimum", "optimum_with_device_selection", "halda_global_text"] {
            let Some(certified) = row[key]["T"].as_f64() else { continue };
            let layers = |name: &str| serde_json::from_value(row[key][name].clone()).unwrap();
            let rounds = row[key]["k"].as_u64().unwrap() as u32;
            let assignment = Assignment::new(0, rounds, layers("w"), layers("n"));
            let breakdown = model.evaluate(&assignment).unwrap();
            let relative = (breakdown.seconds_per_token / certified - 1.0).abs();
            assert!(relative <= 1e-9, "{place} {key}: {} is not {certified}", breakdown.seconds_per_token);
            let sets: Vec<u8> = serde_json::from_value(row[key]["sets"].clone()).unwrap();
            let found: Vec<u8> = breakdown.devices.iter().map(|terms| terms.memory_case.number()).collect();
            assert_eq!(found, sets, "{place} {key}");
        }
    }
}

#[test]
fn fewer_rules_are_never_slower() {
    for (place, model, _) in certified_rows().filter(|(_, model, _)| model.model_layers() <= 40) {
        let fixed = ExactSearch { rules: MAY_DROP, ..ExactSearch::default() };
        let Ok(fixed_head) = solve(&fixed, &model) else { continue };
        let best_head = solve(&ExactSearch { head: HeadChoice::Best, ..fixed }, &model).unwrap();
        assert!(best_head.seconds_per_token() <= fixed_head.seconds_per_token(), "{place}");
        let remainder = solve(&ExactSearch { rules: UNRESTRICTED, ..fixed }, &model).unwrap();
        assert!(remainder.seconds_per_token() <= fixed_head.seconds_per_token() * (1.0 + 1e-12), "{place}");
    }
}
