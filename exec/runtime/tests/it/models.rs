//! Test models that run in one process.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use hearth_profiles::Layers;
use hearth_profiles::model::{Architecture, ModelShape, SharedKv};
use hearth_runtime::synth::{SynthOptions, synthesise};
use hearth_runtime::{Cpu, Engine, KvFormat, ThreadPool, ThreadPoolOptions, Weights};
use serde::de::DeserializeOwned;
use tempfile::NamedTempFile;

pub fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/models")
}

pub fn data(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name)
}

pub fn json<T: DeserializeOwned>(path: &Path) -> T {
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

pub fn shape(architecture: Architecture) -> ModelShape {
    ModelShape {
        architecture,
        layers: Layers(4),
        embedding_length: 256,
        feed_forward_length: 512,
        heads: 4,
        kv_heads: 2,
        key_length: 64,
        value_length: 64,
        values_are_keys: false,
        hybrid: None,
        shared_kv: None,
        experts: None,
        per_layer_input_length: 0,
        vocab_size: 512,
        context_length: 20,
        has_tied_embeddings: architecture.spec().always_ties_embeddings,
    }
    .with_default_hybrid()
    .with_default_experts()
}

/// Returns a shape of twelve layers, of which six use the keys and values of others, and with per-layer inputs.
pub fn with_kv_sharing(mut shape: ModelShape) -> ModelShape {
    let feed_forward_length = 2 * shape.feed_forward_length;
    shape.shared_kv = Some(SharedKv { layers: 6, feed_forward_length });
    (shape.layers, shape.per_layer_input_length) = (Layers(12), 256);
    ModelShape { values_are_keys: false, ..shape.with_default_hybrid() }
}

/// Synthesises a model with random weights in a temporary file.
pub fn synthetic(options: &SynthOptions) -> NamedTempFile {
    let file = NamedTempFile::new().unwrap();
    synthesise(options, file.path(), &mut |_, _| ()).unwrap();
    file
}

/// Opens a model on two threads, with a context of 256 positions.
pub fn open(path: &Path, format: KvFormat) -> Engine {
    let pool = ThreadPoolOptions { threads: 2, pin_workers: false, ..ThreadPoolOptions::default() };
    let cpu = Cpu::new(Arc::new(ThreadPool::new(pool).unwrap()));
    Engine::new(Arc::new(Weights::open(path).unwrap()), cpu, 256, format).unwrap()
}
