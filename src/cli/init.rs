//! Flags of `hearth init`.

use std::path::PathBuf;

use clap::Args;
use hearth_workflow::init::Network;

use super::choice;

#[derive(Debug, Args)]
pub struct InitArgs {
    /// The scenario file to write.
    #[arg(default_value = "scenario.yaml")]
    pub output: PathBuf,
    /// Set the name of the scenario [default: the name of the file].
    #[arg(long)]
    pub name: Option<String>,
    /// Set the model: a shipped one, such as `llama-8b`, or the path of a GGUF file or of a `model/1` document.
    #[arg(long)]
    pub model: Option<String>,
    /// Add a device: its name, its profile (a shipped device, the path of a `device/1` document, or `measured` for
    /// this machine), and optionally the address of its worker. The first device is the head.
    #[arg(long, value_name = "NAME=PROFILE[@HOST:PORT]")]
    pub device: Vec<String>,
    /// Add the workers that multicast DNS finds within this many seconds.
    #[arg(id = "discover", long = "discover", value_name = "SECONDS", num_args = 0..=1, default_missing_value = "5",
        value_parser = clap::value_parser!(u64).range(1..=600))]
    pub discovery_seconds: Option<u64>,
    /// Use this profile for discovered devices until they are measured.
    #[arg(id = "like", long = "like", value_name = "PROFILE", default_value = "d2")]
    pub discovered_profile: String,
    /// Set how the devices are connected.
    #[arg(long, value_parser = choice(&NETWORKS))]
    pub network: Option<Network>,
    /// Set the context length in tokens, the size of the key-value cache.
    #[arg(long, value_parser = clap::value_parser!(u32).range(2..))]
    pub context: Option<u32>,
    /// Ask for missing values, even if standard input is not a terminal.
    #[arg(long)]
    pub ask: bool,
    /// Replace an existing file.
    #[arg(long)]
    pub force: bool,
}

const NETWORKS: [(&str, &str, Network); 2] =
    [("wifi", "Home Wi-Fi", Network::Wifi), ("cable", "Network cables and a switch", Network::Cable)];
