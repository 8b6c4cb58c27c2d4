//! Flags of `hearth completions`, `hearth man` and `hearth schema`.

use std::path::PathBuf;

use clap::Args;
use clap::builder::PossibleValuesParser;
use clap_complete::Shell;
use hearth_schema::editor;

#[derive(Debug, Args)]
pub struct CompletionsArgs {
    /// The shell in which the completions are used.
    #[arg(value_enum)]
    pub shell: Shell,
}

#[derive(Debug, Args)]
pub struct ManArgs {
    /// The folder for the man pages, which is created if it does not exist.
    pub folder: PathBuf,
}

#[derive(Debug, Args)]
pub struct SchemaArgs {
    /// The kind of document that the schema describes.
    #[arg(value_parser = PossibleValuesParser::new(editor::DOCUMENT_KINDS))]
    pub kind: String,
}
