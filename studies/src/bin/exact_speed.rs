//! Times of `exact`: the fastest and the median of repeated runs, in microseconds of processor
//! time where the system tells it, so that a busy machine matters little.
//!
//! ```text
//! cargo run --release -p hearth-studies --bin exact_speed
//! ```
//!
//! The instances are made of the devices in `tests/data/lda/medium.jsonl`, a different selection for each
//! run, and a model of 80 layers; `links` gives every pair a hop of its own. `plan` is the search alone, `solve` adds
//! the check and the explanation. The last lines are the worst case: 64 devices, 512 layers, everything free.
#![expect(clippy::disallowed_methods, reason = "this measures; nothing depends on the result")]

use std::time::{Duration, Instant};

use hearth_halda::{
    Device, Exact, HeadChoice, Instance, LatencyModel, Model, OrderChoice, Rules, Strategy, solve,
};

const RUNS: usize = 60;

const FIXED: Rules = Rules { may_drop: false, may_leave_remainder: false };
const SELECT: Rules = Rules { may_drop: true, may_leave_remainder: false };
const EVERYTHING: Rules = Rules { may_drop: true, may_leave_remainder: true };

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut instances: Vec<Instance> = Vec::new();
    for line in include_str!("../../../halda/tests/data/lda/medium.jsonl").lines() {
        let row: serde_json::Value = serde_json::from_str(line)?;
        instances.push(serde_json::from_value(row["instance"].clone())?);
    }
    let devices: Vec<Device> = instances.iter().flat_map(|instance| instance.devices.clone()).collect();
    let model =
        instances.iter().map(|i| &i.model).find(|model| model.model_layers == 80).ok_or("no 80 layers")?;

    println!("devices  rules                       what    fastest us   median us");
    let exact = |rules, order| Exact { rules, order, ..Exact::default() };
    for count in [4, 8, 12, 16, 32] {
        for (label, exact, links, runs) in [
            ("fixed", exact(FIXED, OrderChoice::Given), false, RUNS),
            ("select", exact(SELECT, OrderChoice::Given), false, RUNS),
            ("select+links", exact(SELECT, OrderChoice::Given), true, RUNS),
            ("select+links+order", exact(SELECT, OrderChoice::Best), true, 3),
            ("select+remainder", exact(EVERYTHING, OrderChoice::Given), false, 3),
        ] {
            measure(label, exact, runs, |run| instance(model, &devices, run, count, links))?;
        }
    }
    let deep = Model { model_layers: 512, ..model.clone() };
    for (count, links, order, rounds) in [
        (12, true, OrderChoice::Best, None),
        (64, false, OrderChoice::Given, None),
        (64, true, OrderChoice::Given, None),
        (64, true, OrderChoice::Best, None),
        (64, false, OrderChoice::Given, Some(2)),
        (64, true, OrderChoice::Best, Some(2)),
        (64, true, OrderChoice::Best, Some(100)),
    ] {
        let label = format!("x512 {}{order:?} {rounds:?}", if links { "links " } else { "" });
        let exact = Exact { rules: EVERYTHING, head: HeadChoice::Best, rounds, order };
        measure(&label, exact, 2, |run| instance(&deep, &devices, run, count, links))?;
    }
    Ok(())
}

fn instance(model: &Model, devices: &[Device], run: usize, count: usize, links: bool) -> Instance {
    let chosen = (0..count).map(|index| devices[(run * 7 + index) % devices.len()].clone());
    // Some 1 to 6 ms, different both ways.
    let hop = |from: usize, to: usize| Some(1e-3 + ((from * 7 + to * 13 + run) % 11) as f64 * 5e-4);
    let rows = (0..count).map(|from| (0..count).map(|to| hop(from, to)).collect()).collect();
    Instance {
        name: format!("{count}x{}", model.model_layers),
        slow_disk_threshold: 3e8,
        model: model.clone(),
        devices: chosen.collect(),
        hops: links.then_some(rows),
    }
}

fn measure(
    label: &str,
    exact: Exact,
    runs: usize,
    instance: impl Fn(usize) -> Instance,
) -> Result<(), Box<dyn std::error::Error>> {
    let (mut plan, mut whole) = (Vec::new(), Vec::new());
    let mut devices = 0;
    for run in 0..runs {
        let instance = instance(run);
        devices = instance.devices.len();
        let mut found = Ok(());
        plan.push(timed(|| {
            found = LatencyModel::new(&instance).map(|latency| drop(exact.propose(&latency)));
        }));
        found?;
        let latency = LatencyModel::new(&instance)?;
        whole.push(timed(|| drop(solve(&exact, &latency))));
    }
    for (what, mut times) in [("plan", plan), ("solve", whole)] {
        times.sort_by(f64::total_cmp);
        let (fastest, median) = (times[0], times[times.len() / 2]);
        println!("{devices:>7}  {label:<27} {what:<6} {fastest:>11.0} {median:>11.0}");
    }
    Ok(())
}

/// Microseconds that something takes: of this thread's processor time if it is long enough for Linux to count it.
fn timed(act: impl FnOnce()) -> f64 {
    let (begin, busy) = (Instant::now(), processor_time());
    act();
    let wall = begin.elapsed();
    match busy.zip(processor_time()) {
        Some((before, after)) if wall > COUNTED => (after - before) / 1e3,
        _ => wall.as_secs_f64() * 1e6,
    }
}

/// Linux counts processor time at its clock ticks, of 4 ms or less.
const COUNTED: Duration = Duration::from_millis(100);

/// Nanoseconds that this thread has computed.
fn processor_time() -> Option<f64> {
    let accounting = std::fs::read_to_string("/proc/thread-self/schedstat").ok()?;
    accounting.split_ascii_whitespace().next()?.parse().ok()
}
