//! Flags of `hearth model`.

use clap::{Args, Subcommand};

#[derive(Debug, Args)]
pub struct ModelArgs {
    #[command(subcommand)]
    pub command: ModelCommand,
}

#[derive(Debug, Subcommand)]
pub enum ModelCommand {
    /// List the models that ship with hearth, as documents without weights.
    #[command(after_help = "Example: hearth model list\nExample: hearth model list qwen3 --json")]
    List(ListArgs),
    /// Show a model: its dimensions, and its size in several formats.
    #[command(after_help = "Example: hearth model show qwen3-30b-a3b")]
    Show(ShowModelArgs),
}

#[derive(Debug, Args)]
pub struct ListArgs {
    /// List only models whose names contain all of these words.
    pub words: Vec<String>,
}

#[derive(Debug, Args)]
pub struct ShowModelArgs {
    /// The name of the model.
    pub name: String,
}
