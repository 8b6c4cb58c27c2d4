//! Measures the gap between the optimum and Algorithm 1 of the prima.cpp paper, with its variants.
//!
//! ```text
//! cargo run --release -p hearth-studies --bin halda_gap [-- FILE ...]
//! ```
//!
//! Each line of a file is an LDA instance, or an object with an instance in the key `instance`. The default files are
//! those of `halda/tests/data/lda`. In the first table every device must have a layer; in the second, devices may be
//! dropped, and it also shows how the removal of devices with one layer changes T. Both compare with `exact`.
//! Instances without a plan are ignored; `refused` counts instances for which a plan exists but the strategy finds
//! none. If an object has the key `halda_global_text`, the result of another reading of Algorithm 1, the last lines
//! list the differences.

use std::fmt::Write as _;
use std::path::Path;

use hearth_halda::{Exact, Halda, Instance, LatencyModel, Rules, Strategy, solve};
use serde_json::Value;

/// Maximum relative difference of equal times. source: the tolerance of the certified optima.
const TOLERANCE: f64 = 1e-9;

/// An instance and its origin.
struct Row {
    name: String,
    instance: Instance,
    /// The result of another reading of Algorithm 1.
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
        ("halda-shipped", Halda { may_drop: false, ..Halda::PRIMA_CPP }),
    ] {
        println!("{label:<29} {}", gaps(&rows, halda)?);
    }
    println!("\ndevices may be dropped");
    for (label, halda) in [
        ("halda", drop),
        ("halda, flips", Halda { flip_memory_cases: true, ..drop }),
        ("halda-shipped", Halda::PRIMA_CPP),
    ] {
        println!("{label:<29} {}", gaps(&rows, halda)?);
        println!("    {}", removals(&rows, halda)?);
    }
    println!("\n{}", readings(&rows)?);
    Ok(())
}

/// Returns the cells of a table row: plans, optimal plans, refused instances, median gap, and the share of plans with
/// more than twice the optimum.
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
    let optimal = found.iter().filter(|gap| **gap <= TOLERANCE).count();
    let double = found.iter().filter(|gap| **gap > 1.0).count();
    let median = found.get(found.len() / 2).copied().unwrap_or(f64::NAN) * 100.0;
    let share = double as f64 / found.len().max(1) as f64 * 100.0;
    let plans = found.len();
    Ok(format!("{plans:>6} {optimal:>8} {refused:>8} {median:>9.2} % {share:>7.1} %"))
}

/// Returns how often the removal of devices with one layer changed a plan, and how often T became better or worse.
fn removals(rows: &[Row], halda: Halda) -> Result<String, Box<dyn std::error::Error>> {
    let (mut removed, mut better, mut worse, mut worst) = (0, 0, 0, 0.0_f64);
    for row in rows {
        let model = LatencyModel::new(&row.instance)?;
        let (Ok(before), Ok(after)) =
            (solve(&Halda { may_drop: false, ..halda }, &model), solve(&halda, &model))
        else {
            continue;
        };
        if after.assignment.window_layers.contains(&0) {
            let change = after.seconds() / before.seconds() - 1.0;
            removed += 1;
            better += usize::from(change < -TOLERANCE);
            worse += usize::from(change > TOLERANCE);
            worst = worst.max(change);
        }
    }
    Ok(format!(
        "devices were removed in {removed} plans: {better} faster, {worse} slower, at worst by {:.0} %",
        worst * 100.0
    ))
}

/// Returns the instances with different results in the other reading of Algorithm 1.
fn readings(rows: &[Row]) -> Result<String, Box<dyn std::error::Error>> {
    let (mut compared, mut same, mut listed) = (0, 0, String::new());
    for row in rows {
        let Some(other) = &row.other_reading else { continue };
        let model = LatencyModel::new(&row.instance)?;
        let here = solve(&Halda::PAPER, &model).map(|solution| solution.seconds()).ok();
        let there = other["T"].as_f64();
        compared += 1;
        let equal = match (here, there) {
            (Some(here), Some(there)) => (here / there - 1.0).abs() <= TOLERANCE,
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
