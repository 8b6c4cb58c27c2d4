//! Which flags has `hearth execute`?

use std::path::PathBuf;
use std::str::FromStr;

use clap::{ArgGroup, Args};
use hearth_profiles::Seconds;

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
    /// Tokens to generate after each prompt.
    #[arg(long, default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..))]
    pub tokens: u32,
    /// The most tokens of a prompt that enter the ring as one batch: smaller ones follow each other through it, so that
    /// its devices compute at the same time. If absent, as the scenario says, else 512.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=512))]
    pub micro_batch: Option<u32>,
    /// A small model of the same tokenizer, whole on the head: it drafts tokens that the ring verifies in one pass. The
    /// text is the same as without.
    #[arg(long, value_name = "GGUF")]
    pub draft_model: Option<PathBuf>,
    /// Tokens that are drafted at a time; if absent, as the scenario says, else 4.
    #[arg(long, value_name = "N", requires = "draft_model", value_parser = clap::value_parser!(u32).range(1..512))]
    pub draft_tokens: Option<u32>,
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
    /// Threads to compute with; all cores if absent.
    #[arg(long)]
    pub threads: Option<usize>,
    /// Rehearse a slow network: what this device sends arrives so much later, as `5ms`. Give the workers the same.
    #[arg(long, value_name = "TIME", value_parser = parse_delay)]
    pub link_delay: Option<std::time::Duration>,
    /// Longest time for one pass through the ring, in seconds; at most a week.
    #[arg(long, default_value_t = 600, value_parser = clap::value_parser!(u64).range(1..=604_800))]
    pub deadline: u64,
    /// The ring's key: seals every connection and lets the ring leave this machine. All devices need the
    /// same. A file that only you can read, with 64 random hexadecimal digits, or at least 16 bytes of
    /// any text; if absent, the text in the variable HEARTH_KEY, if set.
    #[arg(long, value_name = "FILE")]
    pub key: Option<PathBuf>,
    /// Where to write the trace; plans made in mid-run are written beside it.
    #[arg(long)]
    pub trace: Option<PathBuf>,
    /// The scenario that the plan was made from: when a device is gone, its planner plans again for the others. Without
    /// it they take the layers in proportion to their own.
    #[arg(long)]
    pub scenario: Option<PathBuf>,
    /// End the run when a device is gone.
    #[arg(long, conflicts_with = "scenario")]
    pub give_up: bool,
    /// Look for workers whose address the plan does not say by multicast DNS, for so many seconds at most. What is heard
    /// is a hint: only who has the key is taken.
    #[arg(long, value_name = "SECONDS", num_args = 0..=1, default_missing_value = "5",
        value_parser = clap::value_parser!(u64).range(1..=600))]
    pub discover: Option<u64>,
    /// End when standard input ends, so as not to outlive who started it.
    #[arg(long, hide = true)]
    pub exit_with_stdin: bool,
    /// Print a line for each token, at once: whoever reads it looks at counters then.
    #[arg(long, hide = true)]
    pub mark_tokens: bool,
}

/// A delay of at most half a second, as `5ms`.
pub(super) fn parse_delay(text: &str) -> Result<std::time::Duration, String> {
    let seconds = Seconds::from_str(text).map_err(|error| error.to_string())?.0;
    if (0.0..=0.5).contains(&seconds) {
        Ok(std::time::Duration::from_secs_f64(seconds))
    } else {
        Err("a delay is 0 to 500 ms: with more the signs of life of a device would come too late".into())
    }
}
