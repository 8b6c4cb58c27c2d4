//! Which files does a report consist of?
//!
//! `index.html` holds everything a reader needs; the others are the same for other readers: Markdown,
//! CSV and JSON of the comparison, each figure as an SVG file, and time lines for a viewer.
//!
//! Traces are checked first, so that nothing behind this point meets a time it cannot compute with.

use hearth_schema::Trace;

use crate::comparison::Comparison;
use crate::document::Document;
use crate::lines::Lines;
use crate::published::Published;
use crate::published::beside::{self, BesideError};
use crate::{contents, escape, markdown, page, perfetto, tables, tokens};

/// The latest moment in a trace: 104 days, up to which a nanosecond is exact in a `f64`.
const LATEST: u64 = 1 << 53;
/// As many as a plan may have.
const MOST_DEVICES: usize = 1024;

/// Why there can be no report on these traces.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ReportError {
    /// No trace at all.
    #[error("there is no trace to report on; name at least one")]
    NoTraces,
    /// The header names more devices than a plan can have.
    #[error("trace {trace} has {devices} devices; at most {MOST_DEVICES} can be reported on")]
    TooManyDevices {
        /// Which trace, from 1.
        trace: usize,
        /// How many devices it names.
        devices: usize,
    },
    /// A step or counter of a device that the header does not name.
    #[error(
        "trace {trace}, {what} {index}: device {device} is not in the header; the trace is damaged: make it again"
    )]
    UnknownDevice {
        /// Which trace, from 1.
        trace: usize,
        /// `step` or `counter`.
        what: &'static str,
        /// Which one, from 0.
        index: usize,
        /// The device it names.
        device: u16,
    },
    /// A step ends before it starts, or later than can be computed with.
    #[error(
        "trace {trace}, {what} {index}: {start} to {end} ns is not a span of time within 104 days; the trace is damaged: make it again"
    )]
    BadSpan {
        /// Which trace, from 1.
        trace: usize,
        /// `step` or `counter`.
        what: &'static str,
        /// Which one, from 0.
        index: usize,
        /// When it starts.
        start: u64,
        /// When it ends.
        end: u64,
    },
    /// A token ends before the one in front of it.
    #[error(
        "trace {trace}: the token of pass {pass} ends before the token in front of it; the trace is damaged: make it again"
    )]
    TokenOrder {
        /// Which trace, from 1.
        trace: usize,
        /// Which pass.
        pass: u32,
    },
}

/// A report on some traces.
#[derive(Debug, Clone)]
pub struct Report {
    traces: Vec<Trace>,
    comparison: Comparison,
    sweeps: Vec<Lines>,
}

impl Report {
    /// A report on traces, in the order they are to appear.
    pub fn new(traces: Vec<Trace>) -> Result<Report, ReportError> {
        if traces.is_empty() {
            return Err(ReportError::NoTraces);
        }
        for (index, trace) in traces.iter().enumerate() {
            check(index + 1, trace)?;
        }
        let comparison = Comparison::new(&traces);
        Ok(Report { traces, comparison, sweeps: Vec::new() })
    }

    /// With what a document prints of the same scenarios beside the runs; of one system if it is named.
    pub fn with_published(
        mut self,
        published: &Published,
        system: Option<&str>,
    ) -> Result<Report, BesideError> {
        self.comparison.published.extend(beside::find(published, system, &self.comparison.runs)?);
        self.comparison.caveats.extend(published.caveats.iter().map(|caveat| escape::paragraph(caveat)));
        Ok(self)
    }

    /// With the times of a sweep as lines.
    #[must_use]
    pub fn with_sweep(mut self, lines: Lines) -> Report {
        self.sweeps.push(lines);
        self
    }

    /// The numbers.
    pub fn comparison(&self) -> &Comparison {
        &self.comparison
    }

    /// All files: names relative to the report's folder, and contents.
    pub fn files(&self) -> Vec<(String, Vec<u8>)> {
        let document = self.document();
        let mut files = vec![
            ("index.html".to_owned(), page::render(&document).into_bytes()),
            ("report.md".to_owned(), markdown::render(&document).into_bytes()),
            ("comparison.csv".to_owned(), tables::csv(&self.comparison).into_bytes()),
            ("comparison.json".to_owned(), self.json()),
        ];
        let drawings = document.figures();
        files.extend(
            drawings.map(|figure| (format!("{}.svg", figure.name), figure.drawing.standalone().into_bytes())),
        );
        for (run, trace) in self.comparison.runs.iter().zip(&self.traces) {
            files.push((format!("{}.perfetto.json", run.label), perfetto::export(trace)));
        }
        for pair in &self.comparison.pairs {
            let [predicted, measured] = [pair.predicted, pair.measured]
                .map(|run| (self.comparison.runs[run].label.as_str(), &self.traces[run]));
            let name = format!("{}-{}.perfetto.json", predicted.0, measured.0);
            files.push((name, perfetto::overlay(&[predicted, measured])));
        }
        files
    }

    fn document(&self) -> Document {
        contents::of(&self.comparison, &self.traces, &self.sweeps)
    }

    fn json(&self) -> Vec<u8> {
        let mut out = serde_json::to_vec_pretty(&self.comparison)
            .expect("numbers and texts are JSON, and memory takes them");
        out.push(b'\n');
        out
    }
}

fn check(number: usize, trace: &Trace) -> Result<(), ReportError> {
    let devices = trace.header.devices.len();
    if devices > MOST_DEVICES {
        return Err(ReportError::TooManyDevices { trace: number, devices });
    }
    let steps = trace.records.iter().map(|record| (record.device, record.start, record.end)).enumerate();
    let counters = trace.readings.iter().map(|reading| (reading.device, reading.at, reading.at)).enumerate();
    for (index, happening) in trace.happenings.iter().enumerate() {
        let (start, end) = (happening.start, happening.end.unwrap_or(happening.start));
        if end < start || end > LATEST {
            return Err(ReportError::BadSpan { trace: number, what: "event", index, start, end });
        }
    }
    let all = steps.map(|step| ("step", step)).chain(counters.map(|counter| ("counter", counter)));
    for (what, (index, (device, start, end))) in all {
        if usize::from(device) >= devices {
            return Err(ReportError::UnknownDevice { trace: number, what, index, device });
        }
        if end < start || end > LATEST {
            return Err(ReportError::BadSpan { trace: number, what, index, start, end });
        }
    }
    match tokens::of(trace).iter().find(|token| token.end < token.start) {
        Some(token) => Err(ReportError::TokenOrder { trace: number, pass: token.pass }),
        None => Ok(()),
    }
}
