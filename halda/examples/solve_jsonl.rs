//! Solves the instances in a JSON Lines file and prints each plan as a JSON line: T, k, w and n (see GLOSSARY.md).
//!
//! ```text
//! cargo run --release -p hearth-halda --example solve_jsonl -- halda/tests/data/lda/small.jsonl [STRATEGY]
//! ```
//!
//! A line of the file is an instance, or an object with an instance under the key `instance`. If an instance has no
//! plan, `t` is null and the reason is printed to standard error.

use std::error::Error;

use hearth_halda::{Instance, LatencyModel, StrategyOptions, solve, strategy_by_name};
use serde_json::{Value, json};

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let file = arguments.next().ok_or("usage: solve_jsonl FILE [STRATEGY]")?;
    let strategy = arguments.next().unwrap_or_else(|| "exact".to_owned());
    let strategy = strategy_by_name(&strategy, &StrategyOptions::default())?;
    for (index, line) in std::fs::read_to_string(&file)?.lines().enumerate() {
        let mut row: Value = serde_json::from_str(line)?;
        let instance = match row.get_mut("instance") {
            Some(instance) => instance.take(),
            None => row,
        };
        let instance: Instance = serde_json::from_value(instance)?;
        let model = LatencyModel::new(&instance)?;
        match solve(strategy.as_ref(), &model) {
            Ok(solution) => {
                let plan = &solution.assignment;
                let (k, w, n) = (plan.rounds, &plan.window_layers, &plan.gpu_layers);
                let line =
                    json!({"name": instance.name, "t": solution.seconds_per_token(), "k": k, "w": w, "n": n});
                println!("{line}");
            }
            Err(error) => {
                eprintln!("{file}:{}: {error}", index + 1);
                println!("{}", json!({"name": instance.name, "t": null}));
            }
        }
    }
    Ok(())
}
