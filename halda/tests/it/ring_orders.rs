//! Hop times for each pair of devices, missing links, relays and orders of the ring.
//!
//! Plans for three and four devices are compared with hand-computed ones. On random hops, plans are compared with an
//! exhaustive search over all splits, choices of relays and orders.

use std::collections::BTreeMap;

use hearth_halda::{
    Assignment, Device, DropReason, EvenWindows, ExactSearch, ExhaustiveSearch, HeadChoice, Instance,
    LatencyModel, LayerCounts, ManualPlan, Objective, OrderChoice, OverlapSearch, Solution,
    Strategy as Planner, StrategyError, Violation, solve, violations,
};
use proptest::prelude::*;

use crate::fixtures::{
    ALL_RULES, MAY_DROP, UNRESTRICTED, check_best_head, check_equally_fast, config_with_cases, nearly_equal,
    plain_device, plain_instance, plain_model,
};

const LAYER_BYTES: u64 = 100 << 20;

/// Returns a device that computes a layer in `milliseconds`, holds `holds` layers in memory, and has a slow disk.
fn device(name: &str, milliseconds: f64, holds: u64) -> Device {
    Device {
        cpu_speed: BTreeMap::from([("q4k".to_owned(), 1e9 / (milliseconds / 1e3))]),
        // The kernel needs some additional memory for the pages of weights.
        ram_available: holds * LAYER_BYTES + (24 << 20),
        ..plain_device(name)
    }
}

/// Returns an instance with identical layers. `hops[i][j]` is the hop time from device i to device j in seconds;
/// `None` if they have no link.
fn instance(layers: u32, devices: Vec<Device>, hops: Vec<Vec<Option<f64>>>) -> Instance {
    let plain = plain_instance(plain_model(layers, LAYER_BYTES, 1e9), devices);
    Instance { slow_disk_threshold: 1e8, pair_hop_seconds: Some(hops), ..plain }
}

/// Converts hops in milliseconds to seconds; a negative hop is a missing link.
fn hops<const M: usize>(rows: [[i32; M]; M]) -> Vec<Vec<Option<f64>>> {
    let entry = |hop: i32| (hop >= 0).then_some(f64::from(hop) / 1e3);
    rows.into_iter().map(|row| row.into_iter().map(entry).collect()).collect()
}

#[track_caller]
fn near(found: f64, milliseconds: f64) {
    assert!((found * 1e3 - milliseconds).abs() < 1e-6, "{found} s is not {milliseconds} ms");
}

fn best(instance: &Instance, order: OrderChoice) -> Result<Solution, StrategyError> {
    let model = LatencyModel::new(instance).unwrap();
    solve(&ExactSearch { rules: MAY_DROP, order, ..ExactSearch::default() }, &model)
}

#[test]
fn hops_go_to_the_next_device_in_each_round() {
    let rows = hops([[0, 1, 2], [10, 0, 20], [100, 200, 0]]);
    let devices = ["a", "b", "c"].map(|name| device(name, 1.0, 100)).into();
    let instance = instance(10, devices, rows);
    let model = LatencyModel::new(&instance).unwrap();
    let hops = |windows: [u32; 3], rounds, ring_order: Option<Vec<usize>>| -> Vec<u32> {
        let assignment = Assignment::new(0, rounds, windows.into(), vec![0; 3]);
        let breakdown = model.evaluate(&Assignment { ring_order, ..assignment }).unwrap();
        breakdown.devices.iter().map(|terms| (terms.communication_seconds * 1e3).round() as u32).collect()
    };
    assert_eq!(hops([4, 3, 3], 1, None), [1, 20, 100]);
    assert_eq!(hops([5, 0, 5], 1, None), [2, 0, 100], "b is skipped");
    assert_eq!(hops([10, 0, 0], 1, None), [0, 0, 0], "a ring of one device has no hops");
    assert_eq!(hops([4, 3, 3], 1, Some(vec![0, 2, 1])), [2, 10, 200]);
    assert_eq!(hops([5, 0, 5], 1, Some(vec![0, 1, 2])), [1, 20, 100], "b relays");
    // W = 4, R = 2: after two whole rounds, the partial round has only a, or a and b, or a and the relay c.
    assert_eq!(hops([2, 1, 1], 3, None), [2, 40, 200]);
    assert_eq!(hops([1, 1, 2], 3, None), [3, 2 * 20 + 10, 200]);
    assert_eq!(hops([2, 2, 0], 3, Some(vec![0, 2, 1])), [2 * 2 + 2, 20, 2 * 200 + 100]);
    let windows = Assignment::new(0, 3, vec![2, 2, 0], vec![0; 3]);
    let found = violations(&model, &Assignment { ring_order: Some(vec![0, 2, 1]), ..windows }, UNRESTRICTED);
    assert!(matches!(found[..], [Violation::RelayInPartialRound { .. }]), "{found:?}");
}

