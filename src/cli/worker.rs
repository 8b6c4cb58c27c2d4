//! Flags of `hearth worker`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use hearth_schema::address;

use super::GpuWeights;
use super::ring::parse_delay;

/// `hearth worker`.
#[derive(Debug, Args)]
pub struct WorkerArgs {
    /// Where to listen; port 0 takes a free one. Without a key only 127.0.0.1.
    #[arg(long, value_name = "HOST:PORT", value_parser = address::checked)]
    pub listen: String,
    /// The model file on this device.
    #[arg(long, required_unless_present = "fetch")]
    pub model: Option<PathBuf>,
    /// Have no model: fetch the layers that a plan gives this device from its head, and keep them in this folder.
    #[arg(long, value_name = "FOLDER", conflicts_with = "model")]
    pub fetch: Option<PathBuf>,
    /// The ring's key: seals every connection and lets the ring leave this machine. All devices need the
    /// same. A file that only you can read, with 64 random hexadecimal digits, or at least 16 bytes of
    /// any text; if absent, the text in the variable HEARTH_KEY, if set.
    #[arg(long, value_name = "FILE")]
    pub key: Option<PathBuf>,
    /// Threads to compute with; all cores if absent.
    #[arg(long)]
    pub threads: Option<usize>,
    /// What becomes of weights on this device's GPU, as with `hearth execute`.
    #[arg(long, value_enum, default_value_t = GpuWeights::AsStored)]
    pub gpu_weights: GpuWeights,
    /// This device's name in plans, by which `hearth execute --discover` finds it; if absent, what the system calls
    /// itself.
    #[arg(long)]
    pub name: Option<String>,
    /// Whether to say by multicast DNS that this worker is here: its name, its port and the protocol's version.
    #[arg(long, value_enum, default_value_t = Announce::Auto)]
    pub announce: Announce,
    /// Rehearse a slow network: what this device sends arrives so much later, as `5ms`.
    #[arg(long, value_name = "TIME", value_parser = parse_delay)]
    pub link_delay: Option<std::time::Duration>,
    /// Run over the links in this file, which the lab writes: what this device sends is as late as they make it.
    #[arg(long, hide = true, value_name = "FILE", conflicts_with = "link_delay")]
    pub emulate_links: Option<PathBuf>,
    /// End when standard input ends, so as not to outlive who started it.
    #[arg(long, hide = true)]
    pub exit_with_stdin: bool,
}

/// Whether a worker announces itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Announce {
    /// With a key, when other machines can reach it.
    Auto,
    /// On this machine too.
    Always,
    /// Never.
    Never,
}
