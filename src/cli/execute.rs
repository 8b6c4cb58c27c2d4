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
    /// The plan.
    pub plan: PathBuf,
    /// The model file on this device, the head.
    #[arg(long)]
    pub model: PathBuf,
    /// The text to go on from; with --chat, what the user says. Given several times, all are under way in the ring at
    /// once, and each gives the tokens that it would give alone. They share the positions that the plan has caches for.
    #[arg(long)]
    pub prompt: Vec<String>,
    /// More prompts, one a line: any text, or as JSON "TEXT" or {"prompt": "TEXT"}.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["prompt_tokens", "messages"])]
    pub prompts: Option<PathBuf>,
    /// Put each prompt into the model's chat template.
    #[arg(long, conflicts_with = "prompt_tokens")]
    pub chat: bool,
    /// With --chat, what the model is told before.
    #[arg(long, requires = "chat")]
    pub system: Option<String>,
    /// A conversation for the chat template instead: a JSON list of `{"role": .., "content": ..}`; - is standard input.
    #[arg(long, conflicts_with_all = ["prompt", "prompt_tokens", "chat"])]
    pub messages: Option<PathBuf>,
    /// So many tokens of a fixed text instead, for measurements.
    #[arg(long, conflicts_with = "prompt", value_parser = clap::value_parser!(u32).range(1..))]
    pub prompt_tokens: Option<u32>,
    /// So many sequences of that text at once, for measurements.
    #[arg(long, value_name = "N", default_value_t = 1, requires = "prompt_tokens",
        value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub sequences: u32,
    /// Tokens to generate after each prompt.
    #[arg(long, default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..))]
    pub tokens: u32,
    /// Go on after an end-of-text token.
    #[arg(long)]
    pub ignore_end: bool,
    /// 0 is greedy.
    #[arg(long, default_value_t = 0.0)]
    pub temperature: f32,
    /// The k most likely tokens only; 0 for all.
    #[arg(long, default_value_t = 40)]
    pub top_k: usize,
    /// The fewest tokens that together are so likely.
    #[arg(long, default_value_t = 0.95)]
    pub top_p: f32,
    /// Of the random stream; each sequence has one of its own, by this seed and its number.
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
    /// Where to write the trace; plans made in mid-run are written beside it.
    #[arg(long)]
    pub trace: Option<PathBuf>,
    /// How the ring is brought up.
    #[command(flatten)]
    pub ring: RingArgs,
    /// Print a line for each token, at once: whoever reads it looks at counters then.
    #[arg(long, hide = true)]
    pub mark_tokens: bool,
}
