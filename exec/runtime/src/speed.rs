//! Measures the prefill and decoding speed of a model on this machine.
//!
//! All layers and the output layer run in this process. [`measure`] times the decoding of single tokens and the prefill
//! of prompts of several lengths. It also measures the rate at which the same threads read the same weights without
//! computing, which is an upper bound for decoding from memory.
//!
//! Not here: the comparison with another inference engine, which runs in a separate process.

use std::path::Path;
use std::sync::Arc;

use hearth_core::schedule::ModelPart;
use hearth_profiles::measure::Samples;
use serde::{Deserialize, Serialize};

use crate::KvFormat;
use crate::clock::monotonic_nanos;
use crate::error::ExecError;
use crate::memory::MemoryWatch;
use crate::sampler::greedy_token;
use crate::{Cpu, Engine, Extent, ThreadPool, ThreadPoolOptions, Weights};

#[derive(Debug, Clone)]
pub struct SpeedOptions {
    pub threads: usize,
    /// Lengths of the prompts whose prefill is measured, in tokens.
    pub prompt_lengths: Vec<u32>,
    /// Number of tokens whose decoding is measured.
    pub decode_tokens: u32,
    /// Whether packed weights are used if there are any.
    pub packed: bool,
}

/// The measured speed and memory use of a model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct InferenceSpeed {
    /// Time from opening the model file to the logits of the first token, in seconds.
    #[serde(rename = "load_s")]
    pub first_logits_s: f64,
    #[serde(rename = "prefill")]
    pub prefill_speeds: Vec<PrefillSpeed>,
    /// Tokens decoded per second: the reciprocal of the median time per token.
    pub decode_tokens_per_s: f64,
    /// Resident memory of the process after decoding, in bytes; `None` if the system does not report this value.
    pub resident_bytes: Option<u64>,
    /// Resident memory of the process after all prompts, in bytes; buffers grow with the prompt length.
    pub resident_bytes_after_prompts: Option<u64>,
    /// Bytes of weights that are read to decode one token; `None` for other inference engines.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weight_bytes_per_token: Option<u64>,
    /// The highest measured rate at which all threads together read the weights of the model, in bytes per second.
    #[serde(rename = "read_bytes_per_s", default, skip_serializing_if = "Option::is_none")]
    pub memory_read_bytes_per_s: Option<f64>,
    /// Whether packed weights were used; `None` for other inference engines.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub packed: Option<bool>,
    /// The name of the SIMD instruction set of the kernels, for example `avx2`.
    #[serde(rename = "instructions", default, skip_serializing_if = "Option::is_none")]
    pub instruction_set: Option<String>,
}

impl InferenceSpeed {
    /// Whether packed weights were used.
    pub fn uses_packed(&self) -> bool {
        self.packed == Some(true)
    }
}

/// The speed of processing a prompt of `tokens` tokens in one pass.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct PrefillSpeed {
    pub tokens: u32,
    pub tokens_per_s: f64,
}

/// Number of passes over all weights that measure the read rate; the fastest pass counts.
/// source: assumed, the best of five is stable
const READING_PASSES: usize = 5;

/// Measures the speed of the model file at `path`.
pub fn measure(path: &Path, options: &SpeedOptions) -> Result<InferenceSpeed, ExecError> {
    let start = monotonic_nanos();
    let mut weights = Weights::open(path)?;
    if options.packed {
        weights.use_packed()?;
    }
    let weights = Arc::new(weights);
    let pool = ThreadPoolOptions { threads: options.threads.max(1), ..ThreadPoolOptions::default() };
    let pool = Arc::new(ThreadPool::new(pool).map_err(|source| ExecError::Threads { source })?);
    let cpu = Cpu::new(Arc::clone(&pool));
    let max_prompt = options.prompt_lengths.iter().copied().max().unwrap_or(0);
    let context = max_prompt.max(options.decode_tokens + 1);
    let mut engine = Engine::new(Arc::clone(&weights), cpu.clone(), context, KvFormat::F16)?;
    engine.next_logits(&[0])?;
    let load_s = seconds_since(start);
    let mut token = 0;
    let mut times = Vec::new();
    for _ in 0..options.decode_tokens {
        let start = monotonic_nanos();
        token = greedy_token(&engine.next_logits(&[token])?);
        times.push(seconds_since(start));
    }
    let resident_bytes = MemoryWatch::shared().resident_bytes();
    let vocabulary = weights.shape().vocab_size;
    let mut prefill = Vec::new();
    for &tokens in &options.prompt_lengths {
        // The work does not depend on which tokens the prompt has.
        let prompt: Vec<u32> = (0..tokens).map(|at| at.wrapping_mul(7919) % vocabulary).collect();
        engine.reset();
        let start = monotonic_nanos();
        engine.next_logits(&prompt)?;
        prefill.push(PrefillSpeed { tokens, tokens_per_s: f64::from(tokens) / seconds_since(start) });
    }
    let resident_bytes_after_prompts = MemoryWatch::shared().resident_bytes();
    let parts = [ModelPart::Layers(0..weights.shape().layers.0), ModelPart::Output];
    let extents = parts.map(|part| weights.part_extents(&part)).concat();
    let all_bytes: u64 = extents.iter().map(|extent| extent.length).sum();
    Ok(InferenceSpeed {
        first_logits_s: load_s,
        prefill_speeds: prefill,
        decode_tokens_per_s: 1.0 / Samples::new(times).median(),
        resident_bytes,
        resident_bytes_after_prompts,
        weight_bytes_per_token: Some(all_bytes - weights.unused_expert_bytes()),
        memory_read_bytes_per_s: Some(read_rate(&weights, &extents, &pool)),
        packed: Some(weights.uses_packed()),
        instruction_set: Some(cpu.instruction_set.name().into()),
    })
}

fn seconds_since(start: u64) -> f64 {
    (monotonic_nanos() - start) as f64 * 1e-9
}

/// Returns the rate at which all threads together read the bytes of `extents`, in bytes per second: the highest of
/// several measurements.
fn read_rate(weights: &Weights, extents: &[Extent], pool: &ThreadPool) -> f64 {
    let mut best = 0.0f64;
    for _ in 0..READING_PASSES {
        let start = monotonic_nanos();
        let mut bytes = 0;
        for &extent in extents {
            let lines = weights.mapped_bytes(extent).expect("an extent of this model").as_chunks::<64>().0;
            bytes += lines.len() * 64;
            pool.for_each_chunk(lines.len(), 4096, |_, range| {
                let mut sums = [0u64; 8];
                for line in &lines[range] {
                    for (sum, word) in sums.iter_mut().zip(line.as_chunks::<8>().0) {
                        *sum ^= u64::from_le_bytes(*word);
                    }
                }
                std::hint::black_box(sums);
            });
        }
        best = best.max(bytes as f64 / seconds_since(start));
    }
    best
}
