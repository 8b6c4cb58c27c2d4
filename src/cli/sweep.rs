//! Flags of `hearth sweep`.

use std::path::PathBuf;
use std::str::FromStr;

use clap::{Args, Subcommand};

use super::PlanAndModel;

/// How a sweep is asked for.
pub(super) const EXAMPLES: &str = "\
Example: hearth sweep scenarios/paper/llama-70b-on-d1-d4.yaml --vary devices.d2.memory.available=2GiB..8GiB/7 -o out.csv
Example: hearth sweep SCENARIO --vary links.default.latency=1ms..100ms/5/log --shard 1/2 -o part-1.csv
Example: hearth sweep merge part-1.csv part-2.csv -o out.csv --chart out.svg";

/// `hearth sweep`.
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub struct SweepArgs {
    /// Put tables of shards together instead.
    #[command(subcommand)]
    pub verb: Option<SweepVerb>,
    /// The scenario.
    #[arg(required = true)]
    pub scenario: Option<PathBuf>,
    /// A field and its values: `PATH=FROM..TO/COUNT`, with `/log` at its end by equal ratios, or `PATH=A,B,C`. Once or
    /// twice. A path is that of the scenario's document, with a device's own document under its name, as
    /// `devices.d2.memory.available`.
    #[arg(long, required = true, value_name = "PATH=VALUES", allow_hyphen_values = true)]
    pub vary: Vec<String>,
    /// How it is planned: a plan given is every point's, and without one each point is planned anew.
    #[command(flatten)]
    pub planned: PlanAndModel,
    /// Tokens to generate instead of the scenario's.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    pub tokens: Option<u32>,
    /// Seeds for each point: the scenario's and those that follow it.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    pub repeat: u32,
    /// Threads; all cores if absent. Their number changes no result.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub jobs: Option<u32>,
    /// Only part I of N: rows I, I + N, I + 2 N and so on, counted from 1.
    #[arg(long, value_name = "I/N", conflicts_with = "chart")]
    pub shard: Option<Shard>,
    /// Where to write the table; standard output if absent.
    #[arg(short, long)]
    pub output: Option<PathBuf>,
    /// Where to draw time per token over the first field, a line for each value of the second.
    #[arg(long)]
    pub chart: Option<PathBuf>,
}

/// What can be done with tables of a sweep.
#[derive(Debug, Subcommand)]
pub enum SweepVerb {
    /// Put the tables of all shards together.
    #[command(after_help = "Example: hearth sweep merge part-1.csv part-2.csv -o out.csv --chart out.svg")]
    Merge(MergeArgs),
}

/// `hearth sweep merge`.
#[derive(Debug, Args)]
pub struct MergeArgs {
    /// The tables.
    #[arg(required = true)]
    pub tables: Vec<PathBuf>,
    /// Where to write the whole; standard output if absent.
    #[arg(short, long)]
    pub output: Option<PathBuf>,
    /// Where to draw it.
    #[arg(long)]
    pub chart: Option<PathBuf>,
}

/// A part of the rows of a sweep.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shard {
    /// Which, from 1.
    pub part: usize,
    /// Of how many.
    pub of: usize,
}

impl FromStr for Shard {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let numbers = text.split_once('/').map(|(part, of)| (part.parse().ok(), of.parse().ok()));
        match numbers {
            Some((Some(part), Some(of))) if 1 <= part && part <= of => Ok(Shard { part, of }),
            _ => Err("write I/N with 1 <= I <= N, as 2/8".to_owned()),
        }
    }
}
