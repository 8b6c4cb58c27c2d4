//! How long does `exact` take? Prints the fastest and the median of repeated runs, in microseconds.
//!
//! ```text
//! cargo run --release -p hearth-halda --example time_exact
//! ```
//!
//! The instances are made of the devices in `tests/data/lda/medium.jsonl`, a different selection for each
//! run, and a model of 80 layers. `plan` is the search alone, `solve` adds the check and the explanation.
#![expect(clippy::disallowed_methods, reason = "this measures; nothing depends on the result")]

use std::time::Instant;

use hearth_halda::{Exact, HeadChoice, Instance, LatencyModel, Rules, Strategy, solve};

const RUNS: usize = 60;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut instances: Vec<Instance> = Vec::new();
    for line in include_str!("../tests/data/lda/medium.jsonl").lines() {
        let row: serde_json::Value = serde_json::from_str(line)?;
        instances.push(serde_json::from_value(row["instance"].clone())?);
    }
    let devices: Vec<_> = instances.iter().flat_map(|instance| instance.devices.clone()).collect();
    let model =
        instances.iter().map(|i| &i.model).find(|model| model.model_layers == 80).ok_or("no 80 layers")?;

    println!("devices  rules            what    fastest us   median us");
    for count in [4, 8, 16, 32] {
        for (label, may_drop, may_leave_remainder) in
            [("fixed", false, false), ("select", true, false), ("select+remainder", true, true)]
        {
            let rules = Rules { may_drop, may_leave_remainder };
            let exact = Exact { rules, head: HeadChoice::Fixed(0), ..Exact::default() };
            let (mut plan, mut whole) = (Vec::new(), Vec::new());
            for run in 0..if may_leave_remainder { 3 } else { RUNS } {
                let chosen = (0..count).map(|index| devices[(run * 7 + index) % devices.len()].clone());
                let instance = Instance {
                    name: format!("{count}x80"),
                    slow_disk_threshold: 3e8,
                    model: model.clone(),
                    devices: chosen.collect(),
                    hops: None,
                };
                let start = Instant::now();
                let latency = LatencyModel::new(&instance)?;
                let _ = exact.propose(&latency);
                plan.push(start.elapsed().as_secs_f64() * 1e6);
                let start = Instant::now();
                let _ = solve(&exact, &latency);
                whole.push(start.elapsed().as_secs_f64() * 1e6);
            }
            for (what, mut times) in [("plan", plan), ("solve", whole)] {
                times.sort_by(f64::total_cmp);
                let (fastest, median) = (times[0], times[times.len() / 2]);
                println!("{count:>7}  {label:<16} {what:<6} {fastest:>11.0} {median:>11.0}");
            }
        }
    }
    Ok(())
}