#[test]
fn weak_device_becomes_a_relay() {
    // a cannot send to c. Each of them holds 5 of 10 layers. b would take 50 ms for a layer.
    let rows = hops([[0, 2, -1], [2, 0, 3], [4, 4, 0]]);
    let devices = vec![device("a", 1.0, 5), device("b", 50.0, 4), device("c", 1.0, 5)];
    let mut instance = instance(10, devices, rows);
    for order in [OrderChoice::Given, OrderChoice::Best] {
        let solution = best(&instance, order).unwrap();
        assert_eq!(solution.assignment.window_layers, [5, 0, 5]);
        assert_eq!(solution.assignment.ring(), [0, 1, 2]);
        assert!(solution.assignment.is_relay(1));
        near(solution.seconds_per_token(), 10.0 + 2.0 + 3.0 + 4.0);
        let relay = solution.explanation.devices[1].relay.as_ref().unwrap();
        let neighbours = (relay.previous_device.as_str(), relay.next_device.as_str());
        assert_eq!((neighbours, relay.has_direct_link), (("a", "c"), false));
        assert_eq!(solution.breakdown.devices[1].layer_counts, LayerCounts::default());
    }
    // A manual plan gets the relay too.
    let model = LatencyModel::new(&instance).unwrap();
    let manual = ManualPlan { window_layers: vec![5, 0, 5], ..ManualPlan::default() };
    let manual = solve(&manual, &model).unwrap();
    assert_eq!(manual.assignment.ring_order, Some(vec![0, 1, 2]));
    near(manual.seconds_per_token(), 19.0);
    // Without the link from b to c there is no plan.
    instance.pair_hop_seconds.as_mut().unwrap()[1][2] = None;
    let refusal = best(&instance, OrderChoice::Given).unwrap_err().to_string();
    let expected = "no ring in this order connects enough devices to hold a round of 10 layers";
    assert!(refusal.contains(expected), "{refusal}");
    assert!(best(&instance, OrderChoice::Best).is_err());
    let model = LatencyModel::new(&instance).unwrap();
    let gap = solve(&EvenWindows { rounds: 1 }, &model).unwrap_err().to_string();
    let sentence = "the plan of `even` is not allowed: `b` has no link to `c`, the next device in the ring";
    assert!(gap.starts_with(sentence), "{gap}");
}

#[test]
fn best_order_follows_the_short_links() {
    // In the given order each hop takes 9 ms, in the reverse order 1 ms. All four devices are needed.
    let rows = hops([[0, 9, 5, 1], [1, 0, 9, 5], [5, 1, 0, 9], [9, 5, 1, 0]]);
    let devices = ["a", "b", "c", "d"].map(|name| device(name, 1.0, 2)).into();
    let instance = instance(8, devices, rows);
    let given = best(&instance, OrderChoice::Given).unwrap();
    near(given.seconds_per_token(), 8.0 + 36.0);
    let free = best(&instance, OrderChoice::Best).unwrap();
    assert_eq!(free.assignment.ring_order, Some(vec![0, 3, 2, 1]));
    near(free.seconds_per_token(), 8.0 + 4.0);
    assert_eq!(free.strategy_options, ["drop=true", "order=best"]);
    assert_eq!(free.explanation.incomplete_search, None);
}

#[test]
fn unreachable_device_is_dropped() {
    let rows = hops([[0, 1, -1], [1, 0, -1], [1, 1, 0]]);
    let devices = vec![device("a", 1.0, 2), device("b", 1.0, 2), device("c", 0.1, 9)];
    let solution = best(&instance(4, devices, rows), OrderChoice::Best).unwrap();
    assert_eq!(solution.assignment.window_layers, [2, 2, 0]);
    assert_eq!(solution.explanation.devices[2].drop_reason, Some(DropReason::Unreachable));
}

