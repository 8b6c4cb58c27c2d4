//! Flags of `hearth advise`.

use clap::Args;
use hearth_workflow::init::Network;

use super::choice_parser;
use super::init::NETWORKS;

#[derive(Debug, Args)]
pub struct AdviseArgs {
    /// The devices, each with its parts, separated by commas in any order, such as
    /// `laptop=laptop-ddr4-3200,16 GiB,nvme-gen3,linux`. `hearth device search` finds parts. Instead of parts, write
    /// `NAME=` and the path of a profile, `measured` for this machine, or a device that ships with hearth. Or give one
    /// scenario, whose devices are used. The first device is the head.
    #[arg(required = true, value_name = "NAME=PARTS|SCENARIO")]
    pub devices: Vec<String>,
    /// Set the kind of network that connects the devices; a scenario has its own.
    #[arg(long, value_parser = choice_parser(&NETWORKS))]
    pub network: Option<Network>,
    /// Set the context length in tokens [default: 4096, or that of the scenario].
    #[arg(long, value_parser = clap::value_parser!(u32).range(2..))]
    pub context: Option<u32>,
    /// Show all models, also those that are slow or do not run.
    #[arg(long)]
    pub all: bool,
    /// Set the number of models that are simulated at the same time [default: the number of CPU cores].
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub jobs: Option<u32>,
}
