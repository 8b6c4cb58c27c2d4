//! Reports made from traces: one HTML page, Markdown, CSV, figures and time lines.
//!
//! A simulated and a measured trace of one plan become a [`Report`] that compares them term by term; other traces become
//! tables side by side. The same traces always make the same bytes. [`published`] compares simulations with published
//! numbers, and [`validation`] a suite of predictions with its measurements.
//!
//! ```
//! use hearth_schema::trace::{Header, Kind, Origin, Outcome, Record, Resource, Trace, TracedDevice};
//! use hearth_schema::plan::Parallelism;
//! use hearth_schema::pass::Pass;
//! use hearth_reports::Report;
//!
//! let device = TracedDevice {
//!     name: "laptop".into(), profile: None, memory_total: 8 << 30, kernel: None, unvalidated: None, policy: None,
//! };
//! let output = |pass: u32, end_ms: u64| Record {
//!     device: 0, resource: Resource::Cpu, kind: Kind::Output, pass, round: 0, layers: None,
//!     start: (end_ms - 5) * 1_000_000, end: end_ms * 1_000_000, bytes: 0, peer: None, cost: None,
//! };
//! let trace = Trace {
//!     header: Header {
//!         schema: Trace::SCHEMA.into(), origin: Origin::Simulated, scenario: "alone".into(),
//!         plan: "sha256:0".into(), model: "psalm-7m".into(), kind: Parallelism::Ring, seed: 1, version: "0.1.0".into(),
//!         devices: vec![device],
//!     },
//!     passes: (0..3).map(|index| Pass::plain(index, index, 1, true)).collect(),
//!     records: vec![output(0, 20), output(1, 50), output(2, 100)],
//!     readings: vec![],
//!     shortages: vec![],
//!     run_events: vec![],
//!     outcome: Outcome::Ok,
//! };
//! let report = Report::new(vec![trace])?;
//! // Two tokens after the first, of 30 and 50 ms.
//! assert_eq!(report.comparison().runs[0].metrics.tpot_ms.unwrap().mean, 40.0);
//! let names: Vec<String> = report.files().into_iter().map(|(name, _)| name).collect();
//! assert!(names.contains(&"index.html".to_owned()));
//! # Ok::<(), hearth_reports::ReportError>(())
//! ```
//!
//! Not here: reading traces and writing files (the command line), and the numbers themselves
//! ([`hearth_core::metrics`]).

#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr, clippy::exit))]

pub mod charts;
pub mod comparison;
mod document;
pub mod exports;
pub mod published;
mod report;
mod sections;
mod text;
mod timeline;
pub mod validation;

pub use comparison::Comparison;
pub use report::{Report, ReportError};
pub use text::escape::csv_field;
