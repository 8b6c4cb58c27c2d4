//! Flags of `hearth report` and `hearth reproduce`.

use std::path::PathBuf;

use clap::Args;

#[derive(Debug, Args)]
pub struct ReportArgs {
    /// The trace files to compare.
    #[arg(required = true)]
    pub traces: Vec<PathBuf>,
    /// Compare with published results of the same scenario: the name of a document that ships with hearth, such as
    /// `prima-table-4`, or the path of a `published/1` document. Can be repeated.
    #[arg(long, value_name = "DOCUMENT")]
    pub published: Vec<String>,
    /// Compare only with the results of this system in the published results [default: all systems].
    #[arg(id = "system", long = "system", value_name = "SYSTEM", requires = "published")]
    pub compared_system: Option<String>,
    /// Add a chart of this table, which `hearth sweep` wrote, to the report. Can be repeated.
    #[arg(long, value_name = "TABLE")]
    pub sweep: Vec<PathBuf>,
    /// Write the report to FOLDER.
    #[arg(short, long, value_name = "FOLDER")]
    pub output: PathBuf,
}

#[derive(Debug, Args)]
pub struct ReproduceArgs {
    /// The documents of published results to reproduce [default: all documents in `reports/published`].
    pub documents: Vec<PathBuf>,
    /// Estimate the uncertainty of each simulated time from this many simulations with random device and link
    /// parameters; 0 disables the estimate.
    #[arg(long, default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=100_000))]
    pub draws: u32,
    /// Write a report for each document to a subfolder of FOLDER.
    #[arg(short, long, value_name = "FOLDER")]
    pub output: Option<PathBuf>,
}
