//! Measures the CPU time of the planners: the shortest and the median time of repeated runs, in microseconds.
//!
//! ```text
//! cargo run --release -p hearth-studies --bin planner_speed
//! cargo run --release -p hearth-studies --bin planner_speed -- --limits
//! ```
//!
//! The instances have a model of 80 layers and devices of `halda/tests/data/lda/medium.jsonl`, different devices for
//! each run. In the output, `plan` is only the search, and `solve` also includes the check and the explanation of the
//! plan. `plans` is the number of runs with a plan, because runs that end with an error are faster.
//!
//! The first command compares `exact`, `overlap` and `halda` with 4 to 32 devices; `halda` runs with and without
//! pruning by a bound. The prima.cpp paper (section 3.3) reports 10 to 12 ms for 4 to 32 devices, on an unnamed
//! machine. The second command measures `exact` with individual hop times for each pair of devices, up to 64 devices
//! and 512 layers, with fixed and free device orders and numbers of rounds.

use hearth_halda::{
    ExactSearch, Halda, HeadChoice, Instance, LatencyModel, Model, OrderChoice, OverlapSearch, PlanRules,
    Strategy, solve,
};
use hearth_studies::{StudyError, measure_cpu_seconds, medium_model_and_devices, planning_instance};

/// Number of timed runs of each planner. source: assumed, enough for a stable median
const RUNS: usize = 60;
/// Number of timed runs of the searches that take about a hundred times as long as the others. source: assumed
const SLOW_RUNS: usize = 3;

const KEEP_ALL: PlanRules = PlanRules { may_drop_devices: false, may_have_partial_round: false };
const SELECT: PlanRules = PlanRules { may_drop_devices: true, may_have_partial_round: false };
/// Planning rules by which devices may be dropped and the last round may be partial.
const FREE: PlanRules = PlanRules { may_drop_devices: true, may_have_partial_round: true };

fn main() -> Result<(), StudyError> {
    println!("devices  case                planner               what    fastest us   median us  plans");
    if std::env::args().any(|argument| argument == "--limits") { limits() } else { planners() }
}

fn planners() -> Result<(), StudyError> {
    let (model, devices) = medium_model_and_devices()?;
    for count in [4, 8, 16, 32] {
        let make = |run| planning_instance(&model, &devices, run, count);
        for (case, rules) in [("keep all", KEEP_ALL), ("select", SELECT)] {
            let halda = Halda { may_drop_devices: rules.may_drop_devices, ..Halda::PRIMA_CPP_PAPER };
            measure(case, "exact", &ExactSearch { rules, ..ExactSearch::default() }, RUNS, make)?;
            measure(case, "overlap", &OverlapSearch { rules, ..OverlapSearch::default() }, RUNS, make)?;
            measure(case, "halda", &halda, RUNS, make)?;
            measure(case, "halda, every k", &Halda { prune_by_bound: false, ..halda }, RUNS, make)?;
        }
        let free = ExactSearch { rules: FREE, ..ExactSearch::default() };
        measure("remainder", "exact", &free, SLOW_RUNS, make)?;
    }
    Ok(())
}

fn limits() -> Result<(), StudyError> {
    let (model, devices) = medium_model_and_devices()?;
    let with_links = |instance: Instance, run: usize| {
        // 1 to 6 ms, different in both directions.
        let count = instance.devices.len();
        let hop = |from: usize, to: usize| Some(1e-3 + ((from * 7 + to * 13 + run) % 11) as f64 * 5e-4);
        let rows = (0..count).map(|from| (0..count).map(|to| hop(from, to)).collect()).collect();
        Instance { pair_hop_seconds: Some(rows), ..instance }
    };
    for count in [4, 8, 12, 16, 32] {
        let make = |run| with_links(planning_instance(&model, &devices, run, count), run);
        let exact = ExactSearch { rules: SELECT, ..ExactSearch::default() };
        let free_order = ExactSearch { order: OrderChoice::Best, ..exact };
        measure("links", "exact", &exact, RUNS, make)?;
        measure("links, free order", "exact", &free_order, SLOW_RUNS, make)?;
    }
    let deep = Model { model_layers: 512, ..model };
    for (count, links, order, rounds) in [
        (12, true, OrderChoice::Best, None),
        (64, false, OrderChoice::Given, None),
        (64, true, OrderChoice::Given, None),
        (64, true, OrderChoice::Best, None),
        (64, false, OrderChoice::Given, Some(2)),
        (64, true, OrderChoice::Best, Some(2)),
        (64, true, OrderChoice::Best, Some(100)),
    ] {
        let rounds_text = rounds.map_or("free".into(), |rounds: u32| rounds.to_string());
        let links_text = if links { "links, " } else { "" };
        let case = format!("{links_text}512 layers, order {order:?}, rounds {rounds_text}");
        let exact = ExactSearch { rules: FREE, head: HeadChoice::Best, rounds, order };
        measure(&case, "exact", &exact, 2, |run| {
            let instance = planning_instance(&deep, &devices, run, count);
            if links { with_links(instance, run) } else { instance }
        })?;
    }
    Ok(())
}

fn measure(
    case: &str,
    planner: &str,
    strategy: &dyn Strategy,
    runs: usize,
    make: impl Fn(usize) -> Instance,
) -> Result<(), StudyError> {
    let (mut plan, mut whole, mut plans, mut devices) = (Vec::new(), Vec::new(), 0, 0);
    for instance in (0..runs).map(make) {
        devices = instance.devices.len();
        let (found, seconds) =
            measure_cpu_seconds(|| LatencyModel::new(&instance).map(|model| drop(strategy.propose(&model))));
        found?;
        plan.push(seconds * 1e6);
        let model = LatencyModel::new(&instance)?;
        let (solved, seconds) = measure_cpu_seconds(|| solve(strategy, &model));
        whole.push(seconds * 1e6);
        plans += usize::from(solved.is_ok());
    }
    for (what, mut times) in [("plan", plan), ("solve", whole)] {
        times.sort_by(f64::total_cmp);
        let (best, median) = (times[0], times[times.len() / 2]);
        println!("{devices:>7}  {case:<19} {planner:<21} {what:<6} {best:>11.0} {median:>11.0} {plans:>6}");
    }
    Ok(())
}
