//! Solves one LDA instance a line and prints one JSON line for each.
//!
//! ```text
//! cargo run --release -p hearth-halda --example solve_jsonl -- FILE \
//!     [--strategy overlap|exact|halda|halda-shipped|exhaustive|single|mem|perf|edgeshard|lingualinked|even] \
//!     [--select] [--remainder] [--k K]
//! ```
//!
//! A line is an instance or an object with an `instance`. The answer is
//! `{"id":..,"t":..,"k":..,"w":[..],"n":[..]}`: `id` is the line's `id`, else its `name`, else the name of its
//! instance; `t` is null if no plan exists, and standard error then says why. Device 0 is the head, except
//! that `single` picks its own. `--select` lets other devices have no layers, `--remainder` lets the last turn
//! be partial. The first line that is not an instance ends the run with its number.

use std::io::{BufRead, BufReader, BufWriter, Write};
use std::process::ExitCode;

use hearth_halda::{Instance, LatencyModel, Rules, Strategy, StrategyOptions, solve, strategy_by_name};
use serde::Serialize;
use serde_json::Value;

const USAGE: &str = "usage: solve_jsonl FILE [--strategy overlap|exact|halda|halda-shipped|exhaustive|single|mem|perf|\
                     edgeshard|lingualinked|even] [--select] [--remainder] [--k K]";

#[derive(Serialize)]
struct Answer {
    id: Value,
    t: Option<f64>,
    k: Option<u32>,
    w: Vec<u32>,
    n: Vec<u32>,
}

fn main() -> ExitCode {
    match run(std::env::args().skip(1)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("error: {message}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: impl Iterator<Item = String>) -> Result<(), String> {
    let (file, strategy) = parse(arguments)?;
    let input = std::fs::File::open(&file).map_err(|error| format!("cannot open {file}: {error}"))?;
    let mut output = BufWriter::new(std::io::stdout().lock());
    for (index, line) in BufReader::new(input).lines().enumerate() {
        let place = format!("{file}:{}", index + 1);
        let answer = line
            .map_err(|error| error.to_string())
            .and_then(|line| answer(&line, strategy.as_ref(), &place))
            .map_err(|error| format!("{place}: {error}"))?;
        serde_json::to_writer(&mut output, &answer).map_err(|error| error.to_string())?;
        output.write_all(b"\n").map_err(|error| error.to_string())?;
    }
    output.flush().map_err(|error| error.to_string())
}

fn answer(line: &str, strategy: &dyn Strategy, place: &str) -> Result<Answer, String> {
    let (id, instance) = read(line)?;
    let model = LatencyModel::new(&instance).map_err(|error| error.to_string())?;
    match solve(strategy, &model) {
        Ok(solution) => Ok(Answer {
            id,
            t: Some(solution.seconds()),
            k: Some(solution.assignment.rounds),
            w: solution.assignment.window_layers,
            n: solution.assignment.gpu_layers,
        }),
        Err(refusal) => {
            eprintln!("note: {place}: {refusal}");
            Ok(Answer { id, t: None, k: None, w: Vec::new(), n: Vec::new() })
        }
    }
}

fn read(line: &str) -> Result<(Value, Instance), String> {
    let row: Value = serde_json::from_str(line).map_err(|error| format!("not JSON: {error}"))?;
    let wrapped = row.get("instance").is_some();
    let mut id = ["id", "name"].into_iter().find_map(|key| row.get(key).cloned()).filter(|_| wrapped);
    let bare = if wrapped { row["instance"].clone() } else { row };
    let instance: Instance =
        serde_json::from_value(bare).map_err(|error| format!("not an LDA instance: {error}"))?;
    let id = id.take().unwrap_or_else(|| Value::String(instance.name.clone()));
    Ok((id, instance))
}

fn parse(mut arguments: impl Iterator<Item = String>) -> Result<(String, Box<dyn Strategy>), String> {
    let mut file = None;
    let mut name = "exact".to_owned();
    let mut rules = Rules::default();
    let mut rounds = None;
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--select" => rules.may_drop = true,
            "--remainder" => rules.may_leave_remainder = true,
            "--strategy" => name = arguments.next().ok_or("--strategy needs a name")?,
            "--k" => {
                let text = arguments.next().ok_or("--k needs a number")?;
                rounds = Some(text.parse().map_err(|_| format!("--k needs a whole number, not `{text}`"))?);
            }
            option if option.starts_with('-') => return Err(format!("unknown option `{option}`\n{USAGE}")),
            _ if file.is_none() => file = Some(argument),
            _ => return Err(format!("one file only, not also `{argument}`\n{USAGE}")),
        }
    }
    let file = file.ok_or(USAGE)?;
    let options = StrategyOptions { rules, rounds, ..StrategyOptions::default() };
    let strategy = strategy_by_name(&name, &options).map_err(|error| format!("{error}\n{USAGE}"))?;
    Ok((file, strategy))
}
