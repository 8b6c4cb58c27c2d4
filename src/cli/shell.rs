//! Which flags have `hearth completions` and `hearth man`?

use std::path::PathBuf;

use clap::Args;
use clap_complete::Shell;

/// `hearth completions`.
#[derive(Debug, Args)]
pub struct CompletionsArgs {
    /// For which shell.
    #[arg(value_enum)]
    pub shell: Shell,
}

/// `hearth man`.
#[derive(Debug, Args)]
pub struct ManArgs {
    /// The folder to write to; it is made if it is not there.
    pub folder: PathBuf,
}
