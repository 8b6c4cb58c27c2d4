//! Flags of `hearth execute`.

use std::path::PathBuf;

use super::ring::RingArgs;
use clap::{ArgGroup, Args};

/// `hearth execute`.
#[derive(Debug, Args)]
#[command(group(ArgGroup::new("asked").required(true).multiple(true)
    .args(["prompt", "prompts", "messages", "prompt_tokens"])))]
#[allow(clippy::struct_excessive_bools)] // one a flag
pub struct ExecuteArgs {
    /// The plan file.
    pub plan: PathBuf,
    /// Use this model file on this device, the head.
    #[arg(long, value_name = "GGUF")]
    pub model: PathBuf,
    /// Continue this text; with --chat, answer it. Can be repeated: all prompts run in the ring at the same time, share
    /// the context of the plan, and give the same tokens as alone.
    #[arg(long, value_name = "TEXT")]
    pub prompt: Vec<String>,
    /// Read more prompts from FILE, one a line: plain text, or JSON as "TEXT" or {"prompt": "TEXT"}.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["prompt_tokens", "messages"])]
    pub prompts: Option<PathBuf>,
    /// Format each prompt with the model's chat template.
    #[arg(long, conflicts_with = "prompt_tokens")]
    pub chat: bool,
    /// Set the system message, with --chat.
    #[arg(long, value_name = "TEXT", requires = "chat")]
    pub system: Option<String>,
    /// Continue the conversation in FILE, a JSON list of `{"role": .., "content": ..}`; `-` is standard input.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["prompt", "prompt_tokens", "chat"])]
    pub messages: Option<PathBuf>,
    /// Use this many tokens of a fixed text as the prompt, for measurements.
    #[arg(long, value_name = "N", conflicts_with = "prompt", value_parser = clap::value_parser!(u32).range(1..))]
    pub prompt_tokens: Option<u32>,
    /// Run this many sequences of the fixed text at the same time.
    #[arg(long, value_name = "N", default_value_t = 1, requires = "prompt_tokens",
        value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub sequences: u32,
    /// Generate this many tokens after each prompt.
    #[arg(long, default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..))]
    pub tokens: u32,
    /// Continue after an end-of-text token.
    #[arg(long)]
    pub ignore_end: bool,
    /// Set the sampling temperature; 0 is greedy.
    #[arg(long, default_value_t = 0.0)]
    pub temperature: f32,
    /// Sample from the k most likely tokens (top-k); 0 for all.
    #[arg(long, default_value_t = 40)]
    pub top_k: usize,
    /// Set the nucleus sampling threshold (top-p).
    #[arg(long, default_value_t = 0.95)]
    pub top_p: f32,
    /// Set the seed of sampling; each sequence has its own random stream.
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
    /// Write the trace to FILE, and plans that are made during the run beside it.
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,
    #[command(flatten)]
    pub ring: RingArgs,
    /// Print a line for each token immediately, for the lab.
    #[arg(long, hide = true)]
    pub mark_tokens: bool,
}
