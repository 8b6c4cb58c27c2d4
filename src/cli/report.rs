//! Flags of `hearth report` and `hearth reproduce`.

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

/// `hearth reproduce`.
#[derive(Debug, Args)]
pub struct ReproduceArgs {
    /// The documents of published numbers; those in `reports/published` if none is named.
    pub documents: Vec<PathBuf>,
    /// How many times all parameters are drawn anew, to say how sure each time is; 0 leaves it out.
    #[arg(long, default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=100_000))]
    pub draws: u32,
    /// The folder to write reports to, one folder in it for each document.
    #[arg(short, long)]
    pub output: Option<PathBuf>,
}
