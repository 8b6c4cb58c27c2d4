//! The local search `refine`, compared with enumeration and with its start.
//!
//! The scores are artificial. With a convex score, the search must reach the global minimum from any start. With a
//! pseudo-random score, it must keep its guarantees. The instances are those with certified optima.

use std::collections::BTreeSet;

use hearth_halda::baselines::exhaustive::for_each_split;
use hearth_halda::latency::constraints::ring_violations;
use hearth_halda::solvers::local_search::{RefineProgress, RefineResult, StopReason};
use hearth_halda::solvers::overlap::best_residencies;
use hearth_halda::{
    Assignment, ExactSearch, GpuApi, LatencyModel, PlanRules, RefineOptions, RefinedPlan, refine, solve,
};
use proptest::prelude::*;

use crate::fixtures::{UNRESTRICTED, certified_rows, config_with_cases};

const SEARCH: RefineOptions =
    RefineOptions { rules: UNRESTRICTED, keep_rounds: false, max_evaluations: None };

/// Returns each small instance for which the strategy `exact` has a plan, with this plan.
fn instances() -> impl Iterator<Item = (LatencyModel<'static>, Assignment)> {
    let small = certified_rows().filter(|(place, ..)| place.starts_with("small.jsonl"));
    small.filter_map(|(_, model, _)| {
        let found = solve(&ExactSearch::default(), &model).ok()?.assignment;
        allowed(&model, &found).then_some((model, found))
    })
}

fn allowed(model: &LatencyModel, at: &Assignment) -> bool {
    ring_violations(model, at, UNRESTRICTED).is_empty() && best_residencies(model, at).is_some()
}

/// Returns the sum over processors of weight * (layers - target)^2. `targets` has (target, weight) of each processor.
fn convex_score(assignment: &Assignment, targets: &[(f64, f64)]) -> f64 {
    let split = assignment.window_layers.iter().zip(&assignment.gpu_layers);
    let layers = split.flat_map(|(window, gpu)| [f64::from(window - gpu), f64::from(*gpu)]);
    layers.zip(targets).map(|(layers, (target, weight))| weight * (layers - target).powi(2)).sum()
}

/// Returns a pseudo-random score that depends only on the plan and the seed. A tenth of the plans have no score.
fn random_score(assignment: &Assignment, seed: u64) -> Option<f64> {
    let numbers = assignment.window_layers.iter().chain(&assignment.gpu_layers).chain([&assignment.rounds]);
    let mixed = numbers.fold(seed, |mixed, number| {
        (mixed ^ u64::from(*number)).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29)
    });
    (!mixed.is_multiple_of(10)).then_some((mixed % 1009) as f64)
}

/// Returns the minimum score of all allowed plans with one round.
fn minimum_score(model: &LatencyModel, head: usize, score: impl Fn(&Assignment) -> f64) -> f64 {
    let devices = model.device_count();
    let mut plan = Assignment::new(head, 1, vec![0; devices], vec![0; devices]);
    let mut best = f64::INFINITY;
    for_each_split(&mut plan, 0, model.model_layers(), &mut |plan| {
        if allowed(model, plan) {
            best = best.min(score(plan));
        }
    });
    best
}

proptest! {
    #![proptest_config(config_with_cases(48))]

    #[test]
    fn refine_finds_the_minimum_of_a_convex_objective(
        targets in prop::collection::vec((-2.0..12.0_f64, 0.1..3.0_f64), 16),
    ) {
        for (model, start) in instances().filter(|(model, _)| model.device_count() <= 3) {
            let search = RefineOptions { keep_rounds: true, ..SEARCH };
            let RefineResult { assignment, best_score, stop_reason, .. } =
                refine(&model, &start, search, |at| Some(convex_score(at, &targets)), |_| true);
            let best = minimum_score(&model, start.head, |at| convex_score(at, &targets));
            let found = best_score.unwrap();
            prop_assert!((found - best).abs() <= 1e-9 * best, "{assignment:?}: {found}, {best}");
            prop_assert_eq!(stop_reason, StopReason::NoBetterNeighbour);
        }
    }

    #[test]
    fn refine_is_never_worse_than_its_start_and_keeps_the_rules(seed in any::<u64>(), most in 0..200_u64) {
        for (model, start) in instances() {
            let search = RefineOptions { max_evaluations: Some(most), ..SEARCH };
            let mut scored = Vec::new();
            let mut run = || {
                let score = |at: &Assignment| {
                    scored.push(at.clone());
                    random_score(at, seed)
                };
                refine(&model, &start, search, score, |_| true)
            };
            let (once, again) = (run(), run());
            prop_assert_eq!(&once, &again);
            prop_assert!(once.evaluations <= most);
            prop_assert_eq!(scored.len() as u64, 2 * once.evaluations);
            scored.truncate(once.evaluations as usize);
            let different: BTreeSet<&Assignment> = scored.iter().collect();
            prop_assert_eq!(different.len(), scored.len(), "a plan is scored once");
            prop_assert!(allowed(&model, &once.assignment));
            if most > 0 {
                prop_assert_eq!(once.best_score, random_score(&once.assignment, seed));
                prop_assert_eq!(once.start_score, random_score(&start, seed));
                prop_assert!(once.start_score.is_none_or(|start| once.best_score.unwrap() <= start));
            }
        }
    }
}

