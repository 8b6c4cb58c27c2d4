//! Flags of `hearth init`.

use std::path::PathBuf;

use clap::Args;
use hearth_workflow::init::Network;

use super::choice_parser;

#[derive(Debug, Args)]
pub struct InitArgs {
    /// The scenario file to write.
    #[arg(default_value = "scenario.yaml")]
    pub output: PathBuf,
    /// Set the name of the scenario [default: the name of the file without its extension].
    #[arg(long)]
    pub name: Option<String>,
    /// Set the model: the name of a model profile that ships with hearth, such as `llama-8b`, or the path of a GGUF
    /// file or of a `model/1` document.
    #[arg(long)]
    pub model: Option<String>,
    /// Add a device: its name, and its parts, separated by commas in any order, such as
    /// `rtx-3060-12gb,ddr4-3200-dual,16 GiB,nvme-gen3,windows` (`hearth device search` finds parts). Instead of parts, give
    /// `measured` for this machine, the path of a `device/1` document, or the name of a device profile that ships with
    /// hearth, such as `d2`. The address of the device's worker may follow. Can be repeated. The first device is the head.
    #[arg(long, value_name = "NAME=PARTS[@HOST:PORT]")]
    pub device: Vec<String>,
    /// Search for workers by multicast DNS for this many seconds (5 without a value), and add them as devices.
    #[arg(id = "discover", long = "discover", value_name = "SECONDS", num_args = 0..=1, default_missing_value = "5",
        value_parser = clap::value_parser!(u64).range(1..=600))]
    pub discovery_seconds: Option<u64>,
    /// Use this device profile for discovered workers until they are measured.
    #[arg(id = "like", long = "like", value_name = "PROFILE", default_value = "d2")]
    pub profile_for_discovered: String,
    /// Set the kind of network that connects the devices.
    #[arg(long, value_parser = choice_parser(&NETWORKS))]
    pub network: Option<Network>,
    /// Set the context length in tokens, which is the capacity of the KV cache.
    #[arg(long, value_parser = clap::value_parser!(u32).range(2..))]
    pub context: Option<u32>,
    /// Ask for the values that no flag gives, even if standard input is not a terminal.
    #[arg(long)]
    pub ask: bool,
    /// Overwrite the output file if it exists.
    #[arg(long)]
    pub force: bool,
}

pub(super) const NETWORKS: [(&str, &str, Network); 2] =
    [("wifi", "Home Wi-Fi", Network::Wifi), ("cable", "Network cables and a switch", Network::Cable)];
