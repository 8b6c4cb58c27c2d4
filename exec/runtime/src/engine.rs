//! The engine: runs all layers of a model in this process, for one sequence.
//!
//! ```no_run
//! # fn main() -> Result<(), hearth_runtime::ExecError> {
//! use std::sync::Arc;
//! use hearth_runtime::{Cpu, Engine, ExecError, KvFormat, ThreadPool, ThreadPoolOptions, Weights};
//!
//! let weights = Arc::new(Weights::open("llama.gguf")?);
//! let pool = ThreadPool::new(ThreadPoolOptions::default()).map_err(|source| ExecError::Threads { source })?;
//! let mut engine = Engine::new(weights, Cpu::new(Arc::new(pool)), 2048, KvFormat::F16)?;
//!
//! let hidden = engine.forward(&[1, 15043])?; // [tokens, embedding]
//! let logits = engine.input_output_layers.logits(&hidden)?; // [tokens, vocabulary]
//! # Ok(())
//! # }
//! ```

use std::sync::Arc;

use crate::{Cpu, ExecError, InputOutputLayers, KvCacheOptions, KvFormat, Stage, Weights};

/// A model that runs entirely in this process, with the KV cache of one sequence.
pub struct Engine {
    pub input_output_layers: InputOutputLayers,
    stage: Stage,
    layers: u32,
    /// Number of tokens in the KV cache.
    length: u32,
}

impl Engine {
    /// Creates an engine for a sequence of at most `context` tokens.
    pub fn new(weights: Arc<Weights>, cpu: Cpu, context: u32, format: KvFormat) -> Result<Engine, ExecError> {
        let layers = weights.shape().layers.0;
        let cache = KvCacheOptions { context, format, sequences: 1 };
        let stage = Stage::on_cpu(weights.clone(), std::slice::from_ref(&(0..layers)), cache, cpu.clone())?;
        Ok(Engine { input_output_layers: InputOutputLayers::new(weights, cpu), stage, layers, length: 0 })
    }

    /// Appends `tokens` to the sequence and returns their final hidden states `[tokens, embedding]`.
    pub fn forward(&mut self, tokens: &[u32]) -> Result<Vec<f32>, ExecError> {
        let mut hidden = self.input_output_layers.embed(tokens)?;
        self.stage.forward(0, 0..self.layers, &mut hidden, self.length)?;
        self.length += tokens.len() as u32;
        hidden.truncate(self.input_output_layers.hidden_states(&hidden).len());
        Ok(hidden)
    }

    /// Appends `tokens` to the sequence and returns the logits `[vocabulary]` of the next token.
    pub fn next_logits(&mut self, tokens: &[u32]) -> Result<Vec<f32>, ExecError> {
        let hidden = self.forward(tokens)?;
        let last = hidden.len() - hidden.len() / tokens.len().max(1);
        self.input_output_layers.logits(&hidden[last..])
    }

    /// Clears the KV cache, so that a new sequence can begin.
    pub fn reset(&mut self) {
        self.stage.truncate_kv_caches(0);
        self.length = 0;
    }
}
