//! Makes reports from traces: one HTML page, Markdown, CSV, figures and timelines for trace viewers.
//!
//! A simulated and a measured trace of one plan become a [`Report`] that compares them term by term; other traces
//! become columns of one table. The same traces always give the same bytes. [`published_results`] compares simulations
//! with published numbers, and [`validation`] compares predictions of a suite of scenarios with measurements.
//!
//! Not here: reading traces and writing files (the command line), and the computation of the metrics
//! ([`hearth_core::metrics`]).

#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr, clippy::exit))]

pub mod charts;
pub mod comparison;
mod document;
pub mod exports;
pub mod published_results;
mod report;
mod sections;
mod text;
mod timeline;
pub mod validation;

pub use report::{Report, ReportError};
pub use text::escape::csv_field;
