//! `hearth plan --compare`: what does each strategy make of this scenario, and what does the simulator say to it?
//!
//! Each strategy plans once, and each plan is simulated for a few tokens.
//!
//! Not here: `exhaustive`, which takes too long beyond toys, and `manual` without windows.

use std::process::ExitCode;

use hearth_core::Cluster;
use hearth_halda::selection::NAMES;
use hearth_schema::scenario::PlannerOptions;
use hearth_schema::trace::Outcome;
use serde::Serialize;

use super::plan::{self, Summary};
use super::print_json;
use crate::diagnostics::Failure;
use crate::documents::LoadedScenario;
use crate::judge::{Judged, TOKENS};
use crate::output::say;
use crate::progress;
use crate::refinement::{self, Effort};

/// One row of a comparison.
#[derive(Serialize)]
struct Row {
    #[serde(skip)]
    name: &'static str,
    /// The name where there is no plan that has it.
    #[serde(skip_serializing_if = "Option::is_none")]
    strategy: Option<&'static str>,
    #[serde(flatten)]
    plan: Option<Summary>,
    /// What the simulator makes of it.
    simulated: Option<Judged>,
    /// Whether no other row is faster in the simulator.
    best: bool,
    /// Why there is no plan, or no simulation of it.
    refused: Option<String>,
}

/// Plans with every strategy and prints them side by side.
pub fn run(
    loaded: &LoadedScenario,
    cluster: &Cluster,
    options: &PlannerOptions,
    effort: Effort,
    json: bool,
) -> Result<ExitCode, Failure> {
    let line = progress::line();
    let mut rows = Vec::new();
    for strategy in NAMES.into_iter().chain([refinement::NAME]) {
        if strategy == "exhaustive" || strategy == "manual" && options.windows.is_none() {
            continue;
        }
        line.set_message(format!("planning with `{strategy}`"));
        let named = PlannerOptions { strategy: Some(strategy.into()), ..options.clone() };
        rows.push(row(strategy, loaded, cluster, &named, effort));
    }
    line.finish_and_clear();
    mark_best(&mut rows);
    if json {
        print_json(&rows)?;
    } else {
        say!("{}", table(&rows));
    }
    Ok(ExitCode::SUCCESS)
}

fn row(
    strategy: &'static str,
    loaded: &LoadedScenario,
    cluster: &Cluster,
    options: &PlannerOptions,
    effort: Effort,
) -> Row {
    let (name, strategy) = (strategy, Some(strategy));
    let mut row = Row { name, strategy, plan: None, simulated: None, best: false, refused: None };
    match plan::make(loaded, cluster, options, effort) {
        Ok(plan) => {
            (row.plan, row.strategy) = (Some(Summary::of(&plan)), None);
            match Judged::of(&plan, cluster, &loaded.scenario) {
                Ok(judged) => row.simulated = Some(judged),
                Err(failure) => row.refused = Some(failure.reason()),
            }
        }
        Err(failure) => row.refused = Some(failure.reason()),
    }
    row
}

fn mark_best(rows: &mut [Row]) {
    let time = |row: &Row| row.simulated.and_then(|judged| judged.tpot_ms);
    let best = rows.iter().filter_map(time).min_by(f64::total_cmp);
    for row in rows {
        row.best = best.is_some() && time(row) == best;
    }
}

fn table(rows: &[Row]) -> String {
    use std::fmt::Write;
    let mut text = format!(
        "ms a token; simulated: the mean after the first of {TOKENS} generated tokens; * the fastest of these\n"
    );
    let _ = writeln!(
        text,
        "  {:<13} {:>13} {:>13} {:>6}  windows (GPU layers)",
        "strategy", "expected", "simulated", "rounds"
    );
    for row in rows {
        let mark = if row.best { '*' } else { ' ' };
        let Some(plan) = &row.plan else {
            let reason = row.refused.as_deref().unwrap_or_default();
            let _ = writeln!(text, "{mark} {:<13} refused: {reason}", row.name);
            continue;
        };
        let predicted = plan.predicted.tpot_ms.map_or("-".into(), |ms| format!("{ms:.1}"));
        let simulated = row.simulated.map_or("-".into(), simulated);
        let parts: Vec<String> = plan.devices.iter().map(plan::Device::words).collect();
        let _ = writeln!(
            text,
            "{mark} {:<13} {predicted:>13} {simulated:>13} {:>6}  {}",
            row.name,
            plan.rounds,
            parts.join(", ")
        );
        if let Some(reason) = &row.refused {
            let _ = writeln!(text, "  {:<13} not simulated: {reason}", "");
        }
    }
    text
}

fn simulated(judged: Judged) -> String {
    match (judged.outcome, judged.tpot_ms) {
        (Outcome::Ok, Some(ms)) => format!("{ms:.1}"),
        (Outcome::Ok, None) => "-".into(),
        (ended, _) => ended.word().into(),
    }
}
