//! Test models that run in one process.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use hearth_profiles::Layers;
use hearth_profiles::model::{Architecture, ModelShape};
use hearth_runtime::synth::{SynthOptions, synthesise};
use hearth_runtime::{CacheFormat, CacheOptions, Cpu, InputOutputLayers, Pool, PoolOptions, Stage, Weights};
use tempfile::NamedTempFile;

/// Returns the folder of the trained models.
pub fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/models")
}

/// Returns the shape of a small model of an architecture.
pub fn shape(architecture: Architecture) -> ModelShape {
    ModelShape {
        architecture,
        layers: Layers(4),
        embedding: 256,
        feed_forward: 512,
        heads: 4,
        kv_heads: 2,
        key_length: 64,
        value_length: 64,
        vocab_size: 512,
        context_length: 20,
        tied_embeddings: matches!(architecture, Architecture::Gemma | Architecture::Gemma2),
    }
}

/// Synthesises a model with random weights in a temporary file.
pub fn synthetic(options: &SynthOptions) -> NamedTempFile {
    let file = NamedTempFile::new().unwrap();
    synthesise(options, file.path(), &mut |_, _| ()).unwrap();
    file
}

/// A model with all layers in one stage.
pub struct Model {
    pub input_output: InputOutputLayers,
    stage: Stage,
    layers: u32,
    length: u32,
}

impl Model {
    pub fn open(path: &Path, format: CacheFormat) -> Model {
        let weights = Arc::new(Weights::open(path).unwrap());
        let pool =
            Pool::new(PoolOptions { threads: 2, pin_workers: false, ..PoolOptions::default() }).unwrap();
        let cpu = Cpu::new(Arc::new(pool));
        let layers = weights.shape().layers.0;
        let cache = CacheOptions { context: 256, format, sequences: 1 };
        let whole = std::iter::once(0..layers).collect::<Vec<_>>();
        let stage = Stage::on_cpu(Arc::clone(&weights), &whole, cache, cpu.clone()).unwrap();
        Model { input_output: InputOutputLayers::new(weights, cpu), stage, layers, length: 0 }
    }

    pub fn restart(&mut self) {
        self.stage.truncate(0);
        self.length = 0;
    }

    /// Returns the hidden rows of `tokens` after all layers; the tokens continue the sequence.
    pub fn pass(&mut self, tokens: &[u32]) -> Vec<f32> {
        let mut hidden = self.input_output.embed(tokens).unwrap();
        let positions: Vec<u32> = (self.length..).take(tokens.len()).collect();
        self.stage.forward(0..self.layers, &mut hidden, &positions).unwrap();
        self.length += tokens.len() as u32;
        hidden
    }
}
