//! Flags of every verb that leads a ring.

use std::path::PathBuf;
use std::str::FromStr;

use clap::Args;
use hearth_profiles::Seconds;

use super::GpuWeights;

/// Flags of every verb that leads a ring.
#[derive(Debug, Args)]
pub struct RingArgs {
    /// Send a prompt through the ring in batches of at most this many tokens, so that its devices compute at the same
    /// time [default: the scenario's, else 512].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=512))]
    pub micro_batch: Option<u32>,
    /// Draft tokens with this small model of the same tokenizer on the head; the ring verifies them in one pass. The
    /// output stays the same.
    #[arg(long, value_name = "GGUF")]
    pub draft_model: Option<PathBuf>,
    /// Draft this many tokens at a time [default: the scenario's, else 4].
    #[arg(long, value_name = "N", requires = "draft_model", value_parser = clap::value_parser!(u32).range(1..512))]
    pub draft_tokens: Option<u32>,
    /// Compute with this many threads [default: all cores].
    #[arg(long)]
    pub threads: Option<usize>,
    /// Convert the weights on this device's GPU. A conversion loses precision and changes the output.
    #[arg(long, value_enum, default_value_t = GpuWeights::AsStored)]
    pub gpu_weights: GpuWeights,
    /// Delay everything that this device sends, as `5ms`, to emulate a slow network. Give the workers the same delay.
    #[arg(long, value_name = "TIME", value_parser = parse_delay)]
    pub link_delay: Option<std::time::Duration>,
    /// Emulate the links in FILE, which the lab writes.
    #[arg(long, hide = true, value_name = "FILE", conflicts_with = "link_delay")]
    pub emulate_links: Option<PathBuf>,
    /// Fail when one pass through the ring takes more than this many seconds.
    #[arg(long, default_value_t = 600, value_parser = clap::value_parser!(u64).range(1..=604_800))]
    pub deadline: u64,
    /// Encrypt every connection with the key in FILE; required beyond this machine. All devices need the same key: 64
    /// random hexadecimal digits, or at least 16 bytes of any text, in a file that only you can read. Default: the
    /// text of the environment variable HEARTH_KEY.
    #[arg(long, value_name = "FILE")]
    pub key: Option<PathBuf>,
    /// Plan again with this scenario's planner when a device is lost. Without it, the other devices take over its layers
    /// in proportion to their own.
    #[arg(long, value_name = "FILE")]
    pub scenario: Option<PathBuf>,
    /// End the run when a device is lost.
    #[arg(long, conflicts_with = "scenario")]
    pub give_up: bool,
    /// Find workers without an address in the plan by multicast DNS, within this many seconds. Only workers with the key
    /// are accepted.
    #[arg(long, value_name = "SECONDS", num_args = 0..=1, default_missing_value = "5",
        value_parser = clap::value_parser!(u64).range(1..=600))]
    pub discover: Option<u64>,
    /// Exit when standard input ends, so as not to outlive the parent process.
    #[arg(long, hide = true)]
    pub exit_with_stdin: bool,
}

/// Parses a delay of at most half a second, as `5ms`.
pub fn parse_delay(text: &str) -> Result<std::time::Duration, String> {
    let seconds = Seconds::from_str(text).map_err(|error| error.to_string())?.0;
    if (0.0..=0.5).contains(&seconds) {
        Ok(std::time::Duration::from_secs_f64(seconds))
    } else {
        Err("the delay must be 0 to 500 ms, else heartbeats would be late".into())
    }
}
