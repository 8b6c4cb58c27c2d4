//! `hearth lint`: say what is wrong or doubtful about a scenario and a plan for it.
//!
//! Without a plan it looks at the one that the command line and the scenario ask for. Not here: the rules, which are
//! `hearth_halda::lint`.

use std::process::ExitCode;

use hearth_core::Cluster;
use hearth_halda::lint::{self, Finding, Severity};
use hearth_profiles::Bytes;

use super::{plan, print_json};
use crate::cli::{LintArgs, PlanAndModel};
use crate::diagnostics::{ENDED_BADLY, Failure, UNUSABLE};
use crate::documents::{LoadedScenario, read_doubtful_plan};
use crate::limits;
use crate::output::say;

/// Runs the verb.
pub fn run(args: &LintArgs, json: bool) -> Result<ExitCode, Failure> {
    let mut loaded = LoadedScenario::read(&args.scenario)?;
    loaded.keep_weights(&args.planned.planning)?;
    let mut cluster = loaded.cluster_with_all_memory(args.planned.model.as_deref())?;
    let mut found = lint::scenario(&loaded.scenario, &cluster);
    limits::bound_memory(&loaded.scenario, &mut cluster);
    found.extend(of_plan(&args.planned, &loaded, cluster)?);
    found.sort_by_key(|finding| finding.severity);
    if json {
        print_json(&found)?;
    } else {
        say!("{}", table(&found));
    }
    let wrong = found.iter().any(|finding| finding.severity == Severity::Error);
    Ok(if wrong { ExitCode::from(ENDED_BADLY) } else { ExitCode::SUCCESS })
}

/// The findings about the plan, given or made.
fn of_plan(
    asked: &PlanAndModel,
    loaded: &LoadedScenario,
    mut cluster: Cluster,
) -> Result<Vec<Finding>, Failure> {
    let plan = match &asked.plan {
        Some(path) => match read_doubtful_plan(path)? {
            Ok(plan) => plan,
            Err(error) => {
                let (place, fix) = (path.display().to_string(), "mend the plan, or plan again");
                return Ok(vec![Finding::error("plan-invalid", place, error.what(), fix)]);
            }
        },
        None => match plan::read_or_make(None, loaded, &cluster, &asked.planning) {
            Ok(plan) => plan,
            Err(failure) if failure.code == UNUSABLE => {
                let fix = failure.advice().unwrap_or("try another strategy or a smaller model").to_owned();
                return Ok(vec![Finding::error("no-plan", "scenario", failure.reason(), fix)]);
            }
            Err(failure) => return Err(failure),
        },
    };
    limits::restrict_memory(&loaded.scenario, &mut cluster, &plan, Bytes::ZERO);
    let slow_disk = loaded.scenario.planner.slow_disk;
    let mut found = lint::plan(&plan, &loaded.origin, &cluster, slow_disk);
    found.extend(lint::late(&loaded.scenario, &plan));
    Ok(found)
}

fn table(found: &[Finding]) -> String {
    use std::fmt::Write;
    let mut text = String::new();
    for finding in found {
        let Finding { severity, code, what, place, fix } = finding;
        let _ = writeln!(text, "{severity}[{code}]: {what}\n  where: {place}\n  hint:  {fix}");
    }
    let counted = [
        (Severity::Error, "error", "errors"),
        (Severity::Warning, "warning", "warnings"),
        (Severity::Note, "note", "notes"),
    ]
    .map(|(severity, one, more)| {
        match found.iter().filter(|finding| finding.severity == severity).count() {
            1 => format!("1 {one}"),
            count => format!("{count} {more}"),
        }
    });
    let _ = writeln!(text, "{}", counted.join(", "));
    text
}
