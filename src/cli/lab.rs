//! Flags of `hearth lab`.

use std::path::PathBuf;

use clap::{ArgGroup, Args};

use super::{PLANNING, Planning};

/// `hearth lab`.
#[derive(Debug, Args)]
#[command(group(ArgGroup::new("what").required(true).args(["scenario", "suite", "random"])))]
pub struct LabArgs {
    /// The scenario.
    pub scenario: Option<PathBuf>,
    /// A model file instead of the scenario's.
    #[arg(long)]
    pub model: Option<PathBuf>,
    /// A plan made before.
    #[arg(long, conflicts_with_all = PLANNING, requires = "scenario")]
    pub plan: Option<PathBuf>,
    /// How to plan, if there is no plan.
    #[command(flatten)]
    pub planning: Planning,
    /// Tokens to generate instead of the scenario's.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    pub tokens: Option<u32>,
    /// How often it is executed; the prediction is made once, before. A suite is gone through so often, with new
    /// predictions each time.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub repeats: u32,
    /// Where to write plan, profiles, traces and report.
    #[arg(long, requires = "scenario")]
    pub report: Option<PathBuf>,
    /// Where to put the devices' private copies of the model: a folder on the disk to be limited.
    #[arg(long)]
    pub scratch: Option<PathBuf>,
    /// Every scenario of this folder, one after another, and a report on how right the predictions are.
    #[arg(long, value_name = "FOLDER", requires = "output", conflicts_with_all = PLANNING)]
    pub suite: Option<PathBuf>,
    /// So many scenarios drawn by --seed, written to the output folder and run as a suite.
    #[arg(long, value_name = "N", requires = "output", conflicts_with_all = PLANNING, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub random: Option<u32>,
    /// What --random draws from.
    #[arg(long, default_value_t = 1, requires = "random")]
    pub seed: u64,
    /// Where a suite writes its results and its report. Results that are there already are kept: a suite that was
    /// interrupted goes on.
    #[arg(short, long, conflicts_with = "scenario")]
    pub output: Option<PathBuf>,
    /// Keep the profiles of devices in this folder, and take those that are there for the same limits.
    #[arg(long, hide = true, requires = "scenario")]
    pub profiles: Option<PathBuf>,
}
