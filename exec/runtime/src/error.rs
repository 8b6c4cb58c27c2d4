//! Errors of opening and running a model.
//!
//! Every message says what is wrong, where, and what to do. An invalid model file is rejected when it is opened.

use std::ops::Range;
use std::path::PathBuf;

use hearth_profiles::gguf::GgufError;
use hearth_profiles::model::ModelShapeError;

#[derive(Debug, thiserror::Error)]
pub enum ExecError {
    #[error(transparent)]
    Gguf(#[from] GgufError),
    #[error("{0}; use a dense model")]
    NotRunnable(#[from] ModelShapeError),
    #[error("cannot map the model file `{path}` into memory: {source}", path = .path.display())]
    Map { path: PathBuf, source: std::io::Error },
    /// `what` is a predicate, for example that the file was truncated.
    #[error(
        "the model file `{path}` {what} while it was in use; restore the file and start again",
        path = .path.display()
    )]
    FileChanged { path: PathBuf, what: &'static str },
    #[error(
        "the model file `{path}` contains only some layers; \
         use its folder with `hearth worker --fetch`, or use a complete file",
        path = .path.display()
    )]
    Partial { path: PathBuf },
    #[error("the packed weights `{path}` {what}: write them again with `hearth pack`, or delete them", path = .path.display())]
    Packed { path: PathBuf, what: &'static str },
    #[error("`{path}` has no matrix that can be packed: none is quantised in a supported format", path = .path.display())]
    NothingToPack { path: PathBuf },
    #[error("cannot write the packed weights `{path}`: {source}", path = .path.display())]
    WritePacked { path: PathBuf, source: std::io::Error },
    #[error("tensor `{tensor}` {problem}: {hint}")]
    Tensor { tensor: String, problem: String, hint: &'static str },
    #[error(
        "{what} are not finite ({found}): the weights are damaged or overflow; \
         download the model again, or use another quantisation"
    )]
    NotFinite {
        /// The values, in plural.
        what: String,
        found: f32,
    },
    #[error("metadata key `{key}` is {found}: {hint}")]
    Metadata { key: String, found: String, hint: &'static str },
    /// The caller of a hash function stopped it.
    #[error("the weights were not hashed completely, because the run has ended")]
    HashingStopped,
    #[error("cannot start compute threads: {source}; use fewer threads")]
    Threads { source: std::io::Error },
    #[error(
        "layers {} are not all available on this device, which can run layers {}; \
         use a plan for this model and these devices",
        comma_separated(std::slice::from_ref(.requested)), comma_separated(.owned)
    )]
    Layers { requested: Range<u32>, owned: Vec<Range<u32>> },
    #[error(
        "received {found} activations instead of those of {tokens} tokens with {width} elements each; \
         use the same model file on all devices"
    )]
    Hidden { found: usize, tokens: usize, width: usize },
    #[error(
        "positions {first}..{end} ({count} tokens) cannot follow {filled} cached positions in a context \
         of {context}: positions must be consecutive and inside the context; \
         increase `context` for longer texts"
    )]
    Positions { first: u32, end: u32, count: usize, filled: u32, context: u32 },
    #[error(
        "{tokens} cached positions of sequence {from} cannot be copied to sequence {to} on this device; \
         use the same release of hearth on all devices"
    )]
    CachedPositions { from: u32, to: u32, tokens: u32 },
    #[error(
        "the recurrent state after {filled} positions cannot be rolled back to position {first}; compute the sequence \
         again from its first position"
    )]
    RolledBackState { first: u32, filled: u32 },
    #[error("sequence {sequence} (counted from 0) has no KV cache; increase `sequences` in the plan")]
    Sequence { sequence: u32 },
    #[error(
        "token {token} is not in the model's vocabulary of {vocab_size} tokens; \
         use the tokenizer of the same model file"
    )]
    Token { token: u32, vocab_size: u32 },
    #[error("{what}: {hint}")]
    Grammar { what: String, hint: &'static str },
    #[error("{what}: {hint}")]
    Tokenizer { what: String, hint: &'static str },
    #[error("pre-tokenizer `{}` is not supported; use a model with one of {known}", sanitize(.found))]
    PreTokenizer { found: String, known: String },
    #[error("{what}; {hint}")]
    ChatTemplate { what: String, hint: &'static str },
    #[error("`{name}` is {value}: use {range}")]
    Sampling { name: &'static str, value: f32, range: &'static str },
}

/// Returns ranges such as `0..4, 8..12`.
fn comma_separated(ranges: &[Range<u32>]) -> String {
    let texts: Vec<String> = ranges.iter().map(|range| format!("{}..{}", range.start, range.end)).collect();
    texts.join(", ")
}

/// Makes text from a model file safe for an error message: shortens it, and replaces control characters and the
/// separator `; `, which would start a hint.
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
