//! Gap between Algorithm 1 of the prima.cpp paper, with its variants, and the optimum.
//!
//! ```text
//! cargo run --release -p hearth-studies --bin halda_gap [-- FILE ...]
//! ```
//!
//! The files have one LDA instance a line, bare or as the `instance` of an object; without one these are the rows
//! of `tests/data/lda`. The first table compares with `exact` where every device keeps a layer, the second lets
//! devices be dropped and counts what removing devices with one layer does to T. A row without any plan counts
//! nowhere; `refused` are rows for which a plan exists and the strategy finds none. Where a row has a
//! `halda_global_text`, another reading of Algorithm 1, the last lines say where the two differ.

use std::fmt::Write as _;
use std::path::Path;

use hearth_halda::{Exact, Halda, Instance, LatencyModel, Rules, Strategy, solve};
use serde_json::Value;

/// The relative difference up to which times are equal. source: the tolerance of the certified optima.
const SAME: f64 = 1e-9;

struct Row {
    name: String,
    instance: Instance,
    other_reading: Option<Value>,
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut files: Vec<String> = std::env::args().skip(1).collect();
    if files.is_empty() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../halda/tests/data/lda");
        let path = |file| folder.join(file).to_string_lossy().into_owned();
        files = ["small.jsonl", "medium.jsonl", "hard.jsonl"].map(path).to_vec();
    }
    let mut rows = Vec::new();
    for file in files {
        for (line, text) in std::fs::read_to_string(&file)?.lines().enumerate() {
            let mut row: Value = serde_json::from_str(text)?;
            let other_reading = row.get("halda_global_text").cloned();
            let bare = row.get_mut("instance").map(Value::take).unwrap_or(row);
            let instance = serde_json::from_value(bare)?;
            rows.push(Row { name: format!("{file}:{}", line + 1), instance, other_reading });
        }
    }
    let keep = Halda::PAPER;
    let drop = Halda { may_drop: true, ..Halda::PAPER };
    println!("every device keeps a layer     plans  optimal  refused  median gap  above 2x");
    for (label, halda) in [
        ("halda", keep),
        ("halda, flips", Halda { flip_memory_cases: true, ..keep }),
        ("halda-shipped", Halda { may_drop: false, ..Halda::SHIPPED }),
    ] {
        println!("{label:<29} {}", gaps(&rows, halda)?);
    }
    println!("\ndevices may be dropped");
    for (label, halda) in [
        ("halda", drop),
        ("halda, flips", Halda { flip_memory_cases: true, ..drop }),
        ("halda-shipped", Halda::SHIPPED),
    ] {
        println!("{label:<29} {}", gaps(&rows, halda)?);
        println!("    {}", removals(&rows, halda)?);
    }
    println!("\n{}", readings(&rows)?);
    Ok(())
}

/// Returns the rows of the table: plans, optimal plans, errors, the median gap, and plans of at least twice the
/// optimum.
fn gaps(rows: &[Row], halda: Halda) -> Result<String, Box<dyn std::error::Error>> {
    let (mut found, mut refused) = (Vec::new(), 0);
    for row in rows {
        let model = LatencyModel::new(&row.instance)?;
        let rules = Rules { may_drop: halda.may_drop, may_leave_remainder: false };
        let Ok(optimum) = solve(&Exact { rules, ..Exact::default() }, &model) else { continue };
        match solve(&halda, &model) {
            Ok(solution) => found.push(solution.seconds() / optimum.seconds() - 1.0),
            Err(_) => refused += 1,
        }
    }
    found.sort_by(f64::total_cmp);
    let optimal = found.iter().filter(|gap| **gap <= SAME).count();
    let double = found.iter().filter(|gap| **gap > 1.0).count();
    let median = found.get(found.len() / 2).copied().unwrap_or(f64::NAN) * 100.0;
    let share = double as f64 / found.len().max(1) as f64 * 100.0;
    let plans = found.len();
    Ok(format!("{plans:>6} {optimal:>8} {refused:>8} {median:>9.2} % {share:>7.1} %"))
}

/// Returns how often devices with one layer were removed, and how often T became better and worse.
fn removals(rows: &[Row], halda: Halda) -> Result<String, Box<dyn std::error::Error>> {
    let (mut fired, mut better, mut worse, mut worst) = (0, 0, 0, 0.0_f64);
    for row in rows {
        let model = LatencyModel::new(&row.instance)?;
        let (Ok(before), Ok(after)) =
            (solve(&Halda { may_drop: false, ..halda }, &model), solve(&halda, &model))
        else {
            continue;
        };
        if after.assignment.window_layers.contains(&0) {
            let change = after.seconds() / before.seconds() - 1.0;
            fired += 1;
            better += usize::from(change < -SAME);
            worse += usize::from(change > SAME);
            worst = worst.max(change);
        }
    }
    Ok(format!(
        "removal fired {fired} times: faster {better}, slower {worse}, at worst by {:.0} %",
        worst * 100.0
    ))
}

/// Returns the instances on which the other reading of Algorithm 1 gives another result.
fn readings(rows: &[Row]) -> Result<String, Box<dyn std::error::Error>> {
    let (mut compared, mut same, mut listed) = (0, 0, String::new());
    for row in rows {
        let Some(other) = &row.other_reading else { continue };
        let model = LatencyModel::new(&row.instance)?;
        let here = solve(&Halda::PAPER, &model).map(|solution| solution.seconds()).ok();
        let there = other["T"].as_f64();
        compared += 1;
        let equal = match (here, there) {
            (Some(here), Some(there)) => (here / there - 1.0).abs() <= SAME,
            (None, None) => true,
            _ => false,
        };
        same += usize::from(equal);
        if !equal {
            writeln!(listed, "  {} `{}`: {here:?}, there {there:?}", row.name, row.instance.name)?;
        }
    }
    let name = Halda::PAPER.name();
    Ok(format!("`{name}` agrees with another reading of Algorithm 1 on {same} of {compared} rows\n{listed}"))
}
