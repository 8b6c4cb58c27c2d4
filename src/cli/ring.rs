//! Flags of `hearth execute`, `hearth serve` and `hearth worker`.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use clap::{ArgGroup, Args, ValueEnum};
use hearth_profiles::Seconds;
use hearth_runtime::Pooling;
use hearth_schema::address;

use super::GpuWeightFormat;
use super::run::{SamplingArgs, SingleDeviceArgs};

/// A plan and its model, or a model that this device runs alone.
#[derive(Debug, Args)]
pub struct PlanOrModel {
    /// The plan file, or the GGUF file (or `hf:OWNER/REPO:QUANT`) of a model that this device runs alone.
    #[arg(value_name = "PLAN|GGUF")]
    pub plan: PathBuf,
    /// Read the model of the plan from this GGUF file. This device is the head of the ring.
    #[arg(long, value_name = "GGUF")]
    pub model: Option<PathBuf>,
    #[command(flatten)]
    pub single_device: SingleDeviceArgs,
}

#[derive(Debug, Args)]
#[command(group(ArgGroup::new("input").required(true).multiple(true)
    .args(["prompt", "prompts", "messages", "prompt_tokens", "arrivals"])))]
#[allow(clippy::struct_excessive_bools)] // one a flag
pub struct ExecuteArgs {
    #[command(flatten)]
    pub source: PlanOrModel,
    /// Generate a continuation of TEXT, or with --chat an answer to TEXT. Can be repeated: the prompts run
    /// concurrently and share the context of the plan. Each prompt gets the same tokens as if it ran alone.
    #[arg(long, value_name = "TEXT")]
    pub prompt: Vec<String>,
    /// Read prompts from FILE, one prompt per line: plain text, or JSON as "TEXT" or {"prompt": "TEXT"}.
    #[arg(id = "prompts", long = "prompts", value_name = "FILE", conflicts_with_all = ["prompt_tokens", "messages"])]
    pub prompts_file: Option<PathBuf>,
    /// Format each prompt with the chat template of the model.
    #[arg(long, conflicts_with = "prompt_tokens")]
    pub chat: bool,
    /// Begin each conversation of --chat with this system message.
    #[arg(long, value_name = "TEXT", requires = "chat")]
    pub system: Option<String>,
    /// Read a conversation from FILE, a JSON list of `{"role": .., "content": ..}`, and generate the next message; `-`
    /// reads standard input. An object `{"messages": [..], "tools": [..]}` also describes tools, as in OpenAI's API.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["prompt", "prompt_tokens", "chat"])]
    pub messages: Option<PathBuf>,
    /// Use a fixed text with this many tokens as the prompt, for measurements.
    #[arg(long, value_name = "N", conflicts_with = "prompt", value_parser = clap::value_parser!(u32).range(1..))]
    pub prompt_tokens: Option<u32>,
    /// Run requests when they arrive, as recorded in FILE: a CSV file with the columns `TIMESTAMP`, `ContextTokens` and
    /// `GeneratedTokens`, as in the public Azure LLM inference traces. Their prompts are different fixed texts. With
    /// --ignore-end, answers have as many tokens as recorded.
    #[arg(long, value_name = "FILE", conflicts_with_all =
        ["prompt", "prompts", "messages", "prompt_tokens", "tokens", "routes", "record_routes"])]
    pub arrivals: Option<PathBuf>,
    /// Run this many concurrent sequences with the prompt of --prompt-tokens; with --arrivals, requests at the same time, if
    /// the plan is not for more.
    #[arg(long, value_name = "N", default_value_t = 1, conflicts_with_all = ["prompt", "prompts", "messages"],
        value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub sequences: u32,
    /// Generate at most this many tokens after each prompt.
    #[arg(long, default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..))]
    pub tokens: u32,
    /// Continue the generation after an end-of-text token.
    #[arg(id = "ignore_end", long = "ignore-end")]
    pub ignore_eos: bool,
    #[command(flatten)]
    pub sampling: SamplingArgs,
    /// Write the trace of the run to FILE, and the plans that the head makes during the run to the folder of
    /// FILE.
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,
    /// Write to FILE which experts each token used in each layer, for `hearth experts` and `hearth simulate --routes`;
    /// only for a mixture of experts whose layers are all on this device, and for one prompt.
    #[arg(long, value_name = "FILE")]
    pub record_routes: Option<PathBuf>,
    /// Let the tokens use the experts of this recording (`route_trace v1`) instead of those that the router chooses, to
    /// measure how fast they are; the text is meaningless. After its last token, it begins again. Under the conditions of
    /// --record-routes.
    #[arg(long, value_name = "FILE")]
    pub routes: Option<PathBuf>,
    #[command(flatten)]
    pub ring: RingArgs,
    /// Print a line when the prompt enters the ring and a line for each token, which `hearth lab` reads.
    #[arg(id = "mark_tokens", long = "mark-tokens", hide = true)]
    pub print_token_lines: bool,
}

