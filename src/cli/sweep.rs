//! Flags of `hearth sweep`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::PlanSource;

pub(super) const EXAMPLES: &str = "\
Example: hearth sweep scenarios/paper/llama-70b-on-d1-d4.yaml --vary devices.d2.memory.available=2GiB..8GiB/7 -o out.csv
Example: hearth sweep SCENARIO --vary links.default.latency=1ms..100ms/5/log --shard 1/2 -o part-1.csv
Example: hearth sweep merge part-1.csv part-2.csv -o out.csv --chart out.svg";

#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub struct SweepArgs {
    #[command(subcommand)]
    pub verb: Option<SweepCommand>,
    /// The scenario file.
    #[arg(required = true)]
    pub scenario: Option<PathBuf>,
    /// Vary a field: `PATH=A,B,C` or `PATH=FROM..TO/COUNT`, with `/log` at the end for logarithmic steps. Can be given
    /// twice, to vary two fields. PATH names a field of the scenario, or `devices.NAME.` followed by a field of the
    /// profile of a device, such as `devices.d2.memory.available`.
    #[arg(long, required = true, value_name = "PATH=VALUES", allow_hyphen_values = true)]
    pub vary: Vec<String>,
    #[command(flatten)]
    pub source: PlanSource,
    /// Generate this many tokens, instead of the number in the scenario.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    pub tokens: Option<u32>,
    /// Simulate each combination of values with this many consecutive random seeds, starting with the seed of the
    /// scenario.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    pub repeat: u32,
    /// Simulate with this many CPU threads; their number does not change the results [default: one per core].
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub jobs: Option<u32>,
    /// Compute only shard I of the N shards of the sweep: the rows I, I + N, I + 2 N and so on, counted from 1.
    #[arg(long, value_name = "I/N", conflicts_with = "chart", value_parser = parse_shard)]
    pub shard: Option<(usize, usize)>,
    /// Write the table as CSV to FILE instead of standard output.
    #[arg(short, long, value_name = "FILE")]
    pub output: Option<PathBuf>,
    /// Write a chart of the time per token over the first field to FILE (SVG), with a line for each value of the
    /// second field.
    #[arg(long, value_name = "FILE")]
    pub chart: Option<PathBuf>,
}

#[derive(Debug, Subcommand)]
pub enum SweepCommand {
    /// Merge the tables of all shards of a sweep into one table.
    #[command(after_help = "Example: hearth sweep merge part-1.csv part-2.csv -o out.csv --chart out.svg")]
    Merge(MergeArgs),
}

#[derive(Debug, Args)]
pub struct MergeArgs {
    /// The table files of the shards.
    #[arg(required = true)]
    pub tables: Vec<PathBuf>,
    /// Write the merged table to FILE instead of standard output.
    #[arg(short, long, value_name = "FILE")]
    pub output: Option<PathBuf>,
    /// Write a chart of the merged table to FILE (SVG).
    #[arg(long, value_name = "FILE")]
    pub chart: Option<PathBuf>,
}

/// Parses `I/N`: the number of a shard, counted from 1, and the number of shards.
fn parse_shard(text: &str) -> Result<(usize, usize), String> {
    let numbers = text.split_once('/').map(|(number, count)| (number.parse().ok(), count.parse().ok()));
    match numbers {
        Some((Some(number), Some(count))) if 1 <= number && number <= count => Ok((number, count)),
        _ => Err("expected I/N with 1 <= I <= N, such as 2/8".to_owned()),
    }
}
