//! The workflow library: loads scenarios, plans them, simulates the plans and evaluates the results.
//!
//! All front ends (command line, server, bindings) call this crate. It never prints: long work reports to a
//! [`Progress`], and errors are [`Error`] values with a message, a location and a hint.
//!
//! A scenario is read once ([`LoadedScenario`]), changed by the options of the user ([`ScenarioOverrides`]), and
//! resolved into a [`Cluster`](hearth_core::Cluster) whose devices have the limits of the scenario ([`limits`]). Then
//! [`planning`] makes a plan, and [`simulation`] runs the plan.

#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr, clippy::exit))]

pub mod advice;
pub mod comparison;
pub mod device_comparison;
pub mod documents;
pub mod evaluation;
pub mod files;
pub mod init;
pub mod limits;
pub mod lint;
pub mod parallel_jobs;
pub mod planning;
pub mod recalibration;
pub mod report_folder;
pub mod reproduction;
pub mod score;
pub mod simulation;
pub mod sweep;
pub mod uncertainty;
pub mod verdict;
pub mod whatif;

mod error;
mod overrides;
mod partial;
mod quantities;
mod scenario;

pub use error::{Error, ErrorKind};
pub use overrides::ScenarioOverrides;
pub use parallel_jobs::{NoProgress, Progress};
pub use planning::{ScenarioReplanner, SearchBudget};
pub use scenario::{FileResolver, LoadedScenario, ReferenceResolver, check_model_exists, read_model_profile};