#[test]
fn refine_changes_rounds() {
    let (model, start) = instances().next().unwrap();
    assert_eq!((start.rounds, start.layers_per_round()), (1, 12));
    let score = |at: &Assignment| Some(f64::from(at.rounds.abs_diff(4)));
    let found = refine(&model, &start, SEARCH, score, |_| true);
    assert_eq!((found.assignment.rounds, found.assignment.layers_per_round()), (4, 3));
    assert_eq!((found.start_score, found.best_score), (Some(3.0), Some(0.0)));
    let kept = refine(&model, &start, RefineOptions { keep_rounds: true, ..SEARCH }, score, |_| true);
    assert_eq!(kept.assignment.rounds, 1);
}

#[test]
fn refine_adds_and_drops_devices() {
    let mut three = instances().filter(|(model, _)| model.device_count() == 3);
    let (model, start) = three.find(|(model, _)| model.instance().slow_disk_threshold == 0.0).unwrap();
    let used = |at: &Assignment| at.window_layers.iter().filter(|window| **window > 0).count();
    let alone = refine(&model, &start, SEARCH, |at| Some(used(at) as f64), |_| true).assignment;
    assert_eq!(used(&alone), 1);
    let all = refine(&model, &alone, SEARCH, |at| Some(-(used(at) as f64)), |_| true).assignment;
    assert_eq!(used(&all), 3);
    let kept = RefineOptions { rules: PlanRules { may_drop_devices: false, ..UNRESTRICTED }, ..SEARCH };
    assert_eq!(used(&refine(&model, &all, kept, |at| Some(used(at) as f64), |_| true).assignment), 3);
}

#[test]
fn refine_stops_on_request() {
    let (model, start) = instances().next().unwrap();
    let mut reported = Vec::new();
    let should_continue = |progress: RefineProgress| {
        reported.push(progress);
        progress.evaluations < 7
    };
    let found = refine(&model, &start, SEARCH, |at| Some(-f64::from(at.gpu_layers[0])), should_continue);
    assert_eq!((found.evaluations, found.stop_reason), (7, StopReason::StoppedByCaller));
    assert_eq!(reported.len(), 8);
    assert!(reported.windows(2).all(|pair| pair[1].evaluations == pair[0].evaluations + 1));
    let nothing = refine(&model, &start, SEARCH, |_| Some(f64::NAN), |_| true);
    assert_eq!((nothing.assignment, nothing.start_score, nothing.best_score), (start.clone(), None, None));
    let invalid = Assignment::new(9, 0, vec![1], vec![]);
    let kept = refine(&model, &invalid, SEARCH, |_| Some(1.0), |_| true);
    assert_eq!((kept.assignment, kept.evaluations), (invalid, 0));
}

#[test]
fn refined_plan_is_explained() {
    let (model, start) = instances().next().unwrap();
    assert!(model.instance().devices.iter().any(|device| device.gpu != GpuApi::None));
    let strategy =
        RefinedPlan { assignment: start.clone(), start_strategy: "exact".to_owned(), rules: UNRESTRICTED };
    let solution = solve(&strategy, &model).unwrap();
    assert_eq!((solution.strategy, &solution.assignment), ("refine", &start));
    assert_eq!(solution.strategy_options, ["start=exact", "drop=true", "remainder=true"]);
    // The default strategy is optimal.
    assert!(solution.explanation.optimality_gap.is_some_and(|gap| gap >= -1e-9));
}
