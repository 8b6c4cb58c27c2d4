//! Flags of `hearth lab`.

use std::path::PathBuf;

use clap::{ArgGroup, Args};

use super::{PLANNING, Planning};

/// `hearth lab`.
#[derive(Debug, Args)]
#[command(group(ArgGroup::new("what").required(true).args(["scenario", "suite", "random"])))]
pub struct LabArgs {
    /// The scenario file.
    pub scenario: Option<PathBuf>,
    /// Use this model file instead of the scenario's.
    #[arg(long, value_name = "GGUF")]
    pub model: Option<PathBuf>,
    /// Use the plan in this file instead of planning.
    #[arg(long, conflicts_with_all = PLANNING, requires = "scenario")]
    pub plan: Option<PathBuf>,
    #[command(flatten)]
    pub planning: Planning,
    /// Generate this many tokens instead of the scenario's.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    pub tokens: Option<u32>,
    /// Execute the plan this many times; the prediction is made once, before. A suite is run this many times, with new
    /// predictions each time.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub repeats: u32,
    /// Write plan, profiles, traces and report to FOLDER.
    #[arg(long, value_name = "FOLDER", requires = "scenario")]
    pub report: Option<PathBuf>,
    /// Put the devices' copies of the model into FOLDER, which must be on the disk to be limited.
    #[arg(long, value_name = "FOLDER")]
    pub scratch: Option<PathBuf>,
    /// Run every scenario of FOLDER, and report how accurate the predictions are.
    #[arg(long, value_name = "FOLDER", requires = "output", conflicts_with_all = PLANNING)]
    pub suite: Option<PathBuf>,
    /// Draw this many scenarios by --seed, write them to the output folder, and run them as a suite.
    #[arg(long, value_name = "N", requires = "output", conflicts_with_all = PLANNING, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub random: Option<u32>,
    /// Set the seed of --random.
    #[arg(long, default_value_t = 1, requires = "random")]
    pub seed: u64,
    /// Write results and report of a suite to FOLDER. Existing results are kept: an interrupted suite continues.
    #[arg(short, long, value_name = "FOLDER", conflicts_with = "scenario")]
    pub output: Option<PathBuf>,
    /// Keep the profiles of devices in this folder, and reuse those with the same limits.
    #[arg(long, hide = true, requires = "scenario")]
    pub profiles: Option<PathBuf>,
}
