//! `hearth report`: put traces side by side.

use std::process::ExitCode;

use hearth_reports::Report;

use super::print_json;
use crate::cli::ReportArgs;
use crate::diagnostics::Failure;
use crate::documents::{in_a_folder, read_trace, write_in};
use crate::output::say;

/// Runs the verb.
pub fn run(args: &ReportArgs, json: bool) -> Result<ExitCode, Failure> {
    in_a_folder(&args.output)?;
    let traces = args.traces.iter().map(|path| read_trace(path)).collect::<Result<Vec<_>, _>>()?;
    let report = Report::new(traces).map_err(Failure::unusable)?;
    for (name, bytes) in report.files() {
        write_in(&args.output, name, &bytes)?;
    }
    if json {
        print_json(report.comparison())?;
    } else {
        say!("wrote {}\n", args.output.join("index.html").display());
    }
    Ok(ExitCode::SUCCESS)
}
