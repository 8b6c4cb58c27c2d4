//! `hearth tokenize`: prints the tokens of a text.

use std::fmt::Write;
use std::io;

use hearth_profiles::gguf::GgufModel;
use hearth_runtime::{ChatMessage, ChatTemplate, ExecError, Tokenizer};
use hearth_workflow::check_model_exists;
use hearth_workflow::files::{read_text_at_most, read_text_from};
use serde::Serialize;

use super::print_result;
use crate::cli::TokenizeArgs;
use crate::diagnostics::{ExitCode, Failure};
use crate::output::escape_line;
use crate::prompts::MAX_FILE_LEN;

#[derive(Serialize)]
struct Output {
    count: usize,
    tokens: Vec<Token>,
}

#[derive(Serialize)]
struct Token {
    id: u32,
    /// The text of the token. Bytes that are not UTF-8 are replaced by U+FFFD.
    text: String,
    is_control: bool,
}

pub fn run(args: &TokenizeArgs, json: bool) -> Result<ExitCode, Failure> {
    check_model_exists(&args.model)?;
    let located = |error: ExecError| Failure::from(error).with_location(args.model.display());
    let metadata = GgufModel::open(&args.model).map_err(|error| located(error.into()))?.metadata;
    let tokenizer = Tokenizer::new(&metadata).map_err(located)?;
    let text = match (&args.text, &args.file) {
        (_, Some(path)) if path.as_os_str() == "-" => read_text_from(io::stdin(), path, MAX_FILE_LEN)?,
        (_, Some(path)) => read_text_at_most(path, MAX_FILE_LEN)?,
        (text, None) => text.clone().unwrap_or_default(),
    };
    let ids = if args.chat {
        let template = ChatTemplate::new(&metadata, &tokenizer).map_err(located)?;
        template.encode(&tokenizer, &[ChatMessage::new("user", text)], &[])?
    } else if args.no_bos {
        tokenizer.encode_without_bos(&text, args.special)?
    } else {
        tokenizer.encode(&text, args.special)?
    };
    let token = |&id: &u32| Token {
        id,
        text: tokenizer.text_of(id),
        is_control: tokenizer.token_bytes(id).is_empty(),
    };
    let output = Output { count: ids.len(), tokens: ids.iter().map(token).collect() };
    print_result(json, &output, |output| if args.ids { format!("{ids:?}\n") } else { table(output) })
}

fn table(output: &Output) -> String {
    let mut text = String::new();
    for Token { id, text: piece, is_control } in &output.tokens {
        // Quotes show spaces at the ends; control tokens have none, so that they differ from text.
        let piece = if *is_control { escape_line(piece).into_owned() } else { format!("{piece:?}") };
        let _ = writeln!(text, "{id:>8}  {piece}");
    }
    let _ = writeln!(text, "{} tokens", output.count);
    text
}
