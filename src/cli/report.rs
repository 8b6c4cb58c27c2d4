//! Flags of `hearth report` and `hearth reproduce`.

use std::path::PathBuf;

use clap::Args;

#[derive(Debug, Args)]
pub struct ReportArgs {
    /// The trace files.
    #[arg(required = true)]
    pub traces: Vec<PathBuf>,
    /// Add published results of the same scenario: a shipped document, such as `prima-table-4`, or the path of one. Can
    /// be repeated.
    #[arg(long, value_name = "DOCUMENT")]
    pub published: Vec<String>,
    /// Compare with this system of the published results.
    #[arg(id = "system", long = "system", value_name = "SYSTEM", requires = "published")]
    pub compared_system: Option<String>,
    /// Add a chart of this table from `hearth sweep`. Can be repeated.
    #[arg(long, value_name = "TABLE")]
    pub sweep: Vec<PathBuf>,
    /// Write the report to FOLDER.
    #[arg(short, long, value_name = "FOLDER")]
    pub output: PathBuf,
}

#[derive(Debug, Args)]
pub struct ReproduceArgs {
    /// The documents of published results [default: all in `reports/published`].
    pub documents: Vec<PathBuf>,
    /// Estimate the uncertainty of each time from this many random draws of all parameters; 0 turns it off.
    #[arg(long, default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=100_000))]
    pub draws: u32,
    /// Write a report for each document to a subfolder of FOLDER.
    #[arg(short, long, value_name = "FOLDER")]
    pub output: Option<PathBuf>,
}
