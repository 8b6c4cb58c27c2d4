//! Flags of `hearth lab`.

use std::path::PathBuf;

use clap::{ArgGroup, Args};

use super::{PLANNING_FLAGS, PlanningArgs};

#[derive(Debug, Args)]
#[command(group(ArgGroup::new("what").required(true).args(["scenario", "suite", "random"])))]
pub struct LabArgs {
    /// The scenario file.
    pub scenario: Option<PathBuf>,
    /// Read the plan from FILE instead of planning.
    #[arg(long, value_name = "FILE", conflicts_with_all = PLANNING_FLAGS, requires = "scenario")]
    pub plan: Option<PathBuf>,
    #[command(flatten)]
    pub planning: PlanningArgs,
    /// Generate this many tokens, instead of the number in the scenario.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    pub tokens: Option<u32>,
    /// Let the tokens use the experts of this recording (`route_trace v1`), in the prediction and in the runs; only for a
    /// plan of one device.
    #[arg(long, value_name = "FILE", requires = "scenario")]
    pub routes: Option<PathBuf>,
    /// Execute the plan this many times after a single prediction. With --suite or --random, repeat the whole suite
    /// this many times, with new predictions in each repetition.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub repeats: u32,
    /// Write the plan, the device profiles, the traces and the report to FOLDER.
    #[arg(long, value_name = "FOLDER", requires = "scenario")]
    pub report: Option<PathBuf>,
    /// Store the copies of the model in FOLDER, which must be on the disk whose speed the lab limits [default: the
    /// folder of the model].
    #[arg(long, value_name = "FOLDER")]
    pub scratch: Option<PathBuf>,
    /// Run every scenario in FOLDER as a suite, and report the accuracy of the predictions.
    #[arg(long, value_name = "FOLDER", requires = "output", conflicts_with_all = PLANNING_FLAGS)]
    pub suite: Option<PathBuf>,
    /// Generate this many random scenarios, write them to the output folder, and run them as a suite.
    #[arg(id = "random", long = "random", value_name = "N", requires = "output", conflicts_with_all = PLANNING_FLAGS, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub random_scenarios: Option<u32>,
    /// Set the random seed of the scenarios that --random generates.
    #[arg(long, default_value_t = 1, requires = "random")]
    pub seed: u64,
    /// Write the results and the report of a suite to FOLDER. To continue an interrupted suite, run the same command
    /// again.
    #[arg(short, long, value_name = "FOLDER", conflicts_with = "scenario")]
    pub output: Option<PathBuf>,
    /// Cache device profiles in this folder, and reuse the cached profile of a device with the same limits.
    #[arg(long, hide = true, requires = "scenario")]
    pub profiles: Option<PathBuf>,
}