#[test]
fn invalid_hop_matrix_is_an_error() {
    let error = |rows: Vec<Vec<Option<f64>>>| {
        let devices = vec![device("a", 1.0, 2), device("b", 1.0, 2)];
        LatencyModel::new(&instance(4, devices, rows)).unwrap_err().to_string()
    };
    let (row, nan) = (vec![Some(0.0), Some(1.0)], vec![Some(f64::NAN), None]);
    assert_eq!(error(vec![row.clone()]), "`t_comm_between` has 1 rows, but there are 2 devices");
    for (second, problem) in [
        (vec![None], "has 1 entries in the row of devices[1] `b`, but there are 2 devices"),
        (vec![Some(-1.0), None], "of the hop from devices[1] `b` to `a` is -1: it must not be negative"),
        (nan, "of the hop from devices[1] `b` to `a` is NaN: it must be a finite number"),
    ] {
        assert_eq!(error(vec![row.clone(), second]), format!("`t_comm_between` {problem}"));
    }
    assert!(error(vec![row, vec![Some(f64::MAX), None]]).contains("infinite time"));
}

#[test]
fn large_ring_has_a_good_order_and_a_bound() {
    // 16 devices on a circle in a permuted order, where a hop takes 1 ms per step. All devices are needed.
    let angle = |device: usize| device * 7 % 16;
    let hop = |from: usize, to: usize| {
        let apart = angle(from).abs_diff(angle(to));
        Some(apart.min(16 - apart) as f64 / 1e3)
    };
    let rows = (0..16).map(|from| (0..16).map(|to| hop(from, to)).collect()).collect();
    let devices = (0..16).map(|index| device(&format!("d{index}"), 1.0, 2)).collect();
    let instance = instance(32, devices, rows);
    let given = best(&instance, OrderChoice::Given).unwrap();
    near(given.seconds_per_token(), 32.0 + 16.0 * 7.0);
    let free = best(&instance, OrderChoice::Best).unwrap();
    near(free.seconds_per_token(), 32.0 + 16.0);
    let limit = free.explanation.incomplete_search.unwrap();
    near(limit.lower_bound_seconds.unwrap(), 32.0 + 16.0);
    assert!(limit.notes[0].starts_with("Not every order of the ring was tried"), "{limit:?}");
}

fn any_hop() -> impl Strategy<Value = Option<f64>> {
    prop_oneof![3 => Just(None), 1 => Just(Some(0.0)), 3 => Just(Some(2e-3)), 5 => (1e-4..2e-2_f64).prop_map(Some)]
}

prop_compose! {
    /// Generates an instance with random hops. `max_layers[i]` is the maximum number of layers with i + 1 devices.
    fn any_ring(max_layers: [u32; 5], devices: std::ops::RangeInclusive<usize>)(devices in devices)(
        layers in 1..=max_layers[devices - 1],
        machines in prop::collection::vec((0.5..20.0_f64, 0..4_u64, any::<bool>()), devices),
        rows in prop::collection::vec(prop::collection::vec(any_hop(), devices), devices),
    ) -> Instance {
        let described = |(index, (milliseconds, holds, reads)): (usize, (f64, u64, bool))| Device {
            disk_read_rate: if reads { 5e9 } else { 1e6 },
            ..device(&format!("d{index}"), milliseconds, holds)
        };
        instance(layers, machines.into_iter().enumerate().map(described).collect(), rows)
    }
}

fn same(model: &LatencyModel, exact: ExactSearch) -> Result<(), TestCaseError> {
    let ExactSearch { rules, rounds, order, .. } = exact;
    let oracle = ExhaustiveSearch { rules, rounds, order, ..ExhaustiveSearch::default() };
    check_equally_fast(&exact, &oracle, model)
}

/// Returns the seconds per token of a strategy's plan, after a check that they are not below the reported bound.
fn bounded_seconds(strategy: &dyn Planner, model: &LatencyModel) -> Option<f64> {
    let solution = solve(strategy, model).ok()?;
    let bound = solution.explanation.incomplete_search.as_ref().and_then(|limit| limit.lower_bound_seconds);
    assert!(bound.is_none_or(|bound| bound <= solution.seconds_per_token() * (1.0 + 1e-9)), "{bound:?}");
    Some(solution.seconds_per_token())
}

