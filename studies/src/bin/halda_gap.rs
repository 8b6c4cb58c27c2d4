//! Measures the gap between the optimum and the plans of Algorithm 1 of the prima.cpp paper and its variants.
//!
//! ```text
//! cargo run --release -p hearth-studies --bin halda_gap [-- FILE ...]
//! ```
//!
//! Each line of a file is an LDA instance, or an object with an instance in the key `instance`. The default files are
//! those of `halda/tests/data/lda`. In the first table every device must have a layer. In the second table devices may
//! be dropped; it also shows how the removal of devices with one layer changes the time per token. Both tables compare
//! with the strategy `exact`. Instances without a plan are ignored; `refused` counts instances for which a plan exists
//! but the strategy finds none. The key `halda_global_text` of an object is the plan of a different interpretation
//! of Algorithm 1; the last lines list the differences from these plans.

use std::fmt::Write as _;
use std::path::Path;

use hearth_halda::{ExactSearch, Halda, Instance, LatencyModel, PlanRules, Strategy, solve};
use hearth_studies::StudyError;
use serde_json::Value;

/// Maximum relative difference between times that count as equal. source: the tolerance of the certified optima
const TOLERANCE: f64 = 1e-9;

struct Row {
    name: String,
    instance: Instance,
    /// The recorded plan of the other interpretation of Algorithm 1, if the key `halda_global_text` is present.
    other_interpretation: Option<Value>,
}

fn main() -> Result<(), StudyError> {
    let mut files: Vec<String> = std::env::args().skip(1).collect();
    if files.is_empty() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../halda/tests/data/lda");
        let path = |size| folder.join(format!("{size}.jsonl")).to_string_lossy().into_owned();
        files = ["small", "medium", "hard"].map(path).to_vec();
    }
    let mut rows = Vec::new();
    for file in files {
        for (line, text) in std::fs::read_to_string(&file)?.lines().enumerate() {
            let mut row: Value = serde_json::from_str(text)?;
            let other_interpretation = row.get("halda_global_text").cloned();
            let bare = row.get_mut("instance").map(Value::take).unwrap_or(row);
            let instance = serde_json::from_value(bare)?;
            rows.push(Row { name: format!("{file}:{}", line + 1), instance, other_interpretation });
        }
    }
    println!("every device keeps a layer     plans  optimal  refused  median gap  above 2x");
    for may_drop in [false, true] {
        if may_drop {
            println!("\ndevices may be dropped");
        }
        for (label, halda) in [
            ("halda", Halda::PRIMA_CPP_PAPER),
            ("halda, flips", Halda { flip_memory_cases: true, ..Halda::PRIMA_CPP_PAPER }),
            ("halda-shipped", Halda::PRIMA_CPP),
        ] {
            let halda = Halda { may_drop_devices: may_drop, ..halda };
            println!("{label:<29} {}", gaps(&rows, halda)?);
            if may_drop {
                println!("    {}", removals(&rows, halda)?);
            }
        }
    }
    println!("\n{}", readings(&rows)?);
    Ok(())
}

/// Returns the cells of a table row: the numbers of plans, of optimal plans and of instances without a plan of the
/// strategy (`refused`), the median gap, and the share of plans whose time is more than twice the optimum.
fn gaps(rows: &[Row], halda: Halda) -> Result<String, StudyError> {
    let (mut found, mut refused) = (Vec::new(), 0);
    for row in rows {
        let model = LatencyModel::new(&row.instance)?;
        let rules = PlanRules { may_drop_devices: halda.may_drop_devices, may_have_partial_round: false };
        let Ok(optimum) = solve(&ExactSearch { rules, ..ExactSearch::default() }, &model) else { continue };
        match solve(&halda, &model) {
            Ok(solution) => found.push(solution.seconds_per_token() / optimum.seconds_per_token() - 1.0),
            Err(_) => refused += 1,
        }
    }
    found.sort_by(f64::total_cmp);
    let plans = found.len();
    let optimal = found.iter().filter(|gap| **gap <= TOLERANCE).count();
    let double = found.iter().filter(|gap| **gap > 1.0).count();
    let median = found.get(plans / 2).copied().unwrap_or(f64::NAN) * 100.0;
    let share = double as f64 / plans.max(1) as f64 * 100.0;
    Ok(format!("{plans:>6} {optimal:>8} {refused:>8} {median:>9.2} % {share:>7.1} %"))
}

/// Returns how often the removal of devices with one layer changed a plan, and made the plan faster or slower.
fn removals(rows: &[Row], halda: Halda) -> Result<String, StudyError> {
    let (mut removed, mut better, mut worse, mut worst) = (0, 0, 0, 0.0_f64);
    for row in rows {
        let model = LatencyModel::new(&row.instance)?;
        let keep_all = Halda { may_drop_devices: false, ..halda };
        let [Ok(before), Ok(after)] = [keep_all, halda].map(|halda| solve(&halda, &model)) else { continue };
        if after.assignment.window_layers.contains(&0) {
            let change = after.seconds_per_token() / before.seconds_per_token() - 1.0;
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

/// Returns the instances for which the other interpretation of Algorithm 1 gives a different time per token.
fn readings(rows: &[Row]) -> Result<String, StudyError> {
    let (mut compared, mut same, mut listed) = (0, 0, String::new());
    for row in rows {
        let Some(other) = &row.other_interpretation else { continue };
        let model = LatencyModel::new(&row.instance)?;
        let here = solve(&Halda::PRIMA_CPP_PAPER, &model).map(|solution| solution.seconds_per_token()).ok();
        let there = other["T"].as_f64();
        compared += 1;
        let both = here.zip(there).map(|(here, there)| (here / there - 1.0).abs() <= TOLERANCE);
        if both.unwrap_or(here == there) {
            same += 1;
        } else {
            writeln!(listed, "  {} `{}`: {here:?}, there {there:?}", row.name, row.instance.name)?;
        }
    }
    let name = Halda::PRIMA_CPP_PAPER.name();
    Ok(format!(
        "`{name}` agrees with the other interpretation of Algorithm 1 on {same} of {compared} rows\n{listed}"
    ))
}
