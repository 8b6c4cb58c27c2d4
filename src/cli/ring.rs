//! Flags of `hearth execute`, `hearth serve` and `hearth worker`.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use clap::{ArgGroup, Args, ValueEnum};
use hearth_profiles::Seconds;
use hearth_schema::address;

use super::GpuWeightFormat;

#[derive(Debug, Args)]
#[command(group(ArgGroup::new("input").required(true).multiple(true)
    .args(["prompt", "prompts", "messages", "prompt_tokens"])))]
#[allow(clippy::struct_excessive_bools)] // one a flag
pub struct ExecuteArgs {
    /// The plan file.
    pub plan: PathBuf,
    /// Read the model from this GGUF file on this device, the head.
    #[arg(long, value_name = "GGUF")]
    pub model: PathBuf,
    /// Continue TEXT; with --chat, answer it. Can be repeated: the prompts run at the same time and share the context
    /// of the plan. The tokens are the same as if each prompt ran alone.
    #[arg(long, value_name = "TEXT")]
    pub prompt: Vec<String>,
    /// Read prompts from FILE, one per line: plain text, or JSON as "TEXT" or {"prompt": "TEXT"}.
    #[arg(id = "prompts", long = "prompts", value_name = "FILE", conflicts_with_all = ["prompt_tokens", "messages"])]
    pub prompts_file: Option<PathBuf>,
    /// Format each prompt with the model's chat template.
    #[arg(long, conflicts_with = "prompt_tokens")]
    pub chat: bool,
    /// Set the system message, with --chat.
    #[arg(long, value_name = "TEXT", requires = "chat")]
    pub system: Option<String>,
    /// Read a conversation from FILE, a JSON list of `{"role": .., "content": ..}`, and answer it; `-` is standard
    /// input.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["prompt", "prompt_tokens", "chat"])]
    pub messages: Option<PathBuf>,
    /// Use a fixed text of this many tokens as the prompt, for measurements.
    #[arg(long, value_name = "N", conflicts_with = "prompt", value_parser = clap::value_parser!(u32).range(1..))]
    pub prompt_tokens: Option<u32>,
    /// Generate from the text of --prompt-tokens in this many sequences at the same time.
    #[arg(long, value_name = "N", default_value_t = 1, requires = "prompt_tokens",
        value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub sequences: u32,
    /// Generate this many tokens after each prompt.
    #[arg(long, default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..))]
    pub tokens: u32,
    /// Continue after an end-of-text token.
    #[arg(id = "ignore_end", long = "ignore-end")]
    pub ignore_eos: bool,
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
    /// Write the trace to FILE, and plans that are made during the run to the same folder.
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,
    #[command(flatten)]
    pub ring: RingArgs,
    /// Print a line for each token immediately, for the lab.
    #[arg(id = "mark_tokens", long = "mark-tokens", hide = true)]
    pub print_token_lines: bool,
}

#[derive(Debug, Args)]
pub struct ServeArgs {
    /// The plan file.
    pub plan: PathBuf,
    /// Read the model from this GGUF file on this device, the head.
    #[arg(long, value_name = "GGUF")]
    pub model: PathBuf,
    /// Listen for HTTP requests on this address; port 0 selects a free port. An address that other machines can reach
    /// requires a token.
    #[arg(long, default_value = "127.0.0.1:8080", value_name = "IP:PORT", value_parser = own_address)]
    pub listen: SocketAddr,
    /// Require the API key in FILE from clients: one line of at least 16 characters [default: the environment
    /// variable HEARTH_TOKEN].
    #[arg(id = "token", long = "token", value_name = "FILE")]
    pub api_key_file: Option<PathBuf>,
    /// Run at most this many requests at the same time; they share the context of the plan [default: the plan's].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub sequences: Option<u32>,
    /// Set the model's name in the API [default: the name in the file].
    #[arg(long)]
    pub name: Option<String>,
    #[command(flatten)]
    pub ring: RingArgs,
}

/// Parses the address to listen on, `IP:PORT`. Host names are not accepted.
fn own_address(text: &str) -> Result<SocketAddr, String> {
    text.parse()
        .map_err(|_| "write IP:PORT, such as 127.0.0.1:8080 or 0.0.0.0:8080, without a host name".into())
}

