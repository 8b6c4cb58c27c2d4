//! Errors of opening and running a model.
//!
//! Every message says what is wrong, where, and what to do. All defects of a file are found when it is opened, before
//! any weight is used.

use std::ops::Range;
use std::path::PathBuf;

use hearth_profiles::gguf::GgufError;

/// An error of opening or running a model.
#[derive(Debug, thiserror::Error)]
pub enum ExecError {
    #[error(transparent)]
    Gguf(#[from] GgufError),
    #[error("cannot map `{path}`: {source}", path = .path.display())]
    Map { path: PathBuf, source: std::io::Error },
    #[error(
        "only some layers of `{path}` were fetched: \
         use its folder with `hearth worker --fetch`, or give a complete file",
        path = .path.display()
    )]
    Partial { path: PathBuf },
    #[error("tensor `{tensor}` {problem}: {hint}")]
    Tensor { tensor: String, problem: String, hint: &'static str },
    #[error(
        "the logits of row {row} of the pass are not finite ({found}): weights are damaged or overflow; \
         fetch the model again, or use another quantisation of it"
    )]
    NotFinite {
        /// The index of the token in the pass, counted from 0.
        row: usize,
        found: f32,
    },
    #[error("key `{key}` is {found}: {hint}")]
    Metadata { key: String, found: String, hint: &'static str },
    #[error("cannot start compute threads: {source}; use fewer threads")]
    Threads { source: std::io::Error },
    #[error("layers {requested:?} are not all in this stage, which owns {owned:?}: send them to their owner")]
    Layers { requested: Range<u32>, owned: Vec<Range<u32>> },
    #[error("the stage received {found} activations, which are not {tokens} rows of {embedding}")]
    Hidden { found: usize, tokens: usize, embedding: usize },
    #[error(
        "positions {first}..{end} ({count} rows) cannot follow {filled} cached positions in a context \
         of {context}: positions must be consecutive and end within the context; \
         increase `context` for longer texts"
    )]
    Positions { first: u32, end: u32, count: usize, filled: u32, context: u32 },
    #[error("there is no cache for sequence {sequence} (counted from 0); increase `sequences` in the plan")]
    Sequence { sequence: u32 },
    #[error(
        "token {token} is not in the vocabulary of {vocab_size} tokens: the tokenizer belongs to \
         another model"
    )]
    Token { token: u32, vocab_size: u32 },
    #[error("{what}: {hint}")]
    Tokenizer { what: String, hint: &'static str },
    #[error("pre-tokenizer `{}` is not known; use a model with one of {known}", sanitize(.found))]
    PreTokenizer { found: String, known: String },
    #[error("{what}; {hint}")]
    ChatTemplate { what: String, hint: &'static str },
    #[error("`{name}` is {value}: use {range}")]
    Sampling { name: &'static str, value: f32, range: &'static str },
}

/// Returns a text from a file in a form that is safe in an error message: shortened, and without control characters
/// and without "; ", which starts a hint.
pub(crate) fn sanitize(text: &str) -> String {
    // source: assumed, some lines of a terminal
    const MAX_CHARS: usize = 300;
    // Direction marks change how a terminal displays the rest of the line.
    let obeyed = |c: char| {
        c.is_control()
            || matches!(c, '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
    };
    let plain: String = text.chars().take(MAX_CHARS).map(|c| if obeyed(c) { ' ' } else { c }).collect();
    plain.replace("; ", ", ")
}
