//! Flags of `hearth init`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

/// `hearth init`.
#[derive(Debug, Args)]
pub struct InitArgs {
    /// The scenario to write.
    #[arg(default_value = "scenario.yaml")]
    pub output: PathBuf,
    /// Its name; the file's if absent.
    #[arg(long)]
    pub name: Option<String>,
    /// The model: a shipped one, as `llama-8b`, or the path of a GGUF file or of a `model/1` document.
    #[arg(long)]
    pub model: Option<String>,
    /// A device: its name, what it is like (a shipped device, the path of a `device/1` document, or `measured` for this
    /// machine) and perhaps where its worker listens. Once for each; the first is the head.
    #[arg(long, value_name = "NAME=PROFILE[@HOST:PORT]")]
    pub device: Vec<String>,
    /// Listen for workers that announce themselves, for so many seconds, and take them as devices.
    #[arg(long, value_name = "SECONDS", num_args = 0..=1, default_missing_value = "5",
        value_parser = clap::value_parser!(u64).range(1..=600))]
    pub discover: Option<u64>,
    /// What discovered devices are taken to be like, until they are measured.
    #[arg(long, value_name = "PROFILE", default_value = "d2")]
    pub like: String,
    /// How the devices are joined.
    #[arg(long, value_enum)]
    pub network: Option<Network>,
    /// Tokens that there is room for.
    #[arg(long, value_parser = clap::value_parser!(u32).range(2..))]
    pub context: Option<u32>,
    /// Ask for what is not said by flags, though nobody sits at a terminal.
    #[arg(long)]
    pub ask: bool,
    /// Replace a file that is there.
    #[arg(long)]
    pub force: bool,
}

/// How devices are connected.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Network {
    /// The Wi-Fi of a home.
    Wifi,
    /// Cables and a switch.
    Cable,
}

impl From<Network> for hearth_workflow::init::Network {
    fn from(network: Network) -> Self {
        match network {
            Network::Wifi => Self::Wifi,
            Network::Cable => Self::Cable,
        }
    }
}
