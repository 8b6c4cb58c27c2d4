//! Flags of `hearth pack`.

use std::path::PathBuf;

use clap::Args;

#[derive(Debug, Args)]
pub struct PackArgs {
    /// The GGUF file of the model.
    pub model: PathBuf,
    /// Compare an existing packed file with the model instead of writing one.
    #[arg(long, conflicts_with = "bench")]
    pub check: bool,
    /// Then benchmark the model with and without packed weights, alternately.
    #[arg(long)]
    pub bench: bool,
    /// Benchmark with this many CPU threads [default: one per core].
    #[arg(long, requires = "bench", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub threads: Option<u32>,
}
