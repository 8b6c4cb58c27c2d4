//! Flags of `hearth synth`.

use std::path::PathBuf;

use clap::Args;

/// `hearth synth`.
#[derive(Debug, Args)]
pub struct SynthArgs {
    /// A shape by name: tiny, 120m, 1b, 3b, 8b, 70b, or a shipped model.
    #[arg(long, default_value = "tiny")]
    pub preset: String,
    /// Architecture instead of the preset's: llama, qwen2, qwen3, gemma, gemma2 or internlm2.
    #[arg(long)]
    pub arch: Option<String>,
    /// Layers instead of the preset's.
    #[arg(long)]
    pub layers: Option<u32>,
    /// Embedding length instead of the preset's.
    #[arg(long)]
    pub dim: Option<u32>,
    /// Feed-forward length instead of the preset's.
    #[arg(long)]
    pub ffn: Option<u32>,
    /// Attention heads instead of the preset's.
    #[arg(long)]
    pub heads: Option<u32>,
    /// Key-value heads instead of the preset's.
    #[arg(long)]
    pub kv_heads: Option<u32>,
    /// Numbers of a key and of a value; embedding length over heads if absent.
    #[arg(long)]
    pub head_length: Option<u32>,
    /// Context length instead of the preset's; the window of gemma2 is half of it.
    #[arg(long)]
    pub context: Option<u32>,
    /// Vocabulary instead of the preset's.
    #[arg(long)]
    pub vocab: Option<u32>,
    /// Reuse the embedding as output head, as gemma and gemma2 always do.
    #[arg(long)]
    pub tied: bool,
    /// Add factors of rotary frequencies, as Llama 3.1 has them.
    #[arg(long)]
    pub rope_factors: bool,
    /// Widens the weights; below 1 a layer changes less of what passes through it.
    #[arg(long, default_value_t = 1.0)]
    pub gain: f32,
    /// Weight format, or a mix such as q4_k_m; the preset's if absent.
    #[arg(long)]
    pub quant: Option<String>,
    /// Of the weights.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Where to write the model.
    #[arg(short, long)]
    pub output: PathBuf,
}
