//! Which flags has `hearth report`?

use std::path::PathBuf;

use clap::Args;

/// `hearth report`.
#[derive(Debug, Args)]
pub struct ReportArgs {
    /// The traces.
    #[arg(required = true)]
    pub traces: Vec<PathBuf>,
    /// Put what others published of the same scenario beside them: the name of a shipped document, as `prima-table-4`,
    /// or the path of one.
    #[arg(long, value_name = "DOCUMENT")]
    pub published: Vec<String>,
    /// Of the published systems, the one that the traces stand for.
    #[arg(long, requires = "published")]
    pub system: Option<String>,
    /// Draw the table of a sweep too: time per token against k, the size of the model, or whatever varied.
    #[arg(long, value_name = "TABLE")]
    pub sweep: Vec<PathBuf>,
    /// The folder to write to.
    #[arg(short, long)]
    pub output: PathBuf,
}
