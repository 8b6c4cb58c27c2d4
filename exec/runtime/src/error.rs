//! Errors of opening and running a model.
//!
//! Every variant says what is wrong, where, and what to do. All that a file can get wrong is found when it is
//! opened, before any weight is used.

use std::ops::Range;
use std::path::PathBuf;

use hearth_profiles::Format;
use hearth_profiles::gguf::GgufError;

use hearth_kernels::KernelFormat;

/// Why the executor cannot do what it was asked to.
#[derive(Debug, thiserror::Error)]
pub enum ExecError {
    /// The header of the model file is not valid.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// A file cannot be mapped.
    #[error("cannot map `{path}`: {source}", path = .path.display())]
    Map {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// Only some layers of the file are here.
    #[error(
        "only some layers of `{path}` were fetched: use it as the folder of `hearth worker --fetch`, or give the whole model",
        path = .path.display()
    )]
    Partial {
        /// The file.
        path: PathBuf,
    },
    /// There is no kernel for a tensor's type.
    #[error(
        "tensor `{tensor}` has type {format}, for which there is no kernel: use a file with {known}",
        known = known_formats()
    )]
    Format {
        /// The tensor.
        tensor: String,
        /// Its type.
        format: Format,
    },
    /// A tensor has a type that its role does not allow.
    #[error("tensor `{tensor}` has type {format}, but must be f32: convert the model again")]
    NotF32 {
        /// The tensor.
        tensor: String,
        /// Its type.
        format: Format,
    },
    /// A tensor that the architecture needs is not there.
    #[error("tensor `{tensor}` is missing: the conversion is incomplete; convert or fetch the model again")]
    MissingTensor {
        /// The tensor.
        tensor: String,
    },
    /// A tensor that the forward pass would leave out; the result would be wrong.
    #[error(
        "tensor `{tensor}` has no place in the forward pass of {architecture}: \
         the model is a variant (experts, adapters) that cannot be executed; use one without it"
    )]
    UnexpectedTensor {
        /// The tensor.
        tensor: String,
        /// The file's architecture.
        architecture: String,
    },
    /// Logits that are infinite or not numbers.
    #[error(
        "the logits of row {row} of the pass are not finite ({found}): weights are damaged or overflow; \
         fetch the model again, or use another quantisation of it"
    )]
    NotFinite {
        /// Row of the pass, counted from 0.
        row: usize,
        /// What was found instead of a number.
        found: f32,
    },
    /// A tensor has other dimensions than the metadata implies.
    #[error(
        "tensor `{tensor}` has dimensions {found:?}, but the metadata imply {expected:?}: \
         convert or fetch the model again"
    )]
    Dimensions {
        /// The tensor.
        tensor: String,
        /// In the file, row length first.
        found: Vec<u64>,
        /// As they should be.
        expected: Vec<u64>,
    },
    /// A tensor does not lie within its file, or not where f32 may lie.
    #[error("tensor `{tensor}` lies at byte {offset}, {problem}: fetch the model again")]
    Place {
        /// The tensor.
        tensor: String,
        /// Its first byte.
        offset: u64,
        /// Why that cannot be.
        problem: &'static str,
    },
    /// A factor of a rotary frequency that is no divisor.
    #[error(
        "tensor `rope_freqs.weight` has {found} as factor {pair}, but a frequency is divided by it: \
         convert or fetch the model again"
    )]
    RopeFactor {
        /// Pair of dimensions, counted from 0.
        pair: usize,
        /// Its factor.
        found: f32,
    },
    /// A metadata value that the forward pass cannot use.
    #[error("key `{key}` is {found}: {hint}")]
    Metadata {
        /// The key.
        key: String,
        /// Its value.
        found: String,
        /// What would do.
        hint: &'static str,
    },
    /// Threads cannot be started.
    #[error("cannot start compute threads: {source}: use fewer threads")]
    Threads {
        /// What the system said.
        source: std::io::Error,
    },
    /// A stage was asked for layers that it does not own.
    #[error("layers {asked:?} are not all in this stage, which owns {owned:?}: send them to their owner")]
    Layers {
        /// Asked for.
        asked: Range<u32>,
        /// Owned.
        owned: Vec<Range<u32>>,
    },
    /// Rows of another width than the model's.
    #[error("{found} activations are not {tokens} rows of {embedding}")]
    Hidden {
        /// Values given.
        found: usize,
        /// Rows expected.
        tokens: usize,
        /// Values in a row.
        embedding: usize,
    },
    /// Positions that are not consecutive, leave a gap behind what the cache holds, or exceed it.
    #[error(
        "positions {first}..{end} ({count} rows) cannot follow {filled} cached ones in a context of {context}: \
         positions are consecutive, leave no gap and end within the context; raise `context` for longer text"
    )]
    Positions {
        /// First position given.
        first: u32,
        /// One after the last position given.
        end: u32,
        /// Rows given.
        count: usize,
        /// Positions in the cache.
        filled: u32,
        /// Size of the cache.
        context: u32,
    },
    /// A sequence that there is no cache for.
    #[error(
        "there is no cache for sequence {sequence}, counted from 0; plan for as many `sequences` as are asked"
    )]
    Sequence {
        /// Which.
        sequence: u32,
    },
    /// A token id outside the vocabulary.
    #[error("token {token} is not in the vocabulary of {vocabulary}: the tokenizer is of another model")]
    Token {
        /// The id.
        token: u32,
        /// Size of the vocabulary.
        vocabulary: u32,
    },
    /// A tokenizer that cannot be built.
    #[error("{what}: {hint}")]
    Tokenizer {
        /// What is wrong with it.
        what: String,
        /// What would do.
        hint: &'static str,
    },
    /// A rule for cutting words that is not known here.
    #[error("pre-tokenizer `{}` is not known; use a model with one of {known}", harmless(.found))]
    PreTokenizer {
        /// The name in the file.
        found: String,
        /// Those that are.
        known: String,
    },
    /// A chat template that is missing or fails.
    #[error("{what}; {hint}")]
    ChatTemplate {
        /// What is wrong with it.
        what: String,
        /// What would do.
        hint: &'static str,
    },
    /// A sampling parameter outside its range.
    #[error("`{name}` is {value}: use {range}")]
    Sampling {
        /// The parameter.
        name: &'static str,
        /// Its value.
        value: f32,
        /// Its range.
        range: &'static str,
    },
}

fn known_formats() -> String {
    KernelFormat::ALL.map(|format| format.to_string()).join(", ")
}

/// Text of a file for a line of an error: without line ends, what a terminal obeys, or what begins a hint.
pub(crate) fn harmless(text: &str) -> String {
    /// source: assumed, some lines of a terminal
    const LONGEST: usize = 300;
    // Marks of direction change how the rest of a line looks.
    let obeyed = |c: char| {
        c.is_control()
            || matches!(c, '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
    };
    let plain: String = text.chars().take(LONGEST).map(|c| if obeyed(c) { ' ' } else { c }).collect();
    plain.replace("; ", ", ")
}
