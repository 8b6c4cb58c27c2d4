//! Times of `exact` and `halda`: the fastest and the median of repeated runs, in microseconds.
//!
//! ```text
//! cargo run --release -p hearth-studies --bin planner_speed
//! ```
//!
//! The instances are made of the devices in `tests/data/lda/medium.jsonl`, a different selection for each
//! run, and a model of 80 layers. `plan` is the search alone, `solve` adds the check and the explanation.
//! `halda` runs once with an integer programme for every k and once with those skipped that a bound excludes. The
//! last columns divide the median by that of `exact` under the same rules, and count the selections that have a plan
//! at all: a refusal is quick. The prima.cpp paper
//! (section 3.3) gives 10 to 12 ms for 4 to 32 devices, on a machine it does not name.
#![expect(clippy::disallowed_methods, reason = "this measures; nothing depends on the result")]

use std::time::Instant;

use hearth_halda::{Exact, Halda, Instance, LatencyModel, Overlap, Rules, Strategy, solve};

/// Runs of each planner. assumed: enough for a stable median.
const RUNS: usize = 60;
/// Runs with remainder windows, which take a hundred times as long. assumed: likewise.
const SLOW_RUNS: usize = 3;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut instances: Vec<Instance> = Vec::new();
    for line in include_str!("../../../halda/tests/data/lda/medium.jsonl").lines() {
        let row: serde_json::Value = serde_json::from_str(line)?;
        instances.push(serde_json::from_value(row["instance"].clone())?);
    }
    let of_80_layers = |instance: &&Instance| instance.model.model_layers == 80;
    let template = instances.iter().find(of_80_layers).ok_or("no 80 layers")?.clone();
    let devices: Vec<_> = instances.into_iter().flat_map(|instance| instance.devices).collect();
    let made = |run: usize, count: usize| Instance {
        name: format!("{count}x80"),
        slow_disk_threshold: 3e8,
        model: template.model.clone(),
        devices: (0..count).map(|index| devices[(run * 7 + index) % devices.len()].clone()).collect(),
        hops: None,
    };

    println!(
        "devices  rules             planner               what    fastest us   median us  by exact  plans"
    );
    for count in [4, 8, 16, 32] {
        for (label, may_drop, may_leave_remainder) in
            [("fixed", false, false), ("select", true, false), ("select+remainder", true, true)]
        {
            let runs = if may_leave_remainder { SLOW_RUNS } else { RUNS };
            let instances: Vec<Instance> = (0..runs).map(|run| made(run, count)).collect();
            let rules = Rules { may_drop, may_leave_remainder };
            let exact = Exact { rules, ..Exact::default() };
            let base = measure(&exact, &instances)?;
            let print = |planner: &str, (times, plans): Measured| {
                for (what, [fastest, median], [_, of_exact]) in
                    [("plan", times[0], base.0[0]), ("solve", times[1], base.0[1])]
                {
                    let ratio = median / of_exact;
                    println!(
                        "{count:>7}  {label:<17} {planner:<21} {what:<6} {fastest:>11.0} {median:>11.0} \
                         {ratio:>9.1} {plans:>6}"
                    );
                }
            };
            print("exact", base);
            if !may_leave_remainder {
                print("overlap", measure(&Overlap { rules, ..Overlap::default() }, &instances)?);
                let halda = Halda { may_drop, ..Halda::PAPER };
                print("halda", measure(&halda, &instances)?);
                print("halda, every k", measure(&Halda { skips: false, ..halda }, &instances)?);
            }
        }
    }
    Ok(())
}

/// Fastest and median microseconds of proposing and of solving, and how many plans came out.
type Measured = ([[f64; 2]; 2], usize);

fn measure(strategy: &dyn Strategy, instances: &[Instance]) -> Result<Measured, Box<dyn std::error::Error>> {
    let (mut plan, mut whole, mut plans) = (Vec::new(), Vec::new(), 0);
    for instance in instances {
        let start = Instant::now();
        let latency = LatencyModel::new(instance)?;
        let _ = strategy.propose(&latency);
        plan.push(start.elapsed().as_secs_f64() * 1e6);
        let start = Instant::now();
        let solved = solve(strategy, &latency);
        whole.push(start.elapsed().as_secs_f64() * 1e6);
        plans += usize::from(solved.is_ok());
    }
    let sorted = [plan, whole].map(|mut times| {
        times.sort_by(f64::total_cmp);
        [times[0], times[times.len() / 2]]
    });
    Ok((sorted, plans))
}
