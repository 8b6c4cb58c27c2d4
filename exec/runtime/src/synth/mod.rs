//! Synthetic models: valid GGUF files of any shape with random weights.
//!
//! With a synthetic model, a plan for a large model can be tested without downloading the model. All weight formats are
//! supported, also mixes such as `q4_k_m`, and llama.cpp opens the files. The generated text makes no sense, but a
//! synthetic model uses disk, CPU and memory like the real model. Weights have mean zero and standard deviation
//! `gain / sqrt(row length)`, so that activations stay of order one through all layers; norm weights are near one; the
//! embedding has the standard deviation 0.5.
//!
//! Every chunk of every tensor has its own random stream, given by (seed, tensor name, chunk). Therefore the same
//! options give the same bytes for any number of threads, and the bytes of a tensor do not depend on the other tensors.
//!
//! ```no_run
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use hearth_runtime::synth::{self, SynthOptions};
//!
//! let options = SynthOptions::from_preset("tiny")?;
//! let made = synth::synthesise(&options, "tiny.gguf".as_ref(), &mut |done, total| {
//!     eprint!("\r{} %", 100 * done / total);
//! })?;
//! println!("{} parameters in {}", made.parameter_count, made.file_bytes);
//! # Ok(())
//! # }
//! ```

mod blocks;
mod header;
mod vocabulary;
mod writer;

use std::io;
use std::path::{Path, PathBuf};

use hearth_profiles::gguf::{HeaderError, TensorInfo};
use hearth_profiles::measure::free_space;
use hearth_profiles::model::{ModelShape, ModelShapeError, PartialBlockError, Quant, shipped_document};
use hearth_profiles::{Bytes, UnknownDocument};
pub use vocabulary::TokenizerKind;

#[derive(Debug, Clone, PartialEq)]
pub struct SynthOptions {
    /// The name of the model, which the file stores as `general.name`.
    pub name: String,
    pub shape: ModelShape,
    pub quant: Quant,
    pub seed: u64,
    /// The factor by which the standard deviation of the weights is multiplied; 1 keeps activations of order one.
    pub gain: f32,
    pub tokenizer: TokenizerKind,
    /// The base of the rotary frequencies (metadata key `rope.freq_base`).
    pub rope_base: f32,
    /// Whether to add factors of the rotary frequencies, with elements of about two; only for architectures that have
    /// them.
    pub add_rope_factors: bool,
    /// Number of threads that write the file.
    pub threads: usize,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SynthesisedModel {
    pub path: PathBuf,
    pub file_bytes: Bytes,
    pub parameter_count: u64,
    pub tensor_count: usize,
}

#[derive(Debug, thiserror::Error)]
pub enum SynthError {
    #[error(transparent)]
    Shape(#[from] ModelShapeError),
    #[error(transparent)]
    Block(#[from] PartialBlockError),
    #[error(transparent)]
    Header(#[from] HeaderError),
    #[error("a vocabulary of {found} tokens cannot be synthesised: use {min} to about 900000 tokens")]
    Vocabulary { found: u32, min: u32 },
    #[error("a key length of {found} cannot be rotated in pairs: use an even key length")]
    KeyLength { found: u32 },
    #[error("a gain of {found} gives weights that overflow or underflow: use a gain from {min} to {max}")]
    Gain { found: f32, min: f32, max: f32 },
    #[error("{architecture} models always have tied embeddings: make the model with tied embeddings")]
    Untied { architecture: String },
    #[error("{architecture} models have no rotary frequency factors: omit them, or use a llama model")]
    RopeFactors { architecture: String },
    #[error(
        "`{path}` needs {need}, but its disk has only {available} free: free some space or use another disk",
        path = .path.display()
    )]
    Space { path: PathBuf, need: Bytes, available: Bytes },
    #[error("cannot {verb} `{path}`: {source}", path = .path.display())]
    Io { verb: &'static str, path: PathBuf, source: io::Error },
}

/// The valid values of [`SynthOptions::gain`]. With these, weights and the scales of blocks are in the range of f16.
/// source: assumed; 1 keeps activations of order one
const GAIN_RANGE: std::ops::RangeInclusive<f32> = 1e-3..=1e3;

/// Short names of shipped models, with the full names.
const ALIASES: &[(&str, &str)] = &[("8b", "llama-8b"), ("70b", "llama-70b")];

impl SynthOptions {
    /// Returns options with seed 1, and with the default tokenizer and rotary frequency base for `shape`.
    pub fn new(name: &str, shape: ModelShape, quant: Quant) -> SynthOptions {
        // Llama 3 increased the base with the width; small models keep the original one.
        let rope_base = if shape.embedding_length >= 2048 { 500_000.0 } else { 10_000.0 };
        SynthOptions {
            name: name.to_owned(),
            tokenizer: TokenizerKind::for_architecture(shape.architecture),
            shape,
            quant,
            seed: 1,
            gain: 1.0,
            rope_base,
            add_rope_factors: false,
            threads: std::thread::available_parallelism().map_or(2, usize::from),
        }
    }

    /// Returns the options for a shipped model with this name or short name (`tiny`, `120m`, `1b`, `3b`, `8b`, `70b`,
    /// ..), including its quantisation. A plan for the shipped model is valid for the synthesised file.
    pub fn from_preset(name: &str) -> Result<SynthOptions, UnknownDocument> {
        let alias = ALIASES.iter().find(|(alias, _)| *alias == name);
        let document = shipped_document(alias.map_or(name, |(_, full)| full))?;
        // The quantisation of a parsed document is valid.
        let quant = document.quant.parse().unwrap_or(Quant::Q4KM);
        Ok(SynthOptions::new(&document.name, document.to_shape(), quant))
    }
}

/// Writes a synthetic model to `path`. `progress` receives the number of bytes of tensor data written so far and in
/// total. The file is removed if an error occurs. The memory use does not depend on the size of the model.
pub fn synthesise(
    options: &SynthOptions,
    path: &Path,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<SynthesisedModel, SynthError> {
    let plan = header::plan_file(options)?;
    check_free_space(path, Bytes(plan.layout.file_bytes))?;
    writer::write_model(options, &plan, path, progress)?;
    Ok(SynthesisedModel {
        path: path.to_owned(),
        file_bytes: Bytes(plan.layout.file_bytes),
        parameter_count: plan.layout.tensors.iter().map(TensorInfo::element_count).sum(),
        tensor_count: plan.layout.tensors.len(),
    })
}

/// Disk space that must remain free for other programs.
const FREE_MARGIN: Bytes = Bytes::from_mib(64);

/// Fails if the free space on the disk of `path` is less than `need` plus [`FREE_MARGIN`], so that writing a large
/// model does not fail after minutes.
fn check_free_space(path: &Path, need: Bytes) -> Result<(), SynthError> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let path = path.to_owned();
    match free_space(folder) {
        Ok(available) if available.0 < need.0.saturating_add(FREE_MARGIN.0) => {
            Err(SynthError::Space { path, need, available })
        }
        Ok(_) => Ok(()),
        Err(source) => Err(SynthError::Io { verb: "measure the free disk space of", path, source }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_larger_than_any_disk_is_rejected() {
        assert!(check_free_space(Path::new("model.gguf"), Bytes(1)).is_ok());
        if cfg!(unix) {
            let error = check_free_space(Path::new("model.gguf"), Bytes(1 << 60)).unwrap_err();
            assert!(matches!(error, SynthError::Space { .. }), "{error}");
        }
    }
}
