//! Flags of `hearth device`.

use std::path::PathBuf;
use std::str::FromStr;

use clap::{Args, Subcommand};
use hearth_profiles::Bytes;

#[derive(Debug, Args)]
pub struct CatalogueArgs {
    #[command(subcommand)]
    pub command: CatalogueCommand,
}

#[derive(Debug, Subcommand)]
pub enum CatalogueCommand {
    /// List all parts of the catalogue.
    #[command(after_help = "Example: hearth device list --json")]
    List,
    /// Find parts by words of their names or by their kind (gpu, cpu, disk or os); spaces, dashes and case do not
    /// count.
    #[command(
        after_help = "Example: hearth device search rtx 3060\nExample: hearth device search laptop ddr4"
    )]
    Search(SearchArgs),
    /// Show a part, or a device profile that ships with hearth.
    #[command(after_help = "Example: hearth device show rtx-3060-12gb\nExample: hearth device show d3")]
    Show(ShowArgs),
    /// Compare two devices value by value: parts, shipped devices, or files of profiles.
    #[command(
        after_help = "Example: hearth device compare d3 'rtx-2080-ti, ddr4-2666-dual, 16 GiB, nvme-gen3, linux'\n\
                      Example: hearth device compare d1 'apple-m1, 8 GiB, apple-ssd, macos' --json"
    )]
    Compare(CompareArgs),
    /// Write the profile of a device that consists of parts of the catalogue.
    #[command(
        after_help = "Example: hearth device new --cpu ddr4-3200-dual --memory '16 GiB' --disk nvme-gen3 --os windows --gpu \
                      rtx-3060-12gb -o desktop.yaml"
    )]
    New(NewArgs),
}

#[derive(Debug, Args)]
pub struct SearchArgs {
    /// Words that the kind, the id and the name of a part must contain.
    #[arg(required = true)]
    pub words: Vec<String>,
}

#[derive(Debug, Args)]
pub struct ShowArgs {
    /// The id of a part, or the name of a shipped device.
    pub id: String,
}

#[derive(Debug, Args)]
pub struct CompareArgs {
    /// The first device: its parts, separated by commas, the name of a shipped device, or the file of a profile.
    pub first: String,
    /// The second device.
    pub second: String,
}

#[derive(Debug, Args)]
pub struct NewArgs {
    /// Set the CPU with its memory, such as `ddr4-3200-dual`, `laptop-lpddr5-6400` or `apple-m1`.
    #[arg(long)]
    pub cpu: String,
    /// Set the installed memory, such as `16 GiB`.
    #[arg(long, value_name = "SIZE", value_parser = Bytes::from_str)]
    pub memory: Bytes,
    /// Set the disk with the model, such as `nvme-gen3`.
    #[arg(long)]
    pub disk: String,
    /// Set the operating system: linux, windows, macos or android.
    #[arg(long)]
    pub os: String,
    /// Set the graphics card, such as `rtx-3060-12gb`. The GPU of an Apple chip needs no flag.
    #[arg(long)]
    pub gpu: Option<String>,
    /// Set the name of the device in the profile.
    #[arg(long, default_value = "this")]
    pub name: String,
    /// Write the profile to FILE instead of standard output.
    #[arg(short, long, value_name = "FILE")]
    pub output: Option<PathBuf>,
}
