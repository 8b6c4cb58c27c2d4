//! Flags of `hearth pull`.

use clap::Args;

#[derive(Debug, Args)]
pub struct PullArgs {
    /// The repository, and after a colon the quantisation (in any case) or the name of a file. Without them, the models
    /// of the repository are listed if there are several.
    #[arg(value_name = "OWNER/REPO[:QUANT]")]
    pub model: String,
}
