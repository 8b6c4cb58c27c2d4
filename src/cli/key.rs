//! Flags of `hearth key`.

use std::path::PathBuf;

use clap::Args;

#[derive(Debug, Args)]
pub struct KeyArgs {
    /// The file to create. An existing file is not overwritten.
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
}
