//! Flags of `hearth completions`, `hearth man` and `hearth schema`.

use std::path::PathBuf;

use clap::Args;
use clap::builder::PossibleValuesParser;
use clap_complete::Shell;
use hearth_schema::editor;

#[derive(Debug, Args)]
pub struct CompletionsArgs {
    /// The shell.
    #[arg(value_enum)]
    pub shell: Shell,
}

#[derive(Debug, Args)]
pub struct ManArgs {
    /// The folder to write to; it is created if needed.
    pub folder: PathBuf,
}

#[derive(Debug, Args)]
pub struct SchemaArgs {
    /// The kind of document.
    #[arg(value_parser = PossibleValuesParser::new(editor::DOCUMENT_KINDS))]
    pub kind: String,
}