#[derive(Debug, Args)]
pub struct WorkerArgs {
    /// Listen on this address; port 0 selects a free port. An address that other machines can reach requires a key.
    #[arg(long, value_name = "HOST:PORT", value_parser = address::validate)]
    pub listen: String,
    /// Read the model from this GGUF file.
    #[arg(long, value_name = "GGUF", required_unless_present = "fetch")]
    pub model: Option<PathBuf>,
    /// Fetch the layers of this device from the head, and keep them in FOLDER.
    #[arg(id = "fetch", long = "fetch", value_name = "FOLDER", conflicts_with = "model")]
    pub fetch_folder: Option<PathBuf>,
    /// Encrypt every connection with the key in FILE; required for connections to other machines. All devices need
    /// the same key: 64 hexadecimal digits, or a text of at least 16 bytes, in a file that only you can read
    /// [default: the environment variable HEARTH_KEY].
    #[arg(long, value_name = "FILE")]
    pub key: Option<PathBuf>,
    /// Compute with this many threads [default: all cores].
    #[arg(long)]
    pub threads: Option<usize>,
    /// Set the weight format on this device's GPU. A conversion loses precision and changes the output.
    #[arg(long, value_enum, default_value_t = GpuWeightFormat::AsStored)]
    pub gpu_weights: GpuWeightFormat,
    /// Set this device's name, by which `hearth execute --discover` finds it [default: the host name].
    #[arg(long)]
    pub name: Option<String>,
    /// Announce this worker by multicast DNS: its name, its port and the version of the protocol.
    #[arg(long, value_enum, default_value_t = AnnouncePolicy::Auto)]
    pub announce: AnnouncePolicy,
    /// Delay every message that this device sends by TIME, such as `5ms`, to emulate a slow network.
    #[arg(long, value_name = "TIME", value_parser = parse_delay)]
    pub link_delay: Option<Duration>,
    /// Emulate the links in FILE, which the lab writes.
    #[arg(
        id = "emulate_links",
        long = "emulate-links",
        hide = true,
        value_name = "FILE",
        conflicts_with = "link_delay"
    )]
    pub emulated_links_file: Option<PathBuf>,
    /// Exit when standard input ends, which is when the parent process ends.
    #[arg(id = "exit_with_stdin", long = "exit-with-stdin", hide = true)]
    pub exit_on_stdin_eof: bool,
}

/// When a worker announces itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum AnnouncePolicy {
    /// Announce if the worker has a key and other machines can reach it.
    Auto,
    /// Always announce, even if only this machine can reach the worker.
    Always,
    /// Never announce.
    Never,
}

/// The flags of every command that is the head of a ring.
#[derive(Debug, Args)]
pub struct RingArgs {
    /// Split a prompt into batches of at most this many tokens, which are pipelined through the devices [default: the
    /// scenario's, else 512].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=512))]
    pub micro_batch: Option<u32>,
    /// Draft tokens on the head with this smaller model, which must have the tokenizer of the main model; the ring
    /// verifies the drafts in one pass. Does not change the output.
    #[arg(long, value_name = "GGUF")]
    pub draft_model: Option<PathBuf>,
    /// Draft this many tokens at a time [default: the scenario's, else 4].
    #[arg(long, value_name = "N", requires = "draft_model", value_parser = clap::value_parser!(u32).range(1..512))]
    pub draft_tokens: Option<u32>,
    /// Compute with this many threads [default: all cores].
    #[arg(long)]
    pub threads: Option<usize>,
    /// Set the weight format on this device's GPU. A conversion loses precision and changes the output.
    #[arg(long, value_enum, default_value_t = GpuWeightFormat::AsStored)]
    pub gpu_weights: GpuWeightFormat,
    /// Delay every message that this device sends by TIME, such as `5ms`, to emulate a slow network. Set the same
    /// delay on the workers.
    #[arg(long, value_name = "TIME", value_parser = parse_delay)]
    pub link_delay: Option<Duration>,
    /// Emulate the links in FILE, which the lab writes.
    #[arg(
        id = "emulate_links",
        long = "emulate-links",
        hide = true,
        value_name = "FILE",
        conflicts_with = "link_delay"
    )]
    pub emulated_links_file: Option<PathBuf>,
    /// Fail when one pass through the ring takes more than this many seconds.
    #[arg(id = "deadline", long = "deadline", value_name = "SECONDS", default_value_t = 600, value_parser = clap::value_parser!(u64).range(1..=604_800))]
    pub pass_timeout_seconds: u64,
    /// Encrypt every connection with the key in FILE; required for connections to other machines. All devices need
    /// the same key: 64 hexadecimal digits, or a text of at least 16 bytes, in a file that only you can read
    /// [default: the environment variable HEARTH_KEY].
    #[arg(long, value_name = "FILE")]
    pub key: Option<PathBuf>,
    /// Plan again with the planner of the scenario in FILE when a device is lost. By default the other devices take
    /// over its layers in proportion to their own.
    #[arg(long, value_name = "FILE")]
    pub scenario: Option<PathBuf>,
    /// Stop when a device is lost.
    #[arg(id = "give_up", long = "give-up", conflicts_with = "scenario")]
    pub stop_on_device_loss: bool,
    /// Find the workers that have no address in the plan by multicast DNS, within this many seconds. Only workers
    /// with the same key are accepted.
    #[arg(id = "discover", long = "discover", value_name = "SECONDS", num_args = 0..=1, default_missing_value = "5",
        value_parser = clap::value_parser!(u64).range(1..=600))]
    pub discovery_timeout_seconds: Option<u64>,
    /// Exit when standard input ends, which is when the parent process ends.
    #[arg(id = "exit_with_stdin", long = "exit-with-stdin", hide = true)]
    pub exit_on_stdin_eof: bool,
}

/// Parses a delay of at most 500 ms, such as `5ms`.
fn parse_delay(text: &str) -> Result<Duration, String> {
    let seconds = Seconds::from_str(text).map_err(|error| error.to_string())?.0;
    if (0.0..=0.5).contains(&seconds) {
        Ok(Duration::from_secs_f64(seconds))
    } else {
        Err("the delay must be between 0 and 500 ms, so that heartbeats are not late".into())
    }
}
