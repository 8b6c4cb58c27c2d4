//! Flags of `hearth worker`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use hearth_schema::address;

use super::GpuWeights;
use super::ring::parse_delay;

/// `hearth worker`.
#[derive(Debug, Args)]
pub struct WorkerArgs {
    /// Listen at this address; port 0 selects a free port. Without a key it must be 127.0.0.1.
    #[arg(long, value_name = "HOST:PORT", value_parser = address::checked)]
    pub listen: String,
    /// Use this model file.
    #[arg(long, value_name = "GGUF", required_unless_present = "fetch")]
    pub model: Option<PathBuf>,
    /// Fetch the layers that a plan gives this device from its head, and keep them in FOLDER.
    #[arg(long, value_name = "FOLDER", conflicts_with = "model")]
    pub fetch: Option<PathBuf>,
    /// Encrypt every connection with the key in FILE; required beyond this machine. All devices need the same key: 64
    /// random hexadecimal digits, or at least 16 bytes of any text, in a file that only you can read. Default: the
    /// text of the environment variable HEARTH_KEY.
    #[arg(long, value_name = "FILE")]
    pub key: Option<PathBuf>,
    /// Compute with this many threads [default: all cores].
    #[arg(long)]
    pub threads: Option<usize>,
    /// Convert the weights on this device's GPU, as in `hearth execute`.
    #[arg(long, value_enum, default_value_t = GpuWeights::AsStored)]
    pub gpu_weights: GpuWeights,
    /// Set this device's name in plans, by which `hearth execute --discover` finds it [default: the host name].
    #[arg(long)]
    pub name: Option<String>,
    /// Announce this worker by multicast DNS: its name, its port and the version of the protocol.
    #[arg(long, value_enum, default_value_t = Announce::Auto)]
    pub announce: Announce,
    /// Delay everything that this device sends, as `5ms`, to emulate a slow network.
    #[arg(long, value_name = "TIME", value_parser = parse_delay)]
    pub link_delay: Option<std::time::Duration>,
    /// Emulate the links in FILE, which the lab writes.
    #[arg(long, hide = true, value_name = "FILE", conflicts_with = "link_delay")]
    pub emulate_links: Option<PathBuf>,
    /// Exit when standard input ends, so as not to outlive the parent process.
    #[arg(long, hide = true)]
    pub exit_with_stdin: bool,
}

/// When a worker announces itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Announce {
    /// If it has a key and other machines can reach it.
    Auto,
    /// Always, on this machine too.
    Always,
    /// Never.
    Never,
}
