//! `hearth lint`: lists errors and implausible values in a scenario and in a plan.

use std::fmt::Write;

use hearth_halda::lint::{Finding, Severity};
use hearth_workflow::lint;

use super::print_result;
use crate::cli::{LintArgs, PlanSource};
use crate::diagnostics::{EXIT_INCOMPLETE, ExitCode, Failure};
use crate::machine::read_scenario_with_overrides;
use crate::progress::TerminalProgress;

pub fn run(args: &LintArgs, json: bool) -> Result<ExitCode, Failure> {
    let PlanSource { plan, planning } = &args.source;
    let loaded = read_scenario_with_overrides(&args.scenario, planning, None)?;
    let progress = TerminalProgress::new();
    let findings =
        lint::findings(&loaded, plan.as_deref(), planning.model.as_deref(), planning.budget(&progress))?;
    drop(progress);
    print_result(json, &findings, |findings| table(findings))?;
    let has_errors = findings.iter().any(|finding| finding.severity == Severity::Error);
    Ok(if has_errors { ExitCode(EXIT_INCOMPLETE) } else { ExitCode::SUCCESS })
}

fn table(findings: &[Finding]) -> String {
    let mut text = String::new();
    for finding in findings {
        let Finding { severity, code, what, location, hint: fix } = finding;
        let _ = writeln!(text, "{severity}[{code}]: {what}\n  where: {location}\n  hint:  {fix}");
    }
    let counted = [Severity::Error, Severity::Warning, Severity::Note].map(|severity| {
        let count = findings.iter().filter(|finding| finding.severity == severity).count();
        format!("{count} {severity}{}", if count == 1 { "" } else { "s" })
    });
    let _ = writeln!(text, "{}", counted.join(", "));
    text
}
