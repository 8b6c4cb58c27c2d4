//! Flags of `hearth synth`.

use std::path::PathBuf;

use clap::Args;

#[derive(Debug, Args)]
pub struct SynthArgs {
    /// Start from the shape of this preset (tiny, 120m, 1b, 3b, 8b, 70b) or of this model profile that ships with
    /// hearth, such as `llama-8b`. Flags such as --layers change this shape.
    #[arg(long, default_value = "tiny")]
    pub preset: String,
    /// Set the model architecture: llama, qwen2, qwen3, gemma, gemma2, gemma3, internlm2, smollm3, phi3, granite,
    /// olmo2, gemma4, qwen35, qwen3moe, qwen35moe, gpt-oss, granitemoe or olmoe.
    #[arg(long)]
    pub arch: Option<String>,
    /// Set the number of layers.
    #[arg(long)]
    pub layers: Option<u32>,
    /// Set the embedding length, which is the width of the hidden state.
    #[arg(long)]
    pub dim: Option<u32>,
    /// Set the feed-forward length, which is the inner width of the feed-forward block.
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
    /// Let the last LAYERS layers use the keys and values of earlier layers, with feed-forward blocks of twice the
    /// width; only for gemma4.
    #[arg(long, value_name = "LAYERS")]
    pub shared_kv: Option<u32>,
    /// Give each token an input for each layer, of ELEMENTS elements; only for gemma4.
    #[arg(long, value_name = "ELEMENTS")]
    pub per_layer_input: Option<u32>,
    /// Replace the feed-forward blocks by COUNT experts; only for llama (Mixtral) and mixtures, such as
    /// qwen3moe.
    #[arg(long, value_name = "COUNT")]
    pub experts: Option<u32>,
    /// Set the number of experts that a token uses [default: a quarter of them].
    #[arg(long, value_name = "COUNT")]
    pub experts_used: Option<u32>,
    /// Set the width of an expert [default: the feed-forward length].
    #[arg(long, value_name = "ELEMENTS")]
    pub expert_ffn: Option<u32>,
    /// Set the context length in tokens; the sliding window of gemma2, gemma3, gemma4, gpt-oss and olmo2
    /// is half as long.
    #[arg(long)]
    pub context: Option<u32>,
    /// Set the number of tokens in the vocabulary.
    #[arg(long)]
    pub vocab: Option<u32>,
    /// Use the input embedding as the output matrix (tied embeddings), as gemma models always do.
    #[arg(id = "tied", long = "tied")]
    pub tied_embeddings: bool,
    /// Add factors of the rotary frequencies, as in Llama 3.1 and Phi 3.
    #[arg(long)]
    pub rope_factors: bool,
    /// Multiply the random weights by this factor. With a smaller factor, each layer changes the hidden state less.
    #[arg(long, default_value_t = 1.0)]
    pub gain: f32,
    /// Set the weight format, or a mix of formats such as q4_k_m [default: the format of the preset].
    #[arg(long)]
    pub quant: Option<String>,
    /// Set the random seed of the weights.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Write the model to FILE.
    #[arg(short, long, value_name = "FILE")]
    pub output: PathBuf,
}
