//! Flags of `hearth synth`.

use std::path::PathBuf;

use clap::Args;

#[derive(Debug, Args)]
pub struct SynthArgs {
    /// Start from this shape: tiny, 120m, 1b, 3b, 8b, 70b, or a shipped model.
    #[arg(long, default_value = "tiny")]
    pub preset: String,
    /// Set the architecture: llama, qwen2, qwen3, gemma, gemma2 or internlm2.
    #[arg(long)]
    pub arch: Option<String>,
    /// Set the number of layers.
    #[arg(long)]
    pub layers: Option<u32>,
    /// Set the embedding length.
    #[arg(long)]
    pub dim: Option<u32>,
    /// Set the feed-forward length.
    #[arg(long)]
    pub ffn: Option<u32>,
    /// Set the number of attention heads.
    #[arg(long)]
    pub heads: Option<u32>,
    /// Set the number of key-value heads.
    #[arg(long)]
    pub kv_heads: Option<u32>,
    /// Set the head dimension of keys and values [default: embedding length / heads].
    #[arg(id = "head_length", long = "head-length", value_name = "ELEMENTS")]
    pub head_dim: Option<u32>,
    /// Set the context length; the window of gemma2 is half of it.
    #[arg(long)]
    pub context: Option<u32>,
    /// Set the size of the vocabulary.
    #[arg(long)]
    pub vocab: Option<u32>,
    /// Use the embedding as the output matrix; gemma and gemma2 always do.
    #[arg(id = "tied", long = "tied")]
    pub tied_embeddings: bool,
    /// Add factors to the rotary frequencies, as in Llama 3.1.
    #[arg(long)]
    pub rope_factors: bool,
    /// Scale the weights; with a factor below 1, each layer changes its input less.
    #[arg(long, default_value_t = 1.0)]
    pub gain: f32,
    /// Set the weight format, or a mix such as q4_k_m [default: the preset's].
    #[arg(long)]
    pub quant: Option<String>,
    /// Set the seed of the weights.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Write the model to FILE.
    #[arg(short, long, value_name = "FILE")]
    pub output: PathBuf,
}