#[derive(Debug, Args)]
pub struct ServeArgs {
    #[command(flatten)]
    pub source: PlanOrModel,
    /// Listen for HTTP requests on this address; port 0 selects a free port. An address that other machines can reach
    /// requires --token.
    #[arg(long, default_value = "127.0.0.1:8080", value_name = "IP:PORT", value_parser = parse_listen_address)]
    pub listen: SocketAddr,
    /// Listen on this port of 127.0.0.1.
    #[arg(long, conflicts_with = "listen")]
    pub port: Option<u16>,
    /// Require that clients send the API key in FILE, which must be one word of at least 16 characters [default: the
    /// environment variable HEARTH_TOKEN].
    #[arg(id = "token", long = "token", value_name = "FILE")]
    pub api_key_file: Option<PathBuf>,
    /// Encrypt with TLS: the certificate, with its chain, in this file in PEM format. Requires --tls-key.
    #[arg(id = "tls-cert", long = "tls-cert", value_name = "FILE", requires = "tls-key")]
    pub tls_certificate: Option<PathBuf>,
    /// The private key of the certificate, in PEM format.
    #[arg(id = "tls-key", long = "tls-key", value_name = "FILE", requires = "tls-cert")]
    pub tls_key: Option<PathBuf>,
    /// Let web pages of ORIGIN use the API (CORS), `SCHEME://HOST[:PORT]` or, for all pages, `*`. Can be repeated.
    #[arg(id = "cors-origin", long = "cors-origin", value_name = "ORIGIN", value_parser = parse_origin)]
    pub cors_origins: Vec<String>,
    /// Run at most this many concurrent requests. They share the memory of the plan's KV caches; without a plan, each has
    /// room for the whole `--context` [default: the number of sequences in the plan; 1 without a plan].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub sequences: Option<u32>,
    /// Set the name of the model in the API [default: the name in the model file].
    #[arg(long)]
    pub name: Option<String>,
    /// Compute the embedding of a text from these hidden states, whatever the model file says; `last` is the hidden
    /// state of the last token [default: the pooling type in the model file; without one, there are no embeddings].
    #[arg(long, value_name = "TYPE")]
    pub pooling: Option<Pooling>,
    /// Keep the plan when devices become slower or have less memory. With --scenario, the ring otherwise plans again, as
    /// soon as it has lost as much time as the change costs. Always set for a plan of the strategy `manual`.
    #[arg(long)]
    pub keep_plan: bool,
    #[command(flatten)]
    pub ring: RingArgs,
}

impl ServeArgs {
    /// Returns the address on which the server listens.
    pub fn address(&self) -> SocketAddr {
        self.port.map_or(self.listen, |port| SocketAddr::from((Ipv4Addr::LOCALHOST, port)))
    }
}

/// Parses the origin of web pages, `SCHEME://HOST[:PORT]` or `*`.
fn parse_origin(text: &str) -> Result<String, String> {
    let host = text.strip_prefix("https://").or_else(|| text.strip_prefix("http://"));
    let is_host = |host: &str| {
        !host.is_empty()
            && host.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | ':' | '[' | ']'))
    };
    if text == "*" || host.is_some_and(is_host) {
        // As browsers send it: in lower case, without the default port.
        let origin = text.to_ascii_lowercase();
        let port = if origin.starts_with("https") { ":443" } else { ":80" };
        return Ok(origin.strip_suffix(port).unwrap_or(&origin).to_owned());
    }
    Err("expected SCHEME://HOST[:PORT] without a path, such as https://chat.example, or *".into())
}

/// Parses the address on which `hearth serve` listens, `IP:PORT`. Host names are not accepted.
fn parse_listen_address(text: &str) -> Result<SocketAddr, String> {
    text.parse().map_err(|_| {
        "expected IP:PORT with a port up to 65535, such as 127.0.0.1:8080 or 0.0.0.0:8080, and no host name".into()
    })
}

#[derive(Debug, Args)]
pub struct WorkerArgs {
    /// Listen for other devices on this address; port 0 selects a free port. An address that other machines can reach
    /// requires --key.
    #[arg(long, value_name = "HOST:PORT", value_parser = address::validate)]
    pub listen: String,
    /// Read the model from this GGUF file.
    #[arg(long, value_name = "GGUF", required_unless_present = "fetch")]
    pub model: Option<PathBuf>,
    /// Fetch from the head device the layers that this device computes, and store them in FOLDER.
    #[arg(id = "fetch", long = "fetch", value_name = "FOLDER", conflicts_with = "model")]
    pub fetch_folder: Option<PathBuf>,
    #[command(flatten)]
    pub device: DeviceArgs,
    /// Set the name of this device, by which a head with --discover finds the worker [default: the host name].
    #[arg(long)]
    pub name: Option<String>,
    /// Choose whether to announce the name, port and protocol version of this worker by multicast DNS.
    #[arg(long, value_enum, default_value_t = AnnouncePolicy::Auto)]
    pub announce: AnnouncePolicy,
}

