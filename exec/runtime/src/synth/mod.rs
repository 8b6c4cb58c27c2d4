//! Synthetic models: valid GGUF files of any shape with random weights.
//!
//! A plan for a large model can be rehearsed without its download. llama.cpp opens the files, which are in any format,
//! pure or mixed as in `q4_k_m`. Their text makes no sense, but they are read, computed and kept in memory as the real
//! model is. Weights have mean zero and standard deviation `gain / sqrt(row length)`, so that
//! activations stay of order one through all layers; norms are near one; the embedding has a deviation of one half.
//!
//! Every chunk of every tensor has its own random stream, from (seed, tensor name, chunk): the same options give the
//! same bytes whatever the number of threads, and a tensor does not depend on the tensors around it.
//!
//! ```no_run
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use hearth_runtime::synth::{self, SynthOptions};
//!
//! let options = SynthOptions::preset("tiny")?;
//! let made = synth::synthesise(&options, "tiny.gguf".as_ref(), &mut |done, total| {
//!     eprint!("\r{} %", 100 * done / total);
//! })?;
//! println!("{} parameters in {}", made.parameters, made.file_bytes);
//! # Ok(())
//! # }
//! ```

mod blocks;
mod disk_space;
mod header;
mod vocabulary;
mod writer;

use std::io;
use std::path::{Path, PathBuf};

use hearth_profiles::gguf::{HeaderError, TensorInfo};
use hearth_profiles::model::{BlockError, ModelDocument, ModelShape, Quant, ShapeError, shipped_document};
use hearth_profiles::{Bytes, UnknownName};
pub use vocabulary::TokenizerKind;
pub use writer::partial_path;

/// The options of a synthesis.
#[derive(Debug, Clone, PartialEq)]
pub struct SynthOptions {
    /// `general.name` of the file.
    pub name: String,
    pub shape: ModelShape,
    pub quant: Quant,
    /// The seed of all weights.
    pub seed: u64,
    /// Widens the weights; 1 keeps activations of order one.
    pub gain: f32,
    pub tokenizer: TokenizerKind,
    pub rope_base: f32,
    /// Whether to add `rope_freqs.weight`, factors of about two, as Llama 3.1 has it. Llama only.
    pub rope_frequencies: bool,
    pub threads: usize,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Synthesised {
    pub path: PathBuf,
    pub file_bytes: Bytes,
    pub parameters: u64,
    pub tensors: usize,
}

/// An error of synthesising a model.
#[derive(Debug, thiserror::Error)]
pub enum SynthError {
    #[error(transparent)]
    Shape(#[from] ShapeError),
    #[error(transparent)]
    Block(#[from] BlockError),
    #[error(transparent)]
    Header(#[from] HeaderError),
    #[error("a vocabulary of {found} tokens cannot be synthesised: at least {min}, at most about 900000")]
    Vocabulary { found: u32, min: u32 },
    #[error("a key length of {found} cannot be rotated in pairs: use an even one")]
    KeyLength { found: u32 },
    #[error("a gain of {found} gives weights that overflow or vanish: use one from {min} to {max}")]
    Gain { found: f32, min: f32, max: f32 },
    #[error("a {architecture} model always ties its head to the embedding: set `tied_embeddings`")]
    Untied { architecture: String },
    #[error("a {architecture} model has no factors of rotary frequencies: leave them out, or use llama")]
    RopeFactors { architecture: String },
    #[error(
        "`{path}` needs {need} and its disk has {available} left: free some space or write elsewhere",
        path = .path.display()
    )]
    Space { path: PathBuf, need: Bytes, available: Bytes },
    #[error("cannot {verb} `{path}`: {source}", path = .path.display())]
    Io { verb: &'static str, path: PathBuf, source: io::Error },
}

/// Gains that keep weights and their blocks' scales within f16.
/// source: assumed; 1 keeps activations of order one
const GAIN_RANGE: std::ops::RangeInclusive<f32> = 1e-3..=1e3;

/// Short names of shipped models that are large.
const ALIASES: &[(&str, &str)] = &[("8b", "llama-8b"), ("70b", "llama-70b")];

impl SynthOptions {
    /// A model of this shape, seed 1, as its architecture's defaults have it.
    pub fn new(name: &str, shape: ModelShape, quant: Quant) -> SynthOptions {
        // Llama 3 raised the base with the width; small models keep the classic one.
        let rope_base = if shape.embedding >= 2048 { 500_000.0 } else { 10_000.0 };
        SynthOptions {
            name: name.to_owned(),
            tokenizer: TokenizerKind::of(shape.architecture),
            shape,
            quant,
            seed: 1,
            gain: 1.0,
            rope_base,
            rope_frequencies: false,
            threads: std::thread::available_parallelism().map_or(2, usize::from),
        }
    }

    /// `tiny`, `120m`, `1b`, `3b`, `8b`, `70b`, or any shipped model's name, with that model's quantisation. A plan
    /// made for the shipped model fits the file.
    pub fn preset(name: &str) -> Result<SynthOptions, UnknownName> {
        let alias = ALIASES.iter().find(|(alias, _)| *alias == name);
        let document = shipped_document(alias.map_or(name, |(_, full)| full))?;
        Ok(SynthOptions::from_document(&document))
    }

    /// A model as the document describes it.
    pub fn from_document(document: &ModelDocument) -> SynthOptions {
        // A document that was parsed has a readable quantisation.
        let quant = document.quant.parse().unwrap_or(Quant::Q4KM);
        SynthOptions::new(&document.name, document.shape(), quant)
    }
}

/// Writes the model to `path`, calling `progress` with the bytes of tensors written and their total. The file
/// appears under its name when it is complete; memory stays constant whatever its size.
pub fn synthesise(
    options: &SynthOptions,
    path: &Path,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Synthesised, SynthError> {
    let plan = header::plan(options)?;
    disk_space::check(path, Bytes(plan.layout.file_bytes))?;
    writer::write(options, &plan, path, progress)?;
    Ok(Synthesised {
        path: path.to_owned(),
        file_bytes: Bytes(plan.layout.file_bytes),
        parameters: plan.layout.tensors.iter().map(TensorInfo::elements).sum(),
        tensors: plan.layout.tensors.len(),
    })
}
