//! Reports made from traces: one HTML page, Markdown, CSV, figures and time lines.
//!
//! A simulated and a measured trace of one plan become a [`Report`] that compares them term by term; other traces
//! become tables side by side. The same traces always make the same bytes. [`published`] compares simulations with
//! published numbers, and [`validation`] a suite of predictions with its measurements.
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