/// Whether a worker announces itself by multicast DNS.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum AnnouncePolicy {
    /// Announce the worker if it has a key and other machines can reach it.
    Auto,
    /// Announce the worker, even if only this machine can reach it.
    Always,
    /// Do not announce the worker.
    Never,
}

/// The flags of every command that runs a device of a ring, which is the head or a worker.
#[derive(Debug, Args)]
pub struct DeviceArgs {
    /// Encrypt every connection with the key in FILE; required for connections to other machines. All devices need the
    /// same key: 64 hexadecimal digits, or at least 16 bytes of text, in a file that only you can read [default: the
    /// environment variable HEARTH_KEY].
    #[arg(long, value_name = "FILE")]
    pub key: Option<PathBuf>,
    /// Compute with this many CPU threads [default: one per core].
    #[arg(long)]
    pub threads: Option<usize>,
    /// Set the format of the weights on the GPU of this device. A conversion loses precision and changes the output.
    #[arg(long, value_enum, default_value_t = GpuWeightFormat::AsStored)]
    pub gpu_weights: GpuWeightFormat,
    /// Compare the weights that this device uses with the digests that `hearth plan --hash-weights` stored in the plan,
    /// before the first computation. An unchanged file is read only once.
    #[arg(id = "verify", long = "verify")]
    pub verify_weights: bool,
    /// Delay every sent message by TIME, such as `5ms`, to emulate a slow network. Set the same delay on all devices of
    /// the ring.
    #[arg(long, value_name = "TIME", value_parser = parse_delay)]
    pub link_delay: Option<Duration>,
    /// Emulate the network links in FILE, which `hearth lab` writes.
    #[arg(long = "emulate-links", hide = true, value_name = "FILE", conflicts_with = "link_delay")]
    pub emulated_links_file: Option<PathBuf>,
    /// Exit at the end of standard input, which comes when the parent process ends.
    #[arg(id = "exit_with_stdin", long = "exit-with-stdin", hide = true)]
    pub exit_on_stdin_eof: bool,
}

/// The flags of the commands that run the head of a ring.
#[derive(Debug, Args)]
pub struct RingArgs {
    /// Split each prompt into batches of at most this many tokens, which are pipelined through the devices [default:
    /// the value in the scenario of --scenario, otherwise 512].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=512))]
    pub micro_batch: Option<u32>,
    /// Draft tokens on the head with this smaller model (speculative decoding), which must have the same tokenizer as
    /// the target model. The ring verifies the drafted tokens in one pass. The output does not change.
    #[arg(long, value_name = "GGUF")]
    pub draft_model: Option<PathBuf>,
    /// Draft this many tokens for each pass of the target model [default: the value in the scenario of --scenario,
    /// otherwise 4].
    #[arg(long, value_name = "N", requires = "draft_model", value_parser = clap::value_parser!(u32).range(1..512))]
    pub draft_tokens: Option<u32>,
    #[command(flatten)]
    pub device: DeviceArgs,
    /// Fail if one pass through the ring takes longer than this many seconds.
    #[arg(id = "deadline", long = "deadline", value_name = "SECONDS", default_value_t = 600, value_parser = clap::value_parser!(u64).range(1..=604_800))]
    pub pass_timeout_seconds: u64,
    /// Make a new plan with the planner of the scenario in FILE if a device is lost, and when serving also if one becomes
    /// slower or has less memory. By default, the remaining devices
    /// take over the layers of the lost device, in proportion to the layers that they already compute.
    #[arg(long, value_name = "FILE")]
    pub scenario: Option<PathBuf>,
    /// Stop with an error if a device is lost.
    #[arg(id = "give_up", long = "give-up", conflicts_with = "scenario")]
    pub stop_on_device_loss: bool,
    /// Find the workers that have no address in the plan by multicast DNS, within this many seconds (5 without a
    /// value). Only workers with the same key are accepted.
    #[arg(id = "discover", long = "discover", value_name = "SECONDS", num_args = 0..=1, default_missing_value = "5",
        value_parser = clap::value_parser!(u64).range(1..=600))]
    pub discovery_timeout_seconds: Option<u64>,
}

/// Parses the value of `--link-delay`, a delay of at most 500 ms, such as `5ms`.
fn parse_delay(text: &str) -> Result<Duration, String> {
    let seconds = Seconds::from_str(text).map_err(|error| error.to_string())?.0;
    if (0.0..=0.5).contains(&seconds) {
        Ok(Duration::from_secs_f64(seconds))
    } else {
        Err("the delay must be from 0 to 500 ms, so that heartbeats arrive in time".into())
    }
}
