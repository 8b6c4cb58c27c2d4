//! Flags of `hearth tokenize`.

use std::path::PathBuf;

use clap::Args;

#[derive(Debug, Args)]
#[allow(clippy::struct_excessive_bools)] // one a flag
pub struct TokenizeArgs {
    /// Use the tokenizer of this GGUF model.
    #[arg(value_name = "GGUF")]
    pub model: PathBuf,
    /// Tokenize TEXT.
    #[arg(required_unless_present = "file")]
    pub text: Option<String>,
    /// Read the text from FILE; `-` reads standard input.
    #[arg(long, value_name = "FILE", conflicts_with = "text")]
    pub file: Option<PathBuf>,
    /// Print only the ids, as a list such as [1, 15043]. With --json, the output is the same as without this flag.
    #[arg(long)]
    pub ids: bool,
    /// Omit the tokens that mark the beginning and the end of the text.
    #[arg(long)]
    pub no_bos: bool,
    /// Recognise control tokens in the text, such as <|im_end|>.
    #[arg(long)]
    pub special: bool,
    /// Format the text as the message of a user with the chat template of the model.
    #[arg(long, conflicts_with_all = ["special", "no_bos"])]
    pub chat: bool,
}
