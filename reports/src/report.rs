//! A report on traces, as a list of files.
//!
//! `index.html` has the whole report. The other files are the same report in Markdown, the comparison as CSV and
//! JSON, each figure as an SVG file, and timelines for trace viewers.
//!
//! Traces are validated first, so that all other code can rely on their times and device indices.

use hearth_core::metrics::token_times::{DecodeStep, TokenTimes};
use hearth_schema::Trace;

use crate::charts::lines::LineChart;
use crate::comparison::Comparison;
use crate::document::to_json;
use crate::exports::{csv, perfetto};
use crate::published_results::PublishedResults;
use crate::published_results::matching::{self, MatchError};
use crate::sections;
use crate::text::escape;

/// Maximum time in a trace, in nanoseconds: 104 days. Up to this value an `f64` represents every nanosecond.
const MAX_TIME: u64 = 1 << 53;
const MAX_DEVICES: usize = 1024;

/// The reason why no report can be made from the traces.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ReportError {
    #[error("no trace to report on; name at least one trace")]
    NoTraces,
    #[error("trace {trace} has {devices} devices; a report can have at most {MAX_DEVICES}")]
    TooManyDevices { trace: usize, devices: usize },
    #[error("{location}: {problem}; the trace is damaged: record it again")]
    Damaged { location: String, problem: String },
}

#[derive(Debug, Clone)]
pub struct Report {
    traces: Vec<Trace>,
    pub comparison: Comparison,
    sweeps: Vec<LineChart>,
}

impl Report {
    /// Validates the traces and creates a report on them; its runs have the order of `traces`.
    pub fn new(traces: Vec<Trace>) -> Result<Report, ReportError> {
        if traces.is_empty() {
            return Err(ReportError::NoTraces);
        }
        for (index, trace) in traces.iter().enumerate() {
            validate(index + 1, trace)?;
        }
        let comparison = Comparison::new(&traces);
        Ok(Report { traces, comparison, sweeps: Vec::new() })
    }

    /// Adds the published results of the scenarios of the runs, for `system`, or for all systems if `system` is `None`.
    pub fn with_published_results(
        mut self,
        published: &PublishedResults,
        system: Option<&str>,
    ) -> Result<Report, MatchError> {
        let cells = matching::find_cells(published, system, &self.comparison.runs)?;
        self.comparison.published_cells.extend(cells);
        let caveats = published.caveats.iter().map(|caveat| escape::sanitize_paragraph(caveat));
        self.comparison.caveats.extend(caveats);
        Ok(self)
    }

    /// Adds the chart of a sweep to the section on scaling.
    #[must_use]
    pub fn with_sweep_chart(mut self, chart: LineChart) -> Report {
        self.sweeps.push(chart);
        self
    }

    /// Returns all files of the report: the names relative to the folder of the report, and the contents.
    pub fn render_files(&self) -> Vec<(String, Vec<u8>)> {
        let mut files = sections::build_document(&self.comparison, &self.traces, &self.sweeps).render_files();
        files.push(("comparison.csv".to_owned(), csv::export_comparison(&self.comparison)));
        files.push(("comparison.json".to_owned(), to_json(&self.comparison)));
        for (run, trace) in self.comparison.runs.iter().zip(&self.traces) {
            files.push((format!("{}.perfetto.json", run.label), perfetto::export_traces(&[(None, trace)])));
        }
        for pair in &self.comparison.run_comparisons {
            let both = pair.run_indices();
            let labels = both.map(|run| self.comparison.runs[run].label.as_str());
            let traces = both.map(|run| (Some(self.comparison.runs[run].label.as_str()), &self.traces[run]));
            files.push((format!("{}.perfetto.json", labels.join("-")), perfetto::export_traces(&traces)));
        }
        files
    }
}

fn validate(number: usize, trace: &Trace) -> Result<(), ReportError> {
    let devices = trace.header.devices.len();
    if devices > MAX_DEVICES {
        return Err(ReportError::TooManyDevices { trace: number, devices });
    }
    let damaged = |location: String, problem: String| Err(ReportError::Damaged { location, problem });
    // The kind, the device (`None` if the trace only has its name), the start and the end of each line.
    let events =
        trace.run_events.iter().map(|it| ("event", None, it.start_ns, it.end_ns.unwrap_or(it.start_ns)));
    let steps = trace.records.iter().map(|it| ("step", Some(it.device_index), it.start_ns, it.end_ns));
    let counters = trace.readings.iter().map(|it| ("counter", Some(it.device_index), it.time_ns, it.time_ns));
    let lines = events.enumerate().chain(steps.enumerate()).chain(counters.enumerate());
    for (index, (what, device, start, end)) in lines {
        let location = || format!("trace {number}, {what} {index}");
        if let Some(device) = device.filter(|device| usize::from(*device) >= devices) {
            return damaged(location(), format!("device {device} is not in the header"));
        }
        if end < start || end > MAX_TIME {
            let problem = if end < start {
                format!("the end, {end} ns, is before the start, {start} ns")
            } else {
                format!("the end, {end} ns, is later than 104 days")
            };
            return damaged(location(), problem);
        }
    }
    match TokenTimes::from_trace(trace).decode_steps.iter().find(|token| token.end_ns < token.start_ns) {
        Some(DecodeStep { batch: pass, .. }) => {
            let problem = format!("the token of pass {pass} ends before the previous token");
            damaged(format!("trace {number}"), problem)
        }
        None => Ok(()),
    }
}