proptest! {
    #![proptest_config(config_with_cases(256))]

    #[test]
    fn exact_equals_exhaustive_search_over_orders(instance in any_ring([6, 6, 5, 4, 3], 1..=4)) {
        let model = LatencyModel::new(&instance).unwrap();
        for rules in ALL_RULES {
            same(&model, ExactSearch { rules, ..ExactSearch::default() })?;
            same(&model, ExactSearch { rules, order: OrderChoice::Best, ..ExactSearch::default() })?;
            for rounds in [1, 2, 3] {
                // If L cannot be divided into these rounds, there is nothing to compare.
                let exact = ExactSearch { rules, rounds: Some(rounds), ..ExactSearch::default() };
                if !matches!(solve(&exact, &model), Err(StrategyError::InvalidRounds { .. })) {
                    same(&model, exact)?;
                    if !rules.may_have_partial_round {
                        same(&model, ExactSearch { order: OrderChoice::Best, ..exact })?;
                    }
                }
            }
        }
    }

    #[test]
    fn best_head_is_as_fast_as_the_fastest_fixed_head_with_links(instance in any_ring([12, 12, 12, 12, 12], 1..=5)) {
        let model = LatencyModel::new(&instance).unwrap();
        // With the best order, partial rounds use the order for whole rounds, so heads cannot be compared.
        for (rules, order, rounds) in [
            (MAY_DROP, OrderChoice::Given, None),
            (MAY_DROP, OrderChoice::Best, None),
            (MAY_DROP, OrderChoice::Best, Some(1)),
            (UNRESTRICTED, OrderChoice::Given, Some(2)),
        ] {
            check_best_head(ExactSearch { rules, rounds, order, ..ExactSearch::default() }, &model)?;
        }
    }

    #[test]
    fn overlap_equals_exhaustive_search_over_orders(instance in any_ring([6, 6, 5, 4, 3], 1..=4)) {
        let model = LatencyModel::new(&instance).unwrap();
        for rules in ALL_RULES {
            let seconds = |order| bounded_seconds(&OverlapSearch { rules, order, ..OverlapSearch::default() }, &model);
            let all = ExhaustiveSearch { rules, objective: Objective::SteadyState, ..ExhaustiveSearch::default() };
            let expected = solve(&all, &model).ok().map(|solution| solution.seconds_per_token());
            let given = seconds(OrderChoice::Given);
            prop_assert!(given.is_some() == expected.is_some(), "{:?} is not {:?}", given, expected);
            prop_assert!(given.zip(expected).is_none_or(|(found, expected)| nearly_equal(found, expected)), "{:?} is not {:?}", given, expected);
            let free = seconds(OrderChoice::Best).unwrap_or(f64::INFINITY);
            prop_assert!(free <= given.unwrap_or(f64::INFINITY) * (1.0 + 1e-9));
        }
    }

    #[test]
    fn best_order_is_never_slower_and_never_below_the_bound(instance in any_ring([9, 9, 9, 9, 9], 1..=5)) {
        let model = LatencyModel::new(&instance).unwrap();
        let seconds =
            |rounds, head, order| bounded_seconds(&ExactSearch { rules: UNRESTRICTED, head, rounds, order }, &model);
        for rounds in [None, Some(1), Some(2)] {
            for head in [HeadChoice::Fixed(0), HeadChoice::Best] {
                let given = seconds(rounds, head, OrderChoice::Given).unwrap_or(f64::INFINITY);
                let free = seconds(rounds, head, OrderChoice::Best).unwrap_or(f64::INFINITY);
                if rounds != Some(2) {
                    prop_assert!(free <= given * (1.0 + 1e-9), "{} {:?}: {} and {}", rounds.is_some(), head, free, given);
                }
            }
        }
    }
}

proptest! {
    #![proptest_config(config_with_cases(12))]

    #[test]
    fn exact_equals_exhaustive_search_for_five_devices(instance in any_ring([3, 3, 3, 3, 3], 5..=5)) {
        let model = LatencyModel::new(&instance).unwrap();
        for order in [OrderChoice::Given, OrderChoice::Best] {
            same(&model, ExactSearch { rules: MAY_DROP, order, ..ExactSearch::default() })?;
        }
    }
}
