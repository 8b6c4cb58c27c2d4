//! Flags of every verb that leads a ring.

use std::path::PathBuf;
use std::str::FromStr;

use clap::Args;
use hearth_profiles::Seconds;

use super::GpuWeights;

/// How a head brings its ring up and keeps it.
#[derive(Debug, Args)]
pub struct RingArgs {
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
    /// Threads to compute with; all cores if absent.
    #[arg(long)]
    pub threads: Option<usize>,
    /// What becomes of weights on this device's GPU, if the plan gives it layers. Others than those of the file are coarser:
    /// the text changes.
    #[arg(long, value_enum, default_value_t = GpuWeights::AsStored)]
    pub gpu_weights: GpuWeights,
    /// Rehearse a slow network: what this device sends arrives so much later, as `5ms`. Give the workers the same.
    #[arg(long, value_name = "TIME", value_parser = parse_delay)]
    pub link_delay: Option<std::time::Duration>,
    /// Run over the links in this file, which the lab writes: what this device sends is as late as they make it.
    #[arg(long, hide = true, value_name = "FILE", conflicts_with = "link_delay")]
    pub emulate_links: Option<PathBuf>,
    /// Longest time for one pass through the ring, in seconds; at most a week.
    #[arg(long, default_value_t = 600, value_parser = clap::value_parser!(u64).range(1..=604_800))]
    pub deadline: u64,
    /// The ring's key: seals every connection and lets the ring leave this machine. All devices need the
    /// same. A file that only you can read, with 64 random hexadecimal digits, or at least 16 bytes of
    /// any text; if absent, the text in the variable HEARTH_KEY, if set.
    #[arg(long, value_name = "FILE")]
    pub key: Option<PathBuf>,
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
}

/// A delay of at most half a second, as `5ms`.
pub fn parse_delay(text: &str) -> Result<std::time::Duration, String> {
    let seconds = Seconds::from_str(text).map_err(|error| error.to_string())?.0;
    if (0.0..=0.5).contains(&seconds) {
        Ok(std::time::Duration::from_secs_f64(seconds))
    } else {
        Err("a delay is 0 to 500 ms: with more the signs of life of a device would come too late".into())
    }
}
