//! Integration tests of reports.

use hearth_reports::Report;

mod golden;
mod perfetto;
mod published;
mod random;
mod sample;
mod structure;
mod trace_events;

/// Returns a file of a report as text.
fn file(report: &Report, name: &str) -> String {
    let files = report.files();
    let (_, contents) = files.iter().find(|(found, _)| found == name).expect("the file is in the report");
    String::from_utf8(contents.clone()).expect("it is text")
}
