//! Flags of `hearth serve`.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::Args;

use super::ring::RingArgs;

/// `hearth serve`.
#[derive(Debug, Args)]
pub struct ServeArgs {
    /// The plan.
    pub plan: PathBuf,
    /// The model file on this device, the head.
    #[arg(long)]
    pub model: PathBuf,
    /// Where to listen for requests; port 0 takes a free one. Without a token only loopback, as 127.0.0.1.
    #[arg(long, default_value = "127.0.0.1:8080", value_name = "IP:PORT", value_parser = own_address)]
    pub listen: SocketAddr,
    /// Who asks needs this token, as an API key: a file with at least 16 characters in one line; if absent, the text in
    /// the variable HEARTH_TOKEN, if set.
    #[arg(long, value_name = "FILE")]
    pub token: Option<PathBuf>,
    /// Requests at once; each takes a part of the plan's context. If absent, as the plan says.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub sequences: Option<u32>,
    /// The name of the model for those who ask; if absent, the file's.
    #[arg(long)]
    pub name: Option<String>,
    /// How the ring is brought up.
    #[command(flatten)]
    pub ring: RingArgs,
}

/// An address of this machine.
fn own_address(text: &str) -> Result<SocketAddr, String> {
    text.parse().map_err(|_| "write IP:PORT, as 127.0.0.1:8080 or 0.0.0.0:8080, without a name".into())
}
