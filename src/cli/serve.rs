//! Flags of `hearth serve`.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::Args;

use super::ring::RingArgs;

/// `hearth serve`.
#[derive(Debug, Args)]
pub struct ServeArgs {
    /// The plan file.
    pub plan: PathBuf,
    /// Use this model file on this device, the head.
    #[arg(long, value_name = "GGUF")]
    pub model: PathBuf,
    /// Listen for HTTP requests at this address; port 0 selects a free port. Without a token it must be loopback.
    #[arg(long, default_value = "127.0.0.1:8080", value_name = "IP:PORT", value_parser = own_address)]
    pub listen: SocketAddr,
    /// Require the token in FILE as an API key: at least 16 characters in one line [default: the text of the environment
    /// variable HEARTH_TOKEN].
    #[arg(long, value_name = "FILE")]
    pub token: Option<PathBuf>,
    /// Run this many requests at the same time; they share the context of the plan [default: the plan's].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub sequences: Option<u32>,
    /// Set the name of the model in the API [default: the file's].
    #[arg(long)]
    pub name: Option<String>,
    #[command(flatten)]
    pub ring: RingArgs,
}

/// Parses an address of this machine.
fn own_address(text: &str) -> Result<SocketAddr, String> {
    text.parse().map_err(|_| "write IP:PORT, as 127.0.0.1:8080 or 0.0.0.0:8080, without a name".into())
}
