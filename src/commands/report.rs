//! `hearth report`: writes a report that compares traces.

use std::path::Path;

use hearth_profiles::Document;
use hearth_reports::Report;
use hearth_reports::published_results::{PublishedResults, SHIPPED_DOCUMENTS, shipped_yaml};
use hearth_workflow::documents::{read_document, read_sweep_table, read_trace};
use hearth_workflow::files::check_parent_folder;
use hearth_workflow::report_folder::ReportFolder;
use hearth_workflow::sweep::chart;

use super::print_result;
use crate::cli::ReportArgs;
use crate::diagnostics::{ExitCode, Failure};

/// Reads a document of published numbers, given by the name of a document that ships with hearth or by a path.
fn published(name: &str) -> Result<PublishedResults, Failure> {
    if let Some(document) = shipped_yaml(name) {
        return PublishedResults::from_yaml(document)
            .map_err(|error| Failure::invalid(error.message()).with_location(name));
    }
    let path = Path::new(name);
    if path.extension().is_none() && !path.exists() {
        let what = format!("no document of published numbers is called `{name}`");
        let known = SHIPPED_DOCUMENTS.map(|(name, _)| name).join(", ");
        let hint = format!("use one of {known}, or the path of a document");
        return Err(Failure::invalid(what).with_hint(hint));
    }
    Ok(read_document(path)?)
}

pub fn run(args: &ReportArgs, json: bool) -> Result<ExitCode, Failure> {
    check_parent_folder(&args.output)?;
    let traces = args.traces.iter().map(|path| read_trace(path)).collect::<Result<Vec<_>, _>>()?;
    let mut report = Report::new(traces).map_err(Failure::invalid)?;
    for name in &args.published {
        let published = published(name)?;
        let system = args.compared_system.as_deref();
        report = report
            .with_published_results(&published, system)
            .map_err(|error| Failure::invalid(error).with_location(name))?;
    }
    for path in &args.sweep {
        let chart = chart::line_chart(&read_sweep_table(path)?)
            .map_err(|failure| failure.with_location(path.display()))?;
        report = report.with_sweep_chart(chart);
    }
    ReportFolder::write_all(&args.output, "hearth report", &report.render_files())?;
    let page = args.output.join("index.html");
    print_result(json, &report.comparison, |_| format!("wrote {}\n", page.display()))
}
